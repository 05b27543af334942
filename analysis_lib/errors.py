"""The one error type of the library, and the near names that its messages offer."""

import difflib
from collections.abc import Iterable


class AnalysisError(Exception):
    """An error whose message is one line that says what was given, what was wanted, and what to do.

    What fails for reasons of its own, such as a notebook, is reported in several, an argument each.
    """

    def __str__(self) -> str:
        # Names and files may hold what ends a line, or moves the cursor of a terminal.
        shown = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(line)) for line in self.args)
        return "\n".join(shown)


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause that offers the known names nearest to ``name``, or all of them if none is near.

    >>> near_names("minilmm", ["minilm", "bert-base-uncased"])
    'did you mean minilm?'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}"
