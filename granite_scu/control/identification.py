"""From a recorded step test to a model of the plant, from the model to gains, and from both to margins.

The plant is what lambda does to S: u = ln lambda goes in, y = ln S comes out, time counts in ticks. This is the one
file of ``control`` that needs numpy, scipy and python-control, and the package does not import it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import control as ct
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from granite_scu.control.base import Controller, Measurement, Output, require
from granite_scu.control.original import Original

Array = NDArray[np.float64]

SIGNIFICANT = 2.0
"""Standard errors that the gain must lie below zero."""
EXPLAINED = 0.5
"""R^2 from which on a fit is believed."""


# Model


@dataclass(frozen=True)
class Fopdt:
    """First order plus dead time: G(s) = K e^(-theta s) / (tau s + 1).

    Attributes:
        gain: K, change of ln S per change of ln lambda once all has settled; negative for our plant.
        tau: time constant, in ticks.
        theta: dead time, in ticks; it comes on top of the tick that lies between an output and the next measurement.
    """

    gain: float
    tau: float
    theta: float = 0.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.gain), f"gain {self.gain}: must be finite")
        require(0 < self.tau < math.inf, f"tau {self.tau}: must be positive and finite")
        require(0 <= self.theta < math.inf, f"theta {self.theta}: must be finite and not negative")

    @property
    def slope(self) -> float:
        """K / tau, change of ln S per tick right after a unit step: all that matters to a loop much faster than tau."""
        return self.gain / self.tau


def sampled(model: Fopdt) -> tuple[float, float, float, int]:
    """(a, b0, b1, d) of the model under an input that holds between ticks; exact.

    y[k+1] = a y[k] + b0 u[k-d] + b1 u[k-d-1] with d = floor(theta), f = theta - d, a = e^(-1/tau),
    b0 = K (1 - e^(-(1-f)/tau)) and b1 = K (e^(-(1-f)/tau) - a): for the first f of a tick the older input acts.
    Åström and Wittenmark, "Computer-Controlled Systems" (1997), section 2.3.
    """
    whole = math.floor(model.theta)
    pole = math.exp(-1 / model.tau)
    late = math.exp(-(1 - (model.theta - whole)) / model.tau)
    return pole, model.gain * (1 - late), model.gain * (late - pole), whole


def respond(model: Fopdt, u: ArrayLike) -> Array:
    """(n,) the plant's output at each tick for inputs set at each tick, (n,), from the rest that u[0] keeps."""
    inputs = np.asarray(u, dtype=np.float64)
    a, b0, b1, d = sampled(model)
    padded = np.concatenate([np.full(d + 1, inputs[0]), inputs])
    driven = b0 * padded[1 : len(inputs) + 1] + b1 * padded[: len(inputs)]  # what acts on the tick after k
    y = np.empty(len(inputs))
    y[0] = model.gain * inputs[0]
    for k in range(len(inputs) - 1):
        y[k + 1] = a * y[k] + driven[k]
    return y


# Fit


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


# Gains


@dataclass(frozen=True)
class Gains:
    """What SIMC proposes.

    Attributes:
        kp: change of ln lambda per unit of ln(S / S*); positive, the plant's negative gain is in the sign of the error.
        tau_i: integral time, in ticks.
        tau_c: closed-loop time constant that they were made for, in ticks.
    """

    kp: float
    tau_i: float
    tau_c: float

    @property
    def ki(self) -> float:
        """Integral gain per tick: kp / tau_i."""
        return self.kp / self.tau_i


def simc(model: Fopdt, tau_c: float | None = None) -> Gains:
    """Gains by the SIMC rules of Skogestad, "Simple analytic rules for model reduction and PID controller tuning"
    (J. Process Control 13, 2003), equations 23 and 24:

        Kc = (1 / |K|) tau / (tau_c + theta)        tau_I = min(tau, 4 (tau_c + theta))        Ki = Kc / tau_I

    tau_c is the one thing to choose. The paper recommends tau_c = theta: a gain margin near 3 and a delay margin near
    2 theta. Half a tick is the least taken by default, since nothing in a sampled loop is faster than that.

    >>> gains = simc(Fopdt(gain=-1.0, tau=8.0, theta=1.0))
    >>> gains.kp, gains.tau_i, gains.ki
    (4.0, 8.0, 0.5)

    Raises:
        ValueError: the gain is 0, or tau_c + theta is.
    """
    require(model.gain != 0, "gain 0: the input does nothing, so no gains can be found")
    closed = max(model.theta, 0.5) if tau_c is None else tau_c
    lag = closed + model.theta
    require(0 < lag < math.inf, f"tau_c {closed}: tau_c + theta must be positive and finite")
    return Gains(model.tau / (abs(model.gain) * lag), min(model.tau, 4 * lag), closed)


