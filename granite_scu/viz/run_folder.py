"""Reading a run folder, of a run that is finished, under way, or cut off."""

import csv
import io
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import read_file
from granite_scu.storage.run_folder import (
    ANSWERS,
    CONTROL_CONFIG,
    CSV_LOG,
    ELSEWHERE,
    EVALUATION,
    HISTORY,
    HISTORY_LINES,
    LOG_FILES,
    METRICS,
    SAMPLES,
    STOPPED,
    TRAINING_CONFIG,
    RunFolder,
    csv_legs,
    read_if_there,
    unreadable,
)

BAND = 0.10
"""Half width of the band around the setpoint, relative to it, in which S counts as held."""


@dataclass(frozen=True)
class Run:
    """What a run folder tells.

    Attributes:
        path: the folder.
        history: one record a tick, in the order of the run; at least one.
        config: the controller as run (``scu_config.json``); empty where there is none yet.
        metrics: the summary (``scu_metrics.json``); empty where there is none yet.
        finished: whether the run came to its end.
        settings: everything that was asked for and found (``training_config.json``); empty where it is missing.
        validations: (optimizer step, bits per token on the validation sample), in the order of the run.
        warnings: what the run's log has at the level of a warning or above, and the notes of its start.
        chosen: settings that the data decided, a line each with why.
        evaluation: what ``granite-scu eval`` found (``eval_bpt.json``); empty where it was not run.
        stopped: the signal that stopped it, and the step (``stopped.json``); empty where none did.
        samples: what base model and adapter made of test documents (``samples.json``); empty where there is none.
        answers: what both answered to the questions of held-out chats (``answers.json``); empty where there is none.
        elsewhere: what both answered to general questions (``elsewhere.json``); empty where there is none.
        failure: the error that its log ends with; empty where it ends otherwise.
    """

    path: Path
    history: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    metrics: dict[str, Any]
    finished: bool
    settings: dict[str, Any] = field(default_factory=dict)
    validations: tuple[tuple[int, float], ...] = ()
    warnings: tuple[str, ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    failure: str = ""

    @property
    def name(self) -> str:
        """The folder's own name, printable whatever it is."""
        return readable(self.path.resolve().name)

    @property
    def title(self) -> str:
        """Its name and controller, and whether it came to its end."""
        controller = self.config.get("controller")
        parts = [self.name, f"controller {controller}" if isinstance(controller, str) else ""]
        return ", ".join(part for part in parts if part) + ("" if self.finished else " (unfinished)")

    def column(self, field: str) -> np.ndarray:
        """(ticks,) a field of every record as float64: NaN where it was not measured, 0 and 1 for false and true."""
        try:
            return numbers([record.get(field) for record in self.history])
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: {field} is not a number in every record of the history") from error

    @property
    def pair(self) -> dict[str, Any]:
        """What ``granite-scu eval`` found of adapter less base; empty where it did not."""
        pairs = self.evaluation.get("pairs")
        return pairs[0] if isinstance(pairs, list) and pairs and isinstance(pairs[0], dict) else {}

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to continue from."""
        return any(self.path.glob("checkpoint-*"))

    @property
    def uses_setpoint(self) -> bool:
        """Whether there is a setpoint that S was to hold or to follow."""
        return bool(np.isfinite(self.column("s_target")).any())

    @property
    def holds_drift(self) -> bool:
        """Whether the controller held drift, and not S."""
        return "drift" in self.history[-1]

    @property
    def drift_path(self) -> tuple[tuple[int, float, float], ...]:
        """(optimizer step, share of drift, bits per token): what was learned against how far the model drifted.

        At validations, with drift at the latest tick; of a run with fewer than two, at ticks, on training text.
        """
        if self.validates_drift:
            return self._validated_drift
        ticks = zip(*(self.column(name).tolist() for name in ("step", "drift", "data_bpt")), strict=True)
        return tuple((int(step), *values) for step, *values in ticks if all(map(math.isfinite, values)))

    @property
    def validates_drift(self) -> bool:
        """Whether ``drift_path`` is that of its validations."""
        return len(self._validated_drift) > 1

    @property
    def _validated_drift(self) -> tuple[tuple[int, float, float], ...]:
        steps, drifts = (self.column(name) for name in ("step", "drift"))
        latest = [(step, drifts[steps <= step], bits) for step, bits in self.validations if math.isfinite(bits)]
        return tuple((step, float(of[-1]), bits) for step, of, bits in latest if of.size and math.isfinite(of[-1]))

    @property
    def kept_step(self) -> int | None:
        """The step whose adapter the run left; None where there is no summary."""
        best, last = self.metrics.get("best_val_step"), self.metrics.get("steps")
        return last if best is None else best

    @property
    def kept_drift(self) -> float | None:
        """The share of drift, on text that the loop did not see, of the adapter that the run left."""
        drift = self.metrics.get("drift")
        share = drift.get("share") if isinstance(drift, dict) else None
        return share if isinstance(share, float) else None  # a file may be damaged

    @property
    def kept_places(self) -> list[tuple[float, float]]:
        """Drift, on text that the loop did not see, and bits of the adapter that the run left; on ``drift_path`` where
        that is not of validations."""
        share, bits = self.kept_drift, self.metrics.get("best_val_bpt")
        if self.validates_drift and share is not None and isinstance(bits, float):
            return [(share, bits)]
        scale = self.metrics["drift"].get("scale") if share is not None else None
        if isinstance(scale, float) and scale < 1:  # the path is of the adapter before that
            return []
        return [place[1:] for place in self.drift_path if place[0] == self.kept_step]

    @property
    def measured(self) -> bool:
        """Whether any tick has a usable measurement."""
        return bool(np.isfinite(np.concatenate([self.column("s"), self.column("data_bpt")])).any())


def readable(name: str) -> str:
    """A name with the codes of its characters that cannot be printed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def numbers(values: list[float | None]) -> np.ndarray:
    """The values as float64, with NaN for null, which JSON has in its place."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: the folder holds no run, no tick is recorded yet, or a file in it is damaged.
    """
    folder = Path(path)
    finished = not (folder / HISTORY_LINES).is_file()  # a run that continues writes it first
    if finished and not (folder / HISTORY).is_file():
        reason = f"has neither {HISTORY} nor {HISTORY_LINES}" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {reason}; name the --output-dir of a run")
    history = RunFolder(folder).read_history()
    if not all(map(_is_record, history)):
        raise UserError(f"{folder / (HISTORY if finished else HISTORY_LINES)}: not records of ticks, each with a step")
    if not history:
        raise UserError(f"{folder}: no tick is recorded yet; the first comes after --control-every optimizer steps")
    names = (CONTROL_CONFIG, METRICS, TRAINING_CONFIG, EVALUATION)
    config, metrics, settings, evaluation = (read_if_there(folder / name) for name in names)
    shown = (read_if_there(folder / name) for name in (STOPPED, SAMPLES, ANSWERS, ELSEWHERE))
    validations = read_validations(folder, metrics)
    warnings, *told = _read_log(folder)
    return Run(
        folder, tuple(history), config, metrics, finished, settings, validations, warnings, evaluation, *shown, *told
    )


def read_measured_run(path: str | Path) -> Run:
    """``read_run`` for a command that draws.

    Raises:
        UserError: as ``read_run``, and where no tick has a usable measurement.
    """
    run = read_run(path)
    if not run.measured:
        ticks = f"{len(run.history)} tick{'s' if len(run.history) > 1 else ''}"
        raise UserError(
            f"{run.path}: nothing was measured in its {ticks}, S is null throughout, so there is nothing to draw; "
            f"the log file in {run.path / 'logs'} may say why (a loss that is not finite: lower --learning-rate)"
        )
    return run


def read_validations(folder: Path, metrics: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """(optimizer step, bits) of each validation, from the CSV log, of which a resumed run has a file for each leg; of
    the last step from the summary."""
    found: dict[int, float] = {}
    for begun, leg in csv_legs(folder):  # each did again what came after its checkpoint
        found = {step: value for step, value in found.items() if step <= begun}
        if (file := leg / CSV_LOG).exists():
            found |= _read_csv(file)
    last, value = metrics.get("steps"), metrics.get("final_val_bpt")
    if isinstance(last, int) and isinstance(value, float | int):
        found.setdefault(last, float(value))
    return tuple(sorted(found.items()))


def _read_csv(file: Path) -> dict[int, float]:
    text = _content(file).decode("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]  # a line without its end was torn by a crash
    rows = (row for row in csv.DictReader(io.StringIO(whole)) if row.get("val_bpt"))
    try:
        # The logger counts a step as done only after its validation.
        return {int(row["step"]) + 1: float(row["val_bpt"]) for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: not the CSV log of a run ({error}); the file is damaged") from error


_ENTRY = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) ", re.MULTILINE)
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_NOTE, _CHOSEN = "note: ", "chosen: "
"""How the log begins what a run says of its settings."""


def _read_log(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Warnings and notes, and what was chosen; what a resumed run said again, once. And the error that it ends with."""
    files = [folder / name for name in LOG_FILES.values() if (folder / name).is_file()]
    text = "".join(_content(file).decode(errors="replace") for file in files)
    entries = list(_ENTRY.finditer(text))
    ends = [*(entry.start() for entry in entries[1:]), len(text)][: len(entries)]
    said = [(entry["level"], text[entry.end() : end].strip()) for entry, end in zip(entries, ends, strict=True)]
    warnings = [words.removeprefix(_NOTE) for level, words in said if level in _LEVELS or words.startswith(_NOTE)]
    chosen = [words.removeprefix(_CHOSEN) for _, words in said if words.startswith(_CHOSEN)]
    failure = said[-1][1] if said and said[-1][0] == "ERROR" else ""
    return tuple(dict.fromkeys(warnings)), tuple(dict.fromkeys(chosen)), failure


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("step"), int)
        and all(isinstance(each, str | int | float | None) for each in value.values())
    )


def _content(file: Path) -> bytes:
    try:
        return read_file(file)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
