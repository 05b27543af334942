"""Outputs of a model with an intervention, compared with those without it."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Bin, Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.heads import Head, Logits, in_parts

# Share of tokens that a masked language model predicts (Devlin et al. 2019, sec. 3.1).
PREDICTED = 0.15
# Number of tokens of a batch whose logits are in memory at once, and of the example of each of two
# texts on which a head is proven.
CHUNK = 256
EXAMPLE = 16


@dataclass(eq=False)
class Given:
    """The output of a model for a batch, and what gives its logits of some tokens, if requested."""

    output: dict
    logits: Logits | None = None


@dataclass(eq=False)
class Output:
    """The outputs of a model by token, compared with those of the pass without changes.

    Attributes:
        cosine: the cosine of each vector to the one without changes.
        loss: −ln p of the predicted token: the next one, or the masked one if ``masked``.
        kl: Kullback-Leibler divergence of the prediction from the one without changes.
        counted: the tokens that have these numbers.
        tokens: all tokens.
        masked: whether this is the pass over masked tokens.
    """

    counted: Mapping[str, Bool[Tensor, "utterance token"]]
    tokens: Tokens
    cosine: Float[Tensor, "utterance token"] | None = None
    loss: Float[Tensor, "utterance token"] | None = None
    kl: Float[Tensor, "utterance token"] | None = None
    masked: bool = False

    def of_bin(self, bin: Bin) -> "Output":
        """The same outputs, where only tokens in a bin count."""
        inside = self.tokens.in_bin(bin)
        counted = {}
        for name, mask in self.counted.items():
            counted[name] = mask & inside
        return replace(self, counted=counted)


def head_of(loaded: LoadedModel, batch: Batch, objective: str) -> Head:
    """The head of a model, proven on the beginning of a batch; outside of a captured pass."""
    return Head(loaded, objective, batch.head(2).beginning(EXAMPLE).inputs)


def ask(loaded: LoadedModel, batch: Batch, head: Head | None) -> Given:
    """The output of a model for a batch, through its head if predictions are requested."""
    if head is None:
        return Given(loaded.answer(batch.inputs).body)
    return Given(*head.answer(batch.inputs))


def compared(
    given: Given, plain: Given, vectors: Sequence[Tensor], ids: Tensor | None, tokens: Tokens
) -> Output:
    """The output of a pass, compared with that of the pass without changes.

    Args:
        vectors: the output vectors of both passes, utterance x token x width.
        ids: indices of the tokens, of which each text predicts the next.
    """
    cosine = functional.cosine_similarity(*(wide(part).double() for part in vectors), dim=-1)
    counted = {"cosine": tokens.counted.bool()}
    if given.logits is None:
        return Output(counted, tokens, cosine)
    # The last token has no next token.
    has_next = functional.pad(tokens.mask[:, 1:], (0, 1))
    counted |= dict.fromkeys(("loss", "kl"), has_next)
    following = functional.pad(ids[:, 1:], (0, 1))
    loss, kl = _prediction(given, plain, following)
    return Output(counted, tokens, cosine, loss, kl)


def predicted(
    given: Given,
    plain: Given,
    ids: Tensor,
    masked: Bool[Tensor, "utterance token"],
    tokens: Tokens,
) -> Output:
    """Predictions of masked tokens, compared with those of the pass without changes."""
    counted = dict.fromkeys(("loss", "kl"), masked)
    loss, kl = _prediction(given, plain, ids)
    return Output(counted, tokens, None, loss, kl, masked=True)


def _prediction(
    given: Given, plain: Given, wanted: Int[Tensor, "utterance token"]
) -> tuple[Tensor, Tensor]:
    loss, kl = (wanted.new_zeros(wanted.shape, dtype=torch.float64) for _ in range(2))
    texts, count = wanted.shape
    # Some tokens at a time, since a vocabulary is large.
    for tokens in in_parts(count, max(1, CHUNK // texts)):
        log = wide(given.logits(tokens)).log_softmax(-1)
        loss[:, tokens] = -log.gather(-1, wanted[:, tokens].unsqueeze(-1)).squeeze(-1)
        if plain is not given:
            before = wide(plain.logits(tokens)).log_softmax(-1)
            kl[:, tokens] = (before.exp() * (before - log)).sum(-1)
    return loss, kl


def masking(loaded: LoadedModel, batch: Batch) -> tuple[Batch, Bool[Tensor, "utterance token"]]:
    """The batch with 15 % of the tokens of each text masked, and a mask that marks them.

    At least one token of each text is masked, and no special ones. The choice depends on the text
    alone.

    Raises:
        AnalysisError: the tokenizer has no mask token.
    """
    mask = getattr(loaded.processor, "mask_token_id", None)
    if mask is None:
        raise AnalysisError(
            f"the tokenizer of {loaded.name} has no mask token: give another metric"
        )
    ids = batch.inputs["input_ids"]
    special = torch.tensor(loaded.processor.all_special_ids, device=ids.device)
    words = batch.tokens.on(ids.device).mask & ~torch.isin(ids, special)
    chosen = torch.zeros_like(words)
    for index, own in enumerate(words.cpu()):
        text = ids[index].cpu()[own]
        draws = torch.Generator().manual_seed(zlib.crc32(text.numpy().tobytes()))
        count = max(1, round(PREDICTED * len(text)))
        order = torch.randperm(len(text), generator=draws)[:count]
        positions = own.nonzero().squeeze(-1)[order]
        chosen[index, positions.to(ids.device)] = True
    masked = batch.inputs | {"input_ids": ids.masked_fill(chosen, mask)}
    return replace(batch, inputs=masked), chosen
