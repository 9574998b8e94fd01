"""What to do after a run: whether its adapter is worth using, which one it is, and what to try next."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from granite_scu.viz.run_folder import Run
from granite_scu.viz.settling import unsettled
from granite_scu.viz.words import is_number, part, signed

_EARLY = 0.8
"""Share of the steps before which the best validation counts as early."""
_LATE = 0.75
"""Share of the steps after which a validation that still falls asks for more of them."""
_MATTERS = 0.005
"""Share of the bits, of a difference between two validations that is worth another run."""


@dataclass(frozen=True)
class Advice:
    """Something to do.

    Attributes:
        title: what, in a few words.
        text: why, in sentences.
        command: that does it; empty where none does.
    """

    title: str
    text: str
    command: str = ""


def what_now(run: Run) -> list[Advice]:
    """What to do now, the most important first."""
    if not run.finished:
        return [_go_on(run)]
    return [*_use(run), *_try(run)]


def place(run: Run) -> str:
    """The run folder as a command names it: as the user named it, or its name where that was a path from the root."""
    asked = part(run.settings, "run").get("output_dir")
    if not isinstance(asked, str) or asked.startswith("~") or Path(asked).name != run.name:
        return run.name
    return run.name if PurePosixPath(asked).is_absolute() or PureWindowsPath(asked).is_absolute() else asked


def where(run: Run) -> str:
    """In which folder the commands are to be given, a sentence."""
    there = "Give the commands in the folder where the run was started"
    if part(run.settings, "run").get("output_dir") == place(run):
        return f"{there}."
    return f"{there}, with the path of the run folder in place of {place(run)}."


def _go_on(run: Run) -> Advice:
    """A run that has not come to its end."""
    command = f"granite-scu train --output-dir {_quoted(run)} --resume-from-checkpoint last"
    if run.stopped:
        signal, step = run.stopped.get("signal"), run.stopped.get("step")
        who = {"SIGINT": " (Ctrl-C)"}.get(str(signal), "")
        text = f"The run was stopped by {signal}{who} after step {_count(step)}. That step is saved."
        return Advice("Continue the run", text, command)
    if run.has_checkpoint:
        text = "It was cut off, or is still under way. If it no longer runs, its last checkpoint is the place to start."
        return Advice("Continue the run", text, command)
    text = "It was cut off before its first checkpoint, or is still under way. If it no longer runs, start another."
    return Advice("Start the run again", text, _again(run, ""))


def _use(run: Run) -> Iterator[Advice]:
    """Is the adapter better, and which one it is."""
    base, adapter = (run.metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt"))
    if not (is_number(base) and is_number(adapter)):
        return
    change = f"{adapter:.3f} against {base:.3f} bits per token on held-out documents, {signed(adapter / base - 1)}"
    if adapter >= base:
        text = f"It is no better than the base model: {change}. Use the base model."
        yield Advice("Do not use this adapter", text)
        return
    read = f'granite-scu generate {_quoted(run)} --prompt "..."'
    low, high = _interval(run)
    if is_number(low) and is_number(high) and high >= 0:
        text = (
            f"It has {change}. But the interval of the difference has 0 in it: {low:+.3f} to {high:+.3f} bits per "
            "token. More test documents may decide. Until then, read what both write."
        )
        yield Advice("The adapter is not shown to be better", text, read)
        return
    if run.evaluation:
        yield Advice("Use the adapter", f"It is better than the base model: {change}. {_which(run)}", read)
        return
    yield Advice("Try the adapter", f"It scores better than the base model: {change}. {_which(run)}", read)
    text = "One score has no interval. The test documents, scored one by one, have."
    yield Advice("Make sure of the difference", text, f"granite-scu eval {_quoted(run)}")


def _interval(run: Run) -> tuple[Any, Any]:
    """Of adapter less base, bits per token, from the test documents scored one by one; None where there are none."""
    pairs = run.evaluation.get("pairs")
    pair = pairs[0] if isinstance(pairs, list) and pairs and isinstance(pairs[0], dict) else {}
    return pair.get("low"), pair.get("high")


def _which(run: Run) -> str:
    """Where the adapter is that one should take."""
    best, end = run.metrics.get("best_val_step"), run.metrics.get("steps")
    if not (is_number(best) and is_number(end)) or best == end:
        return f"It lies in {place(run)}."
    return f"It lies in {place(run)}, and is that of step {best:,}. That of the last step, in final/, validated worse."


def _try(run: Run) -> Iterator[Advice]:
    """What another run may do better."""
    base, adapter = (run.metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt"))
    rate = part(run.settings, "optimizer").get("learning_rate")
    if is_number(base) and is_number(adapter) and adapter >= base and is_number(rate):
        text = "It learned nothing that holds for other documents. A lower learning rate, or more text, may."
        yield Advice("Try a lower learning rate", text, _again(run, f"--learning-rate {min(rate / 3, 1e-3):.1g}"))
    else:
        yield from _length(run)
    if found := unsettled(run):
        command = _again(run, found.flags) if found.flags else ""
        yield Advice("Let S settle", f"The warning below says why it did not. {found.remedy}", command)


def _length(run: Run) -> Iterator[Advice]:
    """Whether more steps, or fewer, may be better."""
    values = [(step, bpt) for step, bpt in run.validations if is_number(bpt)]
    end = run.metrics.get("steps")
    if not values or not isinstance(end, int):
        return
    (best, lowest), (last, now) = min(values, key=lambda each: each[1]), values[-1]
    every = max(1, end // 5)
    if len(values) < 2:
        text = "One validation does not tell whether more steps or fewer would be better. Five do."
        yield Advice("Validate more often", text, _again(run, f"--eval-steps {every}"))
    elif best < _EARLY * end and now > (1 + _MATTERS) * lowest:
        yield _shorter(run, best, end)
    else:
        since, before = max((each for each in values if each[0] <= _LATE * end), default=values[0])
        if best == last and now < (1 - _MATTERS) * before:
            text = f"The validation still fell at the end: {signed(now / before - 1)} from step {since:,} to {last:,}."
            yield Advice("Train longer", text, _again(run, _twice(run, end)))


def _shorter(run: Run, best: int, end: int) -> Advice:
    text = f"The validation was best at step {best:,} of {end:,}. What came later fitted the training text alone."
    control = part(run.settings, "control")
    if control.get("controller") == "pi" and control.get("target_s") == "auto":
        return Advice("Train for fewer steps", text, _again(run, f"--max-steps {best}"))
    text += " The default controller keeps the adapter at the size that held-out text asks for."
    return Advice("Try the default controller", text, _again(run, "--controller pi --target-s auto"))


def _twice(run: Run, end: int) -> str:
    epochs = part(run.settings, "data").get("num_epochs")
    return f"--num-epochs {2 * epochs:g}" if is_number(epochs) else f"--max-steps {2 * end}"


def _again(run: Run, flags: str) -> str:
    """The command of another run with these settings, but for the flags."""
    config, new = f"{place(run)}/config.yaml", f"{place(run)}-2"
    # The file has the switches too that are for the first run's folder alone.
    asked = part(run.settings, "run")
    switches = [
        *(["--run.overwrite false"] if asked.get("overwrite") else []),
        *(["--run.resume null"] if asked.get("resume") else []),
    ]
    words = ["granite-scu train", f"--config {shlex.quote(config)}", f"--output-dir {shlex.quote(new)}", *switches]
    return " ".join([*words, flags] if flags else words)


def _quoted(run: Run) -> str:
    return shlex.quote(place(run))


def _count(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else "unknown"
