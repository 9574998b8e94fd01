"""Operations that training a LoRA adapter takes, counted from the model's shapes: what MFU is measured by."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from granite_scu.config.settings import LoraConfig
from granite_scu.model import adapters, experts, loading
from granite_scu.storage.kept import code_versions, kept

RECURRENT = ("linear_attention", "mamba", "mamba2")
"""What configurations call layers that are no attention."""


@dataclass(frozen=True)
class Size:
    """What a model with its adapters has, and does for a token.

    Attributes:
        frozen: parameters of the base model.
        adapted: (out, in, rank) of each adapted matrix.
        trained: parameters of the adapters.
        flops_per_token: multiplications and additions of a training step for each token of a block.
        adaptable: linear layers that the model has.
    """

    frozen: int
    adapted: list[tuple[int, int, int]]
    trained: int
    flops_per_token: float
    adaptable: int = 0

    def in_blocks(self, name: str, before: int, now: int) -> "Size":
        """The size where attention spans other blocks: of ``now`` tokens, and not of ``before``; ``name`` as below."""
        config = loading.known_config(name)
        more = mixing_products(config, now) - mixing_products(config, before)
        return replace(self, flops_per_token=self.flops_per_token + flops_per_token(0, 0, more))


def measure(
    name: str, lora: LoraConfig, block_size: int, adapted: Sequence[tuple[int, int, int]] | None = None
) -> Size:
    """The size of a model that is described, not loaded.

    Args:
        name: as ``--model``.
        lora: the adapters.
        block_size: tokens that attention spans.
        adapted: (out, in, rank) of each adapted matrix, where the adapters are there already.
    """
    config = loading.known_config(name)
    key = [code_versions(), config.to_json_string(), loading.local_weights(name, config), repr(lora), block_size]
    shapes = None if adapted is None else [list(matrix) for matrix in adapted]

    def read(found: dict[str, Any]) -> Size:
        return Size(**found | {"adapted": [tuple(matrix) for matrix in found["adapted"]]})

    return kept("sizes.json", [*key, shapes], lambda: asdict(_count(name, lora, block_size, adapted)), read)


def _count(name: str, lora: LoraConfig, block_size: int, adapted: Sequence[tuple[int, int, int]] | None) -> Size:
    model = loading.meta_model(name)
    config = model.config
    shapes = adapters.shapes(model, lora) if adapted is None else list(adapted)
    trained = _weights(shapes)
    of_experts = _weights(adapters.expert_shapes(model, lora.resolved().rank)) if lora.experts else 0
    met = trained - round((1 - _share_of_experts(config)) * of_experts)
    flops = flops_per_token(weights_in_products(model), met, mixing_products(config, block_size))
    return Size(sum(p.numel() for p in model.parameters()), shapes, trained, flops, len(adapters.linear_layers(model)))


def _weights(adapted: Sequence[tuple[int, int, int]]) -> int:
    return sum(rank * (out + inner) for out, inner, rank in adapted)


def _share_of_experts(config: PretrainedConfig) -> float:
    """Of a layer's experts, the share that a token is sent to; 0 without experts."""
    count = experts.number(config)
    return getattr(config, "num_experts_per_tok", 0) / count if count else 0.0


def flops_per_token(frozen_weights: int, adapter_weights: int, mixing: float) -> float:
    """Operations of a LoRA training step for a token: 4 P + 6 A + 6 M.

    A weight in a matrix product takes 2 operations (multiply, add) a token in the forward pass. Backward, 2 more give
    the gradient of the layer's input and 2 the gradient of the weight (Kaplan et al. 2020, arXiv 2001.08361, section
    2.1: 6 N in all). A frozen weight wants no gradient of its own, but the gradient of its input must pass through it
    to the adapters below: 4. An adapter's weights take all 6. Products between activations have two inputs and no
    weight: 2 forward, 4 backward.

    What an implementation does twice is not counted, such as the forward pass under gradient checkpointing: a share of
    the peak that counts it would grow by doing more for the same result (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B, which defines MFU so). The embedding is a lookup; norms and activations are a thousandth.

    Args:
        frozen_weights: P, weights of the base in products, as ``weights_in_products`` counts.
        adapter_weights: A, of all adapters that a token meets.
        mixing: M, products between activations for a token, as ``mixing_products`` counts.

    >>> flops_per_token(100, 10, 5)
    490
    """
    return 4 * frozen_weights + 6 * adapter_weights + 6 * mixing


def weights_in_products(model: nn.Module) -> int:
    """Weights that a token meets: of linear layers, convolutions and the head, and of the experts it is sent to."""
    config = model.config
    count_of_experts = experts.number(config)
    share = _share_of_experts(config)
    head = model.get_output_embeddings()
    count = head.weight.numel()  # a product also where it shares the embedding's weights
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d) and module is not head:
            count += module.weight.numel()
        elif count_of_experts:  # all experts of a layer lie in one parameter, the first dimension counts them
            together = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count_of_experts]
            count += round(share * sum(p.numel() for p in together))
    return count


def mixing_products(config: PretrainedConfig, block_size: int) -> float:
    """Pairs of activations that are multiplied for a token, where tokens meet: attention and the Mamba-2 scan.

    Attention: a token meets half of the block on average, or no more than its window, in the scores and again in the
    sum of values. Scan: the recurrence h = a h + (dt x) Bᵀ, y = h C has two products with the state, heads x head
    dimension x state size each; what a chunked algorithm multiplies besides is its own affair.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    mamba = sum(kind in RECURRENT for kind in kinds)
    window = min(getattr(config, "sliding_window", None) or block_size, block_size)
    heads = getattr(config, "num_attention_heads", 0)  # none of models that are recurrent alone
    met = {"sliding_attention": window - window**2 / (2 * block_size)}  # the first tokens of a block have less behind
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    spans = sum(met.get(kind, block_size / 2) for kind in kinds if kind not in RECURRENT)
    attention = 2 * heads * width
    state = [getattr(config, f"mamba_{name}", 0) for name in ("n_heads", "d_head", "d_state")]
    scan = 2 * math.prod(state)
    return spans * attention + mamba * scan
