"""``python -m research.tracking``."""

import sys

from granite_scu.cli import exit_codes
from research.tracking.command import main

if __name__ == "__main__":
    again = "with --results, the runs that are finished are kept and the same command goes on"
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, again))
