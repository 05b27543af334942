"""The statistics of the part on papers since, on planted tables, both ways."""

import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from planted import Planted, run_cells, verdicts_on_page

from analysis_book.papers.claims import FAILS, HOLDS, NOT_APPLICABLE, SMALL
from analysis_lib import AnalysisError

# --- Valleys: the norm of the first token, the entropy of a text, and sinks ------------------------


def layers_with(norms, entropies, sinks, first="first") -> Planted:
    """A model whose first token is so many times as long as the rest, by hidden layer.

    Two heads have the sink rate of their layer, give or take 0.05; later positions have none.
    """
    rows = []
    for layer, norm in enumerate(norms):
        for kind, value in (("all", 2.0), (first, 2.0 * norm)):
            rows.append({"space": "hidden", "layer": layer, "token_type": kind, "norm": value})
        rows.append({"space": "value", "layer": layer, "token_type": "all", "norm": 77.0})
    received = []
    for layer, rate in enumerate(sinks, 1):
        for off in (-0.05, 0.05):
            received.append({"layer": layer, "position": 1, "sink_rate": rate + off})
            received.append({"layer": layer, "position": 2, "sink_rate": 1.0})
    entropy = {"layer": range(len(entropies)), "entropy_normalised": entropies}
    return Planted(
        norms_by_type=pd.DataFrame(rows).astype({"token_type": "category"}),
        text_entropy=pd.DataFrame(entropy),
        attention_received=pd.DataFrame(received).astype({"position": "Int64"}),
    )


def valleys(tables: Planted) -> list[str]:
    cells = "def by_layer", "def correlation"
    return verdicts_on_page("since/valleys", *cells, every={"planted": tables})


@pytest.mark.parametrize("first", ["first", "cls"])
def test_a_spike_in_the_middle_makes_sinks_and_a_valley(first):
    norms = [1, 1, 50, 80, 60, 1, 1]
    entropies = [0.8, 0.8, 0.1, 0.1, 0.1, 0.7, 0.7]
    sinks = [0.1, 0.1, 0.8, 0.9, 0.8, 0.1]
    assert valleys(layers_with(norms, entropies, sinks, first)) == [HOLDS, HOLDS, HOLDS]


def test_a_spike_without_sinks_or_a_valley_fails():
    norms = [1, 1, 50, 80, 60, 1, 1]
    entropies = [0.1, 0.1, 0.8, 0.9, 0.8, 0.2, 0.2]
    sinks = [0.8, 0.8, 0.1, 0.1, 0.1, 0.8]
    assert valleys(layers_with(norms, entropies, sinks)) == [FAILS, FAILS, FAILS]


def test_sinks_belong_to_the_layer_that_attention_reads():
    """One layer later, they would go with the norms, and do not."""
    norms = [1, 99, 1, 99, 1, 99, 1]
    sinks = [0.1, 0.9, 0.1, 0.9, 0.1, 0.9]
    tables = layers_with(norms, np.linspace(0.8, 0.7, 7), sinks)
    found = run_cells("since/valleys", "def by_layer", every={"planted": tables})["layers"]
    np.testing.assert_allclose(found["norm"], norms)
    np.testing.assert_allclose(found["sinks"][:6], sinks)
    assert found["sinks"].isna().tolist() == [False] * 6 + [True]
    assert valleys(tables)[1] == HOLDS


# --- What a sink adds ------------------------------------------------------------------------------


def heads_with(*heads: tuple[float, float, float, float], first="first") -> Planted:
    """Heads with this mass, share, added norm and rest norm of the first token."""
    columns = ["mass", "share", "added_norm", "rest_norm"]
    ours = pd.DataFrame(heads, columns=columns).assign(key_type=first)
    others = 1 - ours[["mass", "share"]]
    others = others.assign(added_norm=9.0, rest_norm=9.0, key_type="other")
    every = pd.concat([ours, others]).assign(layer=1, head=1)
    return Planted(value_weighted_attention=every.astype({"key_type": "category"}))


def added(tables: Planted) -> list[str]:
    cells = "def sinks_of", "def against_the_rest"
    return verdicts_on_page("since/added", *cells, every={"planted": tables})


