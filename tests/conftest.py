"""What every process of the tests reads: where things lie, and in which order tests run."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
# Where the site in the smoke profile keeps what it measures.
MEASURED = ROOT / "_build" / "measurements"


def pytest_configure(config: pytest.Config) -> None:
    # One that only hands tests out to others imports nothing: they would begin ten seconds later.
    if config.getoption("dist") == "no":
        config.pluginmanager.import_plugin("harness")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pages of the site come first, as nothing takes longer; what else needs it comes late,
    lest it wait for them.

    Modules of a few tests are last, so that all processes end at once.
    """
    tests = Counter(item.path for item in items)
    of_site = Counter(item.path for item in items if "smoke_site" in item.fixturenames)

    def place(item: pytest.Item) -> tuple:
        share, few = of_site[item.path] / tests[item.path], tests[item.path] < 30
        when = 0 if share > 0.5 else 2 if share else 3 if few else 1
        return when, -tests[item.path], item.path, "smoke_site" in item.fixturenames

    items.sort(key=place)
