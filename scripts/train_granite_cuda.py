#!/usr/bin/env python3
"""Fine-tune a Granite model: granite-scu train."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
