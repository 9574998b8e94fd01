"""Fine-tune IBM Granite with LoRA while a feedback controller sets the regularisation strength.

A run from Python, on the embedded model. ``prepare`` refuses what cannot be done, ``train`` writes the run folder:

    >>> import pathlib, tempfile
    >>> from granite_scu import Request, prepare, train
    >>> from rich.console import Console
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = pathlib.Path(folder, "text.txt")
    ...     _ = text.write_text("".join(f"Line {number} of a text of your own.\\n" for number in range(300)))
    ...     request = Request.from_dotted({
    ...         "base.name": "tiny-granite-h", "data.path": str(text), "data.block_size": 32, "data.batch_size": 2,
    ...         "control.every": 2, "control.target_s": 0.02,
    ...         "run.output_dir": folder + "/run", "trainer.accelerator": "cpu", "trainer.max_steps": 4,
    ...         "trainer.limit_val_batches": 2, "trainer.accumulate_grad_batches": 1, "optimizer.warmup_steps": 1,
    ...     })
    ...     summary = train(prepare(request, Console(quiet=True)))
    >>> summary["steps"], summary["stopped"]["reason"]
    (4, 'max_steps')
"""

import importlib
import importlib.metadata
import logging
import os
from typing import Any

# Here, before any other import, because tokenizers and torch read them once, when they are imported themselves.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which the newer one would outdo
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# bitsandbytes warns at import that an optional hub kernel is absent; peft imports it even where it is not used.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__all__ = ["PreparedRun", "Request", "UserError", "__version__", "prepare", "train"]

_PUBLIC = {
    "PreparedRun": "granite_scu.training.prepared_run",
    "Request": "granite_scu.config.request",
    "UserError": "granite_scu.config.errors",
    "prepare": "granite_scu.training.recipe",
    "train": "granite_scu.training.recipe",
}


def __getattr__(name: str) -> Any:
    """The public names, found when they are first asked for: torch takes seconds to import, and a flag does not."""
    if name == "__version__":
        return importlib.metadata.version("granite-scu")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
