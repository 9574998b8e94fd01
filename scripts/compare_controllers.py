#!/usr/bin/env python3
"""Compare the ways to set lambda: see --help, and docs/evidence.md for what came out."""

import sys
from pathlib import Path

try:
    from granite_scu.cli.compare_controllers import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(root=Path(__file__).resolve().parents[1]))
