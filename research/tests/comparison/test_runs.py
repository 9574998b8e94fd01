"""Which of the ways that a run ends in are results."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from granite_scu.config.errors import Diverged, RunFailed, UserError
from research.comparison import runs
from research.comparison.evidence import Spec
from research.comparison.protocol import NONE, Task
from research.run_store import write_record

SPEC = Spec(Task("first", "stdlib-docs", 1024, 4), "none", "", 0, NONE.settings | {"optimizer.learning_rate": 1e-3})


@pytest.fixture
def ending(bf16, monkeypatch):
    """Runs end so instead of training, in the precision of the plan on every processor."""

    def end_by(error: Exception) -> None:
        def train(run, **_):
            raise error

        monkeypatch.setattr(runs, "train", train)

    return end_by


def test_an_arm_that_diverges_is_a_result(ending, tmp_path):
    ending(Diverged("step 20: loss or gradient was not finite"))
    assert runs.carry_out(SPEC, tmp_path)["failed"] == "step 20: loss or gradient was not finite"
    assert (tmp_path / SPEC.file).is_file()


@pytest.mark.parametrize("error", [RunFailed("out of memory on a CPU"), UserError("--data-dir: gone"), OSError("full")])
def test_what_is_not_the_arms_doing_leaves_no_record_so_that_it_is_done_again(ending, tmp_path, error):
    ending(error)
    with pytest.raises(type(error), match=str(error)):
        runs.carry_out(SPEC, tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_what_is_replayed_is_of_the_same_precision(evidence, finish, monkeypatch):
    """The folder has runs in another one, too, which would be passed over together with it."""
    source = replace(SPEC, precision="32-true")
    finish(SPEC)
    record = finish(source)
    write_record(
        evidence.folder / source.file, record | {"settings": {**record["settings"], "trainer.precision": "32-true"}}
    )
    replay = Spec(SPEC.task, "replay", "", 1, {"control.controller": "replay", "control.replay": source.key}, "32-true")
    begun = []

    def train(run, **_):
        begun.append(run)
        raise Diverged("here")

    monkeypatch.setattr(runs, "train", train)
    runs.carry_out(replay, evidence.folder)
    assert [*begun[0].controller.steps] == record["ticks"]["step"] and begun[0].machine.precision == "32-true"


def test_an_adapter_that_scores_infinity_has_diverged():
    best = SimpleNamespace(latest_step=4, latest=math.inf)
    finish = runs.ScoreByDocument(None, None, best, SimpleNamespace(stop=lambda: None), None, None)
    trainer = SimpleNamespace(datamodule=None, global_step=4)
    with pytest.raises(Diverged, match="scores inf bits/token on the validation text"):
        finish.on_train_end(trainer, None)