def effective(model: Fopdt) -> Fopdt:
    """The model as the law sees it: half a tick of dead time more for the hold."""
    return replace(model, theta=model.theta + 0.5)


# Margins and response


@dataclass(frozen=True)
class Margins:
    """How far a loop is from instability. None: infinite.

    Attributes:
        stable: whether the closed loop is; the other values say little where it is not.
        gain: factor by which the plant's gain may grow.
        phase: in degrees.
        delay: dead time that may come on top, in ticks.
        crossover: frequency of the smallest phase margin, in radians per tick.
    """

    stable: bool
    gain: float | None
    phase: float | None
    delay: float | None
    crossover: float | None


def loop(model: Fopdt, kp: float, ki: float) -> ct.TransferFunction:
    """The open loop L(z), one tick a sample: minus the sampled plant, times Kp + Ki / (z - 1). Limits are left out.

    No filter is in it: the law smooths DataBPT alone, which lambda hardly moves.
    """
    a, b0, b1, d = sampled(model)
    plant = ct.TransferFunction([-b0, -b1], [1, -a, *[0] * (d + 1)], 1)  # (b0 z + b1) / (z^(d+1) (z - a))
    law = ct.TransferFunction([kp, ki - kp], [1, -1], 1)
    return plant * law


def margins(model: Fopdt, kp: float, ki: float) -> Margins:
    """Gain, phase and delay margin of the loop, exact for the sampled loop. See ``loop``.

    The gain margin is the factor upwards; the smallest of several crossings counts.
    """
    opened = loop(model, kp, ki)
    gains, phases, at = _crossings(opened)
    poles = ct.feedback(opened, 1).poles()
    upward = [value for value in gains if 1 < value < math.inf]
    crossings = [
        (float(value), float(w)) for value, w in zip(phases, at, strict=True) if math.isfinite(value) and w > 0
    ]
    phase, crossover = min(crossings, key=lambda pair: abs(pair[0])) if crossings else (None, None)
    delays = [math.radians(value % 360) / w for value, w in crossings]
    return Margins(
        stable=bool(np.all(np.abs(poles) < 1)),
        gain=min(upward, default=None),
        phase=phase,
        delay=min(delays, default=None),
        crossover=crossover,
    )


def stability_limit(law: Original, tau: float, theta: float = 0.0) -> float:
    """The |dS / d ln lambda| beyond which the loop of the published law about S* is unstable.

    That of the linear loop: small swings, but outside the deadband, in which lambda does not move at all; bounds and
    ``integral_limit`` are not met. With a plant of first order and dead time, S falling by g in all for a unit of
    ln lambda, sampled at the ticks as in ``sampled``, the open loop is

        L(z) = g (b0 z + b1) / (z^(d+1) (z - a)) . alpha z / (z - 1 + alpha) . z / (z - 1) . (Kp + Ki z / (z - leak))

    It is stable for a small g, and up to the first at which L(e^iw) = -1 for some w.

    At the published gains, for plants that answer within the tick, with the lag and dead time that ``identify`` found
    on the embedded model at S* = 2 % (in ticks of four steps), and with ten ticks of lag:

    >>> [round(stability_limit(Original(), tau, theta), 4) for tau, theta in ((0.01, 0.0), (3.5, 0.55), (10.0, 0.55))]
    [0.0095, 0.0046, 0.0025]

    Args:
        law: of which the gains, the filter and the leak count.
        tau: time constant of the plant, in ticks.
        theta: its dead time, in ticks.

    Raises:
        ValueError: without a leak there are two integrators, and no gain that is small enough.
    """
    require(law.leak < 1, f"leak {law.leak}: must be below 1 for the loop to have a limit")
    z = ct.tf("z")
    a, b0, b1, d = sampled(Fopdt(1.0, tau, theta))
    plant = (b0 * z + b1) / (z ** (d + 1) * (z - a))
    smoothing = law.ema_alpha * z / (z - 1 + law.ema_alpha)
    opened = plant * smoothing * z / (z - 1) * (law.kp + law.ki * z / (z - law.leak))
    return min(value for value in _crossings(opened)[0] if 0 < value < math.inf)


