"""A cone to play with: vectors that point everywhere, and a bias that they share."""

import altair as alt
import numpy as np
import pandas as pd

from analysis_book.figures.view import COLOURS, INK, Control, View, steps

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
    points: int = 24, bias: float = 0, name: str = "cone", caption: str = "", still: str = ""
) -> View:
    """Vectors on a circle that share a bias, their average cosine, and the attention of one of them
    to all.

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
    table = pd.DataFrame(
        {"query": np.arange(1, points + 1), "x": np.cos(angles), "y": np.sin(angles)}
    )
    sums = {
        "sum_x": "unit_x",
        "sum_y": "unit_y",
        "total": "score",
        "all_x": "across",
        "all_y": "y",
        "most": "score",
    }
    ops = ["sum"] * 3 + ["mean"] * 2 + ["max"]
    added = {"type": "joinaggregate", "fields": [*sums.values()], "ops": ops, "as": [*sums]}
    computed = steps(angle=f"2 * PI * (query - 0.5) / {points}", **STEPS)
    computed += [added, *steps(weight="datum.score / datum.total")]
    # The closed form of the mean cosine of all pairs.
    pairs = (
        f"(datum.sum_x * datum.sum_x + datum.sum_y * datum.sum_y - {points}) / "
        f"{points * (points - 1)}"
    )
    words = (
        f"'Average cosine of two vectors: ' + format({pairs}, '.2f') + '. Of the attention "
        "of query ' + query + ', "
    )
    words += (
        "the strongest key gets ' + format(datum.most / datum.total, '.0%') + ' (even: "
        f"{1 / points:.0%})'"
    )

    base = alt.Chart(alt.NamedData("vectors"))
    across, up = (alt.Scale(domain=domain) for domain in ([-1.15, 4.15], [-1.17, 1.17]))
    place = alt.X("across:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=up)
    origin = {"x2": alt.X2Datum(0), "y2": alt.Y2Datum(0)}
    thick = alt.StrokeWidth(
        "weight:Q", scale=alt.Scale(domain=[0, 0.2], range=[0.5, 14]), legend=None
    )
    asking = alt.condition("datum.query == query", alt.value(COLOURS[1]), alt.value(COLOURS[0]))
    mean = base.transform_filter("datum.query == 1").mark_rule(
        color=INK, strokeWidth=2, strokeDash=[5, 3]
    )
    tips = base.mark_point(filled=True, size=70, opacity=1).encode(
        tooltip=["query:Q", alt.Tooltip("weight:Q", format=".3f")]
    )
    chart = alt.layer(
        base.mark_rule(color=COLOURS[0], opacity=0.7).encode(*place, **origin, strokeWidth=thick),
        mean.encode(x=alt.X("all_x:Q", axis=None), y=alt.Y("all_y:Q", axis=None), **origin),
        tips.encode(*place, color=asking),
    )
    chart = chart.properties(
        width=340,
        height=150,
        description="Vectors from one origin with a common bias; dashed, their mean",
    )
    caption = (
        caption
        or "Thickness: attention of the orange query, if queries and keys are the vectors. "
        "Dashed: mean."
    )
    data = [{"name": "vectors", "source": "rows", "transform": computed}]
    controls = [
        Control("bias", "Common bias", None, bias, (0, 3, 0.1)),
        Control("query", "Query", None, 1, (1, points, 1)),
    ]
    said = [("vectors", "datum.query == 1", words)]
    return View(name, caption, {"rows": table}, data, [chart], controls, said, still=still)
