"""What a finished run is good for: merged, tried, listed and gone on from, as a user would."""

import io
import json
import shutil
import sys
from functools import partial

import pytest
import torch
from outcomes import done, refused_line

from granite_scu.cli import main as commands
from granite_scu.export import merge_check
from granite_scu.model import saved_adapter

SHORT = ("--max-steps", 6, "--save-steps", 3, "--eval-steps", 3, "--eval-iters", 2, "--control-every", 2)
SHORT += ("--batch-size", 4, "--block-size", 64, "--eval-batch-size", 16, "--warmup-steps", 10)


@pytest.fixture(scope="module")
def short(topics):
    """Flags of a run of seconds."""
    return ("--test-run", *SHORT, "--data-dir", topics)


@pytest.fixture(scope="module")
def run(launch, short, tmp_path_factory):
    """A short run."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    done(launch, *short, "--samples", 2, "--learning-rate", "1e-2", "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def told(call):
    """Runs a command in this process; returns exit code, stdout and stderr."""
    return partial(call, commands.main)


def test_its_report_has_what_both_models_make_of_test_documents(run):
    found = json.loads((run / "samples.json").read_text(encoding="utf-8"))["samples"]
    assert 1 <= len(found) <= 2 and all(each["prompt"] and each["base"] and each["adapter"] for each in found)
    general = json.loads((run / "elsewhere.json").read_text(encoding="utf-8"))["questions"]
    assert len(general) == 2 and all(each["before"] != each["after"] for each in general)
    metrics = json.loads((run / "scu_metrics.json").read_text(encoding="utf-8"))
    found, moved = metrics["elsewhere"], metrics["drift"]
    assert found["n"] == 2 and found["bits_after"] != found["bits_before"]
    assert moved["share"] == found["drift"]["share"] > 0 and (moved["budget"], moved["source"]) == (
        None,
        "general questions",
    )
    assert "What the models write" in (run / "report.html").read_text(encoding="utf-8")


def test_merged_it_has_the_adapters_bits_per_token_and_needs_nothing_of_ours(run, told, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "merged"
    code, printed, err = told("merge", run, "--out", out)
    assert (code, err) == (0, "")
    record = json.loads((out / "granite_scu_merge.json").read_text())
    check = record["check"]
    held_out = json.loads((run / "documents.json").read_text())
    assert check["text"] == "what the run held out"
    assert check["documents"] == len(held_out["validation"]) + len(held_out["test"])
    assert check["is_merged"] and check["base_bpt"] > check["adapter_bpt"]
    assert f"{check['kept']:.1%}".replace("%", " %") in printed
    assert f"{check['merged_bpt']:.4f}" in printed
    assert record["adapter_sha256"] == saved_adapter.find(run).sha256
    assert str(tmp_path) not in "".join(path.read_text() for path in out.glob("*.json"))
    assert str(tmp_path) not in (out / "README.md").read_text()
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert tokenizer.chat_template
    inputs = tokenizer("A function is", return_tensors="pt")
    assert model.dtype == torch.bfloat16
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3
    code, _, err = told("merge", run / "checkpoint-6", "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "--overwrite" in err
    assert told("merge", run / "checkpoint-6", "--out", out, "--overwrite", "--no-check")[0] == 0
    assert json.loads((out / "granite_scu_merge.json").read_text())["adapter"] == "checkpoint-6"
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_an_adapter_scaled_a_hundredfold_is_not_merged(run, told, tmp_path, monkeypatch):
    monkeypatch.setattr(merge_check, "TOKENS", 500)
    files = ("adapter_model.safetensors", "adapter_config.json")
    strange = tmp_path / "strange"
    strange.mkdir()
    for name in files:
        shutil.copy(run / name, strange)
    config = json.loads((strange / files[1]).read_text())
    (strange / files[1]).write_text(json.dumps(config | {"lora_alpha": 100 * config["lora_alpha"]}))
    code, _, err = told("merge", strange, "--out", tmp_path / "merged")
    assert (code, err.count("\n")) == (1, 1)
    assert "worse than to guess" in err and "--no-check" in err
    assert [path.name for path in tmp_path.iterdir()] == ["strange"]


def test_tried_it_goes_on_with_a_prompt_beside_its_base(run, told):
    code, out, err = told("generate", run, "--prompt", "def add(a, b):\n", "--max-new-tokens", 8)
    assert (code, err) == (0, "")
    base, adapter = out.split(f"adapter: {run}\n")
    assert base.startswith("base: tiny-granite-h\n")
    assert len(base.splitlines()) > 1
    assert adapter.strip()
    code, out, err = told("generate", run, "--prompt", "")
    assert (code, out, err) == (2, "", "error: --prompt: the text is empty\n")


def test_a_pipe_talks_to_it_and_to_its_base_line_by_line(run, told, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def add(a, b):\n/reset\ndef add(a, b):\nAnd?\n")))
    code, out, err = told("generate", run, "--chat", "--max-new-tokens", 8)
    assert code == 0 and "/reset" in err and len(err.splitlines()) == 1
    first, again, last = out.removeprefix("> ").split("\n> ")
    assert first == again  # nothing was left of the first
    assert last.startswith("And?\nbase: tiny-granite-h\n") and f"\nadapter: {run}\n" in last
    code, out, err = told("generate", run, "--chat")
    assert (code, out, err) == (2, "", "error: standard input: the text is empty\n")


def test_found_again_it_shows_its_scores_and_its_adapters_step(run, told):
    metrics = json.loads((run / "scu_metrics.json").read_text())
    code, out, _ = told("runs", run.parent, "--json")
    (found,) = json.loads(out)["runs"]
    assert code == 0
    assert (found["path"], found["finished"], found["step"]) == (str(run), True, 6)
    assert found["adapter_bpt"] == metrics["adapter_test_bpt"]
    assert found["best_val_step"] == metrics["best_val_step"] > 0
    assert f"{metrics['adapter_test_bpt']:.4f}" in told("runs", run)[1]


@pytest.fixture(scope="module")
def gone_on(run, launch, short, tmp_path_factory):
    """A run that starts from a copy of the first one's adapter, and that copy."""
    folder, adapter = tmp_path_factory.mktemp("gone_on") / "run", tmp_path_factory.mktemp("adapters") / "mine"
    shutil.copytree(run, adapter)
    asked = ("--precision", "fp32", "--samples", 2, "--adapter", adapter)
    done(launch, *short, *asked, "--output-dir", folder)
    return folder, adapter


