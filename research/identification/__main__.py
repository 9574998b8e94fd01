"""``python -m research.identification``."""

import sys

from research.identification.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
