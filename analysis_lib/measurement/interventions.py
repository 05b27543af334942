"""Corpus statistics that interventions need: means, deviations, sample vectors, norm limits."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from analysis_lib import capture
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.capture.interventions import MISFIT, Change, Changes, Gathered, Replace, fits
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.norms import TokenNorms
from analysis_lib.models import LoadedModel
from analysis_lib.progress import bar

# Number of vectors of each type of token kept per layer, for ``other`` and ``other_of_type``.
POOL = 512
# Number of items that are made into batches together.
ITEMS = 512
# The latest sums gathered, since the arms of an experiment often need the same ones.
_latest: dict[tuple, "_Gathering"] = {}


@dataclass(eq=False)
class _Sums:
    """Sums over the vectors of one site in one layer, by half of the groups and by type of token.

    Attributes:
        type_names: the types of tokens of the corpus.
        counts: number of vectors, half x type.
        sums: sums of vectors, half x type x head x dim.
        squares: sums of squares, half x head x dim.
        products: sums of outer products, half x head x dim x dim; None if not needed.
        pool: for each type, then for all types: a random key of each vector, the vectors, and the
            groups of their texts. The vectors with the smallest keys are kept. Empty if not needed.
    """

    type_names: tuple[str, ...]
    counts: Tensor
    sums: Tensor
    squares: Tensor
    products: Tensor | None
    pool: list[tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def empty(
        cls, type_names: tuple[str, ...], vectors: Tensor, products: bool, pool: bool
    ) -> "_Sums":
        """Zero sums for vectors of a given shape, token x head x dim."""
        types = len(type_names)
        _, heads, width = vectors.shape
        zeros = partial(torch.zeros, dtype=torch.float64)
        counts = zeros(2, types)
        sums = zeros(2, types, heads, width)
        squares = zeros(2, heads, width)
        outer = zeros(2, heads, width, width) if products else None
        none = zeros(0), vectors[:0], torch.zeros(0, dtype=torch.long)
        pools = [none] * (types + 1) if pool else []
        return cls(type_names, counts, sums, squares, outer, pools)

    def add(self, vectors: Tensor, types: Tensor, groups: Tensor, draws: torch.Generator) -> None:
        """Add vectors to the sums and the pool.

        Args:
            vectors: token x head x dim.
            types: the type of each token.
            groups: the jackknife group of the text of each token.
            draws: the source of the random keys of the pool.
        """
        for half in (0, 1):
            ours = groups % 2 == half
            double = vectors[ours].double()
            ones = torch.ones(len(double), dtype=torch.float64)
            self.counts[half].index_add_(0, types[ours], ones)
            self.sums[half].index_add_(0, types[ours], double)
            self.squares[half] += double.square().sum(0)
            if self.products is not None:
                self.products[half] += torch.einsum("nhd,nhe->hde", double, double)
        keys = torch.rand(len(vectors), generator=draws, dtype=torch.float64)
        for kind in range(len(self.pool)):
            # The last pool holds all types.
            ours = (types == kind) | (kind == len(self.type_names))
            news = keys[ours], vectors[ours], groups[ours]
            joined = [torch.cat(pair) for pair in zip(self.pool[kind], news, strict=True)]
            least = joined[0].argsort()[:POOL]
            self.pool[kind] = tuple(part[least] for part in joined)

    def gathered(self, change: Replace, name: str) -> Gathered:
        """The statistics that a change needs."""
        counts, sums, squares = (
            torch.cat([part, part.sum(0, keepdim=True)])
            for part in (self.counts, self.sums, self.squares)
        )
        counts, sums = (torch.cat([part, part.sum(1, keepdim=True)], 1) for part in (counts, sums))
        mean = sums / counts.clamp_min(1)[..., None, None]
        every = counts[:, -1, None, None].clamp_min(1)
        deviation = (squares / every - mean[:, -1].square()).clamp_min(0).sqrt()
        covariance = directions = spread = None
        if self.products is not None:
            products = torch.cat([self.products, self.products.sum(0, keepdim=True)])
            covariance = (
                products / every.unsqueeze(-1) - mean[:, -1, :, :, None] * mean[:, -1, :, None]
            )
        if change.directions is not None:
            directions = _directions(change.directions, mean[:, -1], covariance, name)
            if change.by == "noise":
                along = torch.einsum("xhde,xhef,xhdf->xhd", directions, covariance, directions)
                spread = along.clamp_min(0).sqrt()
        if change.by == "mean_of_rest":
            mean[:, -1] = self._mean_of_rest(change, name)
        # Only the pools that the change reads, since all of this is sent to workers.
        wanted = {"other": self.pool[-1:], "other_of_type": self.pool[:-1]}.get(change.by, ())
        pools = tuple(part[1:] for part in wanted)
        return Gathered(counts, mean, deviation, directions, spread, pools)

    def _mean_of_rest(self, change: Replace, name: str) -> Tensor:
        """Mean over the tokens of all types that are not replaced, half x head x dim."""
        rest = torch.tensor([kind not in change.tokens for kind in self.type_names])
        counts = self.counts[:, rest].sum(1)
        sums = self.sums[:, rest].sum(1)
        counts, sums = (torch.cat([part, part.sum(0, keepdim=True)]) for part in (counts, sums))
        needed = counts if change.of == "others" else counts[-1:]
        if not needed.all():
            raise AnalysisError(
                f"{name}: there is no other token to take the mean of: give more texts, or fewer "
                "tokens"
            )
        of_first = self.counts[:, self.type_names.index("first")]
        if "first" in change.tokens and not of_first.any():
            raise AnalysisError(
                f"{name}: the first token of a text has a type of its own here: name that, such as "
                "cls"
            )
        return sums / counts[:, None, None]


def _directions(
    wanted: str | int | tuple, mean: Tensor, covariance: Tensor | None, name: str
) -> Tensor:
    """Orthonormal directions, half x head x direction x dim."""
    halves, heads, width = mean.shape
    if wanted == "mean":
        return torch.nn.functional.normalize(mean, dim=-1).unsqueeze(2)
    if isinstance(wanted, int):
        if wanted > width:
            raise AnalysisError(
                f"{name}: {wanted} principal directions of {width} dimensions: give fewer"
            )
        # Eigenvectors with the largest variance first.
        return torch.linalg.eigh(covariance)[1][..., width - wanted :].flip(-1).transpose(-1, -2)
    given = torch.tensor(wanted, dtype=torch.float64)
    if given.shape[1] != width:
        raise AnalysisError(
            f"{name}: directions are of shape {tuple(given.shape)}: give vectors of {width} numbers"
        )
    _, sizes, basis = torch.linalg.svd(given, full_matrices=False)
    basis = basis[sizes > sizes[0] * 1e-10]  # Directions that depend on the others are dropped.
    return basis.expand(halves, heads, *basis.shape)


class _Gathering(Changes):
    """A set of changes that changes nothing and sums the vectors at the sites.

    Attributes:
        sums: the sums, by site and layer.
        misfits: sites and layers without one vector per token.
    """

    def __init__(self, sites: frozenset[str], products: bool, pool: bool):
        super().__init__(())
        self.sites = sites
        self.products = products
        self.pool = pool
        self.sums: dict[tuple[str, int], _Sums] = {}
        self.misfits: set[tuple[str, int]] = set()
        self.draws = torch.Generator().manual_seed(0)

    @property
    def reads(self) -> bool:
        return True

    def __contains__(self, site_and_layer: tuple[str, int]) -> bool:
        return site_and_layer[0] in self.sites

    def apply(
        self, where: str, layer: int, values: Tensor, tokens: Tokens, texts: Callable[[], int]
    ) -> Tensor:
        if where not in self.sites:
            return values
        if not fits(values, tokens):
            self.misfits.add((where, layer))
            return values
        seen = values.unsqueeze(1) if values.dim() == 3 else values
        tokens = tokens.on(torch.device("cpu"))
        mask = tokens.mask
        vectors = wide(seen).transpose(1, 2).cpu()[mask]
        groups = torch.tensor(tokens.groups).unsqueeze(1).expand_as(tokens.types)
        if (where, layer) not in self.sums:
            self.sums[where, layer] = _Sums.empty(
                tokens.type_names, vectors, self.products, self.pool
            )
        self.sums[where, layer].add(vectors, tokens.types[mask], groups[mask], self.draws)
        return values

    def masked(self, layer: int, keys: Tokens) -> None:
        self.apply("weights", layer, torch.zeros(*keys.mask.shape, 0), keys, lambda: 0)

    def layers(self, model: LoadedModel, change: Replace) -> Sequence[int]:
        """The layers of a change.

        Raises:
            AnalysisError: a layer does not have the site.
        """
        known = _layers_of(change.where, self.sums)
        lost = _layers_of(change.where, self.misfits)
        wanted = known + lost if change.layers is None else change.layers
        for layer in wanted:
            if layer in lost:
                raise AnalysisError(f"{model.name}: {change.where} of layer {layer} {MISFIT}")
            if layer not in known:
                there = f"layers of {', '.join(map(str, known))}" if known else "another site"
                raise AnalysisError(
                    f"{model.name} has no {change.where} in layer {layer}: give {there}"
                )
        if not wanted:
            raise AnalysisError(
                f"{model.name} has no {change.where} that can be changed: give another site"
            )
        return wanted

    def missing(self, model: LoadedModel, change: Replace) -> list[str]:
        """The types of tokens that the change names and no text has."""
        occur = set()
        for layer in self.layers(model, change):
            sums = self.sums[change.where, layer]
            occur.update(itertools.compress(sums.type_names, sums.counts.sum(0)))
        return [kind for kind in change.tokens or () if kind != "first" and kind not in occur]


def _layers_of(where: str, sites: Iterable[tuple[str, int]]) -> list[int]:
    """Sorted layers of the sites of one kind."""
    return sorted(layer for site, layer in sites if site == where)


def changes_of(
    model: LoadedModel, corpus: Corpus, settings: Settings, progress: bool = False
) -> Changes:
    """The changes for an intervention in one model and corpus.

    If means or other texts are needed, there is a pass over the corpus. If long vectors do not
    count, another pass, with the changes, gives the median norms.

    Args:
        progress: whether to show a bar for each pass.

    Raises:
        AnalysisError: a layer, dimension, type of token or site does not exist, or a mean has no
            token.
    """
    changes = []
    if settings.intervention:
        gathering = _gather(model, corpus, settings, progress)
        for replacement in settings.intervention:
            changes += _changes(model, replacement, gathering)
    limits = None
    if settings.norms_below:
        limits = _limits(model, corpus, settings, Changes(changes), progress)
    return Changes(changes, limits)


def _batches(
    model: LoadedModel, corpus: Corpus, settings: Settings, purpose: str, progress: bool
) -> Iterator[capture.Batch]:
    """The batches of the whole corpus, with a progress bar."""
    groups = corpus.groups(GROUPS)
    description = f"{model.name} on {corpus.name}, {purpose}"
    shown_as = {"unit": model.kind, "show": progress, "leave": False}
    with bar(total=len(corpus), description=description, **shown_as) as shown:
        for start in range(0, len(corpus), ITEMS):
            end = min(start + ITEMS, len(corpus))
            part = slice(start, end)
            read = start
            for batch in capture.batches(
                model, corpus.items[part], groups[part], settings, Reading()
            ):
                yield batch
                # A long text is read in several windows.
                more = min(len(batch.groups), end - read)
                shown.update(more)
                read += more
            shown.update(end - read)


def _limits(
    model: LoadedModel, corpus: Corpus, settings: Settings, changes: Changes, progress: bool
) -> dict[int, float]:
    """The norm from which on hidden vectors do not count, by layer."""
    if model.layout.maps:
        raise AnalysisError(
            f"{model.name}: its hidden states are maps, whose norms are not told apart: leave "
            "tokens out"
        )
    norms = TokenNorms()
    for batch in _batches(model, corpus, settings, "norms", progress):
        capture.run(model, batch, norms.needs, norms.update, settings.maps, changes)
    table = norms.without()
    of_all = table["position"].isna() & (table["token_type"] == "all")
    medians = table[of_all].set_index("layer")["median"]
    return {int(layer): float(median) * settings.norms_below for layer, median in medians.items()}


def _changes(model: LoadedModel, change: Replace, gathering: _Gathering) -> Iterator[Change]:
    if missing := gathering.missing(model, change):
        raise AnalysisError(
            f"no token of type {missing[0]} is in the layers to be changed: give other tokens"
        )
    for layer in gathering.layers(model, change):
        name = f"{change.where} of layer {layer}"
        sums = gathering.sums[change.where, layer]
        if change.where == "weights":
            yield Change(change, layer)
            continue
        width = sums.sums.shape[-1]
        for dimension in change.dimensions or ():
            if not 0 <= dimension < width:
                raise AnalysisError(
                    f"{name} has no dimension {dimension}: give one of 0 to {width - 1}"
                )
        if change.of == "others" and _needs_corpus(change) and not sums.counts.any(1).all():
            raise AnalysisError(
                f"{name}: the other half of the texts has no token: give more texts"
            )
        yield Change(change, layer, sums.gathered(change, name))


def _needs_corpus(change: Replace) -> bool:
    """Whether the replacement depends on the texts."""
    if change.where == "weights":
        return False
    return change.by != "zero" or isinstance(change.directions, int | str)


def reads_corpus(settings: Settings) -> bool:
    """Whether :func:`changes_of` reads the whole corpus."""
    return bool(settings.norms_below) or any(map(_needs_corpus, settings.intervention))


def _needs_products(change: Replace) -> bool:
    """Whether principal directions, or the spread along given ones, are needed."""
    if isinstance(change.directions, int):
        return True
    return bool(change.directions) and change.by == "noise"


def _gather(model: LoadedModel, corpus: Corpus, settings: Settings, progress: bool) -> _Gathering:
    """Sums of the vectors of every layer at the sites of the changes.

    If the replacement does not depend on the texts, only as many batches are read as are needed to
    find the layers and the types of tokens.
    """
    changes = settings.intervention
    sites = frozenset(change.where for change in changes)
    products = any(map(_needs_products, changes))
    pool = any(change.by.startswith("other") for change in changes)
    whole = any(map(_needs_corpus, changes))
    plain = replace(settings, intervention=())
    key = (
        *(model.revision, str(model.model.dtype), str(model.device), torch.get_num_threads()),
        *(corpus.sha256, *corpus.groups(GROUPS), plain),
        *(sites, products, pool),
    )
    if whole and key in _latest:
        return _latest[key]
    gathering = _Gathering(sites, products, pool)
    for batch in _batches(model, corpus, plain, "first pass", progress):
        capture.run(model, batch, frozenset(), lambda _: None, plain.maps, gathering)
        # Stop at the first batches if all types of tokens have occurred.
        missing = []
        for change in changes:
            missing += gathering.missing(model, change)
        if not whole and not missing:
            return gathering
    if whole:
        _latest.clear()
        _latest[key] = gathering
    return gathering
