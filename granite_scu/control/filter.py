"""The smoothing of ln S."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ema:
    """A bias-corrected exponential moving average.

    With m_k = (1 - alpha) m_{k-1} + alpha v_k and m_0 = 0, ``mean`` is m_k / (1 - (1 - alpha)^k): the correction
    of Kingma and Ba, "Adam" (2015), section 3. The first value is taken whole, so nothing drags on the start.

    >>> Ema().update(0.0, alpha=0.5).update(3.0, alpha=0.5)
    Ema(mean=2.0, weight=0.75)

    Attributes:
        mean: the corrected average; 0 before the first value, where ``value`` is None.
        weight: 1 - (1 - alpha)^k after k values, carried so that no power is taken and no count is kept.
    """

    mean: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The average, or None before the first value."""
        return self.mean if self.weight > 0 else None

    def update(self, value: float, alpha: float) -> "Ema":
        """The average with one more value in it; ``alpha`` in (0, 1] is the weight of the newest."""
        weight = self.weight + alpha * (1 - self.weight)
        return Ema(self.mean + alpha / weight * (value - self.mean), weight)
