"""The spike of the first token and the attention that it draws, taken away: each, and both."""

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
# The files in ``data/measurements/causes``.
RECORDED = "spike"
TRAINED = "norms"


class _OfFirst(Metric):
    """Means over texts of what each of the first few tokens has.

    Columns: layer, position (from 0), these means, and texts.
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
        layer = activations.layer
        for name in self.means:
            kept = torch.where(counted, values[name], 0)
            self.add((name, layer), kept.double(), activations)
        self.add(("texts", layer), counted.double(), activations)

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

    name = "spike_height"
    needs = frozenset({"hidden"})
    interval = "height"
    means = ("height",)

    def update(self, activations: Activations) -> None:
        hidden = activations.spaces["hidden"]
        sizes = hidden.values[:, 0].abs()
        mask = hidden.tokens.mask
        medians = []
        for of_text, real in zip(sizes, mask, strict=True):
            medians.append(of_text[real].median())
        typical = torch.stack(medians).unsqueeze(1)
        highest = sizes[:, : self.positions].amax(-1)
        counted = mask[:, : self.positions]
        self._add(counted, activations, height=highest / typical)


class FirstKeys(_OfFirst):
    """How much attention of later queries each of the first keys gets, and what it hands on.

    Of a causal model: the weights of the queries after these keys, mean over them, over heads and
    over texts; scores are divided by the root of the width of a head. Another column, size: the
    norm of the value over that of later values, mean over heads.

    Args:
        masked: the attention layers in which the first key is masked.
    """

    name = "first_keys"
    needs = frozenset({"query", "key", "value"})
    means = ("weight", "size")
    interval = "weight"
    limits = (0, 1)

    def __init__(self, positions: int = 3, masked: tuple[int, ...] = ()) -> None:
        super().__init__(positions)
        self.masked = masked

    def update(self, activations: Activations) -> None:
        if "query" not in activations.spaces:
            return
        query = activations.spaces["query"].values
        key = activations.spaces["key"].values
        value = activations.spaces["value"].values
        # Grouped queries share the keys of their group.
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, 1)
        scores = query @ key.transpose(2, 3)
        scores = scores / query.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        seen = seen.tril()
        seen[1:, 0] = activations.layer not in self.masked
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        of_later = weights.mean(1)[:, self.positions :, : self.positions]
        later = activations.tokens.mask[:, self.positions :].to(weights.dtype)
        later = later.unsqueeze(1)
        count = later.sum(2).clamp_min(1)
        received = (later @ of_later).squeeze(1) / count
        norms = value.norm(dim=-1)
        later_norms = norms[..., self.positions :] * later
        typical = later_norms.sum(-1, keepdim=True) / count.unsqueeze(1)
        sizes = norms[..., : self.positions] / typical
        counted = later.any(2).expand_as(received)
        self._add(counted, activations, weight=received, size=sizes.mean(1))


class HiddenAnisotropy(Anisotropy):
    """The table ``anisotropy`` of hidden states alone."""

    needs = frozenset({"hidden"})


def spike_layer(tables: TableSet, height: float = MASSIVE) -> int:
    """The first hidden layer in which the first token is so high, else that of its highest."""
    heights = tables["spike_height"].query("position == 0")
    heights = heights.set_index("layer")["height"]
    high = heights >= height
    layer = high.idxmax() if high.any() else heights.idxmax()
    return int(layer)


def largest_dimensions(
    tables: TableSet,
    layer: int,
    token: str,
    count: int = 3,
) -> tuple[int, ...]:
    """The largest dimensions, in magnitude, of the mean hidden state of a type of token."""
    means = tables["dimension_means"]
    in_layer = means["layer"] == layer
    of_type = means["token_type"] == token
    sizes = means[in_layer & of_type].set_index("dimension")["mean"].abs()
    return tuple(map(int, sizes.nlargest(count).index))


def arms(
    layer: int,
    dimensions: tuple[int, ...],
    token: str,
    last: int,
) -> dict[str, tuple[Replace, ...]]:
    """Changes of the spike of a token in a hidden layer, and of its key in attention after it."""
    at = {"where": "residual", "layers": (layer,), "tokens": (token,)}
    spike = at | {"dimensions": dimensions}
    every_later = spike | {"layers": tuple(range(layer, last))}
    after = {"layers": tuple(range(layer + 1, last + 1)), "tokens": (token,)}
    gone = Replace(**spike, by="mean_of_rest")
    held = Replace(**every_later, by="mean_of_rest")
    masked = Replace("weights", **after)
    silent = Replace("value", **after, by="zero")
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
    """Changes of as many other dimensions of the token, drawn at random so many times.

    They get the mean of the other tokens.
    """
    random = np.random.default_rng(seed)
    others = sorted({*range(width)} - {*dimensions})
    at = {"layers": (layer,), "tokens": (token,), "by": "mean_of_rest"}
    changes = []
    for _ in range(draws):
        drawn = random.choice(others, len(dimensions), replace=False)
        chosen = tuple(map(int, drawn))
        change = Replace("residual", dimensions=chosen, **at)
        changes.append((change,))
    return changes


def first_type(tables: TableSet) -> str:
    """The type of the first token: ``cls``, or ``first`` where a model has no [CLS]."""
    types = tables["attention_by_token_type"]["key_type"]
    return "first" if (types == "first").any() else "cls"


def key_weight(
    tables: TableSet,
    token: str,
    after: int,
) -> float:
    """The weight of the key of a token after a hidden layer, mean over heads and layers."""
    table = tables["attention_by_token_type"]
    later = table["layer"] > after
    of_type = table["key_type"] == token
    return table.loc[later & of_type, "weight"].mean()


def effects(
    plain: Tables,
    changed: Tables,
    layer: int,
    token: str,
) -> dict[str, Estimate]:
    """The effects of a change, with intervals paired over texts.

    Returns:
        loss, of the next token, with the change less without it, in nats, and kl, or (of a model
        that predicts none) turned, the cosine of a vector that the model gives out to the one
        without the change; weight, of the key of the token in the attention after ``layer``, with
        the change over without it; cosine, the average cosine with the change over without it, mean
        over the hidden layers from ``layer`` to the last but one.
    """

    def cosines(tables: TableSet) -> pd.Series:
        hidden = tables["anisotropy"].query("space == 'hidden'")
        by_layer = hidden.set_index("layer")["cosine"]
        return by_layer.loc[layer:].iloc[:-1]

    def number(
        tables: TableSet,
        name: str,
        column: str,
    ) -> float:
        return tables[name][column].iloc[0]

    def weight(before: TableSet, after: TableSet) -> float:
        return key_weight(after, token, layer) / key_weight(before, token, layer)

    def cosine(before: TableSet, after: TableSet) -> float:
        return (cosines(after) / cosines(before)).mean()

    def loss(before: TableSet, after: TableSet) -> float:
        with_change = number(after, "next_token_loss", "loss")
        return with_change - number(before, "next_token_loss", "loss")

    def divergence(_: TableSet, after: TableSet) -> float:
        return number(after, "next_token_loss", "kl")

    def turned(_: TableSet, after: TableSet) -> float:
        return number(after, "output_change", "cosine")

    statistics = {"weight": weight, "cosine": cosine}
    if "next_token_loss" in [*changed]:
        statistics |= {"loss": loss, "kl": divergence}
    else:
        statistics["turned"] = turned
    return plain.intervals(statistics, changed)


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

    def measured() -> pd.DataFrame:
        return _measured(load_model(model), corpus, draws)

    origin = recorded.origin(model, corpus, draws=draws)
    return recorded.rows_of(RECORDED, measured, **origin)


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
    """The cost in prediction of losing the spike, as a clause of a sentence.

    It is empty where the model predicts no token.

    Args:
        spike: the extra loss without the spike, in nats.
        silent: that without the spike, and with a value of zero in its place.
    """
    if np.isnan(spike.value):
        return ""
    reason = ", because its value now adds noise" if silent.value < spike.value / 2 else ""
    return f", but prediction costs **{spike.value:.1f} nats** more{reason}"


def record(**models: tuple[Corpus, int]) -> None:
    """Write what comes with the book: by model, the corpus that it reads, and how many draws."""
    tables = []
    for name, (corpus, draws) in models.items():
        rows = _measured(load_model(name), corpus, draws)
        tables.append((rows, recorded.origin(name, corpus, draws=draws)))
    recorded.write(RECORDED, tables)


def _measured(
    model: LoadedModel,
    corpus: Corpus,
    draws: int,
) -> pd.DataFrame:
    of_attention = ["attention_by_token_type", HiddenAnisotropy()]
    before = [*of_attention, "dimension_means", SpikeHeight()]
    if lacks_head(model, "next"):
        after = [*of_attention, "output_change"]
    else:
        after = [*of_attention, "next_token_loss"]
        before.append("next_token_loss")
    plain = measure(model, corpus, before, progress=False)
    last = int(plain.layers["layer"].max())
    width = int(plain.layers["width"].iloc[0])
    token = first_type(plain)
    layers: list[int] = []
    rows = []
    for name, height in HEIGHTS.items():
        layer = spike_layer(plain, height)
        if layer in layers:
            continue
        dimensions = largest_dimensions(plain, layer, token)
        changes = []
        if not layers:
            chance = random_arms(layer, dimensions, token, width, draws)
            changes += [(RANDOM, draw, change) for draw, change in enumerate(chance)]
        for arm, change in arms(layer, dimensions, token, last).items():
            changes.append((arm, 0, change))
        layers.append(layer)
        for arm, draw, change in changes:
            changed = measure(model, corpus, after, intervention=change, progress=False)
            estimates = effects(plain, changed, layer, token)
            if any(part.where == "weights" for part in change):
                # Nobody is left to see the key but its own query.
                del estimates["weight"]
            labels = {
                "spike": name,
                "layer": layer,
                "dimensions": " ".join(map(str, dimensions)),
                "arm": arm,
                "draw": draw,
            }
            for quantity, effect in estimates.items():
                numbers = recorded.as_columns(effect)
                rows.append(labels | {"quantity": quantity} | numbers)
    return pd.DataFrame(rows)


def estimate(
    rows: pd.DataFrame,
    arm: str,
    quantity: str,
) -> Estimate:
    """One effect of :func:`every_effect`, in one layer; NaN where the model has none of it."""
    of_arm = rows["arm"] == arm
    of_quantity = rows["quantity"] == quantity
    numbers = rows.loc[of_arm & of_quantity, [*recorded.COLUMNS]]
    if numbers.empty:
        return Estimate(np.nan)
    return Estimate(*numbers.iloc[0])


def layer_by_layer(
    model: LoadedModel,
    corpus: Corpus,
    layer: int,
    dimensions: tuple[int, ...],
) -> dict[str, Tables]:
    """The tables spike_height, first_keys and attention_by_token_type of a causal model, by arm.

    Args:
        layer, dimensions: of the spike.
    """

    def measured(change: tuple[Replace] | None, masked: tuple[int, ...] = ()) -> Tables:
        metrics = [SpikeHeight(), FirstKeys(masked=masked), "attention_by_token_type"]
        return measure(model, corpus, metrics, intervention=change, progress=False)

    plain = measured(None)
    last = int(plain.layers["layer"].max())
    changes = arms(layer, dimensions, first_type(plain), last)
    everywhere = tuple(range(1, last + 1))
    return {
        "no change": plain,
        "spike: mean": measured(changes["spike: mean"]),
        "key: masked everywhere": measured(changes["key: masked everywhere"], everywhere),
    }


def first_tokens(model: str, corpus: Corpus) -> pd.DataFrame:
    """The spike and the sink of a causal model, layer by layer: as shipped, or measured.

    Returns:
        Columns layer; height, of the first token, mean over texts; received, the attention that its
        key receives from the queries that see it, mean over heads, and most, of the head that gives
        most; loss, of the next token on these texts, in nats, the same in all rows. The layer of
        the input has no attention.
    """

    def measured() -> pd.DataFrame:
        return _first_tokens(model, corpus)

    return recorded.rows_of(TRAINED, measured, **recorded.origin(model, corpus))


def record_first_tokens(models: Iterable[str], corpus: Corpus) -> None:
    """Write what comes with the book of :func:`first_tokens`."""
    tables = []
    for name in models:
        rows = _first_tokens(name, corpus)
        tables.append((rows, recorded.origin(name, corpus)))
    recorded.write(TRAINED, tables)


def _first_tokens(model: str, corpus: Corpus) -> pd.DataFrame:
    metrics = [SpikeHeight(), "attention_received", "next_token_loss"]
    tables = measure(model, corpus, metrics, progress=False)
    first = tables["attention_received"].query("position == 1")
    received = first.groupby("layer")["received"]
    heights = tables["spike_height"].query("position == 0")
    columns = {
        "height": heights.set_index("layer")["height"],
        "received": received.mean(),
        "most": received.max(),
    }
    loss = tables["next_token_loss"]["loss"].iloc[0]
    return pd.DataFrame(columns).assign(loss=loss).reset_index()
