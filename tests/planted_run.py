"""A run of training whose quantities are planted, for the tests of what is computed and drawn of
runs.
"""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis_book.training.dynamics import Dynamics, heads_shown

STEPS = (0, 10, 100, 1000)
LAYERS, HEADS, WIDTH = 6, 3, 8
# Layers 1 and 2 are the first third, 5 and 6 the last.
THIRDS = {1: "first third", 2: "first third", 5: "last third", 6: "last third"}


def planted(
    cosine: Callable[[int, int, float, int], float] = lambda layer, head, way, seed: way * 0.9,
    entropy: Callable[[int, float], float] = lambda layer, way: 3 - way + 0.1 * layer,
    anisotropy: Callable[[int, float], float] = lambda layer, way: 0.2 + 0.3 * way,
    dot: Callable[[float, float], float] = lambda cosine, way: cosine * (1 + way),
    seeds: tuple[int, ...] = (0,),
    steps: tuple[int, ...] = STEPS,
) -> Dynamics:
    """A run whose quantities are given functions of the way, from 0 at the start to 1 at the last
    checkpoint.

    A mean query points along a dimension and its mean key lies in the plane of this and the next;
    heads and seeds take turns, so that together they are spread over all dimensions. Of the first
    seed, nine queries and nine keys are sampled around them in each head that is shown.
    """
    alignment, means, entropies, hidden = [], [], [], []
    for seed in seeds:
        for step in steps:
            way = step / steps[-1]
            for layer in range(1, LAYERS + 1):
                hidden.append((seed, step, "hidden", layer - 1, pd.NA, anisotropy(layer, way)))
                for head in range(1, HEADS + 1):
                    c = cosine(layer, head, way, seed)
                    alignment.append((seed, step, layer, head, c, dot(c, way)))
                    nats = entropy(layer, way)
                    hidden += [
                        (seed, step, space, layer, head, 0.5 * way) for space in ("query", "key")
                    ]
                    entropies.append((seed, step, layer, head, nats + 0.01 * head, nats / 5))
                    for space, vector in (("query", (1, 0)), ("key", (c, math.sqrt(1 - c**2)))):
                        turn = (seed * LAYERS + layer) * HEADS + head
                        values = np.roll([*vector, *[0.0] * (WIDTH - 2)], turn)
                        means += [
                            (seed, step, space, layer, head, d, (1 + way) * v)
                            for d, v in enumerate(values)
                        ]
    front = ["seed", "step"]
    tables = {
        "qk_alignment": pd.DataFrame(alignment, columns=[*front, "layer", "head", "cosine", "dot"]),
        "head_means": pd.DataFrame(
            means, columns=[*front, "space", "layer", "head", "dimension", "mean"]
        ),
        "attention_entropy": pd.DataFrame(
            entropies, columns=[*front, "layer", "head", "entropy_nats", "entropy_normalised"]
        ),
        "anisotropy": pd.DataFrame(hidden, columns=[*front, "space", "layer", "head", "cosine"]),
        "losses": pd.DataFrame(
            [
                (s, t, 64 * t, 1e-3, 5 - t / 1000 if t else math.nan, 6 - t / 500)
                for s in seeds
                for t in steps
            ],
            columns=[*front, "tokens", "learning_rate", "loss", "held_out"],
        ),
        "baselines": pd.DataFrame(
            {"baseline": ["unigram", "bigram", "neighbours"], "loss": [5.5, 4.5, 4.2]}
        ),
    }
    shown = set(heads_shown(tables["qk_alignment"]).values())
    tables["vectors"] = _sampled(tables["head_means"], shown, seeds[0])
    return Dynamics(tables, {"run": "planted", "data": "texts", "limit": 9, "seeds": list(seeds)})


def _sampled(means: pd.DataFrame, heads: set[tuple[int, int]], seed: int) -> pd.DataFrame:
    noise = np.random.default_rng(0).normal(scale=0.1, size=(9, WIDTH))
    noise -= noise.mean(0)
    frames = []
    for (found, step, space, layer, head), part in means.groupby(
        ["seed", "step", "space", "layer", "head"]
    ):
        if found == seed and (layer, head) in heads:
            values = pd.DataFrame(
                part["mean"].to_numpy() + noise, columns=[str(d) for d in range(WIDTH)]
            )
            labels = {"seed": seed, "step": step, "layer": layer, "head": head, "space": space}
            frames.append(pd.concat([pd.DataFrame(labels, values.index), values], axis=1))
    return pd.concat(frames, ignore_index=True)


def thirds_apart(layer: int, head: int, way: float, seed: int) -> float:
    """Heads of the first third end similar, those of the last third opposite, the others at right
    angles.
    """
    end = {"first third": 0.9, "last third": -0.9}.get(THIRDS.get(layer), 0.0)
    return way * (end - 0.02 * head * np.sign(end))
