"""Says, once, when the setpoint turns out to be beyond what lambda can reach. The run continues."""

import logging
import math
from dataclasses import asdict

import lightning as L

from granite_scu.control.diagnostics.reachability import Observation, Reachability
from granite_scu.control.units import per_cent
from granite_scu.training.callbacks.shannon_control import ControlTick, penalty_share, rests_at
from granite_scu.training.learning_rate import PlannedRates

log = logging.getLogger(__name__)


class ReachabilityMonitor(L.Callback):
    """Shows every tick to ``law`` and logs what changes in its verdict.

    Args:
        law: the judgement.
        bounds: of lambda, lower and upper.
        planned: the learning rates to the end of the run. Where the run continues one with another schedule they are
            those of the steps to come.
        in_gradient: whether lambda acts through the gradient, so that the norms tell how much.
    """

    def __init__(
        self,
        law: Reachability,
        bounds: tuple[float, float],
        planned: PlannedRates,
        in_gradient: bool = True,
    ) -> None:
        self.law, self.planned, self.in_gradient = law, planned, in_gradient
        self.low, self.high = bounds
        self.state = law.init()

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: L.LightningModule) -> None:
        record = tick.record
        before, self.state = self.state, self.law.update(self.state, self._sight(tick))
        if not trainer.is_global_zero:
            return
        if self.state.side is not None and self.state.side != before.side:
            log.warning("step %d: %s", record["step"], self.law.advice(self.state, self.low, self.high))
        elif self.state.side is None and before.side is not None:
            log.info("step %d: S* = %s is in reach again", record["step"], per_cent(self.law.setpoint))

    def _sight(self, tick: ControlTick) -> Observation | None:
        record, moved = tick
        values = (record["s_ema"], record["data_bpt"], record["param_bpt"], moved)
        if record["held"] or any(value is None or not 0 < value < math.inf for value in values):
            return None
        return Observation(
            step=record["step"],
            s=record["s_ema"],
            data_bpt=record["data_bpt"],
            param_bpt=record["param_bpt"],
            at_low=rests_at(record, self.low),
            at_high=rests_at(record, self.high),
            penalty_share=penalty_share(record) if self.in_gradient else None,
            moved=moved,
            moved_at_end=moved + self.planned.after(self.planned.steps) - self.planned.after(record["step"]),
        )

    def summary(self) -> dict:
        """What ``scu_metrics.json`` says about it."""
        return self.law.summary(self.state, self.low, self.high)

    def state_dict(self) -> dict:
        return asdict(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = self.law.restore(state)
