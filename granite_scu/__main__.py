"""``python -m granite_scu``."""

import sys

from granite_scu.cli import main

if __name__ == "__main__":
    sys.exit(main())
