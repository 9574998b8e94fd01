"""Why S did not settle, by what the later half of a run shows."""

import pytest
from folders import METRICS, record, settings, write_run

from granite_scu.viz.report import build_report
from granite_scu.viz.run_folder import read_run
from granite_scu.viz.settling import bounded, unsettled

NEVER = METRICS | {"control": {"settling_time": None, "iae": 0.7}}


def found(folder, s_of=lambda k: 0.02, metrics=NEVER, epochs=None, **changes):
    """Of a run whose smoothed S was ``s_of`` the number of the tick, S* 2 %."""
    history = [record(10 * k, s_ema=s_of(k), **changes) for k in range(1, 41)]
    data = {"data": {"num_epochs": epochs}} if epochs else {}
    asked = settings(**data, control={"lambda_max": 1.0, "lambda_min": 1e-6}, trainer={"accumulate_grad_batches": 4})
    return unsettled(read_run(write_run(folder, history, {"controller": "pi"}, asked, metrics=metrics)))


@pytest.mark.parametrize(
    ("s_of", "changes", "reason", "flags"),
    [
        (lambda k: 0.01 + 1e-4 * k, {}, "still too low when the run ended. At the end it was 1.4", "--max-steps 800"),
        (lambda k: 0.05 - 1e-4 * k, {}, "still too high when the run ended. At the end it was 4.6", "--max-steps 800"),
        (lambda k: 0.01, {"epochs": 2}, "still too low", "--num-epochs 4"),
        (lambda k: 0.03 if k % 2 else 0.02, {}, "came and went, and was within 10", "--gradient-accumulation-steps 8"),
        (lambda k: 0.05, {"saturated": True}, "λ stood at a bound of 1 at 100", "--lambda-max 100"),
        (lambda k: 0.01, {"saturated": True, "lambda": 1e-6}, "at a bound of 1e-06", "--lambda-min 1e-08"),
        (lambda k: None, {"held": True}, "no usable measurement", "--learning-rate 0.0003"),
    ],
)
def test_the_reason_and_what_to_change(tmp_path, s_of, changes, reason, flags):
    trouble = found(tmp_path / "run", s_of, **changes)
    assert reason in trouble.reason and trouble.flags == flags and trouble.remedy


def test_of_two_bounds_the_one_is_named_at_which_lambda_stood_more_often(tmp_path):
    history = [record(10 * k, saturated=k <= 31, **{"lambda": 1e-6 if k <= 30 else 1.0}) for k in range(1, 41)]
    asked = settings(control={"lambda_max": 1.0, "lambda_min": 1e-6})
    run = read_run(write_run(tmp_path / "run", history, {"controller": "pi"}, asked, metrics=METRICS))
    assert bounded(run).reason.startswith("λ stood at its lower bound, 1e-06, at 75\N{NO-BREAK SPACE}% of the ticks")


def test_a_setpoint_out_of_reach_has_the_words_of_the_run(tmp_path):
    metrics = NEVER | {"reachability": {"advice": "S* = 0.4 is out of reach; lower --target-s to about 0.2"}}
    trouble = found(tmp_path / "run", metrics=metrics)
    assert "out of reach" in trouble.reason and "lower --target-s to about 0.2" in trouble.remedy


@pytest.mark.parametrize("control", [{"settling_time": 130, "iae": 0.1}, {"settling_time": None, "iae": None}])
def test_nothing_is_said_of_a_run_that_settled_or_had_nothing_to_settle_on(tmp_path, control):
    assert found(tmp_path / "run", metrics=METRICS | {"control": control}) is None


def test_the_page_has_it_among_the_warnings(tmp_path):
    found(tmp_path / "run", lambda k: 0.01)
    page = build_report(read_run(tmp_path / "run"))
    warnings = page[page.index('class="warnings"') :]
    assert "S never settled: it was still too low" in warnings and "lower the setpoint to about 0.8" in warnings
