"""From a recorded step test to a model of the plant, and how far to trust it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from granite_scu.control.base import require
from granite_scu.control.plant import Array, Fopdt, respond

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
    inputs, outputs = np.asarray(u, dtype=np.float64), np.asarray(y, dtype=np.float64)
    require(inputs.shape == outputs.shape and inputs.ndim == 1, "u and y must be sequences of one length")
    used = np.isfinite(outputs) & (np.arange(len(outputs)) >= start)
    require(int(used.sum()) >= 12, f"only {int(used.sum())} measurements to fit to; 12 is the least")
    require(float(np.ptp(inputs[start:])) > 0, "lambda never changed, so nothing can be learned of what it does")
    max_theta = min(max_theta, (len(inputs) - start) / 4)
    span = float(len(inputs) - start)
    nuisance = np.stack([np.ones(len(inputs)), np.log(np.arange(len(inputs)) + 1.0)], axis=1)

    def whiten(columns: Array, rho: float) -> Array:
        """Rows where this tick and the one before it were measured; the first of a gap scaled, as Prais and Winsten."""
        before = np.zeros_like(columns)
        before[1:] = columns[:-1]
        follows = used & np.concatenate([[False], used[:-1]])
        shaped = follows.reshape(-1, *[1] * (columns.ndim - 1))
        filtered: Array = np.where(shaped, columns - rho * before, math.sqrt(1 - rho * rho) * columns)[used]
        return filtered

    def design(model: Fopdt) -> Array:
        return np.column_stack([respond(replace(model, gain=1.0), inputs), nuisance])

    clean = np.where(np.isfinite(outputs), outputs, 0.0)

    def linear(parameters: Sequence[float] | Array, rho: float) -> tuple[Array, Array]:
        """The best (K, offset, drift) and the whitened residuals."""
        columns = design(Fopdt(1.0, math.exp(parameters[0]), float(parameters[1])))
        left, right = whiten(columns, rho), whiten(clean, rho)
        coefficients = np.linalg.lstsq(left, right, rcond=None)[0]
        residuals: Array = right - left @ coefficients
        return np.asarray(coefficients, dtype=np.float64), residuals

    bounds = (np.array([math.log(0.1), 0.0]), np.array([math.log(3 * span), max_theta]))
    starts = [
        (log_tau, theta) for log_tau in np.linspace(0.0, math.log(span), 6) for theta in np.linspace(0, max_theta, 7)
    ]
    rho, best = 0.0, np.array(starts[0])
    for _ in range(4):
        candidates = starts if rho == 0.0 else [*starts, tuple(best)]
        costs = [float(np.sum(linear(p, rho)[1] ** 2)) for p in candidates]
        at = candidates[int(np.argmin(costs))]
        inside = np.clip(at, bounds[0] + 1e-6, bounds[1] - 1e-6)
        best = least_squares(lambda p, rho: linear(p, rho)[1], inside, bounds=bounds, args=(rho,)).x
        coefficients = linear(best, rho)[0]
        model = Fopdt(float(coefficients[0]), math.exp(best[0]), float(best[1]))
        fitted = design(model) @ coefficients
        residual = (outputs - fitted)[used]
        size = max(float(residual @ residual), 1e-300)
        rho = min(max(float(residual[1:] @ residual[:-1]) / size, 0.0), 0.98)

    white = linear(best, rho)[1]
    degrees = max(int(used.sum()) - 5, 1)
    parameters = np.array([*coefficients, *best])

    def predicted(p: Array) -> Array:
        return whiten(design(Fopdt(1.0, math.exp(p[3]), float(p[4]))) @ p[:3], rho)

    jacobian = _jacobian(predicted, parameters, bounds[1][1])
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float(white @ white) / degrees
    gain_se, _, _, log_tau_se, theta_se = np.sqrt(np.diag(covariance))
    # K / tau = K e^(-ln tau): to first order its variance follows from the 2 x 2 block of (K, ln tau).
    direction = np.array([1 / model.tau, -model.slope])
    slope_se = math.sqrt(max(float(direction @ covariance[np.ix_([0, 3], [0, 3])] @ direction), 0.0))
    without = nuisance[used] @ np.linalg.lstsq(nuisance[used], outputs[used], rcond=None)[0]
    around = float(np.sum((outputs[used] - without) ** 2))
    return Fit(
        model,
        float(gain_se),
        float(model.tau * log_tau_se),
        float(theta_se),
        slope_se,
        float(coefficients[1]),
        float(coefficients[2]),
        1 - float(residual @ residual) / around if around > 0 else 0.0,
        float(np.std(residual)),
        rho,
        fitted,
        start,
    )


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
