import copy
import sys
from dataclasses import replace

import numpy as np
import pytest

from granite_scu.cli import exit_codes
from granite_scu.cli.console import WIDE, make_console
from research.real import chart, command, grid, report
from research.real.evidence import OTHERS, difference, holm, kept, processor_seconds, reference
from research.real.grid import GROUPS, STAGES, Cell, Stage
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


def apart(finished, arms, text: str, by) -> None:
    """Has an arm's kept adapters score 100 nats and what ``by`` says of a seed and task on the 12 documents."""
    for cell, line in finished.items():
        if cell.arm in arms:
            point = line["points"]["best"]
            nats = point["nats"] | {text: list(100.0 + np.broadcast_to(by(cell), 12))}
            line["points"] = line["points"] | {"best": point | {"nats": nats}}


def width(text: str, arm: str, rival: str | None, finished, tasks=STAGE.tasks) -> float:
    """Points from one end of an interval to the other."""
    of = [{(PLAIN.base, task): kept(replace(PLAIN, task=task, arm=arm), finished) for task in tasks}
          for arm in (arm, rival) if arm]  # fmt: skip
    found = difference(text, of[0], of[1] if rival else None, finished).estimate
    return found.high - found.low


SEEDS_APART = np.array([-10.0, -5.0, 0.0, 5.0, 10.0])
DOCUMENTS_APART = np.tile([-10.0, 10.0], 6)
SIGN = {"museum": 1, "telegram": -1}


def test_an_interval_is_as_wide_as_seeds_make_it(finished):
    apart(finished, ("auto",), "test", lambda cell: SEEDS_APART[cell.seed])
    expected = 2 * 1.96 * SEEDS_APART.std(ddof=1) / 5**0.5
    assert width("test", "auto", None, finished, ["museum"]) == pytest.approx(expected, rel=0.15)


def test_an_interval_is_as_wide_as_documents_make_it(finished):
    apart(finished, ("auto",), "test", lambda cell: DOCUMENTS_APART)
    expected = 2 * 1.96 * DOCUMENTS_APART.std(ddof=1) / 12**0.5
    assert width("test", "auto", None, finished, ["museum"]) == pytest.approx(expected, rel=0.15)


def test_two_arms_are_paired_over_seeds_and_documents(finished):
    for arms in (("auto",), ("auto", "plain")):
        apart(finished, arms, "test", lambda cell: DOCUMENTS_APART + SEEDS_APART[cell.seed])
        assert (width("test", "auto", "plain", finished) == pytest.approx(0)) == ("plain" in arms)


def test_what_is_drawn_of_a_text_is_the_same_for_all_tasks_and_of_seeds_and_records_it_is_not(finished):
    apart(finished, ("auto",), "prose", lambda cell: SIGN[cell.task] * DOCUMENTS_APART)
    assert width("others", "auto", None, finished, ["museum"]) > 1
    assert width("others", "auto", None, finished) == pytest.approx(0)  # what one task has more the other has less
    apart(finished, ("auto",), "test", lambda cell: SIGN[cell.task] * DOCUMENTS_APART)
    assert width("test", "auto", None, finished) > 1
    apart(finished, ("auto",), "test", lambda cell: SIGN[cell.task] * SEEDS_APART[cell.seed])
    assert width("test", "auto", None, finished) > 1


@pytest.mark.parametrize("point", ["end", "best", "mean", "ema", "x 0.5"])
def test_r_is_the_adapter_of_plain_that_validates_best(point, finished):
    points = finished[replace(PLAIN, rate=3e-3)]["points"]
    points[point] = points[point] | {"validation": 0.5}
    found = reference("tiny-granite-h", "museum", finished)
    assert found == (replace(PLAIN, rate=3e-3), "scaled" if point.startswith("x") else point)


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


