r"""How far an adapter can move in a number of steps, before anything is trained.

Adam moves an entry by about the learning rate in a step, whatever the gradient's size. So after steps whose
learning rates add up to L, an entry of B, which starts at 0, is at most about L, and |B_i|_F <= L sqrt(out_i r). PEFT
draws the entries of A with variance 1 / (3 in): its rows are nearly orthogonal and of squared length 1/3, so
|B A|_F^2 is close to |B|_F^2 / 3 whatever the direction of B. Together

    |Delta W_i|^2 <= s_i^2 L^2 out_i r / 3        ParamBPT <= G L^2,   G = sum_i s_i^2 out_i r / (6 sigma^2 N ln 2)

which supposes that every gradient keeps its sign. It is an estimate of a ceiling and no theorem: Adam can exceed the
rate for a step or two, and A's own growth is left out. Measured on the embedded model (rank 16, rate 1e-3, 100 steps,
lambda = 0), ParamBPT was 0.37 of it at step 4, 0.24 at 8, and 0.19 to 0.22 from step 12 to 100; after 400 steps it was
about 0.1. So ParamBPT grows like L^2, and the ceiling is a few times too high, hardly ever too low.

From an adapter (A_0, B_0) on, both factors move at once, and to first order B A - B_0 A_0 = B_0 dA + dB A_0. So

    G = sum_i s_i^2 (sqrt(out_i) |A_0| + sqrt(in_i) |B_0|)^2 / (2 sigma^2 N ln 2)

which for a new adapter, where |A_0|^2 = r / 3 and B_0 = 0, is the G above.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

ASSUMED_DATA_BPT = 1.0
"""DataBPT where it is not known yet, in bits per token: low, so that the ceiling on S is rather too high."""


@dataclass(frozen=True)
class Matrix:
    """An adapted matrix as training finds it.

    Attributes:
        out: rows of Delta W.
        inner: columns of Delta W.
        rank: rows of A.
        a_norm: Frobenius norm of A_0.
        b_norm: Frobenius norm of B_0.
        scale: alpha / rank.
    """

    out: int
    inner: int
    rank: int
    a_norm: float
    b_norm: float
    scale: float

    @classmethod
    def new(cls, out: int, inner: int, rank: int, scale: float) -> "Matrix":
        """One of an adapter that PEFT has just made."""
        return cls(out, inner, rank, math.sqrt(rank / 3), 0.0, scale)


def growth(matrices: Iterable[Matrix], sigma: float, n_tokens: int) -> float:
    """G: bits per token that the adapter takes at most, per squared sum of learning rates.

    >>> round(growth([Matrix.new(out=100, inner=50, rank=16, scale=2.0)], sigma=0.02, n_tokens=10_000), 1)
    384.7

    Args:
        matrices: all that are adapted.
        sigma: standard deviation of the prior.
        n_tokens: N.
    """
    moved = sum(m.scale**2 * (math.sqrt(m.out) * m.a_norm + math.sqrt(m.inner) * m.b_norm) ** 2 for m in matrices)
    return moved / (2 * sigma**2 * n_tokens * math.log(2))


def ceiling(growth: float, moved: float, data_bpt: float = ASSUMED_DATA_BPT) -> float:
    """The largest S to be expected once the learning rates have added up to ``moved``.

    >>> round(ceiling(growth=8700, moved=0.0145), 2)
    0.65
    """
    param_bpt = growth * moved**2
    return param_bpt / (param_bpt + data_bpt)
