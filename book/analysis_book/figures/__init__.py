"""Figures beyond seaborn: theme, bands, the axis of steps, tables, words, a slider, and views."""

from typing import TYPE_CHECKING

from analysis_lib.errors import require_extra
from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_book.figures.exploring import dimensions, explorer
    from analysis_book.figures.markup import address, code, code_block, plain
    from analysis_book.figures.one_sentence import sentence
    from analysis_book.figures.slider import Slider
    from analysis_book.figures.style import (
        TYPE_COLOURS,
        band,
        heat,
        legend_below,
        log_axis,
        step_axis,
        theme,
        themed,
        whole_numbers,
    )
    from analysis_book.figures.tables import TYPE_NAMES, Table
    from analysis_book.figures.verdicts import OUTCOMES, SCOPES, Verdicts
    from analysis_book.figures.view import View
    from analysis_book.figures.weights import moved_by_rounding
    from analysis_book.figures.words import Finding, Markdown, enumeration

require_extra("book", "IPython", "altair", "matplotlib", "seaborn", "vl_convert")

__getattr__, __dir__ = lazily(__name__)
