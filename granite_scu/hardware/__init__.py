"""The machine: what it has, what of it a run is given, and how it is kept busy."""

import importlib
from typing import Any

_PUBLIC = {
    "detection": ("GIB", "MARGIN", "Device", "detect", "detect_all", "least_capable"),
    "peaks": ("Peak", "matmul_tflops", "peak_flops"),
    "machine": ("resolve_accelerator", "resolve_precision", "set_tf32"),
}
"""The public names by the module that each is in."""

__all__ = [name for names in _PUBLIC.values() for name in names]


def __getattr__(name: str) -> Any:
    """The public names, found when they are first asked for: torch takes seconds, and a preset is refused without."""
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
