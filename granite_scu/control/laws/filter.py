"""The smoothing of ln S, and what it says about the setpoint."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from granite_scu.control.laws.base import Measurement


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


class Reading(NamedTuple):
    """What a tick makes of S.

    Attributes:
        ema: the filter of ln S after the tick.
        valid: the tick had an S that has a logarithm; otherwise the filter is unchanged.
        smoothed: exp of the filter's value; None before the first valid tick.
        error: ln(smoothed / setpoint); None without either.
    """

    ema: Ema
    valid: bool
    smoothed: float | None
    error: float | None


def read(ema: Ema, measurement: Measurement, alpha: float, setpoint: float | None = None) -> Reading:
    """Take a measurement into the filter; one without a logarithm leaves it alone.

    >>> seen = Measurement(s=0.02, data_bpt=4.9, param_bpt=0.1)
    >>> read(Ema(), seen, alpha=0.5, setpoint=0.02).error
    0.0
    """
    log_s = measurement.log_s
    if log_s is not None:
        ema = ema.update(log_s, alpha)
    mean = ema.value
    smoothed = None if mean is None else math.exp(mean)
    error = None if mean is None or setpoint is None else mean - math.log(setpoint)
    return Reading(ema, log_s is not None, smoothed, error)
