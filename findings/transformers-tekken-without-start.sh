#!/bin/sh
# transformers 5.23.0: what a folder with tekken.json gives depends on whether mistral-common 1.13.1 is installed.
#
# Mistral's newer models have that file for a tokenizer. With mistral-common, AutoTokenizer takes that, which puts <s> before a text and
# knows the special tokens. Without it, transformers reads the file itself: the same pieces, no <s>, and no special token. The text is then
# one token shorter, and its first token, at which attention sinks, is another one. No message says so.
# PYTHON names a Python that has torch and transformers 5.23.0; without it, they are installed. Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/mistral" mistral-common==1.13.1 tiktoken==0.14.0 \
    pydantic-extra-types==2.11.1 pycountry==26.2.16
"$PYTHON" -m pip install --quiet --target "$folder/others" pydantic jsonschema requests pillow
cd "$folder"
cat > tried.py <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer, MistralConfig

# A tokenizer of the package, with fewer pieces.
whole = json.loads(Path("mistral/mistral_common/data/tekken_240911.json").read_text())
whole.pop("image")
whole["vocab"] = whole["vocab"][:2000]
whole["config"] |= {"num_vocab_tokens": 2000, "default_vocab_size": 3000, "version": "v7"}
# As files of 2025 name them.
names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
names += ["[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"]
names += ["[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
names += [f"<SPECIAL_{rank}>" for rank in range(len(names), 1000)]
whole["special_tokens"] = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
Path("model").mkdir(exist_ok=True)
Path("model/tekken.json").write_text(json.dumps(whole))
MistralConfig(vocab_size=3000).save_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
ids = tokenizer("what is this")["input_ids"]
print(sys.argv[1], type(tokenizer).__name__, ids, len(tokenizer.all_special_ids), "special tokens")
Path(sys.argv[1]).write_text(json.dumps([ids, len(tokenizer.all_special_ids)]))
PYTHON
PYTHONPATH="$folder/others" "$PYTHON" tried.py without
PYTHONPATH="$folder/mistral:$folder/others" "$PYTHON" tried.py with
"$PYTHON" - <<'PYTHON'
import json
from pathlib import Path

without, few = json.loads(Path("without").read_text())
given, many = json.loads(Path("with").read_text())
assert given == [1, *without], (given, without)
assert few == 0 < many, (few, many)
PYTHON
