"""Interventions: what is changed on the way through a model, where, for which tokens, and by what.

A :class:`Replace` says so and is known by its content. :class:`Changes` is what it comes to in one model and corpus:
means, deviations and vectors of other texts (gathered by ``measurement.interventions``), and how they are put in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models.loaded import TOKEN_TYPES

# Where vectors can be changed, and the space that they are in.
SITES = {
    "residual": "hidden",
    "attention_input": "attention_input",
    "query_side": "attention_input",
    "key_side": "attention_input",
    "value_side": "attention_input",
    "query": "query",
    "key": "key",
    "value": "value",
    "weights": None,
}
# Sites at which one of the three that attention receives is made from a changed input.
SIDES = {"query_side": "query", "key_side": "key", "value_side": "value"}
BY = ("mean", "type_mean", "zero", "centre", "other", "other_of_type", "noise", "nothing")


@dataclass(frozen=True)
class Replace:
    """A change of the vectors of a site: x becomes x + Bᵀ(c' − c), where c = B x is the part that is replaced.

    Attributes:
        where: ``residual`` (what block l gives, or for layer 0 the first block reads, for all that follows),
            ``attention_input`` (what the attention of layer l reads), ``key_side`` (the keys of layer l are made from a
            changed input; queries, values and the residual stream are not; so ``query_side`` and ``value_side``),
            ``query``, ``key``, ``value`` (as they enter attention, by head), or ``weights`` (the chosen tokens are no
            keys; nothing takes their place).
        layers: by their numbers in the tables; None for all that have the site.
        dimensions: B takes these; None for all.
        directions: B takes the parts along these instead: ``mean`` (of the layer), a number k (its first k principal
            directions), or vectors, which are made orthonormal.
        tokens: types of tokens as in ``attention_by_token_type``, where ``first`` is the first of each text, whatever
            its type; None for all.
        by: what c' is: ``mean`` of c over the corpus, ``type_mean`` over the tokens of the same type, ``zero``,
            ``centre`` (c less its mean), ``other`` (c of a token of another text, all of it from one),
            ``other_of_type`` (of one of the same type), ``noise`` (normal, with the mean and variance of each number
            of c), or ``nothing``.
        but: whether everything but c is replaced.
        of: whose means and vectors: of the ``same`` texts, or of ``others``: the jackknife groups of other parity.
        seed: of what is drawn.
    """

    where: str
    layers: tuple[int, ...] | None = None
    dimensions: tuple[int, ...] | None = None
    directions: str | int | tuple[tuple[float, ...], ...] | None = None
    tokens: tuple[str, ...] | None = None
    by: str = "mean"
    but: bool = False
    of: str = "same"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dimensions", "tokens"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str | int) else value
            if value is not None and not isinstance(value, Sequence):
                value = [*value]  # An index, an array or a range.
            kept = None if value is None else tuple(v if isinstance(v, str) else int(v) for v in value)
            object.__setattr__(self, name, kept)
        if self.directions is not None and not isinstance(self.directions, str | int):
            given = tuple(tuple(map(float, direction)) for direction in self.directions)
            object.__setattr__(self, "directions", given)
        choices = {"where": SITES, "by": BY, "of": ("same", "others")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise AnalysisError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(known)}")
        for kind in self.tokens or ():
            if kind not in TOKEN_TYPES:
                raise AnalysisError(f"tokens are {kind!r}: give types of tokens, of {', '.join(TOKEN_TYPES)}")
        if self.dimensions is not None and self.directions is not None:
            raise AnalysisError("both dimensions and directions are given: give one of them")
        if isinstance(self.directions, str) and self.directions != "mean":
            raise AnalysisError(f"directions is {self.directions!r}: give mean, a number of principal ones, or vectors")
        if self.where == "weights" and (self.dimensions is not None or self.directions is not None or self.but):
            raise AnalysisError("attention weights have no dimensions: give layers and tokens")

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        none = any(getattr(self, name) == () for name in ("layers", "tokens"))
        return none or self.by == "nothing" or (self.dimensions == () and not self.but)


def interventions(given: object) -> tuple[Replace, ...]:
    """What is given as an intervention: one, several in order, or mappings as of a file; those that change nothing go.

    Raises:
        AnalysisError: it is none.
    """
    several = [given] if isinstance(given, Replace) or hasattr(given, "keys") else given or ()
    if isinstance(several, str) or not hasattr(several, "__iter__"):
        raise AnalysisError(f"the intervention is a {type(given).__name__}: give Replace(...), or several in a list")
    found, names = [], [field.name for field in fields(Replace)]
    for one in several:
        if hasattr(one, "keys"):
            if strange := [name for name in one if name not in names]:
                raise AnalysisError(f"an intervention has no {strange[0]}: give {', '.join(names)}")
            if "where" not in one:
                raise AnalysisError(f"an intervention says where: give one of {', '.join(SITES)}")
            one = Replace(**one)
        if not isinstance(one, Replace):
            raise AnalysisError(f"an intervention is a {type(one).__name__}: give Replace(...)")
        found += [] if one.empty else [one]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Gathered:
    """What is known of the vectors of one space in one layer: of the even and the odd jackknife groups, and of all.

    Attributes:
        mean: by half and type of token; the type after the last stands for all. NaN where there is none.
        deviation: of each number, by half.
        directions: orthonormal ones, by half, if any were asked for.
        spread: the deviation along each of them.
        pool: some vectors, drawn uniformly; for each type, and for all.
    """

    mean: Float[Tensor, "half type *head dim"]
    deviation: Float[Tensor, "half *head dim"]
    directions: Float[Tensor, "half *head direction dim"] | None
    spread: Float[Tensor, "half *head direction"] | None
    pool: tuple["Pool", ...]


@dataclass(frozen=True, eq=False)
class Pool:
    """Vectors, and the jackknife group of the text of each."""

    vectors: Float[Tensor, "vector *head dim"]
    groups: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Change:
    """A :class:`Replace` in one layer, and what it puts there."""

    replace: Replace
    layer: int
    gathered: Gathered | None

    def chosen(self, tokens: Tokens) -> Bool[Tensor, "utterance token"]:
        """The tokens whose vectors are changed."""
        if self.replace.tokens is None:
            return tokens.mask
        wanted = [TOKEN_TYPES.index(kind) for kind in self.replace.tokens]
        found = torch.isin(tokens.types, torch.tensor(wanted, device=tokens.types.device))
        if "first" in self.replace.tokens:
            found[:, 0] = True
        return found & tokens.mask

    def __call__(
        self, values: Float[Tensor, "utterance *head token dim"], tokens: Tokens, draws: torch.Generator
    ) -> Tensor:
        """The changed vectors."""
        given, replace = wide(values), self.replace
        half = torch.tensor([2 if replace.of == "same" else 1 - group % 2 for group in tokens.groups])
        new, old = self._new(given, tokens, half, draws), given
        basis = None if self.gathered.directions is None else self.gathered.directions[half].to(given)
        if basis is not None:
            along = torch.einsum("b...ne,b...de->b...nd", new - given, basis)
            moved = torch.einsum("b...nd,b...de->b...ne", along, basis)
        elif replace.dimensions is not None:
            kept = torch.zeros(given.shape[-1], dtype=given.dtype, device=given.device)
            kept[list(replace.dimensions)] = 1
            moved = (new - given) * kept
        else:
            moved = new - given
        new = new - moved if replace.but else given + moved
        chosen = self.chosen(tokens)
        chosen = chosen[..., None] if given.dim() == 3 else chosen[:, None, :, None]
        return torch.where(chosen, new, old).to(values.dtype)

    def _new(self, given: Tensor, tokens: Tokens, half: Tensor, draws: torch.Generator) -> Tensor:
        """What would take the place of whole vectors."""
        replace, gathered = self.replace, self.gathered
        types = torch.full_like(tokens.types, len(TOKEN_TYPES))
        types = tokens.types if replace.by == "type_mean" else types
        if replace.by == "zero":
            return torch.zeros_like(given)
        if replace.by.startswith("other"):
            return _of_tokens(self._others(tokens, half, draws), given)
        means = gathered.mean[half.unsqueeze(1), types.cpu()]  # utterance x token x (head x) dim
        if replace.by == "noise":
            noise = torch.randn(means.shape, generator=draws)
            deviation = gathered.deviation[half].unsqueeze(1)
            if gathered.directions is None:
                return _of_tokens(means + noise * deviation, given)
            # Along each direction, of its own deviation.
            basis, spread = gathered.directions[half].unsqueeze(1), gathered.spread[half].unsqueeze(1)
            along = torch.randn((*means.shape[:-1], spread.shape[-1]), generator=draws) * spread
            whole = torch.einsum("bn...d,bn...de->bn...e", along, basis.expand(-1, means.shape[1], *basis.shape[2:]))
            return _of_tokens(means + whole, given)
        means = _of_tokens(means, given)
        return given - means if replace.by == "centre" else means

    def _others(self, tokens: Tokens, half: Tensor, draws: torch.Generator) -> Tensor:
        """For each token, a vector of another text."""
        pools = self.gathered.pool
        found = pools[-1].vectors.new_zeros(*tokens.types.shape, *pools[-1].vectors.shape[1:])
        kinds = tokens.types.cpu() if self.replace.by == "other_of_type" else torch.full(tokens.types.shape, -1)
        for utterance, group in enumerate(tokens.groups):
            for kind in kinds[utterance].unique().tolist():
                pool = pools[kind]
                theirs = [g != group and (half[utterance] == 2 or g % 2 == half[utterance]) for g in pool.groups]
                candidates = torch.tensor(theirs, dtype=torch.bool).nonzero().flatten()
                places = (kinds[utterance] == kind).nonzero().flatten()
                # Padding has no type of its own; what is not chosen is not changed.
                if len(candidates):
                    drawn = torch.randint(len(candidates), (len(places),), generator=draws)
                    found[utterance, places] = pool.vectors[candidates[drawn]]
                elif bool(self.chosen(tokens)[utterance, places].any()):
                    raise AnalysisError(
                        f"no other text has a token of the type {(*TOKEN_TYPES, 'any')[kind]} to take the place of one "
                        f"in layer {self.layer}: give more texts, or other tokens"
                    )
        return found


def _of_tokens(values: Float[Tensor, "utterance token *head dim"], given: Tensor) -> Tensor:
    """On the device and in the order of axes of the vectors that they replace."""
    return (values if given.dim() == 3 else values.transpose(1, 2)).to(given)


class Changes:
    """All changes of a pass; what is drawn depends on the seed, the layer and the texts of a batch alone.

    Attributes:
        limits: by layer, the norm of a hidden vector from which its token does not count; none unless asked for.
    """

    def __init__(self, changes: Sequence[Change], limits: Mapping[int, float] | None = None):
        self.limits = dict(limits or {})
        self._at: dict[tuple[str, int], list[Change]] = {}
        for change in changes:
            self._at.setdefault((change.replace.where, change.layer), []).append(change)

    def __bool__(self) -> bool:
        return bool(self._at)

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._at

    def apply(self, where: str, layer: int, values: Tensor, tokens: Tokens) -> Tensor:
        """The vectors of a site in a layer, changed.

        Args:
            values: utterance x token x width, or utterance x head x token x dim.
        """
        for place, change in enumerate(self._at.get((where, layer), ())):
            seed = hash((change.replace.seed, layer, place, *tokens.groups, tokens.mask.sum().item())) & 0x7FFFFFFF
            values = change(values, tokens, torch.Generator().manual_seed(seed))
        return values

    def masked(self, layer: int, keys: Tokens) -> Bool[Tensor, "utterance token"] | None:
        """The tokens that are no keys in a layer; None if all are."""
        found = [change.chosen(keys) for change in self._at.get(("weights", layer), ())]
        return torch.stack(found).any(0) if found else None
