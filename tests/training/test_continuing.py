"""What a checkpoint of other blocks is refused with."""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.training.continuing import _warn_of_changes, _warn_of_versions, check_blocks, check_resumable
from granite_scu.training.resume import (
    TEXT,
    VALIDATED,
    Resume,
    attribute_errors_to_checkpoint,
    with_checkpoint_settings,
)


def test_what_fails_before_the_first_step_may_have_another_cause_than_the_checkpoint():
    resume = Resume(Path("run/checkpoint-4"), {}, in_place=True)
    message = r"failed before its first step \(RuntimeError: mine\); if another checkpoint fails alike"
    with pytest.raises(UserError, match=message), attribute_errors_to_checkpoint(resume, lambda: False):
        raise RuntimeError("mine")
    with pytest.raises(torch.AcceleratorError), attribute_errors_to_checkpoint(resume, lambda: False):
        raise torch.AcceleratorError("an illegal memory access", 700)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"--held-out-share": 0.2}, "--held-out-share was 0.2 and is now the default"),
        ({"--held-out-share": None}, "--data-dir: the text is another one"),
    ],
)
def test_other_blocks_are_refused_by_what_makes_them(settings, words):
    now = defaultdict(lambda: None)
    resume = Resume(Path("run/checkpoint-4"), {"settings": settings, "frozen": {TEXT: "one"}}, in_place=True)
    check_blocks(resume, now, "one")
    with pytest.raises(UserError, match=words):
        check_blocks(resume, now, "two")


def test_a_run_that_continues_validates_on_as_many_blocks_whatever_its_batch():
    resume = Resume(Path("run/checkpoint-4"), {"settings": {VALIDATED: 296, "--batch-size": 8}}, in_place=True)
    batches = {
        size: with_checkpoint_settings(Request.from_dotted({"data.eval_batch_size": size}), resume)
        for size in (None, 8, 3)
    }
    assert [found.trainer.limit_val_batches for found in batches.values()] == [37, 37, 99]


def test_what_an_earlier_version_has_not_recorded_is_not_said_to_have_changed(caplog):
    resume = Resume(Path("run/checkpoint-4"), {"settings": {"--seed": 1}, "frozen": {}}, in_place=True)
    _warn_of_changes(resume, {"--seed": 1, VALIDATED: 50})
    assert not caplog.text
    _warn_of_changes(resume, {"--seed": 2, VALIDATED: 50})
    assert "changed since the checkpoint: --seed 1 -> 2;" in caplog.text


def test_other_versions_than_the_runs_are_named(caplog, tmp_path):
    resume = Resume(tmp_path / "checkpoint-4", {}, in_place=True)
    for before, said in ((torch.__version__, False), ("2.0.0", True)):
        (tmp_path / "training_config.json").write_text(json.dumps({"versions": {"torch": before}}))
        _warn_of_versions(resume)
        assert (f"torch {before} -> {torch.__version__}" in caplog.text) is said


def test_a_run_that_continues_looks_for_no_batch_but_keeps_the_one_that_was_found():
    settings = {VALIDATED: 296, "--batch-size": 3, "--gradient-accumulation-steps": 2}
    resume = Resume(Path("run/checkpoint-4"), {"settings": settings}, in_place=True)
    asked = {"run.auto_batch_size": True, "data.batch_size": 8, "run.resume": "auto"}
    found = with_checkpoint_settings(Request.from_dotted(asked), resume)
    assert (found.data.batch_size, found.trainer.accumulate_grad_batches) == (3, 2)
    assert not found.run.auto_batch_size


@pytest.mark.parametrize(
    ("length", "ends"),
    [
        ({"trainer.max_steps": 4}, "--max-steps"),
        ({"trainer.max_steps": -1, "data.num_epochs": 2.0}, "--num-epochs"),
        ({"trainer.max_steps": 9, "data.num_epochs": 2.0}, "--num-epochs"),
        ({"trainer.max_steps": 4, "data.num_epochs": 2.0}, "--max-steps"),
    ],
)
def test_a_run_at_its_end_is_told_what_ended_it(length, ends):
    request = Request.from_dotted({"control.controller": "fixed"} | length)
    law = request.control_held.law()
    run = SimpleNamespace(controller=law, length=SimpleNamespace(steps=4), request=request)
    state = {"global_step": 5, "callbacks": {"ShannonControl": {"name": type(law).__name__}}}
    with pytest.raises(UserError, match=f"at step 5 and the run ends at 4; raise {ends} to continue"):
        check_resumable(run, Resume(Path("run/checkpoint-5"), state, in_place=False))
