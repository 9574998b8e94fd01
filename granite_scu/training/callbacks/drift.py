"""Makes general text ready before the first step, has it anchor the model, and tells how far that has drifted on it."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L

from granite_scu.control import Measurement
from granite_scu.control.units import per_cent
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.model.drift import MARGIN, Drift, HeldDrift, part_within
from granite_scu.training.callbacks.shannon_control import ControlTick, rests_at
from granite_scu.training.module import GraniteModule

log = logging.getLogger(__name__)


class DriftMeter(L.Callback):
    """Measures drift: at ticks on text that steers, and at the end on text that neither steers nor anchors.

    Args:
        text: has the general text; called once, on every rank, with the model in place.
        budget: the share that the law holds.
        bounds: of the law's lambda, lower and upper.
        anchor_tokens, steering_tokens: positions of an anchor batch, and of what a tick reads.
        padding: token id.
    """

    def __init__(
        self,
        text: Callable[[L.Trainer, GraniteModule], GeneralText],
        budget: float,
        bounds: tuple[float, float],
        anchor_tokens: int,
        steering_tokens: int,
        padding: int,
    ) -> None:
        self.text, self.budget, self.padding = text, budget, padding
        self.low, self.high = bounds
        self.anchor_tokens, self.steering_tokens = anchor_tokens, steering_tokens
        self.source = self._digest = ""
        self._general: GeneralText | None = None  # between obtaining it and the start of training
        self.held: HeldDrift | None = None
        self._turns: dict[str, list] | None = None  # before a checkpoint
        self.scale = 1.0
        self._steered: float | None = None  # at the latest tick

    def on_fit_start(self, trainer: L.Trainer, module: GraniteModule) -> None:
        # Before GracefulStop waits for the end of a step: the base model may write for minutes, which Ctrl-C ends.
        self._general = self.text(trainer, module)
        self.source, self._digest = self._general.source, self._general.digest

    def on_train_start(self, trainer: L.Trainer, module: GraniteModule) -> None:
        assert self._general
        general, self._general = self._general, None
        texts = general.batches(self.anchor_tokens, self.steering_tokens, self.padding)
        turns = self._turns if trainer.global_step else None
        self.held = HeldDrift(module.as_trained(), texts, self.budget, turns)
        module.drift_gradient = self.held.gradient

    def plant(self, of_s: Measurement) -> Measurement:
        """What the law sees in the place of a tick's measurement of S."""
        assert self.held
        return self.held.measurement(of_s)

    def on_tick(self, tick: ControlTick, trainer: L.Trainer, module: GraniteModule) -> None:
        """Take note of what adapters are compared by."""
        drift = tick.record["drift"]
        self._steered = math.inf if drift is None else drift

    def steered(self) -> float:
        """The share of drift at the latest tick, on the text that steers: a validation reads none but before the first
        tick."""
        return self.read().share if self._steered is None else self._steered

    def within(self) -> bool:
        """Whether the model is within the budget, by what steers."""
        return self.steered() <= MARGIN * self.budget

    def read(self) -> Drift:
        """Drift of the model as it is on what the loop never sees. Every rank calls this."""
        assert self.held
        return self.held.held_out.read()

    def holds(self, found: Drift) -> bool:
        """Whether this is within the budget."""
        return found.share <= MARGIN * self.budget

    def fit(self, module: GraniteModule, found: Drift) -> tuple[Drift, float]:
        """Scale what the adapter has learned by as much as brings its drift to the budget.

        A loop that holds drift on some texts may end a tenth above the budget on others, with an adapter that has
        learned most of what it could, where of those within it the last is from the first steps.

        Args:
            module: with the adapter in place.
            found: what ``read`` found of it.

        Returns:
            drift of the scaled adapter, and by how much it was scaled: 1 where it is within the budget as it is.
        """
        if self.holds(found):
            return found, 1.0
        learned, read = [factor.detach().clone() for factor in module.factors], [found]

        def share_of(part: float) -> float:
            module.put(module.part_of(learned, part))
            read.append(self.read())
            return read[-1].share

        scale = part_within(self.budget, found.share, share_of)
        return read[-1], scale

    def summary(self, found: Drift, history: Sequence[dict]) -> dict[str, Any]:
        """For ``scu_metrics.json``; says where drift is not within the budget.

        Args:
            found: drift of the adapter that is kept.
            history: the records of all ticks.

        Returns:
            among others ``bound``: "upper", where lambda was at that at the last tick; "lower", where it was at that
            all through the second half of the run, so that the budget bound nothing there; else null. ``scale`` is
            what the kept adapter's update was multiplied by; below 1 the same text has told it, and ``share`` is near
            the budget by that.
        """
        last = history[-1] if history else {}
        within = self.holds(found)
        bound = "upper" if last and rests_at(last, self.high) else "lower" if self._rested(history) else None
        if not within:
            at_bound = f": lambda is at its upper bound of {self.high:g}" if bound == "upper" else ""
            figures = per_cent(found.share), per_cent(self.budget), at_bound
            log.warning("drift is %s on general text that the loop did not see, more than --max-drift %s%s; lower "
                        "--learning-rate, train for more steps, or raise --max-drift", *figures)  # fmt: skip
        return {
            "budget": self.budget,
            "share": found.share,
            "bpt": found.bpt,
            "base_bpt": found.base_bpt,
            "tokens": found.tokens,
            "lambda": last.get("lambda"),
            "bound": bound,
            "within": within,
            "scale": self.scale,
            "source": "auto" if self.source == "auto" else "files",  # no paths: this is published
        }

    def state_dict(self) -> dict[str, Any]:
        turns = self.held.turns.state_dict() if self.held else self._turns or {}
        return turns | {"steered": self._steered, "general": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._turns = {name: state[name] for name in ("latest", "ages")}
        self._steered = state.get("steered")

    def _rested(self, history: Sequence[dict]) -> bool:
        """Whether lambda was at its lower bound all through the second half."""
        late = [record for record in history if 2 * record["step"] > history[-1]["step"]]
        return bool(late) and all(rests_at(record, self.low) for record in late)
