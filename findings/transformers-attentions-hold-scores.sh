#!/bin/sh
# transformers 5.23.0: what a model returns as `attentions` need not be weights of attention.
#
# SqueezeBERT returns the scores before the softmax. MiniMax returns, of its layers of linear attention, the recurrent state, and
# under its default attention only that, so that entry 0 changes its meaning with `attn_implementation`. In T5Gemma 2, a
# row of the decoder's own attention and one of its cross attention are two parts of one softmax, and add up to 1 together.
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
from transformers import MiniMaxConfig, MiniMaxModel, SqueezeBertConfig, SqueezeBertModel
from transformers import T5Gemma2Config, T5Gemma2Model

print("transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
ids = torch.arange(5, 17).unsqueeze(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def attentions(model, **more):
    with torch.no_grad():
        return model.eval()(input_ids=ids, output_attentions=True, **more)


squeeze = SqueezeBertConfig(**sizes, embedding_size=32, q_groups=1, k_groups=1, v_groups=1)
squeeze.q_groups = squeeze.k_groups = squeeze.v_groups = squeeze.post_attention_groups = 1
squeeze.intermediate_groups = squeeze.output_groups = 1
model = SqueezeBertModel(squeeze)
for parameter in model.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, 0, 0.3)
scores = attentions(model).attentions[0]
print(f"SqueezeBERT: least {scores.min():.2f}; rows of its softmax add up to {scores.softmax(-1).sum(-1).mean():.0f}")
assert scores.min() < 0

sizes |= {"num_key_value_heads": 2, "head_dim": 8}
kinds = ["full_attention", "linear_attention"]
for name in ("eager", "sdpa"):
    config = MiniMaxConfig(**sizes, layer_types=kinds, num_local_experts=2, block_size=4)
    model = MiniMaxModel._from_config(config, attn_implementation=name)
    shapes = [tuple(each.shape) for each in attentions(model, use_cache=False).attentions]
    print(f"MiniMax, {name}: {len(shapes)} entries, shapes", *shapes)
    assert shapes[-1] == (1, 4, 8, 8), "the recurrent state: head width by head width"
    assert len(shapes) == (2 if name == "eager" else 1)

text = sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
config = T5Gemma2Config(encoder={"text_config": text, "vision_config": vision}, decoder=text)
model = T5Gemma2Model._from_config(config, attn_implementation="eager")
output = attentions(model, decoder_input_ids=ids[:, :6], use_cache=False)
own, cross = output.decoder_attentions[0].sum(-1), output.cross_attentions[0].sum(-1)
print(f"T5Gemma 2: rows add up to {own.mean():.2f} (own) and {cross.mean():.2f} (cross), together {(own + cross).mean():.2f}")
assert (own + cross - 1).abs().max() < 1e-5
assert own.max() < 1
PYTHON
