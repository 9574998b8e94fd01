import sys

from granite_scu.cli import exit_codes
from research.real.command import main

sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv))
