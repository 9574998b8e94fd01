"""``scripts/eval_bpt.py`` on runs of the embedded model, as a user starts it and in this process."""

import csv
import json
import math
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from outcomes import done, refused_line
from rounding import OF_EMBEDDED, rounding

from granite_scu.data.sources.read import load

EVAL = Path(__file__).parents[2] / "scripts" / "eval_bpt.py"


@pytest.fixture(scope="module")
def run(train, topics, tmp_path_factory) -> Path:
    """A run divided by document, with checkpoints."""
    steps = ("--max-steps", "12", "--learning-rate", "5e-3", "--save-steps", "6", "--eval-steps", "6")
    folder = tmp_path_factory.mktemp("run") / "topics"
    train(*steps, "--batch-size", 4, "--data-dir", topics, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def score(call):
    """Runs the command in this process; returns exit code, stdout and stderr."""
    from granite_scu.cli.main import main

    return partial(call, main, "eval", "--precision", "fp32", "--samples", 0)


@pytest.fixture(scope="module")
def scored(score):
    """The JSON that it prints."""

    def scored(*argv) -> dict:
        return json.loads(done(score, "--json", *argv))

    return scored


def records(run: Path) -> dict:
    return json.loads((run / "documents.json").read_text(encoding="utf-8"))


def test_a_run_alone_is_scored_on_what_it_held_out(run, call, tmp_path, monkeypatch):
    def script(argv: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", [str(EVAL), *argv])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EVAL), run_name="__main__")
        return ended.value.code

    out = done(call, script, run, "--samples", 0, "--csv", tmp_path / "each.csv")
    found = json.loads((run / "eval_bpt.json").read_text(encoding="utf-8"))
    assert [found["schema"], found["documents"]] == [1, len(records(run)["test"])]
    assert str(run / "eval_bpt.json") in out.replace("\n", "") and "bits/token" in out
    base, adapter = found["models"]
    assert (base["name"], base["adapter"], base["base"]) == ("base", None, "tiny-granite-h")
    assert (adapter["name"], adapter["adapter"], adapter["base"]) == ("topics", str(run), "tiny-granite-h")
    for model in found["models"]:
        assert model["perplexity"] == pytest.approx(2 ** model["bits_per_token"])
        assert model["bits_per_byte"] * found["bytes"] == pytest.approx(model["bits_per_token"] * found["tokens"])
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["confidence"]) == ("base", "topics", 0.95)
    difference = adapter["bits_per_token"] - base["bits_per_token"]
    assert pair["difference_bits_per_token"] == pytest.approx(difference, abs=1e-9)
    assert pair["verdict"] in out.replace("\n", " ")
    own = json.loads((run / "scu_metrics.json").read_text(encoding="utf-8"))["adapter_test_bpt"]
    assert f"topics itself reported {own:.4f} bits/token" in out.replace("\n", " ")  # other windows, said why
    rows = list(csv.DictReader((tmp_path / "each.csv").open()))
    assert len(rows) == 2 * found["documents"]
    for model in found["models"]:
        mine = [row for row in rows if row["model"] == model["name"]]
        assert sum(int(row["tokens"]) for row in mine) == found["tokens"]
        assert sum(float(row["bits"]) for row in mine) == pytest.approx(model["bits_per_token"] * found["tokens"])


def test_scores_outlive_a_ctrl_c_while_questions_are_asked(run, call, monkeypatch):
    from granite_scu.cli.main import main
    from granite_scu.evaluation.bpt.answering import AnswerScoring

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswerScoring, "ask", interrupted)
    found = json.loads(done(call, main, "eval", "--precision", "fp32", "--json", run))
    assert len(found["models"]) == 2 and "answers" not in found


