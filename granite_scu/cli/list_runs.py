"""``granite-scu runs``: the runs in a folder, compared by what their own files say. Loads nothing heavy."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from granite_scu.cli.argument_parser import path
from granite_scu.cli.console import WIDE, make_console
from granite_scu.config.errors import UserError, one_line
from granite_scu.config.untrusted_input import only_files, printable
from granite_scu.storage.run_folder import (
    CONTROL_CONFIG,
    HISTORY,
    HISTORY_LINES,
    METRICS,
    TRAINING_CONFIG,
    RunFolder,
    read_if_there,
    read_json,
)

SIGNS = (TRAINING_CONFIG, METRICS, HISTORY, HISTORY_LINES)
"""Files that only a run leaves behind; without the first of them it is a broken one."""

Summary: TypeAlias = dict[str, Any]
"""One run, as ``summarise`` gives it."""

NUMBERS = ("step", "steps", "s_target", "s", "drift", "max_drift", "strength", "base_bpt", "adapter_bpt", "saved_bpt",
           "best_val_bpt", "best_val_step", "tokens_per_s")  # fmt: skip
"""Fields of a ``Summary`` that are numbers, where they are known."""

SORTS = {
    "time": ("time", True),
    "name": ("path", False),
    "bpt": ("adapter_bpt", False),
    "saved": ("saved_bpt", True),
    "s": ("s", True),
    "lambda": ("strength", True),
    "speed": ("tokens_per_s", True),
}
"""The orders of the list: field, and whether the largest comes first."""

TEXTS = ("run", "written", "state", "controller")
"""The columns that are no numbers."""

LEAST_NEEDED = ("S*", "S", "lambda", "tokens/s", "controller", "written", "base -> adapter", "drift", "saved")
"""The columns that a narrow terminal goes without, in this order: which run it is and its state are always shown."""


def read_runs(folder: Path) -> tuple[list[Summary], list[dict[str, str]]]:
    """The runs in a folder, and of those whose files are missing or damaged ``path`` and ``reason``."""
    found, broken = [], []
    for each in run_folders(folder):
        try:
            found.append(summarise(each))
        except (UserError, ValueError, KeyError, TypeError, AttributeError, OSError, MemoryError) as error:
            reason = f"{error} is missing in its files" if isinstance(error, KeyError) else one_line(error)
            broken.append({"path": str(each), "reason": reason})
    return found, broken


def run_folders(folder: Path) -> Iterator[Path]:
    """The run folders in a folder, itself included, at any depth, but not inside another run folder.

    Links are followed, each folder once, and by its own name where it has one here.
    """
    seen = set()
    for name, folders, files in os.walk(folder, followlinks=True):
        here = Path(name)
        if (place := here.resolve()) in seen:
            folders.clear()
            continue
        seen.add(place)
        if any(sign in files for sign in SIGNS):
            folders.clear()
            yield here
        named = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(named, key=lambda name: ((here / name).is_symlink(), name))


def summarise(path: Path) -> Summary:
    """What the files of a run folder tell. What is not known is null: scores come with a run's end, S with a tick.

    Returns:
        path: the run folder.
        time: when its newest file was written, local time in ISO 8601.
        finished: whether it came to its end; if not it was cut off, or is under way.
        step, steps: optimizer steps done and planned.
        stopped: why it ended.
        model: the base model.
        controller: name of the law.
        s_target: setpoint S*; of one that the law moves, where it is.
        s, strength: S, smoothed where it is, and lambda at the newest tick.
        drift, max_drift: of the adapter that is kept on general text, or at the newest tick; and its budget.
        base_bpt, adapter_bpt, saved_bpt: bits per token on the held-out documents, of the base model and with the
            adapter, and their difference.
        best_val_bpt, best_val_step: the adapter's validation, in bits per token, and its step: it validated best.
        tokens_per_s: training tokens a second.

    Raises:
        UserError, ValueError, KeyError, TypeError, AttributeError, OSError: they are missing or damaged.
    """
    only_files(path)
    training, control = read_json(path / TRAINING_CONFIG), read_json(path / CONTROL_CONFIG)
    metrics = read_if_there(path / METRICS)
    history = RunFolder(path).read_history()
    last = history[-1] if history else {}
    base, adapter = metrics.get("base_test_bpt"), metrics.get("adapter_test_bpt")
    newest = max((path / sign).stat().st_mtime for sign in SIGNS if (path / sign).is_file())
    found = {
        "path": str(path),
        "time": datetime.fromtimestamp(newest).astimezone().isoformat(timespec="seconds"),
        "finished": bool(metrics),
        "step": metrics.get("steps", last.get("step", 0)),
        "steps": training["plan"]["steps"],
        "stopped": (metrics.get("stopped") or {}).get("reason"),
        "model": printable(str(training["base"]["name"])),
        "controller": printable(str(control["controller"])),
        "s_target": last.get("s_target", control.get("target_s")),
        "s": last.get("s_ema") if "drift" not in last else last.get("s"),
        "drift": (metrics.get("drift") or {}).get("share", last.get("drift")),
        "max_drift": (training.get("drift") or {}).get("max_drift"),
        "strength": last.get("lambda"),
        "base_bpt": base,
        "adapter_bpt": adapter,
        "saved_bpt": None if base is None or adapter is None else base - adapter,
        "best_val_bpt": metrics.get("best_val_bpt"),
        "best_val_step": metrics.get("best_val_step"),
        "tokens_per_s": metrics.get("tokens_per_s", last.get("tokens_per_s")),
    }
    for name in NUMBERS:
        if isinstance(found[name], bool) or not isinstance(found[name], int | float | None):
            raise ValueError(f"{name} is no number in its files, but {found[name]!r}")
    return found


def ordered(found: list[Summary], by: str) -> list[Summary]:
    """The runs in one of the ``SORTS``; those where that is not known come last."""
    field, largest_first = SORTS[by]
    known = [each for each in found if each[field] is not None]
    unknown = [each for each in found if each[field] is None]
    return sorted(known, key=lambda each: each[field], reverse=largest_first) + unknown


EXAMPLES = ("", "runs/ --sort bpt", "runs/ --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("folder", metavar="DIR", type=path, nargs="?", default=".", help="a run folder, or a folder "
                        "with runs anywhere in it (default: here)")  # fmt: skip
    parser.add_argument("--sort", choices=SORTS, default="time", help="newest first, by name, least bits per token, "
                        "most bits saved, largest S, largest lambda, fastest (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    folder = options.folder
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
    if found:
        columns = _columns(found, folder)
        left_out = _narrowed(columns, console)
        console.print(_table(columns))
        words = (
            "base, adapter and what it saves: bits per token on the documents held out for a test, or else to validate"
        )
        console.print(words, highlight=False)
        if "drift" in columns:
            console.print("drift: on general text, or without a budget on general questions", highlight=False)
        if left_out:
            words = f"left out, for the terminal is narrow: {', '.join(left_out)}; --json has everything"
            console.print(words, highlight=False)
    for each in broken:
        console.print(f"broken: {each['path']}: {each['reason']}", highlight=False, markup=False, soft_wrap=True)


def _columns(found: list[Summary], folder: Path) -> dict[str, list[str]]:
    """The list by columns, of each heading what the runs have there."""
    columns: dict[str, list[str]] = {}
    drifted = any(each["drift"] is not None for each in found)
    for each in found:
        path = Path(each["path"])
        row = {
            "run": path.resolve().name if path == folder else str(path.relative_to(folder)),
            "written": each["time"][:16].replace("T", " "),
            "state": _state(each),
            "controller": each["controller"],
            "S*": _number(each["s_target"], ".2%"),
            "S": _number(each["s"], ".2%"),
            **({"drift": _drift(each)} if drifted else {}),
            "lambda": _number(each["strength"], ".3g"),
            "base -> adapter": "-"
            if each["saved_bpt"] is None
            else f"{each['base_bpt']:.4f} -> {each['adapter_bpt']:.4f}",
            "saved": _number(each["saved_bpt"], "+.4f"),
            "tokens/s": _number(each["tokens_per_s"], ",.0f"),
        }
        for heading, cell in row.items():
            columns.setdefault(heading, []).append(cell)
    return columns


def _narrowed(columns: dict[str, list[str]], console: Console) -> list[str]:
    """Leave columns out until the rest fits, those first that say nothing; returns their headings."""
    empty = [heading for heading, cells in columns.items() if set(cells) == {"-"}]
    left_out = []
    for heading in dict.fromkeys((*empty, *LEAST_NEEDED)):
        anywhere = console.options.update(max_width=sys.maxsize)
        if Measurement.get(console, anywhere, _table(columns)).maximum <= console.width:
            break
        if columns.pop(heading, None):
            left_out.append(heading)
    return left_out


def _table(columns: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in columns:
        text = heading in TEXTS
        table.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _state(each: Summary) -> str:
    if each["finished"]:
        return "finished" if each["stopped"] in (None, "max_steps") else f"{each['stopped']} at {each['step']}"
    return f"unfinished, {each['step']}/{each['steps']}"


def _drift(each: Summary) -> str:
    budget = "" if each["max_drift"] is None else f" of {each['max_drift']:.2%}"
    return _number(each["drift"], ".2%") + budget


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
