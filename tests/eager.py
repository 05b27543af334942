"""The command line, as a process that keeps what it has merged after every shard and not every minute."""

import sys

_CODE = """import sys
from analysis_lib.measurement import stored
stored.SECONDS_AT_RISK = 0
from analysis_lib.__main__ import main
sys.exit(main())"""
EAGER = [sys.executable, "-c", _CODE]
