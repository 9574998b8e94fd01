"""The code that a model is made and simulated by: what is kept of one is kept for that code alone."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "peft")


@cache
def versions() -> dict[str, str]:
    """The versions of the libraries, and a checksum of our own code of models and of their settings."""
    sources = sorted(file for folder in ("config", "model") for file in (PACKAGE / folder).rglob("*.py"))
    ours = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return {"granite_scu": ours} | {name: version(name) for name in LIBRARIES}
