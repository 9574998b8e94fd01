"""The KL from the start: chunk by chunk against the model's own logits, and in a run."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from references import granite, of_type

from granite_scu.config.settings import IGNORED
from granite_scu.model.saved_adapter import open_initial_adapter
from granite_scu.storage.checkpoint import save_adapter
from research.laws import kl_from_start
from research.laws.kl_from_start import KLFromStart, summed_kl


class Moved:
    """A model whose weights are moved, and a context in which they are not."""

    def __init__(self, build, size: float) -> None:
        self.model = build().eval()
        self.weight = self.model.get_input_embeddings().weight
        self.step = size * torch.randn(self.weight.shape)
        with torch.no_grad():
            self.weight += self.step

    @contextmanager
    def without(self):
        with torch.no_grad():
            self.weight -= self.step
            yield
            self.weight += self.step


@pytest.fixture
def ids():
    return torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(0))


def plain_kl(moved: Moved, ids) -> torch.Tensor:
    with torch.no_grad():
        adapted = moved.model(input_ids=ids, use_cache=False).logits.double().softmax(-1)
        with moved.without():
            base = moved.model(input_ids=ids, use_cache=False).logits.double().softmax(-1)
    return (adapted * (adapted / base).log()).sum()


# Untied, so that the head is the same on both sides, as it is under adapters.
def other():
    return of_type("olmo2")


@pytest.mark.parametrize("build", [granite, other])
@pytest.mark.parametrize("chunk", [4, 2048])
def test_it_is_what_the_models_own_logits_say_whatever_the_chunk(build, chunk, ids, monkeypatch):
    monkeypatch.setattr(kl_from_start, "chunk_on", lambda device: chunk)
    moved = Moved(build, size=0.1)
    assert moved.model.get_output_embeddings().weight is not moved.weight
    with torch.no_grad():
        found = summed_kl(moved.model, ids, ids, moved.without)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(plain_kl(moved, ids)), rel=1e-4)
    assert found > 0.01


@pytest.mark.parametrize("build", [granite, other])
def test_positions_that_are_not_counted_add_nothing(build, ids):
    moved = Moved(build, size=0.1)
    first, second, none = ids.clone(), ids.clone(), torch.full_like(ids, IGNORED)
    first[:, 3:] = IGNORED
    second[:, :3] = IGNORED
    with torch.no_grad():
        whole, *parts, nothing = (summed_kl(moved.model, ids, x, moved.without) for x in (ids, first, second, none))
    assert all(part > 0.01 for part in parts) and nothing == 0
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-4)


class Distance(L.Callback):
    """The KL after each optimizer step, and as the model's own logits say."""

    def __init__(self) -> None:
        self.sensor, self.found, self.expected = KLFromStart(), [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        self.sensor.on_train_batch_end(trainer, module, outputs, batch, index)
        self.found.append(self.sensor.read(module)["kl_bpt"])
        ids, counted = batch["input_ids"], batch["labels"] != IGNORED
        with torch.no_grad():
            adapted = module.language_model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
            with module.as_it_began():
                began = module.language_model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
        nats = (adapted.exp() * (adapted - began))[counted].sum()
        self.expected.append(nats.item() / int(counted.sum()) / math.log(2))
        assert module.model.training


@pytest.mark.parametrize("start", ["base", "adapter"])
def test_in_a_run_it_is_what_the_logits_say_and_changes_nothing(make_module, fit, make_batches, tmp_path, start):
    fast, distance = {"optimizer": {"learning_rate": 1e-2}}, Distance()
    if start == "adapter":
        first = make_module(**fast)
        fit(first, make_batches(3, seed=2))
        save_adapter(first.model, tmp_path / "adapter", first.base.name)
        fast["start"] = open_initial_adapter(str(tmp_path / "adapter"), first.base.name)
    plain, measured = make_module(**fast), make_module(**fast)
    fit(plain, make_batches(3))
    fit(measured, make_batches(3), callbacks=[distance])
    assert all(kl > 1e-4 for kl in distance.found)
    assert distance.found == pytest.approx(distance.expected, rel=1e-4, abs=1e-6)
    assert all(map(torch.equal, plain.factors, measured.factors))


def test_a_run_that_continues_from_its_last_step_reads_the_batch_of_that_anew(
    make_module, fit, make_batches, monkeypatch
):
    """Its last tick comes before any step, and a law that heeds the KL is owed the one of an uninterrupted run."""
    module, batches, found = make_module(optimizer={"learning_rate": 1e-2}), make_batches(3), []

    class End(L.Callback):
        sensor = KLFromStart()

        def on_train_batch_end(self, *event) -> None:
            self.sensor.on_train_batch_end(*event)

        def on_train_end(self, trainer, module) -> None:
            data = SimpleNamespace(served=lambda: data, train_dataloader=lambda: batches[data.start_batch :])
            with monkeypatch.context() as patch:
                patch.setattr(trainer, "datamodule", data, raising=False)
                found.extend(sensor.read(module)["kl_bpt"] for sensor in (self.sensor, KLFromStart()))

    fit(module, batches, callbacks=[End()])
    assert found[0] == found[1] > 0
