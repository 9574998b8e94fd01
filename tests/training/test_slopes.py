"""The slopes against finite differences of the loss, and what reading them must not change."""

import math
from collections.abc import Callable

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from rounding import rounding
from test_module import trained_factors

from granite_scu.control.laws.base import Slopes
from granite_scu.control.slopes import SlopeSensor
from granite_scu.model.compilation import without_dropout
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.model.saved_adapter import open_initial_adapter
from granite_scu.storage.checkpoint import save_adapter

LN2 = 0.6931471805599453


class HeldOut(L.LightningDataModule):
    """Held-out micro-batches, as a run's own data module gives them."""

    def __init__(self, batches: list[dict]) -> None:
        super().__init__()
        self.batches, self.n_held_out = batches, len(batches)

    def held_out(self, number: int) -> dict:
        return self.batches[number]


def read(sensor: SlopeSensor, module, batches: list[dict]) -> Slopes:
    """The slopes now, of these held-out micro-batches."""
    module.trainer.datamodule = HeldOut(batches)
    return sensor.read(module, module.read_window().slope)


class Reader(L.Callback):
    """Reads the slopes after every step, and beside them what they should be."""

    def __init__(self, held_out: list[dict]) -> None:
        self.sensor, self.texts = SlopeSensor(), held_out
        self.read: list[Slopes] = []
        self.held_out: list[float] = []
        self.held_out_slopes: list[float] = []
        self.training: list[float] = []
        self.modes: list[bool] = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        # Where the training slope is measured: at the factors before the step.
        self.training.append(derivative(lambda x: saved(module, [module.latest_batch], x)))

    def on_train_batch_end(self, trainer, module, *_):
        tick = len(self.read)
        batches = [self.texts[tick % len(self.texts)]]
        self.held_out.append(saved(module, batches, 1.0))
        self.held_out_slopes.append(derivative(lambda x: saved(module, batches, x)))
        self.read.append(read(self.sensor, module, self.texts))
        self.modes.append(module.model.training)


@torch.no_grad()
def saved(module, batches: list[dict], scale: float) -> float:
    """V(scale) in bits per supervised token, from the definition: base model, and the adapter with its B scaled."""
    with without_dropout(module.model), module.trainer.precision_plugin.forward_context():
        kept = [p.detach().clone() for p in module.factors]
        starts = list(module.origins) or [p if i % 2 == 0 else torch.zeros_like(p) for i, p in enumerate(kept)]
        losses = []
        for x in (0.0, scale):
            for factor, value, start in zip(module.factors, kept, starts, strict=True):
                factor.copy_(start + x * (value - start))
            losses.append(sum(module(**batch).double() for batch in batches).item())
        for factor, value in zip(module.factors, kept, strict=True):
            factor.copy_(value)
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    return (losses[0] - losses[1]) / tokens / LN2


H = 0.03
# The norms and the loss compute in fp32, whatever the rest does: two roundings of six bits in each of the differences,
# which are divided by H. What a difference of fourth order leaves out, a thirtieth of H^4 fifth derivatives, is less.
CLOSE = {"rel": 1e-4, "abs": 1.5 / H * 6 * rounding(2)}


def derivative(f: Callable[[float], float], h: float = H) -> float:
    """f'(1) by a central difference of fourth order."""
    return (8 * (f(1 + h) - f(1 - h)) - (f(1 + 2 * h) - f(1 - 2 * h))) / (12 * h)


FAST = {"learning_rate": 5e-2}


def with_documents(batches: list[dict]) -> list[dict]:
    """Two documents in each block, as packing puts them there."""
    return [batch | {"documents": (torch.arange(12) >= 5).long().expand(2, 12)} for batch in batches]


@pytest.mark.parametrize(
    "more",
    [{}, {"base": {"gradient_checkpointing": True}}, {"lora": {"dropout": 0.3}}, "documents"],
    ids=["plain", "recomputed", "dropout", "documents"],
)
def test_in_float64_they_are_the_derivatives(make_module, fit, make_batches, more):
    """Loss on part of the tokens, and of packed documents too, which do not see one another."""
    packed, more = (with_documents, {}) if more == "documents" else (list, more)
    module = make_module(optimizer=FAST, measures_slopes=True, **more)
    reader = Reader(packed(make_batches(2, seed=1)))
    fit(module, packed(make_batches(4)), callbacks=[reader], precision="64-true")
    assert [slopes.held_out for slopes in reader.read] == pytest.approx(reader.held_out, **CLOSE)
    assert [slopes.held_out_slope for slopes in reader.read] == pytest.approx(reader.held_out_slopes, **CLOSE)
    if "lora" not in more:  # the steps were taken with dropout
        assert [slopes.training_slope for slopes in reader.read] == pytest.approx(reader.training, **CLOSE)
    assert abs(reader.read[-1].held_out_slope) > 0.005
    assert reader.read[0].training_slope == 0 != reader.read[1].training_slope  # B was zero
    assert all(reader.modes)


