"""What seaborn lacks: theme, bands of intervals, numbered tables, a slider, and the clouds of queries and keys."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.figures.queries_and_keys import mean_paths, query_key_clouds, step_axis
    from analysis_lib.figures.slider import Slider
    from analysis_lib.figures.style import band, theme
    from analysis_lib.figures.tables import Table, TextTable, verdict_table

__getattr__, __dir__ = lazily(__name__)
