"""What a result depends on besides its configuration: versions and the source tree's commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("granite-scu", "torch", "transformers", "peft", "lightning", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def git_revision() -> str | None:
    """The commit of the source tree that runs, with ``-dirty`` where the package differs from it; None outside a
    checkout."""
    here = str(Path(__file__).parent)
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "-C", here, "diff", "--quiet", "HEAD", "--", here], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("-dirty" if changed.returncode else "")