def test_it_is_transformers_own_loss(run, scored):
    """One window a document: the mean of transformers' loss over its tokens, each document alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.data.sources.read import load
    from granite_scu.model.loading import resolve

    found = scored(run, "--max-length", "2000")
    tokenizer = AutoTokenizer.from_pretrained(resolve(TINY_MODEL))
    base = AutoModelForCausalLM.from_pretrained(resolve(TINY_MODEL), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run).eval()
    path = json.loads((run / "training_config.json").read_text())["data"]["path"]
    wanted = set(records(run)["test"])
    nats = tokens = 0
    for document in load(path, "text"):
        if document.digest in wanted:
            ids = tokenizer(document.text, add_special_tokens=False)["input_ids"]
            sequence = torch.tensor([[tokenizer.bos_token_id or tokenizer.eos_token_id, *ids]])
            with torch.no_grad():
                nats += model(input_ids=sequence, labels=sequence).loss.item() * len(ids)
            tokens += len(ids)
    assert found["tokens"] == tokens
    assert found["models"][1]["bits_per_token"] == pytest.approx(nats / tokens / math.log(2), rel=rounding(OF_EMBEDDED))


@pytest.mark.slow
def test_it_is_the_bits_per_byte_of_lm_evaluation_harness(run, scored, tmp_path):
    """On a local task of documents longer than a window, the adapter loaded by the harness."""
    reason = "needs lm-evaluation-harness: pip install 'granite-scu[harness]'"
    lm_eval = pytest.importorskip("lm_eval", reason=reason)
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.data.sources.corpora import stdlib_docs
    from granite_scu.model.loading import resolve

    unseen = tmp_path / "unseen.jsonl"
    longer = [document.text[:1500] for document in stdlib_docs()][40:46]
    unseen.write_text("".join(json.dumps({"text": text}) + "\n" for text in longer), encoding="utf-8")
    found = scored(run, "--data-dir", unseen, "--max-length", "100", "--stride", "100")
    assert found["documents"] == 6
    task = {
        "task": "topics",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(unseen)}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    expected = []
    for adapter in (None, str(run)):
        model = huggingface.HFLM(resolve(TINY_MODEL), peft=adapter, max_length=100, device="cpu", dtype="float32")
        results = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)["results"]
        expected.append(results["topics"]["bits_per_byte,none"])
    assert [each["bits_per_byte"] for each in found["models"]] == pytest.approx(expected, rel=rounding(OF_EMBEDDED))
    assert expected[0] != expected[1]


def test_documents_that_the_run_has_seen_are_left_out(run, scored, score, topics, tmp_path):
    (run / "eval_bpt.json").write_text("what the card quotes")
    found = scored(run, "--data-dir", topics, "--forgetting", topics)
    seen = len(records(run)["train"]) + len(records(run)["validation"])
    assert found["excluded_documents"] == seen == 30 - found["documents"]
    assert "run" not in found  # its own figure is of another text
    assert found["models"][1]["forgetting"]["excluded_documents"] == seen
    code, out, _ = score(run, "--data-dir", topics)
    assert code == 0 and f"{seen} left out because a run was trained or validated on them" in out
    assert (run / "eval_bpt.json").read_text() == "what the card quotes"  # another text is not what the run held out
    (run / "eval_bpt.json").unlink()
    other = tmp_path / "body.jsonl"
    other.write_text("".join(json.dumps({"body": document.text}) + "\n" for document in load(str(topics), "text")))
    of_body = ("--data-dir", other, "--text-column", "body")
    plain = scored("--model", "tiny-granite-h", *of_body)  # no run, nothing to leave out
    assert (plain["documents"], plain["excluded_documents"], len(plain["models"])) == (30, 0, 1)


def test_forgetting_is_the_score_on_the_second_text(run, scored, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("def area(radius):\n    return 3.14159 * radius ** 2\n" * 20)
    both = scored(run, "--forgetting", other)
    alone = scored(run, "--data-dir", other)
    assert alone["units"] != "documents"  # of a single document
    for model, same in zip(both["models"], alone["models"], strict=True):
        assert model["forgetting"]["bits_per_token"] == pytest.approx(same["bits_per_token"], rel=rounding(OF_EMBEDDED))
        assert model["forgetting"]["bits_per_byte"] == pytest.approx(same["bits_per_byte"], rel=rounding(OF_EMBEDDED))
    assert both["models"][0]["forgetting"]["against"] is None
    assert both["models"][1]["forgetting"]["against"]["difference_bits_per_token"] == pytest.approx(
        alone["pairs"][0]["difference_bits_per_token"], abs=6 * rounding(OF_EMBEDDED)
    )


def test_a_whole_model_is_scored_beside_the_adapter_that_it_was_merged_from(run, scored, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.model.loading import resolve

    base = AutoModelForCausalLM.from_pretrained(resolve(TINY_MODEL), dtype=torch.float32)
    PeftModel.from_pretrained(base, run).merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(run).save_pretrained(tmp_path / "merged")
    found = scored(run, tmp_path / "merged")
    adapter, merged = found["models"][1:]
    assert (merged["name"], merged["adapter"], merged["base"]) == ("merged", None, str(tmp_path / "merged"))
    assert merged["bits_per_token"] == pytest.approx(adapter["bits_per_token"], abs=1e-3)
    assert "no difference shown" in found["pairs"][2]["verdict"] or abs(found["pairs"][2]["high"]) < 1e-4
    qlora = shutil.copytree(run, tmp_path / "qlora", ignore=shutil.ignore_patterns("checkpoint-*"))
    training = json.loads((qlora / "training_config.json").read_text())
    training["base"]["quantize_4bit"] = True
    (qlora / "training_config.json").write_text(json.dumps(training))
    again = scored(qlora, tmp_path / "merged")
    assert again["quantize_4bit"]
    assert again["models"][0]["bits_per_token"] != pytest.approx(found["models"][0]["bits_per_token"], abs=1e-4)
    assert again["models"][2]["bits_per_token"] == merged["bits_per_token"]  # as it is stored, and not rounded again


def test_a_text_of_one_document_is_scored_on_its_held_out_blocks(train, corpus, scored):
    folder = train("--block-size", 128)
    found = scored(folder)
    summary = json.loads((folder / "training_config.json").read_text())["data_summary"]["test"]
    assert records(folder)["shared"] and found["units"] != "documents"
    # The run scores its blocks apart; here the text goes on over them, and its very first token has nothing before it.
    assert found["tokens"] == pytest.approx(summary["supervised_tokens"], abs=1)
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    assert found["models"][0]["bits_per_token"] == pytest.approx(metrics["base_test_bpt"], rel=0.05)
    corpus_then = corpus.read_text()
    corpus.write_text(corpus_then + " changed")
    try:
        with pytest.raises(AssertionError, match="has changed since"):
            scored(folder)
    finally:
        corpus.write_text(corpus_then)


# What is refused, each in one line and before a model is loaded


def test_the_script_is_the_command(command):
    done = command(EVAL, "--max-length", "1")
    assert (done.returncode, done.stdout) == (2, "") and "--max-length 1: must be at least 2" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "nothing to score: name run folders, adapters or models"),
        (["nowhere"], "nowhere: no such folder"),
        (["--model", "tiny-granite-h"], "--data-dir: name the text to score"),
        (["--model", "tiny-granite-h", "--data-dir", "nowhere.txt"], "--data-dir nowhere.txt: no such file"),
        (["--stride", "0"], "--stride 0: must be at least 1"),
        (
            ["--output", "x", "--csv", "./x", "--model", "tiny-granite-h", "--data-dir", "stdlib-docs"],
            "--csv x: is where the JSON goes (--output); name another file",
        ),
        (["--output", ".", "--model", "tiny-granite-h"], "--output .: is a folder; name a file"),
    ],
)
def test_wrong_requests(score, argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused_line(score, *argv)


def test_a_device_that_is_not_there(score, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    argv = ("--model", "tiny-granite-h", "--data-dir", "stdlib-docs", "--accelerator", "cuda")
    assert "--accelerator cuda: there is no CUDA device; use --accelerator cpu" in refused_line(score, *argv)


def test_what_is_no_run_adapter_or_model(score, tmp_path, run):
    assert "is not a run folder, and holds no adapter" in refused_line(score, tmp_path)
    file = tmp_path / "text.txt"
    file.write_text("text")
    assert "is a file" in refused_line(score, file)
    assert f"no such folder in {tmp_path}" in refused_line(score, run, tmp_path / "unknown")
    assert "nobody/nothing: there is no such folder, and as a hub id it cannot be" in refused_line(
        score, "nobody/nothing", "--data-dir", "stdlib-docs"
    )
    assert "is named twice" in refused_line(score, run, run / "." / "checkpoint-6" / "..")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(run / "training_config.json", unfinished)
    shutil.copytree(run / "checkpoint-6", unfinished / "checkpoint-6")
    assert f"name one that it kept: {unfinished / 'checkpoint-6'}" in refused_line(score, unfinished)


def test_a_token_that_the_model_lacks_is_named(score, tmp_path):
    from granite_scu.model import finding
    from granite_scu.model.loading import load_tokenizer

    model = shutil.copytree(finding.resolve("tiny-granite-h"), tmp_path / "model")
    tokenizer = load_tokenizer("tiny-granite-h")
    tokenizer.add_tokens(["<walrus>"])
    tokenizer.save_pretrained(model)
    (tmp_path / "text.txt").write_text("a <walrus> sings")
    assert "makes the token <walrus>" in refused_line(score, model, "--data-dir", tmp_path / "text.txt")


def test_text_with_nothing_to_score(score, run, topics, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "holds no text" in refused_line(score, run, "--data-dir", empty)
    assert f"--forgetting {empty}: holds no text" in refused_line(score, run, "--forgetting", empty)
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"messages": [{"role": "user", "content": "Who is there?"}]}\n')
    assert "has nothing to score" in refused_line(score, run, "--data-dir", asked)
    wanted = set(records(run)["train"])
    seen = tmp_path / "seen.jsonl"
    lines = [json.dumps({"text": d.text}) for d in load(str(topics), "text") if d.digest in wanted]
    seen.write_text("\n".join(lines))
    line = refused_line(score, run, "--data-dir", seen)
    assert "was trained or validated on every document" in line and "leave --data-dir out" in line


def edited(run: Path, folder: Path, **changes) -> Path:
    """A copy of the run's adapter with another adapter_config.json."""
    folder.mkdir()
    for name in ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run / name, folder)
    config = json.loads((run / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_for_another_base(score, run, topics, tmp_path):
    other = edited(run, tmp_path / "other", base_model_name_or_path="ibm-granite/granite-4.0-h-1b")
    assert "is an adapter for ibm-granite/granite-4.0-h-1b, and" in refused_line(score, run, other)
    argv = (other, "--model", "tiny-granite-h", "--data-dir", topics)
    assert "is an adapter for ibm-granite/granite-4.0-h-1b, not for --model tiny-granite-h" in refused_line(
        score, *argv
    )


def fewer_merges(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def not_finite(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "adapter_model.safetensors")
    next(iter(weights.values())).fill_(math.nan)
    save_file(weights, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("config", "spoil", "words"),
    [
        ({"r": 8}, None, "its adapter does not fit tiny-granite-h"),
        ({}, fewer_merges, "its tokenizer makes other tokens"),
        ({}, not_finite, "is not finite, so that its run diverged"),
    ],
)
def test_a_spoilt_adapter(score, run, topics, tmp_path, config, spoil, words):
    other = edited(run, tmp_path / "other", **config)
    if spoil:
        spoil(other)
    assert words in refused_line(score, other, "--data-dir", topics)
