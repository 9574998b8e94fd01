"""``validate`` and ``test``: bits per token of a split under the base model and under a run folder's adapter."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.evaluation.score import score_each
from granite_scu.hardware.machine import Machine
from granite_scu.model.adapters import load_adapted
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels, autocast
from granite_scu.storage.run_folder import WEIGHTS


def score_split(folder: Path, base: BaseConfig, machine: Machine, loader: Iterable[dict], split: str) -> dict:
    """Score all of a split.

    Args:
        folder: of the run, with its adapter.
        base: the model.
        machine: what it is scored on.
        loader: batches of the split.
        split: its name.

    Raises:
        UserError: there is no adapter, or it does not fit the base model.
    """
    label, device = f"--run.output_dir {folder}", machine.torch_device
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{label}: holds no {WEIGHTS}; run fit first")
    base = replace(base, kernels=machine.kernels)
    dtype = WEIGHT_DTYPES[machine.precision]
    model, switches = load_adapted(base, {label: folder}, dtype, device, machine.attention)
    announce_kernels(model)
    of_base, of_adapter = score_each(model, loader, switches, autocast(device, machine.precision))
    return {
        "split": split,
        "tokens": of_adapter.tokens,
        "base_bpt": of_base.bits_per_token,
        "adapter_bpt": of_adapter.bits_per_token,
    }
