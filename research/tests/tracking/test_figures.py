import math
from dataclasses import replace

import pytest
from tracked import CELL, history, result

from research.tracking.figures import held_from, measure, meets_goals, summarise, worst_mean
from research.tracking.grid import EVERY, STEPS


def test_a_run_is_measured_by_hand_arithmetic():
    """Up to 1.2 at a tenth of the run, in band from a fifth on, but for one tick in the second half."""

    def ratio(step: int) -> float:
        if step <= STEPS // 10:
            return min(1.2, 2.4 * step / (STEPS // 10))
        return 1.15 if step < STEPS // 5 else 0.7 if step == STEPS // 2 else 1.0

    figures = measure(CELL, history(ratio))
    counted = STEPS * 4 // 5 // EVERY + 1 - 10  # the ten ticks that qualify are not
    assert figures["settling"] == 0.2
    assert figures["in_band"] == pytest.approx(1 - 1 / counted)  # 0.7 is smoothed to 0.84, and the next to 0.91
    assert figures["in_band_early"] == pytest.approx(1 - 1 / (counted - STEPS // 5 // EVERY))
    assert figures["overshoot"] == pytest.approx(0.2, abs=2e-3)
    assert figures["raw"] == pytest.approx(0.03)  # ten ticks with the odd one among them have a mean of 0.97
    assert not meets_goals({**figures, "cell": vars(CELL)})


def test_what_the_actuator_does_is_measured():
    """S a factor e too low throughout, while lambda goes up and down by as much."""
    records = history(lambda step: math.exp(-1))
    for count, record in enumerate(records):
        record |= {"lambda": math.exp(count % 2), "saturated": count % 4 == 0}
    figures = measure(CELL, records)
    assert figures["iae"] == pytest.approx(1)
    assert figures["travel"] == pytest.approx(len(records) - 1)
    assert figures["saturated"] == 0.25
    assert figures["rise"] is None
    disturbed = measure(replace(CELL, disturbance="corpus switched"), records)
    assert [disturbed[name] for name in ("iae", "travel", "saturated")] == [
        figures[name] for name in ("iae", "travel", "saturated")
    ]


def test_the_rise_is_that_of_the_smoothed_s():
    figures = measure(CELL, history(lambda step: 0.5 if step <= 10 * EVERY else 1.0))
    assert figures["rise"] == 13 * EVERY / STEPS  # 0.71, 0.84, 0.92


def test_every_law_is_judged_by_the_same_filter():
    """The defaults', whatever the run's own made of S: here nothing, a flat line, or none."""

    def ratio(step: int) -> float:
        return 1 + 0.5 * math.sin(step / 30)

    figures = measure(CELL, history(ratio))
    assert figures["overshoot"] > 0.3
    for own in (0.01, 0.1, None):
        assert measure(CELL, [{**record, "s_ema": own} for record in history(ratio)]) == figures


def test_a_held_tick_is_out_of_band_and_otherwise_passed_over():
    records = history(lambda step: 1.0)
    records[50] |= {"s": None, "held": True}
    figures = measure(CELL, records)
    counted = len(records) - 10
    assert figures["in_band"] == pytest.approx(1 - 1 / counted)
    assert figures["raw"] == pytest.approx(0.0, abs=1e-9) and figures["overshoot"] == pytest.approx(0.0, abs=1e-9)
    assert meets_goals(figures)
    for record in records[30:]:
        record["s"] = None
    assert not meets_goals(measure(CELL, records))
    for cell in (CELL, replace(CELL, disturbance="corpus switched")):
        nothing = measure(cell, [{**record, "s": None, "s_ema": None} for record in records])
        assert not meets_goals(nothing) and nothing["iae"] is None


def test_passing_through_the_band_is_not_settling():
    figures = measure(CELL, history(lambda step: 1 + 0.5 * math.sin(step / 30)))
    assert figures["settling"] is None
    assert not meets_goals(figures)


def test_a_disturbance_is_judged_by_the_way_back():
    disturbed = replace(CELL, disturbance="learning rate x3")
    back = STEPS // 2 + 5 * EVERY
    figures = measure(disturbed, history(lambda step: 1.4 if STEPS // 2 < step < back else 1.0))
    assert figures["recovery"] == pytest.approx(6 * EVERY / STEPS)  # the smoothed S is back a tick later
    assert figures["overshoot"] == pytest.approx(0.0, abs=1e-9)  # of the half before it
    assert meets_goals(figures)
    lost = measure(disturbed, history(lambda step: 1.5 if step > STEPS // 2 else 1.0))
    assert lost["recovery"] == 1.0
    assert not meets_goals(lost)


def pushed(step: int) -> float:
    """Up to 1.2 in the first half; in the second up to 1.3, down to 0.6 and back."""
    if step <= STEPS // 2:
        return 1.2 if 0 < step - STEPS // 4 <= 10 * EVERY else 1.0
    ticks = (step - STEPS // 2) / EVERY
    return 1.3 if ticks <= 10 else 0.6 if ticks <= 20 else 1.0


@pytest.mark.parametrize(
    ("disturbance", "peak", "dip"),
    [
        ("learning rate x3", 0.3, -0.4),
        ("corpus switched", 0.3, -0.4),
        ("S* x1.5", 0.3, None),  # begins below the new setpoint, wherever it goes from there
        ("S* /1.5", None, -0.4),
        (None, None, None),
    ],
)
def test_how_far_a_disturbance_pushes_s_is_measured_after_it(disturbance, peak, dip):
    figures = measure(replace(CELL, disturbance=disturbance), history(pushed))
    assert (figures["peak"], figures["dip"]) == (pytest.approx(peak, abs=2e-3), pytest.approx(dip, abs=2e-3))
    assert figures["overshoot"] == pytest.approx(0.2 if disturbance else 0.3, abs=2e-3)


def test_a_run_that_is_pushed_one_way_only_has_no_excursion_the_other_way():
    figures = measure(replace(CELL, disturbance="corpus switched"), history(lambda step: 0.99))
    assert (figures["peak"], figures["dip"]) == (0.0, pytest.approx(-0.01))


def test_the_excursion_is_of_the_setpoint_in_force():
    moved = replace(CELL, disturbance="S* x1.5")
    records = history(lambda step: 1.0 if step <= STEPS // 2 else 1.6)
    later = [{**record, "s_target": 0.15} if record["step"] > STEPS // 2 else record for record in records]
    assert measure(moved, later)["peak"] == pytest.approx(0.16 / 0.15 - 1)


def test_the_summary_is_the_worst_of_each():
    good, bad = result(CELL, lambda step: 1.0), result(replace(CELL, seed=1), lambda step: 0.5)
    facts = summarise([good, bad], 2)
    assert facts["worst_in_band"] == facts["worst_in_band_early"] == 0.0
    assert facts["worst_settling"] == facts["worst_rise"] == 1.0
    assert facts["worst_iae"] == pytest.approx(math.log(2))
    assert facts["goal_met"] is False
    assert facts["missed"] == [str(replace(CELL, seed=1))]
    assert summarise([good], 1)["goal_met"] is True
    assert facts["worst_peak"] is None and facts["worst_dip"] is None
    disturbed = result(replace(CELL, disturbance="corpus switched"), pushed)
    facts = summarise([good, {**disturbed, "travel": 7.0, "saturated": 0.5}], 2)
    assert (facts["worst_peak"], facts["worst_dip"]) == (pytest.approx(0.3, abs=2e-3), pytest.approx(-0.4, abs=2e-3))
    assert (facts["worst_travel"], facts["worst_saturated"]) == (7.0, 0.5)


def test_of_a_part_of_the_grid_it_is_not_said_that_the_goal_is_met():
    good, bad = result(CELL, lambda step: 1.0), result(replace(CELL, seed=1), lambda step: 0.5)
    part = summarise([good], 3)
    assert (part["cells"], part["of"], part["complete"], part["goal_met"]) == (1, 3, False, None)
    assert summarise([good, bad], 3)["goal_met"] is False
    assert summarise([good], 1)["complete"]


def test_held_from_needs_nine_of_ten_ticks_and_looks_no_further():
    ratios = [0.5, 0.95, 1.3, 1.3, *[1.0] * 5, 1.2, *[1.0] * 4, *[2.0] * 20]
    points = [(10 * k, ratio) for k, ratio in enumerate(ratios)]
    assert held_from(points, 0.1) == 40  # at 10 two of ten are out; from 40 on one is, whatever comes later
    assert held_from(points, 0.1, share=1.0) is None
    assert held_from(points[:12], 0.1) is None  # eight ticks are not ten
    missing = [(step, None if step in (50, 60) else ratio) for step, ratio in points]
    assert held_from(missing[:14], 0.1) is None  # with the one at 90, three of the ten are out


def test_the_worst_mean_is_the_largest_departure_of_a_window():
    assert worst_mean([1.0, 1.0, 1.4, 0.6, 1.2], window=2) == pytest.approx(0.2)
    assert worst_mean([1.0], window=2) is None
