"""What a result depends on besides its configuration: machine, versions and the source tree's commit."""

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("granite-scu", "torch", "transformers", "peft", "lightning", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def origin() -> dict[str, Any]:
    """Where a result is from, for its record: ``machine``, ``versions`` and ``git_revision``."""
    import torch  # late: who only wants the versions need not wait for it

    from granite_scu.hardware import detect

    machine = {"cpu": detect("cpu").name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"machine": machine, "versions": versions(), "git_revision": git_revision()}


@cache
def git_revision() -> str | None:
    """The commit of the source tree that runs, at the first call; with ``-dirty`` where the package differs from it.
    None outside a checkout.
    """
    here = str(Path(__file__).parent)
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "-C", here, "diff", "--quiet", "HEAD", "--", here], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("-dirty" if changed.returncode else "")
