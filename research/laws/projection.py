"""Projection: the update is scaled onto the size that the setpoint implies, and no lambda is needed."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from granite_scu.control.laws.base import Measurement, Output, check
from granite_scu.control.laws.filter import Ema, read


@dataclass(frozen=True)
class ProjectionState:
    """What one tick leaves to the next.

    Attributes:
        ema: filter of ln S, for the log.
        data: filter of DataBPT.
        output: the last output that was not held; a tick without a valid measurement repeats it.
    """

    ema: Ema
    data: Ema
    output: Output


@dataclass(frozen=True)
class Projection:
    """S = P / (D + P) at its setpoint means P = D S* / (1 - S*). With D = EMA(DataBPT), each tick sets that as

        param_bound = D S* / (1 - S*)        bits per token

    and after every optimizer step an update that costs more is scaled down onto it; lambda is 0. This tracks S*
    without a controller, so it tells what feedback adds: an arm of the comparison. Before the first valid tick nothing
    is bound.

    Attributes:
        setpoint: S*, a ratio in (0, 1).
        ema_alpha: weight of the newest measurement in both filters, in (0, 1]; 1 does not smooth.
    """

    refuses: ClassVar[dict[str, str]] = {
        "--adapter": "it scales A and B down, which leads to no adapter at all, not to where training starts"
    }

    setpoint: float
    ema_alpha: float = 0.5

    def __post_init__(self) -> None:
        check(self)

    @property
    def lambda_start(self) -> float:
        return 0.0

    def init(self) -> ProjectionState:
        return ProjectionState(Ema(), Ema(), Output(0.0))

    def update(self, state: ProjectionState, measurement: Measurement) -> tuple[ProjectionState, Output]:
        reading = read(state.ema, measurement, self.ema_alpha, self.setpoint)
        if not (reading.valid and 0 < measurement.data_bpt < math.inf):
            return state, replace(state.output, held=True)
        data = state.data.update(measurement.data_bpt, self.ema_alpha)
        output = Output(
            lam=0.0,
            smoothed=reading.smoothed,
            error=reading.error,
            param_bound=data.mean * self.setpoint / (1 - self.setpoint),
        )
        return ProjectionState(reading.ema, data, output), output
