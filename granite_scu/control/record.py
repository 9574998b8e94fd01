"""What a tick leaves in the history of a run."""

from dataclasses import replace
from typing import Any

from granite_scu.control.laws.base import AdapterBenefit, Measurement, Output


def as_record(measured: Measurement, output: Output, setpoint: float | None) -> dict[str, Any]:
    """What a tick has seen and decided, by the names that ``scu_history.json`` has.

    Args:
        measured: what it has seen.
        output: what it has decided.
        setpoint: the controller's own S*, for outputs without one.
    """
    return {
        "data_bpt": measured.data_bpt,
        "param_bpt": measured.param_bpt,
        "s": measured.s,
        "s_ema": output.smoothed,
        "s_target": setpoint if output.setpoint is None else output.setpoint,
        "error": output.error,
        "lambda": output.reg_strength,
        "p_term": output.p_term,
        "i_term": output.i_term,
        "saturated": output.saturated,
        "held": output.held,
        "in_deadband": output.in_deadband,
        "kl_bpt": measured.kl,
        **{f"saved_{name}": measured.saved and getattr(measured.saved, name) for name in AdapterBenefit._fields},
        **_slopes(measured, output),
    }


def as_drift_record(measured: Measurement, seen: Measurement, output: Output, setpoint: float) -> dict[str, Any]:
    """The same where the law holds drift: S is measured, and held at nothing.

    Args:
        measured: of S.
        seen: what the law has seen of drift, which is to the base's bits as ParamBPT is to DataBPT.
        output: what it has decided.
        setpoint: the budget p, as the law has it: p / (1 + p).
    """
    return {
        **as_record(measured, replace(output, smoothed=None), None),
        "drift_bpt": seen.param_bpt,
        "drift": seen.param_bpt / seen.data_bpt if seen.data_bpt > 0 else None,
        "drift_target": setpoint / (1 - setpoint),
    }


def _slopes(measured: Measurement, output: Output) -> dict[str, float | None]:
    """What a tick read of held-out and training text, and what is made of it; nothing where it read none."""
    if measured.slopes is None:
        return {}
    return {
        **{f"savings_{name}": value for name, value in measured.slopes._asdict().items()},
        "best_scale": output.best_scale,
        "best_scale_error": output.best_scale_error,
        "best_scale_training": output.best_scale_training,
    }
