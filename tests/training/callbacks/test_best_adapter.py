"""The best validation and its adapter are one folder, which a resumed run continues from."""

import json
import math
import os
import stat
from types import SimpleNamespace

import pytest

from granite_scu.config.errors import Diverged
from granite_scu.training.callbacks.best_adapter import RECORD, BestAdapter
from granite_scu.training.callbacks.final_score import FinalScore

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def saved(make_module, tmp_path):
    """A run's best adapter after validations at steps 10, 20 and 30, of which the second was the best."""
    best, module = BestAdapter(tmp_path / "run" / "best"), make_module()
    best.folder.parent.mkdir()
    for step, val_bpt in ((10, 5.5), (20, 5.1), (30, 5.3)):
        best.consider(SimpleNamespace(global_step=step, is_global_zero=True), module, val_bpt)
    return best


@pytest.fixture
def elsewhere(tmp_path):
    """The best adapter of a run in another folder, which has none yet."""
    (tmp_path / "other").mkdir()
    return BestAdapter(tmp_path / "other" / "best")


def contents(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def test_the_record_lies_beside_its_adapter(saved):
    assert set(contents(saved.folder)) == {ADAPTER, "adapter_config.json", RECORD}
    assert json.loads((saved.folder / RECORD).read_text()) == {"val_bpt": 5.1, "step": 20}
    assert (saved.latest, saved.latest_step) == (5.3, 30)


def test_a_run_that_goes_on_has_its_record_to_beat(saved, make_module):
    before, best = contents(saved.folder), BestAdapter(saved.folder)
    best.resume(saved.folder, write=False)
    assert (best.val_bpt, best.step) == (5.1, 20)
    trainer, module = SimpleNamespace(global_step=40, is_global_zero=True), make_module()
    best.consider(trainer, module, 5.2)
    assert contents(saved.folder) == before
    best.consider(trainer, module, 5.0)
    assert json.loads((saved.folder / RECORD).read_text()) == {"val_bpt": 5.0, "step": 40}


def test_within_the_budget_of_drift_the_best_validated_is_kept_and_else_the_nearest(make_module, tmp_path):
    drifts, module = iter([0.05, 0.03, 0.04, 0.0219, 0.01, 0.0221, math.nan, 0.0, 0.0]), make_module()
    best, kept = BestAdapter(tmp_path / "best", 0.02, lambda: next(drifts)), []
    trainer = SimpleNamespace(is_global_zero=True)
    for step, val_bpt in enumerate([5.0, 5.2, 4.8, 5.5, 5.4, 4.0, 3.9, 6.0, math.nan]):
        trainer.global_step = step
        best.consider(trainer, module, val_bpt)
        kept.append((best.step, best.drift))
    assert kept == [(0, 0.05), (1, 0.03), (1, 0.03), (3, 0.0219), *[(4, 0.01)] * 5]
    again = BestAdapter(best.folder, 0.02, lambda: 0.03)
    again.resume(best.folder, write=False)
    again.consider(trainer, module, 3.0)
    assert (again.step, again.drift, again.latest) == (4, 0.01, 3.0)


def test_a_validation_that_is_no_number_is_never_the_best(make_module, tmp_path):
    best, module = BestAdapter(tmp_path / "best"), make_module()
    for step, val_bpt in ((10, math.nan), (15, math.inf), (20, 5.1), (30, math.nan), (40, 5.3)):
        best.consider(SimpleNamespace(global_step=step, is_global_zero=True), module, val_bpt)
        assert best.folder.exists() is (step >= 20)
    assert (best.val_bpt, best.step, best.latest) == (5.1, 20, 5.3)


def test_the_latest_validation_is_remembered(saved):
    best = BestAdapter(saved.folder)
    best.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert (best.latest, best.latest_step) == (5.3, 30)


def test_a_checkpoints_copy_takes_the_place_of_what_came_later(saved, elsewhere):
    """The steps after it are done again, perhaps otherwise."""
    elsewhere.folder.mkdir()
    (elsewhere.folder / "from a later step").write_text("")
    (saved.folder / "a link").symlink_to("/etc/hostname")  # a stranger's
    before = {name: content for name, content in contents(saved.folder).items() if name != "a link"}
    saved.folder.chmod(0o555)  # of a run that is protected; the copy is not
    elsewhere.resume(saved.folder, write=True)
    assert os.stat(elsewhere.folder).st_mode & stat.S_IWUSR
    assert (elsewhere.val_bpt, elsewhere.step) == (5.1, 20)
    assert contents(elsewhere.folder) == before


def test_a_checkpoint_without_a_copy_leaves_nothing_to_beat(saved, tmp_path):
    saved.resume(tmp_path / "nowhere" / "best", write=True)
    assert (saved.val_bpt, saved.step) == (None, None)
    assert not saved.folder.exists()


def test_a_rank_that_does_not_write_only_reads(saved, elsewhere):
    elsewhere.resume(saved.folder, write=False)
    assert (elsewhere.val_bpt, elsewhere.step) == (5.1, 20)
    assert not elsewhere.folder.exists()


@pytest.mark.parametrize("diverged", ["adapter", "base model"])
def test_a_score_of_the_test_text_that_is_not_finite_is_an_error(make_module, diverged):
    final = FinalScore(None, None, None, None, None, None)
    final._score_test = lambda trainer, module, what: SimpleNamespace(
        bits_per_token=math.nan if what == diverged else 5.0, tokens=9
    )
    with pytest.raises(Diverged, match=f"the {diverged} scores nan bits/token on the test text; lower --learning-rate"):
        final._scores(SimpleNamespace(global_step=40), make_module())
