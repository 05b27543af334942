"""How alike two models represent the same tokens, words or items, layer by layer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import BESIDE, Activations, Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric

# The columns of a layer by another one, in table order, and the range of each.
MEASURES = ("cka", "procrustes", "r2")
LOWEST = np.array([-1.0, 0.0, 0.0])
HIGHEST = np.array([1.0, 2.0, 1.0])
# Names of sums over the second model alone.
OTHER = "other_"

Numbers = Float[np.ndarray, " replicate"]
# Vectors, and matrices with a row per dimension of x and a column per dimension of y.
Rows = Float[np.ndarray, "replicate _"]
Matrices = Float[np.ndarray, "replicate _ _"]
Matrix = Float[np.ndarray, "_ _"]


def unbiased_hsic(
    product: Matrices,
    sums: tuple[Rows, Rows],
    norms: tuple[Numbers, Numbers],
    norm_products: Numbers,
    weighted: tuple[Rows, Rows],
    vectors: Numbers,
) -> Numbers:
    r"""The unbiased Hilbert-Schmidt independence criterion of two linear kernels, from sums.

    With K = XXᵀ and L = YYᵀ without their diagonals (Song et al. 2012, eq. 5):
    [tr(KL) + (1ᵀK1)(1ᵀL1) / ((n − 1)(n − 2)) − 2/(n − 2) · 1ᵀKL1] / (n (n − 3)). No kernel of n × n
    entries is formed: with a_i = ‖x_i‖² and b_i = ‖y_i‖², tr(KL) = ‖XᵀY‖² − Σ a b, 1ᵀK1 = ‖Σ x‖² −
    Σ a, and 1ᵀKL1 = (Σ x)ᵀ XᵀY (Σ y) − (Σ x)·Σ b x − (Σ y)·Σ a y + Σ a b.

    Args:
        product: XᵀY = Σ x yᵀ.
        sums: Σ x and Σ y.
        norms: Σ a and Σ b.
        norm_products: Σ a b.
        weighted: Σ b x and Σ a y.
        vectors: n, at least 4.

    Returns:
        One number per replicate; NaN where n is below 4.
    """
    x, y = sums
    square = np.square(product)
    trace = square.sum((1, 2)) - norm_products
    totals = 1
    mapped = np.einsum("ri,rij->rj", x, product)
    ends = (mapped * y).sum(1)
    for total, norm, weights in zip(sums, norms, weighted, strict=True):
        without_diagonal = np.square(total).sum(1) - norm
        totals = totals * without_diagonal
        ends = ends - (total * weights).sum(1)
    ends = ends + norm_products
    n = np.where(vectors > 3, vectors, np.nan)
    of_totals = totals / ((n - 1) * (n - 2))
    of_ends = 2 * ends / (n - 2)
    pairs = n * (n - 3)
    return (trace + of_totals - of_ends) / pairs


def nuclear_norm(product: Matrices, whole: Matrix) -> Numbers:
    r"""The sum of the singular values of each matrix, to first order around ``whole``.

    With the singular value decomposition UΣVᵀ of ``whole``, ‖M‖_* ≈ tr((UVᵀ)ᵀ M). It is exact for
    ``whole`` itself, and saves a decomposition per replicate.
    """
    left, _, right = np.linalg.svd(whole, full_matrices=False)
    return np.einsum("ij,rij->r", left @ right, product)


class RepresentationSimilarity(Metric):
    r"""Similarity of the hidden states of two models in each pair of their layers.

    x is a vector of a layer of the first model, y the vector of a layer of the other model for the
    same token (or the mean over a word or an item, where the models read other tokens). Columns:
    layer, other_layer, measure, value, its 95 % interval, and vectors, the number of pairs n.
    Measures:

    - ``cka``: centred kernel alignment of linear kernels, debiased: HSIC(X, Y) / √(HSIC(X, X)
      HSIC(Y, Y)) of :func:`unbiased_hsic`, in [−1, 1]; 0 on average where x and y are independent,
      however few vectors there are, 1 where one is a rotation and scaling of the other
      (Kornblith et al. 2019; Song et al. 2012);
    - ``procrustes``: squared distance of the two centred clouds of unit total variance after the
      best rotation, 2 − 2 ‖XᵀY‖_* / (‖X‖ ‖Y‖), in [0, 2] (Williams et al. 2021, Ding et al. 2021).
      Its interval is to first order in the replicates;
    - ``r2``: the share of the variance of y that a linear map of x explains, in [0, 1] (Kornblith
      et al. 2019); it needs many more vectors than dimensions, and is missing where there are not
      more than d + 1.

    All are exact for any number of vectors, from the sums Σ x yᵀ of each jackknife group, which
    take 160 d² bytes per pair of layers.

    Args:
        layers, other_layers: the layers to compare, of each model; all by default.
    """

    name = "representation_similarity"
    needs = frozenset({BESIDE})
    axes = ("other_layer", "measure")
    interval = "value"
    limits = (LOWEST, HIGHEST)
    counts = "vectors"
    on_request = True
    no_bins = "it compares the vectors of two models"
    reason_for_none = "none of these layers has vectors of the tokens that both models read"

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        other_layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.chosen_layers = None if layers is None else tuple(layers)
        self.other_layers = None if other_layers is None else tuple(other_layers)

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        is_chosen = self.chosen_layers is None or layer in self.chosen_layers
        if layer > 0 and not is_chosen:
            return
        others = {}
        for number, vectors in activations.beside.items():
            if self.other_layers is None or number in self.other_layers:
                others[number] = _by_run(vectors)
        if layer == 0:
            # Once per batch.
            for number, runs in others.items():
                self._add_moments(runs, OTHER, number, activations)
        if not is_chosen:
            return
        own = _by_run(activations.spaces["hidden"])
        self._add_moments(own, "", layer, activations)
        counts = torch.tensor([len(run) for run in own])
        self.add_runs(("vectors", layer), counts, activations)
        for number, runs in others.items():
            for name, values in _products(own, runs).items():
                self.add_runs((name, number, layer), values, activations)

    def _add_moments(
        self, runs: list[Tensor], prefix: str, layer: int, activations: Activations
    ) -> None:
        """Add the sums over the vectors of one model alone."""
        of_one = _products(runs, runs)
        of_one["sum"] = torch.stack([run.sum(0) for run in runs])
        of_one["norms"] = torch.stack([run.square().sum() for run in runs])
        for name, values in of_one.items():
            self.add_runs((prefix + name, layer), values, activations)

    def layers(self) -> list[LayerSums]:
        """The sums of each layer of the first model, with those of all layers of the other."""
        own: dict[int, dict] = defaultdict(dict)
        others = {}
        for (name, *other, layer), sums in self.arrays().items():
            if name.startswith(OTHER):
                others[name, layer] = sums
            else:
                own[layer][(name, *other) if other else name] = sums
        if not own or not others:
            raise AnalysisError(f"{self.name}: {self.reason_for_none}")
        return [LayerSums(layer, "", own[layer] | others) for layer in sorted(own)]

    def rows(self, sums: LayerSums) -> Columns:
        vectors = sums["vectors"]
        own = _Cloud.of(sums, "", vectors)
        moment = _centred(sums["product"], own.sum, own.sum, vectors)
        whitening = _whitening(moment)
        numbers = sorted(sums.parts("product"))
        enough = own.sum.shape[1] + 1
        values = []
        for number in numbers:
            other = _Cloud.of(sums, OTHER, vectors, number)
            product = sums["product", number]
            hsic = unbiased_hsic(
                product,
                (own.sum, other.sum),
                (own.norms, other.norms),
                sums["norm_products", number],
                (sums["weighted", number], sums["weighted_other", number]),
                vectors,
            )
            cka = hsic / np.sqrt(own.hsic * other.hsic)
            centred = _centred(product, own.sum, other.sum, vectors)
            whole = _centred(*_of_whole(sums, number))
            scale = np.sqrt(own.variance * other.variance)
            aligned = nuclear_norm(centred, whole[0])
            procrustes = 2 - 2 * aligned / scale
            mapped = whitening.mT @ centred
            explained = np.square(mapped).sum((1, 2))
            r2 = np.where(vectors > enough, explained / other.variance, np.nan)
            measures = np.stack([cka, procrustes, r2], 1)
            values.append(measures)
        return {
            "other_layer": np.array(numbers),
            "measure": np.array(MEASURES),
            "value": np.stack(values, 1),
            "vectors": vectors.astype(int)[:, None, None],
        }


@dataclass(frozen=True)
class _Cloud:
    """The vectors of one layer of one model, as sums by replicate.

    Attributes:
        sum: Σ x.
        norms: Σ ‖x‖².
        variance: Σ ‖x − x̄‖².
        hsic: the :func:`unbiased_hsic` of the vectors with themselves.
    """

    sum: Rows
    norms: Numbers
    variance: Numbers
    hsic: Numbers

    @classmethod
    def of(cls, sums: LayerSums, prefix: str, vectors: Numbers, *number: int) -> "_Cloud":
        def named(name: str) -> np.ndarray:
            name = prefix + name
            return sums[(name, *number) if number else name]

        total = named("sum")
        norms = named("norms")
        product = named("product")
        weighted = named("weighted")
        both = (total, total), (norms, norms)
        hsic = unbiased_hsic(product, *both, named("norm_products"), (weighted, weighted), vectors)
        of_mean = np.square(total).sum(1) / np.maximum(vectors, 1)
        return cls(total, norms, norms - of_mean, hsic)


def _whitening(moment: Matrices) -> Matrices:
    """W with Wᵀ M W = 1 on the directions in which vectors of the centred moment M vary."""
    variances, directions = np.linalg.eigh(moment)
    dimensions = variances.shape[-1]
    rounding = dimensions * np.finfo(float).eps * variances[:, -1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.where(variances > rounding, 1 / np.sqrt(variances), 0)
    return directions * scales[:, None]


def _centred(product: Matrices, first: Rows, other: Rows, vectors: Numbers) -> Matrices:
    """Σ (x − x̄)(y − ȳ)ᵀ."""
    # Without any vector, a replicate has sums of zero.
    means = first / np.maximum(vectors, 1)[:, None]
    return product - means[:, :, None] * other[:, None]


def _of_whole(sums: LayerSums, number: int) -> list[np.ndarray]:
    """The arguments of :func:`_centred` for the whole corpus, as one replicate."""
    names = ("product", number), "sum", ("other_sum", number), "vectors"
    return [np.asarray(sums.whole[name])[None] for name in names]


def _by_run(vectors: Vectors) -> list[Float[Tensor, "_ _"]]:
    """The vectors that count, in double precision, by run of neighbouring items of one group."""
    values = vectors.values[:, 0]
    counted = vectors.tokens.counted
    return [values[run][counted[run]].double() for _, run in vectors.tokens.runs]


def _products(
    first: list[Float[Tensor, "_ _"]], other: list[Float[Tensor, "_ _"]]
) -> dict[str, Tensor]:
    """Sums over the vectors of each run that involve both x and y, see :func:`unbiased_hsic`."""
    sums = defaultdict(list)
    for x, y in zip(first, other, strict=True):
        own_norms = x.square().sum(1)
        other_norms = y.square().sum(1)
        sums["product"].append(x.T @ y)
        sums["norm_products"].append(own_norms @ other_norms)
        sums["weighted"].append(other_norms @ x)
        sums["weighted_other"].append(own_norms @ y)
    return {name: torch.stack(runs) for name, runs in sums.items()}
