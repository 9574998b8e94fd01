"""A run on one page: what came of it, how it was steered, how it was set up.

    python -m viz.report RUN [--out FILE]

writes ``report.html`` into the run folder, or FILE: one self-contained page that asks nothing of the network.
"""

import base64
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path, PurePosixPath, PureWindowsPath
from string import Template
from typing import Any

from viz.adapter_size import describe
from viz.files import command_parser, make_folder, replacing, report_outcome
from viz.report_data import chart_data
from viz.run_folder import BAND, Run, read_measured_run

NAME = "report.html"
_LATEST = 12
"""Ticks in the table, for readers without the charts."""
_NONE = "\N{EN DASH}"
_STOPS = {
    "max_steps": "all steps done",
    "max_time": "its time was up",
    "equilibrium": "equilibrium reached",
    "early_stopping": "validation stopped improving",
}
_GROUPS = {
    "base": "Base model", "lora": "LoRA", "start": "Adapter at the start", "optimizer": "Optimizer", "prior": "Prior",
    "data": "Data", "control": "Control", "run": "Run", "trainer": "Trainer", "plan": "Plan",
}  # fmt: skip


def build_report(run: Run) -> str:
    """The page: HTML with its style, script and data in it. Everything that the run folder tells is escaped."""
    data = chart_data(run)
    style, script = (_asset(f"report.{kind}") for kind in ("css", "js"))
    sections = (
        _head(run), _warnings(run), _charts(run, data), _configuration(run), _environment(run)
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
    """Write the page, whole or not at all."""
    page = build_report(run)
    with replacing(file) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return file


def main(arguments: Sequence[str] | None = None, name: str = "python -m viz.report") -> int:
    """The command; returns its exit code."""
    examples = (f"{name} runs/mine", f"{name} runs/stopped", f"{name} runs/mine --out page.html")
    parser = command_parser(name, "Write a run's report, one page to look at in a browser.", examples)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, finished or not")
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"the page (default: RUN/{NAME})")
    options = parser.parse_args(arguments)

    def write() -> list[Path]:
        run = read_measured_run(options.run)
        file = options.out or options.run / NAME
        if file.is_dir():
            raise ValueError(f"--out {file}: is a folder; name a file")
        make_folder(file.parent)
        return [write_report(run, file)]

    return report_outcome(write)


# Sections.


def _head(run: Run) -> str:
    state = "finished" if run.finished else "unfinished"
    return (
        f'<header><h1>{escape(run.name)}<span class="state {state}">{state}</span></h1>\n'
        f'<p class="faint">{escape(_described(run))}</p></header>\n'
        f"{_lede(run)}\n"
        f'<dl class="figures">{"".join(_figure(*each) for each in _figures(run))}</dl>\n'
        f"{_control(run)}"
    )


def _described(run: Run) -> str:
    """The run in one line: model, data, law, seed."""
    base, data = (_object(run.settings, group) for group in ("base", "data"))
    parts = [
        _shown(base["name"]) if "name" in base else "",
        f"data {_shown(data['path'])}" if data.get("path") else "",
        f"controller {run.config['controller']}" if "controller" in run.config else "",
        f"seed {run.settings['seed']}" if "seed" in run.settings else "",
    ]
    return " · ".join(part for part in parts if part) or "its training_config.json is missing"


