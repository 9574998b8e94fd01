import copy
import sys
from dataclasses import replace

import numpy as np
import pytest

from granite_scu.cli import exit_codes
from granite_scu.cli.console import WIDE, make_console
from research.real import chart, command, report
from research.real.evidence import difference, holm, kept, processor_seconds, reference
from research.real.grid import GROUPS, Cell, Stage
from research.real.judgement import AUTO, MIDDLE, Judgement

STAGE = Stage(("tiny-granite-h",), ("museum", "telegram"), GROUPS[:2])
PLAIN = Cell("tiny-granite-h", "museum", "plain", 0.0, 0.0)


def scores(cell: Cell) -> dict:
    """Loops cost less elsewhere and learn a little less; auto is worse than plain; a fixed weight is no use."""
    return {"plain": {"test": 50, "others": 120}, "auto": {"test": 52, "others": 120},
            "drift": {"test": 50.5, "others": 101, "drift": 0.01, "known": [1, 1]}, "kl": {"test": 60, "others": 118},
            "replay": {"test": 50, "others": 119, "drift": 0.09}}[cell.arm]  # fmt: skip


@pytest.fixture(scope="module")
def as_run(run_all):
    return run_all(STAGE, scores)


@pytest.fixture
def finished(as_run):
    return copy.deepcopy(as_run)


def test_differences_are_points_of_the_bases_bits(finished):
    of = {("tiny-granite-h", "museum"): kept(replace(PLAIN, arm="auto"), finished)}
    plain = {("tiny-granite-h", "museum"): reference("tiny-granite-h", "museum", finished)}
    found = difference("test", of, plain, finished)
    assert found.estimate.mean == pytest.approx(2.0) and found.seeds == 5
    assert found.estimate.low == pytest.approx(2.0) and found.p(1.0) == 1.0 and found.p(3.0) < 1e-3
    assert difference("others", plain, None, finished).estimate.mean == pytest.approx(20.0)
    assert difference("known", plain, None, finished).estimate.mean == pytest.approx(-50.0)


def test_an_interval_is_as_wide_as_seeds_and_documents_make_it(finished):
    generator, of = np.random.default_rng(0), {}
    auto = kept(replace(PLAIN, arm="auto"), finished)
    of["tiny-granite-h", "museum"] = auto
    for seed in range(5):
        line = finished[replace(auto.cell, seed=seed)]
        nats = {**line["points"]["best"]["nats"], "test": list(100 + 10 * generator.standard_normal(12))}
        line["points"] = {"best": line["points"]["best"] | {"nats": nats}}
    found = difference("test", of, None, finished)
    # The mean of 60 draws of a deviation of 10 points has one of 1.3; of both ways of drawing the variances add up,
    # so at most 1.3 * sqrt(3).
    assert 2 * 1.96 * 0.6 < found.estimate.high - found.estimate.low < 2 * 1.96 * 1.3 * 3**0.5 * 1.3


def test_what_diverged_scores_as_the_base(finished):
    auto = kept(replace(PLAIN, arm="auto"), finished)
    before = difference("test", {("tiny-granite-h", "museum"): auto}, None, finished).estimate.mean
    line = finished[replace(auto.cell, seed=4)]
    del line["points"]
    line["failed"] = "step 3: not finite"
    after = difference("test", {("tiny-granite-h", "museum"): auto}, None, finished).estimate.mean
    assert (before, after) == (pytest.approx(-48.0), pytest.approx(-48.0 * 4 / 5))


def test_holm_stops_at_the_first_that_is_not_shown():
    assert holm({"a": 0.001, "b": 0.02, "c": 0.03}, 3) == {"a", "b", "c"}
    assert holm({"a": 0.001, "b": 0.03, "c": 0.03}, 3) == {"a"}
    assert holm({"a": 0.02, "b": 0.001, "c": 0.9}, 3) == {"a", "b"}
    assert holm({"a": 0.02, "b": 0.001}, 8) == {"b"}  # the six that were not run count


def test_the_criteria_say_what_the_runs_say(finished):
    judged = Judgement(STAGE, finished)
    assert judged.shown == {"H3", "H6"}  # all others of budgets have one seed
    assert [criterion.met for criterion in judged.of_auto()] == [False, False, True, True, None]
    assert all(criterion.met is not False for criterion in judged.of_budget(1))
    assert not all(criterion.met is not False for criterion in judged.of_budget(0))
    assert judged.complete(*judged.hypotheses)
    assert judged.auto_leaves()[0].met and not any(criterion.met for criterion in judged.drift_leaves())


