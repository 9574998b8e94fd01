"""The comparison with TRL, on the embedded model."""

from argparse import Namespace

import pytest
from running import ROOT

from benchmarks import beside_trl

pytest.importorskip("trl")
CHATS = ROOT / "benchmarks" / "chats"
EMBEDDED = ROOT / "granite_scu" / "model" / "assets" / "tiny-granite-h"


@pytest.mark.slow
def test_both_sides_train_on_a_hybrid_at_the_same_settings_and_are_asked(tmp_path):
    files = {}
    for name, count in (("observatory", 12), ("observatory_questions", 2)):
        files[name] = tmp_path / f"{name}.jsonl"
        lines = (CHATS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:count]
        files[name].write_text("".join(lines), encoding="utf-8")
    options = Namespace(
        model=str(EMBEDDED),
        chats=str(files["observatory"]),
        questions=str(files["observatory_questions"]),
        device="cpu",
    )
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    steps, in_fp32 = ("--max-steps", "8", "--learning-rate", "0.01"), ("--controller", "none", "--precision", "fp32")
    took = [beside_trl.ours(options, ours, 42, (*steps, *in_fp32))]
    equal = beside_trl.chosen(ours)
    took.append(beside_trl.theirs(options, theirs, 42, equal))
    rows = beside_trl.scored(options, {"ours": ours, "theirs": theirs})

    assert (equal["max_steps"], equal["learning_rate"]) == (8, 0.01)
    assert all(figure > 0 for side in took for figure in side.values())
    assert {row["questions"] for row in rows.values()} == {2}
    assert max(rows[side]["bits"] for side in ("ours", "theirs")) < rows["base"]["bits"]  # both have learned
