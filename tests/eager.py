"""The command line, as a process that stops itself once it has kept the first shard, and goes on
when it is continued.

Whatever is done to it then is done half-way, however fast it is and however slow those who wait for
it.
"""

import os
import subprocess
import sys

from waiting import wait_until

_CODE = """import os, signal, sys
from analysis_lib.measurement import stored
stored.SECONDS_AT_RISK = 0
write = stored.write_sums

def write_and_stop(*given, **more):
    write(*given, **more)
    stored.write_sums = write
    os.kill(os.getpid(), signal.SIGSTOP)

stored.write_sums = write_and_stop
from analysis_lib.cli import main
sys.exit(main())"""
EAGER = [sys.executable, "-c", _CODE]


def wait_until_stopped(process: subprocess.Popen) -> None:
    """Wait until a process of ``EAGER`` has stopped."""
    seen = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    wait_until(lambda: os.waitid(os.P_PID, process.pid, seen), process)
