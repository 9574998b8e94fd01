from tracked import CELL, history, result

from research.tracking import report as tracking_report
from research.tracking import runs as tracking_runs


def test_a_run_s_file_says_where_it_was_done(monkeypatch):
    monkeypatch.setattr(tracking_runs, "train", lambda cell, scratch: history(lambda step: 1.0))
    done = tracking_runs.run_cell(CELL)
    assert done["machine"].keys() == {"cpu", "cores", "threads"} and "torch" in done["versions"]
    assert "git_revision" in done
    older = result(CELL, lambda step: 1.0)
    found = tracking_report.origins([older, done, older])
    assert [origin["runs"] for origin in found] == [2, 1]
    assert found[0]["machine"] is None and found[1]["machine"] == done["machine"]
    assert tracking_report.describe_origin(found[0]) == "2 runs: machine, versions and revision not recorded"
    assert tracking_report.describe_origin(found[1]).startswith(f"1 run: {done['machine']['cpu']}, ")
