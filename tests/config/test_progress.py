"""A line now and then says how far a phase is."""

from granite_scu.config.progress import Pulse


def test_a_line_is_due_once_in_a_while_and_says_what_is_left():
    now = [0.0]
    pulse = Pulse(100, done=20, every=60, clock=lambda: now[0])
    assert pulse.left(20) == "" and not pulse.is_due()
    now[0] = 61.0
    assert pulse.is_due()
    pulse.said()
    assert not pulse.is_due()
    now[0] = 600.0
    assert pulse.is_due() and pulse.left(40) == "about 30 minutes left"  # twenty of them took ten
    assert pulse.left(100) == ""
