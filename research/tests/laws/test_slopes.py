"""The slopes against finite differences of the loss, and what reading them must not change."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from rounding import rounding

from granite_scu.model.compilation import without_dropout
from granite_scu.model.saved_adapter import open_initial_adapter
from granite_scu.storage.checkpoint import save_adapter
from research.laws import slopes
from research.laws.slopes import SlopeSensor

LN2 = 0.6931471805599453


class HeldOut(L.LightningDataModule):
    """Held-out blocks, a micro-batch of each."""

    seed = 0
    config = SimpleNamespace(batch_size=1)

    def __init__(self, batches: list[dict]) -> None:
        super().__init__()
        self.validation = batches

    def collate(self, blocks: list[dict]) -> dict:
        return blocks[0]


def read(sensor: SlopeSensor, module, batches: list[dict]) -> tuple[float, float]:
    """V and V' now, of these held-out micro-batches."""
    module.trainer.datamodule = HeldOut(batches)
    return tuple(sensor.read(module).values())


class Reader(L.Callback):
    """Reads the slopes after every step, and beside them what they should be."""

    def __init__(self, held_out: list[dict]) -> None:
        self.sensor, self.texts = SlopeSensor(), held_out
        self.read: list[tuple[float, float]] = []
        self.held_out: list[float] = []
        self.held_out_slopes: list[float] = []
        self.modes: list[bool] = []

    def on_train_batch_end(self, trainer, module, *_):
        trainer.datamodule = HeldOut(self.texts)
        batches = [slopes.held_out(module, len(self.read) % len(self.texts))]
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
    module = make_module(optimizer=FAST, **more)
    reader = Reader(packed(make_batches(2, seed=1)))
    fit(module, packed(make_batches(4)), callbacks=[reader], precision="64-true")
    assert [each[0] for each in reader.read] == pytest.approx(reader.held_out, **CLOSE)
    assert [each[1] for each in reader.read] == pytest.approx(reader.held_out_slopes, **CLOSE)
    assert abs(reader.read[-1][1]) > 0.005
    assert all(reader.modes)


def test_reading_them_changes_nothing_of_a_run(make_module, fit, make_batches):
    dropping = {"optimizer": FAST, "lora": {"dropout": 0.3}}
    plain, read = make_module(**dropping), make_module(**dropping)
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
    module = make_module(optimizer=FAST, start=start)
    fit(module, make_batches(4), callbacks=[reader], precision="64-true")
    assert [each[0] for each in reader.read] == pytest.approx(reader.held_out, **CLOSE)
    assert [each[1] for each in reader.read] == pytest.approx(reader.held_out_slopes, **CLOSE)
    assert abs(reader.read[-1][1]) > 0.01


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
                found.append(read(sensor, module, [good, silent])[0])
            assert sensor.state()["turn"] == 3

    fit(make_module(), make_batches(1), callbacks=[End()])
    assert math.isnan(found[0]) and found[1] == found[3] and math.isnan(found[2])
