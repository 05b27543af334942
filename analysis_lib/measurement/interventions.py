"""What an intervention puts in, and the norms that count: of the vectors of a corpus under a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from analysis_lib import capture
from analysis_lib.capture.activations import CROSS, Activations
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.capture.interventions import SIDES, SITES, Change, Changes, Gathered, Pool, Replace
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.sinks import TokenNorms
from analysis_lib.models import TOKEN_TYPES, LoadedModel

# How many vectors of each type of token are kept of a layer, for ``other`` and ``other_of_type``.
POOL = 512
# So many items become batches together.
ITEMS = 512
# The latest that was gathered: arms of one experiment need the same.
_latest: dict[tuple, dict[tuple[str, int], "_Sums"]] = {}


@dataclass(eq=False)
class _Sums:
    """Of the vectors of one space in one layer, by half of the groups and by type of token."""

    counts: Tensor
    sums: Tensor
    squares: Tensor
    products: Tensor | None
    # By type, and of all: a random key of each vector, the vectors and their groups. Those with the smallest keys stay.
    pool: list[tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def empty(cls, heads: int, width: int, products: bool) -> "_Sums":
        types = len(TOKEN_TYPES)
        double = {"dtype": torch.float64}
        outer = torch.zeros(2, heads, width, width, **double) if products else None
        none = torch.zeros(0, **double), torch.zeros(0, heads, width), torch.zeros(0, dtype=torch.long)
        sums = torch.zeros(2, types, heads, width, **double), torch.zeros(2, heads, width, **double)
        return cls(torch.zeros(2, types, **double), *sums, outer, [none] * (types + 1))

    def add(self, vectors: Tensor, types: Tensor, groups: Tensor, draws: torch.Generator) -> None:
        """Vectors, token x head x dim, their types, and the groups of their texts."""
        wide = vectors.double()
        for half in (0, 1):
            ours = groups % 2 == half
            self.counts[half].index_add_(0, types[ours], torch.ones(int(ours.sum()), dtype=torch.float64))
            self.sums[half].index_add_(0, types[ours], wide[ours])
            self.squares[half] += wide[ours].square().sum(0)
            if self.products is not None:
                self.products[half] += torch.einsum("nhd,nhe->hde", wide[ours], wide[ours])
        keys = torch.rand(len(vectors), generator=draws, dtype=torch.float64)
        for kind in range(len(self.pool)):
            ours = types == kind if kind < len(TOKEN_TYPES) else torch.ones_like(types, dtype=torch.bool)
            news = keys[ours], vectors[ours], groups[ours]
            joined = [torch.cat(pair) for pair in zip(self.pool[kind], news, strict=True)]
            least = joined[0].argsort()[:POOL]
            self.pool[kind] = tuple(part[least] for part in joined)

    def gathered(self, asked: Replace, name: str) -> Gathered:
        """What a change needs; head axes of length 1 are dropped."""
        counts, sums, squares = (
            torch.cat([part, part.sum(0, keepdim=True)]) for part in (self.counts, self.sums, self.squares)
        )
        counts, sums = (torch.cat([part, part.sum(1, keepdim=True)], 1) for part in (counts, sums))
        mean = sums / counts[..., None, None].where(counts[..., None, None] > 0, torch.nan)
        variance = squares / counts[:, -1, None, None] - mean[:, -1].square()
        directions = spread = None
        if asked.directions is not None:
            directions = self._directions(asked.directions, mean[:, -1], counts[:, -1], name)
            spread = None
            if self.products is not None:
                covariance = _covariance(self.products, mean[:, -1], counts[:, -1])
                along = torch.einsum("xhde,xhef,xhdf->xhd", directions, covariance, directions)
                spread = along.clamp_min(0).sqrt()
        pools = [Pool(_narrow(vectors, 1), tuple(groups.tolist())) for _, vectors, groups in self.pool]
        found = mean, variance.clamp_min(0).sqrt(), directions, spread
        axes = (2, 1, 1, 1)
        made = [None if part is None else _narrow(part, axis) for part, axis in zip(found, axes, strict=True)]
        return Gathered(*made, tuple(pools))

    def _directions(self, asked: object, mean: Tensor, counts: Tensor, name: str) -> Tensor:
        """half x head x direction x dim, orthonormal."""
        halves, heads, width = mean.shape
        if asked == "mean":
            return torch.nn.functional.normalize(mean, dim=-1).unsqueeze(2)
        if isinstance(asked, int):
            if not 1 <= asked <= width:
                raise AnalysisError(f"{name}: {asked} principal directions of {width} dimensions: give fewer")
            values, vectors = torch.linalg.eigh(_covariance(self.products, mean, counts))
            return vectors[..., values.shape[-1] - asked :].flip(-1).transpose(-1, -2)
        given = torch.tensor(asked, dtype=torch.float64)
        if given.dim() != 2 or given.shape[1] != width:
            raise AnalysisError(
                f"{name}: directions are of shape {tuple(given.shape)}: give vectors of {width} numbers"
            )
        basis = torch.linalg.qr(given.T)[0].T
        return basis.expand(halves, heads, *basis.shape)


def _covariance(products: Tensor, mean: Tensor, counts: Tensor) -> Tensor:
    products = torch.cat([products, products.sum(0, keepdim=True)])
    return products / counts[:, None, None, None] - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def _narrow(values: Tensor, axis: int) -> Tensor:
    return values.squeeze(axis) if values.shape[axis] == 1 else values


def changes_of(model: LoadedModel, corpus: Corpus, settings: Settings) -> Changes:
    """What the intervention of the settings comes to; a pass over the corpus where means or other texts are needed.

    Where long vectors do not count, another one gives the medians of their norms, with what is changed.

    Raises:
        AnalysisError: a layer, dimension or site that is not there; a mean of no token.
    """
    asked = settings.intervention
    for one in asked:
        _refuse_site(model, one)
    found = _gather(model, corpus, settings, asked) if asked else {}
    made = [change for one in asked for change in _changes(model, one, found)]
    return Changes(made, _limits(model, corpus, settings, Changes(made)) if settings.norms_below else None)


def _limits(model: LoadedModel, corpus: Corpus, settings: Settings, changes: Changes) -> dict[int, float]:
    """By layer, the norm from which hidden vectors do not count."""
    if model.layout.maps:
        raise AnalysisError(
            f"{model.name}: its hidden states are maps, whose norms are not told apart: leave tokens out"
        )
    norms, groups = TokenNorms(), corpus.groups(GROUPS)
    for start in range(0, len(corpus), ITEMS):
        part = slice(start, min(start + ITEMS, len(corpus)))
        for batch in capture.batches(model, corpus.items[part], groups[part], settings, Reading()):
            capture.run(model, batch, norms.needs, norms.update, settings.maps, changes)
    table = norms.table()
    medians = table[table["position"].isna() & (table["token_type"] == "all")].set_index("layer")["median"]
    return {int(layer): float(median) * settings.norms_below for layer, median in medians.items()}


def _changes(model: LoadedModel, one: Replace, found: dict[tuple[str, int], _Sums]) -> Iterator[Change]:
    space = SITES[one.where]
    known = [layer for place, layer in found if place == (space or "query")]
    for layer in known if one.layers is None else one.layers:
        name = f"{one.where} of layer {layer}"
        if layer not in known:
            raise AnalysisError(
                f"{model.name} has no {name}: give layers of {min(known, default=0)} to {max(known, default=0)}"
            )
        if space is None:
            yield Change(one, layer, None)
            continue
        sums = found[space, layer]
        width = sums.sums.shape[-1]
        for dimension in one.dimensions or ():
            if not 0 <= dimension < width:
                raise AnalysisError(f"{name} has no dimension {dimension}: give one of 0 to {width - 1}")
        gathered = sums.gathered(one, name)
        if one.of == "others" and not (sums.counts.sum(1) > 0).all():
            raise AnalysisError(f"{name}: of the other half of the texts there is no token: give more texts")
        # Only what the change will look at: workers get it.
        pools = gathered.pool if one.by.startswith("other") else ()
        yield Change(one, layer, replace(gathered, pool=pools))


def _refuse_site(model: LoadedModel, one: Replace) -> None:
    lacking = model.lacking.get(SITES[one.where])
    hooked = [spec for _, spec in model.attending if spec.hooked]
    if one.where != "residual" and not model.layout.has_attention:
        lacking = "it has no attention"
    elif hooked and (one.where in ("query", "key", "value", "weights") or (one.where in SIDES and hooked[0].fused)):
        lacking = "its attention does not call the interface of transformers"
    if model.layout.maps:
        lacking = "its hidden states are maps"
    if lacking:
        raise AnalysisError(f"{model.name}: {one.where} cannot be changed: {lacking}; give another site")


def _gather(
    model: LoadedModel, corpus: Corpus, settings: Settings, asked: Sequence[Replace]
) -> dict[tuple[str, int], _Sums]:
    """Sums of the vectors of every layer, in the spaces that are asked for."""
    spaces = frozenset(SITES[one.where] or "query" for one in asked)
    products = any(isinstance(one.directions, int) or (one.directions and one.by == "noise") for one in asked)
    whole = any(one.by != "zero" or one.directions == "mean" or isinstance(one.directions, int) for one in asked)
    whole = whole and any(one.where != "weights" for one in asked)
    plain = replace(settings, intervention=())
    place = (model.revision, str(model.model.dtype), corpus.sha256, plain, spaces, products, whole)
    if place in _latest:
        return _latest[place]
    found: dict[tuple[str, int], _Sums] = {}
    draws = torch.Generator().manual_seed(0)

    def receive(activations: Activations) -> None:
        for space, vectors in activations.spaces.items():
            if space not in spaces or activations.stack == CROSS:
                continue
            values = vectors.values.transpose(1, 2).cpu()
            tokens = vectors.tokens.on(torch.device("cpu"))
            sums = found.setdefault((space, activations.layer), _Sums.empty(*values.shape[2:], products))
            groups = torch.tensor(tokens.groups).unsqueeze(1).expand_as(tokens.types)
            sums.add(values[tokens.mask].float(), tokens.types[tokens.mask], groups[tokens.mask], draws)

    groups = corpus.groups(GROUPS)
    items = len(corpus) if whole else min(2, len(corpus))
    for start in range(0, items, ITEMS):
        part = slice(start, min(start + ITEMS, items))
        for batch in capture.batches(model, corpus.items[part], groups[part], plain, Reading()):
            capture.run(model, batch, spaces, receive, plain.maps)
    _latest.clear()
    _latest[place] = found
    return found
