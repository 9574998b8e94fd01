"""Makes general text ready before the first step, has it anchor the model, and tells how far that has drifted on it."""

import logging
from collections.abc import Callable
from typing import Any

import lightning as L

from granite_scu.control import Measurement
from granite_scu.control.units import per_cent
from granite_scu.evaluation.general_text import GeneralText, batches
from granite_scu.model.drift import MARGIN, READ_AT_ONCE, Drift, GeneralPart, Turns, check_noise
from granite_scu.training.drift import trained
from granite_scu.training.module import GraniteModule

log = logging.getLogger(__name__)


class DriftMeter(L.Callback):
    """Measures drift at ticks, at validations and at the end, each on text that the step before it did not anchor to.

    What the model as training began makes of the text is in no checkpoint: it is computed again.

    Args:
        text: has the general text; called once, on every rank, with the model in place.
        budget: the share that the law holds; None measures at the end alone.
        anchor_tokens, steering_tokens: positions of an anchor batch, and of what a tick reads.
        padding: token id.
    """

    def __init__(
        self,
        text: Callable[[L.Trainer, GraniteModule], GeneralText],
        budget: float | None,
        anchor_tokens: int,
        steering_tokens: int,
        padding: int,
    ) -> None:
        self.text, self.budget, self.padding = text, budget, padding
        self.anchor_tokens, self.steering_tokens = anchor_tokens, steering_tokens
        self.turns = Turns()
        self.source = ""
        self.steering: GeneralPart | None = None
        self.held_out: GeneralPart | None = None
        self._newest: tuple[int, float] | None = None

    def on_train_start(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if self.budget is not None:
            self._prepare(trainer, module)

    def _prepare(self, trainer: L.Trainer, module: GraniteModule) -> None:
        general = self.text(trainer, module)
        parts, self.source, model = general.parts(), general.source, trained(module)
        self.held_out = GeneralPart(model, batches(parts.held_out, READ_AT_ONCE, self.padding))
        if self.budget is not None:
            self.steering = GeneralPart(model, batches(parts.steering, self.steering_tokens, self.padding))
            if trainer.global_step == 0:
                check_noise(self.steering, self.budget)
            anchor = GeneralPart(model, batches(parts.anchor, self.anchor_tokens, self.padding))
            module.drift_gradient = anchor.gradient

    def plant(self, of_s: Measurement) -> Measurement:
        """What the law sees in the place of a tick's measurement of S."""
        assert self.steering
        return self.steering.follow(self.turns).measurement(of_s)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if self.budget is not None and trainer.state.fn == "fit":
            module.log("drift_held_out", self.share(trainer, module), rank_zero_only=False)

    def share(self, trainer: L.Trainer, module: GraniteModule) -> float:
        """The share of drift after this step, measured once."""
        if self._newest is None or self._newest[0] != trainer.global_step:
            self._newest = trainer.global_step, self.read(trainer, module).share
        return self._newest[1]

    def read(self, trainer: L.Trainer, module: GraniteModule) -> Drift:
        """Drift of the model as it is now, on what the loop never sees. Every rank calls this."""
        if self.held_out is None:
            self._prepare(trainer, module)
        assert self.held_out
        return self.held_out.read()

    def summary(self, found: Drift, last: dict) -> dict[str, Any]:
        """For ``scu_metrics.json``; says where drift is not within the budget, or nowhere near it, and why.

        Args:
            found: drift of the adapter that is kept.
            last: the newest record of the history.
        """
        budget = self.budget
        within = None if budget is None else found.share <= MARGIN * budget
        if within is not None:
            self._say(found.share, within, last)
        return {
            "budget": budget,
            "share": found.share,
            "bpt": found.bpt,
            "base_bpt": found.base_bpt,
            "tokens": found.tokens,
            "lambda": last.get("lambda") if budget is not None else None,
            "within": within,
            "source": self.source,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.turns.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns.load_state_dict(state)

    def _say(self, share: float, within: bool, last: dict) -> None:
        now, budget = per_cent(share), per_cent(self.budget or 0.0)
        at_a_bound = f"lambda rests at its bound of {last['lambda']:g}" if last.get("saturated") else ""
        if not within:
            log.warning("drift is %s on general text that the loop did not see, more than --max-drift %s, and no "
                        "validated adapter was nearer%s; lower --learning-rate, train for more steps, or raise it",
                        now, budget, at_a_bound and f": {at_a_bound}")  # fmt: skip
        elif at_a_bound and last["lambda"] < 1:
            log.info(
                "drift is %s: the data do not move the model as far as --max-drift %s; %s", now, budget, at_a_bound
            )
