"""What a resumed run or a scored folder must not silently change."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from outcomes import done, refused_line
from rounding import OF_EMBEDDED, rounding

from granite_scu.cli.main import main
from granite_scu.config.settings import TINY_MODEL
from granite_scu.evaluation.bpt import subjects, texts
from granite_scu.model import finding, saved_adapter
from granite_scu.storage import manifest
from granite_scu.storage.run_folder import csv_legs

SHORT = ("--test-run", "--precision", "fp32", "--batch-size", "2", "--block-size", "64", "--eval-iters", "2")
SHORT += ("--eval-batch-size", "16")


@pytest.fixture(scope="session")
def short(corpus):
    """Flags of a run of seconds."""
    return (*SHORT, "--data-dir", corpus)


@pytest.fixture(scope="module")
def run(launch, short, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    flags = ("--max-steps", 6, "--save-steps", 3, "--eval-steps", 3, "--control-every", 2)
    done(launch, *short, *flags, "--output-dir", folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--controller", "fixed"), "its controller is pi; resume with --controller pi"),
        (("--prior-sigma", "0.01"), "--prior-sigma was 0.02 and is now 0.01"),
        (("--n-tokens", "5"), "--n-tokens was"),
        (("--batch-size", "1"), "--batch-size was 2 and is now 1"),
        (("--lora-alpha", "7"), "--lora-alpha was 32.0 and is now 7.0"),
        (("--lora-r", "4", "--overwrite"), "adapters do not fit"),
    ],
)
def test_a_resume_that_would_mean_something_else_is_refused_also_by_the_plan(run, short, launch, flags, words):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for asked in ((), ("--dry-run",)):
        again = ("--max-steps", 8, "--resume-from-checkpoint", run / "checkpoint-3", *asked)
        code, out, err = launch(*short, *again, *flags)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err and "loading " not in out
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_what_is_not_given_is_the_runs_own_and_what_is_changed_is_named(run, launch, tmp_path):
    folder, kept = tmp_path / "other", shutil.copytree(run, tmp_path / "run") / "kept"
    (kept.parent / "checkpoint-3").rename(kept)
    flags = ("--output-dir", folder, "--max-steps", 5, "--gradient-clip", 0.5, "--eval-batch-size", 8)
    said = " ".join(done(launch, "--resume-from-checkpoint", kept, *flags).split())
    assert [step for step, _ in csv_legs(folder)] == [0, 3]  # whatever the checkpoint is called
    assert "changed since the checkpoint: " in said and "; the result will differ from an uninterrupted run" in said
    named = said.split("changed since the checkpoint: ")[1]
    assert "--gradient-clip 1.0 -> 0.5" in named and "--max-steps 6 -> 5" in named
    config = json.loads((folder / "training_config.json").read_text())
    assert config["trainer"]["limit_val_batches"] == 4 and "--eval-iters" not in named  # of 8 blocks: before 2 of 16
    assert (config["data"]["block_size"], config["run"]["save_steps"], config["optimizer"]["gradient_clip"]) == (
        64,
        3,
        0.5,
    )
    history = json.loads((folder / "scu_history.json").read_text())
    assert [record["step"] for record in history] == [2, 4, 5]


SPOILT = {
    "a law without state": lambda state: state["callbacks"]["ShannonControl"].pop("controller"),
    "a schedule that is missing": lambda state: state["lr_schedulers"].clear(),
    "loops of another kind": lambda state: state["loops"].update(fit_loop=5),
    "not a number": lambda state: state["callbacks"]["ShannonControl"].update(travel=float("nan")),
    "a generator of another length": lambda state: state["random"].update(cpu=torch.zeros(5, dtype=torch.uint8)),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_state_that_no_run_has_written_is_told_by_its_checkpoint(run, launch, tmp_path, spoil):
    checkpoint = shutil.copytree(run, tmp_path / "run") / "checkpoint-3"
    state = torch.load(checkpoint / "state.ckpt", weights_only=True)
    SPOILT[spoil](state)
    torch.save(state, checkpoint / "state.ckpt")
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint)
    err = refused_line(launch, "--resume-from-checkpoint", checkpoint, "--output-dir", tmp_path / "other")
    assert f"--resume-from-checkpoint {checkpoint}: " in err
    assert "its state is corrupt (" in err or "failed before its first step (" in err


def test_a_run_that_chose_its_precision_keeps_it(run, launch, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    config = (folder / "config.yaml").read_text()
    assert "precision: 32-true" in config
    # As of a run that was given none, and found fp32 to be faster.
    (folder / "config.yaml").write_text(config.replace("precision: 32-true", "precision: null"))
    code, out, err = launch(
        "--resume-from-checkpoint", folder / "checkpoint-6", "--max-steps", 8, "--dry-run", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["precision"] == "32-true"


def test_a_text_that_was_named_from_another_folder_is_found(run, launch, corpus, tmp_path):
    folder = shutil.copytree(run, tmp_path / "work" / "run")
    shutil.copy(corpus, tmp_path / "work" / "mine.txt")
    for file in ("training_config.json", "config.yaml"):
        (folder / file).write_text((folder / file).read_text().replace(str(corpus), "mine.txt"))
    recorded = json.loads((folder / "training_config.json").read_text())
    (folder / "training_config.json").write_text(json.dumps(recorded | {"working_folder": ".."}))
    code, out, err = launch(
        "--resume-from-checkpoint", folder / "checkpoint-6", "--max-steps", 8, "--dry-run", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["first_step"] == 6
    assert texts.held_out(folder, []).documents


@pytest.mark.slow
def test_a_model_that_was_named_from_another_folder_is_found(launch, short, tmp_path, monkeypatch):
    """And the course is not said to have changed by that."""
    here, work = tmp_path / "here", tmp_path / "work"
    here.mkdir()
    shutil.copytree(finding.resolve(TINY_MODEL), work / "model")
    monkeypatch.chdir(work)
    flags = ("--model", "model", "--max-steps", 4, "--save-steps", 2, "--control-every", 2, "--samples", 0)
    done(launch, *short, *flags, "--target-s", "2%", "--output-dir", "runs/pi")
    monkeypatch.chdir(here)
    out = done(launch, "--resume-from-checkpoint", "../work/runs/pi/checkpoint-2", "--output-dir", "again")
    assert "continuing from checkpoint-2" in out and "changed since" not in out
    assert saved_adapter.find("../work/runs/pi").base.name == str(work / "model")
    assert subjects.identify(["../work/runs/pi"])[0].base == str(work / "model")


def test_a_run_folder_decides_no_folder_to_keep_tokens_in_unless_that_holds_some(run, launch, corpus, tmp_path):
    folder, cache, ours = shutil.copytree(run, tmp_path / "run"), tmp_path / "somebody's", tmp_path / "ours"
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    assert "\n  cache_dir: null\n" in config
    (folder / "config.yaml").write_text(config.replace("cache_dir: null", f'cache_dir: "{cache}"'), encoding="utf-8")
    again = ("--output-dir", folder, "--resume-from-checkpoint", "last", "--max-steps", 8, "--dry-run")
    out = done(launch, *again)
    assert "holds no kept tokens; the usual folder is taken" in " ".join(out.split()) and not cache.exists()
    shutil.copytree(Path(os.environ["XDG_CACHE_HOME"]) / "granite-scu", cache)
    code, out, err = launch(*again)
    assert code == 0 and "holds no kept tokens" not in out, err
    assert launch(*again, "--cache-dir", ours)[0] == 0 and list(ours.glob("*/meta.json"))


def test_the_text_must_be_the_same(run, short, launch):
    another = ("--data-dir", "stdlib-source")
    err = refused_line(launch, *short, "--max-steps", 8, "--resume-from-checkpoint", run / "checkpoint-3", *another)
    assert "--data-dir: the text is another one" in err


@pytest.mark.parametrize(("flag", "value"), [("--block-size", 32), ("--packing", "best-fit")])
def test_another_way_to_cut_the_text_is_named_and_not_the_text(run, short, launch, flag, value):
    again = ("--max-steps", 8, "--resume-from-checkpoint", run / "checkpoint-3", flag, value)
    err = refused_line(launch, *short, *again)
    assert f"--resume-from-checkpoint: {flag} was" in err and f"is now {value}" in err and "checksum" not in err


def test_going_back_in_a_run_folder_must_be_meant(run, launch):
    """What is newer would be of another course, and the next ``last`` would go on with that."""
    err = refused_line(launch, "--resume-from-checkpoint", run / "checkpoint-3")
    assert "checkpoint-6 is newer; continue from that, or from here in another --output-dir, or drop" in err


@pytest.mark.slow
def test_going_back_drops_what_is_newer(run, launch, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    flags = ("--max-steps", 5, "--save-steps", 4, "--overwrite")
    assert launch("--resume-from-checkpoint", folder / "checkpoint-3", *flags)[0] == 0
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_auto_never_replaces_a_run_that_is_finished(run, short, launch, tmp_path):
    """Its checkpoints may have been removed to save space."""
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    err = refused_line(launch, *short, "--output-dir", folder, "--resume-from-checkpoint", "auto")
    assert "is not empty; choose another folder, replace the run with --overwrite" in err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_finished_is_not_gone_on_with(run, short, launch):
    err = refused_line(launch, *short, "--output-dir", run, "--resume-from-checkpoint", "last")
    assert "it is at step 6 and the run ends at 6; raise --max-steps to continue" in err


def test_scoring_a_folder_heeds_the_adapters_own_configuration(run, call):
    out = done(call, main, "test", "--config", run / "config.yaml", "--lora.alpha=2")
    reported = json.loads((run / "scu_metrics.json").read_text())["adapter_test_bpt"]
    assert json.loads(out)["adapter_bpt"] == pytest.approx(reported, rel=rounding(OF_EMBEDDED))


def test_a_models_own_code_is_never_run(launch, tmp_path, monkeypatch):
    model = tmp_path / "evil"
    model.mkdir()
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    refused_line(launch, "--test-run", "--model", model)
    assert not (tmp_path / "ran").exists()