def test_a_silent_sink_adds_little():
    # Of the last head, the first token is no sink: it does not count.
    heads = (0.8, 0.1, 0.2, 1.0), (0.4, 0.1, 0.1, 1.0), (0.2, 0.9, 9.0, 1.0)
    assert added(heads_with(*heads)) == [HOLDS, HOLDS]


def test_a_sink_that_adds_less_is_a_small_one():
    assert added(heads_with((0.8, 0.6, 0.7, 1.0), first="cls")) == [SMALL, SMALL]


def test_a_sink_with_a_long_value_fails():
    assert added(heads_with((0.6, 0.9, 3.0, 1.0), (0.9, 0.95, 4.0, 0.5))) == [FAILS, FAILS]


def test_without_a_sink_nothing_is_judged():
    assert added(heads_with((0.1, 0.1, 0.2, 1.0))) == [NOT_APPLICABLE, NOT_APPLICABLE]


# --- Silent sinks and broadcasts -------------------------------------------------------------------


def sinks_with(*heads: tuple[float, ...], kind="cls", groups=1) -> Planted:
    """Layers of one head, whose candidate has this mass, and a value so many times the others'.

    The third number, if any, is the stable rank of its outputs: else 2 with a sink, 5 without.
    Others are five tokens of the length 2. With more groups, heads share the values of their layer.
    """
    masses, values, ranks = [], [], []
    for layer, (mass, ratio, *rank) in enumerate(heads, 1):
        for head in range(1, groups + 1):
            stable_rank = rank[0] if rank else 2 if mass > 0.5 else 5
            ranks.append({"layer": layer, "head": head, "stable_rank": stable_rank})
            for name, weight in ((kind, mass), ("other", 1 - mass)):
                row = {"layer": layer, "head": head, "key_type": name, "mass": weight}
                masses.append(row)
        for name, norm, tokens in (
            (kind, 2 * ratio, 1),
            ("other", 2.0, 5),
            ("all", (2 * ratio + 10) / 6, 6),
        ):
            row = {"space": "value", "layer": layer, "head": 1, "token_type": name}
            values.append({**row, "norm": norm, "tokens": tokens})
    values.append({**values[0], "space": "hidden", "head": pd.NA, "norm": 50.0})
    return Planted(
        attention_by_token_type=pd.DataFrame(masses).astype({"key_type": "category"}),
        norms_by_type=pd.DataFrame(values).astype({"token_type": "category", "head": "Int64"}),
        output_rank=pd.DataFrame(ranks),
    )


def sinks(tables: Planted, of_images: bool = False) -> list[str]:
    cells = "def candidates", "def silence"
    named = {"every": {"planted": tables}, "of_images": [tables] if of_images else []}
    return verdicts_on_page("since/sinks", *cells, **named)


@pytest.mark.parametrize(("kind", "groups"), [("cls", 1), ("first", 3), ("sep", 1)])
def test_a_silent_sink_and_a_broadcast_are_both_found(kind, groups):
    # The head without most attention counts for neither, however its value is.
    heads = (0.9, 0.1), (0.7, 1.1), (0.3, 0.0), (0.2, 5.0)
    assert sinks(sinks_with(*heads, kind=kind, groups=groups)) == [HOLDS, HOLDS, HOLDS]


def test_broadcasts_have_outputs_of_low_rank_or_not():
    """Beside a silent sink, of whatever rank, and a head without a sink, of rank 5."""
    others = (0.9, 0.1, 9.0), (0.3, 0.5, 5.0)
    assert sinks(sinks_with((0.9, 1.1, 1.5), *others))[2] == HOLDS
    assert sinks(sinks_with((0.9, 1.1, 4.0), *others))[2] == SMALL
    assert sinks(sinks_with((0.9, 1.1, 6.0), *others))[2] == FAILS


def test_sinks_of_one_kind_alone():
    assert sinks(sinks_with((0.9, 0.1), (0.8, 0.15)))[:2] == [HOLDS, FAILS]
    assert sinks(sinks_with((0.9, 1.2), (0.8, 1.1)))[:2] == [FAILS, HOLDS]
    # Shorter than others, and not by a fifth.
    assert sinks(sinks_with((0.9, 0.5), (0.8, 0.6)))[:2] == [SMALL, FAILS]


def test_without_a_token_that_has_most_attention_nothing_is_judged():
    assert sinks(sinks_with((0.4, 0.1), (0.5, 2.0))) == [NOT_APPLICABLE] * 3


