"""Loading of corpora by name, file, folder or object: ``load_corpus("reviews.csv:text")``."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from analysis_lib.corpora.bundled import BUNDLED
from analysis_lib.corpora.corpus import Corpus, Reader, checked, is_blank, whole_units
from analysis_lib.corpora.files import file_reader
from analysis_lib.corpora.folders import folder_reader
from analysis_lib.corpora.published import PUBLISHED
from analysis_lib.corpora.splits import check_draw, sample
from analysis_lib.errors import AnalysisError, require_text

CORPORA = {**BUNDLED, **PUBLISHED}


def load_corpus(
    spec: str | Path | Iterable,
    limit: int | None = None,
    seed: int | None = 0,
    *,
    column: str | Sequence[str] | None = None,
    units: str | None = None,
) -> Corpus:
    """Load a corpus by name with an optional split, from a file or folder, or from texts in memory.

    Args:
        spec: a known name (``wikipedia``, ``stsb:dev``; ``known_corpora()`` lists them); a table
            with its column (``reviews.csv:text``), with a column of classes
            (``reviews.csv:text:label``), of pairs (``pairs.csv:sentence1,sentence2:label``), or a
            split of either (``reviews.csv:text:label:test``: of each class, a fifth is drawn for
            the test and a tenth for validation); a text file with one utterance per line
            (``lines.txt``); a folder of images or of sound files (``photos/``), or one such file;
            such a folder with the texts in a column of the table beside its files
            (``photos:text``), or a table of which one column holds the paths of images or sounds
            and the next one their texts (``pairs.csv:image,text``).

            Folders are searched recursively in the order of the paths, without hidden files; if
            every file is in a sub-folder, the sub-folders of the first level, sorted, are the
            labels. Each picture of a file with several (pages of a TIFF, frames of a GIF) is an
            item, and such a file a unit. The words spoken in sounds are read from a table beside
            them, such as the ``metadata.csv`` of ``datasets``. Tables and texts may be compressed
            (``.gz``, ``.bz2``, ``.xz``, ``.zst``).

            A table with a column ``messages`` holds conversations, and one with the columns
            ``prompt`` and ``answer`` prompts with their answers; both are named without a column.

            Or texts, pairs of texts or conversations, which are lists of messages: a list, a
            Series, or with ``column`` a table of pandas, polars, Arrow or ``datasets``, a
            dictionary of columns, or rows as dictionaries. A stream of texts or rows is read once,
            into a file that is deleted with the corpus.
        column: the column of texts in a table in memory; two make pairs.
        units: the column of a table, in a file or in memory, with the unit of each text: units are
            drawn independently (documents, for sentences), and intervals leave out whole units. A
            text whose cell is empty is a unit of its own; a note gives their number.
        limit: the number of items to keep; None keeps all.
        seed: the seed of the uniform sample, without replacement, of ``limit`` items, in the order
            of the corpus. None takes the first items and reads no further, such as in an endless
            stream, or in a corpus on the hub, whose other files are then not downloaded.

    Raises:
        AnalysisError: an unknown name (the message gives the nearest), a missing file, column or
            split, text that is not UTF-8, no item at all, a text without its class or a class
            without its text, a pair with one side empty, an image or sound without its text, or a
            text whose file is not there, images and sounds in one folder, a limit
            below 1 or a negative seed.

    >>> load_corpus("news", limit=2, seed=None).texts[1]
    'A new blaze near Goulburn, south-west of Sydney, has forced the closure of the Hume Highway.'
    """
    check_draw(limit, seed)
    if isinstance(spec, Corpus | str | Path) and column is not None:
        raise AnalysisError(
            f"column= is of a table that is at hand: name that of a file as in {spec}:{column}"
        )
    if isinstance(spec, Corpus):
        if units is not None:
            raise AnalysisError(
                f"units= is of a table, and {spec.name} is loaded: name its column to load_corpus"
            )
        return sample(spec, limit, seed)
    if isinstance(spec, str | Path):
        if units is not None:
            require_text("units", units, "the name of a column")
        reader = _reader(str(spec), units)
    else:
        # Imported here: pandas and Arrow take half a second, and names need neither.
        from analysis_lib.corpora.objects import object_reader

        reader = object_reader(spec, column, units)
    first = limit if seed is None else None
    return sample(_read(reader, first, units), limit, seed)


def known_corpora() -> dict[str, str]:
    """Descriptions of all corpora known by name, by their names with splits."""
    return {
        f"{name}:{'|'.join(known.splits)}": known.description for name, known in CORPORA.items()
    }


def data_identity(spec: str) -> str:
    """A short text that changes with the corpus behind ``spec``.

    Nothing is downloaded or unpacked.

    Raises:
        AnalysisError: there is no such corpus, file or folder, or its hub cannot be reached.
    """
    require_text("the corpus", spec, "a name of `datasets`, file.csv:COLUMN, lines.txt or a folder")
    return _reader(spec).identity()


def _reader(spec: str, units: str | None = None) -> Reader:
    """The reader of the corpus that ``spec`` names: a known one, else a folder or a file."""
    name = spec.partition(":")[0]
    if name not in CORPORA:
        reader = folder_reader(spec) if units is None else None
        return reader or file_reader(spec, CORPORA, units)
    reader = CORPORA[name].reader(spec)
    if units is not None:
        raise AnalysisError(
            f"{name} has its own units: leave units= out, which names a column of a file"
        )
    if os.path.exists(spec):
        note = (
            "note: %s is the known corpus of that name, and not what lies here under it: for that, "
            "give %s"
        )
        logging.getLogger(__name__).warning(note, spec, os.path.join(".", spec))
    return reader


def _read(reader: Reader, first: int | None, unit_column: str | None) -> Corpus:
    """The corpus of a reader, or its first items.

    Blank texts are left out. Items are read one by one up to the last that is kept; texts with
    classes are all read, since the classes are those of the whole corpus.
    """
    examples = reader.read()
    if reader.kind == "text":
        examples = checked(reader.name, examples)
    blank = 0
    labels = []
    units = []

    def items() -> Iterator:
        nonlocal blank
        for item, label, unit in examples:
            if reader.kind == "text" and is_blank(item):
                blank += 1
                continue
            labels.append(label)
            units.append(unit)
            yield item
            if len(units) == first and not isinstance(label, str):
                break

    if reader.fits_in_memory:
        kept = [*items()]
    else:
        from analysis_lib.corpora.objects import TextFile

        kept = TextFile.written(items())
    if not kept:
        fault = f"all {blank} of its entries are blank or it is empty"
        raise AnalysisError(f"{reader.name} holds no utterance: {fault}")
    indices, classes = _numbered(labels)
    return Corpus(
        reader.name,
        kept,
        blank,
        reader.kind,
        labels=indices,
        classes=classes,
        units=whole_units(reader.name, units, unit_column),
        unit_column=unit_column,
    )


def _numbered(labels: Sequence[str | int | None]) -> tuple[list[int] | None, list[str] | None]:
    """The classes of texts as indices into their sorted names; numbers are kept."""
    if None in labels:
        return None, None
    if not isinstance(labels[0], str):
        return labels, None
    classes = sorted({*labels})
    index = {name: number for number, name in enumerate(classes)}
    return [index[label] for label in labels], classes
