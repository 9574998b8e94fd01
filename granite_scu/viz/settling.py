"""Why S did not settle on its setpoint, and what to change."""

from dataclasses import dataclass

import numpy as np

from granite_scu.viz.run_folder import BAND, Run
from granite_scu.viz.words import is_number, percent, section

_BOUND = 0.5
"""Share of the later ticks at a bound from which that is the reason."""
_SOME = 0.05
"""Share of the ticks at a bound from which it is worth a word."""


@dataclass(frozen=True)
class Unsettled:
    """S did not stay at its setpoint to the end.

    Attributes:
        reason: what was seen, in sentences.
        remedy: what to change, a sentence.
        flags: of the training command, that change it; empty where the remedy is not one of its numbers.
    """

    reason: str
    remedy: str
    flags: str = ""


def unsettled(run: Run) -> Unsettled | None:
    """Why S was not within 10 per cent of S* to the end; None where it was, or where nothing was to hold it there."""
    control = section(run.metrics, "control")
    if run.holds_drift:  # a budget is to be kept within, not to be reached; the run itself says where it is not
        return None
    if not is_number(control.get("iae")) or control.get("settling_time") is not None:
        return None
    if advice := section(run.metrics, "reachability").get("advice"):
        return Unsettled("S never settled: its setpoint was out of reach.", f"{advice}.")
    later = slice(len(run.history) // 2, None)
    ratios = run.column("s_ema")[later] / run.column("s_target")[later]
    ratios[run.column("held")[later] == 1] = np.nan
    if not np.isfinite(ratios).any():
        return Unsettled(
            "S never settled: the later half of the run has no usable measurement of it.",
            "Look for a loss that is not finite: a lower learning rate avoids it.",
            _rate(run),
        )
    return _at_a_bound(run, later) or _judged(run, ratios[np.isfinite(ratios)])


def bounded(run: Run) -> Unsettled | None:
    """What to do about a lambda that stood at a bound for some of the ticks; None where it did for hardly any."""
    share, bound, side = _bound(run, slice(None))
    if share < _SOME or run.holds_drift:
        return None
    seen = f"λ stood at its {side} bound, {bound:g}, at {percent(share)} of the ticks"
    if side == "upper":
        higher = f"Give it more room with --lambda-max {100 * bound:g}, or ask for a larger S."
        return Unsettled(f"{seen}: it could not hold the adapter back any more.", higher)
    return Unsettled(
        f"{seen}: nothing held the adapter back there.",
        "Where that is as it should be, --controller none does the same in less time; else a lower --target-s acts.",
    )


def _bound(run: Run, ticks: slice) -> tuple[float, float, str]:
    """Of the bound at which lambda stood at most of the ticks: their share, its value, and which one it is."""
    lam, there = run.column("lambda")[ticks], run.column("saturated")[ticks] == 1
    highest = section(run.settings, "control").get("lambda_max")
    upper = there & (lam > 0.9 * highest) if is_number(highest) else np.zeros_like(there)
    side, there = max(("lower", there & ~upper), ("upper", upper), key=lambda each: each[1].sum())
    return float(there.mean()), float(lam[there][-1]) if there.any() else np.nan, side


def _at_a_bound(run: Run, later: slice) -> Unsettled | None:
    """Lambda could go no further."""
    share, bound, side = _bound(run, later)
    if share < _BOUND:
        return None
    flag, other, value = ("--lambda-max", "larger", 100) if side == "upper" else ("--lambda-min", "smaller", 0.01)
    return Unsettled(
        f"S never settled: λ stood at a bound of {bound:g} at {percent(share)} of the later ticks.",
        f"Give it more room with a {other} {flag}.",
        f"{flag} {value * bound:g}",
    )


def _judged(run: Run, ratios: np.ndarray) -> Unsettled:
    """By where the smoothed S stood against S* in the later half: (ticks,) ratios that are finite."""
    target, last = float(run.column("s_target")[-1]), float(ratios[-1])
    was = f"At the end it was {percent(last * target)}, and S* is {percent(target)}."
    if (ratios < 1 - BAND).all():
        lower = percent(0.8 * last * target)
        return Unsettled(
            f"S never settled: it was still too low when the run ended. {was}",
            f"Train longer, or lower the setpoint to about {lower} (--target-s {0.8 * last * target:.2g}).",
            length_of(run, 2, 2 * run.history[-1]["step"]),
        )
    if (ratios > 1 + BAND).all():
        return Unsettled(
            f"S never settled: it was still too high when the run ended. {was}",
            "Train longer: λ needs more ticks to bring it down. A larger --lambda-init starts nearer.",
            length_of(run, 2, 2 * run.history[-1]["step"]),
        )
    inside = f"within {percent(BAND)} of S* at {percent(float((np.abs(ratios - 1) <= BAND).mean()))}"
    return Unsettled(
        f"S never settled: it came and went, and was {inside} of the later ticks. {was}",
        "Measure S over more text: larger micro-batches or more of them in a step make it less noisy.",
        _accumulation(run),
    )


def length_of(run: Run, times: float, steps: int) -> str:
    """The length of another run: so many times as many epochs, where they were given, or else so many steps."""
    epochs = section(run.settings, "data").get("num_epochs")
    return f"--num-epochs {times * epochs:.3g}" if is_number(epochs) else f"--max-steps {steps}"


def _accumulation(run: Run) -> str:
    batches = section(run.settings, "trainer").get("accumulate_grad_batches")
    return f"--gradient-accumulation-steps {2 * batches}" if isinstance(batches, int) else ""


def _rate(run: Run) -> str:
    rate = section(run.settings, "optimizer").get("learning_rate")
    return f"--learning-rate {rate / 3:.1g}" if is_number(rate) else ""
