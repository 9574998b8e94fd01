"""``python -m research.real``."""

import sys

from granite_scu.cli import exit_codes
from research.real.command import main

if __name__ == "__main__":  # a process of --jobs imports this module too
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv))
