"""The open-loop step test: another law finds the operating point, then ln lambda steps around it."""

import math
import random
from dataclasses import dataclass, replace

from granite_scu.control.laws.base import Measurement, Output, bounded_exp, require
from research.identification.wrapper import Wrapper, WrapperState


@dataclass(frozen=True)
class ExcitationState(WrapperState):
    """What one tick leaves to the next.

    Attributes:
        law: state of the law that settles; it still filters S for the log when it no longer acts.
        tick: ticks done, those without a valid measurement included.
        level: mean of ln lambda over the later half of the settling, as far as it has come.
        counted: ticks in that mean.
    """

    level: float = 0.0
    counted: int = 0


# Steps around the mean of a closed loop, and not around a lambda that the user names: it is the gain at S* that the
# law needs, and nobody knows beforehand which lambda holds S*. The excitation itself is open loop, since data from a
# closed one mistake the law's reaction to noise for the plant's reaction to lambda.
@dataclass(frozen=True)
class Excitation(Wrapper):
    """Holds S at the setpoint for ``settle`` ticks, then steps ln lambda to level +- amplitude, whatever S does.

    The level is the mean of ln lambda over the later half of the settling. The signs are pseudo-random: one for each
    ``dwell`` ticks, in shuffled pairs of one plus and one minus, so that any two pairs are balanced and the
    operating point stays where it is, while dwells of one and of two lengths excite slow and fast modes alike.

    >>> from granite_scu.control import PI
    >>> Excitation(PI(setpoint=0.02), settle=10, amplitude=0.5, dwell=3).signs(6)
    (-1, 1, -1, 1, 1, -1)

    Attributes:
        law: brings S to the setpoint.
        settle: ticks in closed loop, at least 2.
        amplitude: of the steps, in ln lambda; positive.
        dwell: ticks between possible steps, at least 1.
        seed: of the signs.
    """

    settle: int
    amplitude: float
    dwell: int
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.settle >= 2, f"settle {self.settle}: must be at least 2 ticks")
        require(0 < self.amplitude < math.inf, f"amplitude {self.amplitude}: must be positive and finite")
        require(self.dwell >= 1, f"dwell {self.dwell}: must be at least 1 tick")

    def init(self) -> ExcitationState:
        return ExcitationState(self.law.init())

    def signs(self, count: int) -> tuple[int, ...]:
        """The first so many signs, each of which holds for ``dwell`` ticks."""
        draw = random.Random(self.seed)
        pairs = [draw.choice(((1, -1), (-1, 1))) for _ in range((count + 1) // 2)]
        return tuple(sign for pair in pairs for sign in pair)[:count]

    def update(self, state: ExcitationState, measurement: Measurement) -> tuple[ExcitationState, Output]:
        law_state, output = self.law.update(state.law, measurement)
        tick = state.tick + 1
        if state.tick < self.settle:
            level, counted = state.level, state.counted
            if 2 * state.tick >= self.settle:
                counted += 1
                level += (math.log(output.lam) - level) / counted
            return ExcitationState(law_state, tick, level, counted), output
        # ln lambda is a function of the tick alone, so a tick without a measurement steps like any other.
        number = (state.tick - self.settle) // self.dwell
        wanted = state.level + self.amplitude * self.signs(number + 1)[number]
        lam, saturated = bounded_exp(wanted, self.law.lambda_min, self.law.lambda_max)
        output = replace(output, lam=lam, p_term=None, i_term=None, saturated=saturated)
        return replace(state, law=law_state, tick=tick), output
