"""``validate`` and ``test``: bits per token of a split under the base model and under a run folder's final adapter."""

from functools import partial
from typing import TYPE_CHECKING

import peft
import torch

from granite_scu.errors import UserError
from granite_scu.evaluation.score import score
from granite_scu.model import loading
from granite_scu.model.loading import WEIGHT_DTYPES, announce_kernels
from granite_scu.model.loss import summed_nats

if TYPE_CHECKING:
    from granite_scu.training.recipe import Run


def score_split(run: "Run", split: str) -> dict:
    """Score the whole of a split.

    Args:
        run: whose folder holds the adapter.
        split: "validation" or "test".

    Raises:
        UserError: there is no adapter, or it does not fit the base model.
    """
    folder, request = run.folder.path, run.request
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"--run.output_dir {folder}: holds no adapter_model.safetensors; run fit first")
    run.machine.claim(request.run.memory_fraction)
    device, dtype = run.machine.torch_device, WEIGHT_DTYPES[run.machine.precision]
    base = loading.load_model(run.base(), dtype, run.machine.attention, device).to(device)
    # The adapter's own configuration counts, not the request's: rank and scale belong to the weights.
    try:
        model = peft.PeftModel.from_pretrained(base, folder)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--run.output_dir {folder}: its adapter does not fit {request.base.name}") from error
    announce_kernels(base)
    loader = {"validation": run.data.val_dataloader, "test": run.data.test_dataloader}[split]
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    adapter = score(partial(summed_nats, model.get_base_model()), loader(), model=model, context=autocast)
    with model.disable_adapter():
        base_score = score(partial(summed_nats, model.get_base_model()), loader(), model=model, context=autocast)
    return {
        "split": split,
        "tokens": adapter.tokens,
        "base_bpt": base_score.bits_per_token,
        "adapter_bpt": adapter.bits_per_token,
    }
