"""What transformers makes of a text token by token, with a cache, and what it makes of it at once.

A clean pass over a prompt and its answer is worth measuring only if it repeats what the model did
when it answered: :func:`as_generated` is that, and :func:`at_once` the pass, in which the last
token of the answer is read as well. The library's pass can stand in for the latter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def as_generated(model: nn.Module, prompt_ids: Sequence[int], count: int) -> tuple[list, Tensor]:
    """Tokens that a model adds to a prompt, greedily, and its hidden states on the way.

    Returns:
        The ids of ``count`` tokens; and the states of all tokens but the last, which is never read,
        layer x token x width, as ``generate`` gives them of each step.
    """
    ids = torch.tensor([prompt_ids])
    given = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        # No token ends it.
        eos_token_id=-1,
        pad_token_id=0,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    lengths = [states[0].shape[1] for states in given.hidden_states]
    # With its cache, a step reads one token.
    assert lengths == [len(prompt_ids)] + [1] * (count - 1)
    steps = [torch.stack([layer[0] for layer in states]) for states in given.hidden_states]
    return given.sequences[0, len(prompt_ids) :].tolist(), torch.cat(steps, 1)


@torch.no_grad()
def at_once(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The hidden states of one pass over some tokens, layer x token x width."""
    states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([layer[0] for layer in states])
