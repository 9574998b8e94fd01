#!/usr/bin/env python3
"""Publish the adapter of a finished run: granite-scu publish."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(["publish", *sys.argv[1:]]))
