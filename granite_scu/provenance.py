"""What a result depends on besides its configuration: versions and the source tree's commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("granite-scu", "torch", "transformers", "peft", "lightning", "safetensors")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def git_revision() -> str | None:
    """The commit of the source tree that runs; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
