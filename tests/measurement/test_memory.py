"""Memory that was freed is kept for what comes next."""

import platform
import resource
import subprocess
import sys

import pytest

from analysis_lib import load_corpus, load_model, measure
from analysis_lib.measurement.memory import release_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other habits")

# A thread whose first heap is nearly full takes a block that begins another, writes into it and frees it, many times.
THREAD = """
import ctypes, resource, threading
from analysis_lib.measurement.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def written(megabytes):
    block = libc.malloc(megabytes * 2**20)
    return ctypes.memset(block, 1, megabytes * 2**20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    libc.free(written(31))
    full = [written(4) for _ in range(15)]
    before = faults()
    for _ in range(100):
        libc.free(written(6))
    print(faults() - before)

{before}
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def faults_of_a_thread(before: str) -> int:
    command = [sys.executable, "-c", THREAD.replace("{before}", before)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_thread_keeps_the_heap_that_it_will_need_again():
    assert faults_of_a_thread("keep_freed_memory()") * 10 < faults_of_a_thread("")


def test_a_measurement_finds_the_memory_of_the_one_before():
    model, corpus = load_model("minilm"), load_corpus("wikipedia", limit=200)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        measure(model, corpus, progress=False)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    kept = faults()
    release_freed_memory()
    assert kept * 2 < faults()
