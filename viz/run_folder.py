"""Reading a run folder, of a run that is finished or still under way."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FINISHED = "scu_history.json"
UNFINISHED = "scu_history.jsonl"


@dataclass(frozen=True)
class Run:
    """What a run folder tells.

    Attributes:
        path: the folder.
        history: one record a tick, in the order of the run; at least one.
        config: the controller as run (``scu_config.json``); empty where there is none yet.
        metrics: the summary (``scu_metrics.json``); empty where there is none yet.
        finished: whether the run came to its end.
    """

    path: Path
    history: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    metrics: dict[str, Any]
    finished: bool

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def column(self, field: str) -> np.ndarray:
        """(ticks,) a field of every record as float64: NaN where it was not measured, 0 and 1 for false and true."""
        return numbers([record.get(field) for record in self.history])


def numbers(values: list[float | None]) -> np.ndarray:
    """The values as float64, with NaN for null, which JSON has in its place."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        ValueError: the folder holds no run, no tick is recorded yet, or a file in it is damaged.
    """
    folder = Path(path)
    finished = (folder / FINISHED).is_file()
    if not finished and not (folder / UNFINISHED).is_file():
        reason = f"has neither {FINISHED} nor {UNFINISHED}" if folder.is_dir() else "no such folder"
        raise ValueError(f"{folder}: {reason}; name the --output-dir of a run")
    history = _read_list(folder / FINISHED) if finished else _read_lines(folder / UNFINISHED)
    if not history:
        raise ValueError(f"{folder}: no tick is recorded yet; the first comes after --control-every optimizer steps")
    config, metrics = (_read_object(folder / name) for name in ("scu_config.json", "scu_metrics.json"))
    return Run(folder, tuple(history), config, metrics, finished)


def _read_list(file: Path) -> list[dict[str, Any]]:
    records = _parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(records, list) or not all(map(_is_record, records)):
        raise ValueError(f"{file}: not a list of records with a step")
    return records


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The appended records. A line without its end is one being written, or torn by a crash: it is left out."""
    *lines, _ = file.read_bytes().split(b"\n")
    records = [_parse(line.decode("utf-8"), f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not all(map(_is_record, records)):
        raise ValueError(f"{file}: not one record with a step in each line")
    return records


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int)


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = _parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(content, dict):
        raise ValueError(f"{file}: not an object")
    return content


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); the file is damaged") from error
