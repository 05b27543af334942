"""The spike of the first token and the attention that it draws, taken away: each of them, and
both.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch

from analysis_book.papers import recorded
from analysis_lib.capture import Activations
from analysis_lib.capture.interventions import Replace
from analysis_lib.corpora import Corpus
from analysis_lib.errors import require_whole
from analysis_lib.measurement import Tables, TableSet, measure
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric
from analysis_lib.metrics.anisotropy import Anisotropy
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import LoadedModel, load_model
from analysis_lib.models.loading import lacks_head

# From this height on, Sun et al. 2024 call an activation massive.
MASSIVE = 1000
HEIGHTS = {"massive": MASSIVE, "early": 100}
RANDOM = "random: mean"
RECORDED, TRAINED = "spike", "norms"


class _OfFirst(Metric):
    """Means over texts of what each of the first few tokens has: columns layer, position (from 0),
    these, and texts.
    """

    axes = ("position",)
    counts = "texts"
    means: tuple[str, ...]

    def __init__(self, positions: int = 3) -> None:
        super().__init__()
        self.positions = positions

    def _add(
        self,
        counted: torch.Tensor,
        activations: Activations,
        **values: torch.Tensor,
    ) -> None:
        for name in self.means:
            self.add(
                (name, activations.layer),
                torch.where(counted, values[name], 0).double(),
                activations,
            )
        self.add(("texts", activations.layer), counted.double(), activations)

    def rows(self, sums: LayerSums) -> Columns:
        texts = sums["texts"]
        several = np.where(texts > 0, texts, np.nan)
        means = {name: sums[name] / several for name in self.means}
        return {**means, "texts": texts}


class SpikeHeight(_OfFirst):
    """How high the first tokens of a text spike in each hidden layer.

    The height is the largest |x_j| of the token over the median of |x_j| of all tokens of its text;
    Sun et al. 2024, sec. 2, call an activation massive where it is some 1,000 or more (and above
    100 in itself).
    """

    name, needs, interval, means = "spike_height", frozenset({"hidden"}), "height", ("height",)

    def update(self, activations: Activations) -> None:
        hidden = activations.spaces["hidden"]
        sizes, mask = hidden.values[:, 0].abs(), hidden.tokens.mask
        typical = torch.stack([size[real].median() for size, real in zip(sizes, mask, strict=True)])
        heights = sizes[:, : self.positions].amax(-1) / typical.unsqueeze(1)
        self._add(mask[:, : self.positions], activations, height=heights)


class FirstKeys(_OfFirst):
    """How much of the attention of later queries each of the first keys gets in a causal model, and
    what it hands on.

    Weights of the queries after these keys, mean over them, over heads and over texts; scores are
    divided by the root of the width of a head. Another column, size: the norm of the value over
    that of later values, mean over heads.

    Args:
        masked: the attention layers in which the first key is masked.
    """

    name, needs, means = "first_keys", frozenset({"query", "key", "value"}), ("weight", "size")
    interval, limits = "weight", (0, 1)

    def __init__(self, positions: int = 3, masked: tuple[int, ...] = ()) -> None:
        super().__init__(positions)
        self.masked = masked

    def update(self, activations: Activations) -> None:
        if "query" not in activations.spaces:
            return
        query, key, value = (activations.spaces[name].values for name in ("query", "key", "value"))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        seen[1:, 0] = activations.layer not in self.masked
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)
        later = activations.tokens.mask[:, self.positions :].to(weights.dtype)
        count = later.sum(1, keepdim=True).clamp_min(1)
        given = (later.unsqueeze(1) @ weights[:, self.positions :, : self.positions]).squeeze(
            1
        ) / count
        norms = value.norm(dim=-1)
        typical = (norms[..., self.positions :] * later.unsqueeze(1)).sum(
            -1, keepdim=True
        ) / count.unsqueeze(1)
        counted = later.any(1, keepdim=True).expand_as(given)
        sizes = (norms[..., : self.positions] / typical).mean(1)
        self._add(counted, activations, weight=given, size=sizes)


class HiddenAnisotropy(Anisotropy):
    """The table ``anisotropy`` of hidden states alone."""

    needs = frozenset({"hidden"})


def spike_layer(tables: TableSet, height: float = MASSIVE) -> int:
    """The first hidden layer in which the first token is so high; or that in which it is
    highest.
    """
    found = tables["spike_height"].query("position == 0").set_index("layer")["height"]
    return int((found >= height).idxmax() if (found >= height).any() else found.idxmax())


def largest_dimensions(
    tables: TableSet,
    layer: int,
    token: str,
    count: int = 3,
) -> tuple[int, ...]:
    """The dimensions in which the mean vector of a type of token is largest in magnitude, in a
    hidden layer.
    """
    means = tables["dimension_means"]
    means = means[(means["layer"] == layer) & (means["token_type"] == token)].set_index(
        "dimension"
    )["mean"]
    return tuple(map(int, means.abs().nlargest(count).index))


def arms(
    layer: int,
    dimensions: tuple[int, ...],
    token: str,
    last: int,
) -> dict[str, tuple[Replace, ...]]:
    """What is done to the spike of a token in a hidden layer, and to its key in the attention after
    it, by name.
    """
    at = {"where": "residual", "layers": (layer,), "tokens": (token,)}
    spike, after = at | {"dimensions": dimensions}, tuple(range(layer + 1, last + 1))
    gone, masked = (
        Replace(**spike, by="mean_of_rest"),
        Replace("weights", layers=after, tokens=(token,)),
    )
    silent = Replace("value", layers=after, tokens=(token,), by="zero")
    held = Replace(**spike | {"layers": tuple(range(layer, last))}, by="mean_of_rest")
    return {
        "spike: mean": (gone,),
        "spike: mean, held": (held,),
        "spike: zero": (Replace(**spike, by="zero"),),
        "spike: noise": (Replace(**spike, by="noise"),),
        "spike: another text's": (Replace(**spike, by="other_of_type"),),
        "all but spike: mean": (Replace(**spike, by="mean_of_rest", but=True),),
        "token: mean": (Replace(**at, by="mean_of_rest"),),
        "token: another text's": (Replace(**at, by="other_of_type"),),
        "key: masked": (masked,),
        "key: masked everywhere": (Replace("weights", tokens=(token,)),),
        "spike: mean; key: masked": (gone, masked),
        "value: zero": (silent,),
        "spike: mean; value: zero": (gone, silent),
    }


def random_arms(
    layer: int,
    dimensions: tuple[int, ...],
    token: str,
    width: int,
    draws: int,
    seed: int = 0,
) -> list[tuple[Replace]]:
    """As many other dimensions of the token, drawn at random, get the mean of the other tokens; so
    many draws.
    """
    random, others = np.random.default_rng(seed), sorted({*range(width)} - {*dimensions})
    drawn = [
        tuple(map(int, random.choice(others, len(dimensions), replace=False))) for _ in range(draws)
    ]
    at = {"layers": (layer,), "tokens": (token,), "by": "mean_of_rest"}
    return [(Replace("residual", dimensions=chosen, **at),) for chosen in drawn]


def first_type(tables: TableSet) -> str:
    """The type of the first token of each text: ``cls``, or ``first`` where a model has no
    [CLS].
    """
    return "first" if (tables["attention_by_token_type"]["key_type"] == "first").any() else "cls"


def key_weight(
    tables: TableSet,
    token: str,
    after: int,
) -> float:
    """The weight of the key of a token, mean over heads and over the attention layers after a
    hidden layer.
    """
    found = tables["attention_by_token_type"]
    return found.loc[(found["layer"] > after) & (found["key_type"] == token), "weight"].mean()


def effects(
    plain: Tables,
    changed: Tables,
    layer: int,
    token: str,
) -> dict[str, Estimate]:
    """What a change does, with intervals paired over texts.

    Returns:
        loss, of the next token, with the change less without it, in nats, and kl, or (of a model
        that predicts none) turned, the cosine of a vector that the model gives out to the one
        without the change; weight, of the key of the token in the attention after ``layer``, with
        the change over without it; cosine, the average cosine with the change over without it, mean
        over the hidden layers from ``layer`` to the last but one.
    """

    def cosines(t: TableSet) -> pd.Series:
        return (
            t["anisotropy"]
            .query("space == 'hidden'")
            .set_index("layer")["cosine"]
            .loc[layer:]
            .iloc[:-1]
        )

    found = {
        "weight": lambda a, b: key_weight(b, token, layer) / key_weight(a, token, layer),
        "cosine": lambda a, b: (cosines(b) / cosines(a)).mean(),
    }
    if "next_token_loss" in [*changed]:
        found["loss"] = lambda a, b: (
            b["next_token_loss"]["loss"].iloc[0] - a["next_token_loss"]["loss"].iloc[0]
        )
        found["kl"] = lambda a, b: b["next_token_loss"]["kl"].iloc[0]
    else:
        found["turned"] = lambda a, b: b["output_change"]["cosine"].iloc[0]
    return plain.intervals(found, changed)


def every_effect(
    model: str,
    corpus: Corpus,
    draws: int = 20,
) -> pd.DataFrame:
    """The :func:`effects` of all arms, as they come with the book, or measured.

    Args:
        draws: of random dimensions, for the first of the ``HEIGHTS``.

    Returns:
        Columns spike (the name of a height, of which the :func:`spike_layer` has all arms, unless
        it is that of another height), layer, dimensions, arm, draw, quantity, value, ci_low,
        ci_high, groups.
    """
    draws = require_whole("draws", draws, 0)
    place = recorded.origin(model, corpus, draws=draws)
    return recorded.rows_of(RECORDED, lambda: _measured(load_model(model), corpus, draws), **place)


def panels(rows: pd.DataFrame) -> dict[str, str]:
    """The effects that a figure shows, and what it calls them.

    Where the model predicts no token, because it is none of those or comes without its head, how
    far its output turns stands in the place of the loss.
    """
    names = {
        "loss": "extra loss, nats",
        "turned": "output's cosine",
        "weight": "key weight",
        "cosine": "mean cosine",
    }
    measured = {*rows["quantity"]}
    return {quantity: name for quantity, name in names.items() if quantity in measured}


def costs(spike: Estimate, silent: Estimate) -> str:
    """What prediction costs without the spike, as a clause of a sentence; empty where the model
    predicts no token.

    Args:
        spike: the extra loss without the spike, in nats.
        silent: that without the spike, and with a value of zero in its place.
    """
    if np.isnan(spike.value):
        return ""
    reason = ": its value is silent no longer" if silent.value < spike.value / 2 else ""
    return f", but prediction costs **{spike.value:.1f} nats** more{reason}"


def record(**of_models: tuple[Corpus, int]) -> None:
    """Write what comes with the book: by model, the corpus that it reads, and how many draws."""
    found = (
        (_measured(load_model(model), corpus, draws), recorded.origin(model, corpus, draws=draws))
        for model, (corpus, draws) in of_models.items()
    )
    recorded.write(RECORDED, found)


def _measured(
    model: LoadedModel,
    corpus: Corpus,
    draws: int,
) -> pd.DataFrame:
    of_attention = ["attention_by_token_type", HiddenAnisotropy()]
    before = [*of_attention, "dimension_means", SpikeHeight()]
    if lacks_head(model, "next"):
        metrics = [*of_attention, "output_change"]
    else:
        metrics = [*of_attention, "next_token_loss"]
        before.append("next_token_loss")
    rows = []
    plain = measure(model, corpus, before, progress=False)
    last, width = int(plain.layers["layer"].max()), int(plain.layers["width"].iloc[0])
    token = first_type(plain)
    for name, height in HEIGHTS.items():
        layer = spike_layer(plain, height)
        if any(row["layer"] == layer for row in rows):
            continue
        dimensions = largest_dimensions(plain, layer, token)
        chance = random_arms(layer, dimensions, token, width, 0 if rows else draws)
        several = [(RANDOM, draw, change) for draw, change in enumerate(chance)]
        several += [
            (arm, 0, change) for arm, change in arms(layer, dimensions, token, last).items()
        ]
        for arm, draw, change in several:
            changed = measure(model, corpus, metrics, intervention=change, progress=False)
            found = effects(plain, changed, layer, token)
            if any(one.where == "weights" for one in change):
                # Nobody is left to see the key but its own query.
                del found["weight"]
            about = {
                "spike": name,
                "layer": layer,
                "dimensions": " ".join(map(str, dimensions)),
                "arm": arm,
                "draw": draw,
            }
            for quantity, one in found.items():
                rows.append(about | {"quantity": quantity} | recorded.as_columns(one))
    return pd.DataFrame(rows)


def estimate(
    rows: pd.DataFrame,
    arm: str,
    quantity: str,
) -> Estimate:
    """One effect of those of :func:`every_effect`, in one layer; NaN where the model has no such
    quantity.
    """
    found = rows[(rows["arm"] == arm) & (rows["quantity"] == quantity)]
    return Estimate(*found[[*recorded.COLUMNS]].iloc[0]) if len(found) else Estimate(np.nan)


def layer_by_layer(
    model: LoadedModel,
    corpus: Corpus,
    layer: int,
    dimensions: tuple[int, ...],
) -> dict[str, Tables]:
    """The tables spike_height, first_keys and attention_by_token_type of a causal model, by what is
    done.

    Args:
        layer, dimensions: of the spike.
    """
    plain = measure(
        model, corpus, [SpikeHeight(), FirstKeys(), "attention_by_token_type"], progress=False
    )
    last = int(plain.layers["layer"].max())
    done, found = arms(layer, dimensions, first_type(plain), last), {"no change": plain}
    for arm, masked in (("spike: mean", ()), ("key: masked everywhere", tuple(range(1, last + 1)))):
        metrics = [SpikeHeight(), FirstKeys(masked=masked), "attention_by_token_type"]
        found[arm] = measure(model, corpus, metrics, intervention=done[arm], progress=False)
    return found


def first_tokens(model: str, corpus: Corpus) -> pd.DataFrame:
    """The spike and the sink of a causal model, layer by layer, as they come with the book, or
    measured.

    Returns:
        Columns layer; height, of the first token, mean over texts; received, the attention that its
        key receives from the queries that see it, mean over heads, and most, of the head that gives
        most; loss, of the next token on these texts, in nats, the same in all rows. The layer of
        the input has no attention.
    """
    return recorded.rows_of(
        TRAINED, lambda: _first_tokens(model, corpus), **recorded.origin(model, corpus)
    )


def record_first_tokens(models: Iterable[str], corpus: Corpus) -> None:
    """Write what comes with the book of :func:`first_tokens`."""
    recorded.write(
        TRAINED, ((_first_tokens(name, corpus), recorded.origin(name, corpus)) for name in models)
    )


def _first_tokens(model: str, corpus: Corpus) -> pd.DataFrame:
    tables = measure(
        model, corpus, [SpikeHeight(), "attention_received", "next_token_loss"], progress=False
    )
    first = tables["attention_received"].query("position == 1").groupby("layer")["received"]
    heights = tables["spike_height"].query("position == 0").set_index("layer")["height"]
    found = pd.DataFrame({"height": heights, "received": first.mean(), "most": first.max()})
    return found.assign(loss=tables["next_token_loss"]["loss"].iloc[0]).reset_index()
