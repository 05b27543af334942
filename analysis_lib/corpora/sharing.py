"""What lies on this machine, as pages that leave it name it: without the way to it, which may hold a user's name."""

import os
from pathlib import Path


def path_to_share(path: str) -> str:
    """A path below the current folder as it was given, and the last part of any other.

    >>> path_to_share("models/bert"), path_to_share("/home/someone/models/bert"), path_to_share("../bert")
    ('models/bert', 'bert', 'bert')
    """
    parts = Path(path).parts
    leads_elsewhere = os.path.isabs(path) or path.startswith("~") or ".." in parts
    return last_part(path) if leads_elsewhere else path


def last_part(path: str) -> str:
    """The last part of a path, or all of one that has none."""
    return Path(path).name or path


def data_to_share(spec: str) -> str:
    """A corpus as ``load_corpus`` takes it, with the path of its file or folder as :func:`path_to_share` gives it.

    >>> data_to_share("/home/someone/reviews.csv:text"), data_to_share("wikipedia")
    ('reviews.csv:text', 'wikipedia')
    """
    path, columns = _path_and_columns(spec)
    return path_to_share(path) + columns


def data_name(spec: str) -> str:
    """A corpus without any folder that its file lies in.

    >>> data_name("data/reviews.csv:a/b"), data_name("news:sentences")
    ('reviews.csv:a/b', 'news:sentences')
    """
    path, columns = _path_and_columns(spec)
    return last_part(path) + columns


def _path_and_columns(spec: str) -> tuple[str, str]:
    """Where in a name of a corpus its path ends: both may have colons and slashes."""
    ends = [place for place, letter in enumerate(spec) if letter == ":"]
    for end in (len(spec), *reversed(ends)):
        if os.path.lexists(spec[:end]):
            return spec[:end], spec[end:]
    end = ends[0] if ends else len(spec)
    return spec[:end], spec[end:]
