"""Results of the check of a captured pass, kept for later processes.

What a model is proven to do does not change with the texts that it reads. One proof therefore
serves every process that measures the same revision of a model, in the same precision, on the same
kind of device, with the same version of the library and of the packages that compute.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

import torch

from analysis_lib import store
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel

FILE = "proof.json"
# Length of the hash in the name of a proof's folder.
DIGITS = 16


def restore(loaded: LoadedModel) -> bool:
    """Whether the capture of a model is proven already; if so, with what could not be captured."""
    entry = _entry(loaded)
    proof = entry and entry.read(FILE, lambda path: json.loads(path.read_text("utf-8")))
    if not proof:
        return False
    loaded.unsupported |= proof["unsupported"]
    if proof["runs_without_head"]:
        loaded.outer = loaded.model
    return True


def keep(loaded: LoadedModel) -> None:
    """Keep the result of a check that succeeded, if it can be written."""
    proof = {
        "unsupported": loaded.unsupported,
        "runs_without_head": loaded.outer is loaded.model,
    }
    if entry := _entry(loaded):
        with suppress(AnalysisError):
            entry.write(FILE, json.dumps(proof, indent=1) + "\n")


def _entry(loaded: LoadedModel) -> store.Entry | None:
    """The folder of a model's proof; None if nothing is kept.

    A model that exists only in this process may carry hooks, which no key would tell.
    """
    home = store.measurements_directory()
    spec = loaded.spec
    if home is None or spec is None:
        return None
    known = [loaded.revision, spec.dtype, spec.processor, spec.device_map]
    known += [_kind_of(loaded.device), repr(loaded.layout), *store.computing_versions()]
    label = re.sub(r"[^\w.@=:+-]+", "_", f"{Path(spec.name).name}-proof")[-80:]
    return store.Entry(home / f"{label}-{store.key(*known)[:DIGITS]}")


def _kind_of(device: torch.device) -> str:
    """The kind of a device: the name of a GPU, or the kernels of a processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return device.type
