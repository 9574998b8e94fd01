"""What was found, for people and for programs."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from granite_scu.config.settings import SHORT_PRECISIONS
from granite_scu.config.untrusted_input import printable
from granite_scu.control.units import counted, per_cent
from granite_scu.storage.atomic import replacing
from granite_scu.viz.what_now import drifted
from granite_scu.viz.words import section

SHOWN = 3
"""Questions that are shown with their answers; the JSON has all."""

WIDTH = 100
"""Characters of a question or an answer; of a longer one that is expected all are shown, up to four times as many."""


def show(found: dict[str, Any], console: Console) -> None:
    """A table, a sentence for each pair, and how it was measured."""
    models, pairs = found["models"], found["pairs"]
    first = models[0]["name"]
    against = {pair["b"]: pair for pair in pairs if pair["a"] == first}
    several, forgetting = len(models) > 1, models[0]["forgetting"]
    headings = ["bits/token", "bits/byte", "perplexity"]
    headings += [f"over {first}, 95 % interval"] if several else []
    headings += [f"forgetting: {forgetting['data']}"] if forgetting else []
    answers, elsewhere = found.get("answers"), found.get("elsewhere")
    headings += ["as expected, 95 % interval"] if answers else []
    headings += ["general answers"] if elsewhere else []
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table("model", *columns, title=found["data"], title_justify="left", title_style="")
    for model in models:
        cells = [f"{model['bits_per_token']:.4f}", f"{model['bits_per_byte']:.4f}", f"{model['perplexity']:.4g}"]
        if several:
            cells.append(_interval(against.get(model["name"])))
        if forgetting:
            forgotten = model["forgetting"]
            change = forgotten["against"]
            cells.append(f"{forgotten['bits_per_token']:.4f}" + (f"  {_interval(change)}" if change else ""))
        if answers:
            of_model = answers["models"][model["name"]]
            low, high = map(per_cent, of_model["interval"])
            cells.append(f"{of_model['right']} of {answers['n']} ({low} to {high})")
        if elsewhere:
            changed = elsewhere[model["name"]]
            lost = f", {changed['became_wrong']} lost" if changed["became_wrong"] else ""
            cells.append(f"{changed['right_after']} of {changed['n']}{lost}")
        table.add_row(model["name"], *cells)
    console.print(table)
    lines = [
        f"{pair['verdict']}; better on {pair['documents_better']} of {counted(found['documents'], 'document')}."
        for pair in pairs
    ]
    changes = (model["forgetting"]["against"] for model in models if model["forgetting"])
    lines += [f"On {forgetting['data']}: {change['verdict']}." for change in changes if change]
    lines += _said(found)
    for line in [*lines, *_circumstances(found, forgetting)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _said(found: dict[str, Any]) -> list[str]:
    """Some answers of all models, the first of each kind, and which general ones were lost."""
    lines, names = [], [model["name"] for model in found["models"]]
    if answers := found.get("answers"):
        lines.append(f"{counted(answers['n'], 'question')} answered: {answers['rule']}.")
        lines += shown_answers(answers["records"][:SHOWN], names)
    for name, changed in found.get("elsewhere", {}).items():
        if changed["lost"]:
            chance = f"of as many by chance the probability is {changed['chance']:.2g}"
            lines.append(f"{name}: general answers became wrong ({chance}): {' '.join(changed['lost'])}")
    for name, moved in found.get("drift", {}).items():
        lines.append(f"{name}: {drifted(moved, section(section(found, 'elsewhere'), name).get('drift') or {})}")
    return lines


def shown_answers(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """A line for each question with what was expected, and below it one for the answer of each model."""
    lines = []
    for record in records:
        width = min(max(WIDTH, len(record["expected"]) + WIDTH // 5), 4 * WIDTH)
        lines.append(f"  {shortened(record['question'])}  expected: {shortened(record['expected'], width)}")
        lines += [f"    {name}: {shortened(record[name], width)}" for name in names]
    return lines


def shortened(text: str, width: int = WIDTH) -> str:
    """A text on one line, of which the end may be missing.

    >>> shortened("a lamp, and\\na mast", 12), shortened("https://example.org/page", 12)
    ('a lamp, ...', 'https:// ...')
    """
    text = printable(" ".join(text.split()))
    if len(text) <= width:
        return text
    cut = text[: width - len(" ...") + 1]
    words, _, _ = cut.rpartition(" ")
    return f"{words if len(words) > width // 2 else cut[:-1]} ..."  # not every script has spaces


def _interval(pair: dict[str, Any] | None) -> str:
    if pair is None:
        return ""
    if pair["low"] is None:
        return f"{pair['difference_bits_per_token']:+.4f}"
    return f"{pair['difference_bits_per_token']:+.4f} ({pair['low']:+.4f} to {pair['high']:+.4f})"


def _circumstances(found: dict[str, Any], forgetting: dict[str, Any] | None) -> list[str]:
    lines = []
    for scored in (found, forgetting):
        if not scored:
            continue
        counts = ", ".join(counted(scored[f"{what}s"], what) for what in ("document", "token", "byte"))
        line = f"{scored['data']}: {counts}"
        if scored["excluded_documents"]:
            line += f"; {scored['excluded_documents']} left out because a run was trained or validated on them"
        if scored["units"] == "windows":
            line += (
                "; fewer than ten documents, so intervals are over windows, which differ less than documents: "
                "take them for too narrow"
            )
        lines.append(line)
    precision = SHORT_PRECISIONS.get(found["precision"], found["precision"])
    lines.append(
        f"windows of {found['max_length']} tokens, each after the first {found['stride']} further; "
        f"{precision} on {found['device']}{', base in 4 bits' if found['quantize_4bit'] else ''}; "
        f"{found['tokens_per_s']:,.0f} tokens/s"
    )
    if own := found.get("run"):
        scores = f"{own['adapter_test_bpt']:.4f} bits/token (base {own['base_test_bpt']:.4f})"
        lines.append(
            f"{own['name']} itself reported {scores}, for it scores the text in blocks of {own['block_size']} tokens "
            "that do not overlap, and counts the ends of documents"
        )
    return lines


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows completely or not at all."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
