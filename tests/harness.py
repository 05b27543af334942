"""Fixtures that more than one test module uses, and what each process that runs tests does before
it reads them.
"""

import csv
import functools
import gc
import importlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import dask.config
import jaxtyping
import matplotlib.pyplot as plt
import pytest
import threadpoolctl
import torch
import typed
from conftest import MEASURED, ROOT, SHARED
from distributed import LocalCluster
from filelock import FileLock
from hypothesis import settings
from playwright.sync_api import Browser, Page, sync_playwright
from transformers import CanineTokenizer

# On a busy machine an example may take any time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Shapes and types in the annotations of the numerical modules are enforced while tests run. The
# accumulator has no shapes, and beartype reads its `Self` only in a decorated class.
KERNELS = [
    "models.loaded",
    "capture",
    *(f"metrics.{path.stem}" for path in ROOT.glob("analysis_lib/metrics/[!_]*.py")),
]
KERNELS.remove("metrics.accumulator")
# What they import is compiled anew below, as the hook has caches of its own: not so what is there
# before.
for module in ("scipy.stats", "transformers.modeling_utils"):
    importlib.import_module(module)
with (
    mock.patch.object(jaxtyping, "jaxtyped", typed.jaxtyped),
    jaxtyping.install_import_hook(
        [f"analysis_lib.{module}" for module in KERNELS], "typed.checked"
    ),
):
    for module in KERNELS:
        importlib.import_module(f"analysis_lib.{module}")

import copies  # noqa: E402
import tiny  # noqa: E402
from waiting import PATIENCE  # noqa: E402

from analysis_book.build import build_book  # noqa: E402
from analysis_lib import LoadedModel, load_corpus, load_model  # noqa: E402
from analysis_lib.capture import checked_pass  # noqa: E402
from analysis_lib.measurement import interventions, processes, shards, stored  # noqa: E402

# It has no annotations to check, and a pass in float64 calls it for each operation: the check was
# half the cost of one.
checked_pass._DoublePrecision.__torch_function__ = inspect.unwrap(
    checked_pass._DoublePrecision.__torch_function__
)

# Whenever one is loaded, it writes a table of a million characters out several times.
_characters = functools.cache(lambda count: {chr(place): place for place in range(count)})
CanineTokenizer.get_vocab = lambda self: _characters(self.vocab_size) | self.added_tokens_encoder

# Every test measures anew what it measures; those of the store name a folder of their own.
os.environ["ANALYSIS_LIB_MEASUREMENTS"] = ""

# Small models on shared cores: a second thread waits for the first more than it computes.
threadpoolctl.threadpool_limits(1)
torch.set_num_threads(1)


# A shell's background job ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # What is imported stays, and need not be looked through whenever garbage is collected.
    gc.freeze()


@pytest.fixture(autouse=True)
def no_open_figures() -> Iterator[None]:
    """The theme saves figures that are open when a script ends; tests leave none."""
    yield
    plt.close("all")


@pytest.fixture(scope="session")
def smoke_site() -> Path:
    """The folder of the book's site in the smoke profile, apart from the reader's site."""
    build = ROOT / "_build"
    build.mkdir(exist_ok=True)
    # Parallel test processes share one build: the second finds it up to date.
    with FileLock(build / ".smoke.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(MEASURED))
        return build_book("smoke", root=ROOT, out=build / "smoke").parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this repository."""
    source = tmp_path_factory.mktemp("source")
    # A copy, because setuptools builds beside the sources.
    leave = shutil.ignore_patterns("packages", "__pycache__")
    for name in ("analysis_lib", "data", "book"):
        shutil.copytree(ROOT / name, source / name, ignore=leave if name == "data" else None)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "_config.yml"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", source, source], check=True
    )
    (made,) = source.glob("*.whl")
    return made


@pytest.fixture
def yelphat(tmp_path) -> Path:
    """A folder laid out as that of YelpHat; its texts are ours."""
    folder = tmp_path / "corpora" / "yelphat"
    folder.mkdir(parents=True)
    for part in (1, 6, 7, 8):
        lines = [
            f'"{word} {part}, {n}",{label}'
            for n in range(3)
            for label, word in enumerate(("good", "bad"))
        ]
        (folder / f"yelphat_part{part}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return folder


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    """The bundled model, as everyone loads it."""
    return load_model("minilm")


@pytest.fixture(scope="session")
def minilm64() -> LoadedModel:
    """The bundled model in double precision."""
    return load_model("minilm", dtype="float64")


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Thirty sentences of STS-B dev where it is at hand, else of the bundled news articles."""
    path = SHARED / "stsb" / "stsb-en-dev.csv"
    if not path.is_file():
        return list(load_corpus("news", limit=30, seed=0).texts)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row["sentence1"] for row in csv.DictReader(file)]
    # Spread over the file: its genres lie in blocks.
    return rows[:: len(rows) // 30][:30]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives the folder of a tiny random model of an architecture of
    ``tiny.ARCHITECTURES``.
    """
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = tiny.save(tmp_path_factory.mktemp(name), name)
        return saved[name]

    return folder


@pytest.fixture
def copied_workers(monkeypatch) -> None:
    """Workers of the library start in a moment, each a copy of a process that has imported it."""
    copied = functools.partial(processes.ProcessPoolExecutor, context=copies.context())
    monkeypatch.setattr(processes, "ProcessPoolExecutor", copied)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers of Dask, which start as fast."""
    copies.context()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # For one module: while it is there, no other event loop can run in this process.
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop("no chromium on the path (apt-get install chromium)")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, who runs CI.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(accept_downloads=True) as context:
        context.set_default_timeout(200 * PATIENCE)
        yield context.new_page()


@pytest.fixture
def small_shards(monkeypatch) -> int:
    """So many texts make a shard, what is done is kept at once, and what an intervention needs is
    gathered anew.
    """
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 8)
    monkeypatch.setattr(stored, "SECONDS_AT_RISK", 0)
    monkeypatch.setattr(interventions, "_latest", {})
    return 8


@pytest.fixture
def measured_shards(monkeypatch) -> list[int]:
    """The indices of the shards that this process measures."""
    measured: list[int] = []
    original = shards.begin

    def recording(shard, *args):
        measured.append(shard.index)
        return original(shard, *args)

    monkeypatch.setattr(shards, "begin", recording)
    return measured
