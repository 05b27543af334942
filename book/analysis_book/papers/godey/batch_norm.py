"""What batch normalisation does to the mean component of the maps of a network (Godey et al. 2024,
section 3.2).
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from analysis_lib.capture import Reading, Settings, batches
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.intervals import Estimate, jackknife
from analysis_lib.models import LoadedModel


def around_batch_norm(model: LoadedModel, corpus: Corpus) -> tuple[pd.DataFrame, Estimate]:
    """The average cosine of two positions of the maps before and after each batch normalisation of
    a network.

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
    norms = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    }
    units = pd.factorize(pd.Series(corpus.units or range(len(corpus))))[0]
    if not norms:
        return pd.DataFrame(columns=["norm", "module", "before", "after"]), Estimate(math.nan)
    sums = [
        [np.zeros((units.max() + 1, norm.num_features)) for _ in range(2)]
        for norm in norms.values()
    ]
    vectors = np.zeros((len(norms), units.max() + 1))
    read: list[tuple[int, ...]] = []

    def add(place: int, sides: Sequence[Tensor]) -> None:
        for into, maps in zip(sums[place], sides, strict=True):
            directions = nn.functional.normalize(maps.flatten(2), dim=1).sum(
                -1, dtype=torch.float64
            )
            np.add.at(into, [*read[-1]], directions.cpu().numpy())
        np.add.at(vectors[place], [*read[-1]], sides[0][0, 0].numel())

    def cosines(*without: int) -> np.ndarray:
        kept = np.setdiff1d(np.arange(units.max() + 1), without)
        numbers = vectors[:, kept].sum(1, keepdims=True)
        pairs = zip(sums, numbers, strict=True)
        return np.array(
            [[mean_pair_cosine(s[kept].sum(0)[None], n)[0] for s in sides] for sides, n in pairs]
        )

    def removed(found: np.ndarray) -> np.ndarray:
        return np.asarray((found[:, 0] / 2 - found[:, 1]).mean())

    with ExitStack() as hooks, torch.no_grad():
        for i, norm in enumerate(norms.values()):
            hook = norm.register_forward_hook(
                lambda _, given, output, i=i: add(i, (given[0], output))
            )
            hooks.callback(hook.remove)
        for batch in batches(model, corpus.items, units.tolist(), Settings(), Reading()):
            read.append(batch.groups)
            model.model(**batch.inputs)
    whole = cosines()
    table = pd.DataFrame(whole, columns=["before", "after"])
    table.insert(0, "module", [name.rpartition(".")[2] for name in norms])
    table.insert(0, "norm", range(1, len(norms) + 1))
    return table, jackknife(
        removed(whole), [removed(cosines(unit)) for unit in range(units.max() + 1)]
    )
