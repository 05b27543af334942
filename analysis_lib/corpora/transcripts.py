"""What is said in the sounds of a folder, by the tables that lie beside them."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from analysis_lib.corpora.tables import Table
from analysis_lib.errors import AnalysisError

# Names of the columns that tables of sounds have, in lower case: that of the files, and that of what is said.
FILES = (
    *("file_name", "audio_file_name", "filename", "file", "path"),
    *("audio", "audio_path", "audio_filepath", "wav", "wav_path"),
)
SAID = ("transcription", "transcript", "sentence", "text", "normalized_text", "raw_text")
# What `datasets` calls the table of a folder.
METADATA = "metadata"


def transcripts(folder: Path, sounds: Sequence[Path], tables: Iterable[Path]) -> tuple[dict[Path, str], list[Path]]:
    """What is said in the sounds of a folder, and the tables that say it.

    A table says it if it has a column of ``FILES`` and one of ``SAID``. It names a sound by its path, from the folder
    of the table or from any folder above the sound, with or without its ending.

    Raises:
        AnalysisError: a table that names none of the sounds, or one sound twice with other words.
    """
    said: dict[Path, str] = {}
    read = []
    known = _by_name(sounds)
    for path in tables:
        is_metadata = path.stem.partition(".")[0].lower() == METADATA
        try:
            table = Table(path)
        except AnalysisError:
            # Of other tables it is not known whether they are about sounds at all.
            if is_metadata:
                raise
            continue
        columns = {str(name).strip().lower(): name for name in table.header}
        of_files = next((columns[name] for name in FILES if name in columns), None)
        of_words = next((columns[name] for name in SAID if name in columns), None)
        if of_files is None or of_words is None:
            if is_metadata:
                missing, names = ("what is said", SAID) if of_files else ("file names", FILES)
                note = "note: %s says nothing of the sounds: it has no column of %s, such as %s"
                logging.getLogger(__name__).warning(note, path, missing, ", ".join(names[:4]))
            continue
        read.append(path)
        names = table.column(of_files)
        named = [_sound_of(name, path.parent, known) for name in names]
        if not any(named):
            raise AnalysisError(
                f"{path} names none of the {len(sounds)} sounds of {folder}: its column {of_files} begins with "
                f"{next(iter(names), '')!r}, and the first sound is {sounds[0].relative_to(folder)}: mend the names, "
                f"or move the table away"
            )
        for sound, words in zip(named, table.column(of_words), strict=True):
            if sound is not None and said.setdefault(sound, words) != words:
                raise AnalysisError(f"{path} has {sound} twice, with other words: remove one of the rows")
    if read:
        spoken = sum(bool(words.strip()) for words in said.values())
        note = "note: of the %s sounds of %s, %s have a text in %s, and %s have none"
        tables_read = ", ".join(path.name for path in read)
        logging.getLogger(__name__).warning(note, len(sounds), folder, spoken, tables_read, len(sounds) - spoken)
    return said, read


def _by_name(sounds: Iterable[Path]) -> dict[str, list[Path]]:
    """The sounds by the names of their files, with and without ending."""
    known = defaultdict(list)
    for sound in sounds:
        for name in {sound.name, sound.stem}:
            known[name].append(sound)
    return known


def _sound_of(name: str, home: Path, known: dict[str, list[Path]]) -> Path | None:
    """The one sound that a row of a table in the folder ``home`` names."""
    parts = PurePosixPath(name.strip().replace("\\", "/")).parts
    if not parts:
        return None
    *above, last = parts
    named = known.get(last, [])
    beside = [sound for sound in named if sound.parent == home.joinpath(*above)]
    below = [sound for sound in named if [*sound.absolute().parent.parts][-len(above) :] == above or not above]
    for sounds in (beside, below):
        if len(sounds) == 1:
            return sounds[0]
    return None
