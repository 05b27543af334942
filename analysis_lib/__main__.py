# PYTHON_ARGCOMPLETE_OK
"""``python -m analysis_lib``, the same as ``analysis-lib``."""

import sys

from analysis_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
