"""The part of a report that a person reads first: what base model and adapter answer, and how they continue texts."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from granite_scu.viz.run_folder import Run
from granite_scu.viz.words import is_number, percent, section

_TEXTS = ("prompt", "document", "base", "adapter")
_WHEN = ("before", "after")
_SHOWN = 10
"""Answers that are shown at once; the rest can be opened."""
_CHANGED = 3
"""General questions that are shown at once, those first whose answers became wrong."""


def answers(run: Run) -> str:
    """Each question with what was expected and what both answered; empty where no question was asked."""
    found = [each for each in _listed(run.answers, "answers") if _has(each, "question", "expected", "base", "adapter")]
    figures = section(run.metrics, "answers")
    if not found:
        return ""
    interval, note = figures.get("interval"), ""
    if isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval)):
        low, high = map(percent, interval)
        note = f" Of all such questions, {low} to {high} would be (95 % interval)."
    rule = f" {figures['rule'][:1].upper()}{figures['rule'][1:]}." if isinstance(figures.get("rule"), str) else ""
    counts = f"{figures.get('right')} of {figures.get('n')} are as expected{_in_time(figures)}"
    words = f"{counts}; the others come first.{note}{rule}"
    rows = [
        _row(each["question"], each["expected"], *((each[who], _right(each, who)) for who in ("base", "adapter")))
        for each in sorted(found, key=lambda each: bool(_right(each, "adapter")))
    ]
    table = _table("Question", "Expected", "Base model", "Adapter", rows, _SHOWN)
    return _section("answers", "Answers to held-out questions", words, table)


def elsewhere(run: Run) -> str:
    """General questions with what was answered before and after the run; empty where none was asked."""
    found = [
        each for each in _listed(run.elsewhere, "questions") if _has(each, "question", "answer", "before", "after")
    ]
    if not found:
        return ""
    found.sort(key=lambda each: (not (each.get("right_before") and not each.get("right_after")),
                                 each.get("right_before") == each.get("right_after")))  # fmt: skip
    figures = section(run.metrics, "elsewhere")
    before, after, n = (figures.get(name) for name in ("right_before", "right_after", "n"))
    model = figures.get("compared_with", "base model")
    words = f"What the {model} knew before: it has {before} of {n} right, the adapter {after}{_in_time(figures)}."
    bits = [figures.get(name) for name in ("bits_before", "bits_after")]
    if all(map(is_number, bits)):
        words += " The known answers cost {:.3f} bits per token before, {:.3f} after.".format(*bits)
    rows = [
        _row(each["question"], each["answer"], *((each[when], each.get(f"right_{when}")) for when in _WHEN))
        for each in found
    ]
    table = _table("Question", "Known answer", "Before", "After", rows, _CHANGED)
    return _section("answers", "Answers elsewhere", words, table)


def _in_time(figures: Mapping[str, Any]) -> str:
    """How many questions the counts are of, where not all had time."""
    n, asked = figures.get("n"), figures.get("asked")
    short = is_number(n) and is_number(asked) and n < asked
    return f" ({n} of {asked} were answered in the time)" if short else ""


def _listed(values: Mapping[str, Any], name: str) -> list[Any]:
    listed = values.get(name)
    return listed if isinstance(listed, list) else []


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in names)


def _right(answer: Mapping[str, Any], who: str) -> Any:
    return section(section(answer, "scores"), who).get("right")


def _row(question: str, expected: str, *given: tuple[str, Any]) -> list[str]:
    return [escape(question), escape(expected), *(_marked(*each) for each in given)]


def _marked(text: str, right: Any) -> str:
    kind, sign = ("right", "✓") if right else ("wrong", "✗")
    return f'<span class="{kind}" role="img" aria-label="{kind}">{sign}</span> {escape(text) or "(nothing)"}'


def _table(*columns: Any) -> str:
    *headings, rows, most = columns
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)

    def table(some: Iterable[list[str]]) -> str:
        named = (zip(headings, row, strict=True) for row in some)
        cells = ("".join(f'<td data-name="{name}"><div>{cell}</div></td>' for name, cell in row) for row in named)
        body = "".join(f"<tr>{each}</tr>" for each in cells)
        return f'<table class="asked"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    more = rows[most:]
    return table(rows[:most]) + (f"<details><summary>{len(more)} more</summary>{table(more)}</details>" if more else "")


def _section(kind: str, title: str, note: str, content: str) -> str:
    return (
        f'<section class="{kind}" aria-label="{title}"><h2>{title}</h2><p class="faint">{escape(note)}</p>'
        f"{content}</section>"
    )


def samples(run: Run) -> str:
    """Each beginning with its continuations side by side; empty where the run has none."""
    found = [each for each in _listed(run.samples, "samples") if _has(each, *_TEXTS)]
    if not found:
        return ""
    tokens, temperature = run.samples.get("max_new_tokens"), run.samples.get("temperature")
    drawn = f", at temperature {temperature:g}" if is_number(temperature) else ""
    note = f"Both continue the same test documents, each by at most {tokens} tokens{drawn}. This is no measurement."
    return _section("samples", "What the models write", note, "".join(_sample(each) for each in found))


def _sample(texts: Mapping[str, str]) -> str:
    columns = (("Base model", "base"), ("Adapter", "adapter"))
    continuations = "".join(
        f'<div><h4>{escape(heading)}</h4><p class="text">{escape(texts[name]) or "(nothing)"}</p></div>'
        for heading, name in columns
    )
    same = '<p class="faint">Both continue it in the same words.</p>' if texts["base"] == texts["adapter"] else ""
    return (
        f'<article><h4>Beginning</h4><p class="text faint">{escape(texts["prompt"])}</p>'
        f'<div class="pair">{continuations}</div>{same}<details><summary>How the document continues</summary>'
        f'<p class="text">{escape(texts["document"])}</p></details></article>'
    )