def test_fewer_questions_are_a_share_of_those_that_plain_has_right(finished):
    for cell, line in finished.items():
        if cell.arm == "auto":
            line["points"]["best"] = line["points"]["best"] | {"right": [1, 0] * 3 + [0] * 6}
    [found] = [each for each in Judgement(STAGE, finished).of_auto() if "questions" in each.says]
    assert found.found == "+50.00, asked 2.00, 2 tasks" and found.met is False


def test_of_no_run_nothing_is_said():
    judged = Judgement(STAGE, {})
    assert judged.of_auto() == judged.of_budget(0) == judged.auto_leaves() == judged.drift_leaves() == []
    assert not judged.complete("H1")


def test_a_question_is_decided_when_all_runs_that_it_asks_for_are_there(finished):
    without_kl = Judgement(STAGE, {cell: line for cell, line in finished.items() if cell.arm != "kl"})
    assert without_kl.complete("H1", "H3", "H6") and not without_kl.complete("H8")
    without_replay = Judgement(STAGE, {cell: line for cell, line in finished.items() if cell.arm != "replay"})
    assert without_replay.complete("H1") and not without_replay.complete("H6")  # F may be an adapter of replay
    early = Judgement(STAGE, {cell: line for cell, line in finished.items() if cell.arm in ("plain", "auto")})
    assert early.complete("H1")  # at a p of 1
    early.hypotheses["H1"] = early.hypotheses["H1"]._replace(margin=2.001)
    assert early.hypotheses["H1"].p < 0.01 and "H1" not in early.shown and not early.complete("H1")
    four = Judgement(STAGE, {cell: line for cell, line in finished.items() if (cell.arm, cell.seed) != ("auto", 4)})
    assert not four.complete("H1")


def test_what_stands_beside_r_is_of_the_same_tasks_and_without_a_task_nothing_is_decided(finished, capsys):
    finished = {cell: line for cell, line in finished.items() if (cell.task, cell.arm) != ("telegram", "drift")}
    for cell, line in finished.items():
        if (cell.task, cell.arm) == ("telegram", "plain"):
            line["points"] = {name: of | {"nats": {text: [300.0] * 12 for text in of["nats"]}, "drift": 0.9}
                              for name, of in line["points"].items()}  # fmt: skip
    judged = Judgement(STAGE, finished)
    found = {criterion.says: criterion.found for criterion in judged.of_budget(1)}
    assert found["of what R adds on the four texts at most half"].startswith("+1.00, asked 10.00, 1 tasks")
    row = dict(zip(report.COLUMNS, report.row(judged, "drift", judged.arms[MIDDLE]), strict=True))
    assert row["tasks"] == "1" and row["drift;\nR's"] == "1.00%;\n10.00%"
    report.drift(judged, make_console())
    assert capsys.readouterr().out.count("undecided") == 4


def test_processor_seconds_are_of_all_seeds_that_both_have(finished):
    judged = Judgement(STAGE, finished)
    for cell, line in finished.items():
        if cell.arm == "auto" and cell.seed:
            line["train_cpu_s"] = 20.0
    assert processor_seconds(judged.arms[AUTO], judged.plain, finished) == pytest.approx(9 / 5)
    for cell, line in finished.items():
        if cell.arm == "auto" and cell.seed > 2:
            line["processor"] = "another"
    assert processor_seconds(judged.arms[AUTO], judged.plain, finished) == pytest.approx(5 / 3)


def test_tables_and_pictures_are_made(finished, tmp_path, capsys):
    judged = Judgement(STAGE, finished, ["museum"])
    assert report.row(judged, "auto", judged.arms[AUTO])[:4] == ["auto", "1", "5", "+2.00\n(+2.00 to +2.00)"]
    report.tasks(judged, make_console(width=WIDE))
    told = capsys.readouterr().out
    assert "telegram" not in told and all(name in told for name in ("R: plain", "F: replay 5%", "F': plain"))
    [end] = [line for line in told.splitlines() if "drift 1%" in line and "end" in line]
    for figure in ("+0.50 (+0.50 to +0.50)", "+1.0 %", "6 of 12", "0 of 2", "+1.00 (+1.00 to +1.00)", "1.00%"):
        assert figure in end
    judged = Judgement(STAGE, finished)
    for question in ("auto", "drift"):
        chart.write(judged, question, tmp_path / f"{question}.png")
        assert (tmp_path / f"{question}.png").stat().st_size > 5000


def test_a_chart_without_runs_is_refused(monkeypatch, tmp_path, capsys):
    wanted = ["--results", str(tmp_path / "none"), "--chart", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["real", *wanted])
    assert exit_codes.exit_code_of(command.main, False) == 2
    assert "--chart" in capsys.readouterr().err
