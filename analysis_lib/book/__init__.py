"""The book: its parameters, one notebook executed strictly, what is up to date, and the site."""

from analysis_lib.book.site import build_book, run_notebook

__all__ = ["build_book", "run_notebook"]
