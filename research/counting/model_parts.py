"""The parts of the model that the work of a step is counted by, told from the code that does it."""

import re
import sys

from torch import Tensor, fx

FILES = {
    "mamba2/ssd.py": "scan",
    "mamba2/conv.py": "convolution",
    "mamba2/norm.py": "gated norm",
    "model/loss.py": "loss",
    "model/attention.py": "masks",
    "model/adapters.py": "LoRA",
    "tuners/lora/layer.py": "LoRA",
}
CLASSES = {
    "GraniteMoeHybridRMSNorm": "RMS norm",
    "GraniteMoeHybridRMSNormGated": "gated norm",
    "GraniteMoeHybridMLP": "SwiGLU",
    "GraniteMoeHybridAttention": "attention",
    "GraniteMoeHybridDecoderLayer": "residual",
    "GraniteMoeHybridMambaLayer": "Mamba-2, else",
    "GraniteMoeHybridModel": "residual",
}
FUNCTIONS = {
    "mix": "Mamba-2, else",
    "mamba2_chunk_scan": "scan",
    "causal_conv1d_fn": "convolution",
    "_mamba_scan": "scan",
    "_fla_scan": "scan",
    "_dao_convolve": "convolution",
    "_fla_convolve": "convolution",
    "ForCausalLMLoss": "loss",
    "fixed_cross_entropy": "loss",
}

NARROW = 16
"""The rank of the adapters that are counted."""


def part_of_stack() -> str | None:
    """The part of the model whose code runs now, by the innermost frame that tells."""
    frame = sys._getframe(1)
    while frame is not None:
        if part := part_of_code(frame.f_code.co_filename, frame.f_code.co_name):
            return part
        owner = type(frame.f_locals.get("self")).__name__
        if owner in CLASSES:
            return CLASSES[owner]
        frame = frame.f_back
    return None


def part_of_code(file: str, function: str) -> str | None:
    """The part of the model that a file or a function is; None where neither tells."""
    return next((part for ending, part in FILES.items() if file.endswith(ending)), FUNCTIONS.get(function))


def part_of_product(inputs: list[Tensor]) -> str:
    """The part that a product of a linear layer is: a narrow side is an adapter's."""
    is_narrow = min(min(t.shape[-2:]) for t in inputs if t.dim() >= 2) <= NARROW
    return "LoRA" if is_narrow else "base products"


def part_of_node(node: fx.Node) -> str:
    """The part of the model whose code made a node: by the lines that led to it, else by its innermost module."""
    frames = re.findall(r'File "(.*?)", line \d+, in (\w+)', node.meta.get("stack_trace") or "")
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    classes = [str(owner).rpartition(".")[2].rstrip("'>") for _, owner in modules.values()]
    of_code = (part_of_code(*frame) for frame in reversed(frames))
    of_class = (CLASSES.get(owner) for owner in reversed(classes))
    part = next(filter(None, (*of_code, *of_class)), "else")
    is_linear = is_product(node) and node.target._opname != "bmm" and part != "loss"
    return part_of_product(sides(node)) if is_linear else part


def is_product(node: fx.Node) -> bool:
    """Whether it multiplies matrices."""
    return node.op == "call_function" and getattr(node.target, "_opname", "") in ("mm", "bmm", "addmm")


def sides(product: fx.Node) -> list[Tensor]:
    """The two matrices that are multiplied."""
    return [a.meta["val"] for a in product.args if isinstance(a, fx.Node) and a.meta["val"].dim() >= 2][-2:]
