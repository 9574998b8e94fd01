"""Whether a closed loop answered a step of its setpoint as predicted, and if not, in what it differed.

Responses are ln S, smoothed as the law logs it, in shares of the step: 0 before it, 1 at the new setpoint.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.signal import lfilter

from granite_scu import control
from research.identification.fopdt import Array, Fopdt, simulate
from research.identification.fopdt_fit import Fit
from research.identification.setpoint_step import SetpointStep
from research.identification.step_response import describe_step

REST = 10
"""Ticks before the step in a simulation: as many as noise takes to have gone round the loop."""
SIMULATIONS = 50
"""Runs on the model whose largest differences are taken for what noise does."""
NOISIEST = 0.25
"""Swing from noise up to which a lasting oscillation of +-35 % of the step, on top of the noise, still shows."""


MODEL_ERROR = {"transient": 0.25, "offset": 0.15, "swing": 0.15, "overshoot": 0.2}
"""What a model that has served its purpose may be off by. A lasting oscillation of +-35 % has a swing of 0.25."""


@dataclass(frozen=True)
class Agreement:
    """A measured response against the predicted one.

    Attributes:
        difference: measured minus predicted, as ``difference`` has it.
        noise: the size that each of its figures has from the noise of the step test alone.
        split: ticks after the step that count as transient.
    """

    difference: dict[str, float]
    noise: dict[str, float]
    split: int

    @property
    def allowed(self) -> dict[str, float]:
        """The sizes up to which they agree: model error and noise are independent, so their squares add up."""
        return {name: math.hypot(error, self.noise[name]) for name, error in MODEL_ERROR.items()}

    @property
    def excess(self) -> list[str]:
        """The names of the differences that are too large."""
        return [name for name, limit in self.allowed.items() if not abs(self.difference[name]) <= limit]  # nor NaN

    @property
    def as_predicted(self) -> bool | None:
        """Whether nothing differs too much; None where noise would hide it if something did."""
        if self.excess:
            return False
        return True if self.noise["swing"] <= NOISIEST else None

    @property
    def words(self) -> str:
        """What differed, or by how little it did."""
        if self.as_predicted is None:
            return f"noise alone swings S by {self.noise['swing']:.0%} of the step; choose a larger --step_test.step"
        names = self.excess or ["transient", "offset", "swing"]
        return "; ".join(
            f"{_SAID[name](self.difference[name])} (up to {self.allowed[name]:.0%} agrees)" for name in names
        )

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {"split": self.split, **asdict(self), "allowed": self.allowed, "words": self.words}


_SAID: dict[str, Callable[[float], str]] = {
    "transient": lambda x: f"on its way S was {x:.0%} of the step off the prediction",
    "offset": lambda x: f"then it stayed {abs(x):.0%} of the step {'beyond' if x > 0 else 'short of'} it",
    "swing": lambda x: f"then it swung about that by {x:.0%} (standard deviation)",
    "overshoot": lambda x: f"it overshot by {abs(x):.0%} of the step {'more' if x > 0 else 'less'} than predicted",
}


def compare(
    measured: ArrayLike, law: control.PI, fit: Fit, level: float, factor: float, band: float = 0.1, seed: int = 0
) -> tuple[Agreement, Array]:
    """Hold a response against that of this very law, with its limits, on the identified plant from rest at S*.

    Args:
        measured: (ticks,) from the step on; NaN where nothing was measured.
        law: with the setpoint before the step.
        fit: the plant, and the noise of its S: what the step test's residuals were.
        level: ln lambda that holds the setpoint.
        factor: new setpoint over old one.
        band: a response in it has settled.
        seed: of the simulated noise.

    Returns:
        The agreement, and the (ticks,) predicted response.
    """
    seen = np.asarray(measured, dtype=np.float64)
    rest = replace(law, lambda_init=math.exp(level))

    def answer(noise: Array | None = None) -> Array:
        return _response(rest, fit.model, level, factor, len(seen), noise)

    expected = answer()
    settling = describe_step(expected, band).settling
    # Twice that, for a loop somewhat slower is still on its way. Where the prediction settles late or never, the
    # last third counts as what follows: an oscillation must show somewhere.
    split = min(len(seen) if settling is None else max(2 * settling, 1), 2 * len(seen) // 3)
    generator = np.random.default_rng(seed)
    noisy = (answer(_noise(fit.noise, fit.correlation, REST + len(seen), generator)) for _ in range(SIMULATIONS))
    found = [difference(each, expected, split) for each in noisy]
    sizes = {name: float(np.max([abs(figures[name]) for figures in found])) for name in MODEL_ERROR}
    return Agreement(difference(seen, expected, split), sizes, split), expected


def difference(seen: Array, expected: Array, split: int) -> dict[str, float]:
    """What a (ticks,) response differs in from the expected one, in shares of the step.

    The way to the setpoint and what follows are apart, since a long quiet stay makes up for anything on the way, and a
    good start for an oscillation that never ends.

    >>> found = difference(np.array([0.0, 0.5, 1.2, 1.4]), np.array([0.0, 0.5, 1.0, 1.0]), split=2)
    >>> {name: round(value, 3) for name, value in found.items()}
    {'transient': 0.0, 'offset': 0.3, 'swing': 0.1, 'overshoot': 0.4}

    Returns:
        ``transient``, the root mean square of the first ``split`` ticks, until twice the time that the prediction takes
        to settle; from there on ``offset``, the mean, and ``swing``, the standard deviation; ``overshoot``, seen minus
        expected.
    """
    gap = seen - expected
    return {
        "transient": float(np.sqrt(np.nanmean(gap[:split] ** 2))),
        "offset": float(np.nanmean(gap[split:])),
        "swing": float(np.nanstd(gap[split:])),
        "overshoot": describe_step(seen).overshoot - describe_step(expected).overshoot,
    }


def _response(law: control.PI, model: Fopdt, level: float, factor: float, ticks: int, noise: Array | None) -> Array:
    """(ticks,) of the law on the plant; ``noise`` is (REST + ticks,), the time before the step included."""
    before = math.log(law.setpoint)
    outputs = simulate(SetpointStep(law, REST, factor), model, REST + ticks, (level, before), noise)[2]
    smoothed = np.array([output.smoothed for output in outputs[REST:]], dtype=np.float64)
    return np.asarray((np.log(smoothed) - before) / math.log(factor))


def _noise(spread: float, correlation: float, ticks: int, generator: np.random.Generator) -> Array:
    """(ticks,) of noise in ln S with the spread and the correlation of a fit's residuals."""
    white = generator.normal(0.0, spread, ticks)
    fresh, start = math.sqrt(1 - correlation**2) * white[1:], white[:1]
    later = lfilter([1.0], [1.0, -correlation], fresh, zi=correlation * start)[0]
    return np.concatenate([start, later])
