"""A run whose training text is read while it trains."""

import json

import pytest
from outcomes import refused_line
from safetensors.torch import load_file

from granite_scu.data.sources.corpora import stdlib_docs

SIZE = ("--precision", "fp32", "--batch-size", "2", "--block-size", "64", "--eval-iters", "2", "--eval-batch-size", 16)
STREAM = ("--test-run", "--stream", *SIZE)


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [document.text[:2000] for document in stdlib_docs()[:40]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_it_trains_goes_on_and_is_scored_as_any_run(train, launch, records, tmp_path):
    flags = ("--stream", *SIZE, "--data-dir", records, "--num-workers", 2, "--save-steps", 2, "--max-steps", 3)
    flags += ("--target-s", "10%", "--control-every", 1)
    whole = train(*flags)
    recorded = json.loads((whole / "documents.json").read_text())
    assert recorded["streamed"] and recorded["test"] and not recorded["train"]
    assert json.loads((whole / "scu_config.json").read_text())["n_tokens"] == 3 * 2 * 64
    resume = (*flags, "--resume-from-checkpoint", whole / "checkpoint-2")
    rest = train(*resume)
    assert "changed since the checkpoint" not in (rest / "logs" / "training.log").read_text()
    longer = train(*resume, "--max-steps", 4)  # of a stream N is as the run's beginning counted it
    assert json.loads((longer / "scu_config.json").read_text())["n_tokens"] == 3 * 2 * 64
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole, rest))
    assert all((one[name] == other[name]).all() for name in one)
    histories = [json.loads((folder / "scu_history.json").read_text()) for folder in (whole, rest)]
    lams = [[record["lambda"] for record in history] for history in histories]
    assert lams[0] == lams[1] and len(set(lams[0])) > 1
    err = refused_line(launch, "--test-run", *resume, "--num-workers", 1, "--output-dir", tmp_path / "other")
    assert "--num-workers was 2 and is now 1" in err
    with records.open("a", encoding="utf-8") as more:  # behind what is read beforehand, in a stream that is longer
        more.write("\n")
    err = refused_line(launch, "--test-run", *resume, "--output-dir", tmp_path / "other")
    assert "the files of --data-dir (a checksum of their names and sizes) was" in err


def test_a_line_that_is_broken_far_behind_stops_the_run_with_its_place(launch, records, tmp_path, monkeypatch):
    monkeypatch.setattr("granite_scu.data.streaming.BEGINNING", 40_000)
    path = tmp_path / "broken.jsonl"
    path.write_text(records.read_text(encoding="utf-8") + '{"text": \n', encoding="utf-8")
    flags = (*STREAM, "--data-dir", path, "--num-workers", 1, "--max-steps", 500, "--eval-steps", 500)
    err = refused_line(launch, *flags, "--output-dir", tmp_path / "run")
    line = f"error: --data-dir {path}:41: not valid JSON (Expecting value"
    assert err.startswith(line)
    assert refused_line(launch, *flags, "--dry-run", "--output-dir", tmp_path / "plan").startswith(line)
