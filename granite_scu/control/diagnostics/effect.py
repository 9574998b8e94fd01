"""Whether lambda has been seen to move the adapter: the plant's half of a closed loop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

NEXT, NOW, POSITION, STRENGTH, CHANGE = range(5)
"""What a tick is described by: the speed after and before it, ln ParamBPT, ln lambda, and the change of ln lambda."""

MIN_TICKS = 12
"""Ticks below which there is no answer: each of the regressions takes up to four of them."""


@dataclass(frozen=True)
class Effect:
    """How clearly the adapter has slowed under more lambda. Pure: ``update`` returns the next one.

    Its speed v is the change of the root of ParamBPT per travel, in which free growth is steady and a falling learning
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
        last: root of ParamBPT, travel and ln lambda at the newest tick; then ``NOW`` to ``CHANGE`` of it.
    """

    count: int = 0
    mean: tuple[float, ...] = (0.0,) * 5
    products: tuple[tuple[float, ...], ...] = ((0.0,) * 5,) * 5
    last: tuple[float, ...] = ()

    def update(self, param_bpt: float, reg_strength: float, travel: float) -> "Effect":
        """One tick more. One without a logarithm interrupts the series, one without travel says nothing."""
        if not (0 < param_bpt < math.inf and 0 < reg_strength < math.inf and math.isfinite(travel)):
            return replace(self, last=())
        root, strength = math.sqrt(param_bpt), math.log(reg_strength)
        if not self.last:
            return replace(self, last=(root, travel, strength))
        root_before, travel_before, strength_before, *described = self.last
        if travel <= travel_before:
            return self
        speed = (root - root_before) / (travel - travel_before)
        after = self._with((speed, *described)) if described else self
        now = (speed, math.log(param_bpt), strength, strength - strength_before)
        return replace(after, last=(root, travel, strength, *now))

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
        level = self._t_value(STRENGTH, (NOW, POSITION))
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
