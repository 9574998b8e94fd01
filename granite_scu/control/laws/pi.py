"""Proportional-integral control of S through ln lambda, its gains scheduled by the adapter's own speed."""

import math
from dataclasses import dataclass, replace

from granite_scu.control.laws.base import Measurement, Output, bounded_exp, check, clip, require
from granite_scu.control.laws.filter import Ema

MARGINAL_SAVING = 0.08
"""Lambda at which a free setpoint of odds 1 (S* = 50 %) was held on the embedded model; notes/log.md."""

WARMING = 1.05
"""Ratio of what a tick moves the adapter by to what the tick before did, beyond which the learning rate warms up."""

USABLE = (1e-100, 1e100)
"""Bits per token that the law computes with. Beyond, a quotient of two would overflow or vanish; no run has such."""

TINY = 1e-12
"""Travel below which the learning rate counts as gone; keeps the lag finite."""


@dataclass(frozen=True)
class PIState:
    """What one tick leaves to the next.

    Attributes:
        ema: filter of ln S, for the log.
        data: filter of ln DataBPT, for the law.
        position: ln(ParamBPT / filtered DataBPT), which is controlled; None before the first valid tick.
        slope: its smoothed change per tick.
        growth: ParamBPT at the first valid tick over the square of lr_sum up to that tick.
        lr_sum: at the last valid tick.
        pace: by how much that had grown since the valid tick before it.
        integral: the integral term that the next tick starts from, in ln lambda.
        bias: what is left of the bumpless start, in ln lambda.
        output: the last output that was not held; a tick without a valid measurement repeats it.
    """

    ema: Ema
    data: Ema
    position: float | None
    slope: float
    growth: float
    lr_sum: float
    pace: float
    integral: float
    bias: float
    output: Output


