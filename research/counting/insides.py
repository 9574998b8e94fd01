"""What the operators made of mamba-ssm's and fla-core's functions launch and move inside, counted without a GPU.

Their Python code runs on tensors of a CPU. Each Triton kernel that it would launch is noted and not run: a launch
moves every tensor that it is given once. That is a lower bound, as it is for PyTorch's own operators. Products inside
of kernels do not show; those of mamba-ssm's are counted by hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.no_extensions import without_cuda_extensions
from research.counting.operators import Cost, Count, bytes_of, total

PRODUCTS = {"mamba2_scan": (0, 2, 1, 1), "mamba2_scan_backward": (1, 5, 3, 3)}
"""Of mamba-ssm's kernels by operator: which argument x is, and how many products they take of a chunk's tokens with its
state, of its tokens with one another (each sees half of them), and of their B and C."""


class Insides:
    """The costs of operators, each found once for the shapes that it is called with."""

    def __init__(self) -> None:
        self.known: dict[Any, Cost] = {}

    def beyond(self, operator: Any, arguments: tuple[Any, ...]) -> Cost:
        """What a call takes beyond the one launch and the inputs and outputs that it is counted for from outside.

        Args:
            operator: of ``granite_scu.model.mamba2.packages``, as a node of a graph has it.
            arguments: of the call; of tensors shape, strides and dtype count.
        """
        key = (str(operator), *(_shape(a) if isinstance(a, Tensor) else a for a in arguments))
        if key not in self.known:
            with unset_fake_temporarily(), torch.no_grad():
                inputs = tree_map_only(Tensor, _on_cpu, arguments)
                self.known[key] = _cost(_function(operator), inputs) + Cost(flops=_product_flops(operator, inputs))
        return self.known[key]


def _cost(function: Any, inputs: tuple[Any, ...]) -> Cost:
    """Of all that a call of ``function`` launches, less the one launch that moves its inputs and outputs."""
    with _noting_launches() as noted, Count() as operators:
        result = function(*inputs)
    outside = [t for t in tree_iter((inputs, result)) if isinstance(t, Tensor)]
    launched = sum((Cost(1, sum(map(bytes_of, tensors))) for tensors in noted), Cost())
    return total(operators.found) + launched + Cost(1, sum(map(bytes_of, outside))) * -1


def _product_flops(operator: Any, inputs: tuple[Any, ...]) -> float:
    """Of the products in mamba-ssm's kernels; 0 of other operators."""
    name = operator._schema.name.partition("::")[2]
    if name not in PRODUCTS:
        return 0
    from granite_scu.model.mamba2.packages import CHUNK

    place, with_state, within, scores = PRODUCTS[name]
    x, _, _, b, *_ = inputs[place:]
    return x.numel() * (2 * b.shape[-1] * with_state + CHUNK * within) + 2 * CHUNK * b.numel() * scores


def is_known(operator: Any) -> bool:
    """Whether it is made of Triton kernels and so has insides to count; a CUDA kernel is one launch."""
    return str(operator).startswith(("granite_scu.mamba2_scan", "granite_scu.gated_linear", "granite_scu.fla_conv"))


def _function(operator: Any) -> Any:
    """The Python function of an operator of ``packages``. Raises ImportError where its package is not installed."""
    from granite_scu.model.mamba2 import packages

    if str(operator).startswith("granite_scu.mamba2_scan"):
        without_cuda_extensions()
    return getattr(packages, operator._schema.name.partition("::")[2])._init_fn


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype


def _on_cpu(tensor: Tensor) -> Tensor:
    """Zeros of its shape: numbers of documents, for one, are looked at."""
    shape, stride, dtype = _shape(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").zero_()


@contextmanager
def _noting_launches() -> Iterator[list[list[Tensor]]]:
    """The tensors of each kernel that would be launched, each tensor once."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    noted: list[list[Tensor]] = []

    def note(kernel: Any, *arguments: Any, **named: Any) -> None:
        given = [t for t in (*arguments, *named.values()) if isinstance(t, Tensor)]
        noted.append(list({t.data_ptr(): t for t in given}.values()))
        if isinstance(kernel, Autotuner):
            kernel.best_config = kernel.configs[0]  # read afterwards: a buffer has a row for each block

    with mock.patch.object(JITFunction, "run", note), mock.patch.object(Autotuner, "run", note):  # noqa: SIM117
        with mock.patch.object(Heuristics, "run", note):
            yield noted
