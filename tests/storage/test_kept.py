"""What is kept of what takes long to find."""

import json
import os

import pytest

from granite_scu.storage.kept import MAX_ENTRIES, kept


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Look an answer up: ``find(key, answer)``; ``find.asked`` lists the keys of those that had to be found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def finding(key, answer=1):
        return kept("facts.json", key, lambda: asked.append(key) or answer, lambda found: found + 0)

    finding.asked, finding.file = asked, tmp_path / "granite-scu" / "facts.json"
    return finding


def test_an_answer_is_found_once_for_a_key(find):
    assert [find([1, {"a": 2}], 3), find([1, {"a": 2}], 4), find([1, {"a": 3}], 5)] == [3, 3, 5]
    assert find.asked == [[1, {"a": 2}], [1, {"a": 3}]]


@pytest.mark.parametrize("damage", ["{", "[]", "", '{"KEY": null}', '{"KEY": "three"}', "\xff"])
def test_what_is_damaged_is_found_again_and_kept(find, damage):
    find("a", 3)
    (name,) = json.loads(find.file.read_text())
    find.file.write_bytes(damage.replace("KEY", name).encode("latin-1"))
    assert [find("a", 3), find("a", 4)] == [3, 3]
    assert find.asked == ["a", "a"]


def test_the_oldest_answers_make_way(find):
    find("first")
    entries = json.loads(find.file.read_text()) | {f"{n}": 1 for n in range(MAX_ENTRIES - 1)}
    find.file.write_text(json.dumps(entries))
    find("last")
    assert find("last") == 1 and len(json.loads(find.file.read_text())) == MAX_ENTRIES
    assert find.asked == ["first", "last"]
    find("first")
    assert find.asked == ["first", "last", "first"]


def test_where_nothing_can_be_kept_a_process_remembers(find, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert [find("unkept", 3), find("unkept", 4)] == [3, 3]
    assert find.asked == ["unkept"]
