#!/bin/sh
# ctranslate2 4.8.5: a converted Gemma 2 has no sliding window, no soft caps, and queries scaled by its head size.
#
# Its loader (Gemma2Loader) reads none of sliding_window, attn_logit_softcapping, final_logit_softcapping and
# query_pre_attn_scalar, and raises or logs nothing. The other differences from Gemma are there: without these four, the
# logits agree with those of transformers to single precision. Here, each is set alone, and lost. Loaders of later
# Gemmas read some. For logits or scores of a Gemma 2, use transformers.
# Small random models. PYTHON names a Python that has torch and transformers; without it, they are installed. Fails when
# that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" ctranslate2==4.8.5
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
import ctranslate2
import numpy
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
words = {f"w{i}": i for i in range(96)} | {"<s>": 96, "</s>": 97, "<unk>": 98}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
    bos_token="<s>", eos_token="</s>", unk_token="<unk>",
)
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 96, "eos_token_id": 97, "pad_token_id": None}
# What the loader gives to each model: all tokens are seen, scores are divided by the root of 16, and nothing is capped.
plain = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}
plain |= {"sliding_window": 4096, "layer_types": ["full_attention"] * 2, "initializer_range": 0.1}
ids = torch.arange(40).unsqueeze(0) * 37 % 96


def off(name, **changed):
    """The largest difference of logits in a converted model, and of the same weights without the change."""
    pair = []
    for settings in (plain | changed, plain):
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(Gemma2Config(**sizes | settings)).eval()
        with torch.no_grad():
            pair.append(model(ids).logits.numpy())
        if settings is not plain:
            transformers.logging.set_verbosity_error()
            model.save_pretrained("model")
            tokenizer.save_pretrained("model")
    TransformersConverter("model").convert("converted", force=True)
    generator = ctranslate2.Generator("converted", compute_type="float32", inter_threads=1, intra_threads=1)
    given = numpy.array(generator.forward_batch(ids.tolist()))
    from_own, from_plain = (abs(given - logits).max() for logits in pair)
    print(f"{name}: off by {from_own:.2g}, and by {from_plain:.2g} from the model without it")
    return from_own, from_plain


assert max(off("none of the four")) < 1e-4
for name, changed in {
    "a window of 6 in one of two layers": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "scores capped at 1": {"attn_logit_softcapping": 1.0},
    "logits capped at 5": {"final_logit_softcapping": 5.0},
    "query_pre_attn_scalar 64": {"query_pre_attn_scalar": 64},
}.items():
    from_own, from_plain = off(name, **changed)
    assert from_own > 0.1 and from_plain < 1e-4
PYTHON
