"""The PI law, its gains scheduled as by default or given, on simulated plants: two decades of gain, time constant and
dead time, noise, bounds, a rise from S = 0 and a learning rate that falls.

A loop with too much gain and dead time has a limit cycle under any law of this kind. So convergence is claimed where
the margins say that the loop is stable, which is half of the plants. Everywhere it is claimed that S goes no further
than the dead time carries it and comes back, and that nothing winds up. What a claim is worth is seen from the laws
that break it, at the end.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rising import steer

from granite_scu.control import PI
from granite_scu.control.laws.base import clip
from research.identification.fopdt import Fopdt
from research.identification.stability import margins

LOW, HIGH = 1e-3, 1e3
SCHEDULED = PI(setpoint=0.02, lambda_min=LOW, lambda_max=HIGH)
GIVEN = replace(SCHEDULED, kp=2.0, ki=0.3)
KP_GIVEN = replace(SCHEDULED, kp=2.0)
OF_DRIFT = replace(SCHEDULED, setpoint=0.02 / 1.02, lambda_init=1.0)
"""Drift is to the base's bits as ParamBPT to DataBPT, and grows as it does: the same plant, for a budget of 2 %."""
LAWS = st.sampled_from([SCHEDULED, GIVEN, KP_GIVEN, OF_DRIFT])


def decades(low: float, high: float) -> st.SearchStrategy[float]:
    """Uniform in the logarithm, in three digits."""
    return st.floats(math.log(low), math.log(high)).map(lambda exponent: float(f"{math.exp(exponent):.3g}"))


PLANTS = st.builds(Fopdt, gain=decades(0.1, 10).map(lambda size: -size), tau=decades(1, 100), theta=decades(0.1, 10))
MISSES = st.floats(-1.1, 1.1)
"""The feed-forward is right within a factor of three."""
SEEDS = st.integers(0, 10_000)
MANY = settings(max_examples=90)
FEWER = settings(MANY, max_examples=20)
"""Where the margins, which take longer than the simulation, decide what is claimed."""


def normal(seed: int, ticks: int, size: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, ticks)


def tame(law: PI, plant: Fopdt, miss: float, slowing: float = 1.0) -> bool:
    """Whether the loop about S* has a gain margin of 2 and a phase margin of 30 degrees, at a lag of ``slowing`` tau
    too.

    The gains are those of the lag that the law takes from the first tick. That is 1.6 tau for a tau of one tick, and
    more the further the first lambda is above what holds S*: such a lambda, and not Adam, ends that tick's rise.
    """
    errors, _, _ = steer(law, plant, 1, miss=miss)
    for slower in {1.0, slowing}:
        lag = slower * math.exp(-errors[0] / 2)
        found = margins(replace(plant, tau=slower * plant.tau), *law.gains(lag))
        if not (found.stable and (found.gain or math.inf) > 2 and (found.phase or 180) > 30):
            return False
    return True


# Claims


def converges(law: PI, plant: Fopdt, miss: float = 0.5, last_rate: float = 1.0) -> None:
    """S rises, comes to S* and stays, also while the learning rate falls along a cosine."""
    ticks = 2000
    rates = last_rate + (1 - last_rate) * (1 + np.cos(np.pi * np.arange(ticks) / ticks)) / 2
    errors, log_lam, _ = steer(law, plant, ticks, miss=miss, rates=rates)
    assert np.abs(errors[-100:]).max() < 0.01
    assert log_lam[-1] == pytest.approx(math.log(law.lambda_start) + miss, abs=0.1)


