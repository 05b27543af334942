"""The book: its parameters, one notebook executed strictly, what is up to date, and the site."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.book.freshness import inputs
    from analysis_lib.book.listing import commented, in_columns, located, titles
    from analysis_lib.book.notebook import run_notebook
    from analysis_lib.book.parameters import book_parameters, coerce, complete, notebook_parameters
    from analysis_lib.book.site import build_book

__getattr__, __dir__ = lazily(__name__)
