"""A run's relative paths are found from any folder."""

import json
import os

import pytest

from granite_scu.storage import working_folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder of a run that was started in ``tmp_path/work``, which has a text."""
    folder = tmp_path / "work" / "runs" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "work" / "text.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (folder / "training_config.json").write_text(json.dumps({"working_folder": working_folder.record(folder)}))
    return folder


def test_the_record_has_no_path_of_the_machine(run):
    assert json.loads((run / "training_config.json").read_text()) == {"working_folder": "../.."}


def test_a_relative_path_is_found_from_another_folder_and_after_a_move(run, tmp_path, monkeypatch):
    assert working_folder.as_seen_from_here("text.txt", run) == "text.txt"
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in ("text.txt", "*.txt", "not-there"):
        assert working_folder.as_seen_from_here(path, run) == str(tmp_path / "work" / path)
    assert working_folder.as_seen_from_here("/an/absolute/path", run) == "/an/absolute/path"
    os.rename(tmp_path / "work", tmp_path / "moved")
    moved = tmp_path / "moved" / "runs" / "mine"
    assert working_folder.as_seen_from_here("text.txt", moved) == str(tmp_path / "moved" / "text.txt")


def test_what_this_folder_alone_has_is_taken_from_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "other.txt").touch()
    assert working_folder.as_seen_from_here("other.txt", run) == "other.txt"
    (run / "training_config.json").write_text("{}")
    assert working_folder.as_seen_from_here("text.txt", run) == "text.txt"
