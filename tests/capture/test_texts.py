"""Texts as models read them: what transformers documents, ``model(**tokenizer(text))``, is what is
measured.
"""

import numpy as np
import pytest
import tiny
import torch
import transformers
from passes import captured, first_batch
from reference import Reference, assert_agree
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from analysis_lib import AnalysisError, Corpus, load_model, measure
from analysis_lib.corpora import Pair
from analysis_lib.models import TOKEN_TYPES

FLOAT64 = (1e-9, 1e-11)
PAIRS = [
    Pair("keys ask", "queries answer"),
    Pair("Attention, attention!", "Hi"),
    Pair(tiny.TEXTS[4], tiny.TEXTS[6]),
]
# With two segments, with one; with a separator of one token and of two; bytes, characters, and
# words of characters.
READ_PAIRS = (
    "bert",
    "electra-projected",
    "deberta-v2-own",
    "distilbert",
    "roberta",
    "albert",
    "llama",
    "t5",
)
READ_PAIRS += ("byt5", "canine", "character_bert", "self_attention")


def saved(folder, name: str, tokenizer: transformers.PreTrainedTokenizerFast, **changes):
    """A tiny model with another tokenizer."""
    model, _ = tiny.build(name, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def agree(folder, items: list, **options) -> None:
    tables = measure(
        load_model(folder, dtype="float64"), Corpus("texts", items), progress=False, **options
    )
    assert_agree(tables, Reference(folder, items, **options).tables(), FLOAT64)


def types(folder, *texts: str) -> list[str]:
    """The types of the tokens of each text."""
    loaded = load_model(folder)
    found = [first_batch(loaded, (text,)).tokens.types[0].tolist() for text in texts]
    return [" ".join(TOKEN_TYPES[i] for i in each) for each in found]


# --- Pairs
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ_PAIRS)
def test_pairs(name, tiny_folder):
    agree(tiny_folder(name), PAIRS)


