"""How many operations a batch sends to its device, beside a bare forward pass.

On a GPU, a small operation costs more than its arithmetic. The number is the same on any machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from operations import MODELS, counted, first_of

from analysis_lib.capture import joining
from analysis_lib.capture.source import as_source
from analysis_lib.measurement.shards import Summing
from analysis_lib.measurement.tables import Report

# At most so many times the operations of a bare pass, on a GPU.
MOST = {
    ("bert", "anisotropy"): 1.4,
    ("bert", "all"): 3.9,
    ("llama", "anisotropy"): 1.35,
    ("llama", "all"): 3.4,
}
# On a processor, sums by groups take two operations instead of one.
MOST_ON_PROCESSOR = MOST | {("bert", "anisotropy"): 1.5, ("bert", "all"): 4.3}


@pytest.fixture(scope="module")
def on_simulated_device() -> dict[str, dict]:
    script = Path(__file__).with_name("simulated_devices.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, *(f"operations:{name}" for name in MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "wanted"), MOST)
def test_a_batch_sends_few_operations_to_a_gpu(name, wanted, on_simulated_device):
    ratios = on_simulated_device[f"operations:{name}"]
    assert "error" not in ratios, ratios["error"]
    assert 1 < ratios[wanted] < MOST[name, wanted]


@pytest.mark.parametrize(("name", "wanted"), MOST_ON_PROCESSOR)
def test_a_batch_sends_few_operations(name, wanted, monkeypatch):
    # As many layers wait for one another as on a GPU.
    monkeypatch.setattr(joining, "MOST", joining.MOST_ON_GPU)
    model, batch, metrics = first_of(name, wanted)
    source, summing = as_source(model), Summing(metrics, Report())

    def measured() -> None:
        source.run(batch, summing.needs, summing.receive)
        summing.settle()

    measured()  # The pass is checked once, and the first batch makes room for the sums.
    bare = counted(lambda: model.model(**batch.inputs))
    assert bare < counted(measured) < MOST_ON_PROCESSOR[name, wanted] * bare
