"""The corpus: texts, pairs of texts, images or sounds, in order, with or without classes."""

import hashlib
import logging
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from analysis_lib.corpora.conversations import Answered, Conversation
from analysis_lib.corpora.media import Captioned
from analysis_lib.corpora.token_types import (
    ANSWER_TYPES,
    CONVERSATION_TYPES,
    PAIR_TYPES,
    TOKEN_TYPES,
)
from analysis_lib.errors import (
    AnalysisError,
    in_order,
    near_names,
    require_choice,
    require_text,
    require_whole,
)

# Categories of invisible characters: controls, formats and separators.
_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}
# Invisible letters and marks: fillers of Hangul and Braille, variant selectors.
_FILLERS = {*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u180b\u180c\u180d\u180f"}
_FILLERS |= {chr(code) for code in range(0xFE00, 0xFE10)}
PLURAL = {"text": "texts", "image": "images", "audio": "sounds", "vectors": "texts"}
PLURAL |= {"image+text": "images with texts", "audio+text": "sounds with texts"}


class Pair(NamedTuple):
    """Two texts that a model reads as one, with its own separator between them."""

    first: str
    second: str


# An item of a corpus of texts.
TextItem = str | Pair | Conversation | Answered


class Example(NamedTuple):
    """An item of a corpus as it is read.

    Attributes:
        item: a ``TextItem``, an image or a sound.
        label: its class: a name for texts, else a number; None without classes.
        unit: its unit, such as an article; None if it is a unit of its own.
    """

    item: object
    label: str | int | None = None
    unit: str | None = None


@dataclass(frozen=True, repr=False)
class Corpus:
    """Texts, images or sounds to measure, in order.

    Attributes:
        name: the specification it was loaded from.
        items: the texts, pairs of texts, conversations or answers, none of them blank; or images
            or sounds, each read from its file by its ``load()``.
        blank: the number of blank lines or cells left out.
        kind: the kind of items: text, image, audio, image+text or audio+text, or the vectors of
            texts.
        labels: the class of each item, an index into ``classes``, if the corpus has classes.
        classes: the names of the classes, sorted.
        units: for each item, the unit that was drawn independently of the others, such as the
            article of a sentence; None if each item is one.
        unit_column: the column of a table that units were read from, if any.
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
            given = repr(str(self.items)[:20])
            raise AnalysisError(f"{self.name}: its items are {given}: give a list of them")
        self._refuse_length("labels", self.labels)
        self._refuse_length("units", self.units)
        if self.classes is not None:
            in_order(f"{self.name}: classes", self.classes, "their names in a list")
        if self.kind == "text" and isinstance(self.items, list | tuple):
            self._refuse_texts()

    def _refuse_length(self, attribute: str, values: Sequence | None) -> None:
        if values is None:
            return
        in_order(f"{self.name}: {attribute}", values, "a list, one for each item")
        if len(values) != len(self):
            counts = f"{len(self)} items and {len(values)} {attribute}"
            raise AnalysisError(f"{self.name}: there are {counts}: give one of each")

    def _refuse_texts(self) -> None:
        first = item_kind(self.items)
        for number, item in enumerate(self.items, 1):
            name = f"{self.name}: item {number}"
            kind = type(item).__name__
            if not isinstance(item, TextItem):
                raise AnalysisError(f"{name} is of type {kind}: give texts, or each pair as a Pair")
            if not isinstance(item, first):
                raise AnalysisError(f"{name} is a {kind}, and the first is not: give one kind")
            if is_blank(item):
                raise AnalysisError(f"{name} is blank: leave it out, as load_corpus does")
            refuse_half_characters(name, item)

    def __repr__(self) -> str:
        count = f"{len(self):,} {PLURAL[self.kind]}"
        if self.units is not None:
            count += f" from {len(set(self.units)):,} units"
        if self.classes:
            count += f", of the classes {', '.join(map(str, self.classes[:9]))}"
        return f"<Corpus {self.name}: {count}>"

    @property
    def texts(self) -> Sequence[str]:
        """The items of a corpus of single texts.

        Raises:
            AnalysisError: the items are images, sounds or pairs of texts.
        """
        if self.kind != "text":
            kind = PLURAL[self.kind]
            raise AnalysisError(
                f"{self.name} holds {kind} where texts are wanted: give a corpus of texts"
            )
        for item in self.items:
            if not isinstance(item, str):
                raise AnalysisError(
                    f"{self.name} holds {_NAMES[type(item)]} where single texts are wanted: name "
                    "one column of texts"
                )
        return self.items

    @property
    def token_types(self) -> tuple[str, ...]:
        """The types that tokens of this corpus can have, in the order of tables."""
        return token_types(self.items)

    @cached_property
    def sha256(self) -> str:
        """The hash of the content: of the texts, or of the files as they are stored."""
        digest = hashlib.sha256()
        separator = b""
        if self.kind != "text":
            digest.update(self.kind.encode())
        for item in self.items:
            if self.kind != "text":
                digest.update(item.digest())
                continue
            digest.update(separator + _content(item))
            separator = b"\0"
        return digest.hexdigest()

    def take(self, indices: Iterable[int]) -> "Corpus":
        """The corpus of the items at ``indices``, in that order, with their labels.

        >>> Corpus("animals", ["cat", "dog", "owl"]).take([2, 0]).items
        ['owl', 'cat']
        """
        last = len(self) - 1
        indices = in_order("the indices", indices, "a list of them")
        indices = [require_whole("an index", index, 0, last) for index in indices]

        def taken(values: Sequence | None) -> list | None:
            return None if values is None else [values[index] for index in indices]

        return replace(
            self,
            items=taken(self.items),
            labels=taken(self.labels),
            units=taken(self.units),
        )

    def groups(self, count: int) -> list[int]:
        """Group of each item, out of ``count``: a union of whole units, in blocks of neighbours.

        If items are units themselves, each block has the same share of every class, whatever the
        order of items.

        >>> Corpus("tiles", [*"abcde"], units=["one", "one", "two", "three", "three"]).groups(20)
        [0, 0, 1, 2, 2]
        >>> Corpus("calls", [*"abcdef"], labels=[0, 0, 1, 1, 1, 1]).groups(2)
        [0, 1, 0, 0, 1, 1]
        """
        count = require_whole("the number of groups", count, 1)
        if self.units is None:
            ranks = self._ranks_within_classes()
        else:
            first_seen = {unit: rank for rank, unit in enumerate(dict.fromkeys(self.units))}
            ranks = np.array([first_seen[unit] for unit in self.units])
        blocks = max(ranks.max() + 1, count)
        return (ranks * count // blocks).tolist()

    def _ranks_within_classes(self) -> np.ndarray:
        """Rank of each item by its relative position within its class."""
        labels = np.zeros(len(self)) if self.labels is None else np.asarray(self.labels)
        depths = np.empty(len(self))
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            depths[members] = (np.arange(len(members)) + 0.5) / len(members)
        return depths.argsort(kind="stable").argsort()

    def __len__(self) -> int:
        return len(self.items)


class Reader(NamedTuple):
    """A source of examples.

    Attributes:
        name: the name of the corpus, for errors and pages.
        kind: text, image, audio, image+text or audio+text.
        read: returns its examples in order.
        identity: returns a short text that changes with the corpus.
        fits_in_memory: whether all texts may be held in memory; else they are written to a file.
    """

    name: str
    kind: str
    read: Callable[[], Iterable[Example]]
    identity: Callable[[], str]
    fits_in_memory: bool = True


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus known by name.

    Attributes:
        description: a line for the list of known corpora.
        splits: the names of its splits, the default one first.
        examples: returns the examples of a split in order.
        origin: returns the source of a split: a pinned package, or a pinned revision on the hub.
        kind: text, image or audio.
    """

    description: str
    splits: Sequence[str]
    examples: Callable[[str], Iterable[Example]]
    origin: Callable[[str], str]
    kind: str = "text"

    def reader(self, spec: str) -> Reader:
        """The reader of a split, as in ``reviews:test``; without one, of the default split.

        Raises:
            AnalysisError: there is no such split.
        """
        name, colon, split = spec.partition(":")
        if colon and not split.strip():
            known = ", ".join(self.splits)
            raise AnalysisError(f"{spec} names no split: give one of {known}, or {name}")
        split = split or self.splits[0]
        if split not in self.splits:
            raise AnalysisError(f"{name} has no split {split}: {near_names(split, self.splits)}")
        return Reader(
            spec,
            self.kind,
            lambda: self.examples(split),
            lambda: f"{spec} from {self.origin(split)}",
        )


# Names of the kinds of texts in the plural.
_NAMES = {Pair: "pairs of texts", Conversation: "conversations", Answered: "prompts with answers"}
_TOKEN_TYPES = {Captioned: PAIR_TYPES, Conversation: CONVERSATION_TYPES, Answered: ANSWER_TYPES}


def token_types(items: Sequence) -> tuple[str, ...]:
    """The types that tokens of some items can have, in the order of tables."""
    kind = type(items[0]) if len(items) else str
    return _TOKEN_TYPES.get(kind, TOKEN_TYPES)


def item_kind(items: Sequence) -> type:
    """The class of the items of a corpus: ``str`` unless it is another of ``TextItem``."""
    kind = type(items[0]) if len(items) else str
    return kind if kind in _NAMES else str


def _content(item: TextItem) -> bytes:
    """What the hash of a corpus is made of."""
    match item:
        case str():
            return item.encode()
        case Pair():
            return "\1".join(item).encode()
        case Conversation():
            return b"\2" + item.stored.encode()
        case Answered():
            return b"\3" + repr(astuple(item)).encode()


def refuse_half_characters(name: str, text: TextItem) -> None:
    """Raise an AnalysisError for half of a surrogate pair, as in broken JSON."""
    text = _joined(text)
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):x}"
        raise AnalysisError(f"{name} holds half of a character ({code}): mend it") from error


