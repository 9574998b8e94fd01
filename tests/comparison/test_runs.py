"""Which of the ways that a run ends in are results."""

import math
from types import SimpleNamespace

import pytest

from granite_scu.comparison import runs
from granite_scu.comparison.evidence import Spec
from granite_scu.comparison.protocol import NONE, Task
from granite_scu.errors import Diverged, RunFailed, UserError

SPEC = Spec(Task("first", "stdlib-docs", 1024, 4), "none", "", 0, NONE.settings)


@pytest.fixture
def ending(monkeypatch):
    """Runs end so instead of training."""

    class Ends:
        found = None
        data = SimpleNamespace(text_digest="0")

        def __init__(self, *_) -> None:
            pass

        def fit(self):
            raise self.error

    monkeypatch.setattr(runs, "ComparedRun", Ends)
    return lambda error: setattr(Ends, "error", error)


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


def test_an_adapter_that_scores_infinity_has_diverged():
    best = SimpleNamespace(latest_step=4, latest=math.inf)
    finish = SimpleNamespace(stopwatch=SimpleNamespace(stop=lambda: None), best=best)
    trainer = SimpleNamespace(datamodule=None, global_step=4)
    with pytest.raises(Diverged, match="scores inf on the validation text"):
        runs.ScoreByDocument.on_train_end(finish, trainer, None)
