"""A run on one page: what came of it, what it answers, how it went, how it was steered and how it was set up.

One self-contained page, ``report.html`` in the run folder, that asks nothing of the network.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from granite_scu.control.units import duration
from granite_scu.storage.atomic import replacing
from granite_scu.viz.glossary import explain_terms, explanations
from granite_scu.viz.report_answers import answers, elsewhere, samples
from granite_scu.viz.report_data import chart_data
from granite_scu.viz.report_settings import configuration, environment
from granite_scu.viz.run_folder import BAND, Run
from granite_scu.viz.settling import bounded, unsettled
from granite_scu.viz.what_now import Advice, ended, verdict_of, what_now, where, which_adapter
from granite_scu.viz.words import compact, is_number, percent, quantity, section, shown, signed

NAME = "report.html"
_LATEST = 12
"""Ticks in the table, for readers without the charts."""


def build_report(run: Run) -> str:
    """The page: HTML with its style, script and data in it. Everything that the run folder tells is escaped."""
    data = chart_data(run)
    style, script = (_asset(f"report.{kind}") for kind in ("css", "js"))
    sections = (
        _head(run), _what_now(run), _notes(run), answers(run) or samples(run), elsewhere(run), _course(run, data),
        configuration(run), environment(run), explanations(),
    )  # fmt: skip
    return Template(_asset("report.html")).substitute(
        title=escape(f"{run.name}: a granite-scu run"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        body="\n".join(section for section in sections if section),
        # In a script element only "</" and "<!--" have a meaning; as \u003c they have none.
        data=json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def write_report(run: Run, file: Path) -> Path:
    """Write the page, completely or not at all; returns ``file``."""
    page = build_report(run)
    with replacing(file) as temporary:
        # A name that is no UTF-8, of a data file say, has characters that cannot be written as they are.
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
    return file


# Sections.


def _head(run: Run) -> str:
    state = "finished" if run.finished else "unfinished"
    return (
        f'<header><h1>{escape(run.name)}<span class="state {state}">{state}</span></h1>\n'
        f'<p class="faint">{escape(_described(run))}</p></header>\n'
        f"{_lede(run)}\n{_tiles(_figures(run))}"
    )


def _described(run: Run) -> str:
    """The run in one line: model, data, law, seed."""
    base, data = (section(run.settings, group) for group in ("base", "data"))
    parts = [
        shown(base["name"]) if "name" in base else "",
        f"data {shown(data['path'])}" if data.get("path") else "",
        f"controller {run.config['controller']}" if "controller" in run.config else "",
        f"seed {run.settings['seed']}" if "seed" in run.settings else "",
    ]
    return " · ".join(part for part in parts if part) or "its training_config.json is missing"


def _lede(run: Run) -> str:
    """The verdict, and what it is by; how far an unfinished run got."""
    if not run.finished:
        step, planned = run.history[-1]["step"], section(run.settings, "plan").get("steps")
        done = f"step {step:,} of {planned:,}" if isinstance(planned, int) else f"step {step:,}"
        signal = run.stopped.get("signal")
        ended = f"The run was stopped by {escape(str(signal))}" if signal else "The run has not come to its end"
        ended = "The run ended in an error" if run.failure else ended
        return f'<p class="lede">{ended}: recorded up to {done}.</p>'
    found = verdict_of(run)
    lost = f'<p class="lede {found.state}">{escape(found.lost)}</p>' if found.lost else ""
    drift = f'<p class="lede">{escape(found.drift)}</p>' if found.drift else ""
    return f'<p class="lede">{escape(found.learned)}</p>{lost}{drift}<p class="faint">{_scored(run)}</p>'


def _scored(run: Run) -> str:
    """What the verdict is by: the score of held-out documents, and which adapter it is of; and why the run ended."""
    base, adapter = (run.metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt"))
    text = ""
    if is_number(base) and is_number(adapter):
        tokens = run.metrics.get("test_tokens")
        scored = f" on {quantity(tokens)} tokens" if tokens else ""
        change = f" ({signed(adapter / base - 1)})" if base else ""
        bits = f"{adapter:.3f} bits per token{scored}, base {base:.3f}{change}"
        documents = "Validation documents" if run.metrics.get("test_is_validation") else "Held-out documents"
        text = f"{documents}: {bits}.{_began(run)} {_interval(run)}"
        if which := which_adapter(run.metrics):
            text += f" The adapter is {which}."
    if how := ended(run.metrics):
        text += escape(f" The run ended {how}.")
    return (
        text
        if section(run.metrics, "elsewhere") or section(run.metrics, "drift")
        else f"{text} What else it changed was not tried."
    )


def _began(run: Run) -> str:
    """What the adapter scored that training started from, of a run with ``--adapter``."""
    start = run.metrics.get("start_test_bpt")
    if not is_number(start):
        return ""
    name = section(run.settings, "start").get("adapter")
    named = f", <code>{escape(str(name))}</code>," if name else ""
    return f" The adapter{named} that training started from had {start:.3f}."


def _interval(run: Run) -> str:
    """What ``granite-scu eval`` made of the difference; the run itself gives no interval."""
    verdict = run.pair.get("verdict")
    if not isinstance(verdict, str):
        return "One run, one seed: of this difference no interval is given."
    few = " The interval is over windows, and so too narrow." if run.evaluation.get("units") == "windows" else ""
    return f"Scored by <code>granite-scu eval</code>: {escape(verdict)}.{few}"


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the most telling numbers; at the last tick where there is no summary."""
    metrics, latest = run.metrics, run.history[-1]
    asked, general = (section(metrics, name) for name in ("answers", "elsewhere"))
    validated = min((each for each in run.validations if is_number(each[1])), key=lambda each: each[1], default=None)
    figures = []
    if asked.get("n"):
        before = section(asked, "base").get("right")
        figures.append(("answers", f"{asked.get('right')} of {asked['n']}", f"as expected, base {before}"))
    if general.get("n") and general.get("right_before"):
        won = general.get("became_right")
        figures.append(("elsewhere", f"{general.get('became_wrong')} of {general['n']}", f"became wrong, {won} right"))
    if is_number((moved := section(metrics, "drift")).get("share")):
        budget = moved.get("budget")
        allowed = "on general questions"
        if is_number(budget):
            more = section(general, "drift").get("share")
            on_questions = f"; {percent(more)} {allowed}" if is_number(more) else ""
            allowed = f"at most {percent(budget)} asked for{on_questions}"
        figures.append(("drift", percent(moved["share"]), allowed))
    if is_number(metrics.get("adapter_test_bpt")):
        base = compact(metrics.get("base_test_bpt"))
        text = "validation text" if metrics.get("test_is_validation") else "held-out text"
        figures.append((text, compact(metrics["adapter_test_bpt"]), f"bits per token, base {base}"))
    if validated:
        figures.append(("best validation", compact(validated[1]), f"bits per token, step {validated[0]:,}"))
    if run.config.get("controller") != "none":  # it is what the controller reads
        figures.append(("DataBPT", compact(latest.get("data_bpt")), "bits per token, training text"))
    figures.append(("steps", quantity(latest["step"]), f"{quantity(latest.get('tokens'))} tokens"))
    if is_number(metrics.get("wall_time_s")):
        rate = quantity(metrics.get("tokens_per_s"))
        figures.append(("wall time", duration(metrics["wall_time_s"]), f"{rate} tokens/s in training"))
    return figures


