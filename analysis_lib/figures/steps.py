"""The axis of the steps of a training."""

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator


def step_axis(axes: Axes, steps: Iterable[int]) -> None:
    """Give the steps one scale: linear up to the first checkpoint after the start, logarithmic from there.

    Args:
        axes: whose horizontal axis it is.
        steps: of the checkpoints.
    """
    steps = list(steps)
    first, last = min((step for step in steps if step), default=1), max(*steps, 1)
    axes.set_xscale("symlog", linthresh=first, linscale=0.5)
    # More numbers, or one close to the first checkpoint, would touch in a narrow panel.
    between = (round(last / part) for part in (10, 100, 1000) if last / part > 2 * first)
    ticks = sorted({0, first, last, *between})
    axes.set_xticks(ticks, [step_label(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15 * first, last * 1.15)


def step_label(step: int) -> str:
    """A step as short as an axis needs it.

    >>> step_label(800), step_label(20_000), step_label(2_000_000)
    ('800', '20k', '2M')
    """
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step / 1e3:g}k" if step >= 1e4 else f"{step:g}"