def test_reading_them_changes_nothing_of_a_run(make_module, fit, make_batches):
    dropping = {"optimizer": FAST, "lora": {"dropout": 0.3}}
    plain, read = make_module(**dropping), make_module(measures_slopes=True, **dropping)
    torch.manual_seed(5)
    fit(plain, make_batches(4))
    state = torch.get_rng_state()
    torch.manual_seed(5)
    fit(read, make_batches(4), callbacks=[Reader(make_batches(2, seed=1))])
    assert all(torch.equal(a, b) for a, b in zip(plain.factors, read.factors, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_from_an_adapter_they_are_along_the_way_from_it(make_module, fit, make_batches, tmp_path):
    first = make_module(optimizer=FAST)
    fit(first, make_batches(3, seed=2))
    save_adapter(first.model, tmp_path / "adapter", first.base.name)
    start = open_initial_adapter(str(tmp_path / "adapter"), first.base.name)
    reader = Reader(make_batches(2, seed=1))
    module = make_module(optimizer=FAST, measures_slopes=True, start=start)
    fit(module, make_batches(4), callbacks=[reader], precision="64-true")
    assert [slopes.held_out for slopes in reader.read] == pytest.approx(reader.held_out, **CLOSE)
    assert [slopes.held_out_slope for slopes in reader.read] == pytest.approx(reader.held_out_slopes, **CLOSE)
    assert [slopes.training_slope for slopes in reader.read] == pytest.approx(reader.training, **CLOSE)
    assert abs(reader.read[-1].held_out_slope) > 0.01


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_in_half_precision_they_are_those_of_fp32_but_for_rounding(make_module, fit, make_batches, precision):
    """Under fp16 with the GradScaler that a GPU has; PyTorch has one for the CPU too, which Lightning does not take."""
    batches, found = make_batches(8, seed=1), []

    class End(L.Callback):
        def on_train_end(self, trainer, module):
            found.extend(read(SlopeSensor(), module, [batch]).held_out_slope for batch in batches)

    module, exact = make_module(measures_slopes=True, dtype=WEIGHT_DTYPES[precision]), make_module()
    trained_factors(module, 1.0)
    plugin = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu") if precision == "16-mixed" else None)
    fit(module, make_batches(2), callbacks=[End()], plugins=[plugin])
    with torch.no_grad():
        for factor, value in zip(exact.factors, module.factors, strict=True):
            factor.copy_(value)
    b = [update.b for update in exact.updates.values()]
    expected = []
    for batch in batches:
        gradients = torch.autograd.grad(exact(**batch), b)
        nats = sum(float((gradient * factor).sum()) for gradient, factor in zip(gradients, b, strict=True))
        expected.append(-nats / int((batch["labels"] != -100).sum()) / LN2)
    wrong = [one - right for one, right in zip(found, expected, strict=True)]
    assert math.hypot(*wrong) < 0.3 * math.hypot(*expected)  # single ones may be near 0
    assert abs(sum(wrong)) < 0.1 * sum(map(abs, expected))


def test_in_fp16_they_overflow_no_sooner_than_the_gradients_of_accumulated_steps(make_module, fit, make_batches):
    """A scaler that doubles at every step, until the gradients of a step overflow."""
    held_out, found = make_batches(2, seed=1), []

    class Step(L.Callback):
        def on_train_batch_end(self, trainer, module, batch, output, number):
            if number % 8 == 7:
                slopes = read(SlopeSensor(), module, held_out)
                found.append((module.latest_step_was_finite, slopes.usable))

    module = make_module(measures_slopes=True, dtype=WEIGHT_DTYPES["16-mixed"])
    trained_factors(module, 1.0)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=1))
    fit(module, make_batches(8) * 20, callbacks=[Step()], plugins=[plugin], accumulate_grad_batches=8)
    assert not all(finite for finite, _ in found)
    assert all(usable for _, usable in found)


def test_the_training_slope_is_that_of_all_micro_batches_since_the_last_reading(make_module, fit, make_batches):
    """Two windows of two micro-batches of unequal length, and a learning rate of almost nothing."""
    module = make_module(optimizer={"learning_rate": 1e-12}, measures_slopes=True)
    trained_factors(module, 0.1)
    batches, windows = make_batches(4), []

    class End(L.Callback):
        def on_train_end(self, trainer, module):
            expected = derivative(lambda x: saved(module, batches, x))
            windows.append((module.read_window().slope, expected, module.read_window().slope))

    fit(module, batches, callbacks=[End()], accumulate_grad_batches=2, precision="64-true")
    ((found, expected, after),) = windows
    assert found == pytest.approx(expected, **CLOSE)
    assert after != after  # nothing has been trained on since


def test_a_reading_that_is_not_finite_is_read_again_and_one_without_a_label_is_not(make_module, fit, make_batches):
    good, silent = make_batches(2, seed=1)
    silent["labels"] = torch.full_like(silent["labels"], -100)
    found = []

    class End(L.Callback):
        def on_train_end(self, trainer, module):
            sensor, factor = SlopeSensor(), module.factors[0]
            kept = factor.detach().clone()
            for broken in (True, False, False, False):
                factor.data.copy_(torch.full_like(kept, math.nan) if broken else kept)
                found.append(read(sensor, module, [good, silent]).held_out)
            assert sensor.state()["turn"] == 3

    fit(make_module(measures_slopes=True), make_batches(1), callbacks=[End()])
    assert math.isnan(found[0]) and found[1] == found[3] and math.isnan(found[2])
