"""Triton's interpreter for the real kernels of a package, on tensors of a CPU: no GPU and no driver.

Imported before any of them, in a process that was started with TRITON_INTERPRET=1: Triton reads it as it decorates.

Nothing of the kernels is replaced: their source, Triton's semantics (types, promotion, masks, pointers), the packages'
autograd functions and their launches are what they are, and numpy takes the place of the compiler. So names, layouts,
mathematics, document boundaries and gradients are proved. What a compiler makes of them is not: TF32, shared memory,
races, a fault on one chip.
"""

import ast
import math

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


class NoDriver(DriverBase):
    """In the place of a GPU's driver, for autotuners: nothing is timed."""

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_current_target(self):
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda kernel_call, quantiles, **_: [0.0] * len(quantiles)


triton.runtime.driver.set_active(NoDriver())

_prune = Autotuner.prune_configs


def _widest(self, kwargs):
    """Of the configurations the one with the largest blocks: the fewest programs to interpret."""
    return [max(_prune(self, kwargs), key=lambda c: math.prod(v for v in c.kwargs.values() if type(v) is int))]


Autotuner.prune_configs = _widest


# A loop's counter is a tensor where it is compiled (``i_t.to(tl.int64)``); the interpreter leaves it a Python int.


def _visit_for(self, node):
    self.generic_visit(node)
    function = node.iter.func if isinstance(node.iter, ast.Call) else None
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
    if name == "range" and isinstance(node.target, ast.Name):
        counter = node.target.id
        node.body.insert(0, ast.parse(f"{counter} = interpreter_semantic.to_tensor({counter}, False)").body[0])
    return node


interpreter.ASTTransformer.visit_For = _visit_for


# bf16 lies in numpy as its bits. The interpreter computes with those bits, and truncates where a GPU rounds to nearest
# even (triton-lang/triton#11584).

_cast = interpreter.InterpreterBuilder.cast_impl
_dot = interpreter.InterpreterBuilder.create_dot
_binary = interpreter.InterpreterBuilder.binary_op


def _cast_impl(self, src, dst_type):
    if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(src.data, np.float32).view(np.uint32)
        with np.errstate(over="ignore"):
            rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(src.data)] = 0x7FC0
        return interpreter.TensorHandle(rounded, tl.bfloat16)
    return _cast(self, src, dst_type)


def _create_dot(self, a, b, d, *rest):
    a, b = (_cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
    return _dot(self, a, b, d, *rest)


def _binary_op(self, lhs, rhs, op):
    if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16:
        return _binary(self, lhs, rhs, op)
    found = op(*(_cast(self, t, tl.float32).data for t in (lhs, rhs)))
    if found.dtype == bool:
        return interpreter.TensorHandle(found, tl.int1)
    return _cast_impl(self, interpreter.TensorHandle(found, tl.float32), tl.bfloat16)


interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.binary_op = _binary_op
interpreter.InterpreterBuilder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)