def _crossings(opened: ct.TransferFunction) -> tuple[list[float], Array, Array]:
    """Factors at which a sampled open loop passes through -1, phases in degrees, and radians per tick of the latter."""
    # On samples of the frequency response: the search among polynomial roots loses crossings, dead time being that many
    # poles at the origin.
    response = ct.frd(opened, np.geomspace(1e-4, math.pi, 1500), smooth=True)
    gains, phases, _, _, at, _ = ct.stability_margins(response, returnall=True)
    # A sampled loop may also turn over at the Nyquist frequency itself, where L is real; a root search misses the end.
    nyquist = float(np.real(opened(-1.0)))
    return [float(value) for value in gains] + ([-1 / nyquist] if nyquist < 0 else []), phases, at


@dataclass(frozen=True)
class Step:
    """A closed loop's answer to a step of the setpoint, in shares of the step.

    Attributes:
        response: (n,) from the tick of the step on; 0 before it, 1 at the new setpoint.
        rise: first tick at 90 % of the step; None where it never gets there.
        overshoot: peak minus 1, not negative.
        settling: first tick from which it stays within ``band``; None where it is not inside at the end.
    """

    response: Array
    rise: int | None
    overshoot: float
    settling: int | None


def describe_step(response: ArrayLike, band: float = 0.1) -> Step:
    """Rise, overshoot and settling of a response given in shares of the step; ``band`` is one too."""
    values = np.asarray(response, dtype=np.float64)
    risen = np.flatnonzero(values >= 0.9)
    outside = np.flatnonzero(~(np.abs(values - 1) <= band))
    settling = int(outside[-1]) + 1 if outside.size else 0
    return Step(
        response=values,
        rise=int(risen[0]) if risen.size else None,
        overshoot=max(float(np.nanmax(values)) - 1, 0.0),
        settling=settling if settling < len(values) else None,
    )


def step_response(model: Fopdt, kp: float, ki: float, ticks: int = 60, band: float = 0.1) -> Step:
    """Answer of the linear closed loop, in ln S, to a unit step of ln S*: python-control's, tick by tick."""
    _, response = ct.step_response(ct.feedback(loop(model, kp, ki), 1), T=np.arange(ticks))
    return describe_step(np.asarray(response), band)


class Plant:
    """The model as something to steer: give it ln lambda, take ln S a tick later. Mutable, for simulations.

    Args:
        model: how it responds.
        at: (ln lambda, ln S) of the rest from which it starts.
    """

    def __init__(self, model: Fopdt, at: tuple[float, float]) -> None:
        self.a, self.b0, self.b1, d = sampled(model)
        self.at = at
        self.past = [0.0] * (d + 2)  # inputs, newest first
        self.y = 0.0

    def tick(self, log_strength: float) -> float:
        """ln S a tick after lambda was set."""
        self.past = [log_strength - self.at[0], *self.past[:-1]]
        self.y = self.a * self.y + self.b0 * self.past[-2] + self.b1 * self.past[-1]
        return self.at[1] + self.y


def simulate(
    controller: Controller[Any], model: Fopdt, ticks: int, at: tuple[float, float], noise: ArrayLike | None = None
) -> tuple[Array, Array, list[Output]]:
    """Run a controller, as it is and with all its limits, on a simulated plant.

    Args:
        controller: the law.
        model: the plant.
        ticks: how long.
        at: (ln lambda, ln S) of the rest from which the plant starts.
        noise: (ticks,) added to each measured ln S.

    Returns:
        (ticks,) ln S as it was without the noise, (ticks,) ln lambda, and the controller's outputs.
    """
    plant, state, y = Plant(model, at), controller.init(), at[1]
    added = np.zeros(ticks) if noise is None else np.asarray(noise, dtype=np.float64)
    log_s, log_strength, outputs = [], [], []
    for k in range(ticks):
        # A huge step of an unstable loop may leave what S can be; the plant saturates there as the real S does.
        s = min(math.exp(max(y + float(added[k]), -700.0)), 0.999) if math.isfinite(added[k]) else math.nan
        measured = Measurement(s=s, data_bpt=1.0, param_bpt=s / (1 - s), travel=float(k + 1))
        state, output = controller.update(state, measured)
        log_s.append(y)
        log_strength.append(math.log(output.reg_strength))
        outputs.append(output)
        y = plant.tick(log_strength[-1])
    return np.array(log_s), np.array(log_strength), outputs
