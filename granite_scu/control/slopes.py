"""What the adapter saves on held-out and on training text at a tick, and how that changes with the adapter's size.

Scale the adapter's update by x, and let V(x) be the bits per token that it saves over the model as training began. The
slope V'(1) takes no second scale: it is minus the sum of <gradient, parameter> over the factors that x scales.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from granite_scu.control.laws.auto import WINDOW
from granite_scu.control.laws.base import Slopes


class HeldOutPlant(Protocol):
    """What slopes are read of. Losses are in bits per supervised token, over all processes; batches are its own."""

    @property
    def n_held_out(self) -> int:
        """Micro-batches of held-out text that there are."""

    def held_out(self, number: int) -> Any:
        """One of them: this process's part."""

    def loss_and_slope(self, batch: Any) -> tuple[float, float]:
        """The loss of a batch, and its derivative by the scale of the adapter's update, at 1."""

    def loss_at_start(self, batch: Any) -> float:
        """The loss of a batch without what training has added."""

    def newest_batch(self) -> Any:
        """The newest training micro-batch."""

    def newest_loss(self) -> float:
        """Its loss as training saw it, of before its step."""


class SlopeSensor:
    """Reads the slopes at a tick, on one held-out micro-batch and on the steps since the last tick.

    It leaves the run as it is: it touches no ``.grad``, draws no random number and takes no training batch. The
    held-out micro-batches take turns: as many as the text fills, a power of two and at most ``WINDOW``, so that each
    window of the law has all of them equally often. A reading that is not finite, which the law leaves out, leaves the
    turn where it is; otherwise the law would compare one micro-batch with another.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._base: dict[int, float] = {}  # of each held-out micro-batch, which never changes

    def read(self, plant: HeldOutPlant, training_slope: float | None) -> Slopes:
        """The slopes at a tick; ``training_slope`` is of the steps since the last one, ``Window.slope``."""
        number = self._turn % micro_batches_read(plant.n_held_out)
        batch = plant.held_out(number)
        loss, slope = plant.loss_and_slope(batch)
        if number not in self._base:
            self._base[number] = plant.loss_at_start(batch)
        slopes = Slopes(
            held_out=self._base[number] - loss,
            held_out_slope=-slope,
            training=plant.loss_at_start(plant.newest_batch()) - plant.newest_loss(),
            training_slope=math.nan if training_slope is None else training_slope,
        )
        self._turn += slopes.usable or math.isnan(self._base[number])  # without a label it would never be finite
        return slopes

    def state(self) -> dict[str, Any]:
        return {"turn": self._turn, "base": dict(self._base)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._turn = state["turn"]
        self._base = {int(number): value for number, value in state["base"].items()}  # JSON has no other keys than text


def micro_batches_read(there: int) -> int:
    """How many held-out micro-batches take turns, of those that the held-out text fills.

    >>> [micro_batches_read(there) for there in (1, 3, 1000)]
    [1, 2, 8]
    """
    return 1 << (min(there, WINDOW).bit_length() - 1)
