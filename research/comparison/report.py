"""The results on paper: Markdown, JSON, a table in the terminal, and the plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from granite_scu.storage.run_folder import RunFolder


class Section(NamedTuple):
    """A part of the report: some text, a table and the verdicts on its rows. Without any of them there is none."""

    title: str
    headings: tuple[str, ...] = ()
    rows: Sequence[list[str]] = ()
    text: Sequence[str] = ()
    judged: Sequence[dict[str, Any]] = ()

    @property
    def verdicts(self) -> list[str]:
        return [each["verdict"] for each in self.judged if each["verdict"]]

    def markdown(self) -> str:
        lines = list(self.text)
        if self.rows:
            head = "|".join(f" {heading} " if heading else " " for heading in self.headings)
            lines += [f"|{head}|", "|---" * len(self.headings) + "|", *(f"| {' | '.join(row)} |" for row in self.rows)]
        if self.judged:
            lines += ["", *(f"- {verdict}" for verdict in self.verdicts)]
        return f"### {self.title}\n\n" + "\n".join(lines) if lines else ""


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """``comparison.json``, ``comparison.md`` and, where there is something to draw, the pictures ``comparison`` and
    ``cost``, as PNG and SVG."""
    place = RunFolder(folder)
    place.path.mkdir(parents=True, exist_ok=True)
    place.write_json("comparison.json", results)
    place.write_text("comparison.md", markdown(results))
    written = [folder / "comparison.json", folder / "comparison.md"]
    if results["tasks"]:
        from granite_scu.viz.style import drawing, save
        from research.comparison.cost_plot import AUTO, plot_costs, ways
        from research.comparison.plot import plot_comparison
        from research.drawing import save_all

        with drawing("a picture", f"python -m research.comparison.plot {folder / 'comparison.json'}"):
            written += save_all(plot_comparison(results), folder)
            if AUTO in ways(results):
                written += save(plot_costs(results), folder / "cost")
    return written


def show(results: dict[str, Any], console: Console) -> None:
    """A table for each task and the one over all tasks, each with its verdicts, and the claim."""
    pairs = _pairs(results)
    # Of the tasks on which an arm is better or worse, a terminal has room for the number.
    counts = [[str(len(line["better"])), str(len(line["worse"]))] for line in pairs.judged]
    pairs = pairs._replace(rows=[[*row[:-2], *count] for row, count in zip(pairs.rows, counts, strict=True)])
    for section in (*map(_task, results["tasks"]), pairs):
        if section.rows:
            table = Table(title=section.title, title_justify="left")
            for heading in section.headings:
                table.add_column(heading, overflow="fold")
            for row in section.rows:
                table.add_row(*row)
            console.print(table)
        for verdict in section.verdicts:
            console.print(verdict, highlight=False)
    for line in claim_lines(results):
        console.print(line, highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """The same tables in Markdown, and what is told of all tasks at once."""
    over_all_tasks = (_success, _overview, _pairs, _rates, _transfer, _constants, _priors, _origin)
    sections = [*map(_task, results["tasks"]), *(section(results) for section in over_all_tasks)]
    sections.append(Section("The claim", text=[f"- {line}" for line in claim_lines(results)]))
    return "\n\n".join(filter(None, (section.markdown() for section in sections))) + "\n"


def _success(results: dict[str, Any]) -> Section:
    """What was called success beforehand."""
    rows = [
        [
            each["asked"],
            f"{each['found']:+.2%}",
            "yes" if each["met"] else "no",
            f"{each['seeds']} of {results['seeds']}",
        ]
        for each in results["success"]
    ]
    tested = all(each["tested"] for each in results["success"])
    said = [] if tested else ["The rule of these runs was formed when the tasks were known: this does not test it.\n"]
    headings = ("", "found", "met", "seeds finished")
    return Section("What was called success before the first run", headings, rows, said)


def _overview(results: dict[str, Any]) -> Section:
    """Every arm on every task."""
    names = [task["name"] for task in results["tasks"]]
    rows = []
    for line in results["overview"]:
        values = [line["mean"], line["worst"], *(line["excess"].get(name) for name in names)]
        spent = [f"{line['cost'][of]:.1f}" if line["cost"] else "" for of in ("tokens", "seconds")]
        rows.append([line["name"], *spent, *("" if value is None else f"{100 * value:+.2f}" for value in values)])
    title = "Test bits per token over those of the swept best λ, in per cent"
    said = "Cost: training tokens and processor time of all runs that the arm takes, over those of one run without λ.\n"
    return Section(title, ("", "tokens", "seconds", "mean", "worst", *names), rows, [said] if rows else [])


def _pairs(results: dict[str, Any]) -> Section:
    """The laws against their rivals, over all tasks."""
    headings = ("", "against", "tasks (of two seeds)", "mean excess", "of the unseen", "without the longest document")
    rows = []
    for line in results["pairs"]:
        few = sum(count == 2 for count in line["tasks"].values())
        cells = [line["arm"], line["rival"], f"{len(line['tasks'])}" + (f" ({few})" if few else "")]
        cells += [_interval(line["excess"], "+.2%"), _interval(line["excess_of_unseen"], "+.2%")]
        rows.append([*cells, f"{line['without_largest']:+.2%}", ", ".join(line["better"]), ", ".join(line["worse"])])
    title = "The laws against their rivals, over all tasks"
    return Section(title, (*headings, "better on", "worse on"), rows, judged=results["pairs"])


def _rates(results: dict[str, Any]) -> Section:
    """Arms against early stopping at each learning rate."""
    names = [task["name"] for task in results["tasks"]]
    rows = []
    for line in results["rates"]:
        values = [line["mean_excess"], *(line["excess"].get(name) for name in names)]
        cells = ("" if value is None else f"{100 * value:+.2f}" for value in values)
        rows.append([line["arm"], f"{line['learning_rate']:g}", *cells])
    title = "Test bits per token over those of early stopping at the same learning rate, in per cent"
    said = "First seed, best validated adapters. No criterion asks for this.\n"
    return Section(title, ("", "learning rate", "mean", *names), rows, [said] if rows else [])


def _interval(estimate: dict[str, float] | None, form: str, form_of_ends: str = "") -> str:
    """The mean and its interval; nothing where there is none."""
    if not estimate:
        return ""
    low, high = (format(estimate[end], form_of_ends or form) for end in ("low", "high"))
    return f"{estimate['mean']:{form}} [{low}, {high}]"


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
    return Section("What could be held at one value", headings, rows)


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
    return Section("Where this comes from", text=[said])


def _constants(results: dict[str, Any]) -> Section:
    """What one value for everything would cost."""
    rows = [
        [row["quantity"], f"{row['value']:g}", *_mean_and_worst(row), max(row["excess"], key=row["excess"].get)]
        for row in results["constants"]
    ]
    headings = ("quantity", "held at", "mean excess", "worst excess", "on")
    return Section("What one value for everything would cost", headings, rows)


def _priors(results: dict[str, Any]) -> Section:
    """What one value would cost under another sigma."""
    by_value: dict[tuple[str, float], dict[float, str]] = {}
    for row in results["priors"]:
        cell = f"{row['mean_excess']:+.2%}, {row['worst_excess']:+.1%}"
        by_value.setdefault((row["quantity"], row["value"]), {})[row["times"]] = cell
    factors = sorted({row["times"] for row in results["priors"]})
    rows = [[name, f"{value:g}", *(cells[k] for k in factors)] for (name, value), cells in by_value.items()]
    headings = ("quantity", "held at", *(f"{factor:g} sigma" for factor in factors))
    return Section("What another prior would make of one value: mean excess, and the worst", headings, rows)


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{value:.3g} ({name})" for name, value in values.items())


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


def _task(task: dict[str, Any]) -> Section:
    """Every arm on a task."""
    headings = ("arm", "seeds", "validation", "test bits/token", "its best adapter", "difference to the reference", "")
    documents = f", {task['test_documents']} test documents" if task["test_documents"] else ""
    base = f", base model {task['base_bpt']:.4f}" if task["base_bpt"] else ""
    title = f"{task['name']} ({' then '.join(task['corpora'])}{documents}{base})"
    rows = task["rows"]
    return Section(title, headings, [_cells(row) for row in rows], judged=rows)


def _cells(row: dict[str, Any]) -> list[str]:
    test = row["test_bpt"]
    failed = f" ({len(row['failed_seeds'])} failed)" if row["failed_seeds"] else ""
    return [
        row["name"],
        f"{len(row['seeds'])}{failed}",
        f"{row['validation_bpt']:.4f}" if row["validation_bpt"] else "",
        _interval(test, ".4f", ".3f"),
        f"{row['test_bpt_best_adapter']:.4f}" if test else "",
        _interval(row["difference"], "+.4f"),
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
