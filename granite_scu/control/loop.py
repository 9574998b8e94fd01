"""The control loop, whoever trains: at each tick measure S, update the law, let lambda act, record.

``GraniteModule`` under Lightning and ``TrainerPlant`` under transformers are its plants.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Protocol

from granite_scu.control.laws.base import Controller, Measurement, Output, Sensor, as_stored, restored

SKIPPED_IN_A_ROW = 50
"""Optimizer steps without one finite among them after which a run has failed."""

AT_REST = 1e-3
"""A lambda that holds drift moves nothing here, the usual lower bound: it acts as 0, for an anchor costs time."""


@dataclass(frozen=True)
class Window:
    """What happened over the optimizer steps since the last reading, over all processes.

    Attributes:
        nats: summed cross-entropy of the applied steps.
        tokens: supervised tokens of the applied steps.
        applied: optimizer steps that changed the weights.
        skipped: optimizer steps left out because a loss or gradient was not finite.
        lr_sum: sum of the learning rates of the applied steps.
        s: ParamBPT / (DataBPT + ParamBPT).
        data_bpt: cross-entropy in bits per token; NaN when no step was applied.
        param_bpt: bits per token that describe the adapter now.
        layer_bpt: the same of each adapted matrix.
        grad_norm: of the last step, data and penalty together, before clipping.
        data_grad_norm: of the cross-entropy alone.
        penalty_grad_norm: of what lambda multiplies alone: ParamNPT, or drift.
    """

    nats: float
    tokens: int
    applied: int
    skipped: int
    lr_sum: float
    s: float
    data_bpt: float
    param_bpt: float
    layer_bpt: tuple[float, ...]
    grad_norm: float
    data_grad_norm: float
    penalty_grad_norm: float


class Plant(Protocol):
    """What is controlled. Every process calls the same in the same order, and is told the same to the bit."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    def set_regularisation(self, lam: float, layers: tuple[float, ...] | None, param_bound: float | None) -> None:
        """Train on under this lambda, these of each adapted matrix in its place, and this bound in bits per token."""

    def counts(self) -> tuple[int, int]:
        """Optimizer steps applied since the last reading, and the newest ones that were skipped, in a row up to now."""

    def read_window(self) -> Window:
        """Read and reset what was counted since the last reading."""


@dataclass(frozen=True)
class Action:
    """What a law has a plant do, as the fields of ``Output`` of these names."""

    lam: float
    layers: tuple[float, ...] | None = None
    param_bound: float | None = None


