"""What a run folder asks to be done next, and with which command."""

import json

import pytest
from folders import METRICS, record, rising, settings, write_run

from granite_scu.viz.run_folder import read_run
from granite_scu.viz.what_now import place, what_now, where

DEFAULT = {"controller": "pi", "target_s": "auto"}


def advice(folder, history=None, validations=(), metrics=METRICS, **changes):
    """By title, what a run of these asks for."""
    changes = {"run": {"output_dir": f"runs/{folder.name}"}} | changes
    write_run(folder, history or rising(), {"controller": "pi"}, settings(**changes), validations, metrics)
    return {each.title: each for each in what_now(read_run(folder))}


def test_a_better_adapter_is_to_be_used_and_made_sure_of(tmp_path):
    found = advice(tmp_path / "demo")
    use = found["Try the adapter"]
    assert "5.850 against 6.500 bits per token on held-out documents, \N{MINUS SIGN}10.0\N{NO-BREAK SPACE}%" in use.text
    assert "It lies in runs/demo." in use.text
    assert use.command == 'granite-scu generate runs/demo --prompt "..."'
    assert found["Make sure of the difference"].command == "granite-scu eval runs/demo"


def test_a_run_that_was_scored_by_document_is_not_to_be_scored_again(tmp_path):
    advice(tmp_path / "demo")
    (tmp_path / "demo" / "eval_bpt.json").write_text(json.dumps({"units": "documents", "pairs": []}))
    titles = [each.title for each in what_now(read_run(tmp_path / "demo"))]
    assert "Use the adapter" in titles and "Make sure of the difference" not in titles


@pytest.mark.parametrize(
    ("high", "title"), [(-0.1, "Use the adapter"), (0.02, "The adapter is not shown to be better")]
)
def test_an_interval_with_0_in_it_is_heeded(tmp_path, high, title):
    advice(tmp_path / "demo")
    found = {"units": "documents", "pairs": [{"a": "base", "b": "demo", "low": -0.7, "high": high}]}
    (tmp_path / "demo" / "eval_bpt.json").write_text(json.dumps(found))
    first = what_now(read_run(tmp_path / "demo"))[0]
    assert first.title == title and first.command.startswith("granite-scu generate runs/demo")


def test_of_two_adapters_it_says_which(tmp_path):
    use = advice(tmp_path / "demo", metrics=METRICS | {"best_val_step": 300})["Try the adapter"]
    assert "is that of step 300. That of the last step, in final/, validated worse." in use.text


def test_an_adapter_that_is_no_better_is_not_to_be_used(tmp_path):
    found = advice(tmp_path / "demo", metrics=METRICS | {"adapter_test_bpt": 6.6})
    assert "Try the adapter" not in found and "Use the base model." in found["Do not use this adapter"].text
    assert found["Try a lower learning rate"].command == (
        "granite-scu train --config runs/demo/config.yaml --output-dir runs/demo-2 --learning-rate 0.0003"
    )


@pytest.mark.parametrize(
    ("validations", "control", "title", "flags"),
    [
        ([(100, 6.1), (200, 6.0), (300, 5.95)], DEFAULT, "Train longer", "--max-steps 800"),
        ([(100, 5.7), (200, 6.0), (300, 5.95)], DEFAULT, "Train for fewer steps", "--max-steps 100"),
        ([(100, 5.7), (200, 6.0)], {}, "Try the default controller", "--controller pi --target-s auto"),
        ([], DEFAULT, "Validate more often", "--eval-steps 80"),
    ],
)
def test_where_the_validation_was_best_says_what_to_try(tmp_path, validations, control, title, flags):
    found = advice(tmp_path / "demo", validations=validations, control=control)
    assert found[title].command.endswith(f"--output-dir runs/demo-2 {flags}")


def test_another_run_neither_replaces_one_nor_goes_on_from_one(tmp_path):
    asked = {"output_dir": "runs/demo", "overwrite": True, "resume": "last"}
    command = advice(tmp_path / "demo", run=asked)["Validate more often"].command
    assert "--output-dir runs/demo-2 --run.overwrite false --run.resume null --eval-steps 80" in command


def test_a_run_whose_length_is_in_epochs_is_made_longer_in_epochs(tmp_path):
    found = advice(tmp_path / "demo", validations=[(100, 6.1), (300, 5.95)], data={"num_epochs": 1.5})
    assert found["Train longer"].command.endswith("--num-epochs 3")


@pytest.mark.parametrize("late", [5.901, 5.899])
def test_a_validation_that_stood_still_at_the_end_asks_for_nothing(tmp_path, late):
    found = advice(tmp_path / "demo", validations=[(100, 6.1), (300, late)])
    assert list(found) == ["Try the adapter", "Make sure of the difference"]


def test_a_stopped_run_has_the_signal_and_the_command_that_goes_on(tmp_path):
    advice(tmp_path / "my run", metrics=None)
    (tmp_path / "my run" / "stopped.json").write_text(json.dumps({"signal": "SIGINT", "step": 1200}))
    (only,) = what_now(read_run(tmp_path / "my run"))
    assert "stopped by SIGINT (Ctrl-C) after step 1,200" in only.text
    assert only.command == "granite-scu train --output-dir 'runs/my run' --resume-from-checkpoint last"


def test_a_run_that_was_cut_off_goes_on_from_its_last_checkpoint_if_it_has_one(tmp_path):
    first = advice(tmp_path / "demo", metrics=None)["Start the run again"]
    assert first.command == "granite-scu train --config runs/demo/config.yaml --output-dir runs/demo-2"
    (tmp_path / "demo" / "checkpoint-100").mkdir()
    (only,) = what_now(read_run(tmp_path / "demo"))
    assert only.command.endswith("--resume-from-checkpoint last")


def test_a_setpoint_that_was_not_held_is_among_what_to_do(tmp_path):
    low = [record(10 * k, s_ema=0.01) for k in range(1, 41)]
    control = {"settling_time": None, "iae": 0.7}
    found = advice(tmp_path / "demo", low, metrics=METRICS | {"control": control})
    assert found["Let S settle"].command.endswith("--max-steps 800")


def test_a_folder_is_named_as_it_was_asked_for_unless_by_a_path_from_the_root(tmp_path):
    for number, (asked, named, ends) in enumerate(
        [("out/{}", "out/{}", "started."), ("/home/me/{}", "{}", "with the path of the run folder in place of run-1.")]
    ):
        name = f"run-{number}"
        folder = write_run(tmp_path / name, [record(10)], {}, settings(run={"output_dir": asked.format(name)}))
        run = read_run(folder)
        assert place(run) == named.format(name) and where(run).endswith(ends)
