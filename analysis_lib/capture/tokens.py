"""What the vectors of a layer stand for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.models import TOKEN_TYPES

# The leading entries of TOKEN_TYPES.
SPECIAL_TYPES = ("cls", "sep")


@dataclass(eq=False)
class Tokens:
    """The tokens of each utterance of a batch.

    A token counts if its vectors and queries enter the tables. As a key, every token but padding takes part.

    Attributes:
        mask: True at a token, False at padding.
        types: the type of each token, an index into ``TOKEN_TYPES``; meaningless at padding.
        groups: the jackknife group of each utterance.
        special_tokens: whether [CLS] and [SEP] count.
        silent: True at tokens that the model attends to but that are not part of the item, such as the silence that
            Whisper appends to a short sound; these do not count.
    """

    mask: Bool[Tensor, "utterance token"]
    types: Int[Tensor, "utterance token"]
    groups: Int[Tensor, " utterance"]
    special_tokens: bool = True
    silent: Bool[Tensor, "utterance token"] | None = None

    @cached_property
    def type_masks(self) -> Float[Tensor, "utterance type token"]:
        """1 where a token has a type, else 0; 0 for every type at padding."""
        masks = functional.one_hot(self.types.long(), len(TOKEN_TYPES)) * self.mask.unsqueeze(-1)
        return masks.transpose(1, 2).to(torch.get_default_dtype())

    @cached_property
    def counted(self) -> Bool[Tensor, "utterance token"]:
        """True at the tokens that count."""
        mask = self.mask if self.special_tokens else self.mask & (self.types >= len(SPECIAL_TYPES))
        return mask if self.silent is None else mask & ~self.silent

    @cached_property
    def counts(self) -> Float[Tensor, " utterance"]:
        """How many tokens of each utterance count."""
        return self.counted.sum(1).double()

    @property
    def counted_types(self) -> slice:
        """The types whose tokens count."""
        return slice(None) if self.special_tokens else slice(len(SPECIAL_TYPES), None)

    def head(self, utterances: int) -> "Tokens":
        """The tokens of the first few utterances."""
        silent = None if self.silent is None else self.silent[:utterances]
        parts = (part[:utterances] for part in (self.mask, self.types, self.groups))
        return Tokens(*parts, self.special_tokens, silent)


def unpadded(groups: Tensor, count: int, class_tokens: int = 0, special_tokens: bool = True) -> Tokens:
    """``count`` tokens for each utterance: ``class_tokens`` of type cls, then others."""
    types = torch.full((len(groups), count), TOKEN_TYPES.index("other"), device=groups.device)
    types[:, :class_tokens] = TOKEN_TYPES.index("cls")
    return Tokens(torch.ones_like(types, dtype=torch.bool), types, groups, special_tokens)
