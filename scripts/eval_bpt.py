#!/usr/bin/env python3
"""Score a base model and adapters on the same held-out text: granite-scu eval."""

import sys

try:
    from granite_scu.cli.main import main
except ModuleNotFoundError:
    print("error: this Python lacks the dependencies: . .venv/bin/activate, after make setup", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
