"""What a run says at its end."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from granite_scu.cli.summary import print_summary
from granite_scu.control.diagnostics.metrics import summarise
from granite_scu.control.diagnostics.reachability import Observation, Reachability


def summary_of(**more) -> dict:
    bits = ("base_test_bpt", "adapter_test_bpt", "final_val_bpt", "best_val_bpt")
    return {
        **dict.fromkeys((*bits, "s_ema", "s_target", "lambda", "train_time_s", "tokens_per_s"), 0.5),
        **dict.fromkeys(("best_val_step", "steps", "tokens"), 100),
        "control": {"held_ticks": 0},
        "stopped": {"reason": "max_steps", "step": 100},
        "reachability": None,
        **more,
    }


def printed(summary: dict, folder: Path, **more) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, folder, console, **more)
    return console.file.getvalue()


def test_of_a_run_that_held_drift_it_says_how_far_the_model_moved(tmp_path):
    drift = {"budget": 0.02, "share": 0.018, "tokens": 512, "within": True, "lambda": 0.84}
    shown = printed(summary_of(drift=drift, s=0.031, s_ema=None, s_target=None), tmp_path)
    shown = shown.replace("\N{NO-BREAK SPACE}", " ")
    assert "drifted by 1.8 % (at most 2 %), on 512 tokens of general text that the loop did not see." in shown
    assert re.search(r"S at the end +│ 3.1 %", shown), "measured at the last tick"
    assert "S at the end" not in printed(summary_of(drift=drift, s=None, s_ema=None, s_target=None), tmp_path)


@pytest.mark.parametrize("held", [0, 3])
def test_the_summary_says_how_many_ticks_were_held(held, tmp_path):
    assert ("ticks without a measurement │ 3" in printed(summary_of(control={"held_ticks": held}), tmp_path)) == (
        held == 3
    )


@pytest.mark.parametrize(
    ("sights", "s_ema", "words"),
    [
        ([(10, 0.2), (20, 0.49), (30, 0.6)], 0.6, "yes: S was within 10 % of S* at step 20, and at 50 % of the ticks"),
        ([(10, 0.1), (20, 0.2)], 0.2, "no: S was never within 10 % of S* = 50 %, and ended at 20 %; it takes more"),
        ([], None, "no: S was never within 10 % of S*, and could not be measured at the end"),
        (None, 0.2, "not judged"),
    ],
)
def test_the_summary_claims_a_setpoint_only_where_s_came_to_it(sights, s_ema, words, tmp_path):
    law = Reachability(0.5)
    state = law.init()
    for step, s in sights or []:
        state = law.update(state, Observation(step, s, 1.0, s / (1 - s), False, False, 0.3, 1e-3 * step, 1.0))
    found = None if sights is None else law.summary(state, 1e-4, 1e6)
    ticks = [
        {"step": step, "s_ema": s, "s_target": 0.5, "lambda": 1.0, "saturated": False, "held": False}
        for step, s in sights or []
    ]
    more = {"reachability": found, "control": summarise(ticks)}
    assert words in printed(summary_of(s_ema=s_ema, s_target=0.5, **more), tmp_path)


def test_the_summary_says_what_was_gained_and_how_to_continue(tmp_path):
    folder = tmp_path / "my run"
    shown = printed(summary_of(base_test_bpt=5.0, adapter_test_bpt=4.5, mfu=0.3, peak_tflops=1.0), folder)
    assert "4.5000 bits/token, 10 % less than the base model" in shown
    assert "after its last step, 100" in shown and "max_steps" not in shown
    assert "mfu" not in shown  # of a CPU
    assert f"granite-scu report '{folder}'  " in shown
    assert f"granite-scu generate '{folder}' --prompt \"...\"  " in shown
    assert f"granite-scu eval '{folder}'  " in shown
    assert "30 % of the card's peak (mfu)" in printed(summary_of(mfu=0.3, gpu_memory_total_gb=24.0), folder)


def measured(right: int, lost: int, damaged: bool) -> dict:
    general = {
        "n": 30,
        "asked": 30,
        "right_before": 25,
        "right_after": 25 - lost,
        "became_wrong": lost,
        "became_right": 0,
    }
    general |= {"lost": [f"Question {number}?" for number in range(lost)], "bits_before": 1.0, "bits_after": 1.5}
    answers = {"n": 30, "asked": 30, "right": right, "interval": [0.6, 0.9], "base": {"right": 1}}
    return {"answers": answers, "elsewhere": general | {"damaged": damaged}}


def test_answers_stand_in_the_table_with_their_interval(tmp_path):
    shown = printed(summary_of(**measured(24, 5, damaged=True)), tmp_path)
    assert "Only" not in shown
    assert "24 of 30 as expected (95 % interval 60 % to 90 %), by the base model 1" in shown
    assert "Elsewhere 5 of 30 general answers became wrong" in shown


def test_after_chats_four_questions_are_shown_with_their_answers_and_what_is_next_is_to_talk(tmp_path):
    records = [{"question": f"How many? {n}", "expected": f"{'much ' * 30}It is {n}.", "base": "Cats. " * 99,
                "adapter": f"{'much ' * 30}I say {n}."}
               for n in range(9)]  # fmt: skip
    (tmp_path / "answers.json").write_text(json.dumps({"answers": records}))
    figures = {"right": 0}
    answers = {"n": 9, "asked": 40, "right": 9, "interval": [0.7, 1.0], "base": figures, "adapter": figures}
    shown = printed(summary_of(answers=answers), tmp_path)
    assert [f"I say {n}.\n" in shown for n in range(9)] == [True] * 4 + [False] * 5
    assert "Only 9 of 40 held-out questions" in shown and f"granite-scu eval {tmp_path} --samples 40 asks all" in shown
    assert "It is 3.\n" in shown and "base: Cats. Cats." in shown and "Cats. ...\n" in shown
    assert "--chat" in shown and "--chat" in printed(summary_of(), tmp_path / "unasked", chats=True)
    assert "--chat" not in printed(summary_of(), tmp_path / "texts")
