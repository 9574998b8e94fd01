"""Evidence that a setpoint is out of reach, and where there is none."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granite_scu.control.diagnostics.reachability import Observation, Reachability

PATIENCE = 5


def sight(k: int, s: float, *, ticks=60, low=False, high=False, share=0.2, moved=None) -> Observation:
    """The k-th of ``ticks`` ticks, at a constant learning rate of 1e-3, ten steps each."""
    data_bpt = 5.0
    return Observation(
        step=10 * k,
        s=s,
        data_bpt=data_bpt,
        param_bpt=data_bpt * s / (1 - s),
        at_low=low,
        at_high=high,
        penalty_share=share,
        moved=0.01 * k if moved is None else moved,
        moved_at_end=0.01 * ticks,
    )


def free(k: int, at_end: float, ticks: int = 60, exponent: float = 2.0) -> float:
    """S at the k-th tick of a run whose ParamBPT grows as a power, and that ends at ``at_end``."""
    param = 5.0 * at_end / (1 - at_end) * (k / ticks) ** exponent
    return param / (param + 5.0)


def watch(law: Reachability, sights) -> list:
    state, states = law.init(), []
    for s in sights:
        state = law.update(state, s)
        states.append(state)
    return states


# Out of reach


def test_free_growth_that_falls_short_is_seen_before_the_end():
    law = Reachability(0.5)
    states = watch(law, [sight(k, free(k, at_end=0.2), share=0.01) for k in range(1, 61)])
    first = next(k for k, state in enumerate(states, 1) if state.side == "below")
    assert first < 15
    assert all(state.side == "below" for state in states[first:])
    assert (states[-1].since, states[-1].episodes) == (10 * (first - PATIENCE + 1), 1)
    assert states[first].expected == pytest.approx(0.2, rel=0.05)
    assert states[-1].s_free is None  # lambda never rested on its bound


def test_lambda_at_its_upper_bound_and_s_above():
    states = watch(Reachability(0.05), [sight(k, 0.3, high=True, share=0.4) for k in range(20, 30)])
    assert states[-1].side == "above"
    advice = Reachability(0.05).advice(states[-1], 1e-6, 10.0)
    assert advice == (
        "S* = 5 % is out of reach: S is 30 % with lambda on its upper bound of 10 since step 200; try "
        "--lambda-max 100; other ways: docs/troubleshooting.md"
    )


# In reach: no false alarm


NO_ALARM = {
    # From 1.3 or 0.75 S* with an exponent of 0.3: under way it comes into the band.
    **{
        f"near, on the {bound} bound and on its way": (
            0.1,
            [sight(k, 0.1 * ratio * (k / 5) ** power, ticks=140, **{bound: True}) for k in range(5, 141)],
        )
        for bound, ratio, power in (("high", 1.3, -0.3), ("low", 0.75, 0.3))
    },
    # Its slope is none for a tick, and it comes down into the band.
    "a peak on the upper bound": (
        0.1,
        [sight(k, 0.16 * math.exp(-0.01 * (k - 22) ** 2), ticks=140, high=True) for k in range(20, 31)],
    ),
    "S held down by lambda": (0.5, [sight(k, 0.1, share=0.3) for k in range(1, 61)]),
    "in band on a bound": (0.1, [sight(k, 0.097, low=True) for k in range(20, 60)]),
    "a fall from above that goes on": (0.05, [sight(k, 0.3 * 0.7**k, high=True) for k in range(1, 8)]),
}


@pytest.mark.parametrize(("setpoint", "sights"), NO_ALARM.values(), ids=NO_ALARM)
def test_there_is_no_alarm(setpoint, sights):
    states = watch(Reachability(setpoint), sights)
    assert not any(state.side for state in states)
    assert (states[-1].reached is None) == (setpoint == 0.5)  # the others come into their band


@pytest.mark.parametrize("exponent", [1.6, 2.0, 2.4])
@pytest.mark.parametrize("at_end", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("where", [{"low": True}, {"share": 0.001}])
def test_the_normal_rise_towards_a_setpoint_that_it_crosses(exponent, at_end, where):
    law = Reachability(0.95 * at_end)
    states = watch(law, [sight(k, free(k, at_end, exponent=exponent), **where) for k in range(1, 61)])
    assert not any(state.side for state in states)


def test_warm_up_and_a_decaying_rate_make_no_alarm():
    rates = [min(1.0, k / 10) * 0.5 * (1 + math.cos(math.pi * max(0, k - 10) / 90)) for k in range(1, 101)]
    moved = [sum(rates[:k]) for k in range(1, 101)]
    p_end = 1.0

    def at(k):
        param = p_end * (moved[k] / moved[-1]) ** 2
        return Observation(k, param / (param + 5), 5.0, param, True, False, 0.0, moved[k], moved[-1])

    states = watch(Reachability(0.9 * p_end / (p_end + 5)), [at(k) for k in range(100)])
    assert not any(state.side for state in states)


@settings(max_examples=50)
@given(st.lists(st.floats(0.8, 1.25), min_size=60, max_size=60))
def test_noise_about_the_setpoint_is_no_evidence(noise):
    states = watch(Reachability(0.1), [sight(k, 0.1 * n, share=0.2) for k, n in enumerate(noise, 1)])
    assert not any(state.side for state in states)


# Episodes


def test_it_is_withdrawn_in_band_and_counted_again():
    stuck = [sight(k, 0.05, low=True) for k in range(20, 30)]
    there = [sight(k, 0.5, low=False) for k in range(30, 32)]
    again = [sight(k, 0.05, low=True) for k in range(32, 40)]
    states = watch(Reachability(0.5), [*stuck, *there, *again])
    assert states[9].side == "below" and states[10].side is None
    assert states[-1].side == "below"
    assert states[-1].episodes == 2


def test_one_doubtful_tick_does_not_withdraw_it():
    stuck = [sight(k, 0.05, low=True) for k in range(20, 30)]
    doubtful = [sight(k, 0.05, low=False, share=0.3) for k in range(30, 30 + PATIENCE)]
    states = watch(Reachability(0.5), [*stuck, *doubtful])
    assert states[10].side == "below"
    assert states[-1].side is None
    assert states[-1].episodes == 1


def test_a_tick_without_a_measurement_says_nothing():
    law = Reachability(0.5)
    state = watch(law, [sight(k, 0.05, low=True) for k in range(20, 30)])[-1]
    assert law.update(state, None) == state


def test_the_advice_is_one_remedy_with_a_number():
    law = Reachability(0.5)
    state = watch(law, [sight(k, 0.05, low=True) for k in range(20, 30)])[-1]
    advice = law.advice(state, lambda_min=0.5, lambda_max=1e6)
    assert advice == (
        "S* = 50 % is out of reach: S is 5 % with lambda on its lower bound of 0.5, and about 5 % is expected at "
        "the end; try --target-s 0.04 (4 %); other ways: docs/troubleshooting.md"
    )
    assert law.advice(law.init(), 0.5, 1e6) is None
    summary = law.summary(state, 0.5, 1e6)
    assert summary["verdict"] == "stuck below the setpoint"
    assert summary["advice"] == (
        "S* = 50 % was out of reach: S ended at 5 % with lambda on its lower bound of 0.5; try --target-s 0.04 (4 %); "
        "other ways: docs/troubleshooting.md"
    )


def test_a_setpoint_counts_as_reached_only_where_s_came_to_it():
    law = Reachability(0.5)
    assert law.summary(law.init(), 0.5, 1e6)["verdict"] == "not shown"
    *_, short, arrived, left = watch(law, [sight(step, s) for step, s in ((4, 0.2), (5, 0.44), (6, 0.46), (7, 0.6))])
    assert law.summary(short, 0.5, 1e6)["verdict"] == "not shown"
    for state in (arrived, left):
        found = law.summary(state, 0.5, 1e6)
        assert (found["verdict"], found["reached_at_step"]) == ("reached", 60)


@pytest.mark.parametrize("settings", [{"setpoint": 0.0}, {"setpoint": 1.0}, {"setpoint": 0.1, "patience": 2}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        Reachability(**settings)
