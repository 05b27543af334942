"""What the cone is made of: the part of each dimension in the average cosine, before and after
training.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from analysis_book.papers import recorded
from analysis_lib.capture import Activations, Vectors
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import Tables, TableSet, measure
from analysis_lib.metrics import Isotropy
from analysis_lib.metrics.anisotropy import Anisotropy
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import LoadedModel, load_model

RECORDED = "cone"
TOP = 3
TWIN = ":untrained"


class WithoutDimensions(Anisotropy):
    """The average cosine of hidden states without some dimensions: a table of its own name, as that
    of ``anisotropy``.

    Args:
        name: of the table.
        dimensions: by hidden layer.
    """

    needs = frozenset({"hidden"})

    def __init__(self, name: str, dimensions: Mapping[int, tuple[int, ...]]):
        super().__init__()
        self.name, self.dimensions = name, dimensions

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """The hidden states of a layer, with zeros in its dimensions."""
        values = activations.spaces["hidden"].values.clone()
        values[..., [*self.dimensions[activations.layer]]] = 0
        yield "hidden", Vectors(values, activations.spaces["hidden"].tokens)


def parts(tables: TableSet, space: str = "hidden") -> pd.DataFrame:
    """c_j, the part of each dimension in the average cosine: one row per layer, one column per
    dimension.
    """
    table = tables["cosine_by_dimension"]
    return table[table["space"] == space].pivot(index="layer", columns="dimension", values="cosine")


def share_of_top(
    of_layer: Float[np.ndarray, "layer dimension"], count: int = TOP
) -> Float[np.ndarray, " layer"]:
    """The share of the largest c_j in their sum.

    >>> share_of_top(np.array([[0.5, 0.1, 0.1, 0.1, 0.2]]))
    array([0.8])
    """
    return np.sort(of_layer, axis=1)[:, -count:].sum(1) / of_layer.sum(1)


def effective_number(of_layer: Float[np.ndarray, "layer dimension"]) -> Float[np.ndarray, " layer"]:
    """(Σ c_j)² / Σ c_j², at most as many as there are dimensions.

    Of a direction drawn at random in d dimensions, whose squared coordinates are the c_j, it is
    near d/3.

    >>> effective_number(np.array([[0.1, 0.1, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0]])).tolist()
    [2.0, 1.0]
    """
    return of_layer.sum(1) ** 2 / (of_layer**2).sum(1)


def partition_isotropy(vectors: Float[np.ndarray, "vector dim"], signs: bool = False) -> float:
    """I(W), how even the partition function Z(x) = Σ_w exp(w · x) is over directions: min Z / max
    Z, 1 if isotropic.

    The directions x are the eigenvectors of WᵀW (Mu and Viswanath 2018), with the signs that they
    happen to come with (so Machina and Mercer 2024), or with both, which makes I(W) no larger. It
    depends on the lengths of the vectors.

    >>> partition_isotropy(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    1.0
    """
    along = vectors @ np.linalg.eigh(vectors.T @ vectors)[1]
    along = np.concatenate([along, -along], 1) if signs else along
    logs = np.logaddexp.reduce(along, axis=0)
    return float(np.exp(logs.min() - logs.max()))


def of_both(name: str, corpus: Corpus) -> pd.DataFrame:
    """What the cone of a model is made of, and that of an untrained copy, as it comes with the
    book, or measured.

    Returns:
        Columns weights (trained, untrained, or their ratio), space, layer, quantity, value, ci_low,
        ci_high, groups. Of hidden and final vectors, quantities are cosine, share (of
        :func:`share_of_top`), effective (:func:`effective_number`), random_direction (what that is
        of one, d/3), isoscore and effective_dimension; of hidden ones also without_top and
        without_random, the cosine without the three dimensions of the largest parts, and without
        three random ones. Of embeddings of tokens, partition and partition_both,
        :func:`partition_isotropy`. The ratio is that of the effective numbers of the last layer.
    """
    return recorded.rows_of(
        RECORDED, lambda: _measured(name, corpus), **recorded.origin(name, corpus)
    )


def record(**corpora: Corpus) -> None:
    """Write what comes with the book: by model, the corpus that it reads."""
    recorded.write(
        RECORDED,
        [(_measured(m, corpus), recorded.origin(m, corpus)) for m, corpus in corpora.items()],
    )


def _measured(name: str, corpus: Corpus) -> pd.DataFrame:
    runs = {
        "trained": _tables(load_model(name), corpus),
        "untrained": _tables(load_model(f"{name}{TWIN}"), corpus),
    }
    rows = pd.concat([_rows(*run).assign(weights=weights) for weights, run in runs.items()])
    ratio = runs["trained"][0].interval(
        lambda a, b: (
            effective_number(parts(b).to_numpy())[-1] / effective_number(parts(a).to_numpy())[-1]
        ),
        runs["untrained"][0],
    )
    place = {
        "weights": "ratio",
        "space": "hidden",
        "layer": rows["layer"].max(),
        "quantity": "effective",
    }
    return pd.concat([rows, _row(ratio, **place)], ignore_index=True)


def _tables(model: LoadedModel, corpus: Corpus) -> tuple[Tables, Tables, LoadedModel]:
    first = measure(
        model, corpus, ["cosine_by_dimension", Isotropy(["hidden", "final"])], progress=False
    )
    found, random = parts(first), np.random.default_rng(0)
    top = {layer: tuple(map(int, row.nlargest(TOP).index)) for layer, row in found.iterrows()}
    others = {
        layer: tuple(map(int, random.choice(found.columns, TOP, replace=False))) for layer in top
    }
    without = [WithoutDimensions("without_top", top), WithoutDimensions("without_random", others)]
    return first, measure(model, corpus, without, progress=False), model


def _row(found: Estimate, **place: object) -> pd.DataFrame:
    return pd.DataFrame([place | recorded.as_columns(found)])


def _rows(
    first: Tables,
    without: Tables,
    model: LoadedModel,
) -> pd.DataFrame:
    rows, isotropy = [], first["isotropy"].set_index(["space", "layer"])
    kinds = {"cosine": lambda c: c.sum(1), "share": share_of_top, "effective": effective_number}
    for space in isotropy.index.unique("space"):
        layers = parts(first, space).index
        for quantity, kind in kinds.items():
            found = first.interval(
                lambda t, kind=kind, space=space: kind(parts(t, space).to_numpy())
            )
            for layer, one in zip(layers, found, strict=True):
                rows.append(_row(one, space=space, layer=layer, quantity=quantity))
        for layer in layers:
            of_layer = isotropy.loc[(space, layer)]
            known = {name: float(of_layer[name]) for name in ("isoscore", "effective_dimension")}
            for quantity, value in (
                known | {"random_direction": of_layer["dimensions"] / 3}
            ).items():
                rows.append(_row(Estimate(value), space=space, layer=layer, quantity=quantity))
    for quantity, table in without.items():
        for row in table.itertuples():
            one = Estimate(row.cosine, row.ci_low, row.ci_high, len(without.groups))
            rows.append(_row(one, space="hidden", layer=row.layer, quantity=quantity))
    embedding = model.model.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        vectors = embedding.weight.detach().double().numpy()
        for quantity, signs in (("partition", False), ("partition_both", True)):
            one = Estimate(partition_isotropy(vectors, signs))
            rows.append(_row(one, space="embeddings", layer=0, quantity=quantity))
    return pd.concat(rows)
