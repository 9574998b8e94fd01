#!/usr/bin/env python3
"""Compare the ways to set lambda: granite-scu compare."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