def test_cls_loses_its_attention_or_gains_it():
    early, late = ((0.9, 1), (0.5, 1), (0.1, 1)), ((0.1, 1), (0.5, 1), (0.9, 1))
    assert sinks(sinks_with(*early), of_images=True)[3] == HOLDS
    assert sinks(sinks_with(*late), of_images=True)[3] == FAILS


# --- Spectra over layers ---------------------------------------------------------------------------


def spectra_with(ranks, alphas, of_means: float) -> pd.DataFrame:
    """Five parts of a model whose last tokens have these numbers by layer, give or take a little."""
    rows = []
    for part in range(5):
        for layer, (rank, alpha) in enumerate(zip(ranks, alphas, strict=True)):
            row = {"model": "planted", "part": part, "layer": layer, "alpha": alpha}
            off = 0.01 * part
            rows.append({**row, "vectors": "last", "effective_rank": rank + off})
            rows.append({**row, "vectors": "mean", "effective_rank": of_means + off})
            rows.append({**row, "vectors": "token", "effective_rank": 400.0})
    table = pd.DataFrame(rows)
    # Two layers change places in one part, so that the correlation varies.
    swapped = (table["part"] == 4) & (table["layer"] < 2) & (table["vectors"] == "last")
    table.loc[swapped, "effective_rank"] = table.loc[swapped, "effective_rank"].to_numpy()[::-1]
    return table


def spectra(table: pd.DataFrame) -> list[str]:
    names = {"layers": table, "size": 120}
    found = run_cells("since/spectrum", "def above_means", **names)
    return found["verdicts"]["verdict"].tolist()


def test_ranks_that_fall_where_eigenvalues_decay_fast():
    table = spectra_with([50, 40, 30, 20, 10], [0.5, 0.6, 0.7, 0.8, 0.9], of_means=5)
    assert spectra(table) == [HOLDS, HOLDS]


def test_ranks_that_rise_with_the_decay_and_lie_below_those_of_means():
    table = spectra_with([10, 20, 30, 40, 50], [0.5, 0.6, 0.7, 0.8, 0.9], of_means=90)
    assert spectra(table) == [FAILS, FAILS]


# --- Centres of queries and keys -------------------------------------------------------------------


def centres_with(
    resultant: float, lost: float, cosine: float, first: float, stray: dict | None = None
) -> Planted:
    """Two layers of three heads of queries and one of keys; of three heads, one is an outlier.

    Args:
        resultant: before rotation. lost: what rotation takes of it.
        cosine: of each bin and all positions; ``first``: of the keys of first tokens.
        stray: by its first position, another cosine of a bin.
    """
    rows = []
    for space, heads in (("query", 3), ("key", 1)):
        for layer, head in itertools.product((1, 2), range(1, heads + 1)):
            for position in (0, 1, 2, 32, 64, 128):
                off = {2: -0.001, 3: 0.19}.get(head, 0.0)
                at = first if (space, position) == ("key", 0) else cosine
                at = (stray or {}).get(position, at)
                row = {"layer": layer, "head": head, "from_position": position}
                row |= {"cosine_to_mean": at + off, "ci_low": 0.0}
                before = resultant + off
                rows.append({**row, "space": f"{space}_unrotated", "resultant": before})
                rows.append({**row, "space": space, "resultant": before - lost * (position > 1)})
        # One text alone reaches so far: it has no interval, and does not count.
        row = {"layer": 1, "head": 1, "from_position": 256, "cosine_to_mean": -1.0}
        rows.append({**row, "space": f"{space}_unrotated", "resultant": 0.5 - lost})
    return Planted(resultant_by_position=pd.DataFrame(rows))


def centres(tables: Planted) -> list[str]:
    return verdicts_on_page("since/centres", "bins = heads", "def median(", tables=tables)


def test_centres_that_stay_and_that_rotation_spreads():
    assert centres(centres_with(0.8, lost=0.2, cosine=0.95, first=0.1)) == 4 * [HOLDS]


def test_small_centres_hold_a_little():
    assert centres(centres_with(0.6, lost=0.05, cosine=0.8, first=0.7)) == 4 * [SMALL]


def test_without_centres_all_fails():
    assert centres(centres_with(0.3, lost=-0.1, cosine=0.2, first=0.95)) == 4 * [FAILS]


