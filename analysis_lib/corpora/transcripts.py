"""Texts of the sounds of a folder, from tables beside them."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from analysis_lib.corpora.tables import Table, open_table
from analysis_lib.errors import AnalysisError

# Names of columns in tables of sounds, in lower case: for file names, and for words.
FILES = ["file_name", "audio_file_name", "filename", "file", "path"]
FILES += ["audio", "audio_path", "audio_filepath", "wav", "wav_path"]
WORDS = ["transcription", "transcript", "sentence", "text", "normalized_text", "raw_text"]
# Name that `datasets` gives the table of a folder.
METADATA = "metadata"


def transcripts(
    folder: Path, sounds: Sequence[Path], tables: Iterable[Path]
) -> tuple[dict[Path, str], list[Path]]:
    """The texts of the sounds of a folder, by sound, and the tables that hold them.

    Such a table has a column of ``FILES`` and one of ``WORDS``. It names a sound by its path, from
    the folder of the table or from any folder above the sound, with or without its ending.

    Raises:
        AnalysisError: a table names none of the sounds, or one sound twice with different words.
    """
    texts: dict[Path, str] = {}
    used = []
    by_name = _by_name(sounds)
    for path in tables:
        table = _table_of_sounds(path)
        if table is None:
            continue
        used.append(path)
        column = column_of(table, FILES)
        names = table.column(column)
        named = [_sound_of(name, path.parent, by_name) for name in names]
        if not any(named):
            first = f"its column {column} begins with {next(iter(names), '')!r}"
            wanted = f"the first sound is {sounds[0].relative_to(folder)}"
            fault = f"{path} names none of the {len(sounds)} sounds of {folder}"
            raise AnalysisError(
                f"{fault}: {first}, and {wanted}: mend the names, or move the table away"
            )
        words = table.column(column_of(table, WORDS))
        for sound, text in zip(named, words, strict=True):
            if sound is not None and texts.setdefault(sound, text) != text:
                raise AnalysisError(
                    f"{path} has {sound} twice, with other words: remove one of the rows"
                )
    if used:
        with_text = sum(bool(text.strip()) for text in texts.values())
        without = len(sounds) - with_text
        names = ", ".join(path.name for path in used)
        note = "note: of the %s sounds of %s, %s have a text in %s, and %s have none"
        logging.getLogger(__name__).warning(note, len(sounds), folder, with_text, names, without)
    return texts, used


def _table_of_sounds(path: Path) -> Table | None:
    """A table of sounds and their texts; None if the table is another one."""
    is_named = is_metadata(path)
    try:
        table = open_table(path)
    except AnalysisError:
        # Other tables need not be about sounds at all.
        if is_named:
            raise
        return None
    names = column_of(table, FILES)
    words = column_of(table, WORDS)
    if names and words:
        return table
    if is_named:
        missing, examples = ("what is said", WORDS) if names else ("file names", FILES)
        note = "note: %s says nothing of the sounds: it has no column of %s, such as %s"
        logging.getLogger(__name__).warning(note, path, missing, ", ".join(examples[:4]))
    return None


def is_metadata(path: Path) -> bool:
    """Whether a table has the name of that of a folder, with any ending."""
    return path.stem.partition(".")[0].lower() == METADATA


def column_of(table: Table, names: Sequence[str]) -> str | None:
    """The column with the first of some names that the table has, in any capitalisation."""
    columns = {str(column).strip().lower(): column for column in table.header}
    return next((columns[name] for name in names if name in columns), None)


def _by_name(sounds: Iterable[Path]) -> dict[str, list[Path]]:
    """The sounds by the names of their files, with and without ending."""
    by_name = defaultdict(list)
    for sound in sounds:
        for name in {sound.name, sound.stem}:
            by_name[name].append(sound)
    return by_name


def _sound_of(name: str, home: Path, by_name: dict[str, list[Path]]) -> Path | None:
    """The sound that a row of a table in the folder ``home`` names; None if it is not unique."""
    *above, last = PurePosixPath(name.strip().replace("\\", "/")).parts or [""]
    named = by_name.get(last, [])
    beside = [sound for sound in named if sound.parent == home.joinpath(*above)]
    if len(beside) == 1:
        return beside[0]
    below = [sound for sound in named if _is_below(sound, above)]
    return below[0] if len(below) == 1 else None


def _is_below(sound: Path, folders: Sequence[str]) -> bool:
    parents = sound.absolute().parent.parts
    return not folders or [*parents[-len(folders) :]] == [*folders]
