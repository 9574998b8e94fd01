"""Fine-tune IBM Granite with LoRA; on request a feedback controller holds drift or the adapter's size.

A run from Python, on the embedded model. ``prepare`` takes the command's flags and refuses what cannot be done,
``train`` writes the run folder:

    >>> import pathlib, tempfile
    >>> from granite_scu import prepare, train
    >>> from rich.console import Console
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = pathlib.Path(folder, "text.txt")
    ...     _ = text.write_text("".join(f"Line {number} of a text of your own.\\n" for number in range(300)))
    ...     run = prepare(
    ...         console=Console(quiet=True), model="tiny-granite-h", data_dir=text, output_dir=f"{folder}/run",
    ...         accelerator="cpu", block_size=32, batch_size=2, gradient_accumulation_steps=1, max_steps=4,
    ...         warmup_steps=1, control_every=2, target_s=0.02, eval_iters=2, samples=0,
    ...     )
    ...     result = train(run)
    >>> result.steps, result.summary["stopped"]["reason"]
    (4, 'max_steps')
"""

import importlib
import importlib.metadata
import logging
import os
import warnings
from typing import Any

# Here, before any other import, because tokenizers and torch read them once, when they are imported themselves.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which the newer one would outdo
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# bitsandbytes warns at import that an optional hub kernel is absent; peft imports it even where it is not used.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# tqdm warns in a notebook without ipywidgets, which nothing here uses.
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = ["PreparedRun", "Request", "Result", "RunFailed", "UserError", "__version__", "prepare", "train"]

_PUBLIC = {
    "PreparedRun": "granite_scu.training.prepared_run",
    "Request": "granite_scu.config.request",
    "RunFailed": "granite_scu.config.errors",
    "UserError": "granite_scu.config.errors",
    "Result": "granite_scu.cli.from_python",
    "prepare": "granite_scu.cli.from_python",
    "train": "granite_scu.cli.from_python",
}


def __getattr__(name: str) -> Any:
    """The public names, found when they are first asked for: torch takes seconds to import, and a flag does not."""
    if name == "__version__":
        return importlib.metadata.version("granite-scu")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
