"""What a step test is asked for as."""

import math
from dataclasses import dataclass

from granite_scu.config.errors import UserError


@dataclass(frozen=True)
class StepTest:
    """The experiment; its time is counted in ticks of ``control.every`` optimizer steps.

    Attributes:
        ticks: length of the step test, settling included; trainer.max_steps, data.num_epochs, run.early_stopping,
            run.stop_at_equilibrium, run.eval_steps and run.save_steps are passed over, and the learning rate keeps its
            peak after the warm-up, whatever optimizer.schedule is.
        settle: ticks in closed loop before lambda is stepped, and before S* is in the verification.
        amplitude: of the steps around the mean that lambda settled at, in ln lambda.
        dwell: ticks between possible steps; about half of the time constant tells most.
        tau_c: closed-loop time constant to design for, in ticks; None takes the effective dead time (see the design).
        verify: train again under the proposed gains, with a step of S*, and compare with the prediction.
        step: factor by which S* steps in the verification.
    """

    ticks: int = 120
    settle: int = 30
    amplitude: float = 0.5
    dwell: int = 4
    tau_c: float | None = None
    verify: bool = True
    step: float = 1.5

    def __post_init__(self) -> None:
        least = self.settle + max(20, 6 * self.dwell)
        apart = 0 < self.step < math.inf and 0.1 <= abs(math.log(self.step)) <= math.log(10)
        for name, valid, remedy in (
            ("settle", self.settle >= 2, "must be at least 2 ticks"),
            ("amplitude", 0 < self.amplitude <= 20, "must be positive and at most 20 (in ln lambda)"),
            ("dwell", self.dwell >= 1, "must be at least 1 tick"),
            ("ticks", self.ticks >= least, f"too short for the excitation; settle {self.settle} and dwell {self.dwell} "
             f"need at least {least} ticks"),
            ("tau_c", self.tau_c is None or 0 < self.tau_c < math.inf, "must be positive and finite"),
            ("step", apart, "must be a factor of 0.1 to 10, at least a tenth away from 1"),
        ):  # fmt: skip
            if not valid:
                raise UserError(f"--step_test.{name} {getattr(self, name)}: {remedy}")
