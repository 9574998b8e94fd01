"""When a run has settled: S holds its setpoint under a closed loop, and the data's bits have stopped falling."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from statistics import covariance
from typing import Any

from granite_scu.control.diagnostics.fit import line
from granite_scu.control.laws.base import by_field, require, require_setpoint
from granite_scu.control.units import per_cent

NEXT, NOW, POSITION, LOG_LAMBDA, CHANGE = range(5)
"""What a tick is described by: the speed after and before it, ln ParamBPT, ln lambda, and the change of ln lambda."""

MIN_TICKS = 12
"""Ticks below which there is no answer: each of the regressions takes up to four of them."""


@dataclass(frozen=True)
class Effect:
    """How clearly the adapter has slowed under more lambda. Pure: ``update`` returns the next one.

    Its speed v is the change of the root of ParamBPT per lr_sum, in which free growth is steady and a falling learning
    rate cancels; ParamBPT is exact, so no noise of the data is in it. Over all ticks k since the first

        v_{k+1} ~ 1 + v_k + ln ParamBPT_k + ln lambda_k              that lambda's level acts
        v_{k+1} ~ 1 + v_k + (ln lambda_k - ln lambda_{k-1})          that its changes do

    and ``score`` is the mean of the t values of the last terms. In a closed loop lambda is made of ParamBPT, and an
    adapter that comes back to S* by itself looks as if lambda had brought it. The first regression has its position
    as a covariate, so it counts only what lambda does besides. Where more than one past tick matters it is biased, and
    so is the second, where the position matters; but not by the same things, hence both. This makes it evidence and no
    proof: lambda is not varied on purpose. docs/develop/mathematics.md has the rates at which it is right and wrong.

    Attributes:
        count: ticks with all five values.
        mean: of each of them.
        products: sums of the products of their deviations from the mean, row by row.
        last: root of ParamBPT, lr_sum and ln lambda at the newest tick; then ``NOW`` to ``CHANGE`` of it.
    """

    count: int = 0
    mean: tuple[float, ...] = (0.0,) * 5
    products: tuple[tuple[float, ...], ...] = ((0.0,) * 5,) * 5
    last: tuple[float, ...] = ()

    def update(self, param_bpt: float, lam: float, lr_sum: float) -> "Effect":
        """One tick more. One without a logarithm interrupts the series, one at a learning rate of 0 says nothing."""
        if not (0 < param_bpt < math.inf and 0 < lam < math.inf and math.isfinite(lr_sum)):
            return replace(self, last=())
        root, u = math.sqrt(param_bpt), math.log(lam)
        if not self.last:
            return replace(self, last=(root, lr_sum, u))
        root_before, lr_sum_before, u_before, *described = self.last
        if lr_sum <= lr_sum_before:
            return self
        speed = (root - root_before) / (lr_sum - lr_sum_before)
        after = self._with((speed, *described)) if described else self
        now = (speed, math.log(param_bpt), u, u - u_before)
        return replace(after, last=(root, lr_sum, u, *now))

    def _with(self, values: Sequence[float]) -> "Effect":
        """Means and products with one more tick in them (Welford, "Note on a method", Technometrics 4, 1962)."""
        count = self.count + 1
        off = [value - mean for value, mean in zip(values, self.mean, strict=True)]
        share = (count - 1) / count
        products = tuple(
            tuple(old + share * a * b for old, b in zip(row, off, strict=True))
            for row, a in zip(self.products, off, strict=True)
        )
        mean = tuple(mean + a / count for mean, a in zip(self.mean, off, strict=True))
        return replace(self, count=count, mean=mean, products=products)

    @property
    def score(self) -> float:
        """Mean of the two t values, negative where more lambda slows the adapter; 0 where nothing can be said."""
        if self.count < MIN_TICKS:
            return 0.0
        level = self._t_value(LOG_LAMBDA, (NOW, POSITION))
        return (level + self._t_value(CHANGE, (NOW,))) / 2

    def _t_value(self, cause: int, covariates: Sequence[int]) -> float:
        """Of ``cause`` in the regression of ``NEXT`` on it, a constant and the covariates."""
        rest = [list(row) for row in self.products]
        for one in covariates:  # what is left of all the others when this one has explained what it can
            pivot = rest[one][:]
            if pivot[one] <= 1e-9 * self.products[one][one]:
                continue
            rest = [[v - row[one] * p / pivot[one] for v, p in zip(row, pivot, strict=True)] for row in rest]
        varied, total = rest[cause][cause], rest[NEXT][NEXT]
        if varied <= 1e-9 * self.products[cause][cause] or total <= 1e-9 * self.products[NEXT][NEXT]:
            return 0.0
        unexplained = max(total - rest[cause][NEXT] ** 2 / varied, 1e-12 * total)
        freedom = self.count - 2 - len(covariates)
        return rest[cause][NEXT] / math.sqrt(varied * unexplained / freedom)


MIN_WINDOW = 8
"""Ticks below which neither a slope nor an answer of lambda can be told from chance."""

QUANTILE = 1.645
"""One-sided 95 % point of the normal distribution."""


@dataclass(frozen=True)
class Tick:
    """What one tick showed.

    Attributes:
        step: optimizer steps done.
        s: the smoothed S; None where there was none.
        lam: lambda that was set at it.
        data_bpt: loss since the tick before, in bits per token.
        saturated: lambda rests on a bound.
        held: the measurement was unusable.
        in_deadband: the error was too small to act upon in full.
        authority: how strongly lambda is applied: the norm of its gradient over that of the data's, as measured, or,
            under the decoupled actuator, the share of the update that lambda and the learning rate are to take away
            between two ticks, as computed; 0 where it acts on nothing. What becomes of it, ``effect`` says.
        lr_sum: sum of the learning rates of all steps so far, over that at which S first came up to its band; 0 before.
        effect: ``control.effect``'s score of all ticks from there to this one; negative where lambda slows the adapter.
    """

    step: int
    s: float | None
    lam: float
    data_bpt: float
    saturated: bool
    held: bool
    in_deadband: bool
    authority: float
    lr_sum: float
    effect: float


@dataclass(frozen=True)
class Decision:
    """Whether to stop, and the reason in words: what was seen, or the first condition that is not met."""

    stop: bool
    reason: str


@dataclass(frozen=True)
class Equilibrium:
    """The stopping rule. Over the whole window of the newest ticks

    1. the loop must be closed. At every tick lambda was positive, on no bound, not held and outside the deadband; it
       was applied (``authority`` at least ``min_authority``); and it answered to S: its changes follow from the error
       and the error before, as those of a P or I law do exactly, and of ``PI``, whose gains and filter are its own, by
       a third to nine tenths: with an R^2 of at least ``answer`` and the right sign. A constant has no changes, and a
       scheduled lambda does not know this run's error: by chance it has an R^2 of about 2 / window. All
       this is of the controller; a plant that ignores lambda would pass.
    2. S was within ``band`` of the setpoint at every tick.
    3. lambda's effect on S must have shown in this run: since S came up to its band the adapter slowed under more
       lambda, beyond what its own course explains (``control.effect``, at or below -``min_effect``). This is evidence
       from a closed loop, and no proof. And there must have been something to hold: the weights travelled so far in
       the window that an adapter let go would have crossed the whole band, if it grew as it did when S rose (the root
       of ParamBPT with lr_sum), which is assumed. At the end of a schedule, where weights hardly move, S rests
       whatever lambda does.
    4. DataBPT has stopped falling: the fall along its least-squares line is within its uncertainty (one-sided 95 %,
       widened for the correlation of neighbouring residuals), and that uncertainty leaves room for no fall of more than
       ``resolution`` of DataBPT over the window. Without the second half, noise alone would pass for equilibrium.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        window: ticks that must agree.
        band: errors relative to S* that count as held.
        resolution: the largest fall over the window, relative to DataBPT, that may stay hidden in the noise.
        min_authority: see ``Tick.authority``.
        answer: least share of lambda's changes that the error must explain, in windows so long that chance explains
            less; in shorter ones it is what chance reaches in one window of a hundred.
        min_effect: the t value that the effect must have.
    """

    setpoint: float
    window: int
    band: float = 0.1
    resolution: float = 0.03
    min_authority: float = 0.05
    answer: float = 0.3
    min_effect: float = 4.0

    def __post_init__(self) -> None:
        require_setpoint(self.setpoint)
        require(self.window >= MIN_WINDOW, f"window {self.window}: must be at least {MIN_WINDOW} ticks")

    def decide(self, ticks: Sequence[Tick]) -> Decision:
        """Whether a run that ended in these ticks has settled. Pure."""
        if len(ticks) < self.window:
            return Decision(False, f"{len(ticks)} of {self.window} ticks seen")
        ticks = ticks[-self.window :]
        # In this order: a lambda or an S without a logarithm has been sorted out before logarithms are taken.
        fault = self._open_loop(ticks) or self._out_of_band(ticks) or self._unmoved(ticks) or self._not_answering(ticks)
        fault = fault or self._without_effect(ticks[-1].effect)
        if fault:
            return Decision(False, fault)
        return self._still_learning(ticks)

    def _open_loop(self, ticks: Sequence[Tick]) -> str | None:
        for tick in ticks:
            if not 0 < tick.lam < math.inf:
                return f"lambda is {tick.lam:g} at step {tick.step}"
            for fault in ("saturated", "held", "in_deadband"):
                if getattr(tick, fault):
                    return f"{fault.replace('_', ' ')} at step {tick.step}"
            if not tick.authority >= self.min_authority:
                return f"lambda acts too weakly at step {tick.step}: its authority is {tick.authority:.3g}"
        return None

    def _out_of_band(self, ticks: Sequence[Tick]) -> str | None:
        for tick in ticks:
            if tick.s is None or not abs(tick.s / self.setpoint - 1) <= self.band:
                return f"S out of band at step {tick.step}"
        return None

    def _unmoved(self, ticks: Sequence[Tick]) -> str | None:
        low, high = (1 - self.band) * self.setpoint, (1 + self.band) * self.setpoint
        begin, end = ticks[0].lr_sum, ticks[-1].lr_sum
        if not 0 < begin <= end < math.inf:
            return "S has not risen to its band yet"
        free = low / (1 - low) * (1 + end - begin) ** 2  # the odds of S: ParamBPT over DataBPT
        if free / (1 + free) <= high:
            return (
                f"lambda's effect does not show: the learning rates since step {ticks[0].step} would not have moved S "
                "out of its band either way"
            )
        return None

    def _not_answering(self, ticks: Sequence[Tick]) -> str | None:
        errors = [math.log((tick.s or 0.0) / self.setpoint) for tick in ticks]
        changes = [math.log(b.lam / a.lam) for a, b in pairwise(ticks)]
        if max(changes) - min(changes) < 1e-12:
            return "lambda does not move"
        explained, gains = _regression(errors[1:], errors[:-1], changes)
        # Of n independent changes two regressors and a constant explain R^2 or more with probability
        # (1 - R^2)^((n - 3) / 2).
        by_chance = 1 - 0.01 ** (2 / (len(changes) - 3))
        if explained < max(self.answer, by_chance):
            return f"lambda does not answer to S: the error explains {explained:.0%} of its changes"
        # On (e_k, e_{k-1}) a PI law has the coefficients (Kp, Ki - Kp): the first is Kp, and an I law's sum is Ki.
        if max(gains[0], sum(gains)) <= 0:
            return "lambda answers to S with the wrong sign"
        return None

    def _without_effect(self, effect: float) -> str | None:
        if effect <= -self.min_effect:
            return None
        return f"that lambda moves the adapter has not shown yet: t = {effect:.1f}, above -{self.min_effect:g}"

    def _still_learning(self, ticks: Sequence[Tick]) -> Decision:
        steps, bpt = [tick.step for tick in ticks], [tick.data_bpt for tick in ticks]
        if not all(math.isfinite(value) for value in bpt):
            return Decision(False, "DataBPT is not finite")
        fitted, span = line(steps, bpt), steps[-1] - steps[0]
        fall, doubt = -fitted.slope * span, QUANTILE * fitted.corrected_error(len(ticks)) * span
        mean = math.fsum(bpt) / len(bpt)
        if fall > doubt:
            return Decision(False, f"DataBPT still falls, by {fall:.3g} over the window")
        if fall + doubt > self.resolution * mean:
            return Decision(False, f"DataBPT is too noisy to tell: it may still fall by {fall + doubt:.3g}")
        return Decision(
            True,
            f"S stayed within {self.band:.0%} of {per_cent(self.setpoint)} for {len(ticks)} ticks (steps {steps[0]} to "
            f"{steps[-1]}) under a lambda that acts, and DataBPT at {mean:.3f} no longer falls "
            f"(by {fall:.2g} +- {doubt:.2g})",
        )


def from_mappings(mappings: Sequence[Mapping[str, Any]]) -> tuple[Tick, ...]:
    """The window that ``as_stored`` made mappings of."""
    return tuple(Tick(**by_field(Tick, one)) for one in mappings)


def _regression(a: Sequence[float], b: Sequence[float], y: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """R^2 and the two slopes of y on a and b, with a constant; R^2 is 0 where nothing varies.

    Where a and b say the same (a frozen S), a alone counts.
    """
    pairs = (a, a), (b, b), (a, b), (a, y), (b, y), (y, y)
    aa, bb, ab, ay, by, yy = starmap(covariance, pairs)
    if yy <= 0 or aa <= 0:
        return 0.0, (0.0, 0.0)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * max(bb, 1e-300):
        return ay * ay / (aa * yy), (ay / aa, 0.0)
    on_a, on_b = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    return (on_a * ay + on_b * by) / yy, (on_a, on_b)
