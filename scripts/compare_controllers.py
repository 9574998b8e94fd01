#!/usr/bin/env python3
"""Compare the ways to set lambda, as research/README.md says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from research.comparison.command import main
except ModuleNotFoundError:
    print("error: this Python lacks the dependencies: . .venv/bin/activate, after make setup", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
