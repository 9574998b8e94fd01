from dataclasses import replace

import pytest
from invariants import UNUSABLE, run, seen

from granite_scu.control import Measurement
from research.laws.kl import KL


def at(s: float, kl: float) -> Measurement:
    return seen(s, sensed={"kl_bpt": kl})


def lams(law: KL, *kls: float) -> list[float]:
    return [output.lam for output in run(law, [at(0.02, kl) for kl in kls])[1]]


def test_a_course_worked_out_by_hand():
    """10 % over the target, on it, half of it (clipped to 20 % under), and far over (clipped to 20 % over)."""
    law = KL(target_kl=0.2, kp=0.5, lambda_init=1.0)
    assert lams(law, 0.22, 0.2, 0.1, 100.0) == pytest.approx([1.05, 1.05, 1.05 * 0.9, 1.05 * 0.9 * 1.1])


def test_it_has_no_setpoint_of_s():
    assert KL().setpoint is None
    _, (output,) = run(KL(), [at(0.03, 0.1)])
    assert output.smoothed == pytest.approx(0.03) and output.error is None


@pytest.mark.parametrize("bad", UNUSABLE)
def test_a_kl_that_cannot_be_used_holds(bad):
    state, (before,) = run(KL(), [at(0.02, 0.5)])
    held_state, (held,) = run(KL(), [at(0.03, bad)], state)
    assert held_state == state
    assert held == replace(before, held=True)


def test_an_s_of_zero_is_a_measurement():
    """Before anything is learned there is a KL, and it is below its target."""
    _, (output,) = run(KL(target_kl=0.1, lambda_init=1.0), [at(0.0, 0.0)])
    assert not output.held and output.smoothed is None
    assert output.lam == pytest.approx(0.8)


def test_it_rests_on_a_bound_and_leaves_it_at_the_next_tick():
    law = KL(lambda_max=2.0)
    _, outputs = run(law, [at(0.02, 9.0)] * 100 + [at(0.02, 0.0)])
    assert outputs[-2].saturated and outputs[-2].lam == 2.0
    assert not outputs[-1].saturated and outputs[-1].lam == pytest.approx(1.6)
