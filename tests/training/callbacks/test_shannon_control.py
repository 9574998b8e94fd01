"""Module and controller joined: real runs of a small model, with the records that they leave."""

from types import SimpleNamespace

import lightning as L
import pytest

from granite_scu import control
from granite_scu.config.errors import Diverged
from granite_scu.control.loop import SKIPPED_IN_A_ROW
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch

# A prior and a rate with which S comes within reach of the setpoint in a few steps.
PRIOR = {"sigma": 0.02, "n_tokens": 1000}
FAST = {"learning_rate": 1e-2}


def pi(**settings):
    return control.build("pi", **({"target_s": 0.02, "kp": 1.0, "ki": 0.2, "lambda_init": 0.1} | settings))


class Attached:
    """A controller in the callback, and what it recorded."""

    def __init__(self, controller, every: int) -> None:
        self.records: list[dict] = []
        self.stopwatch = Stopwatch()
        self.callback = ShannonControl(controller, every, self.stopwatch, self.records.append)

    @property
    def callbacks(self) -> list[L.Callback]:
        return [self.stopwatch, self.callback]


@pytest.fixture
def controlled(make_module, make_batches, fit):
    """Trains under a controller for a number of optimizer steps; returns the module and what was recorded."""

    def run(steps: int, every: int, controller=None, accumulate: int = 1, change=lambda m, b: b, callbacks=(), **more):
        attached = Attached(controller or pi(), every)
        module = make_module(optimizer=FAST, **PRIOR)
        batches = change(module, make_batches(steps * accumulate))
        fit(module, batches, accumulate_grad_batches=accumulate, callbacks=[*attached.callbacks, *callbacks], **more)
        return module, attached

    return run


# What it does


def test_the_law_sees_what_its_own_sensor_reads_and_the_record_has_it(controlled):
    seen, read = [], iter([{}, {"twice_s": 0.5}, {}])
    sensor = SimpleNamespace(read=lambda module: next(read), state=dict)

    class Watched(control.PI):
        def sensor(self):
            return sensor

        def update(self, state, measurement):
            seen.append(measurement.sensed)
            return super().update(state, measurement)

    _, attached = controlled(6, every=2, controller=Watched(0.02))
    assert seen == [{}, {"twice_s": 0.5}, {}]
    assert [record.get("twice_s") for record in attached.records] == [None, 0.5, None]


# What survives a checkpoint


def test_a_resumed_run_takes_another_learning_rate_and_its_travel_stays_comparable(
    make_module, make_batches, fit, tmp_path
):
    """Travel is absolute: four steps at 0.01 and four at 0.03, of whatever share of their peaks."""
    first, second = Attached(pi(), 2), Attached(pi(), 2)
    fit(make_module(optimizer=FAST), make_batches(8), max_steps=4, callbacks=first.callbacks).save_checkpoint(
        tmp_path / "state.ckpt"
    )
    module = make_module(optimizer={"learning_rate": 3e-2})
    fit(module, make_batches(8), max_steps=8, callbacks=second.callbacks, ckpt_path=tmp_path / "state.ckpt")
    assert {record["lr"] for record in second.records} == {3e-2}
    assert second.callback.loop.law_state.growth == first.callback.loop.law_state.growth
    assert first.callback.loop.law_state.lr_sum == pytest.approx(4 * 1e-2)
    assert second.callback.loop.law_state.lr_sum == pytest.approx(4 * 1e-2 + 4 * 3e-2)


# Steps that are not finite


@pytest.mark.parametrize(("every", "good", "steps"), [(40, 13, 100), (2000, 1, 100), (2, 0, 3)])
def test_a_run_without_finite_steps_stops_and_says_why(controlled, poison, every, good, steps):
    def poison_from(module, batches):
        return [batch if i < good else poison(module, batch) for i, batch in enumerate(batches)]

    words = rf"step {good + SKIPPED_IN_A_ROW}: .*not finite in {SKIPPED_IN_A_ROW} optimizer steps in a row.*--learning"
    with pytest.raises(
        Diverged, match=words if steps > SKIPPED_IN_A_ROW else "finite in no optimizer step.*--learning"
    ):
        controlled(steps, every, change=poison_from)


def test_finite_steps_in_between_let_a_run_go_on(controlled, poison):
    def poison_most(module, batches):
        return [batch if i % 45 == 44 else poison(module, batch) for i, batch in enumerate(batches)]

    _, attached = controlled(100, every=10, change=poison_most)
    assert attached.callback.loop.skipped == 98