def _control_figures(run: Run) -> list[tuple[str, str, str]]:
    """The same, of the controller."""
    latest, when = run.history[-1], "at the end" if run.finished else "so far"
    smoothed = latest.get("s") if latest.get("s_ema") is None else latest["s_ema"]
    budget = percent(latest.get("drift_target"))
    drift = [(f"drift {when}", percent(latest["drift"]), f"at most {budget} asked for")] if run.holds_drift else []
    targets = [value for value in run.column("s_target") if is_number(value)]
    aim = f"S* = {percent(targets[-1])}" if targets else "no setpoint"
    return [
        *drift,
        (f"S {when}", percent(smoothed), aim),
        (f"λ {when}", compact(latest.get("lambda")), "regularisation strength"),
        ("ParamBPT", compact(latest.get("param_bpt")), "bits per token, the adapter then"),
    ]


def _tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    tiles = (
        f"<div><dt>{explain_terms(escape(what))}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for what, value, remark in figures
    )
    return f'<dl class="figures">{"".join(tiles)}</dl>'


def _control(run: Run) -> str:
    """How S was held, where it was to be."""
    control, parts = section(run.metrics, "control"), []
    if run.holds_drift:
        parts.append("λ multiplies drift, how far the model has moved on general text. S is only measured.")
    elif is_number(control.get("iae")):
        settled = control.get("settling_time")
        if is_number(settled):
            parts.append(f"S settled at step {settled:,}.")
        if is_number(control.get("overshoot")):
            parts.append(f"It overshot S* by {percent(control['overshoot'])}.")
        if is_number(control.get("in_band")):
            parts.append(
                f"Once within ±{percent(BAND)} of S* it was there at {percent(control['in_band'])} of the ticks."
            )
    return f"<p>{escape(' '.join(parts))}</p>" if parts else ""


def _what_now(run: Run) -> str:
    items = "".join(f"<li>{_advice(each)}</li>" for each in what_now(run))
    if not items:
        return ""
    return (
        f'<section class="now" aria-label="What now"><h2>What now</h2><ol>{items}</ol>'
        f'<p class="faint">{escape(where(run))}</p></section>'
    )


def _advice(advice: Advice) -> str:
    command = f"<pre><code>{escape(advice.command)}</code></pre>" if advice.command else ""
    return f"<h3>{escape(advice.title)}</h3><p>{escape(advice.text)}</p>{command}"


