"""Module and controller joined: real runs of a small model, with the records that they leave."""

import math

import lightning as L
import pytest

from granite_scu import control
from granite_scu.config.errors import Diverged
from granite_scu.control import Measurement
from granite_scu.control.laws.base import AdapterBenefit
from granite_scu.control.loop import SKIPPED_IN_A_ROW
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.stopwatch import Stopwatch

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
        fit(
            module,
            batches,
            accumulate_grad_batches=accumulate,
            callbacks=[*attached.callbacks, *callbacks],
            **more,
        )
        return module, attached

    return run


# When it ticks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("steps", "ticks"), [(6, [2, 4, 6]), (7, [2, 4, 6, 7]), (1, [1])])
def test_it_ticks_every_so_many_optimizer_steps_and_once_more_at_the_end(controlled, accumulate, steps, ticks):
    _, attached = controlled(steps, every=2, accumulate=accumulate)
    assert [record["step"] for record in attached.records] == ticks


def test_a_tick_counts_every_supervised_token_since_the_last(controlled, make_batches):
    _, attached = controlled(7, every=2, accumulate=3)
    counts = [int((batch["labels"] != -100).sum()) for batch in make_batches(21)]
    assert [record["tokens"] for record in attached.records] == [sum(counts[: 3 * step]) for step in (2, 4, 6, 7)]


# What it records


def test_the_rate_recorded_is_that_of_the_step(make_module, make_batches, fit):
    attached = Attached(pi(), 2)
    module = make_module(optimizer={"learning_rate": 0.1, "schedule": "linear"}, total_steps=5)
    fit(module, make_batches(10), accumulate_grad_batches=2, callbacks=attached.callbacks)
    assert [record["lr"] for record in attached.records] == pytest.approx([0.08, 0.04, 0.02])


# What it does


def test_lambda_after_a_tick_is_the_controllers_and_stays_until_the_next(controlled):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            seen.append(module.reg_strength)

    module, attached = controlled(8, every=2, callbacks=[Watch()])
    strengths = [record["lambda"] for record in attached.records]
    assert len(set(strengths)) > 2
    expected = [0.1, *strengths[:-1]]
    assert seen == [strength for strength in expected for _ in range(2)]
    assert module.reg_strength == strengths[-1]


def test_lambda_is_that_of_the_law_alone_when_it_is_fed_what_was_measured(controlled):
    controller = pi()
    _, attached = controlled(10, every=2, controller=controller)
    state = controller.init()
    travel = 0.0
    for record in attached.records:
        travel += 2 * record["lr"]
        measured = {name: record[name] for name in ("s", "data_bpt", "param_bpt")}
        state, output = controller.update(state, Measurement(**measured, travel=travel))
        assert record["lambda"] == output.reg_strength
        assert record["error"] == output.error
        assert (record["p_term"], record["i_term"]) == (output.p_term, output.i_term)
    assert attached.callback.loop.law_state == state


def test_the_law_sees_what_a_validation_found_at_the_next_tick_alone(controlled):
    seen, benefit = [], AdapterBenefit(0.2, 0.1, 0.4, 0.3)

    class Watched(control.PI):
        def update(self, state, measurement):
            seen.append(measurement.saved)
            return super().update(state, measurement)

    class Validated(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 2:
                next(each for each in trainer.callbacks if isinstance(each, ShannonControl)).set_benefit(benefit)

    controlled(6, every=2, controller=Watched(0.02), callbacks=[Validated()])
    assert seen == [None, benefit, None]


def test_the_penalty_in_a_record_is_of_the_lambda_that_the_last_step_ran_under(controlled):
    low, high = (
        controlled(2, every=2, controller=control.build("fixed", lambda_init=strength))[1].records[-1]
        for strength in (1e-6, 3e-6)  # too small to change the weights at this precision
    )
    assert high["penalty_grad_norm"] == pytest.approx(3 * low["penalty_grad_norm"], rel=1e-3)


def test_the_loop_brings_s_to_the_setpoint(controlled):
    _, free = controlled(160, every=2, controller=control.build("none"))
    target = 0.3 * free.records[-1]["s"]
    _, held = controlled(160, every=2, controller=pi(target_s=target, kp=2.0, ki=0.4, lambda_init=0.02))
    late = [record["s"] for record in held.records[-20:]]
    assert sum(late) / len(late) == pytest.approx(target, rel=0.25)


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
    assert first.callback.loop.law_state.travel == pytest.approx(4 * 1e-2)
    assert second.callback.loop.law_state.travel == pytest.approx(4 * 1e-2 + 4 * 3e-2)


# Steps that are not finite


def test_a_tick_counts_applied_steps_and_makes_up_for_skipped_ones(controlled, poison):
    def poison_two(module, batches):
        return [poison(module, batch) if i in (4, 5) else batch for i, batch in enumerate(batches)]

    _, attached = controlled(8, every=2, change=poison_two)
    assert [record["step"] for record in attached.records] == [2, 4, 8]
    assert [record["skipped"] for record in attached.records] == [0, 0, 2]
    assert not any(record["held"] for record in attached.records)


def test_travel_is_the_sum_of_the_rates_of_the_applied_steps_alone(make_module, make_batches, fit, poison):
    attached = Attached(pi(), 2)
    module = make_module(optimizer={"learning_rate": 0.1, "schedule": "linear"}, total_steps=10)
    batches = [poison(module, batch) if i in (3, 4) else batch for i, batch in enumerate(make_batches(8))]
    fit(module, batches, callbacks=attached.callbacks)
    rates = [0.1 * (1 - step / 10) for step in range(8)]
    assert attached.callback.loop.law_state.travel == pytest.approx(sum(rates) - rates[3] - rates[4])


def test_an_end_without_a_finite_step_holds_lambda(controlled, poison):
    def poison_last(module, batches):
        return [poison(module, batch) if i > 3 else batch for i, batch in enumerate(batches)]

    _, attached = controlled(6, every=2, change=poison_last)
    before, held = attached.records[-2:]
    assert held["held"]
    assert not before["held"]
    assert held["lambda"] == before["lambda"] > 0
    assert math.isnan(held["data_bpt"]) and math.isnan(held["s"])
    assert held["tokens"] == before["tokens"]


@pytest.mark.parametrize(("every", "good"), [(10, 0), (40, 13), (2000, 1)])
def test_a_run_without_finite_steps_stops_and_says_why(controlled, poison, every, good):
    def poison_from(module, batches):
        return [batch if i < good else poison(module, batch) for i, batch in enumerate(batches)]

    words = rf"step {good + SKIPPED_IN_A_ROW}: .*not finite in {SKIPPED_IN_A_ROW} optimizer steps in a row.*--learning"
    with pytest.raises(Diverged, match=words):
        controlled(100, every, change=poison_from)


def test_finite_steps_in_between_let_a_run_go_on(controlled, poison):
    def poison_most(module, batches):
        return [batch if i % 45 == 44 else poison(module, batch) for i, batch in enumerate(batches)]

    _, attached = controlled(100, every=10, change=poison_most)
    assert attached.callback.loop.skipped == 98