def test_the_second_text_of_a_pair_has_the_second_segment(tiny_folder):
    """In the embeddings, so that every layer differs from the one that all of the first segment
    would give.
    """
    folder = tiny_folder("bert")
    loaded = load_model(folder)
    model, tokenizer = (
        auto.from_pretrained(folder)
        for auto in (transformers.AutoModel, transformers.AutoTokenizer)
    )
    layers = captured(loaded, first_batch(loaded, tuple(PAIRS[:1])))
    with torch.no_grad():
        inputs = tokenizer(*PAIRS[0], return_tensors="pt")
        wanted = model(**inputs, output_hidden_states=True).hidden_states
        alone = model(inputs["input_ids"], output_hidden_states=True).hidden_states
    for layer, expected, other in zip(layers, wanted, alone, strict=True):
        found = layer.spaces["hidden"].values[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (found - other).abs().max() > 0.1


def test_a_long_pair_is_cut_as_its_tokenizer_cuts_it(tmp_path):
    folder = tiny.save(tmp_path / "bert", "bert", max_position_embeddings=16)
    pairs = [
        Pair("keys ask", "queries answer " * 9),
        Pair("keys ask " * 9, "queries answer"),
        Pair(*PAIRS[2]),
    ]
    loaded = load_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for pair in pairs:
        inputs = first_batch(loaded, (pair,)).inputs
        wanted = tokenizer(*pair, truncation=True, max_length=16, return_tensors="pt")
        assert {name: inputs[name].tolist() for name in wanted} == {
            n: v.tolist() for n, v in wanted.items()
        }


@pytest.mark.parametrize("long_texts", ["cut", "window"])
def test_windows_of_a_text_are_framed_as_it_is(long_texts, tmp_path):
    folder = tiny.save(tmp_path / "bert", "bert", max_position_embeddings=12)
    texts = ["Hi", " ".join(tiny.TEXTS[:3])]
    tables = measure(
        load_model(folder, dtype="float64"), texts, long_texts=long_texts, progress=False
    )
    assert_agree(
        tables, Reference(folder, texts, long_texts=long_texts, max_length=12).tables(), FLOAT64
    )


# --- Tokenizers
# -------------------------------------------------------------------------------------


def words(vocabulary: str, unknown: str | None = "[UNK]", **special: str) -> Tokenizer:
    pieces = [*dict.fromkeys([*special.values(), *vocabulary.split()])]
    backend = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=unknown)
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated") if " " not in vocabulary else None
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
BOTH = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"
BEFORE = "[CLS] $A", "[CLS] $A $B"
# That know no letter a, or drop it; that put one token before a text alone; whose unknown token is
# that one.
STRANGE = {
    "dna": (words("G T C GT TC", **BERT), BERT, BOTH, ["G T C", "GT TC G", "C A"]),
    "digits": (words("1 2 3", **BERT), BERT, BEFORE, ["1 2 3 3", "2", "3 1 7"]),
    "chinese": (words("注 意 力", **BERT), BERT, BOTH, ["注 意 力", "力 注", "意"]),
    "unknown is class": (
        words("b c", "[CLS]", **{**BERT, "unk": "[CLS]"}),
        {**BERT, "unk": "[CLS]"},
        BOTH,
        ["b c", "a b a", "c"],
    ),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tokenizers_that_know_no_latin_letters(kind, tmp_path):
    backend, special, templates, texts = STRANGE[kind]
    agree(saved(tmp_path / "model", "bert", tiny.framed(backend, special, *templates)), texts)


def test_a_normaliser_that_drops_vowels(tmp_path):
    backend = words("b c d bc", **BERT)
    backend.normalizer = normalizers.Sequence([normalizers.Replace(vowel, "") for vowel in "aeiou"])
    folder = saved(tmp_path / "model", "bert", tiny.framed(backend, BERT, *BOTH))
    agree(folder, ["b ac d", "bec", "c"])
    # A text of vowels has no token.
    tables = measure(load_model(folder), ["b c", "ae", "d"], "anisotropy", progress=False)
    assert tables.report.empty == 1
    assert tables.report.utterances == 2


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_a_tokenizer_without_an_unknown_token_is_one_line(model, tmp_path):
    backend = Tokenizer(model({"[PAD]": 0, "keys": 1, "ask": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = saved(
        tmp_path / "model", "bert", tiny.framed(backend, {"pad": "[PAD]"}, "$A", "$A $B")
    )
    with pytest.raises(
        AnalysisError, match=r"its tokenizer cannot read these texts .*give text that it knows"
    ):
        measure(load_model(folder), ["keys ask", "keys answer"], "anisotropy", progress=False)


def test_texts_of_no_token_are_left_out(tiny_folder):
    texts = ["Hi", "\ufffd", "Attention, attention!", "\ufffd\ufffd"]
    tables = measure(load_model(tiny_folder("bert"), dtype="float64"), texts, progress=False)
    assert_agree(tables, Reference(tiny_folder("bert"), [texts[0], texts[2]]).tables(), FLOAT64)
    assert tables.report.empty == 2


# --- Types
# ------------------------------------------------------------------------------------------


def test_special_tokens_that_are_spelt_out_are_tokens_of_the_text(tiny_folder):
    folder = tiny_folder("bert")
    assert types(folder, "keys [SEP] ask [CLS].") == ["cls other other other other punct sep"]
    agree(folder, ["keys [SEP] ask [CLS].", "Hi"])
    tables = measure(
        load_model(folder), ["keys [SEP] ask [CLS].", "Hi"], "anisotropy", progress=False
    )
    assert (tables.report.spelt, tables.report.unknown, tables.report.doubled) == (2, 0, 0)
    # Without special tokens, these stay.
    tables = measure(
        load_model(folder), ["keys [SEP] ask"], "anisotropy", special_tokens=False, progress=False
    )
    assert tables.report.counted == 3


def test_a_second_beginning_is_counted(tiny_folder):
    tables = measure(
        load_model(tiny_folder("llama")), ["<s>keys ask", "keys"], "anisotropy", progress=False
    )
    assert (tables.report.doubled, tables.report.spelt) == (1, 1)


def test_the_first_token_is_first_where_no_class_token_stands(tmp_path):
    """Whatever tokens a tokenizer merely has."""
    has_cls = tiny.tokenizer("gpt2")
    has_cls.add_special_tokens({"cls_token": "[CLS]"})
    assert types(saved(tmp_path / "gpt2", "gpt2", has_cls), "ab,c") == ["first other punct other"]
    is_end = tiny.tokenizer("gpt2")
    is_end.cls_token = is_end.eos_token
    assert types(saved(tmp_path / "qwen2", "qwen2", is_end), "ab,c") == ["first other punct other"]
    t5 = tiny.tokenizer("t5")
    t5.add_special_tokens({"cls_token": "<cls>"})
    assert types(saved(tmp_path / "t5", "t5", t5), "ab,c") == ["first other other punct other sep"]


def test_one_token_at_both_ends_is_told_by_its_place(tmp_path):
    backend = words("b c", "E", end="E")
    folder = saved(
        tmp_path / "gpt2",
        "gpt2",
        tiny.framed(backend, dict.fromkeys(("bos", "eos"), "E"), "E $A E", "E $A E $B E"),
    )
    assert types(folder, "b c") == ["cls other other sep"]
    agree(folder, ["b c", "c c b"])


def test_registers_have_a_type(tiny_folder):
    loaded = load_model(tiny_folder("dinov2-registers"))
    layers = captured(loaded, first_batch(loaded, tiny.items("dinov2-registers")))
    names = [TOKEN_TYPES[i] for i in layers[0].tokens.types[0].tolist()]
    assert names == ["cls", *["register"] * 4, *["other"] * 16]


# --- Lengths
# ----------------------------------------------------------------------------------------


def test_texts_on_both_sides_of_a_boundary_of_longrope_are_not_mixed(tmp_path):
    """Beyond 12 tokens, all of a batch would be rotated by the angles for long texts."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 12,
    }
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    folder = tiny.save(tmp_path / "llama", "llama", rope_parameters=rope)
    texts = ["a" * length for length in (8, 9, 10, 11, 12, 13, 14)]
    tables = measure(
        load_model(folder, dtype="float64"), texts, tokens_per_batch=10**6, progress=False
    )
    assert_agree(tables, Reference(folder, texts).tables(), FLOAT64)
    lengths = {
        len(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]) for text in texts
    }
    assert min(lengths) <= 12 < max(lengths)


# --- What does not fit
# ------------------------------------------------------------------------------


def test_padding_beyond_the_embeddings_is_masked(tmp_path):
    """As after ``add_special_tokens`` without ``resize_token_embeddings``."""
    tokenizer = tiny.tokenizer("gpt2")
    model, _ = tiny.build("gpt2")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.pad_token_id == model.config.vocab_size
    tables = measure(
        load_model(tmp_path, dtype="float64"),
        list(tiny.TEXTS),
        tokens_per_batch=10**6,
        progress=False,
    )
    assert_agree(tables, Reference(tmp_path, list(tiny.TEXTS)).tables(), FLOAT64)


def test_a_tokenizer_that_was_made_up_is_refused(tmp_path):
    """From a vocabulary of another kind of tokenizer, transformers makes one that knows special
    tokens alone.
    """
    model, tokenizer = tiny.build("albert")
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(tokenizer.get_vocab()), encoding="utf-8")
    with pytest.raises(
        AnalysisError, match=r"knows \d tokens and it embeds \d+: give the tokenizer that belongs"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("length", "said"), [(2, "reads 2 tokens at once"), ("abc", "is 'abc'"), (0, "is 0")]
)
def test_a_senseless_length_is_one_line(length, said, tiny_folder, tmp_path):
    loaded = load_model(tiny.save(tmp_path / "bert", "bert"))
    loaded.processor.model_max_length = length
    with pytest.raises(AnalysisError, match=said):
        measure(loaded, ["Hi", "keys"], "anisotropy", progress=False)


def test_what_is_read_of_tokens_is_padded_with_zero(tiny_folder):
    """Ids with the padding token; types with 0."""
    batch = first_batch(load_model(tiny_folder("bert")), tuple(PAIRS))
    padding = ~batch.tokens.mask
    assert padding.any()
    assert (batch.inputs["token_type_ids"][padding] == 0).all()
    assert np.unique(batch.inputs["token_type_ids"]).tolist() == [0, 1]
