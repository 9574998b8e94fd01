"""Other weights in the folder that a run was trained on: a new run and a merge refuse them, scores are warned of."""

import json
import shutil
from functools import partial

import pytest
from outcomes import done, refused_line
from safetensors.torch import load_file, save_file

from granite_scu.cli import main as commands
from granite_scu.export.publish.model_card import gather, model_card

FLAGS = ("--test-run", "--samples", 0, "--precision", "fp32", "--block-size", 64, "--eval-iters", 1)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "weights are not those"


@pytest.fixture(scope="module")
def run(call, small_mixture, corpus, tmp_path_factory):
    """A run of two steps on a model whose weights have changed since; returns it and what puts them back."""
    here = tmp_path_factory.mktemp("run")
    base = shutil.copytree(small_mixture, here / "base")
    flags = (*FLAGS, "--model", base, "--data-dir", corpus, "--max-steps", 2, "--output-dir", here / "run")
    done(call, commands.main, "train", *flags)
    weights = base / "model.safetensors"
    former = weights.read_bytes()
    save_file({name: 1.5 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    return here / "run", partial(weights.write_bytes, former)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_it_is_refused_where_weights_would_be_made_and_warned_of_where_they_are_looked_at(call, run, tmp_path):
    folder, put_back = run
    resume = ("train", "--resume-from-checkpoint", "last", "--output-dir", folder, "--max-steps", 3, "--samples", 0)
    before = (folder / "training_config.json").read_bytes()
    for command in (resume, ("merge", folder, "--out", tmp_path / "merged")):
        err = refused_line(call, commands.main, *command)
        assert OTHER in one_line(err) and "SHA-256" in err, err
    assert (folder / "training_config.json").read_bytes() == before and not (tmp_path / "merged").exists()
    publish = ("publish", folder, "--repo-id", "me/x", "--base-model-id", "me/y", "--license", "mit", "--dry-run")
    for command in (
        ("generate", folder, "--prompt", "def", "--max-new-tokens", 1, "--device", "cpu"),
        ("eval", folder, "--accelerator", "cpu", "--samples", 0),
        publish,
    ):
        code, out, err = call(commands.main, *command)
        assert code == 0 and OTHER in one_line(out + err), (command, out, err)
    recorded = json.loads(before)
    del recorded["base_files"]
    (folder / "training_config.json").write_text(json.dumps(recorded))
    code, out, err = call(commands.main, "merge", folder, "--out", tmp_path / "merged", "--no-check")
    assert code == 0 and "not recorded" in one_line(out + err), "of an older version's run it is said"
    (folder / "training_config.json").write_bytes(before)
    put_back()
    code, out, err = call(commands.main, *resume)
    assert code == 0 and OTHER not in one_line(out + err), err


def test_a_run_of_a_newer_version_says_so(call, run):
    folder, put_back = run
    put_back()
    file = folder / "training_config.json"
    training = json.loads(file.read_text())
    file.write_text(json.dumps(training | {"versions": training["versions"] | {"granite-scu": "99.1"}}))
    code, out, err = call(
        commands.main, "train", "--resume-from-checkpoint", "last", "--output-dir", folder, "--max-steps", 4
    )
    assert code == 0 and "granite-scu 99.1" in one_line(out + err), err


def test_the_card_tells_the_commit_of_a_model_of_the_hub(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    assert COMMIT not in model_card(gather(folder))
    file = folder / "training_config.json"
    training = json.loads(file.read_text())
    file.write_text(json.dumps(training | {"base_files": training["base_files"] | {"commit": COMMIT}}))
    assert COMMIT in model_card(gather(folder))
