"""Runs side by side: those that differ in their seed alone belong together, the others have different names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np

from granite_scu.control.units import per_cent
from granite_scu.viz import style
from granite_scu.viz.run_folder import Run, readable
from granite_scu.viz.words import flat, section

_COMPARED = ("base", "lora", "optimizer", "prior", "data", "control", "drift", "trainer")
"""What of a run's settings may set it apart; where it ran, and where it was written to, may not."""
_COMPARED_TOO = ("run.early_stopping", "run.stop_at_equilibrium", "plan.tokens_per_step", "machine.precision")
"""Of the rest: what ends a run, what a step is, of which processes are a part, and what ``auto`` became."""
_NOT_COMPARED = ("data.num_workers", "data.cache_dir")
"""Of those: what changes no number."""
_SHORT = {"optimizer.learning_rate": "lr", "trainer.max_steps": "steps", "data.train_tokens": "tokens"}
_LONGEST = 40
"""Characters of a label beyond which runs that differ in much are told apart by their folders' names."""
_DASHES = ((None, None), (5, 2), (2, 1.5), (7, 2, 1.5, 2))
_LONE = (style.VERMILION, style.INK, style.BLUE, style.PURPLE, style.GREEN)
_SHADES = (("plasma", 0.0, 0.63), ("copper_r", 0.37, 1.0), ("Greys", 0.52, 0.95))
"""Of a family of groups, and from where to where: what is lighter could not be seen on white."""

Course = tuple[np.ndarray, np.ndarray]
"""(ticks,) steps, ascending, and (ticks,) values."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, and how they are drawn.

    Attributes:
        label: what sets the group apart.
        runs: at least one.
        colour: of its lines and points.
        dashes: of its lines, as matplotlib takes them.
    """

    label: str
    runs: tuple[Run, ...]
    colour: Any
    dashes: tuple[float | None, ...]

    def course(self, of: Callable[[Run], Course]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(steps,) the steps of any run, with median, least and greatest value over the runs that have one there."""
        courses = [of(run) for run in self.runs]
        steps = np.unique(np.concatenate([steps for steps, _ in courses]))
        table = np.full((len(courses), len(steps)), np.nan)
        for row, (at, values) in zip(table, courses, strict=True):
            row[np.searchsorted(steps, at)] = values
        there = np.isfinite(table).any(axis=0)
        table, steps = table[:, there], steps[there]
        return steps, *(
            (reduce(table, axis=0) if steps.size else np.empty(0)) for reduce in (np.nanmedian, np.nanmin, np.nanmax)
        )  # type: ignore[return-value]


def group(runs: Sequence[Run]) -> list[Group]:
    """The groups, by controller in the order given, and of one controller by its setpoint or lambda."""
    settings = [_settings(run) for run in runs]
    varied = [
        name
        for name in dict.fromkeys(name for each in settings for name in each)
        if len({repr(each.get(name)) for each in settings}) > 1
    ]
    members: dict[tuple[str, ...], list[int]] = {}
    for index, each in enumerate(settings):
        key = (*_law(runs[index]), *(repr(each.get(name)) for name in varied))
        members.setdefault(tuple(map(str, key)), []).append(index)
    controllers = list(dict.fromkeys(_controller(run) for run in runs))

    def order(indices: list[int]) -> tuple[int, float]:
        run = runs[indices[0]]
        _, target, lam = _law(run)
        level = next((float(value) for value in (target, lam) if isinstance(value, int | float)), 0.0)
        return controllers.index(_controller(run)), level

    found = sorted(members.values(), key=order)
    names = [_label(runs[indices[0]], settings[indices[0]], varied) for indices in found]
    families = [[k for k, indices in enumerate(found) if _controller(runs[indices[0]]) == name] for name in controllers]
    names = _told_apart(names, [runs[indices[0]] for indices in found])
    looks = _looks(families)
    return [
        Group(
            f"{name} ({len(indices)} runs)" if len(indices) > 1 else name,
            tuple(runs[index] for index in indices),
            *looks[k],
        )
        for k, (name, indices) in enumerate(zip(names, found, strict=True))
    ]


def _looks(families: Sequence[Sequence[int]]) -> dict[int, tuple[Any, tuple[float | None, ...]]]:
    """Colour and dashes of every group: a shade for each member of a family, one strong colour for a lone one."""
    looks: dict[int, tuple[Any, tuple[float | None, ...]]] = {}
    lone, shades = iter(_LONE * 4), iter(_SHADES * 4)
    for number, family in enumerate(families):
        dashes = _DASHES[number % len(_DASHES)]
        if len(family) == 1:
            looks[family[0]] = (next(lone), dashes)
            continue
        name, least, most = next(shades)
        for member, at in zip(family, np.linspace(least, most, len(family)), strict=True):
            looks[member] = (matplotlib.colormaps[name](at), dashes)
    return looks


def _settings(run: Run) -> dict[str, Any]:
    """What was asked for, without what ``_law`` tells or the controller does not use."""
    groups = ((name, run.settings.get(name)) for name in _COMPARED)
    found = dict(flat({name: values for name, values in groups if isinstance(values, dict)}))
    found |= {name: section(run.settings, name.split(".")[0]).get(name.split(".")[1]) for name in _COMPARED_TOO}
    told = {"control.controller", "control.target_s", *(["drift.max_drift"] if run.holds_drift else [])}
    if _controller(run) in ("fixed", "none"):
        told.add("control.lambda_init")
    return {name: value for name, value in found.items() if name not in told and not name.startswith(_NOT_COMPARED)}


def _controller(run: Run) -> str:
    return str(run.config.get("controller", "controller unknown"))


def _law(run: Run) -> tuple[Any, ...]:
    """Controller, setpoint or budget of drift, and constant lambda, as run: a setting counts where the law uses it."""
    held = float(run.column("drift_target")[-1]) if run.holds_drift else run.config.get("target_s")
    lam = run.column("lambda")
    lam = lam[np.isfinite(lam)]
    return _controller(run), held, float(lam[0]) if _controller(run) == "fixed" and lam.size else None


def _label(run: Run, settings: Mapping[str, Any], varied: Iterable[str]) -> str:
    controller, target, lam = _law(run)
    parts = [controller]
    if isinstance(target, int | float):
        parts.append(f"{'drift ≤' if run.holds_drift else 'S* ='} {per_cent(target)}")
    if lam is not None:
        parts.append(f"λ = {lam:g}")
    apart = [f"{_SHORT.get(name, name.split('.')[-1])} {_word(settings.get(name))}" for name in varied]
    label = ", ".join(parts + apart)
    return label if len(label) <= _LONGEST else ", ".join([*parts, run.name[:_LONGEST]])


def _told_apart(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """The names, and with equal ones as much of the ends of their folders' paths as tells them apart."""
    apart = list(names)
    for name in {name for name in names if names.count(name) > 1}:
        same = [k for k, each in enumerate(names) if each == name]
        paths = [runs[k].path.resolve().parts for k in same]
        lengths = range(1, max(map(len, paths)))
        length = next((n for n in lengths if len({path[-n:] for path in paths}) == len(paths)), 0)
        for k, path in zip(same, paths, strict=True):
            shared = name.removesuffix(f", {runs[k].name[:_LONGEST]}")
            apart[k] = f"{shared}, {readable('/'.join(path[-length:]))}"
    return apart


def _word(value: Any) -> str:
    """A setting in words; of a path its last name."""
    if isinstance(value, list):
        return "+".join(map(_word, value))
    if isinstance(value, str):
        return value.rstrip("/").rsplit("/", 1)[-1]
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
