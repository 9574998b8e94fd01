"""What a run says at its end: what came of it, and the commands to continue with."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from granite_scu.cli.console import print_facts
from granite_scu.config.settings import RunConfig
from granite_scu.control.units import counted, duration, per_cent
from granite_scu.evaluation.bpt.report import shown_answers
from granite_scu.storage.run_folder import ANSWERS, TRAINING_CONFIG, read_if_there
from granite_scu.training.callbacks.samples import MAX_SECONDS
from granite_scu.viz.run_folder import read_validations
from granite_scu.viz.what_now import ended, lower_rate, verdict, which_adapter

REPORT = ("granite-scu report {run}", "open the report")
EVAL = ("granite-scu eval {run}", "is the adapter better? with an interval")
EVAL_OTHER = ("granite-scu eval {run} --data-dir FILE", "is the adapter better on other text? with an interval")
CONTINUE = ('granite-scu generate {run} --prompt "..."', "base model and adapter continue a text, side by side")
TALK = ("granite-scu generate {run} --chat", "talk to base model and adapter")
"""Commands that continue with a finished run, and what each does; the last two of texts and of chats."""

IN_TIME = f"in {duration(MAX_SECONDS)}"
"""What a run waits for each kind of answers."""

SHOWN = 4
"""Held-out questions that are shown with their answers; the report has all."""


def print_summary(summary: dict[str, Any], folder: Path, console: Console, chats: bool = False) -> None:
    """The table at the end of a run, what was learned and lost, and what to do next, of texts or of ``chats``."""
    start = summary.get("start_test_bpt")
    without = summary["control"]["held_ticks"]
    tested, validated = summary["base_test_bpt"] is not None, summary["best_val_bpt"] is not None
    text = "validation text" if summary.get("test_is_validation") else "held-out text"
    facts = {
        "held-out text": None if tested else "none to test on: what the adapter is worth on other text is not known",
        f"{text}, base model": f"{summary['base_test_bpt']:.4f} bits/token" if tested else None,
        f"{text}, adapter at the start": None if start is None else f"{start:.4f} bits/token",
        f"{text}, adapter": _gain(summary["base_test_bpt"], summary["adapter_test_bpt"]) if tested else None,
        "held-out answers": _answers(summary["answers"]) if "answers" in summary else None,
        "validation": f"{summary['best_val_bpt']:.4f} bits/token" if validated else None,
        "best adapter": which_adapter(summary),
        "S at the end": _s(summary) if summary["lambda"] else None,
        "S* reached": None if summary["s_target"] is None else _reachability(summary),
        "lambda at the end": f"{summary['lambda']:.4g}" if summary["lambda"] else None,
        "ticks without a measurement": f"{without}" if without else None,
        "training": _training(summary),
        "ended": ended(summary),
        "folder": str(folder),
    }
    print_facts("done", {name: fact for name, fact in facts.items() if fact is not None}, console)
    records = read_if_there(folder / ANSWERS).get("answers", [])
    for line in shown_answers(records[:SHOWN], ("base", "adapter")):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    validations = read_validations(folder, summary)
    settings = read_if_there(folder / TRAINING_CONFIG)
    found = verdict(summary, lower_rate(settings), validations=validations)
    for line in found.sentences:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if unasked := _unasked(summary, shlex.quote(str(folder))):
        console.print(unasked, highlight=False, markup=False, soft_wrap=True)
    following = (REPORT, TALK if chats or records else CONTINUE, EVAL if tested else EVAL_OTHER)
    commands = [(command.format(run=shlex.quote(str(folder))), meaning) for command, meaning in following]
    width = max(len(command) for command, _ in commands)
    for command, meaning in commands:
        console.print(f"{command:<{width}}  # {meaning}", highlight=False, markup=False, soft_wrap=True)


def _gain(base: float, adapter: float) -> str:
    change = (base - adapter) / base if base else 0.0
    return f"{adapter:.4f} bits/token, {per_cent(abs(change))} {'more' if change < 0 else 'less'} than the base model"


def _answers(found: dict[str, Any]) -> str:
    if not found["n"]:
        return f"none of {found['asked']} {IN_TIME}"
    low, high = map(per_cent, found["interval"])
    in_time = "" if found["n"] == found["asked"] else f"; {found['n']} of {found['asked']} were answered {IN_TIME}"
    return (
        f"{found['right']} of {found['n']} as expected (95 % interval {low} to {high}), by the base model "
        f"{found['base']['right']}{in_time}"
    )


def _unasked(summary: dict[str, Any], run: str) -> str:
    """Which questions had no time, and how to have them answered; empty where all had."""
    kinds = {"held-out": summary.get("answers"), "general": summary.get("elsewhere")}
    short = {
        kind: found
        for kind, found in kinds.items()
        if found and found["n"] < found["asked"] and (kind == "held-out" or found["right_before"] or not found["n"])
    }
    if not short:
        return ""
    counts = " and ".join(f"{found['n']} of {found['asked']} {kind}" for kind, found in short.items())
    most = max(found["asked"] for found in short.values())
    samples = f" --samples {most}" if most > RunConfig.samples else ""
    return (
        f"Only {counts} questions were answered {IN_TIME}, the limit at the end of a run: granite-scu eval "
        f"{run}{samples} asks all of them; on a quieter machine more are answered."
    )


def _s(summary: dict[str, Any]) -> str | None:
    """S, and what it was to be; None where it was not measured, and was to be nothing."""
    smoothed, target = summary["s_ema"], summary["s_target"]
    found = summary.get("s") if smoothed is None else smoothed
    if found is None and target is None:
        return None
    measured = "not measured" if found is None else per_cent(found)
    return measured if target is None else f"{measured}; S* = {per_cent(target)}"


def _reachability(summary: dict[str, Any]) -> str:
    found = summary["reachability"]
    if found is None:
        return "not judged: S* moves during the run"
    band = f"within {per_cent(found['band'])} of S*"
    if found["verdict"] == "reached":
        share = summary["control"]["in_band"]
        afterwards = "" if share is None else f", and at {per_cent(share)} of the ticks since then"
        return f"yes: S was {band} at step {found['reached_at_step']}{afterwards}"
    if found["verdict"] == "not shown":
        return _not_shown(summary["s_ema"], summary["s_target"], band)
    before = "" if found["reached_at_step"] is None else f", no more since step {found['since_step']}"
    return f"no{before}: {found['advice']}"


def _not_shown(s: float | None, target: float, band: str) -> str:
    if s is None:
        return f"no: S was never {band}, and could not be measured at the end"
    never = f"no: S was never {band} = {per_cent(target)}, and ended at {per_cent(s)}"
    return f"{never}; it takes more steps" + (f", or --target-s {0.8 * s:.2g}" if 0 < s < target else "")


def _training(summary: dict[str, Any]) -> str:
    speed = f", {summary['tokens_per_s']:,.0f} tokens/s" if summary["tokens_per_s"] else ""
    on_gpu = summary.get("gpu_memory_total_gb") is not None  # on a CPU it is a share of nothing that anybody knows
    mfu = f", {per_cent(summary['mfu'])} of the card's peak (mfu)" if on_gpu and summary.get("mfu") else ""
    much = f"{counted(summary['steps'], 'step')}, {summary['tokens']:,} tokens"
    return f"{much} in {duration(summary['train_time_s'])}{speed}{mfu}"
