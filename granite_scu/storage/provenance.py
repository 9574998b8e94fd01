"""What a result depends on besides its configuration: machine, versions and the source tree's commit."""

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("granite-scu", "torch", "transformers", "peft", "lightning", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


@cache
def git_revision() -> str | None:
    """The commit of the source tree that runs, at the first call; with ``-dirty`` where the package differs from it.
    None outside a checkout, also where the package is installed somewhere inside another repository.
    """
    here = str(Path(__file__).parents[1])
    try:
        _git(here, "ls-files", "--error-unmatch", str(Path(__file__)))
        return _git(here, "rev-parse", "HEAD") + ("-dirty" if _git(here, "status", "--porcelain", "--", here) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout.strip()
