"""The loop on drift: real runs of a small model that hold a budget on general text, and what is told of them."""

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import TINY_MODEL
from granite_scu.control import PI
from granite_scu.control.laws.base import Output
from granite_scu.control.loop import ControlLoop
from granite_scu.evaluation.general_text import Document, GeneralText, batches
from granite_scu.model.drift import Drift, GeneralPart, part_within
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.controller import with_bounds
from granite_scu.training.recipe import prepare, train
from granite_scu.viz.what_now import which_adapter

FAST = {"learning_rate": 1e-2}


def general_text() -> GeneralText:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(2, 63, (24, 14), generator=generator).tolist()
    return GeneralText(tuple(Document(tuple(row), (False, *[True] * 13)) for row in rows), "auto")


class Held:
    """The callbacks of a run that holds a budget of drift, and what they leave."""

    def __init__(self, budget: float, init: float = 1.0, low: float = 1e-3, high: float = 1e3) -> None:
        self.records: list[dict] = []
        self.meter = DriftMeter(lambda *_: general_text(), budget, (low, high), 32, 32, 0)
        law = PI(setpoint=budget / (1 + budget), lambda_init=init, lambda_min=low, lambda_max=high)
        listens = {"listeners": [self.meter], "drift": self.meter.plant}
        self.control = ShannonControl(law, 2, Stopwatch(), self.records.append, **listens)

    @property
    def callbacks(self) -> list[L.Callback]:
        return [self.meter, self.control.stopwatch, self.control]


@pytest.fixture
def trained(make_module, make_batches, fit):
    """Trains a module under a budget; returns it, and what held it."""

    def run(steps: int, budget: float, batches=4, **more):
        held, module = Held(budget, **more), make_module(optimizer=FAST)
        fit(module, make_batches(batches) * (steps // batches), callbacks=held.callbacks)
        return module, held

    return run


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.1])
def test_the_loop_holds_drift_at_the_budget(trained, share):
    """Of what drift is without one, on the text that steers and on that which nothing sees, of the same kind."""
    _, free = trained(120, 9.0, init=1e-3)
    budget = share * free.records[-1]["drift"]
    _, held = trained(120, budget)
    late = [record["drift"] for record in held.records[-15:]]
    assert sum(late) / len(late) == pytest.approx(budget, rel=0.25)
    assert [record["drift_target"] for record in held.records] == pytest.approx([budget] * 60)
    # Of random tokens each text drifts as far as another, up to the spread of six texts.
    assert held.meter.read().share == pytest.approx(budget, rel=0.5)
    assert all(record["s_target"] is None and 0 < record["s"] < 1 for record in held.records)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ({}, (2.828, 1e-3, 2.828)),
        ({"control.lambda_init": 0.1}, (0.1, 1e-3, 2.828)),
        ({"control.lambda_init": 10.0}, (10.0, 1e-3, 10.0)),
        ({"control.lambda_max": 50.0}, (2.828, 1e-3, 50.0)),
        ({"control.lambda_min": 5.0}, (5.0, 5.0, 5.0)),
    ],
)
def test_lambda_begins_by_the_budget_and_is_never_more(asked, bounds):
    """Beyond, under Adam, the anchor's noise is all that a step is made of."""
    law = Request.from_dotted({"drift.max_drift": "2%"} | asked).control_held.law()
    assert (law.lambda_start, law.lambda_min, law.lambda_max) == pytest.approx(bounds, rel=1e-3)


@pytest.mark.parametrize("asked", [{}, {"control.lambda_max": 50.0, "control.kp": 1.0}, {"control.lambda_max": 1e5}])
def test_a_run_that_continues_by_its_yaml_has_the_same_law(asked):
    """All that the YAML has counts as given then. Lambda begins at its upper bound, which is the budget's."""
    request = Request.from_dotted({"drift.max_drift": "0.001%"} | asked)
    law = request.control_held.law()
    every = frozenset(f"control.{name}" for name, value in vars(request.control).items() if value is not None)
    assert replace(with_bounds(request, law), given=every).control_held.law() == law
    assert law.lambda_start == law.lambda_max == asked.get("control.lambda_max", 1e3) and law.lead > 0
    output = Output(law.lambda_max * (1 - 2**-52), saturated=True)
    assert ControlLoop(law, 1, lambda of_s: of_s).action_of(output).lam == output.lam


@pytest.mark.parametrize(
    ("share", "last", "within", "bound", "words"),
    [
        (0.021, {"lambda": 2.0, "saturated": False}, True, None, ()),
        (0.023, {"lambda": 2.0, "saturated": False}, False, None, ("2.3 %", "--max-drift 2 %", "--learning-rate")),
        (0.023, {"lambda": 1000.0, "saturated": True}, False, "upper", ("bound of 1000",)),
        (0.01, {"lambda": 1e-3, "saturated": True}, True, "lower", ()),
    ],
)
def test_the_summary_says_whether_the_budget_was_held_and_what_was_in_the_way(
    share, last, within, bound, words, caplog
):
    meter = DriftMeter(lambda *_: general_text(), 0.02, (1e-3, 1e3), 32, 32, 0)
    early = {"lambda": 1.0, "saturated": False}
    history = [{"step": step} | (last if step > 5 else early) for step in range(1, 11)]
    with caplog.at_level(logging.INFO, "granite_scu"):
        found = meter.summary(Drift(3 * share, 3.0, 100), history)
        unbound = meter.summary(Drift(0.0, 3.0, 100), [*history, early | {"step": 11}])
    assert (found["bound"], unbound["bound"]) == (bound, None)
    assert (found["budget"], found["share"], found["within"]) == (0.02, pytest.approx(share), within)
    assert (found["bpt"], found["base_bpt"], found["tokens"], found["lambda"]) == (3 * share, 3.0, 100, last["lambda"])
    assert all(word in caplog.text for word in words) and bool(words) == bool(caplog.text)


