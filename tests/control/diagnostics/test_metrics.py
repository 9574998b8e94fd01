import json
import math

import pytest

from granite_scu.control.diagnostics.metrics import summarise


def history(s_ema, lams=None, target=0.1, saturated=(), held=()):
    lams = lams or [1.0] * len(s_ema)
    return [
        {
            "step": 10 * (k + 1),
            "s": s,
            "s_ema": s,
            "s_target": target,
            "lambda": lam,
            "saturated": k in saturated,
            "held": k in held,
        }
        for k, (s, lam) in enumerate(zip(s_ema, lams, strict=True))
    ]


def test_a_rise_with_overshoot_is_summarised_number_by_number():
    e = math.e
    records = history(
        [None, 0.1 / e, 0.095, 0.13, 0.1, 0.1], lams=[1.0, 1.0, e, e**3, e**2, e**2], saturated={3}, held={0}
    )
    error = math.log(1 / 0.95), math.log(1.3)
    area = 10 * ((1 + error[0]) / 2 + (error[0] + error[1]) / 2 + error[1] / 2)
    assert summarise(records) == {
        "rise_time": 30,
        "settling_time": 50,
        "overshoot": pytest.approx(0.3),
        "iae": pytest.approx(area / 40),
        "in_band": 3 / 4,  # of the records from step 30 on, all but the peak
        "in_band_second_half": 2 / 3,
        "saturated": 1 / 6,
        "held": 1 / 6,
        "held_ticks": 1,
        "actuator_travel": pytest.approx(4),
    }


def test_what_a_held_record_repeats_is_not_in_band():
    metrics = summarise(history([0.1, 0.1, 0.1, 0.1], held={2, 3}))
    assert metrics["in_band"] == 2 / 4
    assert metrics["in_band_second_half"] == 0
    assert metrics["settling_time"] is None
    assert metrics["iae"] == 0
    assert summarise(history([0.1, 0.3, 0.1], held={1}))["overshoot"] == pytest.approx(0)
    assert summarise(history([0.1, 0.1, 0.1], held={1}))["settling_time"] == 30


@pytest.mark.parametrize(
    ("s_ema", "settings", "expected"),
    [
        # leaving the band at the end is not settled; a wider band settles earlier; a start above counts as overshoot
        ([0.1, 0.1, 0.1, 0.12], {}, {"settling_time": None, "in_band": 3 / 4}),
        ([0.05, 0.085, 0.095], {}, {"settling_time": 30}),
        ([0.05, 0.085, 0.095], {"band": 0.2}, {"settling_time": 20}),
        ([0.3, 0.1], {}, {"overshoot": pytest.approx(2)}),
        # what never comes near the setpoint has an error and little else
        ([0.05] * 3, {}, dict.fromkeys(("rise_time", "settling_time", "overshoot", "in_band"))),
        ([0.05] * 3, {}, {"in_band_second_half": 0, "iae": pytest.approx(math.log(2))}),
    ],
)
def test_courses_and_what_is_said_of_them(s_ema, settings, expected):
    found = summarise(history(s_ema), **settings)
    assert {name: found[name] for name in expected} == expected


def test_the_error_is_weighted_by_the_steps_between_records():
    records = history([0.1 * math.e, 0.1 * math.e, 0.1])
    records[2]["step"] = 120
    assert summarise(records)["iae"] == pytest.approx((10 * 1 + 100 * 0.5) / 110)


def test_without_a_setpoint_only_the_actuator_is_described():
    metrics = summarise(history([0.1, 0.2], lams=[1.0, 2.0], target=None))
    defined = {name for name, value in metrics.items() if value is not None}
    assert defined == {"saturated", "held", "held_ticks", "actuator_travel"}


def test_lambda_of_zero_has_no_travel():
    assert summarise(history([0.1, 0.1], lams=[0.0, 0.0]))["actuator_travel"] is None


@pytest.mark.parametrize("s_ema", [[], [None], [0.1], [None, None, 0.1], [0.0, math.nan, math.inf], [0.1, 0.1]])
def test_every_metric_is_finite_or_null(s_ema):
    json.dumps(summarise(history(s_ema)), allow_nan=False)
