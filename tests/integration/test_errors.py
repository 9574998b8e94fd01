"""What bad input gets: one line on stderr that says what and what to do, exit code 2, and nothing lost."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from devices import CPU
from outcomes import refused_line

from granite_scu.hardware import detection, machine
from granite_scu.model import finding, loading


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def precious(tmp_path) -> Path:
    """A finished run that --overwrite may replace, but only by a run that can start."""
    folder = tmp_path / "precious"
    (folder / "checkpoint-10").mkdir(parents=True)
    for name in ("training_config.json", "adapter_model.safetensors", "scu_history.json", "checkpoint-10/state.ckpt"):
        (folder / name).write_text(json.dumps({"precious": name}))
    return folder


@pytest.fixture
def refusal(launch, precious):
    """Asks for a test run that would replace the precious one, and returns the one line it gets."""

    def ask(*argv) -> str:
        before = contents(precious)
        line = refused_line(launch, "--test-run", "--output-dir", precious, "--overwrite", *argv)
        assert contents(precious) == before
        return line

    return ask


def one_line(err: str) -> str:
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


# The flags


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lora.targets", "[in_prj]"], "--lora-targets in_prj: no linear layer"),
        (["--accelerator", "cuda", "--lora-targets", "in_prj"], "--lora-targets in_prj: no linear layer"),
        # of the machine
        (["--accelerator", "cuda"], "--accelerator cuda: no CUDA device: "),
        # of the model
        (["--model", "granite-9000"], "(owner/name) or tiny-granite-h; where an adapter's base was moved, give its"),
        (["--model", "nobody/no-such-model"], "--model nobody/no-such-model: cannot be loaded"),
        # of the checkpoint, in a folder whose only one is damaged
        (["--resume-from-checkpoint", "last"], "is intact (checkpoint-10: manifest.json is missing)"),
        (["--resume-from-checkpoint", "no/such/checkpoint-3"], "is not a checkpoint folder (no state.ckpt in it)"),
    ],
)
def test_a_wrong_flag(refusal, monkeypatch, argv, words):
    for module in (machine, loading):
        monkeypatch.setattr(module, "find_spec", lambda name: None)  # neither flash-attn nor bitsandbytes
    monkeypatch.setattr(detection, "_detect_cpu", lambda: CPU)
    assert words in refusal(*argv)


# The run folder


def test_a_name_that_no_disk_takes(launch, tmp_path):
    assert "cannot be written to (File name too long); choose another folder" in refused_line(
        launch, "--test-run", "--output-dir", tmp_path / ("x" * 300)
    )


@pytest.mark.parametrize("flag", ["--data-dir", "--model"])
def test_a_folder_that_holds_what_the_run_reads(refusal, precious, flag):
    """Replacing the folder would delete the text or the model."""
    inside = precious / "logs"
    if flag == "--model":
        shutil.copytree(files("granite_scu.model") / "assets" / "tiny-granite-h", inside)
    else:
        inside.mkdir()
        (inside / "text.txt").write_text("This text has no copy. " * 1000)
    assert f"--overwrite: {precious} holds logs/" in refusal(flag, inside)


def test_a_folder_that_holds_a_text_by_pattern_or_behind_a_link(refusal, precious, tmp_path):
    """Under a name that a run gives, so that it might pass for its own."""
    text = precious / "README.md"
    text.write_text("This text has no copy. " * 1000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "link.md").symlink_to(text)
    for given in (text, precious / "*.md", tmp_path / "texts", tmp_path / "texts" / "*.md"):
        assert "--overwrite: would delete --data-dir" in refusal("--data-dir", given)


def test_a_folder_in_which_text_is_looked_for(launch, tmp_path):
    (tmp_path / "text.txt").write_text("This text has no copy. " * 1000)
    for given in (tmp_path, f"{tmp_path}/**/*.txt"):
        assert f"--output-dir {tmp_path / 'run'}: lies in --data-dir {given}" in refused_line(
            launch, "--test-run", "--data-dir", given, "--output-dir", tmp_path / "run"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_kept_tokens_in_the_run_folder(launch, tmp_path):
    cache = tmp_path / "run" / "cache"
    assert f"--cache-dir {cache}: lies in --output-dir {tmp_path / 'run'}" in refused_line(
        launch, "--test-run", "--cache-dir", cache, "--output-dir", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


# Around it


@pytest.mark.slow
def test_the_script_itself_prints_one_line_and_nothing_else_on_stderr(script, tmp_path):
    """In a process of its own, with whatever the libraries have to say: the model's layers are looked at last."""
    argv = ("--test-run", "--lora.targets", "[in_prj]", "--4bit-quantization")
    done = script(*argv, "--output-dir", tmp_path / "out")
    assert done.returncode == 2
    assert "did you mean in_proj?" in one_line(done.stderr)


def test_a_block_shorter_than_the_convolution_is_refused(refusal, tmp_path):
    config = json.loads((Path(finding.resolve("tiny-granite-h")) / "config.json").read_text())
    model = tmp_path / "wide"
    shutil.copytree(finding.resolve("tiny-granite-h"), model)
    (model / "config.json").write_text(json.dumps(config | {"mamba_d_conv": 20}))
    assert f"--block-size 16: shorter than the 20 tokens that a convolution of {model} spans" in refusal(
        *("--model", model, "--block-size", "16")
    )


def test_an_end_of_text_that_the_model_does_not_know_is_refused(refusal, tmp_path):
    model = shutil.copytree(finding.resolve("tiny-granite-h"), tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<brand new>"}))
    words = "its tokenizer makes the token <brand new> of the text, with the id 4096, and the model has 4,096"
    assert words in refusal("--model", model)


def test_a_short_run_that_diverges_has_failed_and_leaves_no_adapter_as_its_best(launch, corpus, tmp_path):
    folder = tmp_path / "run"
    short = ("--data-dir", corpus, "--block-size", 64, "--batch-size", 2)
    wild = ("--learning-rate", "1e3", "--warmup-steps", "0", "--gradient-clip", "0", "--controller", "none")
    few = ("--max-steps", "6", "--eval-steps", "2", "--save-steps", "2", "--control-every", "1", "--eval-iters", "1")
    code, _, err = launch("--test-run", *short, *wild, *few, "--output-dir", folder)
    assert code == 1
    assert "the adapter scores nan bits/token on the validation text; lower --learning-rate" in one_line(err)
    assert not (folder / "best").exists() and not (folder / "adapter_model.safetensors").exists()
