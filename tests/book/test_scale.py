"""What the page on large corpora says of the sums that are merged."""

import re
from pathlib import Path

import pandas as pd
import pytest

from analysis_lib import load_corpus, load_model
from analysis_lib.capture import Settings
from analysis_lib.capture.source import as_source
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH
from analysis_lib.measurement.shards import UTTERANCES_PER_SHARD, make_shards, measure_shard
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import GROUPS

PAGE = Path(__file__).parents[2] / "book" / "using" / "scale.md"
COLUMNS = ["width", "heads", "key_heads", "head_width"]


@pytest.fixture(scope="module")
def megabytes():
    (code,) = re.findall(r"```python\n(def megabytes.*?)```", PAGE.read_text(), re.DOTALL)
    defined = {}
    exec(code, defined)
    return defined["megabytes"]


@pytest.mark.parametrize(
    ("name", "kinds", "rotates"), [("minilm", 4, False), ("smollm2-135m", 3, True)]
)
def test_the_formula_for_what_is_merged_is_that_of_the_sums(name, kinds, rotates, megabytes):
    """What it leaves out are counts. Layer 0 has hidden states alone."""
    source = as_source(load_model(name))
    shard, *_ = make_shards(source, load_corpus("news", limit=2), resolve("all"), Settings())
    sums, report = measure_shard(shard, source)
    held = sum(part.values[0].nbytes for by_key in sums.values() for part in by_key.values())
    layers = pd.DataFrame(report.layers)[COLUMNS].fillna(0)
    predicted = 1e6 * sum(megabytes(1, *sizes, rotates) for sizes in layers.to_numpy())
    # That a causal model has a type of key less.
    unseen = 8 * (4 - kinds) * (layers["heads"] * layers["width"]).sum()
    assert 0 < held - (predicted - unseen) < 0.02 * held


def test_the_numbers_of_the_page_are_those_of_its_formula(megabytes):
    page = PAGE.read_text()
    group = megabytes(32, 4096, 32, 32, 128)
    assert f"Llama-2-7B: {group:.0f} MB, {GROUPS * group / 1000:.1f} GB of all groups" in page
    branches = 1e9 / 400 / UTTERANCES_PER_SHARD / SHARDS_PER_BRANCH
    assert f"{(branches + GROUPS) * group / 1000:.0f} GB for the Llama" in page
    assert f"the {GROUPS} groups" in page
    assert f"{SHARDS_PER_BRANCH} shards" in page


def test_rates_and_hours_follow_from_what_was_measured():
    rows = re.findall(r"\| ([\d.]+) s \| ([\d,]+) \| ([\d.]+) hours \|", PAGE.read_text())
    assert len(rows) == 4
    for _, rate, hours in rows:
        assert float(hours) == round(1e9 / float(rate.replace(",", "")) / 3600, 1)
