"""Lines of finished runs, and what a run that was cut leaves of one."""

import resource

import pytest

from benchmarks import cells
from granite_scu.config.errors import UserError

RUN = {"cell": 1, "bits": [1.5, 2.0]}


def test_a_cut_line_is_passed_over_and_breaks_none_that_is_added(tmp_path):
    runs = tmp_path / "runs.jsonl"
    cells.append(runs, RUN)
    runs.write_bytes(runs.read_bytes() + b'{"cell":2,"bi')
    for _ in range(2):
        cells.append(runs, RUN | {"cell": 3})
    with pytest.warns(UserWarning, match="line 2: is cut"):
        assert list(cells.read(runs, lambda line: line["cell"])) == [1, 3]
    assert len(runs.read_bytes().splitlines()) == 4


def test_a_full_disk_is_no_finished_run(tmp_path):
    runs, (_, most) = tmp_path / "runs.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))
    try:
        with pytest.raises(UserError, match=r"took 10 of 28 bytes"):
            cells.append(runs, RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
