"""The one error type of the library, and the near names that its messages offer."""

import difflib
from collections.abc import Iterable


class AnalysisError(Exception):
    """An error whose message is one line that says what was given, what was wanted, and what to do."""


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause that offers the known names nearest to ``name``, or all of them if none is near.

    >>> near_names("minilmm", ["minilm", "bert-base-uncased"])
    'did you mean minilm?'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}"
