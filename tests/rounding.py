"""How far apart two computations of the same may end, on any processor: counted in roundings.

A rounding changes a number by at most its type's unit roundoff, half of ``eps``. Processors differ in how many numbers
they add side by side, and in whether a product is rounded before it is added: a sum of n terms differs between two of
them, or between two orders, by at most n roundings of the largest sizes, and commonly by the root of n. A test that
compares two ways counts the terms of the sums that follow one another and allows that many; a fault changes more.

Python's floats have 53 bits. Where they alone are compared, pytest's 1e-6 is 1e10 roundings and needs no count.
"""

import math
from collections.abc import Mapping

import torch

OF_SMALL = 2 * (24 + 8 + 48 + 24 + 32) + 24
"""Terms of the sums that follow one another in the small Granite: in each layer into the mixer, its state, out of it,
into the layer's own product and out of it; at last the head."""
OF_EMBEDDED = 6 * (192 + 64 + 384 + 192 + 384) + 192
"""The same of the embedded model."""
OF_GRANITE = 4 * (16 + 40 + 16 + 16 + 24) + 16
"""The same of the largest model in ``references``, which has attention to 40 tokens."""


def rounding(n: float, dtype: torch.dtype = torch.float32) -> float:
    """What ``n`` roundings of a type amount to if all go the same way, relative to what is rounded."""
    return n * torch.finfo(dtype).eps / 2


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, n: float, dtype: torch.dtype = torch.float32) -> None:
    """They differ by at most ``n`` roundings of the largest number, near 0 too, where terms have cancelled."""
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(n, dtype) * float(expected.abs().max()))


def turned(steps: int, n: int) -> float:
    """Share of the numbers that Adam may move elsewhere in ``steps``, their gradients being right to ``n`` roundings.

    Adam divides a gradient by its own size: where that is what rounding made of 0, its sign is chance. A gradient's
    error is commonly the root of n roundings of the largest, here taken tenfold; the largest is about five deviations,
    so that 2 * 5 / sqrt(2 pi) = 4 times that share of normally distributed numbers is smaller.
    """
    return 4 * steps * 10 * rounding(math.sqrt(n))


def assert_moved_alike(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor], steps: int, n: int) -> None:
    """Two adapters are of the same ``steps`` of Adam, but for numbers whose gradient was 0 up to rounding.

    Of B, which starts at 0. Such a number moves by at most as much as another, but the other way: by twice that.
    """
    assert one.keys() == two.keys()
    ends = [torch.cat([of[name].flatten() for name in sorted(of) if ".lora_B." in name]).float() for of in (one, two)]
    assert ends[0].norm() > 0
    assert (ends[0] - ends[1]).norm() <= 2 * math.sqrt(turned(steps, n)) * ends[0].norm()
