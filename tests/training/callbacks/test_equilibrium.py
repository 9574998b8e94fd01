"""The equilibrium stop in a real run of a small model."""

import json

import lightning as L
import pytest

from granite_scu import control
from granite_scu.control.diagnostics.equilibrium import Decision, Equilibrium
from granite_scu.training.callbacks.equilibrium import EquilibriumStop
from granite_scu.training.callbacks.final_score import stop_reason
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.trainer import TimeLimit


class StopsAfter(Equilibrium):
    """Decides by the number of ticks alone."""

    def decide(self, ticks):
        return Decision(len(ticks) >= self.window, "enough")


def attached(rule, controller=None, every=1) -> tuple[EquilibriumStop, list]:
    stop = EquilibriumStop(rule, every)
    scu = ShannonControl(controller or control.build("pi", target_s=0.02), every, Stopwatch(), listeners=[stop])
    return stop, [scu.stopwatch, scu, stop]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_run_ends_at_the_tick_with_its_optimizer_step_complete(make_module, make_batches, fit, accumulate):
    stop, callbacks = attached(StopsAfter(0.02, 8), every=2)
    module = make_module()
    trainer = fit(
        module, make_batches(40 * accumulate), max_steps=40, callbacks=callbacks, accumulate_grad_batches=accumulate
    )
    assert stop.stopped_at == trainer.global_step == 16
    assert module.micro_batches == 16 * accumulate
    assert stop_reason(trainer, [stop]) == "equilibrium"


class StopAt(L.Callback):
    """A user's callback that ends the run after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


@pytest.mark.parametrize(
    ("max_steps", "stop_at", "reason"),
    [(15, 99, "max_steps"), (16, 99, "max_steps"), (40, 15, "other"), (40, 99, "equilibrium")],
    ids=["extra tick at the end", "tick at the last step", "extra tick after another stop", "tick under way"],
)
def test_only_a_tick_under_way_ends_a_run(make_module, make_batches, fit, caplog, max_steps, stop_at, reason):
    """The eighth tick is enough; of 15 steps, two a tick, it is the extra one at the end."""
    stop, callbacks = attached(StopsAfter(0.02, 8), every=2)
    with caplog.at_level("INFO", logger="granite_scu"):
        trainer = fit(make_module(), make_batches(40), max_steps=max_steps, callbacks=[*callbacks, StopAt(stop_at)])
    assert len(stop.ticks) == 8
    assert stop_reason(trainer, [stop]) == reason
    assert caplog.text.count("stops at equilibrium") == (reason == "equilibrium")


def test_time_that_runs_out_after_the_stop_is_not_its_reason(make_module, make_batches, fit):
    timer, (stop, callbacks) = TimeLimit("00:00:01:00"), attached(StopsAfter(0.02, 8))
    trainer = fit(make_module(), make_batches(40), max_steps=40, callbacks=[timer, *callbacks])
    timer.load_state_dict({"time_elapsed": {"train": 60.0}})
    assert stop_reason(trainer, [stop, timer]) == "equilibrium"
    assert stop_reason(trainer, [timer]) == "max_time"


@pytest.mark.parametrize(
    ("actuator", "lam", "acts"), [("loss", 1.0, True), ("loss", 1e-6, False), ("decoupled", 1.0, True)]
)
def test_what_lambda_does_is_measured_for_either_actuator(make_module, make_batches, fit, actuator, lam, acts):
    stop, callbacks = attached(Equilibrium(0.02, 8), control.build("fixed", lambda_init=lam, target_s=0.02))
    module = make_module(sigma=0.02, n_tokens=1000, optimizer={"learning_rate": 1e-2})
    module.actuator = actuator
    fit(module, make_batches(6), max_steps=6, callbacks=callbacks)
    assert (stop.ticks[-1].authority > 0.01) == acts
    module.actuator = "decoupled"
    assert stop._authority(module, {"lambda": 0.0, "lr": 1e-3}) == 0.0


def test_a_run_that_goes_on_from_a_stop_does_not_call_it_its_own(make_module, make_batches, fit):
    stop, callbacks = attached(Equilibrium(1e-6, 8))
    stop.load_state_dict(stop.state_dict() | {"stopped_at": 100})
    assert stop.stopped_at == 100, "so that a run of which only the end was missing still says why it ended"
    trainer = fit(make_module(), make_batches(40), max_steps=40, callbacks=[*callbacks, StopAt(3)])
    assert stop_reason(trainer, [stop]) == "other"


def test_its_window_survives_a_round_trip(make_module, make_batches, fit):
    stop, callbacks = attached(Equilibrium(1e-6, 8))
    fit(make_module(), make_batches(12), max_steps=12, callbacks=callbacks)
    assert len(stop.ticks) == 8
    fresh, _ = attached(Equilibrium(1e-6, 8))
    fresh.load_state_dict(json.loads(json.dumps(stop.state_dict())))
    assert fresh.ticks == stop.ticks
    assert fresh.rise == stop.rise
    assert fresh.effect == stop.effect
    assert stop.effect.last


def test_travel_counts_in_rises_of_s(make_module, make_batches, fit):
    """Against an S* that the first steps pass; the rate is constant, so lr_sum is the number of steps."""
    stop, callbacks = attached(Equilibrium(1e-6, 12), control.build("none", target_s=1e-6))
    fit(make_module(sigma=1e-3, n_tokens=10), make_batches(12), max_steps=12, callbacks=callbacks)
    risen = next(k for k, tick in enumerate(stop.ticks) if tick.s >= 0.9e-6)
    assert stop.ticks[risen].lr_sum == pytest.approx(1.0)
    assert all(tick.lr_sum == 0 for tick in stop.ticks[:risen])
    assert stop.ticks[-1].lr_sum > 1.0
    assert stop.rise == pytest.approx(callbacks[1].loop.lr_sum / stop.ticks[-1].lr_sum)
