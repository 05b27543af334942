"""Names of local files for pages that leave this machine: no folders, which may name a user."""

import os
from pathlib import Path


def path_to_share(path: str) -> str:
    """A path below the current folder as given; of any other path, the last part.

    >>> path_to_share("models/bert"), path_to_share("/home/someone/models/bert")
    ('models/bert', 'bert')
    """
    parts = Path(path).parts
    leads_elsewhere = os.path.isabs(path) or path.startswith("~") or ".." in parts
    return last_part(path) if leads_elsewhere else path


def last_part(path: str) -> str:
    """The last part of a path, or the path itself if it has none."""
    return Path(path).name or path


def data_to_share(spec: str) -> str:
    """The specification of a corpus, with its path shortened by :func:`path_to_share`.

    >>> data_to_share("/home/someone/reviews.csv:text"), data_to_share("wikipedia")
    ('reviews.csv:text', 'wikipedia')
    """
    path, columns = path_and_columns(spec)
    return path_to_share(path) + columns


def data_name(spec: str) -> str:
    """The specification of a corpus without the folders of its file.

    >>> data_name("data/reviews.csv:a/b"), data_name("news:sentences")
    ('reviews.csv:a/b', 'news:sentences')
    """
    path, columns = path_and_columns(spec)
    return last_part(path) + columns


def path_and_columns(spec: str) -> tuple[str, str]:
    """The path in a specification, and the rest; both may contain colons and slashes.

    >>> path_and_columns("absent/reviews.csv:text:label")
    ('absent/reviews.csv', ':text:label')
    """
    path = spec
    columns = ""
    while not os.path.lexists(path) and ":" in path:
        path, _, column = path.rpartition(":")
        columns = f":{column}{columns}"
    return path, columns
