"""A run that is continued from another folder than it was started in."""

import json

from granite_scu.cli.script_flags import translate


def test_all_its_texts_are_found_from_there(tmp_path, monkeypatch):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    names = {"path": "chats.jsonl", "validation_data": "few.jsonl", "test_data": ["other.jsonl"]}
    for name in ("chats.jsonl", "few.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("{}")
    (run / "config.yaml").write_text(json.dumps({"data": names}))
    (run / "training_config.json").write_text(json.dumps({"working_folder": ".."}))
    monkeypatch.chdir(elsewhere)
    layers, _ = translate(["--resume-from-checkpoint", str(run / "checkpoint-1")])
    for key, file in (("path", "chats"), ("validation_data", "few"), ("test_data", "other")):
        assert layers.values[f"data.{key}"] == [f"{tmp_path}/{file}.jsonl"]
