"""``granite-scu merge``: base model and adapter as one model that plain transformers loads."""

import argparse
import os
from pathlib import Path

from granite_scu.cli.argument_parser import path
from granite_scu.cli.console import make_console, quiet
from granite_scu.model.adapter_files import require_adapter

EXAMPLES = (
    "runs/mine --out merged",
    "runs/mine/checkpoint-400 --out merged --overwrite",
    "adapter --model ibm-granite/granite-4.0-h-1b --out merged",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("run", metavar="RUN", type=path, help="run folder, its final/ or a checkpoint of it, or any "
                        "LoRA adapter")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="folder of the merged model")
    parser.add_argument("--model", metavar="NAME", help="base model (default: the one that the adapter names)")
    parser.add_argument("--dtype", choices=("base", "fp32"), default="base", help="of the merged weights: that of the "
                        "base's, as a rule 16 bits, or fp32, which loses nothing (default: %(default)s)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a merged model that is there")
    parser.add_argument("--no-check", dest="check", action="store_false", help="don't compare the merged model's bits "
                        "per token with the adapter's; for machines without memory for the model")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compare, "
                        "and to round to 4 bits (default: %(default)s)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    require_adapter(options.run, str(options.run))
    from granite_scu.export.merge import Merger  # late: torch takes seconds
    from granite_scu.model import base_digest, loading, saved_adapter

    console = make_console()
    quiet(console)
    adapter = saved_adapter.find(options.run)
    base, out = saved_adapter.base_of(adapter, options.model), Path(os.path.abspath(options.out))
    merger = Merger(adapter, base, out, options.dtype == "fp32", loading.device_named(options.device))
    base_digest.check(adapter.training, adapter.label, base.name, refuse=True)
    merger.check_out(options.overwrite)
    merger.merge(console, options.check)
    return 0