def move(finished, by: float, others: float, test: float) -> None:
    """Runs that lie ``by`` points, seconds or an answer beyond the margins of the criteria, or before them; and kl
    ``others`` and ``test`` points beyond those of what it is compared with."""
    answer = int(np.sign(by))
    for cell, line in finished.items():
        scores = {
            "plain": (50, 120, 200, 24), "replay": (50, 110, 200, 24),
            "auto": ((51 if cell.task == "museum" else 49) + by, 120.5 + by, 196 - answer, 24),
            "drift": (51 + by, 110 + by, 190 - answer, 32 - answer),
            "kl": (51 + by + 1 + test, 110 + by + 1 + others, 200, 24),
        }  # fmt: skip
        learned, lost, right, known = scores[cell.arm]
        nats = {"test": [learned] * 12} | {text: [lost] * 12 for text in OTHERS}
        answers = {"right": [1] * right + [0] * (200 - right), "known": [1] * known + [0] * (40 - known)}
        line["points"] = {name: point | answers | {"nats": nats} for name, point in line["points"].items()}
        line["at_base"] = line["at_base"] | {"right": [0] * 200, "known": [1] * 40}
        line["train_cpu_s"] = 12.5 + by if cell.arm == "drift" else 10.0


def met(judged: Judgement) -> list[list[bool]]:
    every = [judged.of_auto(), *map(judged.of_budget, range(3)), judged.auto_leaves(), judged.drift_leaves()]
    return [[each.met for each in criteria if each.met is not None] for criteria in every]


def test_every_criterion_is_met_just_before_its_margin_and_not_beyond_it(finished):
    move(finished, -0.1, -0.1, -0.1)
    judged = Judgement(STAGE, finished)
    assert judged.shown == {"H1", "H3", "H6", "H8"} and judged.complete(*judged.hypotheses)
    of_one_seed = [False, True, True, True, False, True]  # H2, H4, H5, H7 are told and never shown
    assert met(judged) == [[True] * 4, of_one_seed, [True] * 6, of_one_seed, [False], [False, True]]
    move(finished, 0.1, 0.1, -0.1)
    judged = Judgement(STAGE, finished)
    assert judged.shown == set() and met(judged) == [[False] * 4, *[[False] * 6] * 3, [True], [True, False]]
    move(finished, -0.1, -0.1, 0.1)
    judged = Judgement(STAGE, finished)
    assert "H8" in judged.shown and not judged.drift_leaves()[1].met  # as good, and learns less


@pytest.mark.parametrize("worse", [None, "test", "right", "known", *OTHERS])
def test_a_larger_budget_is_advised_by_four_criteria_on_the_seeds_after_the_first(worse, finished, monkeypatch):
    monkeypatch.setattr(grid, "large", lambda base, task: Cell(base, task, *grid.LARGE, 1e-2))
    move(finished, 0.0, 0.0, 0.0)
    for cell, line in finished.items():
        if (cell.arm, cell.value) == ("drift", 0.02):  # beside 51 nats of the test, 110 of others, 190 and 32 answers
            wide = replace(cell, value=0.05)
            more = (50.9, 112.0, 190, 31) if cell.seed else (80.0, 200.0, 0, 0)  # the first seed does not count
            learned, lost, right, known = more
            nats = {"test": [learned + (worse == "test") * 0.2] * 12}
            nats |= {text: [lost + (worse == text) * 0.1] * 12 for text in OTHERS}
            right, known = right - (worse == "right"), known - 2 * (worse == "known")
            answers = {"right": [1] * right + [0] * (200 - right), "known": [1] * known + [0] * (40 - known)}
            points = {name: point | answers | {"nats": nats} for name, point in line["points"].items()}
            more = line | {"value": 0.05, "points": points}
            finished = finished | {wide: more}
    judged = Judgement(STAGE, finished)
    criteria, complete = judged.of_advice()
    assert complete and [each.met for each in criteria] == [
        worse != "test",
        worse != "right",
        worse != "known",
        worse not in OTHERS,
    ]
    assert not Judgement(STAGE, finished, ["museum"]).of_advice()[1]  # of a part nothing is decided
    short = {cell: line for cell, line in finished.items() if (cell.value, cell.seed) != (0.05, 4)}
    assert not Judgement(STAGE, short).of_advice()[1]


def test_tasks_that_chose_no_rate_tell_whether_a_budget_doubles_the_default(line):
    own = [Cell("smollm2", task, "drift", 0.05, rate, seed) for task in STAGES["C"].tasks[5:]
           for rate in grid.DEFAULT_RATES for seed in (0, 1)]  # fmt: skip
    finished = {cell: line(cell, test=49.0 if cell.rate == 2.6e-3 else 50.0) for cell in own}
    of_another = replace(own[-1], task="brook")
    criteria, complete = Judgement(STAGES["C"], finished | {of_another: line(of_another, test=99.0)}).of_rate()
    assert complete and [each.met for each in criteria] == [True] * 4 and "-1.00" in criteria[0].found
    del finished[own[-1]]
    assert not Judgement(STAGES["C"], finished).of_rate()[1]


