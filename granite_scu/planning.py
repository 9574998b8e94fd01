"""What a run will cost, said before it starts. Estimates, and marked as such."""

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from granite_scu import hardware
from granite_scu.model import adapters, loading
from granite_scu.module import DTYPES

if TYPE_CHECKING:
    from granite_scu.run import Run

UTILISATION = 0.3
"""Share of the measured matrix-product rate that a training step is assumed to reach."""


def describe(run: "Run") -> dict:
    """The plan of a run as readable facts: steps, tokens, first batch, memory and time estimates.

    Memory: frozen weights, adapters with gradient and two moments in fp32, and activations of a micro-batch
    (34 values a token, layer and hidden unit, as Korthikanti et al. 2022, arXiv 2205.05198, count for a
    transformer block without its attention matrix), and the logits of one chunk. Time: 4 FLOP a frozen
    weight and token (forward and the gradient of activations; frozen weights want none of their own).
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
    kept = 2 if request.base.gradient_checkpointing else 34
    activations = kept * tokens * config.num_hidden_layers * config.hidden_size * width
    logits = min(tokens, 2048) * config.vocab_size * 4 * 2
    return weights + trained * 16 + activations + logits
