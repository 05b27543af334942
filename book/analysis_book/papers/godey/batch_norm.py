"""Batch normalisation and the mean component of the maps of a network (Godey et al. 2024, 3.2)."""

import math
from contextlib import ExitStack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from analysis_lib.capture import Reading, Settings, batches
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.intervals import Estimate, jackknife
from analysis_lib.models import LoadedModel

Pairs = Float[np.ndarray, "norm side"]


def around_batch_norm(model: LoadedModel, corpus: Corpus) -> tuple[pd.DataFrame, Estimate]:
    """The average cosine of two positions of the maps before and after each batch normalisation.

    Args:
        model: a network that reads images.
        corpus: the images.

    Returns:
        One row per normalisation, in the order of the network: norm (from 1), module (the end of
        its name), before and after; and half of the cosine before minus the cosine after, mean over
        the normalisations: above zero where more than half of the cosine goes. Its interval is over
        units, such as photographs. A network without batch normalisation has no rows, and no
        number.
    """
    norms = {}
    for name, module in model.model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            norms[name] = module
    if not norms:
        empty = pd.DataFrame(columns=["norm", "module", "before", "after"])
        return empty, Estimate(math.nan)
    names = corpus.units or range(len(corpus))
    units, _ = pd.factorize(pd.Series(names))
    count = units.max() + 1
    # By normalisation and unit, of the maps before and after it.
    vectors = np.zeros((len(norms), count))
    sums = []
    for norm in norms.values():
        shape = (count, norm.num_features)
        sums.append((np.zeros(shape), np.zeros(shape)))
    current_units: list[int] = []

    def add_directions(of_side: np.ndarray, maps: Tensor) -> None:
        directions = nn.functional.normalize(maps.flatten(2), dim=1)
        total = directions.sum(-1, dtype=torch.float64)
        np.add.at(of_side, current_units, total.cpu().numpy())

    def add(index: int, before: Tensor, after: Tensor) -> None:
        sums_before, sums_after = sums[index]
        add_directions(sums_before, before)
        add_directions(sums_after, after)
        positions = before[0, 0].numel()
        np.add.at(vectors[index], current_units, positions)

    def cosines(*without: int) -> Pairs:
        kept = np.setdiff1d(np.arange(count), without)
        rows = []
        for sides, of_units in zip(sums, vectors, strict=True):
            number = of_units[kept].sum(keepdims=True)
            row = []
            for of_side in sides:
                total = of_side[kept].sum(0)
                row.append(mean_pair_cosine(total[None], number)[0])
            rows.append(row)
        return np.array(rows)

    def removed(pairs: Pairs) -> np.ndarray:
        before, after = pairs.T
        return np.asarray((before / 2 - after).mean())

    with ExitStack() as hooks, torch.no_grad():
        for index, norm in enumerate(norms.values()):

            def watch(
                _: nn.Module,
                inputs: tuple,
                output: Tensor,
                index: int = index,
            ) -> None:
                add(index, inputs[0], output)

            hook = norm.register_forward_hook(watch)
            hooks.callback(hook.remove)
        settings = Settings()
        for batch in batches(model, corpus.items, units.tolist(), settings, Reading()):
            current_units[:] = batch.groups
            model.model(**batch.inputs)
    whole = cosines()
    table = pd.DataFrame(whole, columns=["before", "after"])
    modules = [name.rpartition(".")[2] for name in norms]
    table.insert(0, "module", modules)
    table.insert(0, "norm", range(1, len(norms) + 1))
    without_each = [removed(cosines(unit)) for unit in range(count)]
    return table, jackknife(removed(whole), without_each)
