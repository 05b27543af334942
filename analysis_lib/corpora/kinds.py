"""Images and sounds by the endings of their files."""

from functools import cache
from pathlib import Path

from analysis_lib.corpora.reading import ending
from analysis_lib.corpora.tables import ENDINGS
from analysis_lib.errors import require_extra

# Formats of Pillow that are not read as images: containers, and drawings for other programs.
_NO_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"}
# RAW has no header, and matrices of numbers are rarely sounds.
_NO_SOUNDS = {"RAW", "MAT4", "MAT5"}
# Formats of libsndfile whose files have other endings than their names.
_ENDINGS_OF_SOUNDS = {
    "AIFF": [".aif", ".aifc"],
    "AU": [".snd"],
    "OGG": [".oga", ".opus"],
    "NIST": [".sph"],
    "IRCAM": [".sf"],
    "SVX": [".iff"],
    "WAV": [".wave"],
}


@cache
def _kinds() -> dict[str, str]:
    """Image or audio, for every file ending that Pillow and libsndfile read."""
    # Imported here: a corpus of texts needs neither.
    require_extra("packages", "soundfile", "PIL")
    import soundfile
    from PIL import Image

    Image.init()
    kinds = {}
    for suffix, form in Image.EXTENSION.items():
        if form in Image.OPEN and form not in _NO_IMAGES:
            kinds[suffix] = "image"
    for form in {*soundfile.available_formats()} - _NO_SOUNDS:
        suffixes = [f".{form.lower()}", *_ENDINGS_OF_SOUNDS.get(form, ())]
        kinds |= dict.fromkeys(suffixes, "audio")
    return kinds


def kind_of_file(path: Path) -> str | None:
    """Image or audio, by the ending of a file; None for other files."""
    if ending(path) in (*ENDINGS, ".txt", ""):
        return None
    return _kinds().get(path.suffix.lower())
