"""The book: its parameters, one notebook executed strictly, what is up to date, and the site."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_book.build.freshness import inputs
    from analysis_book.build.listing import commented, in_columns, located, titles
    from analysis_book.build.notebook import run_notebook
    from analysis_book.build.parameters import (
        book_parameters,
        coerce,
        complete,
        notebook_parameters,
    )
    from analysis_book.build.site import build_book

__getattr__, __dir__ = lazily(__name__)
