#!/usr/bin/env python3
"""Score a base model and adapters on the same held-out text: granite-scu eval."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
