"""``validate`` and ``test``: bits per token of a split under the base model and under a run folder's final adapter."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from granite_scu.config.settings import BaseConfig
from granite_scu.errors import UserError
from granite_scu.evaluation.score import score
from granite_scu.hardware.machine import Machine
from granite_scu.model.adapters import load_adapted
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels, autocast
from granite_scu.model.loss import summed_nats
from granite_scu.storage.run_folder import WEIGHTS


def score_split(folder: Path, base: BaseConfig, machine: Machine, loader: Iterable[dict], split: str) -> dict:
    """Score the whole of a split.

    Args:
        folder: of the run, with its adapter.
        base: the model.
        machine: what it is scored on.
        loader: batches of the split.
        split: its name.

    Raises:
        UserError: there is no adapter, or it does not fit the base model.
    """
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"--run.output_dir {folder}: holds no {WEIGHTS}; run fit first")
    device = machine.torch_device
    base = replace(base, kernels=machine.kernels)
    model = load_adapted(base, folder, WEIGHT_DTYPES[machine.precision], device, machine.attention)
    plain = model.get_base_model()
    announce_kernels(plain)
    context = autocast(device, machine.precision)
    adapter = score(partial(summed_nats, plain), loader, model=model, context=context)
    with model.disable_adapter():
        base_score = score(partial(summed_nats, plain), loader, model=model, context=context)
    return {
        "split": split,
        "tokens": adapter.tokens,
        "base_bpt": base_score.bits_per_token,
        "adapter_bpt": adapter.bits_per_token,
    }
