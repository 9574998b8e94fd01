"""A base model is known by its files, wherever they lie and whatever the folder is called."""

import hashlib
import json
import shutil

import pytest
from huggingface_hub import constants

from granite_scu.config.errors import UserError
from granite_scu.model import base_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(file) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_folder_a_gguf_file_and_a_model_of_the_hub_are_recorded(small_granite, tmp_path, monkeypatch):
    weights = tmp_path / "copy" / "model.safetensors"
    shutil.copytree(small_granite, weights.parent)
    facts = {weights.name: {"bytes": weights.stat().st_size, "sha256": sha256(weights)}}
    assert base_digest.record(str(weights.parent)) == {"files": facts}
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF and more")
    assert base_digest.record(str(gguf)) == {"files": {gguf.name: {"bytes": 13, "sha256": sha256(gguf)}}}
    cached = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(small_granite, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert base_digest.record("someone/small") == {"commit": COMMIT, "files": facts}
    assert base_digest.record("someone/else") is None


def test_of_weights_that_are_not_here_yet_or_any_more_there_is_no_record(small_granite, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copyfile(f"{small_granite}/config.json", snapshot / "config.json")  # a plan has asked for no more
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    trained = {"base_files": base_digest.record(small_granite)}
    for name in ("someone/small", str(tmp_path / "removed")):
        assert base_digest.record(name) is None
        base_digest.check(trained, "RUN", name, refuse=True)


def test_a_large_file_is_read_once_for_as_long_as_it_is_the_same(small_granite, tmp_path, monkeypatch):
    monkeypatch.setattr(base_digest, "LARGE", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "copy" / "model.safetensors"
    shutil.copytree(small_granite, weights.parent)
    digest = lambda: base_digest.record(str(weights.parent))["files"][weights.name]["sha256"]  # noqa: E731
    assert digest() == sha256(weights)
    (kept,) = (tmp_path / "cache").rglob("digests.json")
    kept.write_text(json.dumps(dict.fromkeys(json.loads(kept.read_text()), "looked up")))
    assert digest() == "looked up"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert digest() == sha256(weights)
    kept.write_text("{")
    assert digest() == sha256(weights)


@pytest.mark.parametrize("recorded", [3, {"files": 3}, {"files": {"a": 3}}, {}])
def test_a_record_that_no_run_has_written_is_refused(small_granite, recorded):
    with pytest.raises(UserError, match=r"RUN: training_config.json has a damaged base_files"):
        base_digest.check({"base_files": recorded}, "RUN", small_granite, refuse=False)


def test_names_of_files_are_no_difference_and_their_contents_are(small_granite, caplog):
    now = base_digest.record(small_granite)
    (facts,) = now["files"].values()
    base_digest.check({"base_files": {"files": {"other.safetensors": facts}}}, "RUN", small_granite, refuse=True)
    for other in ({"model.safetensors": facts | {"sha256": "0" * 64}}, {"model-1.safetensors": {"sha256": "0" * 64}}):
        with pytest.raises(UserError, match=r"weights are not those that RUN was trained on \(model\S*\.safetensors"):
            base_digest.check({"base_files": {"files": other}}, "RUN", small_granite, refuse=True)
    base_digest.check({}, "an adapter from elsewhere", small_granite, refuse=True)
