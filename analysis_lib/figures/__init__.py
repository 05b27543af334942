"""What seaborn lacks: theme, bands of intervals, the axis of training steps, numbered tables, and a slider."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.figures.slider import Slider
    from analysis_lib.figures.style import band, heat, legend_below, log_axis, step_axis, theme, whole_numbers
    from analysis_lib.figures.tables import Table, TextTable, plain
    from analysis_lib.figures.verdicts import OUTCOMES, Verdicts

__getattr__, __dir__ = lazily(__name__)