# PI laws come in two forms. The position form, taken here, keeps the integral and computes the whole output from it.
# The velocity form, x_k = clip(x_{k-1} + Kp (e_k - e_{k-1}) + Ki e_k), keeps only the output and needs no anti-windup,
# but it is another law at a bound: it drops the proportional increments that point outward and keeps those that point
# inward, so noise in e rectifies and walks lambda off a bound on which it should rest.
@dataclass(frozen=True)
class PI:
    """Holds S at the setpoint. Each tick k:

        y_k     = ln(P_k / D_k)        P ParamBPT, exact;  D = exp EMA(ln DataBPT)
        e_k     = clip(y_k - ln(S* / (1 - S*)), +- e_max)
        x_k     = clip(F + I_k + Kp_k e_k, ln lambda_min, ln lambda_max),    lambda_k = exp(x_k)
        I_{k+1} = I_k + Ki_k e_k,    I_0 = 0

    The plant's gain is negative (more lambda, less S), so an S above the setpoint raises lambda. Errors are relative,
    so the same settings serve any setpoint, and of odds: y is the logit of S, in which the plant's gain is the same at
    all setpoints, while in ln S it fades as 1 - S. Around the law:

    - Measurement: all noise of S is in DataBPT, for ParamBPT is known exactly. Only DataBPT is filtered, and the loop
      does not wait for the filter.
    - Gain schedule: the plant's lag tau is about the time that Adam needs to carry the adapter to the norm that S*
      implies, which runs from one tick (small S*, high learning rate) to a hundred. ParamBPT starts as the square of
      lr_sum (the summed learning rates), P = g lr_sum^2, so the first tick tells g, and
      tau_k = sqrt(P* / g) / (lr_sum_k - lr_sum_{k-1}) with P* = D S*/(1 - S*), in ticks; it grows as the learning rate
      decays. Kp = min(stiffness tau, kp_limit), Ki = Kp / min(tau, integral_time): Skogestad's SIMC rules for a gain
      near -1. A gain that is given is taken as it is, at every tick; a Kp that is given alone has Ki = Kp / min(tau,
      integral_time) still, with a tau of one tick at least: nothing is learnt in less.
    - Feed-forward: F = ln lambda_init, by default of 0.08 (S*/(1 - S*))^(-2/3), which is where the benchmark's cells
      come to rest within a factor of three: what an adapter saves grows about as the cube root of what it costs. It is
      a function of S*, so a change of S* moves lambda at once.
    - Bumpless start: a bias -Kp e_0, quartered each tick, leaves lambda at the first valid tick where it was.
    - Conditional integration: at a bound, I keeps still while Ki e_k points outward, and so cannot wind up. It keeps
      still too while S rises from 0, which is the plant's doing, and lambda should learn nothing from it: while S is
      below S* at the first tick and at those of a warm-up, where lr_sum grows by 5 % more than in the tick before; and
      while S is more than e_max below S* and on its way up, e_max or more within tau. In a warm-up S falls behind what
      tau says of it, and an integral that answers has to be unlearned: an overshoot. (Of a long one the first 20 ticks
      count. It also grows by more over a held tick, so that the one after it is passed over too. Of the measure
      ``factors``, which begins above 0, the first tick costs it a tick.)
    - Lead: the error may be that of some ticks ahead, which makes it a PID law. A plant that rises past S* before
      lambda shows in it asks for that: lambda rises in time, and I does not fall on the way. S does not, drift does.
    - Deadband: a small error leaves I alone; the proportional term still acts.
    - Hold: without a valid measurement nothing moves, neither filter nor integral nor output.

    Source: Åström and Hägglund, "PID Controllers: Theory, Design, and Tuning" (1995), chapter 3, for the form,
    bumpless transfer, gain scheduling and conditional integration; Skogestad, "Simple analytic rules for model
    reduction and PID controller tuning", J. Process Control 13 (2003).

    >>> law = PI(setpoint=0.02, kp=2.0, ki=0.3, lambda_init=0.5)
    >>> state, output = law.update(law.init(), Measurement(s=0.04, data_bpt=2.4, param_bpt=0.1))
    >>> state, output = law.update(state, Measurement(s=0.04, data_bpt=2.4, param_bpt=0.1))
    >>> round(output.error, 4), round(output.lam, 4)  # the odds are 2.04 times those of S*
    (0.6931, 1.8069)

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        kp: proportional gain, change of ln lambda per unit of error in the logit of S; None schedules it.
        ki: integral gain, the same per tick; None schedules it.
        ema_alpha: weight of the newest ln S in the filter that is logged, in (0, 1]; 1 does not smooth.
        data_alpha: weight of the newest ln DataBPT in the filter that the law acts on, in (0, 1].
        deadband: errors |ln(S / S*)| below this are not integrated.
        error_limit: e_max, the largest error that is acted upon, in the logit of S.
        stiffness: scheduled Kp per tick of tau.
        kp_limit: the largest scheduled Kp.
        integral_time: the largest scheduled Kp / Ki, in ticks.
        lead: ticks that the error looks ahead, by the smoothed change of the logit of S per tick.
        lambda_init: lambda before the first valid tick, and the feed-forward; None takes that of S*.
        lambda_min: lower bound of lambda, above 0.
        lambda_max: upper bound of lambda.
    """

    setpoint: float
    kp: float | None = None
    ki: float | None = None
    ema_alpha: float = 0.5
    data_alpha: float = 0.25
    deadband: float = 0.0
    error_limit: float = 0.75
    stiffness: float = 0.5
    kp_limit: float = 8.0
    integral_time: float = 10.0
    lead: float = 0.0
    lambda_init: float | None = None
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        check(self, "error_limit", "stiffness", "kp_limit", "integral_time")
        # A gain of 0 switches a term off: useful in code, refused by the flags.
        for name, gain in (("kp", self.kp), ("ki", self.ki), ("lead", self.lead)):
            require(gain is None or 0 <= gain < math.inf, f"{name} {gain}: must be finite and not negative")

    @property
    def feed_forward(self) -> float:
        """The lambda that the law expects to hold S*, wherever the bounds are."""
        if self.lambda_init is not None:
            return self.lambda_init
        return float(MARGINAL_SAVING * (self.setpoint / (1 - self.setpoint)) ** (-2 / 3))

    @property
    def lambda_start(self) -> float:
        return clip(self.feed_forward, self.lambda_min, self.lambda_max)

    def init(self) -> PIState:
        return PIState(Ema(), Ema(), None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, Output(self.lambda_start))

    def update(self, state: PIState, measurement: Measurement) -> tuple[PIState, Output]:
        log_s = measurement.log_s
        usable = all(USABLE[0] <= bpt <= USABLE[1] for bpt in (measurement.data_bpt, measurement.param_bpt))
        if log_s is None or not usable:
            return state, replace(state.output, held=True)
        first, pace = state.position is None, state.pace
        state, lag = self._observe(state, measurement, log_s)

        # Error.
        assert state.position is not None
        offset = state.position - math.log(self.setpoint / (1 - self.setpoint))
        error = clip(offset + self.lead * state.slope, -self.error_limit, self.error_limit)

        # Proportional and integral.
        kp, ki = self.gains(lag)
        p_term = kp * error
        bias = -p_term if first else state.bias
        level = math.log(self.lambda_start) + state.integral
        # The two cancel at first, to the bit, so that a start at a bound is at it on every processor.
        wanted = level + (bias + p_term)
        in_deadband = abs(state.ema.mean - math.log(self.setpoint)) < self.deadband
        warming = first or state.pace > WARMING * pace
        rising = offset <= -self.error_limit and state.slope * lag > self.error_limit
        change = 0.0 if in_deadband or rising or (warming and offset < 0) else ki * error

        # Bound.
        low, high = math.log(self.lambda_min), math.log(self.lambda_max)
        if (wanted >= high and change > 0) or (wanted <= low and change < 0):
            change = 0.0
        lam, saturated = bounded_exp(wanted, self.lambda_min, self.lambda_max)

        output = Output(
            lam=lam,
            smoothed=math.exp(state.ema.mean),
            error=state.ema.mean - math.log(self.setpoint),
            p_term=p_term,
            i_term=level + bias,
            saturated=saturated,
            in_deadband=in_deadband,
        )
        return replace(state, integral=state.integral + change, bias=bias / 4, output=output), output

    def gains(self, lag: float) -> tuple[float, float]:
        """Kp and Ki for a plant with this lag, in ticks."""
        kp = min(self.stiffness * lag, self.kp_limit) if self.kp is None else self.kp
        if self.ki is not None:
            return kp, self.ki
        # A scheduled Kp vanishes with the lag, so their ratio stays finite; a given Kp over a lag near 0 does not.
        return kp, kp / min(lag if self.kp is None else max(lag, 1.0), self.integral_time)

    def _observe(self, state: PIState, measurement: Measurement, log_s: float) -> tuple[PIState, float]:
        """The state with the measurement in its filters, and the plant's lag in ticks."""
        data = state.data.update(math.log(measurement.data_bpt), self.data_alpha)
        data_bpt, param_bpt = math.exp(data.mean), measurement.param_bpt
        position = math.log(param_bpt / data_bpt)
        change = 0.0 if state.position is None else position - state.position
        growth = state.growth or param_bpt / max(measurement.lr_sum, TINY) ** 2
        sought = data_bpt * self.setpoint / (1 - self.setpoint)
        pace = measurement.lr_sum - state.lr_sum
        lag = math.sqrt(sought / growth) / max(pace, TINY)
        observed = replace(
            state,
            ema=state.ema.update(log_s, self.ema_alpha),
            data=data,
            position=position,
            slope=state.slope + (change - state.slope) / 2,
            growth=growth,
            lr_sum=measurement.lr_sum,
            pace=pace,
        )
        return observed, lag
