#!/usr/bin/env python3
"""Publish the adapter of a finished run on the Hugging Face hub; see --help, and docs/publishing.md."""

import sys

try:
    from granite_scu.cli.push_to_hf import main
except ModuleNotFoundError:
    sys.exit("error: granite_scu is not installed for this Python; run `make setup`, then use .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main())
