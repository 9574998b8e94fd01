"""The watch over reachability in a real run of a small model."""

import json
import logging

import pytest

from granite_scu import control
from granite_scu.config.settings import OptimizerConfig
from granite_scu.control.diagnostics.reachability import Reachability
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.shannon_control import ControlTick, ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.learning_rate import PlannedRates

CONSTANT = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0)

BOUNDS = (1e-6, 1e6)
RECORD = {
    **{"step": 4, "s_ema": 0.1, "data_bpt": 5.0, "param_bpt": 0.5, "lambda": 0.3, "saturated": False, "held": False},
    **{"data_grad_norm": 2.0, "penalty_grad_norm": 0.5},
}


@pytest.fixture(autouse=True)
def _logs(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    caplog.set_level(logging.INFO, logger="granite_scu")


def watched(target: float, steps: int, **settings):
    law = control.build("pi", target_s=target, lambda_init=1e-4, lambda_min=1e-4, **settings)
    planned = PlannedRates(CONSTANT, steps)
    monitor = ReachabilityMonitor(Reachability(target), (1e-4, 1e6), planned)
    scu = ShannonControl(law, 2, Stopwatch(), listeners=[monitor])
    return monitor, [scu.stopwatch, scu, monitor]


def test_a_setpoint_that_is_crossed_makes_no_sound(make_module, make_batches, fit, caplog):
    monitor, callbacks = watched(1e-5, steps=30)
    fit(make_module(optimizer={"learning_rate": 1e-3}, n_tokens=10**6), make_batches(30), callbacks=callbacks)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    assert monitor.summary()["verdict"] == "reached"


def make(**settings) -> ReachabilityMonitor:
    return ReachabilityMonitor(Reachability(0.5), BOUNDS, PlannedRates(CONSTANT, 5), **settings)


@pytest.mark.parametrize(
    ("changed", "name", "value"),
    [
        ({}, "penalty_share", 0.25),
        ({"penalty_grad_norm": 0.0}, "penalty_share", 0.0),
        ({}, "moved", 4e-3),
        ({}, "moved_at_end", 5e-3),
        ({"saturated": True, "lambda": 1e-6}, "at_low", True),
        ({"saturated": True, "lambda": 1e6}, "at_low", False),
        ({"saturated": True, "lambda": 1e6}, "at_high", True),
    ],
)
def test_a_record_is_read_for_what_it_says(changed, name, value):
    assert getattr(make()._sight(ControlTick(RECORD | changed, 4e-3)), name) == pytest.approx(value)


def test_how_far_the_run_has_moved_is_what_its_steps_did_whatever_is_planned_now():
    """As after a resumption at a tenth of the learning rate: what was moved at the old one stays moved."""
    sight = make()._sight(ControlTick(RECORD, 40e-3))
    assert (sight.moved, sight.moved_at_end) == pytest.approx((40e-3, 41e-3))
    assert make()._sight(ControlTick(RECORD, 0.0)) is None


@pytest.mark.parametrize("changed", [{"held": True}, {"s_ema": None}, {"data_bpt": float("nan")}, {"param_bpt": 0.0}])
def test_a_record_without_a_measurement_says_nothing(changed):
    assert make()._sight(ControlTick(RECORD | changed, 4e-3)) is None


def test_where_lambda_acts_otherwise_the_gradients_say_nothing():
    assert make(in_gradient=False)._sight(ControlTick(RECORD, 4e-3)).penalty_share is None


def test_its_state_survives_a_round_trip():
    monitor = make()
    for step in range(1, 6):
        record = RECORD | {"step": step, "saturated": True, "lambda": 1e-6}
        monitor.state = monitor.law.update(monitor.state, monitor._sight(ControlTick(record, 4e-3)))
    fresh = make()
    fresh.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert fresh.state == monitor.state
    assert fresh.state.side == monitor.state.side
