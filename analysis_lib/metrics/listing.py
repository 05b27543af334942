"""The metrics of the library by name, read from the source of their modules.

Nothing is imported: torch takes seconds, and a list of names does not need it.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

# The name of a class and its body, the lines that are indented or empty.
CLASS = re.compile(r"^class (\w+).*:\n((?: {4}.*\n|\n)*)", re.MULTILINE)
NAME = re.compile(r'^    name = "(\w+)"$', re.MULTILINE)
SUMMARY = re.compile(r'^    r?"""(.*)', re.MULTILINE)


class Entry(NamedTuple):
    """A metric as its source declares it.

    Attributes:
        module: the module that defines it, as one imports it.
        kind: the name of its class.
        summary: the first line of its docstring.
    """

    module: str
    kind: str
    summary: str


@functools.cache
def catalogue() -> dict[str, Entry]:
    """Every metric by name: modules in alphabetical order, each from top to bottom.

    >>> catalogue()["anisotropy"].kind
    'Anisotropy'
    """
    entries = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for kind, body in CLASS.findall(path.read_text(encoding="utf-8")):
            name = NAME.search(body)
            if name is not None:
                summary = SUMMARY.search(body)
                entries[name[1]] = Entry(f"{__package__}.{path.stem}", kind, summary[1])
    return entries