def test_one_bin_that_strays_is_no_stable_centre():
    strays = {64: 0.6}
    found = centres(centres_with(0.8, lost=0.2, cosine=0.95, first=0.1, stray=strays))
    assert found == [HOLDS, FAILS, HOLDS, HOLDS]


def test_without_rotation_nothing_is_judged():
    tables = centres_with(0.8, lost=0.2, cosine=0.95, first=0.1)
    rows = tables["resultant_by_position"]
    rotated = rows[~rows["space"].str.endswith("unrotated")]
    assert centres(Planted(resultant_by_position=rotated)) == 4 * [NOT_APPLICABLE]


def test_a_model_without_rotation_is_refused():
    tables = centres_with(0.8, lost=0.2, cosine=0.95, first=0.1)
    rows = tables["resultant_by_position"]
    rotated = rows[~rows["space"].str.endswith("unrotated")]
    names = {
        "load_model": lambda name: name,
        "load_corpus": lambda _: SimpleNamespace(texts=["some words"], units=None),
        "measure": lambda *_: Planted(resultant_by_position=rotated),
        "model": "minilm",
    }
    with pytest.raises(AnalysisError, match="minilm rotates no queries and keys: give one with"):
        run_cells("since/centres", "articles = ", **names)


# --- The roles of a conversation -------------------------------------------------------------------


def speakers_with(angle: float, *gaps: float) -> Planted:
    """A user's and an assistant's mean vector at this angle, and cosines that differ by these gaps.

    The embeddings of hidden layer 0, and other roles, would give another verdict.
    """
    means, cones = [], []
    for layer in range(len(gaps) + 1):
        turn = np.pi if layer == 0 else angle
        of_role = {"user": (3.0, 0.0), "assistant": (5 * np.cos(turn), 5 * np.sin(turn))}
        of_role["system"] = (-1.0, 0.0)
        for role, vector in of_role.items():
            for dimension, mean in enumerate(vector):
                row = {"layer": layer, "dimension": dimension, "token_type": role, "mean": mean}
                means.append(row)
        gap = 1.0 if layer == 0 else gaps[layer - 1]
        for role, cosine in {"user": 0.5, "assistant": 0.5 - gap, "template": 0.9}.items():
            cones.append({"type": role, "space": "hidden", "layer": layer, "cosine": cosine})
            cones.append({"type": role, "space": "final", "layer": layer, "cosine": len(role) / 9})
    return Planted(
        dimension_means=pd.DataFrame(means).astype({"token_type": "category"}),
        anisotropy=pd.DataFrame(cones).astype({"type": "category"}),
    )


def roles(tables: Planted) -> list[str]:
    return verdicts_on_page("since/roles", "def least_alignment", every={"planted": tables})


def test_speakers_of_one_cone_hold():
    assert roles(speakers_with(0.1, 0.01, -0.05, 0.02)) == [HOLDS, HOLDS]


def test_speakers_apart_fail():
    assert roles(speakers_with(1.0, 0.01, -0.3, 0.02)) == [FAILS, FAILS]


# --- Where in a picture words look -----------------------------------------------------------------


def picture_with(inside: float, corner: float) -> Planted:
    """Four by four patches: the quarter at the top right, and the first patch, have these weights.

    They are relative to those of the other patches, that of the corner in the second layer alone.
    Patches as queries look elsewhere.
    """
    rows = []
    for layer in (1, 2):
        for row in (1, 2, 3, 4):
            for column in (1, 2, 3, 4):
                weight = 1.0
                if row < 3 and column > 2:
                    weight = inside
                if layer == 2 and (row, column) == (1, 1):
                    weight = corner
                place = {"layer": layer, "head": 1, "row": row, "column": column}
                rows.append({**place, "type": "other", "weight": weight})
                rows.append({**place, "type": "image", "weight": float(row == 4)})
    return Planted(attention_by_patch=pd.DataFrame(rows).astype({"type": "category"}))


def pictures(tables: Planted) -> list[str]:
    every = {"top right": tables, "bottom left": tables}
    cells = "def map_of", "def corner", "verdicts = ["
    found = run_cells("since/pictures", *cells, every=every)["verdicts"]
    return found[found["model"] == "top right"]["verdict"].tolist()


def test_words_that_look_at_the_digit_hold():
    assert pictures(picture_with(9.0, 1.0)) == [HOLDS, HOLDS]


