"""The part of a report that says how the run was set up: what differs from the defaults, and behind it the rest."""

from collections.abc import Mapping
from html import escape
from typing import Any

from granite_scu.viz.run_folder import Run
from granite_scu.viz.words import flat, section, shown

_GROUPS = {
    "base": "Base model", "lora": "LoRA", "start": "Adapter at the start", "optimizer": "Optimizer", "prior": "Prior",
    "data": "Data", "control": "Control", "drift": "Drift", "run": "Run", "trainer": "Trainer", "plan": "Plan",
}  # fmt: skip
_CONFIG = "<code>granite-scu train --config config.yaml</code>"


def configuration(run: Run) -> str:
    """What was asked for and what followed from it."""
    groups = {title: section(run.settings, name) for name, title in _GROUPS.items()}
    # Lightning has many switches, nearly all of them off.
    groups["Trainer"] = {name: value for name, value in groups["Trainer"].items() if value is not False}
    groups["Law as run"] = run.config
    groups["Data, counted"] = section(run.settings, "data_summary")
    every = _sections(groups)
    items = "".join(f"<li>{escape(each)}</li>" for each in run.chosen)
    decided = f'<p class="faint">The data decided:</p><ul>{items}</ul>' if items else ""
    if not every:
        return "<h2>Configuration</h2><p>Its training_config.json and scu_config.json are missing.</p>"
    return (
        f"<h2>Configuration</h2>{_changed(run)}{decided}\n"
        '<details><summary>All settings</summary><p class="faint">What was not set is left out. config.yaml in the run '
        f'folder has everything that was asked for: {_CONFIG} asks for it again.</p><div class="groups">{every}</div>'
        "</details>"
    )


def environment(run: Run) -> str:
    """Machine, versions and source."""
    source = {"commit": run.settings.get("git_revision"), "seed": run.settings.get("seed")}
    machine, versions = (section(run.settings, name) for name in ("machine", "versions"))
    every = _sections({"Machine": machine, "Versions": versions, "Source": source})
    if not every:
        return ""
    return (
        "<h2>Environment</h2><details><summary>Machine, versions and source</summary>"
        f'<div class="groups">{every}</div></details>'
    )


def _changed(run: Run) -> str:
    """The settings that the user gave and that differ from the defaults, where the run says which these are."""
    names, given = run.settings.get("changed"), run.settings.get("given")
    if not (isinstance(names, list) and isinstance(given, list)):
        return ""
    unlimited = section(run.settings, "trainer").get("max_steps") == -1  # which --num-epochs sets
    names = [name for name in names if name in given and not (unlimited and name == "trainer.max_steps")]
    groups = {title: _of(section(run.settings, name), name, names) for name, title in _GROUPS.items()}
    every = _sections(groups)
    if not every:
        return '<p class="faint">All settings are the defaults.</p>'
    return f'<p class="faint">These given settings differ from the defaults.</p><div class="groups">{every}</div>'


def _of(values: Mapping[str, Any], group: str, names: list[Any]) -> dict[str, Any]:
    """The settings of a group that are among the names; one that was set to nothing says so."""
    return {name: "none" if value is None else value for name, value in values.items() if f"{group}.{name}" in names}


def _sections(groups: Mapping[str, Mapping[str, Any]]) -> str:
    return "".join(_group(title, values) for title, values in groups.items())


def _group(title: str, values: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{_breakable(name)}</th><td>{escape(shown(value))}</td></tr>'
        for name, value in flat(values)
        if value is not None
    ]
    if not rows:
        return ""
    return f"<section><h3>{escape(title)}</h3><table><tbody>{''.join(rows)}</tbody></table></section>"


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")
