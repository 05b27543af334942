"""Logits of a language model, of some tokens at a time: those of a long text fill the memory.

The body runs once. Then the whole model is called with some tokens of the body's output in place of
the body, so that the logits are all that its class makes of them, such as scaled and bounded ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.utils import ModelOutput

from analysis_lib.models.loaded import LoadedModel
from analysis_lib.models.loading import with_head
from analysis_lib.models.outer import Answer, accepted, answer, of_tokens

# Gives the logits of a slice of the tokens.
Logits = Callable[[slice], Float[Tensor, "utterance token word"]]
# Number of parts of an example in which its logits must be those of the whole.
PARTS = 3


class Head:
    """The head of a language model around a loaded one.

    Args:
        loaded: the model.
        objective: what it predicts, one of ``OBJECTIVES``.
        example: the input of a few tokens, on which it is shown, once for each model, that the
            logits of a token depend on the output of the body at that token alone. Where they do
            not, the logits of all tokens are computed at once.

    Raises:
        AnalysisError: the model has no such head.
    """

    def __init__(self, loaded: LoadedModel, objective: str, example: Mapping[str, object]):
        self.loaded = loaded
        self.headed = with_head(loaded, objective)
        if loaded.body_path is None:
            loaded.body_path = self._proven_path(example)

    def answer(self, inputs: Mapping[str, object]) -> tuple[ModelOutput, Logits]:
        """One pass: the output of the body, and what gives the logits of some tokens."""
        path = self.loaded.body_path
        if not path:
            given = self._pass(inputs)
            return given.body, partial(_of_whole, given.outer.logits)
        body = self.headed.get_submodule(path)
        # The logits of the first token are not used, but a head must have something to read.
        output = self._pass(inputs, shortened=body).body
        return output, partial(self._logits, inputs, body, output)

    def _pass(self, inputs: Mapping[str, object], shortened: nn.Module | None = None) -> Answer:
        loaded = self.loaded
        return answer(
            loaded.name, loaded.model, self.headed, inputs, predicting=True, shortened=shortened
        )

    def _logits(
        self, inputs: Mapping[str, object], body: nn.Module, output: ModelOutput, tokens: slice
    ) -> Tensor:
        with _giving(body, of_tokens(output, tokens)):
            return self.headed(**accepted(self.headed, inputs, predicting=True)).logits

    def _proven_path(self, example: Mapping[str, object]) -> str | None:
        """The path of the body if logits of parts of an example are those of the whole.

        Empty if they are not; None if the example has one token, which shows nothing.
        """
        given = self._pass(example)
        whole = given.outer.logits
        paths = {module: path for path, module in self.headed.named_modules()}
        path = paths.get(given.module, "")
        count = whole.shape[1]
        if not path or count < 2:
            return None if path else ""
        parts = []
        try:
            for tokens in in_parts(count, max(1, count // PARTS)):
                parts.append(self._logits(example, given.module, given.body, tokens))
            logits = torch.cat(parts, 1)
        except Exception:  # Of a head that reads more than vectors of tokens.
            return ""
        within = torch.finfo(whole.dtype).eps ** 0.5
        is_same = logits.shape == whole.shape and torch.allclose(
            logits, whole, within, within, equal_nan=True
        )
        return path if is_same else ""


def in_parts(count: int, size: int) -> Iterator[slice]:
    """Slices of so many tokens, the last perhaps of fewer."""
    for start in range(0, count, size):
        yield slice(start, start + size)


def _of_whole(logits: Tensor, tokens: slice) -> Tensor:
    return logits[:, tokens]


@contextmanager
def _giving(module: nn.Module, output: ModelOutput) -> Iterator[None]:
    """A context in which a module gives out what is known already, without a pass."""
    before = vars(module).get("forward")
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