@pytest.mark.parametrize("worse", [None, "test", "right", "others"])
def test_a_fixed_weight_within_the_budget_takes_the_place_of_a_loop_that_is_no_better(worse, finished, monkeypatch):
    monkeypatch.setattr(grid, "large", lambda base, task: Cell(base, task, *grid.LARGE, 1e-2))
    for cell, line in [*finished.items()]:
        if (cell.arm, cell.value, cell.rate) == ("drift", 0.02, 1e-2):
            for arm in (grid.LARGE, grid.HELD):
                point, is_held = line["points"]["best"], arm == grid.HELD
                nats = point["nats"] | {"test": [51.5 + is_held * (0.9 + 0.2 * (worse == "test"))] * 12}
                nats |= {text: [101.0 + is_held * (0.9 + 0.2 * (worse == "others"))] * 12 for text in OTHERS}
                right = [1, 0] * 6 if worse != "right" or not is_held else [1, 0] * 5 + [0, 0]
                points = {"best": point | {"nats": nats, "right": right}}
                finished[replace(cell, arm=arm[0], value=arm[1])] = line | {"points": points}
    criteria, complete = Judgement(STAGE, finished).of_loop()
    assert complete and [each.met for each in criteria] == [worse != "test", worse != "right", worse != "others"]
    del finished[Cell(*STAGE.bases, "museum", *grid.HELD, 1e-2, 4)]
    assert not Judgement(STAGE, finished).of_loop()[1]


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


def test_the_picture_has_arms_whose_rates_are_not_all_run_and_none_that_is_not_run_any_more(finished):
    for cell, line in list(finished.items()):
        if cell.arm == "drift" and cell.value == 0.02:
            finished[replace(cell, arm="wide")] = line
            if cell.rate == 1e-2:  # the best; of a budget of 5 % the only one
                finished[replace(cell, value=0.05)] = line
    wide = {cell: line for cell, line in finished.items() if (cell.value, cell.rate) != (0.05, 3e-3)}
    [legend] = chart.drift(Judgement(STAGE, wide)).legends
    shown = {text.get_text() for text in legend.get_texts()}
    assert {"--max-drift 2%", "--max-drift 5%", "general text 5%"} <= shown and "former loop 2%" not in shown


def test_tables_of_tasks_have_the_rivals_of_the_former_loop_and_every_arm_at_another_rate(finished, capsys):
    for cell, line in list(finished.items()):
        if (cell.arm, cell.value, cell.seed) == ("drift", 0.02, 0):
            points = {name: point | {"validation": point["validation"] + 0.5} for name, point in line["points"].items()}
            finished[replace(cell, arm="wide")] = line | {"points": points}
    points = finished[replace(PLAIN, rate=3e-3)]["points"]
    points["x 0.5"] = points["end"] | {"validation": 1.25, "drift": 0.001}  # as good as the former loop alone
    judged = Judgement(STAGE, finished, ["museum"])
    report.tasks(judged, make_console(width=WIDE))
    told = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│ F")]
    assert [row.split(":")[0] for row in told] == ["F", "F'", "F, wide", "F', wide"]
    assert told[2].startswith("F, wide: plain, 0.003") and told[0].startswith("F: replay")
    report.tasks(judged, make_console(width=WIDE), 3e-3)
    told = capsys.readouterr().out
    for row, validated in {"drift 2%, 0.003, end": "1.52", "plain, 0.003, x 0.5": "1.25"}.items():
        [line] = [line for line in told.splitlines() if line.startswith(f"│ {row}")]
        assert validated in line  # 1.52: by the distance of the rate from the best


def test_a_chart_without_runs_is_refused(monkeypatch, tmp_path, capsys):
    wanted = ["--results", str(tmp_path / "none"), "--chart", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["real", *wanted])
    assert exit_codes.exit_code_of(command.main, False) == 2
    assert "--chart" in capsys.readouterr().err
