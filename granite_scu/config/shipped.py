"""The configuration files that come with granite-scu: presets of ``--hardware``, examples, the test run's."""

import re
from pathlib import Path


def folder() -> Path:
    """Where they are: inside an installed package, or ``configs`` of a checkout (see ``setup.py``)."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find(name: str) -> str:
    """The file that ``--config`` names: itself where it exists, or else the one of that name that comes along.

    Args:
        name: a path, or such a name as ``qlora``, ``demo.yaml`` or ``configs/demo.yaml``.
    """
    found = re.fullmatch(r"(?:configs/)?((?:\w+/)?[\w.-]+?)(?:\.yaml)?", name)
    known = folder() / f"{found[1]}.yaml" if found else None
    return str(known) if known and known.is_file() and not Path(name).is_file() else name


TEST_RUN = folder() / "tiny.yaml"
"""Its values are the defaults under ``--test-run``."""
