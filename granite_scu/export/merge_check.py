"""Whether a merged model is base and adapter still: both scored on the same held-out text."""

import gc
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import BaseConfig, DataConfig, from_record
from granite_scu.data.datamodule import TextDataModule
from granite_scu.evaluation.score import score_each
from granite_scu.model.adapters import load_adapted
from granite_scu.model.saved_adapter import SavedAdapter

BLOCKS, LENGTH = 8, 512
"""How much text the models are compared on, and the longest block of it, in tokens."""

TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 1e-2
"""Bits per token by which the merged model may differ; the other where weights are in 16 bits, whose rounding shows."""

_ROUNDED = (
    "; rounded to 16 bits, as the base is stored, weights lose some of a small update: --dtype fp32 keeps it in twice "
    "the space, and an unmerged adapter loses nothing"
)

Batch = dict[str, Tensor]


def compare(
    adapter: SavedAdapter, base: BaseConfig, tokenizer: PreTrainedTokenizerBase, merged: Path, device: torch.device
) -> dict[str, Any]:
    """Score base, base with adapter and merged model on a few held-out blocks, one model in memory at a time.

    The base is loaded as its training had it, in 4 bits of a QLoRA run; the merged model by transformers alone, its
    Mamba-2 layers in the library's own forward. All of them in the dtype that the merged model is stored in.

    Args:
        adapter: that was merged.
        base: that it was merged into.
        tokenizer: of both, with the chat template of the run.
        merged: folder of the merged model.
        device: where they are scored.

    Returns:
        ``text`` that was scored, in words, and its supervised ``tokens``; in bits per token ``base_bpt`` of the base
        alone, ``adapter_bpt`` of base and adapter, ``merged_bpt``, and ``difference``, merged minus adapter; ``dtype``
        of the weights and the arithmetic.

    Raises:
        RunFailed: the merged model differs by more than rounding does.
    """
    batches, text = _held_out(adapter.training.get("data", {}), tokenizer)
    dtype = _stored_dtype(merged)
    model, switches = load_adapted(base, {adapter.label: adapter.folder}, dtype, device)
    alone, with_adapter = score_each(model, batches, switches)
    del model, switches
    gc.collect()
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    (found,) = score_each(model.to(device), batches)
    difference = found.bits_per_token - with_adapter.bits_per_token
    is_rounded = dtype != torch.float32
    tolerance, remedy = (ROUNDED_TOLERANCE, _ROUNDED) if is_rounded else (TOLERANCE, "")
    if not abs(difference) <= tolerance:
        raise RunFailed(
            f"the merged model has {found.bits_per_token:.4f} bits per token on {text}, and base with adapter "
            f"{with_adapter.bits_per_token:.4f}: they differ by more than {tolerance:g}, so nothing was kept{remedy}"
        )
    return {
        "text": text,
        "tokens": found.tokens,
        "base_bpt": alone.bits_per_token,
        "adapter_bpt": with_adapter.bits_per_token,
        "merged_bpt": found.bits_per_token,
        "difference": difference,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _held_out(recorded: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Batch], str]:
    """Blocks of the run's validation text; of the embedded documentation where that cannot be had."""
    ours: dict[str, Any] = {"batch_size": 1, "eval_batch_size": 1, "num_workers": 0}
    # The library's own Mamba-2 forward cannot keep documents apart without compiled kernels; both sides see the same.
    ours |= {"isolate_documents": False, "block_size": min(recorded.get("block_size", LENGTH), LENGTH)}
    ours |= {"chat_template": None, "chat_template_args": None}  # the tokenizer has them
    text = "Python's documentation"
    if recorded:
        try:
            return _first_blocks(from_record(DataConfig, recorded, **ours), tokenizer), "the run's validation text"
        except UserError:
            text += ", for the run's text is not there"
    return _first_blocks(from_record(DataConfig, recorded, **ours, path="stdlib-docs"), tokenizer), text


def _first_blocks(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    data = TextDataModule(config, seed=0)
    data.prepare(tokenizer)
    return list(islice(data.val_dataloader(), BLOCKS))


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that a saved model's matrices have."""
    with safe_open(min(folder.glob("*.safetensors")), "pt") as tensors:
        return next(tensors.get_tensor(name).dtype for name in tensors.keys())  # noqa: SIM118 (no mapping)
