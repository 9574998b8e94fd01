"""What a training step moves through a GPU's memory and how many kernels it launches, counted on fake tensors.

Every operator of PyTorch that is no view is one launch, and moves its inputs and outputs once. Some are more than one
kernel, and some read an input more than once, so that the count is a lower bound.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from granite_scu.config.settings import BaseConfig, LoraConfig, Recomputed
from granite_scu.model import adapters, loss, memory
from granite_scu.model.mamba2 import mamba
from granite_scu.model.mamba2.tiling import describing
from research.counting.model_parts import part_of_product, part_of_stack

FREE = ("empty", "new_empty", "empty_like", "detach", "lift_fresh", "new_empty_strided", "empty_strided", "alias")
FREE += ("_unsafe_view", "_local_scalar_dense", "set_")
"""Operators that touch no memory."""

WRITES = ("copy_", "fill_", "zero_", "zeros", "ones", "new_zeros", "zeros_like", "full", "arange", "new_ones")
WRITES += ("scalar_tensor", "full_like", "ones_like")
"""Operators that do not read what they write to."""


@dataclass
class Cost:
    """What a part takes: kernel launches, bytes moved, and operations of matrix products."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.launches * times, self.bytes * times, self.flops * times)


@dataclass
class Count(TorchDispatchMode):
    """Counts what runs under it, by part and pass.

    Attributes:
        found: costs by (part, "forward" or "backward").
        phase: which of the two it is now.
    """

    found: dict[tuple[str, str], Cost] = field(default_factory=dict)
    phase: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()
        self.current: str | None = None

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name.partition("::")[2]
        outputs = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        if operator.is_view or name in FREE or name.startswith("sym_") or not outputs:
            return result
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        part = part_of_stack() or (self.current if self.phase == "backward" else None) or "else"
        flops = _flops(name, inputs)
        if name in ("mm", "addmm") and part != "loss":
            part = part_of_product(inputs)
        cost = Cost(1, _moved(name, inputs, outputs, kwargs), flops)
        key = (part, self.phase)
        self.found[key] = self.found.get(key, Cost()) + cost
        return result


def _flops(name: str, inputs: list[Tensor]) -> int:
    if name not in ("mm", "bmm", "addmm"):
        return 0
    left, right = [t for t in inputs if t.dim() >= 2][-2:] if name == "addmm" else inputs[:2]
    return 2 * left.numel() * right.shape[-1]


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor], kwargs: dict[str, Any]) -> int:
    """Bytes that an operator reads and writes."""
    written = sum(map(bytes_of, outputs))
    if name in ("gather", "index", "embedding"):
        return 3 * written  # what it looks up, the indices at most, and the result
    if name == "scatter_add_":
        return 4 * bytes_of(inputs[1])
    if name == "copy_":
        return written + bytes_of(inputs[1])
    if name in WRITES:
        return written
    overwritten = written if "out" in kwargs else 0
    return written + sum(bytes_of(t) for t in {id(t): t for t in inputs}.values()) - overwritten


def bytes_of(tensor: Tensor) -> int:
    """That a tensor has in memory: a dimension that is expanded is there once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


class Tagged(TorchFunctionMode):
    """Has each node of the backward pass say which part of the forward pass made it."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            node = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and "part" not in node.metadata and (part := part_of_stack()):
                node.metadata["part"] = part
                node.register_prehook(lambda _, part=part: setattr(self.count, "current", part))
        return result


@dataclass(frozen=True)
class Step:
    """The training step that is counted: a micro-batch, forward and backward, LoRA on every linear layer.

    Attributes:
        config: of the model.
        batch: blocks.
        block: tokens in each.
        gradient_checkpointing: whether activations are recomputed, or ``selective``.
        dtype: of weights and products.
        kernels: of the Mamba-2 layers, ours or a package's. ``insides`` counts what an operator does inside.
    """

    config: PretrainedConfig
    batch: int = 8
    block: int = 1024
    gradient_checkpointing: Recomputed = False
    dtype: torch.dtype = torch.bfloat16
    kernels: mamba.Kernels = mamba.TORCH


@contextmanager
def adapted(step: Step, ours: bool = True) -> Iterator[tuple[nn.Module, Tensor]]:
    """The adapted model on fake tensors, as it is on a GPU, and a batch of tokens; ours, or the library's with PEFT."""
    config = copy.deepcopy(step.config)
    base = BaseConfig(gradient_checkpointing=step.gradient_checkpointing)
    setting = memory.Setting(base, LoraConfig(), step.dtype, step.batch, step.block)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=step.dtype, attn_implementation="sdpa")
        model = memory.as_trained(model, setting) if ours else _library(model, base)
    with FakeTensorMode(allow_non_fake_inputs=True), describing("cuda"):
        model = model.to_empty(device="cpu")
        if step.kernels is not mamba.TORCH:
            mamba.install(model, step.kernels, is_gated=lambda norm: True)
        model.get_base_model().tie_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        yield model, torch.zeros(step.batch, step.block, dtype=torch.long)


def _library(model: nn.Module, base: BaseConfig) -> nn.Module:
    """As Hugging Face's Trainer and PEFT have it."""
    model.requires_grad_(False)
    if base.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = adapters.attach(model, LoraConfig()).train()
    for module in found.modules():
        if hasattr(module, "lora_variant"):
            module.lora_variant.clear()
    return found


def count(step: Step, ours: bool = True) -> dict[tuple[str, str], Cost]:
    """The costs of a step that nothing compiles, by (part, pass)."""
    counted = Count()
    with adapted(step, ours) as (model, ids):
        autocast = torch.autocast("cpu", step.dtype, enabled=step.dtype != torch.float32, cache_enabled=False)
        with counted, Tagged(counted), autocast:
            if ours:
                nats = loss.summed_nats(model.get_base_model(), ids, ids, ids, loss.chunk_on("cuda"))
            else:
                nats = model(input_ids=ids, labels=ids).loss
        counted.phase = "backward"
        with counted:
            nats.backward()
    return counted.found


def merged(*counts: dict[tuple[str, str], Cost]) -> dict[tuple[str, str], Cost]:
    """The sums of several counts, by (part, pass)."""
    return {key: sum((found[key] for found in counts if key in found), Cost()) for found in counts for key in found}


def total(found: dict[Any, Cost]) -> Cost:
    """All of it together."""
    return sum(found.values(), Cost())


def parts(found: dict[tuple[str, str], Cost]) -> list[str]:
    """The parts, those that move most first."""
    moved: Counter[str] = Counter()
    for (part, _), cost in found.items():
        moved[part] += int(cost.bytes)
    return [part for part, _ in moved.most_common()]
