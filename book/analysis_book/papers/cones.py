"""The cone by dimensions: the part of each in the average cosine, before and after training."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
# A number of each layer, of the parts of its dimensions.
Kind = Callable[[Float[np.ndarray, "layer dimension"]], Float[np.ndarray, " layer"]]


class WithoutDimensions(Anisotropy):
    """The average cosine of hidden states without some dimensions.

    A table of its own name, as that of ``anisotropy``.

    Args:
        name: of the table.
        dimensions: by hidden layer.
    """

    needs = frozenset({"hidden"})

    def __init__(self, name: str, dimensions: Mapping[int, tuple[int, ...]]):
        super().__init__()
        self.name = name
        self.dimensions = dimensions

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """The hidden states of a layer, with zeros in its dimensions."""
        hidden = activations.spaces["hidden"]
        values = hidden.values.clone()
        removed = [*self.dimensions[activations.layer]]
        values[..., removed] = 0
        yield "hidden", Vectors(values, hidden.tokens)


def parts(tables: TableSet, space: str = "hidden") -> pd.DataFrame:
    """c_j, the part of each dimension (columns) in the average cosine of each layer (rows)."""
    table = tables["cosine_by_dimension"]
    table = table[table["space"] == space]
    return table.pivot(index="layer", columns="dimension", values="cosine")


def share_of_top(
    of_layer: Float[np.ndarray, "layer dimension"], count: int = TOP
) -> Float[np.ndarray, " layer"]:
    """The share of the largest c_j in their sum.

    >>> share_of_top(np.array([[0.5, 0.1, 0.1, 0.1, 0.2]]))
    array([0.8])
    """
    ascending = np.sort(of_layer, axis=1)
    largest = ascending[:, -count:]
    return largest.sum(1) / of_layer.sum(1)


def effective_number(of_layer: Float[np.ndarray, "layer dimension"]) -> Float[np.ndarray, " layer"]:
    """(Σ c_j)² / Σ c_j², at most as many as there are dimensions.

    Of a direction drawn at random in d dimensions, whose squared coordinates are the c_j, it is
    near d/3.

    >>> effective_number(np.array([[0.1, 0.1, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0]])).tolist()
    [2.0, 1.0]
    """
    return of_layer.sum(1) ** 2 / (of_layer**2).sum(1)


def partition_isotropy(vectors: Float[np.ndarray, "vector dim"], signs: bool = False) -> float:
    """I(W), how even the partition function Z(x) = Σ_w exp(w · x) is over directions.

    It is min Z / max Z, 1 if isotropic. The directions x are the eigenvectors of WᵀW (Mu and
    Viswanath 2018), with the signs that they happen to come with (so Machina and Mercer 2024), or
    with both, which makes I(W) no larger. It depends on the lengths of the vectors.

    >>> partition_isotropy(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    1.0
    """
    _, directions = np.linalg.eigh(vectors.T @ vectors)
    along = vectors @ directions
    if signs:
        along = np.concatenate([along, -along], 1)
    logs = np.logaddexp.reduce(along, axis=0)
    return float(np.exp(logs.min() - logs.max()))


def of_both(name: str, corpus: Corpus) -> pd.DataFrame:
    """The parts of the cone of a model, and of an untrained copy: as shipped, or measured.

    Returns:
        Columns weights (trained, untrained, or their ratio), space, layer, quantity, value, ci_low,
        ci_high, groups. Of hidden and final vectors, quantities are cosine, share (of
        :func:`share_of_top`), effective (:func:`effective_number`), random_direction (what that is
        of one, d/3), isoscore and effective_dimension; of hidden ones also without_top and
        without_random, the cosine without the three dimensions of the largest parts, and without
        three random ones. Of embeddings of tokens, partition and partition_both,
        :func:`partition_isotropy`. The ratio is that of the effective numbers of the last layer.
    """

    def measured() -> pd.DataFrame:
        return _measured(name, corpus)

    return recorded.rows_of(RECORDED, measured, **recorded.origin(name, corpus))


def record(**corpora: Corpus) -> None:
    """Write what comes with the book: by model, the corpus that it reads."""
    tables = []
    for name, corpus in corpora.items():
        tables.append((_measured(name, corpus), recorded.origin(name, corpus)))
    recorded.write(RECORDED, tables)


def _measured(name: str, corpus: Corpus) -> pd.DataFrame:
    trained = _measure(load_model(name), corpus)
    untrained = _measure(load_model(f"{name}{TWIN}"), corpus)

    def ratio(of_trained: TableSet, of_untrained: TableSet) -> float:
        after = effective_number(parts(of_trained).to_numpy())
        before = effective_number(parts(of_untrained).to_numpy())
        return before[-1] / after[-1]

    rows = pd.concat(
        [
            _rows(trained).assign(weights="trained"),
            _rows(untrained).assign(weights="untrained"),
        ]
    )
    ratio_row = {
        "weights": "ratio",
        "space": "hidden",
        "layer": rows["layer"].max(),
        "quantity": "effective",
        **recorded.as_columns(trained.first.interval(ratio, untrained.first)),
    }
    return pd.concat([rows, pd.DataFrame([ratio_row])], ignore_index=True)


@dataclass(frozen=True)
class _Measured:
    """A model, its tables, and those of the average cosine without some dimensions."""

    model: LoadedModel
    first: Tables
    without: Tables


def _measure(model: LoadedModel, corpus: Corpus) -> _Measured:
    metrics = ["cosine_by_dimension", Isotropy(["hidden", "final"])]
    first = measure(model, corpus, metrics, progress=False)
    of_layers = parts(first)
    random = np.random.default_rng(0)
    top = {}
    others = {}
    for layer, row in of_layers.iterrows():
        top[layer] = tuple(map(int, row.nlargest(TOP).index))
        drawn = random.choice(of_layers.columns, TOP, replace=False)
        others[layer] = tuple(map(int, drawn))
    removed = [
        WithoutDimensions("without_top", top),
        WithoutDimensions("without_random", others),
    ]
    return _Measured(model, first, measure(model, corpus, removed, progress=False))


def _rows(measured: _Measured) -> pd.DataFrame:
    spaces = measured.first["isotropy"]["space"].unique()
    rows = []
    for space in spaces:
        rows += _rows_of_space(measured.first, space)
    rows += _rows_without(measured.without)
    rows += _rows_of_embeddings(measured.model)
    return pd.DataFrame(rows)


def _row(
    space: str,
    layer: int,
    quantity: str,
    estimate: Estimate,
) -> dict[str, object]:
    labels = {"space": space, "layer": layer, "quantity": quantity}
    return labels | recorded.as_columns(estimate)


def _rows_of_space(tables: Tables, space: str) -> list[dict[str, object]]:
    kinds = {
        "cosine": lambda of_layer: of_layer.sum(1),
        "share": share_of_top,
        "effective": effective_number,
    }
    layers = parts(tables, space).index
    rows = []
    for quantity, kind in kinds.items():

        def statistic(part: TableSet, kind: Kind = kind) -> Float[np.ndarray, " layer"]:
            return kind(parts(part, space).to_numpy())

        estimates = tables.interval(statistic)
        for layer, estimate in zip(layers, estimates, strict=True):
            rows.append(_row(space, layer, quantity, estimate))
    isotropy = tables["isotropy"].set_index(["space", "layer"])
    for layer in layers:
        of_layer = isotropy.loc[(space, layer)]
        numbers = {
            "isoscore": float(of_layer["isoscore"]),
            "effective_dimension": float(of_layer["effective_dimension"]),
            "random_direction": of_layer["dimensions"] / 3,
        }
        for quantity, value in numbers.items():
            rows.append(_row(space, layer, quantity, Estimate(value)))
    return rows


def _rows_without(tables: Tables) -> list[dict[str, object]]:
    draws = len(tables.groups)
    rows = []
    for quantity, table in tables.items():
        for row in table.itertuples():
            estimate = Estimate(row.cosine, row.ci_low, row.ci_high, draws)
            rows.append(_row("hidden", row.layer, quantity, estimate))
    return rows


def _rows_of_embeddings(model: LoadedModel) -> list[dict[str, object]]:
    embedding = model.model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        return []
    vectors = embedding.weight.detach().double().numpy()
    one_sign = Estimate(partition_isotropy(vectors))
    both_signs = Estimate(partition_isotropy(vectors, signs=True))
    return [
        _row("embeddings", 0, "partition", one_sign),
        _row("embeddings", 0, "partition_both", both_signs),
    ]