def is_blank(text: TextItem) -> bool:
    """Whether a text, or all texts of an item, are invisible: white space, zero-width characters.

    >>> is_blank("\\u200b \\ufeff"), is_blank("a\\u200b")
    (True, False)
    """
    return all(map(_is_invisible, _joined(text)))


def _is_invisible(letter: str) -> bool:
    category = unicodedata.category(letter)
    return letter.isspace() or category in _INVISIBLE or letter in _FILLERS


def _joined(text: TextItem) -> str:
    # Joining would take seconds for a million texts, since it goes letter by letter.
    if isinstance(text, str):
        return text
    texts = text if isinstance(text, Pair) else text.texts
    return "".join(texts)


def checked(name: str, examples: Iterable[Example]) -> Iterator[Example]:
    """The examples of a corpus of texts, each checked as it is read.

    Raises:
        AnalysisError: half of a surrogate pair; a pair with one side empty; in a corpus with
            classes, a class without a text or a text without a class.
    """
    for number, example in enumerate(examples, 1):
        text = example.item
        label = example.label
        refuse_half_characters(f"{name}: item {number}", text)
        if label is not None and is_blank(text):
            raise AnalysisError(f"{name}: example {number} has no text: mend or remove it")
        if label is not None and not label.strip():
            raise AnalysisError(f"{name}: example {number} has no class: label or remove it")
        if isinstance(text, Pair) and is_blank(text.first) != is_blank(text.second):
            raise AnalysisError(f"{name}: one side of pair {number} is empty: mend or remove it")
        yield example


def whole_units(
    name: str, units: Sequence[str | None], column: str | None = None
) -> list[str] | None:
    """The unit of each item, where a missing one is a unit of its own; None if all are missing.

    Args:
        name: the name of the corpus, for errors and notes.
        column: the column that units were read from.

    Raises:
        AnalysisError: a named column holds no unit at all.

    >>> whole_units("calls", ["a", None, "a"])[::2], whole_units("calls", [None, None])
    (['a', 'a'], None)
    """
    known = [unit if unit is not None and unit.strip() else None for unit in units]
    missing = known.count(None)
    if missing == len(known):
        if column is not None and known:
            raise AnalysisError(
                f"{name}: the column {column} is empty: name one that says what each text is a "
                "part of"
            )
        return None
    if missing and column is not None:
        note = "note: %d of %d texts of %s have no %s, and are units of their own"
        logging.getLogger(__name__).warning(note, missing, len(known), name, column)
    # No name in a text file begins with a zero byte.
    return [f"\0{number}" if unit is None else unit for number, unit in enumerate(known)]