def stays_near(law: PI, plant: Fopdt, miss: float = 0.5, size: float = 0.05, seed: int = 0) -> None:
    """The norm that S* implies is passed by what Adam adds to it in the dead time, eight ticks more and half of tau, at
    most, and S does not come to rest on one side of S*."""
    ticks = 600
    errors, log_lam, outputs = steer(law, plant, ticks, miss=miss, noise=normal(seed, ticks, size))
    assert all(LOW <= output.lam <= HIGH for output in outputs)
    assert np.isfinite(errors).all() and np.isfinite(log_lam).all()
    assert math.exp(errors.max() / 2) < 1.5 + (plant.theta + 8) / plant.tau
    late = errors[ticks // 2 :]
    assert late.min() < 0.05 and late.max() > -0.05


def leaves_its_bound(law: PI, plant: Fopdt, upper: bool, miss: float = 0.5, idle: int = 300) -> None:
    """S* goes out of reach, lambda rests on a bound, and leaves it when S turns back, however long it rested.

    The data pulls so that even under that bound S would rest off S* by a factor of e in ParamBPT, then so that it would
    on the other side, which lambda mends by 1 / |K|. S itself takes 0.6 tau (downwards) to 0.8 tau (upwards) to come to
    S* from there.
    """
    bound, sign = (math.log(HIGH), 1) if upper else (math.log(LOW), -1)
    settling, after = 60 + round(3 * plant.tau), 15 + round(0.8 * plant.tau + plant.theta)
    held = -plant.gain * (bound - math.log(law.lambda_start) - miss)  # the pull at which the bound holds S*
    pull = np.repeat([0.0, held + sign, held - sign], [settling, idle, after])
    _, log_lam, _ = steer(law, plant, len(pull), miss=miss, disturbance=pull)
    assert log_lam[settling + idle - 20 : settling + idle] == pytest.approx(np.full(20, bound))
    assert abs(log_lam[-after:] - bound).max() > min(0.1, 0.4 / -plant.gain)


def leaves_its_upper_bound(law: PI, plant: Fopdt) -> None:
    leaves_its_bound(law, plant, upper=True)


def leaves_its_lower_bound(law: PI, plant: Fopdt) -> None:
    leaves_its_bound(law, plant, upper=False)


def does_not_drift(law: PI, plant: Fopdt, miss: float = 0.5, seed: int = 0) -> None:
    """Under noise of 5 % S is S* on average, and lambda what holds it, in each half of what follows the rise."""
    ticks, rise = 2400, 400
    errors, log_lam, _ = steer(law, plant, ticks, miss=miss, noise=normal(seed, ticks, 0.05))
    assert abs(errors[rise:].mean()) < 0.008  # an integral that gains 0.01 a tick rests off by 0.0125 or more
    early, late = np.split(log_lam[rise:], 2)
    assert early.mean() == pytest.approx(late.mean(), abs=0.2)
    assert late.mean() == pytest.approx(math.log(law.lambda_start) + miss, abs=0.2)


# The law


@FEWER
@given(law=LAWS, plant=PLANTS, miss=MISSES, last_rate=st.sampled_from([1.0, 0.1]))
def test_s_converges_where_the_margins_say_so(law, plant, miss, last_rate):
    assume(tame(law, plant, miss, slowing=1 / last_rate))
    converges(law, plant, miss, last_rate)


@MANY
@given(law=LAWS, plant=PLANTS, miss=MISSES, size=st.floats(0, 0.3), seed=SEEDS)
def test_s_goes_no_further_than_the_dead_time_carries_it_and_comes_back(law, plant, miss, size, seed):
    stays_near(law, plant, miss, size, seed)


@MANY
@given(law=LAWS, plant=PLANTS, upper=st.booleans(), miss=MISSES, idle=st.integers(150, 600))
def test_a_setpoint_out_of_reach_does_not_wind_it_up(law, plant, upper, miss, idle):
    leaves_its_bound(law, plant, upper, miss, idle)


@FEWER
@given(law=LAWS, plant=PLANTS, miss=MISSES, seed=SEEDS)
def test_noise_does_not_walk_lambda_off_its_equilibrium(law, plant, miss, seed):
    assume(tame(law, plant, miss))
    does_not_drift(law, plant, miss, seed)


@MANY
@given(law=LAWS, plant=PLANTS, seed=SEEDS, at=st.integers(1, 80), length=st.integers(1, 15))
def test_nothing_moves_while_nothing_is_measured(law, plant, seed, at, length):
    noise = normal(seed, 100, 0.05)
    noise[at : at + length] = math.nan
    _, log_lam, outputs = steer(law, plant, 100, noise=noise)
    gap = slice(at, at + length)
    assert all(output.held for output in outputs[gap])
    assert log_lam[gap] == pytest.approx(np.full(len(outputs[gap]), log_lam[at - 1]), abs=1e-12)
    assert np.isfinite(log_lam).all()


# What the claims are worth


class Flipped(PI):
    """S above the setpoint lowers lambda."""

    def __post_init__(self):
        object.__setattr__(self, "stiffness", -self.stiffness)


class Drifting(PI):
    """The integral gains 0.01 a tick by itself."""

    def update(self, state, measurement):
        state, output = super().update(state, measurement)
        return replace(state, integral=state.integral + 0.01), output


class WindsUpAbove(PI):
    """The integral does not know of the upper bound."""

    bound, boundless = "lambda_max", 1e300

    def update(self, state, measurement):
        state, output = PI.update(PI(**{**vars(self), self.bound: self.boundless}), state, measurement)
        return state, replace(output, lam=clip(output.lam, self.lambda_min, self.lambda_max))


class WindsUpBelow(WindsUpAbove):
    """The integral does not know of the lower bound."""

    bound, boundless = "lambda_min", 1e-300


ORDINARY = [Fopdt(-1.2, 2.0, 0.3), Fopdt(-0.8, 10.0, 0.5), Fopdt(-1.0, 60.0, 1.0)]


@pytest.mark.parametrize("setpoint", [0.002, 0.2])
@pytest.mark.parametrize("plant", ORDINARY, ids=lambda plant: f"tau {plant.tau:g}")
def test_the_same_law_serves_any_setpoint(plant, setpoint):
    converges(replace(SCHEDULED, setpoint=setpoint), plant)


MUTANTS = [
    (Flipped(**vars(SCHEDULED)), converges),
    (Flipped(**vars(SCHEDULED)), stays_near),
    (replace(SCHEDULED, stiffness=20 * SCHEDULED.stiffness, kp_limit=20 * SCHEDULED.kp_limit), converges),
    (replace(SCHEDULED, ki=0.0), converges),
    (WindsUpAbove(**vars(SCHEDULED)), leaves_its_upper_bound),
    (WindsUpBelow(**vars(SCHEDULED)), leaves_its_lower_bound),
    (Drifting(**vars(SCHEDULED)), does_not_drift),
]


@pytest.mark.parametrize("plant", ORDINARY, ids=lambda plant: f"tau {plant.tau:g}")
@pytest.mark.parametrize(("mutant", "claim"), MUTANTS)
def test_a_law_that_is_broken_breaks_its_claim(mutant, claim, plant):
    claim(SCHEDULED, plant)
    with pytest.raises(AssertionError):
        claim(mutant, plant)
