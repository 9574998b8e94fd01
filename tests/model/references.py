"""What the model's parts are tested against: the Mamba-2 recurrence, a token at a time, and small models."""

import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def granite():
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZES, **HEADS, logits_scaling=3.0))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def recurrence(x, dt, a, b, c, d, first=None):
    """H_t = exp(dt_t A) H_{t-1} + dt_t x_t B_t^T; y_t = H_t C_t + D x_t. ``first``: a document's first tokens."""
    batch, time, heads, head_dim = x.shape
    b, c = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
    state, outputs = x.new_zeros(batch, heads, head_dim, b.shape[-1]), []
    for t in range(time):
        step = dt[:, t, :, None, None]
        state = state if first is None else state.masked_fill(first[:, t, None, None, None], 0)
        state = (step * a[:, None, None]).exp() * state + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        outputs.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, 1)
