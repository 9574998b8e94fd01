"""``python -m granite_scu``."""

from granite_scu.commands import entry_point

if __name__ == "__main__":
    entry_point()
