"""``granite-scu runs``: the runs in a folder, compared by what their own files say. Loads nothing heavy."""

import argparse
import json
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import TRAINING_CONFIG
from granite_scu.storage.run_list import SORTS, Summary, ordered, read_runs

EXAMPLES = ("", "runs/ --sort bpt", "runs/ --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help="a run folder, or a folder with runs "
                        "anywhere in it (default: here)")  # fmt: skip
    parser.add_argument("--sort", choices=SORTS, default="time", help="newest first, by name, least bits per token, "
                        "most bits saved, largest S, largest lambda, fastest (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    folder = Path(options.folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{options.folder}: no such folder")
    found, broken = read_runs(folder)
    if not found and not broken:
        raise UserError(f"{options.folder}: holds no run folder ({TRAINING_CONFIG} tells one)")
    found = ordered(found, options.sort)
    if options.json:
        print(json.dumps({"runs": found, "broken": broken}, indent=2))
    else:
        _print(found, broken, folder)
    return 0


def _print(found: list[Summary], broken: list[dict[str, str]], folder: Path) -> None:
    console = make_console(width=WIDE)
    table = Table("run", "written", "state", "controller", box=box.SIMPLE_HEAD)
    drifted = any(each["drift"] is not None for each in found)
    for heading in ("S*", "S", *(["drift"] if drifted else []), "lambda", "base -> adapter", "saved", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found:
        path = Path(each["path"])
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        written = each["time"][:16].replace("T", " ")
        table.add_row(
            *map(Text, (name, written, _state(each), str(each["controller"]))),
            _share(each["s_target"]) + (", moves" if each["setpoint_moves"] else ""),
            *(_share(each["s"]), *([_drift(each)] if drifted else []), _number(each["strength"], ".3g")),
            "-" if each["saved_bpt"] is None else f"{each['base_bpt']:.4f} -> {each['adapter_bpt']:.4f}",
            *(_number(each["saved_bpt"], "+.4f"), _number(each["tokens_per_s"], ",.0f")),
        )
    if found:
        console.print(table)
        console.print("base, adapter and what it saves: bits per token on the held-out documents", highlight=False)
        if drifted:
            console.print("drift: on general text, or without a budget on general questions", highlight=False)
    for each in broken:
        console.print(f"broken: {each['path']}: {each['reason']}", highlight=False, markup=False, soft_wrap=True)


def _state(each: Summary) -> str:
    if each["finished"]:
        return "finished" if each["stopped"] in (None, "max_steps") else f"{each['stopped']} at {each['step']}"
    return f"unfinished, {each['step']}/{each['steps']}"


def _drift(each: Summary) -> str:
    budget = "" if each["max_drift"] is None else f" of {_share(each['max_drift'])}"
    return _share(each["drift"]) + budget


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
