"""``python -m granite_scu``."""

from granite_scu.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
