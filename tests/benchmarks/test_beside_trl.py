"""The comparison with TRL, on the embedded model."""

import json

import pytest
from running import ROOT, run

pytest.importorskip("trl")
CHATS = ROOT / "benchmarks" / "chats"
EMBEDDED = ROOT / "granite_scu" / "model" / "assets" / "tiny-granite-h"


@pytest.mark.slow
def test_each_arm_is_trained_and_asked(tmp_path):
    files = []
    for name, count in (("observatory.jsonl", 12), ("observatory_questions.jsonl", 2)):
        files.append(tmp_path / name)
        files[-1].write_text("".join((CHATS / name).read_text().splitlines(keepends=True)[:count]))
    chats, questions = map(str, files)
    ran = run("beside_trl", "--model", str(EMBEDDED), "--chats", chats, "--questions", questions, "--json")
    assert ran.returncode == 0, ran.stderr
    base, *arms = json.loads(ran.stdout)
    assert [base["arm"], len(arms)] == ["base", 4]
    for arm in arms:
        assert (arm["questions"], arm["cpu_s"] > 0, arm["memory_gib"] > 0) == (2, True, True)
    equal = [arm["bits"] for arm in arms if arm["settings"]["learning_rate"] != 2e-4]
    assert max(equal) < base["bits"]
