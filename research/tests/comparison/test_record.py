"""What is a record of a run, and what looks like one."""

import copy
import json
import math

import pytest

from granite_scu.config.errors import UserError
from research.comparison.evidence import Evidence, Spec
from research.comparison.protocol import PI, Task
from research.comparison.record import fault
from research.run_store import write_record

SPEC = Spec(
    Task("first", "stdlib-docs", 1024, 8), PI.name, "", 0, {**PI.settings, "optimizer.learning_rate": 1e-3, "x": 1}
)


@pytest.fixture
def record(finish) -> dict:
    return finish(SPEC)


def put(record: dict, path: str, value: object) -> dict:
    """The record with another value at a dotted place."""
    changed = copy.deepcopy(record)
    *above, last = path.split("/")
    place = changed
    for name in above:
        place = place[name]
    place[last] = value
    return changed


def test_a_run_s_is_one(record):
    assert fault(record) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("key", [1]),
        ("task", 3),
        ("seed", "q"),
        ("settings", []),
        ("settings", {"control.controller": "pi"}),
        ("settings/optimizer.learning_rate", "fast"),
        ("validation", 3),
        ("validation/final", None),
        ("validation/best", math.nan),
        ("test", []),
        ("test/final", [1.0]),
        ("test/final", [1.0, math.nan, 2.0]),
        ("test/tokens", [10, 0, 30]),
        ("test/best", "all"),
        ("ticks", {}),
        ("ticks/lambda", [0.1]),
        ("ticks/lambda", [0.1, None]),
        ("ticks/s", [0.1, "?"]),
        ("ticks/step", []),
        ("law", None),
        ("steps", "x"),
        ("n_tokens", math.inf),
        ("machine", "x"),
        ("machine", {}),
        ("versions", []),
        ("git_revision", [1]),
        ("text", 7),
    ],
)
def test_what_no_run_leaves_is_named(record, path, value):
    assert fault(put(record, path, value)) == f"its {path.partition('/')[0]} is not what a run leaves"


def test_a_file_of_such_a_one_is_refused_by_its_name(record, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(put(record, "test/final", [1.0, math.nan, 2.0])))
    with pytest.raises(UserError, match=f"{path} is not the record of a run, for its test is not what a run leaves"):
        Evidence(tmp_path)


def test_two_files_of_one_run_may_differ_in_where_it_was_done_and_not_in_what_came_of_it(record, tmp_path):
    folder = tmp_path / "both"
    for name in ("here", "there"):
        write_record(folder / f"{name}.json", record | {"machine": {"cpu": name}})
    assert len(Evidence(folder).records) == 1
    write_record(folder / "there.json", put(record, "test/final", [1.0, 2.0, 3.0]))
    with pytest.raises(UserError, match=r"there\.json and .*here\.json are of one run and differ"):
        Evidence(folder)