def _lede(run: Run) -> str:
    base, adapter = (run.metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt"))
    if _is_number(base) and _is_number(adapter):
        change = adapter / base - 1
        words = "from {} to {}".format(*(f"<strong>{value:.3f}</strong>" for value in (base, adapter)))
        tokens = run.metrics.get("test_tokens")
        scored = f", {_quantity(tokens)} tokens" if tokens else ""
        text = (
            f"The adapter takes held-out documents {words} bits per token ({_signed(change)}{scored}).{_began(run)} "
            f"{_interval(run)}{_chosen(run)}"
        )
    elif run.finished:
        text = "Base model and adapter were not scored on held-out documents."
    else:
        step = run.history[-1]["step"]
        planned = _object(run.settings, "plan").get("steps")
        text = f"The run has not come to its end: recorded up to step {step:,}"
        text += f" of {planned:,}." if isinstance(planned, int) else "."
    return f'<p class="lede">{text}</p>'


def _began(run: Run) -> str:
    """What the adapter scored that training started from, of a run with ``--adapter``."""
    start = run.metrics.get("start_test_bpt")
    if not _is_number(start):
        return ""
    name = _object(run.settings, "start").get("adapter")
    named = f", <code>{escape(str(name))}</code>," if name else ""
    return f" The adapter{named} that training started from had {start:.3f}."


def _interval(run: Run) -> str:
    """What ``scripts/eval_bpt.py`` made of the difference; the run itself gives no interval."""
    pairs = run.evaluation.get("pairs")
    verdict = pairs[0].get("verdict") if isinstance(pairs, list) and pairs and isinstance(pairs[0], dict) else None
    if not isinstance(verdict, str):
        return "One run, one seed: no interval is given."
    few = "" if run.evaluation.get("units") == "documents" else " The interval is over windows, and so too narrow."
    return f"Scored by <code>scripts/eval_bpt.py</code>: {escape(verdict)}.{few}"


def _chosen(run: Run) -> str:
    """Which step's adapter the run left."""
    step, value, last, end = (run.metrics.get(f) for f in ("best_val_step", "best_val_bpt", "final_val_bpt", "steps"))
    if not all(map(_is_number, (step, value, last, end))):
        return ""
    if step == end:
        return " The adapter is that of the last step, which validated best."
    return (
        f" The adapter is that of step {step:,}, which validated best ({value:.3f} bits per token). "
        f"That of the last step ({last:.3f}) is in <code>final/</code>."
    )


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the most telling numbers; at the last tick where there is no summary."""
    metrics, latest = run.metrics, run.history[-1]
    target, smoothed = latest.get("s_target"), _first(latest.get("s_ema"), latest.get("s"))
    validated = min((each for each in run.validations if _is_number(each[1])), key=lambda each: each[1], default=None)
    when = "at the end" if run.finished else "so far"
    aim = "S* has moved to" if run.setpoint_moves else "S* ="
    figures = [
        (f"S {when}", _percent(smoothed), f"{aim} {_percent(target)}" if _is_number(target) else "no setpoint"),
        (f"λ {when}", _quantity(latest.get("lambda")), "regularisation strength"),
        ("DataBPT", _quantity(latest.get("data_bpt")), "bits per token, training text"),
        ("ParamBPT", _quantity(latest.get("param_bpt")), "bits per token, the adapter then"),
    ]
    if validated:
        figures.append(("best validation", _quantity(validated[1]), f"bits per token, step {validated[0]:,}"))
    figures.append(("steps", _quantity(latest["step"]), f"{_quantity(latest.get('tokens'))} tokens"))
    if _is_number(metrics.get("wall_time_s")):
        rate = _quantity(metrics.get("tokens_per_s"))
        figures.append(("wall time", _duration(metrics["wall_time_s"]), f"{rate} tokens/s in training"))
    return figures


def _figure(what: str, value: str, remark: str) -> str:
    return f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"


def _control(run: Run) -> str:
    """What size the texts would have the adapter; how S was held, where it was to be; and why the run ended."""
    control, stopped = (_object(run.metrics, name) for name in ("control", "stopped"))
    size = describe(run.history[-1])
    parts = [f"At the last tick {size}."] if size else []
    if _is_number(control.get("iae")):
        settled = control.get("settling_time")
        parts.append("S never settled." if settled is None else f"S settled at step {settled:,}.")
        if _is_number(control.get("overshoot")):
            parts.append(f"It overshot S* by {_percent(control['overshoot'])}.")
        if _is_number(control.get("in_band")):
            parts.append(
                f"Once within ±{_percent(BAND)} of S* it was there at {_percent(control['in_band'])} of the ticks."
            )
    if stopped.get("reason"):
        why = _STOPS.get(stopped["reason"], str(stopped["reason"]))
        parts.append(f"The run ended at step {stopped.get('step')}: {why}.")
    return f"<p>{escape(' '.join(parts))}</p>" if parts else ""


def _warnings(run: Run) -> str:
    found = list(run.warnings)
    skipped = max((record.get("skipped") or 0 for record in run.history), default=0)
    if skipped:
        found.append(f"{skipped:,} optimizer steps were skipped: loss or gradient was not finite.")
    held = int((run.column("held") == 1).sum())
    if held:
        found.append(f"{held:,} of {len(run.history):,} ticks had no usable measurement.")
    bound = float((run.column("saturated") == 1).mean())
    if bound >= 0.05:
        found.append(f"λ stood at a bound at {_percent(bound)} of the ticks, where it cannot steer.")
    advice = _object(run.metrics, "reachability").get("advice")
    if advice and not any(advice in each for each in found):
        found.append(advice)
    if not run.measured:
        found.append("Nothing was measured: S is null at every tick.")
    if not run.finished:
        found.append("The run is unfinished: it was cut off, or is still under way. There is no summary yet.")
    if not found:
        return ""
    items = "".join(f"<li>{escape(str(each))}</li>" for each in found)
    return f'<section class="warnings" aria-label="Warnings"><h3>Warnings</h3><ul>{items}</ul></section>'


def _charts(run: Run, data: Mapping[str, Any]) -> str:
    figures = "\n".join(_chart(chart, data) for chart in data["charts"])
    note = "S = ParamBPT / (DataBPT + ParamBPT): the share of all bits that describes the adapter."
    if run.asks_for_size:
        note += " Adapter size wanted: the size at which the text would cost the fewest bits, as its slope tells."
    drawn = len(data["steps"])
    if drawn < data["ticks"]:
        note += f" Of {data['ticks']:,} ticks {drawn:,} are drawn, the extremes of each stretch among them."
    return f"""<section aria-label="Charts"><h2>Course</h2>
<p class="faint">{note} Point to read values, drag to zoom, double-click to see all. With the keyboard, on a chart:
arrows move the cursor, + and &minus; zoom, 0 shows all.</p>
<div id="controls" hidden><div id="readout"><strong></strong> <span class="faint"></span></div>
<button id="in" type="button" aria-label="Zoom in">+</button>
<button id="out" type="button" aria-label="Zoom out">&minus;</button>
<button id="reset" type="button">Show all</button></div>
<noscript><p class="warnings">The charts need JavaScript; the tables below do not.</p></noscript>
{figures}
{_latest(run)}</section>"""


def _chart(chart: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    columns = [data["columns"][series["column"]] for series in chart["series"] if series["column"]]
    there = any(value is not None and (chart["scale"] != "log" or value > 0) for values in columns for value in values)
    title, unit = escape(chart["title"]), escape(chart["unit"])
    heading = f'<figcaption><h3>{title} <span class="faint">({unit})</span></h3><div class="legend"></div></figcaption>'
    body = f'<div class="empty">{escape(chart["empty"])}</div>'
    if there:
        body = (
            f'<div class="plot" role="slider" tabindex="0" aria-label="{title}, {unit}, over the optimizer steps" '
            f'aria-valuemin="{data["steps"][0]}" aria-valuemax="{data["steps"][-1]}" '
            f'aria-valuenow="{data["steps"][-1]}"></div>'
        )
    return f'<figure id="chart-{chart["name"]}">{heading}{body}</figure>'


def _latest(run: Run) -> str:
    headings = ("step", "S", "S smoothed", "S*", "λ", "DataBPT", "ParamBPT", "validation", "tokens/s")
    validated = dict(run.validations)
    rows = [
        (
            f"{record['step']:,}",
            *(_percent(record.get(name)) for name in ("s", "s_ema", "s_target")),
            *(_quantity(record.get(name)) for name in ("lambda", "data_bpt", "param_bpt")),
            _quantity(validated.get(record["step"])),
            _quantity(record.get("tokens_per_s")),
        )
        for record in run.history[-_LATEST:]
    ]
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<details><summary>The last {len(rows)} ticks as a table</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _configuration(run: Run) -> str:
    groups = {title: _object(run.settings, name) for name, title in _GROUPS.items()}
    # Lightning has many switches, nearly all of them off.
    groups["Trainer"] = {name: value for name, value in groups["Trainer"].items() if value is not False}
    groups["Law as run"] = run.config
    groups["Data, counted"] = _object(run.settings, "data_summary")
    sections = "".join(_group(title, values) for title, values in groups.items())
    if not sections:
        return "<h2>Configuration</h2><p>Its training_config.json and scu_config.json are missing.</p>"
    return (
        "<h2>Configuration</h2><p class='faint'>What was not set is left out. config.yaml in the run folder feeds "
        "straight back: <code>python -m granite_scu fit --config config.yaml</code></p>"
        f'<div class="groups">{sections}</div>'
    )


def _environment(run: Run) -> str:
    source = {"commit": run.settings.get("git_revision"), "seed": run.settings.get("seed")}
    machine, versions = (_object(run.settings, name) for name in ("machine", "versions"))
    groups = {"Machine": machine, "Versions": versions, "Source": source}
    sections = "".join(_group(title, values) for title, values in groups.items())
    return f'<h2>Environment</h2><div class="groups">{sections}</div>' if sections else ""


def _group(title: str, values: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{_breakable(name)}</th><td>{escape(_shown(value))}</td></tr>'
        for name, value in _flat(values)
        if value is not None
    ]
    if not rows:
        return ""
    return f"<section><h3>{escape(title)}</h3><table><tbody>{''.join(rows)}</tbody></table></section>"


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Words and numbers.


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of that name, empty where there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _shown(value: object) -> str:
    """A setting in words; of an absolute path only the last name, for where it lay is nobody else's business."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, str) and (PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()):
        return "…/" + (PureWindowsPath(value) if "\\" in value else PurePosixPath(value)).name
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _quantity(value: Any) -> str:
    if not _is_number(value):
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: Any) -> str:
    return f"{100 * value:.3g}\N{NO-BREAK SPACE}%" if _is_number(value) else _NONE


def _signed(change: float) -> str:
    return f"{100 * change:+.1f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    unit, size = ("min", 60) if seconds < 3600 else ("h", 3600)
    whole, rest = divmod(round(seconds * 60 / size), 60)
    return f"{whole}:{rest:02} {unit}"


def _asset(name: str) -> str:
    return (resources.files("viz") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What the page's Content-Security-Policy allows: this text, and nothing that was smuggled in."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
