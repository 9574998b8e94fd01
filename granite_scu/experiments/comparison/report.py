"""The results on paper: Markdown, JSON, a table in the terminal, and the plot."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from granite_scu.errors import UserError
from granite_scu.storage.run_folder import RunFolder

BEGIN, END = "<!-- results: written by scripts/compare_controllers.py --write-docs -->", "<!-- end of results -->"

HEADINGS = (
    "arm",
    "seeds",
    "validation",
    "test bits/token",
    "its best adapter",
    "difference to the reference",
    "",
)
PAIRS = "The laws against their rivals, over all tasks"
PAIR_HEADINGS = (
    "",
    "against",
    "tasks (of two seeds)",
    "mean excess",
    "of the unseen",
    "without the longest document",
    "better on",
    "worse on",
)


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """``comparison.json``, ``comparison.md`` and, where there is something to draw, ``comparison.png`` and ``.svg``."""
    place = RunFolder(folder)
    place.make()
    place.write_json("comparison.json", results)
    place.write_text("comparison.md", markdown(results))
    written = [folder / "comparison.json", folder / "comparison.md"]
    if results["tasks"]:
        from viz.comparison_plot import plot_comparison
        from viz.style import save

        written += save(plot_comparison(results), folder / "comparison")
    return written


def show(results: dict[str, Any], console: Console) -> None:
    """A table for each task and the one over all tasks, each with its verdicts, and the claim."""
    for task in results["tasks"]:
        _show_table(console, _title(task), HEADINGS, [_cells(row) for row in task["rows"]], task["rows"])
    if pairs := results["pairs"]:
        # Of the tasks on which an arm is better or worse, a terminal has room for the number.
        rows = [[*_pair_cells(line)[:-2], str(len(line["better"])), str(len(line["worse"]))] for line in pairs]
        _show_table(console, PAIRS, PAIR_HEADINGS, rows, pairs)
    for line in claim_lines(results):
        console.print(line, highlight=False)


def _show_table(
    console: Console, title: str, headings: tuple[str, ...], rows: list[list[str]], judged: list[dict[str, Any]]
) -> None:
    """A table, and below it the verdicts."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for each in judged:
        if each["verdict"]:
            console.print(each["verdict"], highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """The same tables in Markdown, and what is told of all tasks at once."""
    over_all_tasks = (_overview, _pairs, _transfer, _constants, _priors, _foresight, _origin, _claim)
    sections = [*map(_task, results["tasks"]), *(section(results) for section in over_all_tasks)]
    return "\n\n".join(f"### {title}\n\n" + "\n".join(lines) for title, lines in sections if lines) + "\n"


Section = tuple[str, list[str]]
"""A title, and the lines below it; without any there is no such section."""


def _table(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    head = "|".join(f" {heading} " if heading else " " for heading in headings)
    return [f"|{head}|", "|---" * len(headings) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _verdicts(judged: list[dict[str, Any]]) -> list[str]:
    return ["", *(f"- {each['verdict']}" for each in judged if each["verdict"])] if judged else []


def _task(task: dict[str, Any]) -> Section:
    return _title(task), _table(HEADINGS, [_cells(row) for row in task["rows"]]) + _verdicts(task["rows"])


def _overview(results: dict[str, Any]) -> Section:
    """Every arm on every task."""
    names = [task["name"] for task in results["tasks"]]
    rows = []
    for line in results["overview"]:
        values = [line["mean"], line["worst"], *(line["excess"].get(name) for name in names)]
        rows.append([line["name"], *("" if value is None else f"{100 * value:+.2f}" for value in values)])
    return "Test bits per token over those of the swept best λ, in per cent", _table(
        ("", "mean", "worst", *names), rows
    )


def _pairs(results: dict[str, Any]) -> Section:
    """The laws against their rivals, over all tasks."""
    pairs = results["pairs"]
    return PAIRS, _table(PAIR_HEADINGS, [_pair_cells(line) for line in pairs]) + _verdicts(pairs)


def _pair_cells(line: dict[str, Any]) -> list[str]:
    cells = [line["arm"], line["rival"], _counted(line["tasks"]), _excess(line["excess"])]
    cells += [_excess(line["excess_of_unseen"]), f"{line['without_largest']:+.2%}"]
    return [*cells, ", ".join(line["better"]), ", ".join(line["worse"])]


def _counted(seeds: dict[str, int]) -> str:
    """How many tasks, and how many of them have no more than two seeds."""
    few = sum(count == 2 for count in seeds.values())
    return f"{len(seeds)} ({few})" if few else str(len(seeds))


def _excess(estimate: dict[str, float] | None) -> str:
    return f"{estimate['mean']:+.2%} [{estimate['low']:+.2%}, {estimate['high']:+.2%}]" if estimate else ""


def _transfer(results: dict[str, Any]) -> Section:
    """Which quantity would have been worth holding."""
    excesses = ("mean excess", "worst excess")
    headings = ("quantity", "held at", "best on each task", *excesses, "chosen on the other corpora", *excesses)
    rows = []
    for row in results["transfer"]:
        carried = list(row["carried_excess"].values())
        elsewhere = [f"{np.mean(carried):+.2%}", f"{max(carried):+.2%}"] if carried else ["", ""]
        held = [row["quantity"], f"{row['value']:.3g}", _listed(row["best"]), *_mean_and_worst(row)]
        rows.append([*held, _listed(row["of_other_corpora"]), *elsewhere])
    return "What could be held at one value", _table(headings, rows)


def _mean_and_worst(row: dict[str, Any]) -> list[str]:
    return [f"{row['mean_excess']:+.2%}", f"{row['worst_excess']:+.2%}"]


def _origin(results: dict[str, Any]) -> Section:
    """Where the runs were done, and with what."""
    versions = ", ".join(f"{name} {' and '.join(found)}" for name, found in results["versions"].items())
    machines = " and ".join(results["machines"])
    said = (
        f"{results['runs']} runs on {machines or 'unknown machines'}, a thread each, at "
        f"{results['revisions']} revisions of the code; {versions or 'unknown versions'}. "
        f"{results['runs_of_the_protocol']} of them are runs that the protocol asks for as it stands; others, as of a "
        "law before it changed, are kept beside them and in no comparison between arms."
    )
    return "Where this comes from", [said]


def _claim(results: dict[str, Any]) -> Section:
    return "The claim", [f"- {line}" for line in claim_lines(results)]


def _constants(results: dict[str, Any]) -> Section:
    """What one value for everything would cost."""
    rows = [
        [row["quantity"], f"{row['value']:g}", *_mean_and_worst(row), max(row["excess"], key=row["excess"].get)]
        for row in results["constants"]
    ]
    headings = ("quantity", "held at", "mean excess", "worst excess", "on")
    return "What one value for everything would cost", _table(headings, rows)


def _priors(results: dict[str, Any]) -> Section:
    """What one value would cost under another sigma."""
    by_value: dict[tuple[str, float], dict[float, str]] = {}
    for row in results["priors"]:
        cell = f"{row['mean_excess']:+.2%}, {row['worst_excess']:+.1%}"
        by_value.setdefault((row["quantity"], row["value"]), {})[row["times"]] = cell
    factors = sorted({row["times"] for row in results["priors"]})
    rows = [[name, f"{value:g}", *(cells[k] for k in factors)] for (name, value), cells in by_value.items()]
    headings = ("quantity", "held at", *(f"{factor:g} sigma" for factor in factors))
    return "What another prior would make of one value: mean excess, and the worst", _table(headings, rows)


def _foresight(results: dict[str, Any]) -> Section:
    """How well a probe would have foreseen S_free."""
    found, title = results["foresight"], "What a probe foresees of S_free"
    if not found["runs"]:
        return title, []
    inside = sum(row["inside"] for row in found["tasks"])
    shares = ", ".join(f"{_inside(each, found['runs'])} ({each['share']:.0%})" for each in found["shares"])
    lines = [f"The first steps of every run without λ, continued: {inside} of {found['runs']} ended in the interval."]
    lines += [f"Were the probe a share of the run: {shares}.", ""]
    rows = []
    for row in found["tasks"]:
        foreseen = f"{row['foreseen']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
        rows.append([row["task"], str(row["runs"]), str(row["inside"]), foreseen, f"{row['came']:.4f}"])
    headings = ("task", "runs", "in the interval", "farthest in odds: foreseen", "came to")
    return title, lines + _table(headings, rows)


def _inside(share: dict[str, Any], runs: int) -> str:
    """How many were in the interval, and of how many where a probe of this length foresaw more runs or fewer."""
    return str(share["inside"]) if share["runs"] == runs else f"{share['inside']} of {share['runs']}"


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{value:.3g} ({name})" for name, value in values.items())


def write_docs(results: dict[str, Any], page: Path) -> None:
    """Put the tables between the marks of ``docs/evidence.md``.

    Raises:
        UserError: the page has no such marks.
    """
    before, after = around_the_tables(page)
    place = RunFolder(page.parent)
    place.write_text(page.name, f"{before}{BEGIN}\n\n{markdown(results)}\n{END}{after}")


def around_the_tables(page: Path) -> tuple[str, str]:
    """What stands before and after the marks of a page.

    Raises:
        UserError: the page has no such marks.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if BEGIN not in text or END not in text:
        raise UserError(f"--write-docs: {page} lacks the lines {BEGIN} and {END}")
    return text.split(BEGIN)[0], text.split(END)[1]


def claim_lines(results: dict[str, Any]) -> list[str]:
    """The claim, in sentences: of PI, and of the law that needs no setpoint. Empty where nothing is claimed."""
    if not results["claims"]:
        return []
    if results["setpoint"] is None:
        return ["no PI run is finished on the task that S* is chosen on"]
    since = " (provisional: some of the runs that choose it are missing)" if results["setpoint_is_provisional"] else ""
    lines = [f"S* = {results['setpoint']:g}, chosen by validation on {results['selection_task']}{since}"]
    for name in results["claims"]:
        lines += _claim_lines(results, name)
    cost = results["cost"]
    lines.append(
        f"cost on a new task, by design: 1 run for {cost['sweep_runs']}, {cost['share']:.0%} of the training tokens, "
        "validations on top; with the learning rate tuned for both, "
        f"{cost['with_rates']:.0%} (goal: {cost['goal']:.0%}). "
        f"Choosing S* took {cost['choosing_setpoint_runs']} runs, once"
    )
    return lines


def _claim_lines(results: dict[str, Any], name: str) -> list[str]:
    claim = results["claims"][name]
    lines = []
    for task in results["tasks"]:
        if found := task["claims"].get(name):
            note = " (not counted: choices were made on this task)" if task["name"] == results["selection_task"] else ""
            lines.append(found["statement"] + note)
            if behind := found["stopped_excess"]:
                lines.append(
                    f"{task['name']}: with early stopping the swept best is {found['stopped_best']}; {name} is at "
                    f"{behind['mean']:+.2%} of it ({behind['low']:+.2%} to {behind['high']:+.2%})"
                )
    counts = ", ".join(f"{count} {word}" for word, count in claim["tasks"].items() if count)
    lines.append(
        f"{name} within {claim['margin']:.1%} of each task's swept best lambda: {claim['outcome']} "
        f"(other tasks: {counts or 'none'})"
    )
    for kind, about in (
        ("", f"{name}'s excess over the swept best"),
        ("stopped_", f"{name}'s excess over the swept best with early stopping"),
        ("carried_lambda_", "for comparison, one lambda chosen where S* was"),
    ):
        mean, worst = claim[f"{kind}mean_excess"], claim[f"{kind}worst_excess"]
        if mean is not None:
            lines.append(f"{about}: {mean:+.2%} on average, {worst:+.2%} at worst")
    return lines


def _title(task: dict[str, Any]) -> str:
    base = f", base model {task['base_bpt']:.4f}" if task["base_bpt"] else ""
    documents = f", {task['test_documents']} test documents" if task["test_documents"] else ""
    return f"{task['name']} ({' then '.join(task['corpora'])}{documents}{base})"


def _cells(row: dict[str, Any]) -> list[str]:
    test, paired = row["test_bpt"], row["difference"]
    failed = f" ({len(row['failed_seeds'])} failed)" if row["failed_seeds"] else ""
    return [
        row["name"],
        f"{len(row['seeds'])}{failed}",
        f"{row['validation_bpt']:.4f}" if row["validation_bpt"] else "",
        f"{test['mean']:.4f} [{test['low']:.3f}, {test['high']:.3f}]" if test else "",
        f"{row['test_bpt_best_adapter']:.4f}" if test else "",
        f"{paired['mean']:+.4f} [{paired['low']:+.4f}, {paired['high']:+.4f}]" if paired else "",
        _word(row),
    ]


def _word(row: dict[str, Any]) -> str:
    if row["is_reference"]:
        return "reference"
    paired = row["difference"]
    if paired is None:
        return "one seed" if len(row["seeds"]) == 1 else ""
    if not row["decided"]:
        return "two seeds"
    if paired["low"] <= 0 <= paired["high"]:
        return "no difference shown"
    return "worse" if paired["mean"] > 0 else "better"