def _notes(run: Run) -> str:
    """What went wrong or was unusual, with what to do about it."""
    found = list(run.warnings)
    skipped = int(max((count for count in run.column("skipped") if count > 0), default=0))
    if skipped:
        found.append(
            f"{skipped:,} optimizer steps were skipped: loss or gradient was not finite. A lower --learning-rate, or "
            "--precision fp32, avoids it."
        )
    held = int((run.column("held") == 1).sum())
    if held:
        found.append(f"{held:,} of {len(run.history):,} ticks had no usable measurement.")
    advice = section(run.metrics, "reachability").get("advice")
    trouble, bound = unsettled(run), bounded(run)
    if trouble:
        found = [each for each in found if not (advice and advice in each)]
        found.append(f"{trouble.reason} {trouble.remedy}")
    elif advice and not any(advice in each for each in found):
        found.append(advice)
    if bound:
        found.append(f"{bound.reason} {bound.remedy}")
    if not run.measured:
        found.append("Nothing was measured: S is null at every tick.")
    if not run.finished:
        found.append("The run is unfinished, and there is no summary yet.")
    if not found:
        return ""
    items = "".join(f"<li>{escape(str(each))}</li>" for each in found)
    return f'<section class="warnings" aria-label="Notes"><h3>Notes</h3><ul>{items}</ul></section>'


def _course(run: Run, data: Mapping[str, Any]) -> str:
    """Loss and validation; and folded what the controller did, unless it was asked to hold a setpoint."""
    charts = {chart["name"]: _chart(chart, data) for chart in data["charts"]}
    loss, speed, learned = charts.pop("data_bpt"), charts.pop("tokens_per_s"), charts.pop("learned", "")
    note = explain_terms(
        "S = ParamBPT / (DataBPT + ParamBPT): the share of all bits that describes the adapter, measured at every tick."
    )
    drawn = len(data["steps"])
    thinned = f" Of {data['ticks']:,} ticks {drawn:,} are drawn, the extremes of each stretch among them."
    none = run.config.get("controller") == "none"
    held = "drift" if run.holds_drift else "S"
    title = "No controller: the size of the adapter" if none else f"The controller: {held} and λ"
    opened = " open" if run.holds_drift or run.uses_setpoint else ""
    return f"""<section aria-label="Charts"><h2>Loss{" and validation" if run.validations else ""}</h2>
<p class="faint">Point to read values, drag to zoom, double-click to see all. With the keyboard, on a chart:
arrows move the cursor, + and &minus; zoom, 0 shows all.{thinned if drawn < data["ticks"] else ""}</p>
<div id="controls" hidden><div id="readout"><strong></strong> <span class="faint"></span></div>
<button id="in" type="button" aria-label="Zoom in">+</button>
<button id="out" type="button" aria-label="Zoom out">&minus;</button>
<button id="reset" type="button">Show all</button></div>
<noscript><p class="warnings">The charts need JavaScript; the tables below do not.</p></noscript>
{loss}
{learned}
<details id="controller"{opened}><summary>{title}</summary>
{_tiles(_control_figures(run))}
{_control(run)}
<p class="faint">{note}</p>
{"".join(charts.values())}
{_latest(run)}</details>
<details><summary>Tokens per second</summary>
{speed}</details></section>"""


def _chart(chart: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    columns = [data["columns"][each["column"]] for each in chart["series"] if each["column"] in data["columns"]]
    there = bool(chart.get("path")) or any(
        value is not None and (chart["scale"] != "log" or value > 0) for values in columns for value in values
    )
    title, unit = escape(chart["title"]), escape(chart["unit"])
    words = f'{explain_terms(title)} <span class="faint">({unit})</span>'
    heading = f'<figcaption><h3>{words}</h3><div class="legend"></div></figcaption>'
    body = f'<div class="empty">{escape(chart["empty"])}</div>'
    if there:
        over = "" if chart.get("path") else ", over the optimizer steps"
        body = (
            f'<div class="plot" role="slider" tabindex="0" aria-label="{title}, {unit}{over}" '
            f'aria-valuemin="{data["steps"][0]}" aria-valuemax="{data["steps"][-1]}" '
            f'aria-valuenow="{data["steps"][-1]}"></div>'
        )
    return f'<figure id="chart-{chart["name"]}">{heading}{body}</figure>'


def _latest(run: Run) -> str:
    shares = {"S": "s", "S smoothed": "s_ema", "S*": "s_target"}
    if run.holds_drift:
        shares = {"drift": "drift", "at most": "drift_target", "S": "s"}
    headings = ("step", *shares, "λ", "DataBPT", "ParamBPT", "validation", "tokens/s")
    validated = dict(run.validations)
    rows = [
        (
            f"{record['step']:,}",
            *(percent(record.get(name)) for name in shares.values()),
            *(quantity(record.get(name)) for name in ("lambda", "data_bpt", "param_bpt")),
            quantity(validated.get(record["step"])),
            quantity(record.get("tokens_per_s")),
        )
        for record in run.history[-_LATEST:]
    ]
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<details><summary>The last {len(rows)} ticks as a table</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _asset(name: str) -> str:
    return (resources.files("granite_scu") / "viz" / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What the page's Content-Security-Policy allows: this text, and nothing that was smuggled in."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