@pytest.mark.parametrize("times", [0.5, 5, 50])
def test_a_budget_that_two_readings_of_the_same_model_differ_by_is_refused(
    make_module, make_batches, fit, caplog, times
):
    """The model's last layer adds some at random, as kernels do whose order of summing is not fixed."""
    generator = torch.Generator().manual_seed(3)

    class Noisy(L.Callback):
        """Takes the place of one of the run's own: it tells what the noise is."""

        def on_train_start(self, trainer, module):
            layer = module.language_model.model.norm
            layer.register_forward_hook(lambda *a: a[-1] + 0.05 * torch.randn(a[-1].shape, generator=generator))
            part = GeneralPart(module.as_trained(), batches(general_text().documents, 2048, 0))
            meter.budget = times * part.read().share

    meter = DriftMeter(lambda *_: general_text(), 0.02, (1e-3, 1e3), 32, 32, 0)
    raised = pytest.raises(UserError, match="differ by") if times < 1 else nullcontext()
    with caplog.at_level(logging.WARNING, "granite_scu"), raised:
        fit(make_module(), make_batches(1), callbacks=[Noisy(), meter])
    assert ("noise in what is held" in caplog.text) == (times == 5)


@pytest.mark.usefixtures("no_step_is_tried")
@pytest.mark.parametrize("validation", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
def test_what_ends_beyond_the_budget_is_scaled_to_it_and_kept(tmp_path, validation):
    """A real run whose lambda may not rise: its last adapter has learned most, and drifted beyond the budget."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(
            f"The {number}th lock is oiled in week {number + 3}, says the keeper. " * 12
        )
    general = tmp_path / "general.jsonl"
    lines = (f"def area_{n}(width, height):\n    return {n} * width * height\n\n" * 6 for n in range(24))
    general.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    run = {"output_dir": str(tmp_path / "run"), "eval_steps": 4}
    drift = {"max_drift": "2%", "general_data": str(general), "general_tokens": 2048}
    control = {"lambda_init": 1e-3, "lambda_max": 2e-3, "every": 2}
    data = {"path": str(texts), "block_size": 64, "held_out_share": validation}
    groups = {"run": run, "drift": drift, "control": control, "data": data}
    settings = {f"{group}.{name}": value for group, of in groups.items() for name, value in of.items()}
    request = Request.from_dotted(settings | {
        "base.name": TINY_MODEL, "optimizer.learning_rate": 1e-2, "trainer.max_steps": 12, "trainer.accelerator": "cpu"
    })  # fmt: skip
    summary = train(prepare(request, Console(quiet=True)))
    found, run = summary["drift"], tmp_path / "run"
    assert found["within"] and 0.9 * 0.02 <= found["share"] <= 1.1 * 0.02 and 0 < found["scale"] < 1
    if validation:
        assert summary["best_val_step"] == 12 and summary["best_val_bpt"] > summary["final_val_bpt"]
    kept, last = (load_file(folder / "adapter_model.safetensors") for folder in (run, run / "final"))
    for name, factor in kept.items():
        torch.testing.assert_close(factor, last[name] * (found["scale"] if ".lora_B." in name else 1))
    assert f"scaled by {found['scale']:.2f}" in which_adapter(summary)


@pytest.mark.parametrize(("of_last", "step", "scaled"), [(2.4, 40, True), (1.7, 400, False)])
def test_the_best_adapter_is_scaled_where_unseen_text_has_it_beyond_the_budget(
    make_module, tmp_path, of_last, step, scaled
):
    """The last one, within, takes its place only where it validates better."""
    module = make_module()
    first = [torch.ones_like(factor) for factor in module.factors]

    class Meter(DriftMeter):
        def read(self) -> Drift:  # of the best 2.5 %, as the square of its size
            return Drift(0.025 * 3.0 * float(module.factors[1].detach().mean()) ** 2, 3.0, 100)

    meter = Meter(lambda *_: general_text(), 0.02, (1e-3, 1e3), 32, 32, 0)
    best = BestAdapter(tmp_path / "best", 0.02, meter.steered)
    trainer = SimpleNamespace(
        global_step=40, is_global_zero=True, strategy=SimpleNamespace(broadcast=lambda found: found)
    )
    for at, size, val_bpt, steered in ((40, 1.0, 1.8, 0.019), (400, 0.5, of_last, 0.03)):
        module.put([size * factor for factor in first])
        trainer.global_step, meter._steered = at, steered
        best.consider(trainer, module, val_bpt)
    final = FinalScore(None, None, best, None, None, None, drift=meter)

    def size() -> float:
        return float(module.factors[1].detach().mean())

    final._validated = lambda *_: 1.85 if best.step == 40 and size() > 0.6 else of_last
    found = final._fit_budget(trainer, module, meter)
    assert (best.step, best.drift) == (step, found.share) and meter.holds(found) and (meter.scale < 1) == scaled
    torch.testing.assert_close(list(module.factors), [0.5 * factor for factor in first])


@given(st.floats(1.11, 30), st.floats(1, 4), st.floats(1e-4, 0.5))
def test_a_part_of_what_was_learned_is_found_whose_drift_is_the_budget(times, power, budget):
    """Where drift goes as a power of the part, at once or after a second reading."""
    read = []

    def share_of(part: float) -> float:
        read.append(part)
        return times * budget * part**power

    part = part_within(budget, times * budget, share_of)
    assert part == read[-1] and 0 < part < 1 and len(read) <= 4
    assert 0.9 * (1 - 1e-9) <= share_of(part) / budget <= 1.1 * (1 + 1e-9)
