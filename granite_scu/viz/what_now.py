"""What came of a run and what to do after it: is its adapter worth using, which one is it, and what to try next."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from granite_scu.config.settings import ADVISED_DRIFT
from granite_scu.viz.run_folder import Run
from granite_scu.viz.settling import length_of, unsettled
from granite_scu.viz.words import is_number, percent, quantity, section, short, shown, signed

_EARLY = 0.8
"""Share of the steps before which the best validation counts as early."""
_LATE = 0.75
"""Share of the steps after which a validation that still falls asks for more of them."""
_PLATEAU = 0.5
"""Share of the steps before which a validation that falls no further says that fewer of them do."""
_SAME = 0.005
"""Bits per token by which such a validation may lie above the lowest."""
_MATTERS = 0.005
"""Share of the bits, of a difference between two validations that is worth another run."""
_CHANCE = 2 * 1.96**2
"""Nats of a whole text below which two models may differ by chance. The logarithm of the ratio of their likelihoods has
about twice its mean for a variance (KL is half the variance where both are close), so that a difference d is z standard
errors where d = z sqrt(2 d). Where documents differ much in what they gain, chance reaches further."""
_ENDED = {
    "max_time": ", by --max-time",
    "early_stopping": ", by --early-stopping: validation no longer improved",
    "equilibrium": ", by --stop-at-equilibrium: S stays at S* and the loss no longer falls",
}
"""What ended a run before its last step, by the reason in ``scu_metrics.json``."""
_MAX_NAMED = 3
"""Lost answers that are named."""
_HIGHEST = 1e-3
"""Learning rate above which no higher one is suggested."""
_MUCH = 0.1
"""Bits per token that general answers may cost more before it is worth a word."""
_GUIDE = "guide: Mix in general data"
_FAR = 0.1
"""Share of drift where the base answers general questions, without a budget, that is worth a word: of SmolLM2 on chats
a run that lost no more answers than it won was at 0.09, one that lost 11 of 30 at 1.3."""
_SCALED = 0.9
"""What a run keeps of what it learned, to be within its budget of drift, below which a lower rate is advised: SmolLM2
learned more at a third of the rate in each of four such runs (research/evidence/real/findings.md)."""
_HALF = 0.5
"""Share of right answers that the whole interval is above, of a run that learned its data."""


@dataclass(frozen=True)
class Verdict:
    """What came of a run.

    Attributes:
        learned: of its own data, a sentence.
        use: what not to use the adapter for, without its full stop; empty where any use is fine.
        elsewhere: what became of general answers, a sentence without its full stop; empty where nothing was asked.
        remedy: against what was lost, to follow a colon; empty where nothing is shown to be lost.
        drift: how far it moved on general text, a sentence; empty where that was not measured.
        state: "good", "unclear" (not shown to have learned, or not known), "useless" (worse than its base on its
            own data) or "damaged" (it lost more elsewhere than chance explains).
    """

    learned: str
    use: str
    elsewhere: str
    remedy: str
    drift: str
    state: str

    def __str__(self) -> str:
        return " ".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """All of it."""
        use = f"{self.use}." if self.use else ""
        return [sentence for sentence in (self.learned, self.lost, self.drift, use) if sentence]

    @property
    def lost(self) -> str:
        """What became of general answers, and what to do against it."""
        return f"{self.elsewhere}{f': {self.remedy}' if self.remedy else ''}." if self.elsewhere else ""


def verdict(
    metrics: Mapping[str, Any],
    lower: float | None = None,
    interval: tuple[float, float] | None = None,
    validations: Sequence[tuple[int, float]] = (),
) -> Verdict:
    """What came of a run, for its summary, its report and its model card.

    Args:
        metrics: ``scu_metrics.json``.
        lower: the learning rate to try where much was lost, see ``lower_rate``; None where it was not too high.
        interval: of adapter less base, bits per token, where ``granite-scu eval`` has found one.
        validations: (optimizer step, bits per token), in the order of the run.
    """
    answers, general = (section(metrics, name) for name in ("answers", "elsewhere"))
    state, learned = _of_answers(answers, metrics) if _counted(answers) else _of_bits(metrics, interval)
    elsewhere = _elsewhere(general) if general.get("asked") or general.get("n") else ""
    damaged = bool(general.get("damaged"))
    drift = drifted(section(metrics, "drift"), section(general, "drift"), None if damaged else ADVISED_DRIFT)
    if not damaged or state == "useless":
        use = "Do not use this adapter" if state == "useless" else ""
        return Verdict(learned, use, elsewhere, "", drift, state)
    use = "Do not use this adapter for anything but your data"
    early, end = _plateau(validations, metrics.get("steps")), metrics.get("steps")
    remedies = [
        _held_by(metrics),
        f"mix in general chats ({_GUIDE})",
        *([f"train for fewer epochs (validation fell no further after step {early:,} of {end:,})"] if early else []),
        *([f"lower the rate to {short(lower)}"] if lower else []),
    ]
    return Verdict(learned, use, elsewhere, f"{', '.join(remedies[:-1])}, or {remedies[-1]}", drift, "damaged")


def lower_rate(settings: Mapping[str, Any]) -> float | None:
    """Half the learning rate, or the rule's where that is more; None where the rate is not above the rule's.

    From there a lower one costs own answers and keeps no more of the general ones.

    Args:
        settings: ``training_config.json``.
    """
    rate, rule = section(settings, "optimizer").get("learning_rate"), settings.get("rate_by_width")
    return max(rate / 2, rule) if is_number(rate) and is_number(rule) and rate > rule else None


def _held_by(metrics: Mapping[str, Any]) -> str:
    """What the budget of drift has to do with a loss elsewhere."""
    flag = _budget_flag(metrics)
    return flag.replace("--max-drift", "lower --max-drift to") if is_number(_given_budget(metrics)) else f"give {flag}"


def _given_budget(metrics: Mapping[str, Any]) -> Any:
    return section(metrics, "drift").get("budget")


def _budget_flag(metrics: Mapping[str, Any]) -> str:
    """The budget to try: half of what was given."""
    budget = _given_budget(metrics)
    return f"--max-drift {f'{100 * budget / 2:.3g}%' if is_number(budget) else ADVISED_DRIFT}"


def drifted(found: Mapping[str, Any], general: Mapping[str, Any], advised: str | None = None) -> str:
    """How far a model has drifted, a sentence; empty where that was not measured.

    Args:
        found: ``drift`` of ``scu_metrics.json``.
        general: ``drift`` of its ``elsewhere``, which is told beside a budget; may be empty.
        advised: the budget to name to a run that had none; None names none.
    """
    share, budget, tokens = (found.get(name) for name in ("share", "budget", "tokens"))
    if not is_number(share):
        return ""
    words = f"Elsewhere the model has drifted by {percent(share)}"
    if not is_number(budget):
        more = f": --max-drift {advised} would hold it back" if advised and share > _FAR else ""
        return f"{words} ({quantity(tokens)} tokens of the base model's answers to general questions){more}."
    asked = f" (at most {percent(budget)})" if share <= budget else f", more than the {percent(budget)} asked for"
    if found.get("within") and share > budget:
        asked = f" (budget {percent(budget)}, exceeded by less than a tenth)"
    where = f", on {quantity(tokens)} tokens of general text that the loop did not see"
    if is_number(general.get("share")):
        answers = f"{quantity(general.get('tokens'))} tokens of the base model's answers to general questions"
        where += f", and by {percent(general['share'])} on {answers}"
    resting = found.get("bound") == "lower" and is_number(found.get("lambda"))
    low = f"; the budget bound nothing: λ rested at {found['lambda']:g} in the second half" if resting else ""
    scale = found.get("scale")
    high = ""
    if is_number(scale) and scale < _SCALED:
        high = f"; for that it was scaled by {scale:.2f}: a third of the learning rate may learn more"
    return f"{words}{asked}{where}{low}{high}."


def ended(metrics: Mapping[str, Any]) -> str:
    """How a run ended, to follow that word; empty where its files do not say."""
    reason, step = (section(metrics, "stopped").get(name) for name in ("reason", "step"))
    if not reason:
        return ""
    if reason == "max_steps":
        return f"after its last step, {_count(step)}"
    return f"at step {_count(step)}{_ENDED.get(str(reason), '')}"


def which_adapter(metrics: Mapping[str, Any]) -> str:
    """Which step's adapter a run left, and where that of the last one is; empty where its files do not say."""
    names = "best_val_step", "best_val_bpt", "final_val_bpt", "steps"
    best, value, last, end = (metrics.get(name) for name in names)
    scale = section(metrics, "drift").get("scale")
    scaled = is_number(scale) and scale < 1
    by = f"scaled by {scale:.2f} to keep to the budget of drift" if scaled else ""
    if best is None and names[0] in metrics:
        return "that of the last step: none was validated" + (f"; it is {by}, and unscaled in final/" if scaled else "")
    if not all(map(is_number, (best, value, last, end))):
        return ""
    if scaled:
        why = by
    elif not is_number(_given_budget(metrics)):
        why = "which validated best"
    elif section(metrics, "drift").get("within"):
        why = "which validated best within the budget of drift"
    else:
        why = "which came nearest to the budget of drift"
    if best == end:
        return f"that of the last step, {why}" + (f"; unscaled ({last:.3f} bits per token) it is in final/" * scaled)
    return f"that of step {best:,}, {why} ({value:.3f} bits per token); that of the last step ({last:.3f}) is in final/"


