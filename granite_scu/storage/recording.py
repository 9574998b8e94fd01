"""Reading the recording of a run: its lambda at every tick, for a replay."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from granite_scu.config.untrusted_input import parse_json
from granite_scu.control.laws.base import require
from granite_scu.storage.run_folder import CONTROL_CONFIG, HISTORY, HISTORY_LINES

INITIAL = "initial_strength"
"""What a run's configuration calls the lambda before its first tick."""
LARGEST = 1e30
"""The largest lambda that fp32 still holds with something to spare."""


def read_recording(
    path: str | Path, total_steps: int | None = None, every: int = 1, acting: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields ``steps``, ``lams`` and ``initial`` of a ``Replay`` of a recorded run.

    Args:
        path: a run folder, its scu_history.json, or the scu_history.jsonl that a crashed run leaves.
        total_steps: optimizer steps of the run that is to replay it; None leaves the length unchecked.
        every: optimizer steps between its ticks; the recording may end so many before the run does.
        acting: how lambda acts in the run that is to replay it, by ``actuator`` and ``measure``: the same number means
            another thing under another of them. None, or a recording without a configuration, leaves it unchecked.

    Raises:
        ValueError: there is no such file, it holds something else, is too short, its lambda acted otherwise, or it is
            of a projection, which sets none.
    """
    history = _find(Path(path).expanduser())
    settings = _settings(history.with_name(CONTROL_CONFIG))
    projected = str(settings.get("controller")).rpartition(":")[2].lower() == "projection"
    require(not projected, "is of a projection, which sets no lambda; give a run of another controller")
    for name, here in (acting or {}).items():
        there = settings.get(name, here)
        remedy = f"and this run has {here}; give --{name} {there}"
        require(there == here, f"its lambda is one for --{name} {there}, {remedy}")
    records = _load(history)
    require(isinstance(records, list) and records != [], f"{history.name} holds no records; give a run that has ticked")
    steps, lams = zip(*(_tick(record, number) for number, record in enumerate(records, 1)), strict=True)
    for number, (before, after) in enumerate(pairwise(steps), 2):
        require(before <= after, f"record {number} is of step {after}, after one of step {before}; give another run's")
    if total_steps is not None and steps[-1] + every < total_steps:
        raise ValueError(
            f"it ends at step {steps[-1]}, short of this run's {total_steps}; "
            f"set --max-steps {steps[-1]}, or replay a longer run"
        )
    return {"steps": steps, "lams": lams, "initial": _initial(settings, lams[0])}


def recorded_weight(path: str | Path) -> float | None:
    """sigma^2 N of a recorded run: what the penalty of its lambda was divided by. None where nothing says it."""
    settings = _settings(_find(Path(path).expanduser()).with_name(CONTROL_CONFIG))
    sigma, n_tokens = settings.get("prior_sigma"), settings.get("n_tokens")
    return float(sigma**2 * n_tokens) if _is_number(sigma) and _is_number(n_tokens) else None


def _find(path: Path) -> Path:
    candidates = [path / HISTORY, path / HISTORY_LINES] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    missing = f"holds no {HISTORY}" if path.is_dir() else "no such file or folder"
    raise ValueError(f"{missing}; give a run folder or its {HISTORY}")


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in text.split("\n")[:-1]]  # a crash may have torn the last one
        return parse_json(text)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); give a run folder or its {HISTORY}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON; give a run folder or its {HISTORY}") from error


def _tick(record: Any, number: int) -> tuple[int, float]:
    """Step and lambda of a record."""
    known = isinstance(record, Mapping) and {"step", "lambda"} <= record.keys()
    require(known, f"record {number} has no step or no lambda; give the {HISTORY} of a run of this program")
    step, lam = record["step"], record["lambda"]
    whole = _is_number(step) and step == int(step)
    require(whole and step >= 0, f"record {number}: its step {step!r} is no whole number from 0 to {LARGEST:g}")
    # The comparison also refuses NaN, which json reads though JSON has none.
    valid = _is_number(lam) and lam >= 0
    require(valid, f"record {number}: its lambda {lam!r} is no number from 0 to {LARGEST:g}; give another run's")
    return int(step), float(lam)


def _is_number(value: Any) -> TypeGuard[float]:
    # Compared, and not asked with isfinite, which a whole number of a thousand digits overflows; NaN compares false.
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _settings(config: Path) -> Mapping[str, Any]:
    """The run's configuration; empty without one."""
    settings = _load(config) if config.is_file() else {}
    return settings if isinstance(settings, Mapping) else {}


def _initial(settings: Mapping[str, Any], first: float) -> float:
    """Lambda before the first tick, as the run's configuration has it; without one, that of the first tick."""
    found = settings.get(INITIAL, settings.get("lambda_init"))
    if found is None:
        return first
    valid = _is_number(found) and found >= 0
    require(
        valid, f"its lambda before the first tick, {found!r} in {CONTROL_CONFIG}, is no number from 0 to {LARGEST:g}"
    )
    return float(found)
