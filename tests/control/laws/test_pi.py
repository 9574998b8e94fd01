import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import LAWS as ALL_LAWS

from granite_scu.control import PI, Measurement, Output

USABLE_S = st.floats(1e-9, 0.999)
ANY_S = st.one_of(USABLE_S, st.sampled_from([0.0, -0.1, math.nan, math.inf, -math.inf]))
LAWS = ALL_LAWS["pi"]


def seen(s: float, lr_sum: float = 0.0) -> Measurement:
    """A measurement of that S, with a loss of 2 bits; of an unusable S, with whatever ParamBPT."""
    return Measurement(s=s, data_bpt=2.0, param_bpt=2.0 * s / (1 - s) if 0 < s < 1 else 0.1, lr_sum=lr_sum)


def at(error: float, setpoint: float = 0.1) -> float:
    """The S whose odds are e^error times those of the setpoint."""
    odds = setpoint / (1 - setpoint) * math.exp(error)
    return odds / (1 + odds)


def run(law: PI, values: list[float], state=None):
    """The states after, and the outputs of, one tick of five steps for each value of S."""
    state = law.init() if state is None else state
    states, outputs = [], []
    for tick, s in enumerate(values, 1 + round(state.lr_sum / 5)):
        state, output = law.update(state, seen(s, lr_sum=5.0 * tick))
        states.append(state)
        outputs.append(output)
    return states, outputs


def log_strengths(outputs: list[Output]) -> list[float]:
    return [math.log(output.lam) for output in outputs]


def test_the_law_agrees_with_hand_arithmetic():
    law = PI(setpoint=0.1, kp=1.0, ki=0.5, ema_alpha=1.0, error_limit=2.0, lambda_init=2.0)
    errors = [0.5, 1.0, 0.0, -1.0]
    states, outputs = run(law, [at(error) for error in errors])

    start = math.log(2)  # the feed-forward; to it come the integral and, at first, the bias -0.5, a quarter of it, ...
    assert [output.error for output in outputs] == pytest.approx([math.log(at(error) / 0.1) for error in errors])
    assert [output.p_term for output in outputs] == pytest.approx([0.5, 1.0, 0.0, -1.0])
    assert [state.integral for state in states] == pytest.approx([0.25, 0.75, 0.75, 0.25])
    bias = [-0.5, -0.125, -0.03125, -0.0078125]
    assert [output.i_term - start for output in outputs] == pytest.approx(
        [0.0 + bias[0], 0.25 + bias[1], 0.75 + bias[2], 0.75 + bias[3]]
    )
    assert log_strengths(outputs) == pytest.approx([start, start + 1.125, start + 0.71875, start - 0.2578125])


def test_gains_that_are_not_given_follow_the_time_the_adapter_needs():
    """Worked out: ParamBPT = 2/9 and S* = 0.1 of 2 bits is 2/9 too, so g = (2/9)/25, and tau = 5/5 = 1 tick."""
    law = PI(setpoint=0.1, error_limit=1.0, lambda_init=1.0)
    states, (first, second) = run(law, [0.1, at(0.4)])
    assert first.p_term == pytest.approx(0.0)
    assert second.p_term == pytest.approx(law.stiffness * 1 * 0.4)
    assert states[1].integral == pytest.approx(law.stiffness * 0.4)

    # A hundredfold ParamBPT away, tau is ten times as long: so is Kp, and Ki = Kp / integral_time.
    states, (_, second) = run(replace(law, error_limit=10.0), [0.1 / (0.1 + 0.9 * 100), at(0.4)])
    assert second.p_term == pytest.approx(10 * law.stiffness * 0.4)
    assert states[1].integral - states[0].integral == pytest.approx(second.p_term / law.integral_time)


@pytest.mark.parametrize("ticks", [1e-6, 0.1, 1.0])
def test_a_kp_that_is_given_alone_meets_no_lag_below_a_tick(ticks):
    law = PI(setpoint=0.1, kp=3.0, error_limit=1.0, lambda_init=1.0)
    state, _ = law.update(law.init(), seen(0.1, lr_sum=5.0))
    after, _ = law.update(state, seen(at(0.4), lr_sum=5.0 + 5.0 / ticks))
    assert after.integral - state.integral == pytest.approx(3.0 * 0.4)


def test_the_gains_grow_as_the_learning_rate_decays_up_to_their_limits():
    law = PI(setpoint=0.1)
    state, _ = law.update(law.init(), seen(0.1, lr_sum=5.0))
    above = at(0.1)
    slower = [law.update(state, seen(above, lr_sum=5.0 + moved))[1].p_term for moved in (5.0, 2.5, 0.5, 1e-6)]
    assert slower == pytest.approx([0.1 * kp for kp in (0.5, 1.0, 5.0, law.kp_limit)])


def test_only_the_noise_of_the_data_is_filtered():
    """ParamBPT halves: seen at once. DataBPT halves: seen by the share of the filter."""
    law = PI(setpoint=0.1, kp=1.0, ki=0.0, error_limit=10.0, data_alpha=0.25)
    even = Measurement(s=0.01, data_bpt=2.0, param_bpt=0.02, lr_sum=5.0)
    state, before = law.update(law.init(), even)
    _, cheaper = law.update(state, replace(even, param_bpt=0.01))
    _, better = law.update(state, replace(even, data_bpt=1.0))
    assert cheaper.p_term - before.p_term == pytest.approx(-math.log(2), rel=1e-9)
    # The filter's weight is 0.25 / (0.25 + 0.75 * 0.25) of the second value, bias-corrected.
    assert better.p_term - before.p_term == pytest.approx(math.log(2) * 0.25 / 0.4375)


