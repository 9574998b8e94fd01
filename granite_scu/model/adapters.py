"""LoRA adapters: where they go, and their factors as `information` wants them."""

import copy
import difflib
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.errors import UserError
from granite_scu.model.description_length import LowRankUpdate
from granite_scu.model.loading import load_model

ADAPTER = "default"


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer that an adapter can sit on, by its full name: all but the output head.

    4-bit layers count: bitsandbytes derives them from ``nn.Linear``.
    """
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def shapes(model: nn.Module, config: LoraConfig) -> list[tuple[int, int, int]]:
    """(out, in, rank) of each adapter that ``attach`` would make; target names are not checked."""
    rank = config.resolved().rank
    return [
        (layer.out_features, layer.in_features, rank)
        for name, layer in linear_layers(model).items()
        if config.targets is None or name.rsplit(".", 1)[-1] in config.targets
    ]


def attach(model: nn.Module, config: LoraConfig) -> peft.PeftModel:
    """Put an adapter on each targeted layer of a frozen model: B = 0, A drawn from torch's generator.

    Raises:
        UserError: a target name that no layer has.
    """
    available = sorted({name.rsplit(".", 1)[-1] for name in linear_layers(model)})
    targets = available if config.targets is None else config.targets
    for target in targets:
        if target not in available:
            close = difflib.get_close_matches(target, available, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"lora.targets {target}: no linear layer has that name; {hint}there are {', '.join(available)}"
            )
    lora = peft.LoraConfig(
        r=config.resolved().rank,
        lora_alpha=config.resolved().alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora, adapter_name=ADAPTER)


def load_adapted(
    base: BaseConfig, folder: Path, dtype: torch.dtype, device: torch.device, attention: str = "sdpa"
) -> peft.PeftModel:
    """The frozen model on the device with a saved adapter on it, to be scored or generated with.

    Raises:
        UserError: the model cannot be loaded, or the adapter does not fit it.
    """
    frozen = load_model(base, dtype, attention, device).to(device)
    # The adapter's own configuration counts, not the request's: rank and scale belong to the weights.
    try:
        return peft.PeftModel.from_pretrained(frozen, folder)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--run.output_dir {folder}: its adapter does not fit {base.name}") from error


def attach_saved(model: nn.Module, folder: Path, config: peft.LoraConfig, dropout: float) -> peft.PeftModel:
    """Put a saved adapter on a frozen model, to be trained on.

    Args:
        model: the base model; that the adapter fits it is known.
        folder: what PEFT has saved.
        config: the adapter's.
        dropout: probability of dropping an input of the adapter from now on.
    """
    config = copy.copy(config)
    config.lora_dropout = dropout
    return peft.PeftModel.from_pretrained(model, folder, ADAPTER, is_trainable=True, config=config)


def low_rank_updates(model: nn.Module) -> dict[str, LowRankUpdate]:
    """The factors of every adapted layer, by the layer's name in the base model; they share the model's storage."""
    updates = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            updates[name.removeprefix("base_model.model.")] = LowRankUpdate(a, b, module.scaling[ADAPTER])
    return updates


def leave_casting_to_autocast(model: nn.Module) -> None:
    """Let adapters take bf16 or fp16 inputs as they are, where every forward pass runs under autocast.

    PEFT would widen an input to the dtype of the factors, for autocast to narrow it again.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def untrained(updates: dict[str, LowRankUpdate]) -> list[str]:
    """Layers whose B has no gradient, or one that is zero everywhere: something bypasses them.

    B and not A, because A's gradient is zero as long as B is.
    """
    return [name for name, u in updates.items() if u.b.grad is None or not bool(u.b.grad.any())]
