"""From a recorded step test to a model of the plant, and how far to trust it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from granite_scu.control.laws.base import require
from granite_scu.experiments.identification.fopdt import Array, Fopdt, respond

SIGNIFICANT = 2.0
"""Standard errors that the gain must lie below zero."""
EXPLAINED = 0.5
"""R^2 from which on a fit is believed."""


@dataclass(frozen=True)
class Fit:
    """A fitted model and how far to trust it.

    Attributes:
        model: the estimate.
        gain_se, tau_se, theta_se: its standard errors.
        slope_se: standard error of K / tau, which is often far better known than either.
        offset, drift: of the nuisance offset + drift ln(tick + 1).
        r2: share of the variance around the fitted drift alone that lambda explains, 1 at best.
        noise: standard deviation of the residuals, in ln S.
        correlation: of one residual with the next.
        fitted: (n,) the model's output at each tick, nuisance included; the ticks before ``start`` too.
        start: first tick that counted.
        max_theta: the largest dead time that was looked for, in ticks.
    """

    model: Fopdt
    gain_se: float
    tau_se: float
    theta_se: float
    slope_se: float
    offset: float
    drift: float
    r2: float
    noise: float
    correlation: float
    fitted: Array
    start: int
    max_theta: float

    @property
    def objection(self) -> str | None:
        """Why nothing should be built on it; None where nothing speaks against it."""
        # Short against tau K is uncertain, long against it K / tau is; a response is there where either is certain.
        model = self.model
        certain = any(v + SIGNIFICANT * se < 0 for v, se in ((model.gain, self.gain_se), (model.slope, self.slope_se)))
        if not certain:
            return f"lambda has no significant effect on S: K = {model.gain:.3g} +- {self.gain_se:.2g}"
        if not self.r2 >= EXPLAINED:
            return f"lambda explains only {max(self.r2, 0):.0%} of what S did (R^2; at least {EXPLAINED:.0%} is wanted)"
        return None

    @property
    def caution(self) -> str | None:
        """What makes it worth less than its standard errors say; None where nothing does."""
        if self.model.theta < self.max_theta - 1e-3:
            return None
        return (
            f"the dead time is the largest that was looked for, {self.max_theta:.3g} ticks, and its standard error "
            "means nothing there; a longer test would tell"
        )


def fit_fopdt(u: ArrayLike, y: ArrayLike, start: int = 0, max_theta: float = 12.0) -> Fit:
    """Fit an FOPDT model by least squares.

    The plant drifts (DataBPT falls and the adapter grows by itself), so the model of the output is

        y[k] = offset + drift ln(k + 1) + (G u)[k] + n[k],     n[k] = rho n[k-1] + white noise.

    Offset, drift and K enter linearly and are eliminated (variable projection: Golub and Pereyra, SIAM J. Numer. Anal.
    10, 1973), which leaves (ln tau, theta), searched from a grid. Gradient noise is integrated by the weights, so n is
    no white noise: both sides are filtered by 1 - rho z^-1 with rho from the residuals, in turns (Cochrane and Orcutt,
    J. Amer. Stat. Assoc. 44, 1949). Without that the standard errors come out several times too small. They are those
    of the linearised model, s^2 (J^T J)^-1.

    Args:
        u: (n,) ln lambda, set at each tick.
        y: (n,) ln S, measured at each tick before u was set; NaN where there was no measurement.
        start: the first tick whose y counts. What u did before that is heeded all the same.
        max_theta: largest dead time that is looked for, in ticks.

    Raises:
        ValueError: too few measurements, or u does not change.
    """
    record = _Record.of(u, y, start)
    max_theta = min(max_theta, record.span / 4)
    found = _search(record, max_theta)
    residual = record.residuals(found.fitted)
    return Fit(
        model=found.model,
        **_standard_errors(record, found, max_theta),
        offset=float(found.linear[1]),
        drift=float(found.linear[2]),
        r2=_explained(record, residual),
        noise=float(np.std(residual)),
        correlation=found.rho,
        fitted=found.fitted,
        start=start,
        max_theta=max_theta,
    )


@dataclass(frozen=True)
class _Record:
    """A step test, and what is linear about it once ln tau and theta, the ``dynamics``, are given.

    Attributes:
        inputs: (n,) ln lambda.
        outputs: (n,) ln S; 0 where there was no measurement.
        used: (n,) whether a tick was measured and counts.
        span: ticks from the first that counts.
    """

    inputs: Array
    outputs: Array
    used: NDArray[np.bool_]
    span: int

    @classmethod
    def of(cls, u: ArrayLike, y: ArrayLike, start: int) -> "_Record":
        """Raises ValueError where nothing can be learned of it."""
        inputs, outputs = np.asarray(u, dtype=np.float64), np.asarray(y, dtype=np.float64)
        require(inputs.shape == outputs.shape and inputs.ndim == 1, "u and y must be sequences of one length")
        measured = np.isfinite(outputs)
        used = measured & (np.arange(len(outputs)) >= start)
        require(int(used.sum()) >= 12, f"only {int(used.sum())} measurements to fit to; 12 is the least")
        require(float(np.ptp(inputs[start:])) > 0, "lambda never changed, so nothing can be learned of what it does")
        return cls(inputs, np.where(measured, outputs, 0.0), used, len(inputs) - start)

    @property
    def nuisance(self) -> Array:
        """(n, 2) what offset and drift multiply."""
        return np.stack([np.ones(len(self.inputs)), np.log(np.arange(len(self.inputs)) + 1.0)], axis=1)

    def design(self, dynamics: Array) -> Array:
        """(n, 3) what K, offset and drift multiply."""
        unit = Fopdt(1.0, math.exp(dynamics[0]), float(dynamics[1]))
        return np.column_stack([respond(unit, self.inputs), self.nuisance])

    def whiten(self, columns: Array, rho: float) -> Array:
        """(used, ...) of (n, ...): less rho times the tick before, where that was measured; the first of a gap is
        scaled instead, as Prais and Winsten do."""
        before = np.zeros_like(columns)
        before[1:] = columns[:-1]
        follows = self.used & np.concatenate([[False], self.used[:-1]])
        shaped = follows.reshape(-1, *[1] * (columns.ndim - 1))
        filtered: Array = np.where(shaped, columns - rho * before, math.sqrt(1 - rho * rho) * columns)[self.used]
        return filtered

    def regress(self, dynamics: Array, rho: float) -> tuple[Array, Array]:
        """(3,) the best K, offset and drift, and (used,) the whitened residuals."""
        left, right = self.whiten(self.design(dynamics), rho), self.whiten(self.outputs, rho)
        coefficients = np.linalg.lstsq(left, right, rcond=None)[0]
        residuals: Array = right - left @ coefficients
        return np.asarray(coefficients, dtype=np.float64), residuals

    def residuals(self, fitted: Array) -> Array:
        """(used,) measured minus fitted ln S."""
        return (self.outputs - fitted)[self.used]


class _Found(NamedTuple):
    """Where the search ended.

    Attributes:
        linear: (3,) K, offset and drift.
        dynamics: (2,) ln tau and theta.
        fitted: (n,) ln S by them.
        rho: correlation of one residual with the next.
    """

    linear: Array
    dynamics: Array
    fitted: Array
    rho: float

    @property
    def model(self) -> Fopdt:
        return Fopdt(float(self.linear[0]), math.exp(self.dynamics[0]), float(self.dynamics[1]))


def _search(record: _Record, max_theta: float) -> _Found:
    """Least squares from the best point of a grid, and rho from its residuals, in turns."""
    bounds = np.array([math.log(0.1), 0.0]), np.array([math.log(3 * record.span), max_theta])
    taus, thetas = np.linspace(0.0, math.log(record.span), 6), np.linspace(0, max_theta, 7)
    grid = [np.array([log_tau, theta]) for log_tau in taus for theta in thetas]
    best, rho = grid[0], 0.0
    for _ in range(4):
        candidates = grid if rho == 0.0 else [*grid, best]
        costs = [float(np.sum(record.regress(dynamics, rho)[1] ** 2)) for dynamics in candidates]
        start = np.clip(candidates[int(np.argmin(costs))], bounds[0] + 1e-6, bounds[1] - 1e-6)
        best = least_squares(lambda dynamics, rho=rho: record.regress(dynamics, rho)[1], start, bounds=bounds).x
        linear = record.regress(best, rho)[0]
        fitted = record.design(best) @ linear
        residual = record.residuals(fitted)
        size = max(float(residual @ residual), 1e-300)
        rho = min(max(float(residual[1:] @ residual[:-1]) / size, 0.0), 0.98)
    return _Found(linear, best, fitted, rho)


def _standard_errors(record: _Record, found: _Found, max_theta: float) -> dict[str, float]:
    """By their names in ``Fit``: those of the model linearised in (K, offset, drift, ln tau, theta), from its whitened
    residuals."""
    model, rho = found.model, found.rho
    white = record.regress(found.dynamics, rho)[1]
    degrees = max(int(record.used.sum()) - 5, 1)

    def predicted(parameters: Array) -> Array:
        return record.whiten(record.design(parameters[3:]) @ parameters[:3], rho)

    jacobian = _jacobian(predicted, np.array([*found.linear, *found.dynamics]), max_theta)
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float(white @ white) / degrees
    gain_se, _, _, log_tau_se, theta_se = np.sqrt(np.diag(covariance))
    # K / tau = K e^(-ln tau): to first order its variance follows from the 2 x 2 block of (K, ln tau).
    direction = np.array([1 / model.tau, -model.slope])
    slope_variance = float(direction @ covariance[np.ix_([0, 3], [0, 3])] @ direction)
    errors = {"gain_se": gain_se, "tau_se": model.tau * log_tau_se, "theta_se": theta_se}
    return {**{name: float(se) for name, se in errors.items()}, "slope_se": math.sqrt(max(slope_variance, 0.0))}


def _jacobian(function: Callable[[Array], Array], at: Array, max_theta: float) -> Array:
    """(values, parameters) by differences: central ones, and one-sided where theta meets a bound."""
    columns = []
    for i in range(len(at)):
        h = 1e-4 * max(1.0, abs(float(at[i])))
        low, high = at.copy(), at.copy()
        low[i], high[i] = at[i] - h, at[i] + h
        if i == len(at) - 1:
            low[i], high[i] = max(low[i], 0.0), min(high[i], max_theta)
        columns.append((function(high) - function(low)) / (high[i] - low[i]))
    return np.stack(columns, axis=1)


def _explained(record: _Record, residual: Array) -> float:
    """R^2 against offset and drift alone; 0 where these leave nothing to explain."""
    nuisance, outputs = record.nuisance[record.used], record.outputs[record.used]
    without = nuisance @ np.linalg.lstsq(nuisance, outputs, rcond=None)[0]
    around = float(np.sum((outputs - without) ** 2))
    return 1 - float(residual @ residual) / around if around > 0 else 0.0
