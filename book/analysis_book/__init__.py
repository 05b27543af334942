"""The package of the book: experiments and claims, trainings, figures, and the build.

It is found by ``analysis_lib`` through entry points, and imports it; never the other way round.
"""

import logging
from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_book import build, figures, papers, training
    from analysis_book.figures import Markdown, Table, plain
    from analysis_book.papers import causes, claims, maruta, spikes

# What the book has to say is shown wherever the notes of the library are.
logging.getLogger(__name__).parent = logging.getLogger("analysis_lib")

__getattr__, __dir__ = lazily(__name__)
