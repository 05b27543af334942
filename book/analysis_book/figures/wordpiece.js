// The tokenizer of BERT, as transformers' BertTokenizer reads text: cleaned, without accents, in lower case, split at
// blanks and punctuation, then into the longest pieces of the vocabulary from the left.
class WordPiece {
  static SPECIAL = /(\[(?:PAD|UNK|CLS|SEP|MASK)\])/;
  static IGNORED = /[\0\uFFFD]|(?![\t\n\r])[\p{Cc}\p{Cf}\p{Co}]/gu;
  static IDEOGRAPH =
    /[\u4E00-\u9FFF\u3400-\u4DBF\u{20000}-\u{2A6DF}\u{2A700}-\u{2B73F}\u{2B740}-\u{2B81F}\u{2B920}-\u{2CEAF}\uF900-\uFAFF\u{2F800}-\u{2FA1F}]/gu;
  // ASCII has symbols that Unicode does not count as punctuation.
  static PUNCTUATION = /([\p{P}!-/:-@[-`{-~])/u;
  static LONGEST_WORD = 100;

  constructor(vocabulary) {
    this.words = vocabulary;
    this.ids = new Map(vocabulary.map((word, id) => [word, id]));
  }

  // The ids of a text between [CLS] and [SEP], at most so many of them.
  encode(text, longest) {
    const ids = text.split(WordPiece.SPECIAL).flatMap((part, i) => (i % 2 ? [this.ids.get(part)] : this.pieces(part)));
    return [this.ids.get("[CLS]"), ...ids.slice(0, longest - 2), this.ids.get("[SEP]")];
  }

  pieces(text) {
    return this.normal(text).split(/\p{White_Space}+/u).flatMap((part) => part.split(WordPiece.PUNCTUATION))
      .filter(Boolean).flatMap((word) => this.piecesOf([...word]));
  }

  normal(text) {
    const clean = text.replace(WordPiece.IGNORED, "").replace(WordPiece.IDEOGRAPH, " $& ");
    const bare = clean.normalize("NFD").replace(/\p{Mn}/gu, "");
    // Letter by letter: a word does not change what becomes of its last sigma.
    return Array.from(bare, (letter) => letter.toLowerCase()).join("");
  }

  piecesOf(letters) {
    const unknown = [this.ids.get("[UNK]")], ids = [];
    if (letters.length > WordPiece.LONGEST_WORD) return unknown;
    for (let start = 0, end; start < letters.length; start = end) {
      const piece = () => (start ? "##" : "") + letters.slice(start, end).join("");
      for (end = letters.length; end > start && !this.ids.has(piece()); ) end--;
      if (end === start) return unknown;
      ids.push(this.ids.get(piece()));
    }
    return ids;
  }
}