def test_words_that_look_there_a_little_hold_small():
    assert pictures(picture_with(2.0, 1.0)) == [SMALL, HOLDS]


def test_words_that_look_at_the_corner_fail():
    assert pictures(picture_with(0.5, 30.0)) == [FAILS, FAILS]


# --- Beyond the trained length ---------------------------------------------------------------------


def along(lost: dict, mass: dict, rise: float, link: float = 1.0, before: float = 0.0) -> dict:
    """Three texts of a model that was trained on 64 tokens, with five heads.

    Args:
        lost: by length, the separation that is lost by then, of 1, after rotation.
        mass: by the end of a bin, the attention to the first token.
        rise: by how much the loss is higher from 64 to 128 tokens than in the bin before.
        link: 1 where the heads that lose most separation lose most of their sink, -1 where least.
        before: what is lost from 64 to 128 tokens before rotation.
    """
    clouds, sinks = [], []
    for number, head in itertools.product(range(3), range(1, 6)):
        # Texts differ a little, and in one of them two heads change places.
        off = 0.001 * number
        rank = {4: 5, 5: 4}.get(head, head) if number == 0 else head
        at = {"text": f"text {number}", "layer": 1, "head": head}
        for length, share in lost.items():
            last = length == 128
            # None in the median head, and on average.
            after = share + (0.02 * (head - 3) + off) * last - off
            for rotation, by_now in (("after", after), ("before", (before + off / 2) * last)):
                row = {**at, "length": length, "rotation": rotation, "queries": 0.7, "keys": 0.5}
                clouds.append({**row, "across": 0.6 - (1 - by_now)})
        for end, of_queries in mass.items():
            drop = (link * 0.02 * (rank - 3) + off) * (end == 128)
            row = {**at, "positions": f"{end // 2 + 1}-{end}"}
            sinks.append({**row, "mass": of_queries - drop})
    losses = []
    for number, (end, more) in itertools.product(range(3), {32: 1.0, 64: 0.0, 128: rise}.items()):
        # Texts differ much, and what they lose differs a little.
        loss = 2 + number + more * (1 + 0.01 * number)
        row = {"text": f"text {number}", "positions": f"{end // 2 + 1}-{end}", "loss": loss}
        losses.append({**row, "tokens": end // 2})
    bins = {"positions": "category"}
    return {
        "clouds": pd.DataFrame(clouds),
        "sinks": pd.DataFrame(sinks).astype(bins),
        "losses": pd.DataFrame(losses).astype(bins),
    }


def lengths(tables: dict) -> list[str]:
    cells = 'tables["sinks"]', 'tables["clouds"]', "separations =", 'tables["losses"]'
    named = {"tables": tables, "trained": 64, "corpus": ["a", "b", "c"], "model": "planted"}
    return verdicts_on_page("since/lengths", *cells, "def share_lost", **named)


def test_clouds_that_mix_beyond_training_and_take_the_sink_along():
    lost, mass = {32: 0.0, 64: 0.0, 128: 0.3}, {32: 0.8, 64: 0.8, 128: 0.4}
    assert lengths(along(lost, mass, rise=0.2)) == 6 * [HOLDS]


def test_a_little_lost_with_every_doubling_is_none_of_training():
    lost, mass = {32: 0.5, 64: 0.55, 128: 0.57}, {32: 0.8, 64: 0.7, 128: 0.65}
    found = lengths(along(lost, mass, rise=0.05, link=-1))
    assert found == [SMALL, SMALL, SMALL, FAILS, FAILS, SMALL]


def test_what_is_lost_before_rotation_is_no_work_of_rotation():
    lost, mass = {32: 0.0, 64: 0.0, 128: 0.3}, {32: 0.8, 64: 0.8, 128: 0.9}
    found = lengths(along(lost, mass, rise=-0.2, before=0.5))
    assert found == [HOLDS, FAILS, FAILS, FAILS, HOLDS, FAILS]


def test_of_a_model_that_predicts_nothing_the_rest_is_judged():
    lost, mass = {32: 0.0, 64: 0.0, 128: 0.3}, {32: 0.8, 64: 0.8, 128: 0.4}
    tables = along(lost, mass, rise=0.2)
    tables["losses"] = tables["losses"].head(0)
    assert lengths(tables) == [*(5 * [HOLDS]), NOT_APPLICABLE]