def _plateau(validations: Sequence[tuple[int, float]], end: object) -> int | None:
    """The step from which on the validation fell no further, where that is early in the run; None where it is not."""
    values = [(step, bpt) for step, bpt in validations if is_number(bpt)]
    if len(values) < 2 or not isinstance(end, int):
        return None
    lowest = min(bpt for _, bpt in values)
    step = next(step for step, bpt in values if bpt <= lowest + _SAME)
    return step if step < _PLATEAU * end else None


def _counted(answers: Mapping[str, Any]) -> bool:
    """Whether any were asked for, and their figures are whole."""
    interval = answers.get("interval")
    bounds = interval if isinstance(interval, list) and len(interval) == 2 else [None]
    counts = (answers.get("n"), answers.get("right"), section(answers, "base").get("right"))
    return all(map(is_number, (*counts, *bounds))) and answers["n"] > 0


def _of_answers(found: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[str, str]:
    """By the answers to held-out questions."""
    n, right, before = found["n"], found["right"], section(found, "base").get("right")
    low, high = found["interval"]
    counts = f"{right} of {n} answers as expected (base {before})"
    if not found.get("better"):
        base, adapter, tokens = (metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt", "test_tokens"))
        scored = is_number(base) and is_number(adapter) and min(base, adapter) >= 0
        more, but = scored and adapter - base > chance(tokens), ""
        if more:
            but = f", and {_scored_text(metrics)} costs {percent(adapter / base - 1)} more bits"
        elif scored and adapter < base:
            but = f", although {_scored_text(metrics)} costs {percent(1 - adapter / base)} fewer bits"
        state = "useless" if found.get("worse") or more else "unclear"
        return state, f"Not shown to have learned your data: {counts}{but}."
    if low >= _HALF:
        return "good", f"Learned your data: {counts}."
    return ("good", f"Learned part of your data: {counts}.") if high >= _HALF else (
        "unclear", f"Learned little of your data: {counts}."
    )  # fmt: skip


def _of_bits(metrics: Mapping[str, Any], interval: tuple[float, float] | None) -> tuple[str, str]:
    """By the bits of held-out text."""
    base, adapter, tokens = (metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt", "test_tokens"))
    if not (is_number(base) and is_number(adapter)):
        return "unclear", "What was learned is not known: nothing was held out to score it on (--held-out-share)."
    costs = f"{_scored_text(metrics)} costs {adapter:.3f} bits per token (base {base:.3f})"
    low, high = interval or (adapter - base - chance(tokens), adapter - base + chance(tokens))
    if high < 0:
        return "good", f"Learned your data: {costs}."
    if low > 0:
        return "useless", f"Learned nothing that holds for other documents: {costs}."
    shows = f"so little text shows differences from {(high - low) / 2:.2g} bits per token on"
    return "unclear", f"Not shown to have learned your data: {costs}, and {shows}."


def _scored_text(metrics: Mapping[str, Any]) -> str:
    chosen_by = "the validation text, by which the adapter was chosen,"
    return chosen_by if metrics.get("test_is_validation") else "held-out text"


def chance(tokens: object) -> float:
    """Bits per token by which two scores of so many tokens may differ by chance; 0 where nobody knows how many."""
    return _CHANCE / math.log(2) / tokens if isinstance(tokens, int | float) and tokens > 0 else 0.0


def _elsewhere(found: Mapping[str, Any]) -> str:
    n, wrong, right, after, before = (
        found[name] if is_number(found.get(name)) else 0
        for name in ("n", "became_wrong", "became_right", "bits_after", "bits_before")
    )
    model = f"the {found.get('compared_with', 'base model')}"
    cost = f"known answers cost {after - before:.2g} bits per token more than with {model}"
    if not n:
        none = f"Elsewhere none of {found.get('asked')} general questions was answered in the time"
        return f"{none}; {cost}" if found.get("damaged") else none
    if wrong:
        lost = found.get("lost")
        named = list(map(str, lost)) if isinstance(lost, list) else []
        dots = " …" if len(named) > _MAX_NAMED else ""
        which = f" ({' '.join(named[:_MAX_NAMED])}{dots})" if named else ""
        words = f"Elsewhere {wrong} of {n} general answers became wrong{which}{f', {right} right' if right else ''}"
        if found.get("damaged"):
            return f"{words}; {cost}" if after - before > _MUCH else words
        can_be = "the difference can be chance" if right else "so few can be chance"
        return f"{words}; {can_be}" if wrong > right else words
    if found.get("damaged"):
        return f"Elsewhere {cost}"
    if not found.get("right_before"):
        some = f"{n}" if n == found.get("asked") else f"the first {n} of {found.get('asked')}"
        return f"Elsewhere nothing is shown: {model} has none of {some} general answers right"
    return f"Elsewhere none of the {found.get('right_before')} general answers that {model} has right became wrong"


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
    found = verdict_of(run)
    return list(_apart(run, [*_use(run, found), *_try(run, found)]))


def _apart(run: Run, found: Sequence[Advice]) -> Iterator[Advice]:
    """Each other run with a folder of its own."""
    numbers = count(2)
    for each in found:
        if (new := f" --output-dir {_another(run, 2)}") in each.command:
            yield replace(each, command=each.command.replace(new, f" --output-dir {_another(run, next(numbers))}"))
        else:
            yield each


def _another(run: Run, number: int) -> str:
    """The folder of another run, as a command has it."""
    return shlex.quote(f"{place(run)}-{number}")


def verdict_of(run: Run) -> Verdict:
    """``verdict``, with what the folder has besides the metrics."""
    return verdict(run.metrics, lower_rate(run.settings), _interval(run), run.validations)


def place(run: Run) -> str:
    """The run folder as a command names it: as the user named it, or its name where that was a path from the root."""
    asked = _asked(run)
    if not asked or asked.startswith("~") or Path(asked).name != run.name:
        return run.name
    return run.name if PurePosixPath(asked).is_absolute() or PureWindowsPath(asked).is_absolute() else asked


def _asked(run: Run) -> str:
    """The folder that was asked for, without a slash at its end; empty where nobody knows."""
    asked = section(run.settings, "run").get("output_dir")
    return asked.rstrip("/\\") if isinstance(asked, str) else ""


def where(run: Run) -> str:
    """In which folder the commands are to be given, a sentence."""
    there = "Give the commands in the folder where the run was started"
    if _asked(run) == place(run):
        return f"{there}."
    return f"{there}, with the path of the run folder in place of {place(run)}."


def _go_on(run: Run) -> Advice:
    """A run that has not come to its end."""
    command = f"granite-scu train --output-dir {_quoted(run)} --resume-from-checkpoint last"
    failed = f"It ended in an error: {run.failure}."
    if "lower --learning-rate" in run.failure and (rate := _rate(run)):
        again = _again(run, f"--learning-rate {short(rate / 3)}")
        return Advice("Start again with a lower learning rate", failed, again)
    if run.failure and run.has_checkpoint:
        return Advice("Continue the run", f"{failed} Its last checkpoint is the place to start.", command)
    if run.failure:
        return Advice("Start the run again", f"{failed} It had no checkpoint yet.", _again(run, ""))
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


def _use(run: Run, found: Verdict) -> Iterator[Advice]:
    """Whether the adapter is to be used, and which one it is."""
    if found.state == "damaged":
        yield from _damaged(run)
        return
    if found.state == "useless":
        yield Advice(found.use, f"{found.learned} Use the base model.")
        return
    general, asked = (section(run.metrics, name) for name in ("elsewhere", "answers"))
    of_chats = section(run.settings, "data_summary").get("conversations") or asked
    read = f"granite-scu generate {_quoted(run)} " + ("--chat" if of_chats else '--prompt "..."')
    scored = bool(run.evaluation or asked.get("n"))
    lost, won = (general.get(name) for name in ("became_wrong", "became_right"))
    kept = not (is_number(lost) and is_number(won)) or lost <= won
    if found.state == "unclear":
        yield Advice("Read what both write", f"{found.learned} {_which(run)}", read)
    else:
        yield Advice("Use the adapter" if scored and kept else "Try the adapter", _which(run), read)
    if not scored and is_number(run.metrics.get("adapter_test_bpt")):
        text = "One score has no interval. The test documents, scored one by one, have."
        yield Advice("Make sure of the difference", text, f"granite-scu eval {_quoted(run)}")


def _damaged(run: Run) -> Iterator[Advice]:
    """What to do about an adapter that lost what the base model knew."""
    title = "Do not use this adapter for anything but your data"
    text = (
        "It has lost what the base model knew. A budget of drift keeps the model near what it was on general text. It "
        "may learn less, and what is near your data changes all the same."
    )
    yield Advice(title, text, _again(run, _budget_flag(run.metrics)))
    text = (
        "General chats among yours (here general.jsonl), best with the base model's own answers, keep what they are "
        f"about ({_GUIDE})."
    )
    path, files = section(run.settings, "data").get("path"), "general.jsonl --data-weights 1 0.5"
    mixed = (
        _again(run, f"--data-dir {shlex.quote(shown(path).removeprefix('…/'))} {files}")
        if isinstance(path, str)
        else ""
    )
    yield Advice("Or mix in general chats", text, mixed)
    if lower := lower_rate(run.settings):
        text = "The rate is above what suits the model's width, and the higher it is, the more is lost."
        yield Advice("Or lower the learning rate", text, _again(run, f"--learning-rate {short(lower)}"))


def _interval(run: Run) -> tuple[float, float] | None:
    """Of adapter less base, bits per token, from the test documents scored one by one; None where there is none."""
    low, high = run.pair.get("low"), run.pair.get("high")
    return (float(low), float(high)) if is_number(low) and is_number(high) else None


def _rate(run: Run) -> float | None:
    rate = section(run.settings, "optimizer").get("learning_rate")
    return float(rate) if is_number(rate) and rate > 0 else None


def _which(run: Run) -> str:
    """Where the adapter is that one should take."""
    which = which_adapter(run.metrics)
    return f"It lies in {place(run)}, and is {which}." if which else f"It lies in {place(run)}."


def _try(run: Run, found: Verdict) -> Iterator[Advice]:
    """What another run may do better."""
    beyond = list(_beyond(run))
    rate, longer = _rate(run), beyond or list(_length(run, found))
    if found.state == "useless" and rate:
        text = "It learned nothing that holds for other documents. A lower learning rate, or more text, may."
        yield Advice("Try a lower learning rate", text, _again(run, f"--learning-rate {short(min(rate / 3, 1e-3))}"))
    elif found.state == "unclear" and rate and rate <= _HIGHEST and not longer and _is_scored(run):
        why = "Validation no longer falls" if run.validations else "It learned little"
        text = f"{why} at a rate of {short(rate)}. Three times that teaches more in as many steps."
        yield Advice("Try a higher learning rate", text, _again(run, f"--learning-rate {short(3 * rate)}"))
    yield from longer
    if trouble := unsettled(run):
        command = _again(run, trouble.flags) if trouble.flags else ""
        yield Advice("Let S settle", f"The notes below say why it did not. {trouble.remedy}", command)


def _beyond(run: Run) -> Iterator[Advice]:
    """Where the last adapter validated better than the one that is kept, and had drifted too far."""
    kept, last = (run.metrics.get(name) for name in ("best_val_bpt", "final_val_bpt"))
    tokens = section(run.settings, "drift").get("general_tokens")
    if not (run.holds_drift and is_number(kept) and is_number(last) and last < (1 - _MATTERS) * kept):
        return
    text = (
        f"The last adapter validated better ({last:.3f} bits per token, the kept one {kept:.3f}), but drifted beyond "
        "the budget on general text that the loop did not see. More of it has the loop see more; or raise --max-drift."
    )
    more = f"--general-tokens {2 * tokens}" if isinstance(tokens, int) else ""
    yield Advice("Give the loop more general text", text, _again(run, more))


def _length(run: Run, found: Verdict) -> Iterator[Advice]:
    """Whether more steps, or fewer, may be better. Validations count as equal where chance may be the difference."""
    values = [(step, bpt) for step, bpt in run.validations if is_number(bpt)]
    end = run.metrics.get("steps")
    if not values or not isinstance(end, int) or found.state == "useless":
        return
    (best, lowest), now = min(values, key=lambda each: each[1]), values[-1][1]
    matters = max(_MATTERS * lowest, chance(_validated(run)))
    answers = section(run.metrics, "answers")
    all_right = bool(answers) and answers.get("right") == answers.get("n")
    since, before = max((each for each in values if each[0] <= _LATE * end), default=values[0])
    if len(values) < 2:
        text = "One validation does not tell whether more steps or fewer would be better. Five do."
        yield Advice("Validate more often", text, _again(run, f"--eval-steps {max(1, end // 5)}"))
    elif now > lowest + matters:
        if best < _EARLY * end:
            text = (
                f"The validation was best at step {best:,} of {end:,}. What came later fitted the training text alone."
            )
            yield Advice("Train for fewer steps", text, _again(run, length_of(run, best / end, best)))
    elif (early := _plateau(values, end)) is not None:
        if found.state != "unclear":
            text = (
                f"The validation fell no further after step {early:,} of {end:,}; what follows can cost what it knew."
            )
            yield Advice("Train for fewer steps", text, _again(run, length_of(run, early / end, early)))
    elif before - lowest > matters and best > since and found.state != "damaged" and not all_right:
        text = f"The validation still fell at the end: {signed(lowest / before - 1)} from step {since:,} to {best:,}."
        yield Advice("Train longer", text, _again(run, length_of(run, 2, 2 * end)))


def _is_scored(run: Run) -> bool:
    """Whether anything tells how much was learned."""
    tested = is_number(run.metrics.get("adapter_test_bpt"))
    return tested or bool(run.validations) or _counted(section(run.metrics, "answers"))


def _validated(run: Run) -> float | None:
    """Tokens of a validation; None where nobody knows."""
    split = section(section(run.settings, "data_summary"), "validation")
    tokens, blocks = split.get("supervised_tokens"), split.get("blocks")
    batches = section(run.settings, "trainer").get("limit_val_batches")
    data, machine = section(run.settings, "data"), section(run.settings, "machine")
    each = [batches, data.get("eval_batch_size") or data.get("batch_size")]  # of each process
    each += [machine.get(name, 1) for name in ("devices", "nodes")]
    if not (is_number(tokens) and blocks):
        return None
    known = all(isinstance(value, int) for value in each)
    return float(tokens * min(1.0, math.prod(each) / blocks) if known else tokens)


def _again(run: Run, flags: str) -> str:
    """The command of another run with these settings, but for the flags."""
    config = f"{place(run)}/config.yaml"
    words = ["granite-scu train", f"--config {shlex.quote(config)}", f"--output-dir {_another(run, 2)}"]
    return " ".join([*words, flags] if flags else words)


def _quoted(run: Run) -> str:
    return shlex.quote(place(run))


def _count(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else "unknown"
