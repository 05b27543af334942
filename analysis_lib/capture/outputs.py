"""What a model gives out with what is changed on the way, beside what it gives out without."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import with_head

# The share of the tokens that a masked language model predicts, as in Devlin et al. 2019, sec. 3.1.
PREDICTED = 0.15


@dataclass(eq=False)
class Given:
    """What a model gives out for a batch: its output, and, if asked for, logits, utterance x token
    x word.
    """

    output: dict
    logits: Tensor | None = None


@dataclass(eq=False)
class Output:
    """What a model gives out, by token, in comparison with the unchanged pass.

    Attributes:
        cosine: of each vector to the unchanged one.
        loss: −ln p of a token that is predicted: the one that follows, or, of ``masked``, that
            which was masked.
        kl: Kullback-Leibler divergence of the prediction from the unchanged one.
        counted: the tokens that have these numbers.
        masked: whether this is the pass that reads masked tokens.
    """

    counted: Mapping[str, Bool[Tensor, "utterance token"]]
    cosine: Float[Tensor, "utterance token"] | None = None
    loss: Float[Tensor, "utterance token"] | None = None
    kl: Float[Tensor, "utterance token"] | None = None
    masked: bool = False


def ask(loaded: LoadedModel, batch: Batch, objective: str | None) -> Given:
    """What a model gives out for a batch, through its head where its predictions are asked for."""
    if objective is None:
        return Given(loaded.answer(batch.inputs).body)
    output, predictions = loaded.answer(batch.inputs, with_head(loaded, objective))
    return Given(output, predictions.logits)


def compared(
    given: Given, plain: Given, vectors: Sequence[Tensor], ids: Tensor | None, tokens: Tokens
) -> Output:
    """The output of a pass beside that of the unchanged one.

    Args:
        vectors: what both give out, utterance x token x width.
        ids: of the tokens, of which each text predicts the next.
    """
    cosine = functional.cosine_similarity(*(wide(part).double() for part in vectors), dim=-1)
    counted = {"cosine": tokens.counted.bool()}
    if given.logits is None:
        return Output(counted, cosine)
    # The last token is followed by none.
    counted |= dict.fromkeys(("loss", "kl"), functional.pad(tokens.mask[:, 1:], (0, 1)))
    return Output(counted, cosine, *_prediction(given, plain, functional.pad(ids[:, 1:], (0, 1))))


def predicted(
    given: Given, plain: Given, ids: Tensor, masked: Bool[Tensor, "utterance token"]
) -> Output:
    """The predictions of masked tokens, beside those of the unchanged pass."""
    return Output(
        dict.fromkeys(("loss", "kl"), masked), None, *_prediction(given, plain, ids), masked=True
    )


def _prediction(
    given: Given, plain: Given, wanted: Int[Tensor, "utterance token"]
) -> tuple[Tensor, Tensor]:
    loss, kl = (wanted.new_zeros(wanted.shape, dtype=torch.float64) for _ in range(2))
    # One text at a time: words are many.
    for text, words in enumerate(wanted):
        log = wide(given.logits[text]).log_softmax(-1)
        before = wide(plain.logits[text]).log_softmax(-1)
        loss[text] = -log.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        kl[text] = (before.exp() * (before - log)).sum(-1)
    return loss, kl


def masking(loaded: LoadedModel, batch: Batch) -> tuple[Batch, Bool[Tensor, "utterance token"]]:
    """The batch with 15 % of the tokens of each text masked, one at least, special ones excepted;
    and which they are.

    They depend on the text alone.

    Raises:
        AnalysisError: its tokenizer has no mask.
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
