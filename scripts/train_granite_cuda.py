#!/usr/bin/env python3
"""Fine-tune a Granite model while a controller holds S at its target; see --help."""

import sys
from pathlib import Path

try:
    from granite_scu.cli.script_flags import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(test_run_config=Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"))
