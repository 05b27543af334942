"""The book: its parameters, one notebook executed strictly, what is up to date, and the site."""

from analysis_lib.book.freshness import inputs
from analysis_lib.book.notebook import run_notebook
from analysis_lib.book.parameters import book_parameters, coerce, complete, located, notebook_parameters
from analysis_lib.book.site import build_book
