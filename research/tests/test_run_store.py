"""Finished runs become lines of one file, each once, whoever collects them."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from granite_scu.config.errors import UserError
from research import run_store
from research.run_store import RunStore, working_folder, write_record


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore("--evidence", tmp_path / "runs")


def found(store: RunStore) -> dict[str, dict]:
    return {run.key: run.record for run in store.read()}


def test_files_become_lines_and_both_are_read(store):
    first = {"key": "a", "setting": "λ=0.1\u2028", "values": [1e-05, 0.1, 3, None]}
    write_record(store.folder / "task" / "first.json", first)
    store.collect()
    assert not list(store.folder.rglob("*.json")) and len(store.lines.read_bytes().split(b"\n")) == 2
    write_record(store.folder / "b.json", {"value": 2})
    assert found(store) == {"a": first, "b": {"value": 2}}
    store.collect()
    assert found(store) == {"a": first, "b": {"key": "b", "value": 2}}, "a file's name is the key that it lacks"


def test_a_command_that_was_killed_while_it_collected_loses_nothing_and_doubles_nothing(store, monkeypatch):
    write_record(store.folder / "a.json", {"key": "a"})
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.collect()
    assert list(found(store)) == ["a"]
    store.collect()
    assert [run.place for run in store.read()] == [f"{store.lines}, line 1"]


def finish_and_collect(folder: Path, worker: int) -> None:
    """What a shard does: its runs, collecting after each."""
    store = RunStore("--evidence", folder)
    for number in range(20):
        write_record(folder / f"{worker}-{number}.json", {"key": f"{worker}-{number}"})
        assert f"{worker}-{number}" in found(store)
        store.collect()


def test_shards_that_collect_at_once_lose_no_line(store):
    with ProcessPoolExecutor(3, mp_context=get_context("fork")) as pool:
        for shard in [pool.submit(finish_and_collect, store.folder, worker) for worker in range(3)]:
            shard.result()
    assert found(store).keys() == {f"{worker}-{number}" for worker in range(3) for number in range(20)}
    assert store.lines.read_bytes().count(b"\n") == 60 and not list(store.folder.rglob("*.json"))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"key": "\xff"}'])
@pytest.mark.parametrize("name", ["runs/task/x.json", "runs.jsonl"])
def test_what_is_no_record_is_named_and_left_alone(store, tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps({"key": "a"}).encode() + b"\n" + text.encode("latin1") if path == store.lines
                     else text.encode("latin1"))  # fmt: skip
    where = f"{path}, line 2" if path == store.lines else str(path)
    with pytest.raises(UserError, match=f"--evidence: {where} is not the record of a run"):
        list(store.read())
    assert path.is_file()


def test_a_store_is_given_by_its_folder_or_by_its_lines():
    assert working_folder("evidence/x/runs.jsonl") == working_folder("evidence/x/runs") == Path("evidence/x/runs")


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "finite", lambda record: {"not": {"JSON"}})
    with pytest.raises(TypeError):
        write_record(tmp_path / "a.json", {})
    assert not list(tmp_path.iterdir())
