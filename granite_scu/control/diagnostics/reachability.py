"""Whether lambda can bring S to its setpoint at all, judged during the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from granite_scu.control.laws.base import clip, require, require_setpoint
from granite_scu.control.units import per_cent

POWERLESS = 0.05
"""Norm of the penalty's gradient over that of the data's, below which lambda is not what holds S down. Where PI holds S
at 0.5 to 10 % it is 0.15 to 0.4."""

OTHER_WAYS = "other ways: docs/troubleshooting.md"
"""Behind the one remedy that a warning gives."""

FASTEST = 2.5
"""The power of the summed learning rates that ParamBPT grows with at most. Without lambda it is about 2:
``diagnostics.ceiling``."""

Side = Literal["below", "above"]


@dataclass(frozen=True)
class Observation:
    """What a tick showed.

    Attributes:
        step: optimizer steps done.
        s: the smoothed S.
        data_bpt: loss, in bits per token.
        param_bpt: description length of the adapter, in bits per token.
        at_low: lambda rests on its lower bound.
        at_high: lambda rests on its upper bound.
        penalty_share: norm of the penalty's gradient over that of the data's; None where lambda acts by another way.
        moved: sum of the learning rates of the steps done.
        moved_at_end: sum of those of the whole run.
    """

    step: int
    s: float
    data_bpt: float
    param_bpt: float
    at_low: bool
    at_high: bool
    penalty_share: float | None
    moved: float
    moved_at_end: float

    @property
    def lambda_is_idle(self) -> bool:
        """Whether S grows, as far as lambda is concerned, as it would without it."""
        return self.at_low or (self.penalty_share is not None and self.penalty_share < POWERLESS)


@dataclass(frozen=True)
class ReachabilityState:
    """What one tick leaves to the next.

    Attributes:
        recent: the last ticks with a valid measurement, oldest first.
        side: where S is stuck; None while the setpoint is in reach.
        since: step of the oldest tick that the verdict rests on.
        doubts: ticks in a row that spoke against it.
        episodes: how often a verdict was reached.
        s_free: S where lambda last rested on its lower bound; None where it never did.
        expected: S at the end of the run, as far as it can be foreseen.
        reached: step of the first tick at which S was in the band; None before one.
    """

    recent: tuple[Observation, ...] = ()
    side: Side | None = None
    since: int | None = None
    doubts: int = 0
    episodes: int = 0
    s_free: float | None = None
    expected: float | None = None
    reached: int | None = None


@dataclass(frozen=True)
class Reachability:
    """Looks at every tick for evidence that S cannot come to S*. Pure, as a controller is.

    S is stuck below, when over ``patience`` ticks in a row it was under the band and lambda idle, on its lower bound or
    with a gradient too small to matter, and even growth by the power ``FASTEST`` would not lift it into the band by the
    end. Early in a run, whose rest is worth many times what is done, that holds of no setpoint within reach.

    It is stuck above, when it was over the band with lambda on its upper bound for ``patience`` ticks, and the fall of
    the last three, continued to the end, does not get there.

    A verdict is withdrawn when S enters the band, or after ``patience`` ticks without evidence.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        patience: ticks that must agree, at least 3.
        band: errors relative to S* that still count as there.
    """

    setpoint: float
    patience: int = 5
    band: float = 0.1

    def __post_init__(self) -> None:
        require_setpoint(self.setpoint)
        require(self.patience >= 3, f"patience {self.patience}: must be at least 3 ticks")

    def init(self) -> ReachabilityState:
        """The state before the first tick."""
        return ReachabilityState()

    def restore(self, mapping: Mapping[str, Any]) -> ReachabilityState:
        """The state that ``dataclasses.asdict`` turned into ``mapping``."""
        known = {name: value for name, value in mapping.items() if name != "still"}  # of 0.1.0
        return ReachabilityState(**{**known, "recent": tuple(Observation(**sight) for sight in mapping["recent"])})

    def update(self, state: ReachabilityState, sight: Observation | None) -> ReachabilityState:
        """One tick; None stands for one without a valid measurement, which says nothing."""
        if sight is None:
            return state
        recent = (*state.recent, sight)[-self.patience :]
        expected = _grown(sight, _power(recent)) if len(recent) > 1 else None
        state = replace(state, recent=recent, expected=expected)
        arrived = abs(sight.s / self.setpoint - 1) <= self.band
        if arrived and state.reached is None:
            state = replace(state, reached=sight.step)
        if len(recent) == self.patience and all(s.at_low for s in recent):
            state = replace(state, s_free=sight.s)
        side = self._judge(recent)
        if side is not None and side != state.side:
            return replace(state, side=side, since=recent[0].step, doubts=0, episodes=state.episodes + 1)
        if state.side is None or side == state.side:
            return replace(state, doubts=0)
        doubts = state.doubts + 1
        if arrived or doubts >= self.patience:
            return replace(state, side=None, since=None, doubts=0)
        return replace(state, doubts=doubts)

    def _judge(self, recent: tuple[Observation, ...]) -> Side | None:
        low, high = self.setpoint * (1 - self.band), self.setpoint * (1 + self.band)
        if len(recent) < self.patience:
            return None
        if all(s.s < low and s.lambda_is_idle for s in recent) and _grown(recent[-1], FASTEST) < low:
            return "below"
        if all(s.s > high and s.at_high for s in recent) and _grown(recent[-1], _power(recent[-3:])) > high:
            return "above"
        return None

    def advice(self, state: ReachabilityState, lambda_min: float, lambda_max: float, ended: bool = False) -> str | None:
        """What is seen and the first thing to change, as one line; None while the setpoint is in reach.

        Args:
            state: of the last tick.
            lambda_min, lambda_max: bounds of lambda.
            ended: the run is over, and nothing more is to be expected.
        """
        if state.side is None:
            return None
        last = state.recent[-1]
        out, is_at = f"S* = {per_cent(self.setpoint)} is out of reach", f"S is {per_cent(last.s)}"
        if ended:
            out, is_at = f"S* = {per_cent(self.setpoint)} was out of reach", f"S ended at {per_cent(last.s)}"
        if state.side == "above":
            why = f"{is_at} with lambda on its upper bound of {lambda_max:g} since step {state.since}"
            return f"{out}: {why}; try --lambda-max {10 * lambda_max:g}; {OTHER_WAYS}"
        expected = last.s if state.expected is None or ended else state.expected
        lower = float(f"{0.8 * expected:.1g}")
        comes = "" if ended else f", and about {per_cent(expected)} is expected at the end"
        remedy = f"try --target-s {lower:g} ({per_cent(lower)}); {OTHER_WAYS}"
        why = f"with lambda on its lower bound of {lambda_min:g}" if last.at_low else "although lambda hardly acts"
        return f"{out}: {is_at} {why}{comes}; {remedy}"

    def summary(self, state: ReachabilityState, lambda_min: float, lambda_max: float) -> dict[str, Any]:
        """The verdict for ``scu_metrics.json``: "reached", or "stuck below the setpoint" (or above), or "not shown"
        where S never was in the band and nothing shows that it could not be.
        """
        open_verdict = "not shown" if state.reached is None else "reached"
        return {
            "verdict": open_verdict if state.side is None else f"stuck {state.side} the setpoint",
            "since_step": state.since,
            "reached_at_step": state.reached,
            "band": self.band,
            "episodes": state.episodes,
            "s_free": state.s_free,
            "s_expected": state.expected if state.side else None,
            "advice": self.advice(state, lambda_min, lambda_max, ended=True),
        }


def _power(recent: tuple[Observation, ...]) -> float:
    """The power of the summed learning rates that ParamBPT grew with, at most that without lambda."""
    first, last = recent[0], recent[-1]
    moved = math.log(last.moved / first.moved)
    if moved < 1e-9:  # the learning rate has come down to nothing: nothing moves any more
        return 0.0
    return clip(math.log(last.param_bpt / first.param_bpt) / moved, -10.0, 2.0)


def _grown(last: Observation, power: float) -> float:
    """S at the end of the run, if ParamBPT keeps growing with that power of the summed learning rates."""
    param_bpt = last.param_bpt * math.pow(last.moved_at_end / last.moved, power)
    return param_bpt / (param_bpt + last.data_bpt)
