"""From a recorded step test to a model of the plant, and how far to trust it."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from granite_scu.control.laws.base import require
from research.identification.fopdt import Array, Fopdt, respond

SIGNIFICANT = 2.0
"""Standard errors that the gain must lie below zero."""
EXPLAINED = 0.5
"""R^2 from which on a fit is believed."""


@dataclass(frozen=True)
class Fit:
    """A fitted model and how far to trust it.

    Attributes:
        model: the estimate.
        standard_errors: of its gain, tau, theta and slope, K / tau, which is often far better known than either.
        offset, drift: of the nuisance offset + drift ln(tick + 1).
        r2: share of the variance around the fitted drift alone that lambda explains, 1 at best.
        noise: standard deviation of the residuals, in ln S.
        correlation: of one residual with the next.
        fitted: (n,) the model's output at each tick, nuisance included; the ticks before ``start`` too.
        start: first tick that counted.
        max_theta: the largest dead time that was looked for, in ticks.
    """

    model: Fopdt
    standard_errors: dict[str, float]
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
        gain, errors = self.model.gain, self.standard_errors
        if not (gain + SIGNIFICANT * errors["gain"] < 0 or self.model.slope + SIGNIFICANT * errors["slope"] < 0):
            return f"lambda has no significant effect on S: K = {gain:.3g} +- {errors['gain']:.2g}"
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

    The plant drifts (DataBPT falls and the adapter grows without lambda), so the model of the output is

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
    record = _Record(u, y, start)
    max_theta = min(max_theta, record.span / 4)
    linear, dynamics, rho = _search(record, max_theta)
    model = Fopdt(float(linear[0]), math.exp(dynamics[0]), float(dynamics[1]))
    fitted = record.design(dynamics) @ linear
    residual = record.residuals(fitted)
    drift = record.nuisance[record.used]  # R^2 is against offset and drift alone
    around = float(np.sum((record.measured - drift @ np.linalg.lstsq(drift, record.measured, rcond=None)[0]) ** 2))
    return Fit(
        model=model,
        standard_errors=_standard_errors(record, model, np.array([*linear, *dynamics]), rho, max_theta),
        offset=float(linear[1]),
        drift=float(linear[2]),
        r2=1 - float(residual @ residual) / around if around > 0 else 0.0,
        noise=float(np.std(residual)),
        correlation=rho,
        fitted=fitted,
        start=start,
        max_theta=max_theta,
    )


class _Record:
    """A step test, and what is linear about it once ln tau and theta, the ``dynamics``, are given.

    Attributes:
        inputs: (n,) ln lambda.
        outputs: (n,) ln S; 0 where there was no measurement.
        used: (n,) whether a tick was measured and counts.
        measured: (used,) ln S of these ticks.
        nuisance: (n, 2) what offset and drift multiply.
        span: ticks from the first that counts.

    Raises:
        ValueError: nothing can be learned of it.
    """

    def __init__(self, u: ArrayLike, y: ArrayLike, start: int) -> None:
        self.inputs, outputs = np.asarray(u, dtype=np.float64), np.asarray(y, dtype=np.float64)
        require(self.inputs.shape == outputs.shape and outputs.ndim == 1, "u and y must be sequences of one length")
        ticks = np.arange(len(outputs))
        self.used = np.isfinite(outputs) & (ticks >= start)
        self.outputs, self.measured = np.where(np.isfinite(outputs), outputs, 0.0), outputs[self.used]
        require(len(self.measured) >= 12, f"only {len(self.measured)} measurements to fit to; 12 is the least")
        require(np.ptp(self.inputs[start:]) > 0, "lambda never changed, so nothing can be learned of what it does")
        self.nuisance = np.stack([np.ones(len(ticks)), np.log(ticks + 1.0)], axis=1)
        self.span = len(ticks) - start

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
        return np.where(shaped, columns - rho * before, math.sqrt(1 - rho * rho) * columns)[self.used]

    def regress(self, dynamics: Array, rho: float) -> tuple[Array, Array]:
        """(3,) the best K, offset and drift, and (used,) the whitened residuals."""
        left, right = self.whiten(self.design(dynamics), rho), self.whiten(self.outputs, rho)
        coefficients = np.linalg.lstsq(left, right, rcond=None)[0]
        return coefficients, right - left @ coefficients

    def residuals(self, fitted: Array) -> Array:
        """(used,) measured minus fitted ln S."""
        return self.measured - fitted[self.used]


def _search(record: _Record, max_theta: float) -> tuple[Array, Array, float]:
    """(3,) K, offset and drift, (2,) ln tau and theta, and rho: least squares from the best point of a grid, and rho
    from its residuals, in turns."""
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
        residual = record.residuals(record.design(best) @ linear)
        size = max(float(residual @ residual), 1e-300)
        rho = min(max(float(residual[1:] @ residual[:-1]) / size, 0.0), 0.98)
    return linear, best, rho


def _standard_errors(record: _Record, model: Fopdt, at: Array, rho: float, max_theta: float) -> dict[str, float]:
    """Of gain, tau, theta and slope: those of the model linearised in (K, offset, drift, ln tau, theta), (5,) ``at``
    the estimate, from its whitened residuals."""

    def residuals(parameters: Array) -> Array:
        return record.whiten(record.outputs - record.design(parameters[3:]) @ parameters[:3], rho)

    # One evaluation moves nothing and gives the Jacobian, by differences that keep within the bounds of theta.
    bounds = [*[-math.inf] * 4, 0.0], [*[math.inf] * 4, max_theta]
    found = least_squares(residuals, at, jac="3-point", bounds=bounds, max_nfev=1)
    covariance = np.linalg.pinv(found.jac.T @ found.jac) * 2 * found.cost / max(len(record.measured) - 5, 1)
    gain, _, _, log_tau, theta = map(float, np.sqrt(np.diag(covariance)))
    # K / tau = K e^(-ln tau): to first order its variance follows from the 2 x 2 block of (K, ln tau).
    direction = np.array([1 / model.tau, -model.slope])
    slope = math.sqrt(max(float(direction @ covariance[np.ix_([0, 3], [0, 3])] @ direction), 0.0))
    return {"gain": gain, "tau": model.tau * log_tau, "theta": theta, "slope": slope}
