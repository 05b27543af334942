"""What the page on heads and dimensions says of a planted dimension that draws attention."""

from types import SimpleNamespace

import pandas as pd
import pytest
from planted import Planted, run_cells


def said(effects: pd.DataFrame, wide: tuple[float, float]) -> tuple[int, str]:
    """The dimension that the page finds, and its finding; dimension 1 leads in two layers of three,
    by so much.
    """
    rows = [
        {"layer": layer, "head": 1, "dimension": d, "key_type": kind, "contribution": value}
        for layer, values in ((1, (3.0, 0.5)), (2, wide), (3, wide))
        for d, value in enumerate(values)
        for kind, value in (("cls", value), ("other", -0.25))
    ]
    found: list[str] = []
    names = {
        "measured": Planted(score_contributions=pd.DataFrame(rows)),
        "kind": "cls",
        "keys": "[CLS]",
        "load_corpus": lambda *_, **__: [],
        "causes": SimpleNamespace(effects=lambda *_: effects),
        "display": found.append,
        "corpus": [],
        "Finding": lambda text, **_: text,
    }
    space = run_cells("explorer", "best = lift", "gone =", **names)
    return space["top"], found[-1]


@pytest.mark.parametrize("losses", [(-0.5, -0.9), ()])
def test_the_finding_names_the_dimension_and_what_is_lost_without_it(losses):
    place = {"dimension": 1, "arm": "alone", "key_type": "cls"}
    rows = [
        place | {"model": "planted", "layer": layer, "effect": loss}
        for layer, loss in enumerate(losses, 2)
    ]
    others = [{"model": "another"}, {"dimension": 0}, {"arm": "together"}, {"key_type": "sep"}]
    rows += [place | {"model": "planted", "layer": 2, "effect": -1.0} | other for other in others]
    top, text = said(pd.DataFrame(rows), (1.0, 4.0))
    assert top == 1
    assert text.startswith(
        "In planted, **dimension 1** draws attention to [CLS]: in **2 of 3** layers no other lifts"
    )
    assert text.endswith(
        "an ordinary token."
        + " Without it, up to **90%** of that attention is lost." * bool(losses)
    )
