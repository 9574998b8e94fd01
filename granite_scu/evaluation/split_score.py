"""``validate`` and ``test``: bits per token of a split under the base model and under a run folder's final adapter."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import peft
import torch

from granite_scu.config.settings import BaseConfig
from granite_scu.errors import UserError
from granite_scu.evaluation.score import score
from granite_scu.hardware.machine import Machine
from granite_scu.model import loading
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels
from granite_scu.model.loss import summed_nats


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
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"--run.output_dir {folder}: holds no adapter_model.safetensors; run fit first")
    device, dtype = machine.torch_device, WEIGHT_DTYPES[machine.precision]
    frozen = loading.load_model(replace(base, kernels=machine.kernels), dtype, machine.attention, device).to(device)
    # The adapter's own configuration counts, not the request's: rank and scale belong to the weights.
    try:
        model = peft.PeftModel.from_pretrained(frozen, folder)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--run.output_dir {folder}: its adapter does not fit {base.name}") from error
    announce_kernels(frozen)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    adapter = score(partial(summed_nats, model.get_base_model()), loader, model=model, context=autocast)
    with model.disable_adapter():
        base_score = score(partial(summed_nats, model.get_base_model()), loader, model=model, context=autocast)
    return {
        "split": split,
        "tokens": adapter.tokens,
        "base_bpt": base_score.bits_per_token,
        "adapter_bpt": adapter.bits_per_token,
    }
