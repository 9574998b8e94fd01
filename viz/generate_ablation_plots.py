"""The figures of runs: granite-scu plot."""

import sys

from granite_scu.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
