"""What a device asks for: how far along time work is cut up, to fit a CPU's cache, and who multiplies matrices."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_described: str | None = None  # no ContextVar: torch.compile breaks its graph at one


def pieces(count: int, size: int, device: torch.device) -> list[slice]:
    """Slices of 0 to ``count`` that are worked on one after the other: of ``size`` on a CPU, all at once elsewhere.

    A GPU pays more for each launch than it gains, and a compiler fuses what is whole.
    """
    if kind_of(device) != "cpu" or torch.compiler.is_compiling():
        size = count
    found = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    return found[:1] if _described else found


def put(whole: Tensor, at: slice, piece: Tensor) -> Tensor:
    """``whole`` with a piece of (batch, size, ...) put where it belongs, in the dtype of ``whole``.

    A piece that is all of it is not copied but taken for it, so that a compiler fuses it with what follows.
    """
    if piece.shape[1] == whole.shape[1]:
        # Not ``to`` where it does nothing: compiled by torch 2.11, a Function that returns that has gradients of zero.
        return piece if piece.dtype == whole.dtype else piece.to(whole.dtype)
    whole[:, at] = piece
    return whole


def product(left: Tensor, right: Tensor) -> Tensor:
    """(rows, inner) times (inner, columns), both of one dtype.

    MKL, which PyTorch takes for fp32, has no AVX512 for processors of AMD: oneDNN is twice as fast there.
    """
    if takes_onednn(left):
        return torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")  # it transposes the second
    return left @ right


def takes_onednn(left: Tensor) -> bool:
    """Whether a product with this matrix is oneDNN's, and so makes a tensor of its own."""
    ours = left.dtype == torch.float32 and kind_of(left.device) == "cpu" and not torch.compiler.is_compiling()
    return ours and _onednn_is_faster()


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether oneDNN's products in fp32 are faster than MKL's on this processor."""
    known = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 cannot tell
    has_op = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    is_amd = "AMD" in str(known.get("cpu_name"))
    return bool(has_op and is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512")


def kind_of(device: torch.device) -> str:
    """What kind of device work is for: the one that tensors without contents are described to be on, or theirs."""
    return _described or device.type


@contextmanager
def describing(device_type: str) -> Iterator[None]:
    """Work on tensors without contents as a device would: the first piece stands for all, which are alike."""
    global _described
    before, _described = _described, device_type
    try:
        yield
    finally:
        _described = before