def test_gone_on_from_it_starts_where_it_ended_and_measures_the_way_from_there(run, gone_on):
    folder, _ = gone_on
    before, after = (json.loads((path / "scu_metrics.json").read_text()) for path in (run, folder))
    assert after["start_test_bpt"] == pytest.approx(before["adapter_test_bpt"], abs=5e-3)  # in fp32, not bf16
    assert after["base_test_bpt"] == pytest.approx(before["base_test_bpt"], abs=5e-3)
    assert "start_test_bpt" not in before
    assert [each["elsewhere"]["compared_with"] for each in (before, after)] == ["base model", "adapter at the start"]
    (old, *_), (new, *_) = (json.loads((path / "elsewhere.json").read_text())["questions"] for path in (run, folder))
    assert abs(new["bits_before"] - old["bits_after"]) < abs(new["bits_before"] - old["bits_before"])
    first = json.loads((folder / "scu_history.json").read_text())[0]
    last = json.loads((run / "scu_history.json").read_text())[-1]
    assert 0 < first["param_bpt"] < last["param_bpt"]
    record = json.loads((folder / "training_config.json").read_text())
    assert record["start"] == {"adapter": "mine", "sha256": saved_adapter.find(run).sha256}
    assert (record["lora"]["rank"], record["lora"]["alpha"]) == (16, 32.0)
    assert (
        saved_adapter.find(folder).updates("tiny-granite-h").keys()
        == saved_adapter.find(run).updates("tiny-granite-h").keys()
    )


def test_its_configuration_feeds_back_and_a_conflicting_flag_is_refused(gone_on, launch, tmp_path):
    folder, adapter = gone_on
    again = ("--config", folder / "config.yaml", "--accelerator", "cpu", "--output-dir", tmp_path / "new")
    code, out, err = launch(*again, "--dry-run", "--json")
    assert code == 0 and err.startswith("reading the text") and err.count("\n") == 1
    assert "in 28 adapters" in json.loads(out)["parameters"]
    assert 0 < json.loads(out)["s_ceiling_estimate"] < 1
    err = refused_line(launch, *again, "--lora-r", 8)
    assert "--lora-r 8" in err
    assert "has 16" in err
    code, _, err = launch("--test-run", "--adapter", adapter, "--output-dir", adapter, "--overwrite")
    assert (code, "would delete --adapter" in err) == (2, True), err


def test_resumed_it_ends_bit_for_bit_the_same_though_the_adapter_is_gone(gone_on, launch, short, tmp_path):
    folder, adapter = gone_on
    adapter.rename(adapter.with_name("elsewhere"))
    resume = ("--resume-from-checkpoint", folder / "checkpoint-3", "--output-dir", tmp_path / "resumed")
    argv = (*short, "--precision", "fp32", "--adapter", adapter)
    code, out, err = launch(*argv, *resume)
    assert (code, err) == (0, ""), out
    assert (tmp_path / "resumed" / saved_adapter.WEIGHTS).read_bytes() == (folder / saved_adapter.WEIGHTS).read_bytes()
    whole, halves = (json.loads((path / "scu_metrics.json").read_text()) for path in (folder, tmp_path / "resumed"))
    assert halves["start_test_bpt"] == whole["start_test_bpt"]
    assert halves["param_bpt"] == whole["param_bpt"]
    start = json.loads((tmp_path / "resumed" / "training_config.json").read_text())["start"]
    assert start == {"adapter": "mine", "sha256": saved_adapter.find(adapter.with_name("elsewhere")).sha256}
    code, out, err = launch(*argv, "--output-dir", tmp_path / "fresh")
    assert (code, out, err) == (
        2,
        "",
        f"error: --adapter {adapter}: no such folder; name a run folder, its final/ or one of its checkpoints\n",
    )
