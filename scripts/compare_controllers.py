#!/usr/bin/env python3
"""Compare the ways to set lambda: granite-scu compare."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    print("error: this Python lacks the dependencies: . .venv/bin/activate, after make setup", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
