"""The loop is closed: lambda moves S, and the controller holds S at its setpoint."""

import json

import pytest

from granite_scu.control.diagnostics.metrics import in_band


@pytest.fixture(scope="module")
def history(train):
    """Makes a test run with more flags, and returns its records."""
    return lambda *argv: json.loads((train(*argv) / "scu_history.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_more_lambda_means_less_param_bpt(history):
    """Lambda reaches the weights: three constants, six decades apart, and nothing else changed."""
    argv = ("--controller", "fixed", "--max-steps", 12, "--learning-rate", 6e-3, "--warmup-steps", 1)
    weak, medium, strong = (history(*argv, "--lambda-init", lam)[-1] for lam in (1e-3, 1.0, 1e3))
    assert weak["step"] == medium["step"] == strong["step"] == 12
    assert weak["param_bpt"] > 1.2 * medium["param_bpt"]
    assert medium["param_bpt"] > 10 * strong["param_bpt"]
    assert strong["param_bpt"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("setpoint", [0.005, 0.02, 0.08])
def test_s_is_held_at_its_setpoint(history, setpoint):
    """A test run as it comes, gains and all, over more than a decade of setpoints."""
    as_it_comes = ("--data-dir", "stdlib-docs", "--batch-size", 8, "--block-size", 128, "--max-steps", 240)
    records = history(*as_it_comes, "--control-every", 4, "--target-s", setpoint)
    later = records[len(records) // 2 :]
    assert len(records) >= 40
    inside = [record["s_ema"] is not None and in_band(record["s_ema"] / setpoint, 0.1) for record in later]
    assert sum(inside) >= 0.9 * len(inside), [round(record["s_ema"] / setpoint, 3) for record in later]


def test_a_setpoint_that_lambda_cannot_reach_saturates_it(history):
    """S grows from zero only as far as the data drives it: far below S*, lambda rests on its lower bound."""
    last = history("--target-s", 0.9, "--lambda-min", 0.5, "--lambda-init", 1, "--max-steps", 12)[-1]
    assert last["s_ema"] < 0.9
    assert last["lambda"] == pytest.approx(0.5)
    assert last["saturated"]
