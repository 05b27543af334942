"""What a model gives out with what is changed on the way, beside what it gives out without."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import wide
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import with_head


@dataclass(eq=False)
class Given:
    """What a model gives out for a batch: its output, and, if asked for, logits, utterance x token x word."""

    output: dict
    logits: Tensor | None = None


@dataclass(eq=False)
class Output:
    """What a model gives out, by token, in comparison with the unchanged pass.

    Attributes:
        tokens: those of the vectors.
        cosine: of each vector to the unchanged one.
        loss: −ln p of the token that follows; the last one has none.
        kl: Kullback-Leibler divergence of the prediction from the unchanged one.
    """

    tokens: Tokens
    cosine: Float[Tensor, "utterance token"]
    loss: Float[Tensor, "utterance token"] | None = None
    kl: Float[Tensor, "utterance token"] | None = None

    def counted(self, name: str) -> Bool[Tensor, "utterance token"]:
        """The tokens that have this number."""
        if name == "cosine":
            return self.tokens.counted.bool()
        return functional.pad(self.tokens.mask[:, 1:], (0, 1))


def ask(loaded: LoadedModel, batch: Batch, predicting: bool) -> Given:
    """What a model gives out for a batch, through its head where its predictions are asked for."""
    if not predicting:
        return Given(loaded.model(**batch.inputs))
    seen = []
    handle = loaded.model.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        logits = with_head(loaded)(**batch.inputs).logits
    finally:
        handle.remove()
    return Given(seen[-1], logits)


def compared(given: Given, plain: Given, vectors: Sequence[Tensor], ids: Tensor | None, tokens: Tokens) -> Output:
    """The output of a pass beside that of the unchanged one.

    Args:
        vectors: what both give out, utterance x token x width.
        ids: of the tokens.
    """
    cosine = functional.cosine_similarity(*(wide(part).double() for part in vectors), dim=-1)
    if given.logits is None:
        return Output(tokens, cosine)
    loss, kl = torch.zeros_like(cosine), torch.zeros_like(cosine)
    # One text at a time: words are many.
    for place in range(len(ids)):
        log, before = (wide(part.logits[place]).log_softmax(-1) for part in (given, plain))
        loss[place, :-1] = -log[:-1].gather(-1, ids[place, 1:, None]).squeeze(-1)
        kl[place] = (before.exp() * (before - log)).sum(-1)
    return Output(tokens, cosine, loss, kl)
