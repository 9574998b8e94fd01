"""The best validation and its adapter are one folder, which a resumed run goes on from."""

import json
from types import SimpleNamespace

import pytest

from granite_scu.callbacks.best import RECORD, BestAdapter

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


def test_no_checkpoint_has_a_second_copy_of_the_record(saved):
    assert not saved.state_dict()


@pytest.mark.parametrize("step", [20, 30])
def test_a_run_that_goes_on_has_its_record_to_beat(saved, make_module, step):
    before, best = contents(saved.folder), BestAdapter(saved.folder)
    best.resume(saved.folder, step, write=True)
    assert (best.val_bpt, best.step) == (5.1, 20)
    trainer, module = SimpleNamespace(global_step=40, is_global_zero=True), make_module()
    best.consider(trainer, module, 5.2)
    assert contents(saved.folder) == before
    best.consider(trainer, module, 5.0)
    assert json.loads((saved.folder / RECORD).read_text()) == {"val_bpt": 5.0, "step": 40}


def test_a_run_in_another_folder_takes_the_adapter_along(saved, elsewhere):
    elsewhere.resume(saved.folder, 30, write=True)
    assert (elsewhere.val_bpt, elsewhere.step) == (5.1, 20)
    assert contents(elsewhere.folder) == contents(saved.folder)


def test_a_record_from_after_the_checkpoint_is_discarded(saved, elsewhere):
    """The steps up to it are done again, perhaps otherwise; its own run keeps it if this one goes on elsewhere."""
    elsewhere.resume(saved.folder, 19, write=True)
    assert (elsewhere.val_bpt, elsewhere.step) == (None, None)
    assert not elsewhere.folder.exists() and saved.folder.exists()
    saved.resume(saved.folder, 19, write=True)
    assert (saved.val_bpt, saved.step) == (None, None)
    assert not saved.folder.exists()


def test_a_run_without_a_record_has_none_to_beat(elsewhere, tmp_path):
    elsewhere.resume(tmp_path / "nowhere" / "best", 30, write=True)
    assert (elsewhere.val_bpt, elsewhere.step) == (None, None)
    assert not elsewhere.folder.exists()


def test_a_rank_that_does_not_write_only_reads(saved, elsewhere):
    before = contents(saved.folder)
    elsewhere.resume(saved.folder, 30, write=False)
    assert (elsewhere.val_bpt, elsewhere.step) == (5.1, 20)
    assert not elsewhere.folder.exists()
    saved.resume(saved.folder, 19, write=False)
    assert (saved.val_bpt, saved.step) == (None, None)
    assert contents(saved.folder) == before
