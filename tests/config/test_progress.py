"""A line now and then says how far a phase is."""

import io
import logging

from rich.console import Console

from granite_scu.config.progress import Heartbeat, advancing


def test_without_a_terminal_a_line_says_how_far_a_phase_is(monkeypatch, caplog):
    monkeypatch.setattr(Heartbeat, "is_due", lambda self: True)
    with caplog.at_level(logging.INFO), advancing("counting", 4, Console(file=io.StringIO())) as advance:
        advance(1)
        advance(2)
    assert [message.partition("  ")[0] for message in caplog.messages] == ["counting: 25 %", "counting: 75 %"]


def test_a_line_is_due_once_in_a_while_and_says_what_is_left():
    now = [0.0]
    heartbeat = Heartbeat(100, done=20, every=60, clock=lambda: now[0])
    assert heartbeat.left(20) == "" and not heartbeat.is_due()
    now[0] = 61.0
    assert heartbeat.is_due()
    heartbeat.beat()
    assert not heartbeat.is_due()
    now[0] = 600.0
    assert heartbeat.is_due() and heartbeat.left(40) == "about 30 minutes left"  # twenty of them took ten
    assert heartbeat.left(100) == ""


def test_a_slow_first_step_does_not_count_for_the_time_that_is_left():
    now = [0.0]
    heartbeat = Heartbeat(30, every=60, clock=lambda: now[0])
    now[0] = 110.0  # layers were compiled
    heartbeat.start_pace(1)
    assert heartbeat.left(1) == ""
    now[0] = 120.0
    assert heartbeat.left(11) == "about 19 seconds left"  # ten of them took ten


def test_what_happens_at_another_pace_is_counted_apart():
    now = [0.0]
    heartbeat = Heartbeat(30, every=60, clock=lambda: now[0])
    now[0] = 30.0
    heartbeat.set_aside(20.0)  # a validation: ten steps took ten seconds
    assert heartbeat.left(10) == "about 20 seconds left"
    assert heartbeat.left(10, besides=60.0) == "about 80 seconds left"
