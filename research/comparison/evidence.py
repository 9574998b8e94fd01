"""The evidence: the record of every finished run, found again by what the run was set to."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from granite_scu.config.errors import UserError
from research.comparison.protocol import EVAL_STEPS, PRECISION, TRAINING, VALIDATION_TOKENS, Task
from research.comparison.record import BASE, fault, outcome
from research.laws import LAWS
from research.laws.auto import AUTO, AutoSetpoint
from research.run_store import RunStore

FORMERLY = {"lam": "reg_strength", "lams": "strengths"}
"""Names of fields in the keys of runs."""

VERSION = 2
"""Counts up when the same settings come to mean another run under every law: when the training changes. Those of
``research.tracking`` are then others too."""

LAW_REVISIONS = {
    "kl": 2,  # the KL is over supervised positions alone; of 12,288 in docs-small four are not
    "pi": 2,  # the integral keeps still while the learning rate warms up and S is below S*
}
"""Counts up, from 1, when they come to mean another run under one law: its code changed, or what is measured for it.
The runs of ``research.tracking`` use it as those of the comparison do.

A change that none of the stored runs would show, here or there, needs no other revision. Such were: PI's first tick
below S* teaches the integral nothing; a Kp given without Ki brings its own, of a lag of a tick at least; CPR binds a
matrix once it costs a hundredth of the mean (in its runs of before, which are docs-small at 4e-3, the least has 2.7 %
of it at the tick where it is bound).
"""

AUTO_RULE = 3
"""Counts up when a setpoint of ``auto`` is moved otherwise under the same settings."""

INNER = {"cascade": ("pi",)}
"""Laws that act through another."""


@dataclass(frozen=True)
class Spec:
    """A run with everything settled.

    Attributes:
        task: what it learns from.
        arm, setting: which arm it belongs to, for the file's name and the reader; not part of its identity.
        seed: of the order of the data and the initial adapter.
        settings: dotted configuration keys and their values, the task's among them; ``control.replay`` holds the key of
            a run.
        precision: as the Trainer calls it.
    """

    task: Task
    arm: str
    setting: str
    seed: int
    settings: dict[str, Any]
    precision: str = PRECISION

    @cached_property
    def key(self) -> str:
        """Twelve hex digits that stand for what is trained: equal for equal runs, on every machine."""
        identity = {
            "version": VERSION,
            "task": _identity(self.task),
            "seed": self.seed,
            "settings": {**TRAINING, **self.settings},
            "validation": [EVAL_STEPS, VALIDATION_TOKENS],
            "law": self.law,
            # Only where there is another than the first, so that the keys of all other runs stay as they are.
            **({"revisions": later} if (later := revisions(self.controller)) else {}),
            **({"precision": self.precision} if self.precision != PRECISION else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def controller(self) -> str:
        return str(self.settings["control.controller"])

    @property
    def law(self) -> dict[str, Any]:
        """The controller's gains and bounds: those set, and the product's defaults. With others it is another run."""
        # The inner loop's first, of which a law that has one sets some.
        acting = (*INNER.get(self.controller, ()), self.controller)
        known = [field for law in acting for field in fields(LAWS[law])]
        own = {field.name: field.default for field in known if field.default is not MISSING}
        given = {name: self.settings.get(f"control.{name}", default) for name, default in own.items()}
        rule = {"rule": AUTO_RULE, **asdict(AutoSetpoint())} if self.settings.get("control.target_s") == AUTO else {}
        for gains in (given, rule.get("law", {})):
            if gains.get("lead") == 0:
                del gains["lead"]  # it came later: where a law does not look ahead, keys are what they were
        # Under the names that keys have had from the first.
        return {FORMERLY.get(name, name): value for name, value in (given | rule).items()}

    @property
    def file(self) -> Path:
        """Its file in the folder of finished runs: ``task/arm-setting-s<seed>-<key>.json``."""
        setting = re.sub(r"λ=|S\*=|KL\*=| ", "", self.setting)
        label = "-".join(part for part in (self.arm, setting, f"s{self.seed}", self.key) if part)
        return Path(self.task.name) / f"{label}.json"


def _identity(task: Task) -> dict[str, Any]:
    """What of a task makes it another run. ``held_out`` came later: where it is None, keys are what they were."""
    named = ("name", "settings", *(("held_out",) if task.held_out is None else ()))
    return {name: value for name, value in asdict(task).items() if name not in named}


def revisions(controller: str) -> dict[str, int]:
    """Of a law and the one that acts within it, where they are not the first."""
    return {law: LAW_REVISIONS[law] for law in (*INNER.get(controller, ()), controller) if law in LAW_REVISIONS}


class Evidence:
    """The finished runs of a store in one precision, by key. Those in another one are passed over: on a CPU the
    precision goes with the machine, and no difference between arms shall be one between machines.

    Args:
        folder: of the store; need not exist yet.
        precision: as the Trainer calls it; null takes that of the runs there, and the published one where they
            are in several or there are none.

    Raises:
        UserError: it is no folder, or something in the store is not a record of a run.
    """

    def __init__(self, folder: Path, precision: str | None = None) -> None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--evidence {folder}: is a file; give the folder of the finished runs")
        self.folder, self.store = folder, RunStore("--evidence", folder)
        self.records: dict[str, dict] = {}
        self.places: dict[str, str] = {}
        self.additions = 0
        for run in self.store.read():
            self.add(run.record, run.place)
        known = {precision_of(record) for record in self}
        self.precision = precision or (known.pop() if len(known) == 1 else PRECISION)
        for key in [key for key, record in self.records.items() if precision_of(record) != self.precision]:
            del self.records[key], self.places[key]

    def add(self, record: dict, place: str) -> None:
        """Take in the record of a run; ``place`` says where it is.

        Raises:
            UserError: it is none, or another one of a run that is known, of which something else came.
        """
        if found := fault(record):
            raise UserError(f"--evidence: {place} is not the record of a run, for {found}; move it away")
        known = self.records.get(record["key"], record)
        if outcome(known) != outcome(record):
            other = self.places[record["key"]]
            raise UserError(f"--evidence: {place} and {other} are of one run and differ; move one of them away")
        self.records[record["key"]] = record
        self.places[record["key"]] = place
        self.additions += 1

    def require_one_text(self) -> None:
        """Refuse to compare runs of one task on different text: the corpora come with Python and with numpy.

        Raises:
            UserError: two records of a task disagree on the test documents' tokens, or on the digest of all text.
        """
        first: dict[tuple[str, str], tuple[str, Any]] = {}
        for key, record in self.records.items():
            task = record["arm"] if record["task"] == BASE else record["task"]
            known = {"documents": (record.get("test") or {}).get("tokens"), "digest": record.get("text")}
            for what, found in known.items():
                place, expected = first.setdefault((task, what), (self.places[key], found)) if found else ("", found)
                if found != expected:
                    raise UserError(
                        f"--evidence: {place} and {self.places[key]} are runs of one task on different text, which "
                        "comes with Python and numpy; use one version of both everywhere, and move the others away"
                    )

    def get(self, spec: Spec) -> dict | None:
        return self.records.get(spec.key)

    def __iter__(self) -> Iterator[dict]:
        return iter(self.records.values())


def precision_of(record: dict[str, Any]) -> str:
    """What a run was done in, as the Trainer calls it."""
    return str(record["settings"].get("trainer.precision", PRECISION))