def test_a_change_of_the_setpoint_moves_lambda_at_once():
    law = PI(setpoint=0.02, kp=0.0, ki=0.0)
    states, outputs = run(law, [0.02, 0.02])
    raised = replace(law, setpoint=0.5)
    _, after = raised.update(states[-1], seen(0.02, lr_sum=15.0))
    assert after.lam / outputs[-1].lam == pytest.approx((1.0 / (0.02 / 0.98)) ** (-2 / 3))


@given(LAWS, USABLE_S)
def test_the_first_valid_tick_leaves_lambda_where_it_was(law, s):
    _, (output,) = run(law, [s])
    assert output.lam == pytest.approx(law.lambda_start)


@given(LAWS, st.lists(ANY_S, max_size=60))
def test_the_integral_stays_near_the_bounds(law, values):
    states, _ = run(law, values)
    kp = law.kp_limit if law.kp is None else law.kp
    scheduled = max(law.kp_limit / law.integral_time, law.stiffness) if law.kp is None else law.kp
    ki = scheduled if law.ki is None else law.ki
    margin = (2 * kp + ki) * law.error_limit + 1e-9  # twice: the bias of the bumpless start is a p-term too
    start = math.log(law.lambda_start)
    for state in states:
        reached = start + state.integral
        assert math.log(law.lambda_min) - margin <= reached <= math.log(law.lambda_max) + margin


def test_at_a_bound_the_integral_still_moves_inwards():
    law = PI(setpoint=0.01, kp=0.0, ki=0.3, lambda_init=0.5, lambda_max=2.0)
    states, outputs = run(law, [0.02] * 50 + [0.009])
    assert outputs[-1].saturated
    assert states[-1].integral < states[-2].integral == states[-3].integral


def test_the_deadband_freezes_the_integral_but_not_the_proportional_term():
    law = PI(setpoint=0.1, kp=1.0, ki=0.3, ema_alpha=1.0, deadband=0.05)
    states, outputs = run(law, [at(0.2), at(0.04), at(-0.04)])
    assert [output.in_deadband for output in outputs] == [False, True, True]
    assert states[0].integral == states[1].integral == states[2].integral
    assert [output.p_term for output in outputs] == pytest.approx([0.2, 0.04, -0.04])
    assert outputs[1].lam > outputs[2].lam


@pytest.mark.parametrize(
    "bits", [{"data_bpt": 2.2e-313}, {"param_bpt": 5e-324}, {"data_bpt": 1e300}, {"param_bpt": 0.0}]
)
def test_bits_that_no_run_has_hold_everything(bits):
    """A quotient of these is 0 or infinite, though S has a logarithm."""
    law = PI(setpoint=0.02)
    states, outputs = run(law, [0.01, 0.03])
    assert law.update(law.init(), replace(seen(0.01), **bits)) == (law.init(), replace(law.init().output, held=True))
    assert law.update(states[-1], replace(seen(0.01), **bits)) == (states[-1], replace(outputs[-1], held=True))


def test_the_rise_teaches_the_integral_nothing_but_a_standstill_below_does():
    law = PI(setpoint=0.1, lambda_init=0.3)
    rising = [0.1 * (tick / 40) ** 2 for tick in range(1, 20)]  # ParamBPT grows as the square of lr_sum
    states, outputs = run(law, rising)
    assert outputs[-1].error < -law.error_limit
    assert states[-1].integral == 0.0
    states, _ = run(law, [0.02] * 20, states[-1])
    assert states[-1].integral < -0.5


def test_where_one_tick_carries_s_to_its_setpoint_the_first_teaches_nothing():
    law = PI(setpoint=0.1, lambda_init=0.3)
    below, above = at(-0.4), at(0.4)
    assert [run(law, [first])[0][-1].integral for first in (below, above)] == [0.0, pytest.approx(0.4 * law.stiffness)]
    assert run(law, [below, below])[0][-1].integral < 0


def test_while_the_learning_rate_warms_up_an_s_below_its_setpoint_teaches_the_integral_nothing():
    law = PI(setpoint=0.1)

    def integral_after(s, travels):
        state, _ = law.update(law.init(), seen(0.06, lr_sum=travels[0]))
        for lr_sum in travels[1:]:
            state, _ = law.update(state, seen(s, lr_sum=lr_sum))
        return state.integral

    warming, constant, falling = (1.0, 4.0, 9.0, 16.0), (5.0, 10.0, 15.0, 20.0), (5.0, 9.9, 14.7, 19.4)
    assert integral_after(0.06, warming) == 0.0
    assert integral_after(0.06, constant) < 0
    assert integral_after(0.06, falling) < 0
    assert integral_after(0.06, (*warming, 23.0, 30.0)) < 0  # when it is over
    assert integral_after(0.2, warming) > 0  # an S above it rises all the more
    long = tuple(0.5 * tick**2 for tick in range(1, 23))  # a long one counts for 20 ticks
    assert integral_after(0.06, long[:20]) == 0.0
    assert integral_after(0.06, long) < 0


@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_bits_and_nats_or_tokens_and_bytes_make_no_difference(seed, factor):
    law = PI(setpoint=0.1, lambda_min=0.1, lambda_max=10.0)
    # From a generator, not from hypothesis: it would find values on a threshold, where rounding decides.
    draw = random.Random(seed)
    seen_so_far = [seen(0.1 * math.exp(draw.gauss(0.0, 0.8)), lr_sum=5.0 * tick) for tick in range(1, 50)]
    state, other = law.init(), law.init()
    for m in seen_so_far:
        state, output = law.update(state, m)
        other, scaled = law.update(other, replace(m, data_bpt=factor * m.data_bpt, param_bpt=factor * m.param_bpt))
        assert scaled.lam == pytest.approx(output.lam, rel=1e-9)
