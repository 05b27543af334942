"""What a corpus is: texts, pairs of texts, images or sounds in order, with their classes where they have any."""

import hashlib
import logging
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from analysis_lib.errors import AnalysisError, in_order, require_choice, require_text, require_whole

# Categories of characters that show nothing: controls, formats and separators. Half of a character is none of them.
_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}
# Letters and marks that show nothing, either: fillers of Hangul and Braille, and selectors of variants.
_FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u180b\u180c\u180d\u180f") | frozenset(
    map(chr, range(0xFE00, 0xFE10))
)
PLURAL = {"text": "texts", "image": "images", "audio": "sounds", "vectors": "texts"}


class Pair(NamedTuple):
    """Two texts that a model reads as one, with its own separator between them."""

    first: str
    second: str


class Labelled(NamedTuple):
    """A text, or a pair of texts, its class, and the unit that it is a part of, where it has one."""

    text: str | Pair
    label: str
    unit: str | None = None


class Example(NamedTuple):
    """A text, an image or a sound with its label, and the unit that it is a part of, where it has these."""

    item: object
    label: int | None = None
    unit: str | None = None


@dataclass(frozen=True, repr=False)
class Corpus:
    """Texts, images or sounds to measure, in order.

    Attributes:
        name: the specification it was loaded from.
        items: the texts or pairs of texts, none of them blank; or images or sounds, each read from its file by its
            ``load()``.
        blank: how many blank lines or cells were left out.
        kind: what the items are: text, image or audio, or the vectors of texts.
        labels: the class of each item, an index into ``classes``, where the corpus has classes.
        classes: their names, sorted.
        units: for each item, the unit that was drawn independently of the others, such as the article that a sentence
            is from, or the picture that a tile is cut from; None where each item is one.
        unit_column: the column of a table that the units were read from, where they were.
    """

    name: str
    items: Sequence
    blank: int = 0
    kind: str = "text"
    labels: Sequence[int] | None = None
    classes: Sequence[str] | None = None
    units: Sequence[str] | None = None
    unit_column: str | None = None

    def __post_init__(self) -> None:
        require_text("the name of a corpus", self.name, "a short text")
        require_choice("kind", self.kind, [*PLURAL])
        object.__setattr__(self, "blank", require_whole("blank", self.blank))
        if isinstance(self.items, str | bytes) or not isinstance(self.items, Sequence):
            raise AnalysisError(f"{self.name}: its items are {str(self.items)[:20]!r}: give a list of them")
        for name in ("labels", "units"):
            each = getattr(self, name)
            if each is not None:
                in_order(f"{self.name}: {name}", each, "a list, one for each item")
            if each is not None and len(each) != len(self.items):
                raise AnalysisError(f"{self.name} has {len(self.items)} items and {len(each)} {name}: give one of each")
        if self.classes is not None:
            in_order(f"{self.name}: classes", self.classes, "their names in a list")
        if self.kind == "text" and isinstance(self.items, list | tuple):
            for number, item in enumerate(self.items, 1):
                place = f"{self.name}: item {number}"
                if not isinstance(item, str | Pair):
                    raise AnalysisError(f"{place} is of type {type(item).__name__}: give texts, or each pair as a Pair")
                if isinstance(item, Pair) != isinstance(self.items[0], Pair):
                    raise AnalysisError(f"{place} is a {type(item).__name__}, and the first is not: give one kind")
                if is_blank(item):
                    raise AnalysisError(f"{place} is blank: leave it out, as load_corpus does")
                encodable(place, _whole(item))

    def __repr__(self) -> str:
        units = "" if self.units is None else f" from {len(set(self.units)):,} units"
        classes = f", of the classes {', '.join(map(str, self.classes[:9]))}" if self.classes else ""
        return f"<Corpus {self.name}: {len(self):,} {PLURAL[self.kind]}{units}{classes}>"

    @property
    def texts(self) -> Sequence[str]:
        """The items of a corpus of single texts.

        Raises:
            AnalysisError: the items are images, sounds or pairs of texts.
        """
        if self.kind != "text":
            raise AnalysisError(f"{self.name} holds {PLURAL[self.kind]} where texts are wanted: give a corpus of texts")
        if any(isinstance(item, Pair) for item in self.items):
            raise AnalysisError(f"{self.name} holds pairs of texts where single ones are wanted: name one column")
        return self.items

    @cached_property
    def sha256(self) -> str:
        """The hash of the items' content: of the texts, or of the files as they are stored."""
        text = self.kind == "text"
        digest = hashlib.sha256(b"" if text else self.kind.encode())
        for number, item in enumerate(self.items):
            if text:
                joined = item if isinstance(item, str) else "\1".join(item)
                digest.update(b"\0" * (number > 0) + joined.encode())
            else:
                digest.update(item.digest())
        return digest.hexdigest()

    def take(self, indices: Iterable[int]) -> "Corpus":
        """The corpus of the items at ``indices``, in that order, with their labels.

        >>> Corpus("animals", ["cat", "dog", "owl"], labels=[0, 0, 1], classes=["mammal", "bird"]).take([2, 0]).items
        ['owl', 'cat']
        """
        last = len(self) - 1
        indices = [require_whole("a place", i, 0, last) for i in in_order("the places", indices, "a list of them")]
        kept = {name: getattr(self, name) for name in ("items", "labels", "units")}
        return replace(
            self, **{name: whole if whole is None else [whole[i] for i in indices] for name, whole in kept.items()}
        )

    def groups(self, count: int) -> list[int]:
        """The group of each item, of ``count``: a union of whole units, in blocks of neighbours.

        Where items are units themselves, each block has the same share of every class, whatever their order.

        >>> Corpus("tiles", [*"abcde"], units=["one", "one", "two", "three", "three"]).groups(20)
        [0, 0, 1, 2, 2]
        >>> Corpus("calls", [*"abcdef"], labels=[0, 0, 1, 1, 1, 1], classes=["cat", "dog"]).groups(2)
        [0, 1, 0, 0, 1, 1]
        """
        count = require_whole("the number of groups", count, 1)
        if self.units is None:
            labels, depths = np.asarray([0] * len(self) if self.labels is None else self.labels), np.empty(len(self))
            for label in np.unique(labels):
                members = np.flatnonzero(labels == label)
                depths[members] = (np.arange(len(members)) + 0.5) / len(members)
            places = depths.argsort(kind="stable").argsort()
        else:
            known = {unit: place for place, unit in enumerate(dict.fromkeys(self.units))}
            places = np.array([known[unit] for unit in self.units])
        return (places * count // max(places.max() + 1, count)).tolist()

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Source:
    """A corpus known by name.

    Attributes:
        description: a line for the list of known corpora.
        splits: how each split is read, the default one first. A split of texts is a list of texts, pairs,
            :class:`Labelled` or :class:`Example`; one of images or sounds yields an :class:`Example` of each.
        origin: what a split's items come from: a pinned package, or a pinned revision on the hub.
        kind: what the items are: text, image or audio.
    """

    description: str
    splits: dict[str, Callable[[], Iterable]]
    origin: Callable[[str], str]
    kind: str = "text"


class Located(NamedTuple):
    """What a specification names: the kind of its items, how they are read, and what identifies them."""

    kind: str
    read: Callable[[], Iterable]
    identity: Callable[[], str]


def encodable(place: str, text: str) -> str:
    """The text; an AnalysisError if it holds half of a character, as broken JSON may."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise AnalysisError(
                f"{place} holds half of a character (\\u{ord(text[error.start]):x}): mend it"
            ) from error
    return text


def is_blank(text: str | Pair) -> bool:
    """Whether a text, or both texts of a pair, hold nothing that can be seen: white space, or zero-width characters.

    >>> is_blank("\\u200b \\ufeff"), is_blank("a\\u200b")
    (True, False)
    """
    return all(map(_is_invisible, _whole(text)))


def _is_invisible(letter: str) -> bool:
    category = unicodedata.category(letter)
    return letter.isspace() or category in _INVISIBLE or letter in _FILLERS


def _whole(text: str | Pair) -> str:
    # A string is joined letter by letter: of a million texts, that takes seconds.
    return text if isinstance(text, str) else "".join(text)


def whole_units(name: str, units: Sequence[str | None], column: str | None = None) -> list[str] | None:
    """The unit of each item, where one that is not known makes a unit of its own; None if none is known.

    Args:
        name: of the corpus, for errors and notes.
        column: where the units were read from.

    Raises:
        AnalysisError: a column that was named holds no unit at all.

    >>> whole_units("calls", ["a", None, "a"])[::2], whole_units("calls", [None, None])
    (['a', 'a'], None)
    """
    known = [unit if unit is not None and unit.strip() else None for unit in units]
    missing = known.count(None)
    if missing == len(known):
        if column is not None and known:
            raise AnalysisError(f"{name}: the column {column} is empty: name one that says what each text is a part of")
        return None
    if missing and column is not None:
        note = "note: %d of %d texts of %s have no %s, and are units of their own"
        logging.getLogger(__name__).warning(note, missing, len(known), name, column)
    # No name in a text file begins with a zero byte.
    return [f"\0{place}" if unit is None else unit for place, unit in enumerate(known)]


def refuse_gaps(name: str, rows: Sequence[Labelled]) -> None:
    """Raise an AnalysisError if a row lacks its text or class: in labelled data, a gap is a mistake."""
    for number, row in enumerate(rows, 1):
        if is_blank(row.text):
            raise AnalysisError(f"{name}: example {number} has no text: mend or remove it")
        if not row.label.strip():
            raise AnalysisError(f"{name}: example {number} has no class: label or remove it")
    refuse_half_pairs(name, [row.text for row in rows])


def refuse_half_pairs(name: str, texts: Sequence[str | Pair]) -> None:
    """Raise an AnalysisError if one text of a pair is blank and the other is not."""
    for number, text in enumerate(texts, 1):
        if isinstance(text, Pair) and is_blank(text.first) != is_blank(text.second):
            raise AnalysisError(f"{name}: one side of pair {number} is empty: mend or remove it")
