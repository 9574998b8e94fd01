"""What the record of a finished run holds, and what is wrong with one: a folder of them may come from anywhere."""

import math
from typing import Any

BASE = "base"
"""The task of the runs that train nothing, and score the base model."""

ANY = {"key": str, "task": str, "arm": str, "seed": int, "settings": {"control.controller": str}, "wall_time_s": float}
OF_BASE = {"training": object, "validation": {"final": float}, "test": dict}
OF_TRAINING = {"failed": object, "settings": {"control.controller": str, "optimizer.learning_rate": float}}
FINISHED = {"validation": {"final": float, "best": float}, "test": dict, "law": dict, "n_tokens": float, "steps": float}
FINISHED |= {"ticks": {"step": list, "s": list, "lambda": list}}
"""What the record of any run has; that of a base model besides; that of a training run; that of one that has not
failed. A float is any finite number, and a table has at least such entries."""

OPTIONAL = {"machine": {"cpu": str}, "versions": dict, "git_revision": str | None, "text": str | None}
"""What those of some have."""


def fault(record: dict[str, Any]) -> str | None:
    """Why this is not the record of a run, in words; None where it is one."""
    of_kind = OF_BASE if record.get("task") == BASE else OF_TRAINING | ({} if record.get("failed") else FINISHED)
    needed = ANY | of_kind
    if missing := needed.keys() - record.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    wrong = [n for n, kind in (needed | OPTIONAL).items() if n in record and not _fits(record[n], kind)]
    if "test" in needed and "test" not in wrong:
        test = [record["test"].get(name) for name in ("tokens", *needed["validation"])]
        wrong += [] if _are_columns(test) and min(test[0]) > 0 else ["test"]
    if "ticks" in needed and "ticks" not in wrong:
        ticks = record["ticks"]
        known = _are_columns([ticks["step"], ticks["lambda"]]) and _are_columns(list(ticks.values()), nullable=True)
        wrong += [] if known else ["ticks"]
    return f"its {wrong[0]} is not what a run leaves" if wrong else None


def outcome(record: dict[str, Any]) -> list[Any]:
    """What came of a run, without where and how fast it was done."""
    return [record.get(name) for name in ("failed", "validation", "test")]


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), each) for name, each in kind.items())
    return is_number(value) if kind is float else isinstance(value, kind)


def _are_columns(columns: list[Any], nullable: bool = False) -> bool:
    """Whether they are lists of numbers, of one length and not empty; null may stand for what was not measured."""
    lengths = {len(column) if isinstance(column, list) else 0 for column in columns}
    full = len(lengths) == 1 and 0 not in lengths
    return full and all(is_number(each) or (nullable and each is None) for column in columns for each in column)


def is_number(value: Any) -> bool:
    """Whether JSON says a number by it, and not infinity or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
