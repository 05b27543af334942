#!/bin/sh
# transformers 5.23.0: the hidden states of Mamba begin with the output of its first block, not with the embeddings.
#
# The list has one entry more than there are blocks, as that of GPT-2, because the last one is what the final norm gives:
# only its content shows that entry 0 is no embedding, and that each entry is one block further than its number says.
# Small random models. PYTHON names a Python that has torch and transformers; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
cd "$folder"
"$PYTHON" - <<'PYTHON'
import torch
import transformers
from transformers import GPT2Config, GPT2Model, MambaConfig, MambaModel

print("transformers", transformers.__version__)
ids = torch.arange(5, 17).unsqueeze(0)
torch.manual_seed(0)
mamba = MambaModel(MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=3)).eval()
gpt2 = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4)).eval()


def first_and_last(model, blocks):
    """Whether the first hidden state is what block 1 reads or gives; how many states there are."""
    seen = {}

    def note(block, args, kwargs, output):
        read = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        seen["reads"] = read
        seen["gives"] = output if isinstance(output, torch.Tensor) else output[0]

    blocks[0].register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    same = [what for what, vectors in seen.items() if torch.equal(states[0], vectors)]
    print(f"{type(model).__name__}: {len(states)} states of {len(blocks)} blocks; entry 0 is what block 1", *same)
    return same, len(states)


assert first_and_last(gpt2, gpt2.h) == (["reads"], 4)
assert first_and_last(mamba, mamba.layers) == (["gives"], 4)
PYTHON
