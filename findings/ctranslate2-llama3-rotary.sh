#!/bin/sh
# ctranslate2 4.8.5: a converted Llama 3.1 has lost its rotary scaling, without a word.
#
# The converter saves the type "llama3" and its two bounds of frequency, but AttentionSpec stores a factor only for the
# type "linear", and LlamaLoader passes no original length: the engine then divides frequencies by 1. The logits are
# those of the same weights without scaling, to single precision, and depart from the true ones the more, the longer the
# text. "linear" arrives. Compare a converted model with transformers, or set both values before it is saved, as below.
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
words = {f"w{i}": i for i in range(96)} | {"<s>": 96, "</s>": 97, "<unk>": 98}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
    bos_token="<s>", eos_token="</s>", unk_token="<unk>",
)
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"max_position_embeddings": 65536, "bos_token_id": 96, "eos_token_id": 97, "initializer_range": 0.3}
plain = {"rope_type": "default", "rope_theta": 500000.0}
linear = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0}
llama3 = linear | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3["original_max_position_embeddings"] = 8192
ids = torch.arange(400).unsqueeze(0) * 37 % 96


def built(rotary):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(rope_parameters=rotary, **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(ids).logits.numpy()


def converted(rotary, converter=TransformersConverter):
    built(rotary).save_pretrained("model")
    tokenizer.save_pretrained("model")
    converter("model").convert("converted", force=True)
    transformers.logging.set_verbosity_error()
    generator = ctranslate2.Generator("converted", compute_type="float32", inter_threads=1, intra_threads=1)
    return numpy.array(generator.forward_batch(ids.tolist()))


class Repaired(TransformersConverter):
    def _load(self):
        spec = super()._load()
        for layer in spec.decoder.layer:
            # The specification takes no new attributes in the ordinary way.
            vars(layer.self_attention)["rotary_scaling_factor"] = numpy.float32(llama3["factor"])
            vars(layer.self_attention)["original_max_position_embeddings"] = numpy.int32(8192)
        return spec


def off(name, left, right):
    largest = abs(left - right).max(-1)[0]
    first, last = largest[:10].max(), largest[-10:].max()
    print(f"{name}: logits off by {first:.2g} in the first 10 tokens, {last:.2g} in the last 10")
    return largest.max()


unscaled = logits(built(plain))
print(f"spread of logits: {unscaled.std():.2g}")
assert off("no scaling", converted(plain), unscaled) < 1e-3
assert off("linear", converted(linear), logits(built(linear))) < 1e-3
scaled = converted(llama3)
assert off("llama3", scaled, logits(built(llama3))) > 0.5
assert off("llama3, beside no scaling in transformers", scaled, unscaled) < 1e-3
assert off("llama3, with factor and length set", converted(llama3, Repaired), logits(built(llama3))) < 1e-3
PYTHON
