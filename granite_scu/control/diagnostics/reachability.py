"""Whether lambda can bring S to its setpoint at all, judged during the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from granite_scu.control.diagnostics.ceiling import ceiling
from granite_scu.control.diagnostics.fit import line
from granite_scu.control.laws.base import clip, require, require_setpoint
from granite_scu.control.units import per_cent

POWERLESS = 0.05
"""Norm of the penalty's gradient over that of the data's, below which lambda is not what holds S down. Where PI holds S
at 0.5 to 10 % it is 0.15 to 0.4."""

OTHER_WAYS = "other ways: docs/troubleshooting.md"
"""Behind the one remedy that a warning gives."""

STILL = 0.02
"""Exponent of the growth that counts as none, however exactly it is known: over the rest of a run of which a tenth is
done, it is worth 5 % of ParamBPT."""

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
        still: ticks in a row whose ``recent`` ones show no growth and no fall.
    """

    recent: tuple[Observation, ...] = ()
    side: Side | None = None
    since: int | None = None
    doubts: int = 0
    episodes: int = 0
    s_free: float | None = None
    expected: float | None = None
    reached: int | None = None
    still: int = 0


@dataclass(frozen=True)
class Reachability:
    """Looks at every tick for evidence that S cannot come to S*. Pure, as a controller is.

    S is stuck below, when it was under the band for ``patience`` ticks in a row and one of these holds:

    - Even the whole run without lambda would not get there: S* lies above the ceiling that ``control.ceiling`` derives
      from all learning rates and the DataBPT measured now.
    - S is under half of S*, and what is left of the learning rates does not get there, whatever lambda does: |Delta W|
      grows by no more than the ceiling's share of them. (Half, because near the end of a decaying schedule this would
      hold for any S that is a little low.)
    - Lambda was idle all the while (on its lower bound, or its gradient too small to matter), and the growth of these
      ticks, ln ParamBPT over ln of the summed learning rates, continued to the end at its slope plus two standard
      errors plus ``caution``, stays under the band. ParamBPT grows like the square of that sum, so the long normal rise
      raises no alarm: early in it, the rest of the run is worth many times what is done.
    - Lambda rested on its lower bound all the while, and ParamBPT stood still: that slope was within two standard
      errors of none at each of the last ``patience`` ticks, which a peak or a trough is not. Of a rise that has ended
      nothing is to be expected, and the caution, which is worth more the less of the run is done, would only put off
      saying so.

    It is stuck above, when it was over the band with lambda on its upper bound for ``patience`` ticks, and either stood
    still in the same sense, or its fall, continued in the same way, does not get there.

    A verdict is withdrawn when S enters the band, or after ``patience`` ticks without evidence.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        growth: G of ``control.ceiling``; None where it is unknown, and the ceiling then no evidence.
        patience: ticks that must agree, at least 3.
        band: errors relative to S* that still count as there.
        caution: what is added to the exponent of the growth.
    """

    setpoint: float
    growth: float | None = None
    patience: int = 5
    band: float = 0.1
    caution: float = 0.3

    def __post_init__(self) -> None:
        require_setpoint(self.setpoint)
        require(self.patience >= 3, f"patience {self.patience}: must be at least 3 ticks")

    def init(self) -> ReachabilityState:
        """The state before the first tick."""
        return ReachabilityState()

    def restore(self, mapping: Mapping[str, Any]) -> ReachabilityState:
        """The state that ``dataclasses.asdict`` turned into ``mapping``."""
        return ReachabilityState(**{**mapping, "recent": tuple(Observation(**sight) for sight in mapping["recent"])})

    def update(self, state: ReachabilityState, sight: Observation | None) -> ReachabilityState:
        """One tick; None stands for one without a valid measurement, which says nothing."""
        if sight is None:
            return state
        recent = (*state.recent, sight)[-self.patience :]
        state = replace(state, recent=recent, expected=self._expected(recent))
        arrived = abs(sight.s / self.setpoint - 1) <= self.band
        if arrived and state.reached is None:
            state = replace(state, reached=sight.step)
        if len(recent) == self.patience and all(s.at_low for s in recent):
            state = replace(state, s_free=sight.s)
        still = state.still + 1 if len(recent) == self.patience and _stands_still(recent) else 0
        state = replace(state, still=still)
        side = self._judge(recent, at_rest=still >= self.patience)
        if side is not None and side != state.side:
            return replace(state, side=side, since=recent[0].step, doubts=0, episodes=state.episodes + 1)
        if state.side is None or side == state.side:
            return replace(state, doubts=0)
        doubts = state.doubts + 1
        if arrived or doubts >= self.patience:
            return replace(state, side=None, since=None, doubts=0)
        return replace(state, doubts=doubts)

    def _judge(self, recent: tuple[Observation, ...], at_rest: bool) -> Side | None:
        if len(recent) < self.patience:
            return None
        low, high = self.setpoint * (1 - self.band), self.setpoint * (1 + self.band)
        if all(s.s < low for s in recent):
            let_go = all(s.at_low for s in recent)
            return "below" if (let_go and at_rest) or self._most(recent) < low else None
        if all(s.s > high and s.at_high for s in recent):
            return "above" if at_rest or self._least(recent) > high else None
        return None

    def _most(self, recent: tuple[Observation, ...]) -> float:
        """The largest S that the run can end with, by the evidence there is."""
        last = recent[-1]
        most = self._ceiling(last.moved_at_end, last.data_bpt)
        if self.growth is not None and all(s.s < self.setpoint / 2 for s in recent):
            left = math.sqrt(self.growth) * (last.moved_at_end - last.moved)
            param_bpt = (math.sqrt(last.param_bpt) + left) ** 2
            most = min(most, param_bpt / (param_bpt + last.data_bpt))
        if all(s.lambda_is_idle for s in recent):
            exponent, error = _exponent(recent)
            most = min(most, _grown(last, exponent + 2 * error + self.caution))
        return max(most, last.s)

    def _least(self, recent: tuple[Observation, ...]) -> float:
        """The smallest S that the run can end with under a lambda on its upper bound."""
        exponent, error = _exponent(recent)
        return _grown(recent[-1], exponent - 2 * error - self.caution)

    def _expected(self, recent: tuple[Observation, ...]) -> float | None:
        if len(recent) < 3:
            return None
        last = recent[-1]
        grown = _grown(last, min(_exponent(recent)[0], 2.0))
        return max(last.s, min(grown, self._ceiling(last.moved_at_end, last.data_bpt))) if grown >= last.s else grown

    def _ceiling(self, moved_at_end: float, data_bpt: float) -> float:
        return 1.0 if self.growth is None else ceiling(self.growth, moved_at_end, data_bpt)

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
        return f"{out}: {is_at} {self._why(last, lambda_min, ended)}{comes}; {remedy}"

    def _why(self, last: Observation, lambda_min: float, ended: bool) -> str:
        """What keeps S below the setpoint."""
        if last.at_low:
            return f"with lambda on its lower bound of {lambda_min:g}"
        if last.lambda_is_idle:
            return "although lambda hardly holds it back"
        return "in too few steps" if ended else "and even with no lambda the steps that are left are too few"

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


def _exponent(recent: tuple[Observation, ...]) -> tuple[float, float]:
    """The slope of ln ParamBPT over ln of the summed learning rates, and its standard error."""
    x = [math.log(s.moved) for s in recent]
    if x[-1] - x[0] < 1e-9:  # the learning rate has come down to nothing: nothing moves any more
        return 0.0, 0.0
    fitted = line(x, [math.log(s.param_bpt) for s in recent])
    return fitted.slope, fitted.error


def _stands_still(recent: tuple[Observation, ...]) -> bool:
    exponent, error = _exponent(recent)
    return abs(exponent) <= 2 * error + STILL


def _grown(last: Observation, exponent: float) -> float:
    """S at the end of the run, if ParamBPT keeps growing with that power of the summed learning rates."""
    factor = math.exp(clip(exponent, -10.0, 10.0) * math.log(last.moved_at_end / last.moved))
    param_bpt = last.param_bpt * factor
    return param_bpt / (param_bpt + last.data_bpt)
