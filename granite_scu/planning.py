"""What a run will cost, said before it starts. Estimates, and marked as such."""

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from granite_scu import hardware
from granite_scu.model import adapters, loading, loss
from granite_scu.module import DTYPES

if TYPE_CHECKING:
    from granite_scu.run import Run

UTILISATION = 0.3
"""Share of the measured matrix-product rate that a training step is assumed to reach."""

KEPT = 34
"""Values a token and hidden unit that a layer keeps for the backward pass: Korthikanti et al. 2022, arXiv 2205.05198,
for a transformer block without its attention matrix."""

KEPT_MAMBA = 70
"""The same for a Mamba layer with its adapters: 219 MB were kept by one of Granite-4.0-H-1B at 1 x 1024 tokens under
bf16 autocast, counted with ``torch.autograd.graph.saved_tensors_hooks``."""


def describe(run: "Run") -> dict:
    """The plan of a run as readable facts: steps, tokens, first batch, memory and time estimates.

    Memory: frozen weights, adapters with gradient and two moments in fp32, the activations that a micro-batch
    keeps (``KEPT`` and ``KEPT_MAMBA`` say where the numbers come from), and the logits of one chunk, in bf16 and
    twice in fp32: the scaled ones and their gradient. Time: 4 FLOP a frozen weight and token (forward and the
    gradient of activations; frozen weights want none of their own).
    """
    request, plan, machine = run.request, run.plan, run.machine
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loading.load_model_config(request.base.name))
    frozen = sum(p.numel() for p in model.parameters())
    layers = adapters.linear_layers(model)
    wanted = request.lora.targets
    adapted = [m for n, m in layers.items() if wanted is None or n.rsplit(".", 1)[-1] in wanted]
    trained = request.lora.rank * sum(m.in_features + m.out_features for m in adapted)
    dtype = DTYPES[machine.precision]
    batch = next(iter(run.data.train_dataloader()))
    rate = hardware.matmul_tflops(machine.device, dtype) * 1e12 * UTILISATION
    seconds = plan.steps * plan.tokens_per_step / machine.world_size * 4 * frozen / rate
    return {
        "model": request.base.name,
        "parameters": f"{frozen:,} frozen, {trained:,} trained in {len(adapted)} adapters",
        "data": run.data.summary(),
        "first_batch": f"{tuple(batch['input_ids'].shape)} tokens, {int((batch['labels'] != -100).sum()):,} supervised",
        "device": machine.device.name,
        "precision": machine.precision,
        "processes": machine.world_size,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "tokens": plan.steps * plan.tokens_per_step,
        "n_tokens": plan.n_tokens,
        "controller": request.control.controller,
        "target_s": request.control.target_s,
        "memory_gb_estimate": round(_memory_bytes(model.config, request, frozen, trained, dtype) / 1e9, 2),
        "time_s_estimate": round(seconds),
        "output_dir": str(run.folder.path),
    }


def _memory_bytes(config, request, frozen: int, trained: int, dtype: torch.dtype) -> float:
    width = torch.finfo(dtype).bits // 8
    weights = frozen * (0.55 if request.base.quantize_4bit else width)
    tokens = request.data.batch_size * request.data.block_size
    kept = 2 * config.num_hidden_layers if request.base.gradient_checkpointing else _kept(config)
    activations = kept * tokens * config.hidden_size * width
    logits = min(tokens, loss.CHUNK) * config.vocab_size * (2 + 4 + 4)
    return weights + trained * 16 + activations + logits


def _kept(config) -> int:
    """Values a token and hidden unit that all layers keep for the backward pass."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(KEPT_MAMBA if kind == "linear_attention" else KEPT for kind in types)
