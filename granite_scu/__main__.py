"""``python -m granite_scu``."""

import sys

from granite_scu.config.own_python import lacks

try:
    from granite_scu.cli.main import entry_point
except ModuleNotFoundError as error:
    print(f"error: {lacks(error.name)}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    entry_point()
