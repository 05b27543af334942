"""Corpora by name, file or folder: ``load_corpus("wikipedia")``, ``load_corpus("reviews.csv:text")``."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from analysis_lib.corpora import files, folders
from analysis_lib.corpora.bundled import BUNDLED
from analysis_lib.corpora.corpus import (
    Corpus,
    Example,
    Labelled,
    Located,
    Pair,
    is_blank,
    refuse_gaps,
    refuse_half_pairs,
    whole_units,
)
from analysis_lib.corpora.published import PUBLISHED
from analysis_lib.corpora.splits import check_draw, sample
from analysis_lib.errors import AnalysisError, near_names, require_text

CORPORA = {**BUNDLED, **PUBLISHED}
# Of a corpus of more texts, few are in memory at a time, and workers read theirs from a file.
MOST_HELD = 100_000


def load_corpus(
    spec: str | Path | Iterable,
    limit: int | None = None,
    seed: int | None = 0,
    *,
    column: str | Sequence[str] | None = None,
    units: str | None = None,
) -> Corpus:
    """A corpus by name with an optional split, from a file or folder, or of texts that are at hand.

    Args:
        spec: a known name (``wikipedia``, ``stsb:dev``, ``digits``; ``known_corpora()`` lists them), a CSV
            file with its column (``reviews.csv:text``), with a column of classes (``reviews.csv:text:label``),
            of pairs (``pairs.csv:sentence1,sentence2:label``), or a part of either (``reviews.csv:text:label:test``:
            of each class a fifth is drawn for the test and a tenth for validation), a text file with one utterance
            per line (``lines.txt``), a folder of images or of sound files (``photos/``), or one such file.
            Folders are searched to the bottom in the order of the paths, without hidden files; where
            every file lies in a sub-folder, the sub-folders of the first level, sorted, are the labels. Each picture
            of a file that holds several (pages of a TIFF, frames of a GIF) is an item, and such a file a unit. What is
            said in sounds is read from a table beside them, such as the ``metadata.csv`` of ``datasets``. Tables and
            texts may be compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``).
            Or texts or pairs of texts: a list, a Series, or with ``column`` a table: of pandas, polars, Arrow or
            ``datasets``, a dictionary of columns, or rows as dictionaries. What is not held in memory but gives texts
            or rows one by one is read once, into a file that goes with the corpus.
        column: of a table that is at hand, the texts; two make pairs.
        units: of a table in a file or at hand, the column of what was drawn independently, of which each text is a part
            (the document of a sentence): intervals leave out whole units. A text whose cell is empty is a unit of
            its own; how many are is said in a note.
        limit: how many items to keep; None keeps all.
        seed: with which the ``limit`` items are drawn: a uniform sample without replacement, in the order of the
            corpus. None takes the first ones, and reads no further: of an endless stream, or of a corpus on the hub
            whose other files need not be downloaded then.

    Raises:
        AnalysisError: an unknown name (with the nearest), a missing file, column or split, text that is
            not UTF-8, no item at all, a text without its class or a class without its text, a pair with one side
            empty, images and sounds in one folder, a limit below 1 or a negative seed.

    >>> load_corpus("news", limit=2, seed=None).texts[1]
    'A new blaze near Goulburn, south-west of Sydney, has forced the closure of the Hume Highway.'
    """
    check_draw(limit, seed)
    if isinstance(spec, Corpus | str | Path) and column is not None:
        raise AnalysisError(f"column= is of a table that is at hand: name that of a file as in {spec}:{column}")
    if isinstance(spec, Corpus):
        if units is not None:
            raise AnalysisError(f"units= is of a table, and {spec.name} is loaded: name its column to load_corpus")
        return sample(spec, limit, seed)
    if not isinstance(spec, str | Path):
        return sample(_at_hand(spec, column, units, limit if seed is None else None), limit, seed)
    if units is not None:
        require_text("units", units, "the name of a column")
    kind, read, _ = _located(spec := str(spec), units)
    if kind == "text":
        rows = list(read())
        make = _labelled if rows and isinstance(rows[0], Labelled) else _texts
        return sample(make(spec, rows, units), limit, seed)
    # Of the first items, hub files that only hold others are not even downloaded.
    examples = [Example(*row) for row in (read() if seed is not None else islice(read(), limit))]
    return sample(_corpus(spec, examples, None, kind=kind), limit, seed)


def _at_hand(data: Iterable, column: str | Sequence[str] | None, units: str | None, first: int | None) -> Corpus:
    # Imported here: pandas and Arrow take half a second, and names need neither.
    from analysis_lib.corpora.objects import TextFile, text_items

    name, examples, held = text_items(data, column, units)
    if held:
        return _texts(name, [*examples], units)
    left_out, of = [], []  # A mark for each blank one, the unit of each other.

    def texts() -> Iterator[str | Pair]:
        for example in examples:
            if is_blank(example.item):
                left_out.append(1)
            else:
                of.append(example.unit)
                yield example.item

    found = TextFile.written(islice(texts(), first))
    if not len(found):
        raise AnalysisError(f"the {name} gives no utterance: all {len(left_out)} of its items are blank or it is empty")
    of = whole_units(name, of, units)
    return Corpus(name, found, blank=len(left_out), units=of, unit_column=units)


def _corpus(spec: str, examples: Sequence[Example], unit_column: str | None, **known) -> Corpus:
    items, labels, units = map(list, zip(*examples, strict=True))
    labels = None if None in labels else labels
    units = whole_units(spec, units, unit_column)
    return Corpus(spec, items, labels=labels, units=units, unit_column=unit_column, **known)


def _texts(spec: str, rows: Sequence, unit_column: str | None) -> Corpus:
    rows = [row if isinstance(row, Example) else Example(row) for row in rows]
    refuse_half_pairs(spec, [row.item for row in rows])
    texts = [row for row in rows if not is_blank(row.item)]
    if not texts:
        raise AnalysisError(f"{spec} holds no utterance: all {len(rows)} of its entries are blank or it is empty")
    found = _corpus(spec, texts, unit_column, blank=len(rows) - len(texts))
    if len(texts) <= MOST_HELD or any(isinstance(text, Pair) for text in found.items):
        return found
    from analysis_lib.corpora.objects import TextFile

    return replace(found, items=TextFile.kept(found.items, found.sha256))


def _labelled(spec: str, rows: Sequence[Labelled], unit_column: str | None) -> Corpus:
    refuse_gaps(spec, rows)
    classes = sorted({row.label for row in rows})
    numbered = [row._replace(label=classes.index(row.label)) for row in rows]
    return _corpus(spec, numbered, unit_column, classes=classes)


def known_corpora() -> dict[str, str]:
    """Name and splits of every corpus known by name, with a line that describes it."""
    return {f"{name}:{'|'.join(source.splits)}": source.description for name, source in CORPORA.items()}


def data_identity(spec: str) -> str:
    """A short text that changes when the corpus behind ``spec`` changes; neither downloads nor unpacks it.

    Raises:
        AnalysisError: ``spec`` is neither a known name nor a file or folder, or is on a hub that cannot be reached.
    """
    require_text("the corpus", spec, "a name of `datasets`, file.csv:COLUMN, lines.txt or a folder")
    return _located(spec).identity()


def _located(spec: str, units: str | None = None) -> Located:
    name, names_split, split = spec.partition(":")
    if name in CORPORA and names_split and not split.strip():
        raise AnalysisError(f"{spec} names no split: give one of {', '.join(CORPORA[name].splits)}, or {name}")
    if name not in CORPORA and (units is not None or not (folder := folders.located(spec))):
        return files.located(spec, CORPORA, units)
    if units is not None:
        raise AnalysisError(f"{name} has its own units: leave units= out, which names a column of a file")
    if name not in CORPORA:
        return folder
    if os.path.exists(spec):
        said = "note: %s is the known corpus of that name, and not what lies here under it: for that, give %s"
        logging.getLogger(__name__).warning(said, spec, os.path.join(".", spec))
    source = CORPORA[name]
    split = split or next(iter(source.splits))
    if split not in source.splits:
        raise AnalysisError(f"{name} has no split {split}: {near_names(split, source.splits)}")
    return Located(source.kind, source.splits[split], lambda: f"{spec} from {source.origin(split)}")
