"""A cone to play with: vectors that point everywhere, and a bias that they share."""

import altair as alt
import numpy as np
import pandas as pd

from analysis_book.figures.style import COLOURS
from analysis_book.figures.view import INK, Control, View, steps

# By Vega's rules, of every vector: with the bias, of length one, and the attention of the chosen
# query to it.
STEPS = {
    "across": "datum.x + bias",
    "norm": "sqrt(datum.across * datum.across + datum.y * datum.y)",
    "unit_x": "datum.across / datum.norm",
    "unit_y": "datum.y / datum.norm",
    "score": "exp(((cos(datum.angle) + bias) * datum.across + sin(datum.angle) * datum.y) / SQRT2)",
}


def cone(
    points: int = 24,
    bias: float = 0,
    name: str = "cone",
    caption: str = "",
    still: str = "",
) -> View:
    """Vectors on a circle that share a bias: their average cosine, and the attention of one to all.

    Queries and keys are the vectors themselves: the weight of a key k for a query q is the softmax
    of q·k/√2.

    Args:
        points: how many vectors.
        bias: with which it begins, from 0 to 3; the radius of the circle is 1.
        name: the id of the figure on its page.
        caption: a sentence below it.
        still: HTML that stands for it where no script runs; a picture of it unless given.
    """
    angles = 2 * np.pi * (np.arange(points) + 0.5) / points
    numbers = np.arange(1, points + 1)
    table = pd.DataFrame({"query": numbers, "x": np.cos(angles), "y": np.sin(angles)})
    data = [{"name": "vectors", "source": "rows", "transform": _transform(points)}]
    caption = (
        caption
        or "Thickness: attention of the orange query, if queries and keys are the vectors. "
        "Dashed: mean."
    )
    controls = [
        Control("bias", "Common bias", None, bias, (0, 3, 0.1)),
        Control("query", "Query", None, 1, (1, points, 1)),
    ]
    said = [("vectors", "datum.query == 1", _sentence(points))]
    return View(name, caption, {"rows": table}, data, [_chart()], controls, said, still=still)


def _transform(points: int) -> list[dict]:
    """The steps of Vega from the vectors on the circle to their attention weights."""
    # By name, an operation on the vectors and the field that it is of.
    sums = {
        "sum_x": ("sum", "unit_x"),
        "sum_y": ("sum", "unit_y"),
        "total": ("sum", "score"),
        "all_x": ("mean", "across"),
        "all_y": ("mean", "y"),
        "most": ("max", "score"),
    }
    added = {
        "type": "joinaggregate",
        "fields": [field for _, field in sums.values()],
        "ops": [operation for operation, _ in sums.values()],
        "as": [*sums],
    }
    vectors = steps(angle=f"2 * PI * (query - 0.5) / {points}", **STEPS)
    return [*vectors, added, *steps(weight="datum.score / datum.total")]


def _sentence(points: int) -> str:
    """Vega's expression for the average cosine and the largest weight, in words."""
    # The closed form of the mean cosine of all pairs.
    cosine = (
        f"(datum.sum_x * datum.sum_x + datum.sum_y * datum.sum_y - {points}) / "
        f"{points * (points - 1)}"
    )
    return (
        f"'Average cosine of two vectors: ' + format({cosine}, '.2f') + '. Of the attention "
        "of query ' + query + ', the strongest key gets ' + "
        f"format(datum.most / datum.total, '.0%') + ' (even: {1 / points:.0%})'"
    )


def _chart() -> alt.LayerChart:
    """The vectors from one origin, as thick as their weights, with their mean."""
    base = alt.Chart(alt.NamedData("vectors"))
    x = alt.X("across:Q", axis=None, scale=alt.Scale(domain=[-1.15, 4.15]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-1.17, 1.17]))
    origin = {"x2": alt.X2Datum(0), "y2": alt.Y2Datum(0)}
    thick = alt.StrokeWidth(
        "weight:Q", scale=alt.Scale(domain=[0, 0.2], range=[0.5, 14]), legend=None
    )
    color = alt.condition("datum.query == query", alt.value(COLOURS[1]), alt.value(COLOURS[0]))
    mean = base.transform_filter("datum.query == 1").mark_rule(
        color=INK, strokeWidth=2, strokeDash=[5, 3]
    )
    tips = base.mark_point(filled=True, size=70, opacity=1).encode(
        tooltip=["query:Q", alt.Tooltip("weight:Q", format=".3f")]
    )
    chart = alt.layer(
        base.mark_rule(color=COLOURS[0], opacity=0.7).encode(x, y, **origin, strokeWidth=thick),
        mean.encode(x=alt.X("all_x:Q", axis=None), y=alt.Y("all_y:Q", axis=None), **origin),
        tips.encode(x, y, color=color),
    )
    description = "Vectors from one origin with a common bias; dashed, their mean"
    return chart.properties(width=340, height=150, description=description)