class ControlLoop:
    """One law in one run: every ``every`` applied optimizer steps (a tick) it measures S and sets the plant's lambda.

    Which steps were applied and which skipped, only the device knows. It is asked when a tick would be due if all
    were applied, and when 50 might have been skipped in a row; what was skipped is made up for before the tick.

    Args:
        law: the controller.
        every: applied optimizer steps between ticks.
        drift: measures drift for the law, in the place of a measurement of S; lambda then multiplies drift.

    Attributes:
        action: in force.
        latest: the record of the newest tick, as ``scu_history.json`` has it.
        step: optimizer steps done.
        tokens, skipped, ticks: of the run up to the newest tick.
        lr_sum: sum of the learning rates of all applied steps up to it.
        failing: the most steps that may have been skipped in a row up to now; exact from ``SKIPPED_IN_A_ROW`` on.
        rate: the learning rate of the newest optimizer step; whoever trains tells it.
        sensor: what the law measures beside S; None where that is nothing.
    """

    def __init__(
        self, law: Controller[Any], every: int, drift: Callable[[Measurement], Measurement] | None = None
    ) -> None:
        self.law, self.every, self.drift = law, every, drift
        self.law_state = law.init()
        make = getattr(law, "sensor", None)
        self.sensor: Sensor | None = make() if make else None
        self.action = Action(law.lambda_start)
        self.latest: dict[str, Any] = {}
        self.step = self.tokens = self.skipped = self.ticks = self.failing = 0
        self.lr_sum = 0.0
        self.rate: float | None = None
        self._pending = 0  # steps since the last tick, without those that are known to have been skipped

    def start(self, plant: Plant, step: int) -> None:
        """Act as before the first tick, or as the checkpoint of ``step`` says."""
        self.step = step
        plant.set_regularisation(*astuple(self.action))

    def after_step(self, plant: Plant, step: int) -> bool:
        """Count an optimizer step, the ``step``-th of the run; returns whether a tick is due."""
        self.step = step
        self._pending, self.failing = self._pending + 1, self.failing + 1
        if self._pending >= self.every or self.failing >= SKIPPED_IN_A_ROW:
            self._pending, self.failing = plant.counts()
        return self._pending >= self.every

    @property
    def unread(self) -> bool:
        """Whether steps were taken since the newest tick; a run that ends so needs one more."""
        newest: int = self.latest.get("step", 0)
        return self.step > newest

    @property
    def failure(self) -> str:
        """What says that the run has failed, for want of a finite step; empty where it has not."""
        if self.failing >= SKIPPED_IN_A_ROW:
            return f"step {self.step}: loss or gradient was not finite in {self.failing} optimizer steps in a row"
        # Before its end a run ticks only after applied steps.
        return "loss or gradient was finite in no optimizer step" if 0 < self.skipped == self.step else ""

    def tick(self, plant: Plant) -> Window:
        """Measure, update the law, act and record in ``latest``; returns what was read of the steps."""
        window = plant.read_window()
        self._pending = 0
        self.tokens += window.tokens
        self.skipped += window.skipped
        self.lr_sum += window.lr_sum
        measured = self._measure(plant, window)
        seen = self.drift(measured) if self.drift else measured
        self.law_state, output = self.law.update(self.law_state, seen)
        self.action = self.action_of(output)
        plant.set_regularisation(*astuple(self.action))
        self.latest = self._record(window, measured, seen, output)
        self.ticks += 1
        return window

    def _measure(self, plant: Plant, window: Window) -> Measurement:
        return Measurement(
            s=window.s,
            data_bpt=window.data_bpt,
            param_bpt=window.param_bpt,
            layers=window.layer_bpt,
            step=self.step,
            progress=min(1.0, self.step / plant.total_steps),
            lr_sum=self.lr_sum,
            sensed=self.sensor.read(plant) if self.sensor else {},
        )

    def action_of(self, output: Output) -> Action:
        """What the output has the plant do."""
        # A lambda that begins at a bound is right to a rounding.
        fell = output.lam < (1 - 1e-9) * self.law.lambda_start
        rests = self.drift and output.saturated and fell and output.lam <= (1 + 1e-9) * AT_REST
        return Action(0.0 if rests else output.lam, output.layers, output.param_bound)

    def _record(self, window: Window, measured: Measurement, seen: Measurement, output: Output) -> dict[str, Any]:
        setpoint = self.law.setpoint
        if self.drift and setpoint is not None:
            told = as_drift_record(measured, seen, output, setpoint)
        else:
            told = as_record(measured, output, setpoint)
        return {
            "step": self.step,
            "tokens": self.tokens,
            **told,
            "lr": self.rate,
            "grad_norm": window.grad_norm,
            "data_grad_norm": window.data_grad_norm,
            "penalty_grad_norm": window.penalty_grad_norm,
            "skipped": self.skipped,
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run continues from; also by way of JSON. The same in every process."""
        return {
            "name": type(self.law).__name__,
            "setpoint": self.law.setpoint,
            "controller": as_stored(asdict(self.law_state)),
            "action": as_stored(asdict(self.action)),
            "counts": [self.tokens, self.skipped, self._pending],
            "travel": self.lr_sum,
            "latest": self.latest,
            "ticks": self.ticks,
            "sensor": self.sensor and self.sensor.state(),
            "learning_rate": self.rate,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self.law_state = restored(self.law.init(), state["controller"])
        self.action = restored(self.action, state["action"])
        self.tokens, self.skipped, self._pending = state["counts"]
        self.lr_sum, self.latest, self.ticks = state["travel"], state["latest"], state["ticks"]
        self.rate = state["learning_rate"]
        if self.sensor and state.get("sensor"):
            self.sensor.restore(state["sensor"])


def as_record(measured: Measurement, output: Output, setpoint: float | None) -> dict[str, Any]:
    """What a tick has seen and decided, by the names that ``scu_history.json`` has.

    Args:
        measured: what it has seen.
        output: what it has decided.
        setpoint: the controller's own S*, for outputs without one.
    """
    return {
        "data_bpt": measured.data_bpt,
        "param_bpt": measured.param_bpt,
        "s": measured.s,
        "s_ema": output.smoothed,
        "s_target": setpoint if output.setpoint is None else output.setpoint,
        "error": output.error,
        "lambda": output.lam,
        "p_term": output.p_term,
        "i_term": output.i_term,
        "saturated": output.saturated,
        "held": output.held,
        "in_deadband": output.in_deadband,
        **measured.sensed,
    }


def as_drift_record(measured: Measurement, seen: Measurement, output: Output, setpoint: float) -> dict[str, Any]:
    """The same where the law holds drift: S is measured, and held at nothing.

    Args:
        measured: of S.
        seen: what the law has seen of drift, which is to the base's bits as ParamBPT is to DataBPT.
        output: what it has decided.
        setpoint: the budget p, as the law has it: p / (1 + p).
    """
    return {
        **as_record(measured, replace(output, smoothed=None), None),
        "drift_bpt": seen.param_bpt,
        "drift": seen.param_bpt / seen.data_bpt if seen.data_bpt > 0 else None,
        "drift_target": setpoint / (1 - setpoint),
    }
