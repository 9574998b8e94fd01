"""Cells trained on a small base, as the command trains them."""

import dataclasses

import pytest
import torch

from benchmarks.cells import BASES
from benchmarks.learning_rates_data import GENERAL, KNOWN
from granite_scu import Request
from granite_scu.config.settings import BaseConfig
from granite_scu.model import loading
from research.real.evidence import OTHERS
from research.real.grid import ARMS, FORMER, FREE, SCALED, Cell, adapter
from research.real.measuring import CHECKPOINTS
from research.real.product import of_arm
from research.real.tasks import TESTED
from research.real.training import keep_models, run

DENSE = str(BASES["tiny-prose-dense"])
CELL = Cell("tiny-prose-dense", "telegram", "plain", 0.0, 1e-2)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm == "wide" or arm not in FORMER])
def test_every_arm_is_a_request_that_the_product_takes(arm, tmp_path):
    for value in ARMS[arm]:
        asked = of_arm(dataclasses.replace(CELL, arm=arm, value=value), tmp_path / "general.jsonl")
        request = Request.from_dotted(asked | {"base.name": "tiny-granite-h", "data.path": "stdlib-docs"})
        assert bool(request.drift.max_drift) == (arm in ("drift", "held", "kl", "both", "wide"))
        assert (request.control.controller == "none") == (arm in ("plain", "replay", "decay", "dropout", "rank"))


def test_a_base_is_read_once_and_every_run_has_a_copy_of_its_own(monkeypatch):
    read = []
    real = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *of: read.append(of) or real(*of))
    keep_models()
    first, second = (loading.load_model(BaseConfig(DENSE), torch.float32) for _ in range(2))
    weights = [next(model.parameters()) for model in (first, second)]
    weights[0].data.zero_()
    assert len(read) == 1 and weights[1].abs().sum() > 0


@pytest.mark.slow
def test_a_plain_run_is_measured_at_every_adapter_that_it_gives_for_nothing(tmp_path):
    found = run(CELL, DENSE, tmp_path, "cpu")
    assert {point for point in FREE if point != "scaled"} <= set(found["points"])
    best, base = found["points"]["best"], found["at_base"]
    assert [len(best["nats"][text]) for text in ("test", *OTHERS)] == [TESTED, len(GENERAL), 30, 8, 8]
    assert sum(best["nats"]["test"]) < sum(base["nats"]["test"]) / 2
    assert len(best["right"]) == TESTED and len(base["known"]) == len(KNOWN)
    assert "right" in adapter(found, "scaled")
    on_the_way = [of["validation"] for name, of in found["points"].items() if name.startswith("step ")]
    assert len(on_the_way) == CHECKPOINTS - 1
    assert best["validation"] <= min(found["points"]["end"]["validation"], *on_the_way) + 1e-4
    again = run(CELL, DENSE, tmp_path, "cpu")
    assert again["points"] == found["points"] and again["digest"] == found["digest"]


@pytest.mark.slow
def test_replay_is_measured_at_every_scale_and_each_is_asked(tmp_path):
    found = run(dataclasses.replace(CELL, arm="replay", value=0.5), DENSE, tmp_path, "cpu")
    assert set(SCALED.values()) <= set(found["points"])
    assert all("right" in of for of in found["points"].values())
    drifts = [found["points"][point]["drift"] for point in SCALED.values()]
    assert drifts == sorted(drifts) and drifts[0] < drifts[-1] / 2


@pytest.mark.slow
def test_both_holds_the_budget_and_a_smaller_adapter(tmp_path):
    loop, both = (
        run(dataclasses.replace(CELL, arm=arm, value=0.02), DENSE, tmp_path, "cpu") for arm in ("drift", "both")
    )
    assert all(0 < each["loop"]["held_out"] < 2 * 0.02 for each in (loop, both))
    assert both["points"]["end"]["nats"] != loop["points"]["end"]["nats"]
