"""What the record of a finished run holds, and what is wrong with one: a folder of them may come from anywhere."""

import math
from collections.abc import Iterator
from typing import Any

BASE = "base"
"""The task of the runs that train nothing, and score the base model."""

ALWAYS = {"key", "task", "arm", "seed", "settings", "wall_time_s"}
SCORED = {"validation", "test"}
RUN = SCORED | {"law", "ticks", "n_tokens", "steps"}
"""What the record of any run has; that of a base model besides; that of a training run that has not failed."""


def fault(record: dict[str, Any]) -> str | None:
    """Why this is not the record of a run, in words; None where it is one."""
    of_kind = SCORED | {"training"} if record.get("task") == BASE else {"failed"}
    if record.get("task") != BASE and not record.get("failed"):
        of_kind |= RUN
    if missing := (ALWAYS | of_kind) - record.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    wrong = next(_wrong(record), None)
    return f"its {wrong} is not what a run leaves" if wrong else None


def outcome(record: dict[str, Any]) -> list[Any]:
    """What came of a run, without where and how fast it was done."""
    return [record.get(name) for name in ("failed", "validation", "test")]


def _wrong(record: dict[str, Any]) -> Iterator[str]:
    """The entries of another type or size than a run's."""
    is_base = record["task"] == BASE
    right = {name: isinstance(record[name], str) for name in ("key", "task", "arm")}
    right |= {"seed": isinstance(record["seed"], int), "wall_time_s": is_number(record["wall_time_s"])}
    rate = {} if is_base else {"optimizer.learning_rate": float}
    right["settings"] = _is_table(record["settings"], {"control.controller": str, **rate})
    right["git_revision"] = isinstance(record.get("git_revision"), str | None)
    right["machine"] = "machine" not in record or _is_table(record["machine"], {"cpu": str})
    right["versions"] = _is_table(record.get("versions", {}), {})
    right["text"] = isinstance(record.get("text"), str | None)
    if is_base or not record["failed"]:
        adapters = ("final",) if is_base else ("final", "best")
        right["validation"] = _is_table(record["validation"], dict.fromkeys(adapters, float))
        right["test"] = _is_test(record["test"], adapters)
    if not is_base and not record["failed"]:
        right |= {"steps": is_number(record["steps"]), "n_tokens": is_number(record["n_tokens"])}
        right |= {"law": _is_table(record["law"], {}), "ticks": _is_course(record["ticks"])}
    yield from (name for name, is_right in right.items() if not is_right)


def _is_table(value: Any, needed: dict[str, type]) -> bool:
    """Whether it is an object with these entries, numbers (of type float here) or strings."""
    return isinstance(value, dict) and all(
        is_number(value.get(name)) if kind is float else isinstance(value.get(name), kind)
        for name, kind in needed.items()
    )


def _is_test(value: Any, adapters: tuple[str, ...]) -> bool:
    """Whether it has as many scores by each adapter as documents, which all hold tokens."""
    columns = [value.get(name) for name in ("tokens", *adapters)] if isinstance(value, dict) else []
    return _are_columns(columns) and all(is_number(x) for column in columns for x in column) and min(columns[0]) > 0


def _is_course(value: Any) -> bool:
    """Whether it has a value for each tick, null where nothing was measured."""
    if not isinstance(value, dict) or not {"step", "s", "lambda"} <= value.keys():
        return False
    columns = list(value.values())
    known = all(map(is_number, [*value["step"], *value["lambda"]])) if _are_columns(columns) else False
    return known and all(each is None or is_number(each) for column in columns for each in column)


def _are_columns(columns: list[Any]) -> bool:
    """Whether they are lists of one length, and not empty."""
    return bool(columns) and all(isinstance(c, list) and c and len(c) == len(columns[0]) for c in columns)


def is_number(value: Any) -> bool:
    """Whether JSON says a number by it, and not infinity or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
