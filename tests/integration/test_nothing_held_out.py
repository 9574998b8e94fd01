"""A run with --held-out-share 0, through every command that follows."""

import json

import pytest
from outcomes import done, refused_line

from granite_scu.cli import main as commands

pytestmark = pytest.mark.slow


def test_a_run_that_holds_nothing_out_goes_all_the_way(call, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(json.dumps({"prompt": f"question {i}?", "completion": f"a {i}"}) + "\n" for i in range(40))
    )
    run, more = tmp_path / "run", tmp_path / "more"
    few = ("--max-steps", 4, "--save-steps", 2, "--samples", 2, "--block-size", 64)
    flags = ("--test-run", "--data-dir", chats, "--held-out-share", 0, *few, "--output-dir", run)
    code, stdout, stderr = call(commands.main, "train", *flags)
    assert code == 0, stderr
    said = " ".join((stdout + stderr).split())
    assert "is validated" not in said and "--data-dir FILE" in said and "--chat" in said
    metrics = json.loads((run / "scu_metrics.json").read_text())
    assert metrics["base_test_bpt"] is None and metrics["best_val_bpt"] is None and metrics["steps"] == 4
    assert call(commands.main, "report", run)[0] == 0
    assert "--held-out-share 0" in refused_line(call, commands.main, "eval", run)
    stderr = refused_line(call, commands.main, "eval", run, "--data-dir", chats)
    assert "give text that it has not seen" in stderr and "leave --data-dir out" not in stderr
    others = tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps({"prompt": f"other {i}?", "completion": f"b {i}"}) + "\n" for i in range(9)))
    done(call, commands.main, "eval", run, "--data-dir", others, "--json")
    resumed = ("train", "--resume-from-checkpoint", run / "checkpoint-2", "--max-steps", 5, "--output-dir", more)
    done(call, commands.main, *resumed)
    assert "not measured" in (run / "README.md").read_text()
    code, plan, stderr = call(commands.main, "plan", "--test-run", "--data-dir", chats)
    assert code == 0 and "to validate on, so each is" in " ".join(plan.split()), "which few held-out chats get"
