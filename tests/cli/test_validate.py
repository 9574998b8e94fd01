"""Wrong requests that are answered at once."""

import errno
import json
import subprocess
import sys

import pytest
from outcomes import refusal

from granite_scu.cli import exit_codes, run_commands, script_flags, validate
from granite_scu.cli.main import main
from granite_scu.config import shipped
from granite_scu.config.settings import TINY_MODEL, DataConfig
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.model.loading import load_tokenizer
from granite_scu.storage.run_folder import GENERAL


def refused(*argv: str) -> str:
    def refuse() -> None:
        layers, _ = script_flags.translate(["--data-dir", "stdlib-docs", *argv])
        with layers.named():
            validate.refuse(layers)

    return refusal(refuse)


@pytest.fixture
def layer(tmp_path):
    """Writes a YAML file; returns its path."""

    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_an_unknown_key_of_a_file_is_named_with_its_line_and_what_may_be_meant(layer):
    path = layer("data:\n  batch_size: 2\ncontrol:\n  # how\n  target: 0.1\n")
    assert refused("--config", path) == (
        f"--config {path}:5: there is no setting control.target; did you mean control.target_s?"
    )
    path = layer("controll: {kp: 1.0}\n")
    assert f"{path}:1: there is no setting controll.kp; did you mean control.kp?" in refused("--config", path)
    path = layer("\ntrainer: {max_epochs: 2}\n")
    assert f"--config {path}:2: trainer.max_epochs 2: follows from other settings" in refused("--config", path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data.batchsize", "3"], "--data.batchsize: there is no such setting; did you mean --data.batch_size?"),
        (["--data.batch_size", "3.5"], "--batch-size 3.5: must be a whole number"),
        (["--lora.dropout", "some"], "--lora-dropout some: is no share, such as 10% or 0.1"),
            (["--lora.alpha", "some"], "--lora-alpha some: must be a number"),
        (["--trainer.detect_anomaly", "x"], "--trainer.detect_anomaly x: must be true or false"),
        (["--max-time", "1:30"], "--max-time 1:30: must have the form DD:HH:MM:SS"),
        (["--max-time", "00:00:00:00"], "--max-time 00:00:00:00: must have the form DD:HH:MM:SS, as 00:01:30:00, and"),
        (["--max-drift", "1e-300%"], "--max-drift 1e-300%: must be at least 0.001%"),
        (["--held-out-share", "1e-300"], "--held-out-share 1e-300: must be 0, or at least 0.1%"),
        (["--data-dir", ""], "--data-dir '': is empty"),
        (["--test-data", ""], "--test-data '': is empty"),
        (["--model", ""], "--model '': is empty"),
        (["--trainer.strategy", "ddp"], "--trainer.strategy ddp: follows from other settings; use --multi-gpu"),
        (["--trainer.fast_dev_run", "true"], "--trainer.fast_dev_run true: follows from other settings"),
        (["--block-size", "4"], "--block-size 4: must be at least 8 tokens"),
        (["--max-steps", "0"], "--max-steps 0: must be at least 1"),
        (["--num-epochs", "0"], "--num-epochs 0.0: must be positive"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--gradient-accumulation-steps", "0"], "--gradient-accumulation-steps 0: must be at least 1"),
        (["--eval-iters", "0"], "--eval-iters 0: must be at least 1"),
        (["--trainer.limit_val_batches", "0.5"], "--eval-iters 0.5: must be a whole number"),
        (["--logging-steps", "0"], "--logging-steps 0: must be at least 1"),
        (["--num-workers", "100000"], "--num-workers 100000: must be at least 0, and at most 256"),
        (["--save-steps", "0"], "--save-steps 0: must be at least 1"),
        (["--eval-steps", "0"], "--eval-steps 0: must be at least 1"),
        (["--seed", "-1"], "--seed -1: must be a whole number from 0 to 4294967295"),
        (["--learning-rate", "0"], "--learning-rate 0.0: must be positive"),
        (["--lora-r", "0"], "--lora-r 0: must be at least 1"),
        (["--lora-r", f"{10**30}"], "must be at least 1, and at most 1,000,000,000,000"),
        (["--lora-alpha", "inf"], "--lora-alpha inf: must be positive and finite"),
        (["--prior-sigma", "1e-300"], "--prior-sigma 1e-300: must be positive and finite, from 1e-12 to 1e15"),
        (["--accelerator", "tpu"], "--accelerator tpu: must be one of"),
        (["--lambda-min", "10", "--lambda-max", "1"], "--lambda-max 1.0: must be at least --lambda-min, here 10"),
        (["--lambda-init", "10", "--lambda-max", "1"], "--lambda-init 10.0: must lie in [1e-06, 1]"),
        (["--lambda-min", "0"], "--lambda-min 0.0: must be positive"),
        (["--ema-alpha", "0"], "--ema-alpha 0.0: must be in (0, 1]"),
        (["--control-every", "0"], "--control-every 0: must be at least 1"),
        (["--kp", "-1"], "--kp -1.0: must be positive"),
        (["--prior-sigma", "0"], "--prior-sigma 0.0: must be positive"),
        (["--n-tokens", "0"], "--n-tokens 0: must be positive"),
        (["--controller", "pid"], "no controller is called 'pid'; there are none, fixed"),
        (["--config", ""], "--config '': is empty"),
        (["--config", "nope.yaml"], "nope.yaml: there is no such file, and none of that name comes along (demo,"),
        (["--data-dir", "hf:../../x"], "--data-dir hf:../../x: no such folder"),
        (["--data-dir", "no/texts"], "--data-dir no/texts: no such file or folder"),
        (["--validation-data", "no/texts"], "--validation-data no/texts: no such file or folder"),
        (["--test-data", "hf:../../x"], "--test-data hf:../../x: no such folder"),
        (["--model", "./no-model"], "--model ./no-model: no such folder"),
        (["--output-dir", "bad\udcff"], "--output-dir 'bad\\udcff': has bytes that are not UTF-8"),
        (["--output-dir", "no-run", "--resume-from-checkpoint", "last"], "no-run holds no checkpoint"),
        (["--resume-from-checkpoint", "x/checkpoint-3"], "x/checkpoint-3: is not a checkpoint folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_words(argv, words):
    assert words in refused(*argv)


@pytest.mark.parametrize(("text", "words"), [("", "holds no text"), ('{"x": 1}\n', "chats.jsonl:1: no field")])
def test_a_text_that_is_empty_or_begins_wrong_is_refused(text, words, tmp_path):
    (tmp_path / "chats.jsonl").write_text(text)
    line = refused("--data-dir", str(tmp_path / "chats.jsonl"))
    assert line.startswith(f"--data-dir {tmp_path / 'chats.jsonl'}") and words in line


def test_a_run_folder_that_is_not_empty_is_refused_where_a_run_would_be_written(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    folder = ["--output-dir", str(tmp_path)]
    assert "is not empty" in refused(*folder)
    given = script_flags.translate(["--data-dir", "stdlib-docs", *folder])[0]
    validate.refuse(given, writes=False)
    monkeypatch.setenv("RANK", "1")  # the first process has begun to write there
    validate.refuse(given)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "is not empty" in refused(*folder)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("LOCAL_RANK", "1")  # of Lightning's own, in a job's script
    monkeypatch.setenv("SLURM_PROCID", "0")
    validate.refuse(given)
    validate.refuse(given, opens=False)


@pytest.mark.parametrize("path", sorted(shipped.folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_come_along_are_let_through(path, tmp_path):
    given, _ = script_flags.translate([f"--config={path}", f"--run.output_dir={tmp_path}", "--data.path=stdlib-docs"])
    validate.refuse(given)


@pytest.mark.parametrize(
    "given",
    [
        "--data.weights=[0.5]", "--data.path=[stdlib-docs, stdlib-source]", "--optimizer.learning_rate=1e-3",
        "--trainer.callbacks=null", "--control.kp=null", "--base.compile=null",
        "--hardware=auto", "--lora.targets=[in_proj]", "--seed_everything=true",
    ],
)  # fmt: skip
def test_what_the_parser_understands_is_let_through(given, tmp_path):
    parser = run_commands.build_parser("fit")
    argv = ["--data.path=stdlib-docs", f"--run.output_dir={tmp_path / 'run'}", given]
    validate.refuse(script_flags.translate(argv, parser)[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--target-s", "10%"], "--max-drift 2%: the loop holds either drift or S; leave out --target-s 10%, or"),
        (["--controller", "none"], "drift is held by --controller pi; leave out --controller none, or --max-drift"),
        (["--actuator", "decoupled"], "leave out --actuator decoupled, or --max-drift"),
        (["--stop-at-equilibrium", "30"], "leave out --stop-at-equilibrium 30, or --max-drift"),
        (["--general-data", "nowhere.jsonl"], "--general-data nowhere.jsonl: no such file or folder"),
    ],
)
def test_a_budget_of_drift_goes_with_nothing_else_that_is_held_and_its_text_is_there(tmp_path, given, words):
    assert words in refused("--output-dir", str(tmp_path), "--accelerator", "cpu", "--max-drift", "2%", *given)


def test_general_text_that_another_run_has_written_is_taken(tmp_path):
    file = tmp_path / GENERAL
    GeneralText((Document((1, 2), (False, True)),), "auto").write(file, load_tokenizer(TINY_MODEL))
    validate.check_data(DataConfig(), general=[str(file)])


@pytest.mark.parametrize("given", [["--general-data", __file__], ["--general-tokens", "4096"]])
@pytest.mark.parametrize("resumed", [[], ["--resume-from-checkpoint", "last"]])
def test_general_text_without_a_budget_of_drift_is_refused_and_not_ignored(tmp_path, given, resumed):
    words = refused("--output-dir", str(tmp_path), "--accelerator", "cpu", *given, *resumed)
    assert words.startswith(f"{given[0]} ") and "--max-drift" in words and ("add one" in words) != bool(resumed)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "nope"], "--config nope: there is no such file"),
        (["--foo"], "unknown flag --foo"),
        (["--data.batch_size"], "--data.batch_size: expected one argument"),
        (["--trainer.max_steps", "-5"], "max_steps -5: must be at least 1"),
        (["--max-steps", "-3"], "--trainer.max_steps -3: must be at least 1"),
    ],
)
def test_fit_is_refused_as_early(capsys, argv, words):
    assert main(["fit", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["plan", "--print-config"], ["--print-config", "--dry-run"]),
        (["check", "--print-config"], ["--print-config", "--check-requirements"]),
        (["plan", "--check-requirements"], ["--dry-run", "--check-requirements"]),
        (["train", "--dry-run", "--check-requirements"], ["--dry-run", "--check-requirements"]),
    ],
)
def test_of_several_questions_none_outranks_another(capsys, argv, asked):
    assert main(argv) == 2
    assert f"error: {asked[0]}: asked together with {asked[1]}" in capsys.readouterr().err


def test_a_plan_notes_what_is_in_the_way_of_the_run(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["plan", "--test-run", "--json", "--output-dir", str(tmp_path)]) == 0
    assert "is not empty" in json.loads(capsys.readouterr().out)["advice"][-1]


@pytest.mark.parametrize(
    ("tokens", "words"), [("500", ""), ("50", "--data.train_tokens 50: must be at least a block of 64")]
)
def test_tokens_to_train_on_are_at_least_a_block_as_it_is_cut(capsys, tmp_path, tokens, words):
    turns = [{"role": "user", "content": "Which city?"}, {"role": "assistant", "content": "The capital is city 0."}]
    lines = (json.dumps({"messages": [*turns, {"role": "user", "content": str(each)}, turns[1]]}) for each in range(60))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    given = ["--data-dir", str(tmp_path / "chats.jsonl"), "--output-dir", str(tmp_path / "run"), "--accelerator", "cpu"]
    code = main(["plan", "--model", "tiny-granite-h", *given, "--data.train_tokens", tokens])
    assert (code, words in capsys.readouterr().err) == (2 if words else 0, True)


@pytest.mark.parametrize(("argv", "said"), [(["--help"], exit_codes.NOTHING_WRITTEN), ([], exit_codes.HOW_TO_CONTINUE)])
def test_a_disk_that_fills_up_under_a_help_text_loses_no_steps(capsys, monkeypatch, argv, said):
    def fills_up(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_commands, "run", fills_up)
    assert main(["train", *argv]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [("train", "--data-dir"), ("eval",), ("generate",), ("merge", "--out", "out")])
def test_what_is_not_there_is_refused_before_anything_heavy_is_imported(command, tmp_path):
    code = "import sys; from granite_scu.cli.main import main; code = main(sys.argv[1:]); "
    code += "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules); sys.exit(code)"
    call = [sys.executable, "-c", code, *command, str(tmp_path / "nothing")]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "nothing: no such f" in done.stderr and done.stderr.count("\n") == 1
