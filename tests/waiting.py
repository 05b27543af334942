"""Waiting for what other processes do: for an event, and never by the clock, which a busy machine
makes run fast.
"""

import subprocess
import time
from collections.abc import Callable

# In seconds: after so long, something is wrong on any machine.
PATIENCE = 600


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Wait until a condition holds, as long as the process that is to bring it about lives."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.poll() is None, "what was waited for has ended"
        time.sleep(0.02)
