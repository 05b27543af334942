"""Interventions: changes of vectors inside a model during its forward pass.

A :class:`Replace` declares where, for which tokens and how, and is known by its content.
:class:`Changes` applies it in one model and corpus, with means, deviations and vectors of other
texts that ``measurement.interventions`` gathers.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.corpora.token_types import ALL_TYPES
from analysis_lib.errors import (
    AnalysisError,
    in_order,
    require_choice,
    require_flag,
    require_seed,
    require_whole,
    shown,
)

# Sites where vectors can be changed.
SITES = (
    *("residual", "attention_input", "query_side", "key_side", "value_side"),
    *("query", "key", "value", "query_unrotated", "key_unrotated", "weights"),
)
# Sites where only the queries, the keys or the values of a layer are made from a changed input.
SIDES = {"query_side": "query", "key_side": "key", "value_side": "value"}
MISFIT = (
    "holds no vector for each token, as in attention by windows, and cannot be changed: give "
    "another site or layer"
)
BY = (
    "mean",
    "mean_of_rest",
    "type_mean",
    "zero",
    "centre",
    "other",
    "other_of_type",
    "noise",
    "nothing",
)


@dataclass(frozen=True)
class Replace:
    """A change of the vectors of a site: x becomes x + Bᵀ(c' − c), where c = B x is replaced by c'.

    Attributes:
        where: ``residual`` (the output of block l, or for layer 0 the input of the first block, and
            thereby all that follows; in a feature map, the vectors at its positions),
            ``attention_input`` (the input of the attention of layer l), ``key_side`` (the keys of
            layer l are made from a changed input; queries, values and the residual stream are not;
            likewise ``query_side`` and ``value_side``), ``query``, ``key``, ``value`` (as they
            enter attention, by head), ``query_unrotated`` or ``key_unrotated`` (the same before
            they are rotated by position, in layers that rotate them), or ``weights`` (the chosen
            tokens are masked as keys, with no replacement; a query that would see no key at all
            keeps its keys).
        layers: numbers of layers as in the tables; None for all that have the site.
        dimensions: B selects these dimensions; None for all.
        directions: B projects on these directions instead: ``mean`` (of the layer), a number k (its
            first k principal directions), or vectors, of which an orthonormal basis is taken.
        tokens: types of tokens as in ``attention_by_token_type``, where ``first`` is the first of
            each text, whatever its type; None for all.
        by: the source of c': ``mean`` of c over all tokens of the corpus, ``mean_of_rest`` over
            those whose types are not among ``tokens``, ``type_mean`` over those of the same type,
            ``zero``, ``centre`` (c minus its mean), ``other`` (c of a token of another text, all
            dimensions from the same token), ``other_of_type`` (the same, from a token of the same
            type), ``noise`` (normal, with the mean and variance of each component of c), or
            ``nothing``.
        but: whether to replace everything except c.
        of: texts that means and vectors come from: the ``same`` texts, or ``others``, the jackknife
            groups of other parity.
        seed: the seed of random draws.
    """

    where: str
    layers: Iterable | int | None = None
    dimensions: Iterable | int | None = None
    directions: Iterable | str | int | None = None
    tokens: Iterable | None = None
    by: str = "mean"
    but: bool = False
    of: str = "same"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dimensions", "tokens"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        choices = {"where": SITES, "by": BY, "of": ("same", "others")}
        for name, known in choices.items():
            require_choice(name, getattr(self, name), known)
        require_flag("but", self.but)
        object.__setattr__(self, "seed", require_seed("the seed of an intervention", self.seed))
        for kind in self.tokens or ():
            if kind not in ALL_TYPES:
                raise AnalysisError(
                    f"tokens are {kind!r}: give types of tokens, of {', '.join(ALL_TYPES)}"
                )
        if self.dimensions is not None and self.directions is not None:
            raise AnalysisError("both dimensions and directions are given: give one of them")
        object.__setattr__(self, "directions", _directions(self.directions))
        if self.by == "mean_of_rest" and self.tokens is None:
            raise AnalysisError(
                "mean_of_rest is that of the tokens that stay: give the tokens that are replaced"
            )
        if self.where == "weights" and (
            self.dimensions is not None or self.directions is not None or self.but
        ):
            raise AnalysisError("attention weights have no dimensions: give layers and tokens")

    @property
    def empty(self) -> bool:
        """Whether this changes nothing."""
        parts = self.dimensions if self.directions is None else self.directions
        nothing = parts is None if self.but else parts == ()
        return nothing or self.by == "nothing" or () in (self.layers, self.tokens)


def _listed(name: str, value: object) -> tuple[int | str, ...] | None:
    if value is None:
        return None
    several = [value] if isinstance(value, str | Integral) else value
    if name == "tokens":
        return tuple(in_order(name, several, "types of tokens"))
    if isinstance(several, set | frozenset):
        several = sorted(several, key=str)
    numbers = in_order(name, several, "whole numbers")
    return tuple(require_whole(f"one of {name}", number) for number in numbers)


def _directions(given: object) -> str | int | tuple[tuple[float, ...], ...] | None:
    if given is None or (isinstance(given, str) and given == "mean"):
        return given
    if isinstance(given, Integral) and not isinstance(given, bool) and given >= 0:
        return int(given) or ()
    wanted = "mean, a number of principal ones, or vectors"
    if not torch.is_tensor(given) and not isinstance(given, np.ndarray):
        given = in_order("directions", given, wanted)
    try:
        vectors = [torch.as_tensor(vector, dtype=torch.float64) for vector in given]
        if vectors and not any(vector.dim() for vector in vectors):
            # The components of a single vector.
            vectors = [torch.stack(vectors)]
        for vector in vectors:
            if vector.dim() != 1 or not vector.isfinite().all() or not vector.any():
                raise ValueError
        if len({len(vector) for vector in vectors}) > 1:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise AnalysisError(
            f"directions are not finite, zero, or not of one length: give {wanted}"
        ) from None
    return tuple(tuple(vector.tolist()) for vector in vectors)


def interventions(given: object) -> tuple[Replace, ...]:
    """The interventions of a measurement, from one, from a list, or from mappings as in a file.

    Those that change nothing are left out.

    Raises:
        AnalysisError: an item is not an intervention.
    """
    if given is None:
        return ()
    if isinstance(given, Replace) or hasattr(given, "keys"):
        given = [given]
    several = in_order("the intervention", given, "Replace(...), or several in a list")
    replacements = []
    for each in several:
        replacement = _from_mapping(each) if hasattr(each, "keys") else each
        if not isinstance(replacement, Replace):
            kind = type(replacement).__name__
            raise AnalysisError(f"an intervention is a {kind}: give Replace(...)")
        if not replacement.empty:
            replacements.append(replacement)
    return tuple(replacements)


def _from_mapping(given: Mapping[str, object]) -> Replace:
    names = [field.name for field in fields(Replace)]
    for name in given:
        if name not in names:
            raise AnalysisError(f"an intervention has no {shown(name)}: give {', '.join(names)}")
    if "where" not in given:
        raise AnalysisError(f"an intervention says where: give one of {', '.join(SITES)}")
    return Replace(**given)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Statistics of the vectors of one site in one layer.

    Halves are the even jackknife groups, the odd ones, and all of them.

    Attributes:
        counts: the number of vectors, by half and type of token; the type after the last stands for
            all.
        mean: the mean vector; zero where there is no vector.
        deviation: the standard deviation of each component, by half.
        directions: orthonormal directions by half, if requested.
        spread: the standard deviation along each direction, if requested.
        pools: some vectors, drawn uniformly, and the groups of their texts; one pool per type, or
            one for all.
    """

    counts: Float[Tensor, "half type"]
    mean: Float[Tensor, "half type head dim"]
    deviation: Float[Tensor, "half head dim"]
    directions: Float[Tensor, "half head direction dim"] | None
    spread: Float[Tensor, "half head direction"] | None
    pools: tuple[tuple[Float[Tensor, "_ head dim"], Int[Tensor, " _"]], ...]


@dataclass(frozen=True, eq=False)
class Change:
    """A :class:`Replace` in one layer, with the statistics that it needs."""

    replace: Replace
    layer: int
    gathered: Gathered | None = None

    def chosen(self, tokens: Tokens) -> Bool[Tensor, "utterance token"]:
        """True at the tokens whose vectors are changed."""
        if self.replace.tokens is None:
            return tokens.mask
        names = tokens.type_names
        wanted = [names.index(kind) for kind in self.replace.tokens if kind in names]
        chosen = torch.isin(tokens.types, torch.tensor(wanted, device=tokens.types.device))
        if "first" in self.replace.tokens:
            chosen[:, 0] = True
        return chosen & tokens.mask

    def __call__(
        self,
        values: Float[Tensor, "utterance *head token dim"],
        tokens: Tokens,
        draws: torch.Generator,
    ) -> Tensor:
        """The vectors after the change."""
        replace = self.replace
        chosen = self.chosen(tokens)
        if not chosen.any():
            return values
        by_head = values if values.dim() == 4 else values.unsqueeze(1)
        given = wide(by_head)
        half = torch.tensor(
            [2 if replace.of == "same" else 1 - group % 2 for group in tokens.groups]
        )
        new = self._new(given, tokens, half, chosen.cpu(), draws)
        if replace.directions is not None:
            basis = self.gathered.directions[half].to(given)
            moved = (new - given) @ basis.transpose(-1, -2) @ basis
            new = new - moved if replace.but else given + moved
        elif replace.dimensions is not None:
            named = torch.zeros(given.shape[-1], dtype=torch.bool, device=given.device)
            named[list(replace.dimensions)] = True
            new = torch.where(named != replace.but, new, given)
        changed = torch.where(chosen[:, None, :, None], new, given)
        return changed.reshape(values.shape).to(values.dtype)

    def _new(
        self, given: Tensor, tokens: Tokens, half: Tensor, chosen: Tensor, draws: torch.Generator
    ) -> Tensor:
        """Replacements of whole vectors, before dimensions or directions are selected."""
        replace = self.replace
        gathered = self.gathered
        if replace.by == "zero":
            return torch.zeros_like(given)
        if replace.by.startswith("other"):
            return self._others(tokens, half, chosen, draws).transpose(1, 2).to(given)
        types = torch.full(tokens.types.shape, len(tokens.type_names))
        types = tokens.types.cpu() if replace.by == "type_mean" else types
        half = half.unsqueeze(1)
        for kind in types[chosen & (gathered.counts[half, types] == 0)].tolist():
            raise self._lacking(kind, tokens)
        means = gathered.mean[half, types]  # utterance x token x head x dim
        if replace.by == "noise" and gathered.directions is None:
            means = means + torch.randn(means.shape, generator=draws) * gathered.deviation[half]
        elif replace.by == "noise":
            # Noise along each direction has the deviation of that direction.
            along = gathered.spread[half].expand(-1, means.shape[1], -1, -1)
            along = torch.randn(along.shape, generator=draws) * along
            means = means + torch.einsum("bnhd,bhde->bnhe", along, gathered.directions[half[:, 0]])
        means = means.transpose(1, 2).to(given)
        return given - means if replace.by == "centre" else means

    def _others(
        self, tokens: Tokens, half: Tensor, chosen: Tensor, draws: torch.Generator
    ) -> Tensor:
        """A vector of another text for each token."""
        pools = self.gathered.pools
        first, _ = pools[0]
        others = first.new_zeros(*chosen.shape, *first.shape[1:])
        kinds = torch.zeros_like(chosen, dtype=torch.long)
        if self.replace.by == "other_of_type":
            kinds = tokens.types.cpu()
        for utterance, group in enumerate(tokens.groups):
            for kind in kinds[utterance][chosen[utterance]].unique().tolist():
                vectors, groups = pools[kind]
                in_half = (half[utterance] == 2) | (groups % 2 == half[utterance])
                candidates = ((groups != group) & in_half).nonzero().flatten()
                if not len(candidates):
                    missing = kind if len(pools) > 1 else len(tokens.type_names)
                    raise self._lacking(missing, tokens)
                is_kind = kinds[utterance] == kind
                positions = (chosen[utterance] & is_kind).nonzero().flatten()
                drawn = torch.randint(len(candidates), (len(positions),), generator=draws)
                others[utterance, positions] = vectors[candidates[drawn]]
        return others

    def _lacking(self, kind: int, tokens: Tokens) -> AnalysisError:
        kind_name = (*tokens.type_names, "any")[kind]
        return AnalysisError(
            f"{self.replace.where} of layer {self.layer}: other texts have no token of type "
            f"{kind_name} whose vectors could take the place of one: give more texts, or other "
            "tokens"
        )


def fits(values: Tensor, tokens: Tokens) -> bool:
    """Whether ``values`` has one vector for each token, and for each head if there are heads."""
    return values.dim() in (3, 4) and (len(values), values.shape[-2]) == tokens.mask.shape


class Changes:
    """All changes of a forward pass.

    Random draws depend only on the seed, the site, the layer and the texts of a batch.

    Attributes:
        limits: by layer, the norm of a hidden vector from which on its token does not count; empty
            unless requested.
    """

    def __init__(self, changes: Sequence[Change], limits: Mapping[int, float] | None = None):
        self.limits = dict(limits or {})
        self._at: dict[tuple[str, int], list[Change]] = {}
        for change in changes:
            self._at.setdefault((change.replace.where, change.layer), []).append(change)

    def __bool__(self) -> bool:
        return bool(self._at)

    def __contains__(self, site_and_layer: tuple[str, int]) -> bool:
        return site_and_layer in self._at

    @property
    def reads(self) -> bool:
        """Whether a site is read or changed at all."""
        return bool(self)

    def apply(
        self, where: str, layer: int, values: Tensor, tokens: Tokens, texts: Callable[[], int]
    ) -> Tensor:
        """The vectors of a site in a layer, after all changes.

        Args:
            values: utterance x token x width, or utterance x head x token x dim.
            texts: returns a number that stands for the texts of the batch.

        Raises:
            AnalysisError: there is not one vector per token, as in attention by windows.
        """
        for index, change in enumerate(self._at.get((where, layer), ())):
            if not fits(values, tokens):
                raise AnalysisError(f"{where} of layer {layer} {MISFIT}")
            known = change.replace.seed, where, layer, index
            seed = zlib.crc32(repr(known).encode(), texts())
            values = change(values, tokens, torch.Generator().manual_seed(seed))
        return values

    def masked(self, layer: int, keys: Tokens) -> Bool[Tensor, "utterance token"] | None:
        """True at the tokens that are masked as keys in a layer; None if there are none."""
        changes = self._at.get(("weights", layer), ())
        if not changes:
            return None
        return torch.stack([change.chosen(keys) for change in changes]).any(0)
