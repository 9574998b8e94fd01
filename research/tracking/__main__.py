"""``python -m research.tracking``."""

import sys

from granite_scu.cli import guard
from research.tracking.command import main

if __name__ == "__main__":
    again = "with --results, the runs that are finished are kept and the same command goes on"
    sys.exit(guard.guarded(main, "--debug" in sys.argv, again))
