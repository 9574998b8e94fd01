"""What the data costs, read from the forward passes of a trainer's training steps: nats and supervised tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from granite_scu.config.settings import IGNORED


class LossMeter:
    """Sums nats and supervised tokens of the forward passes that a gradient is taken of. Never waits for the device.

    Args:
        model: what the trainer calls, before it is wrapped for several processes.
        device: of the sums.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._paused, self._problem = False, ""
        self._hook = model.register_forward_hook(self._after_forward, with_kwargs=True)

    def take(self) -> Tensor:
        """(nats, tokens) since the last time, fp64, of this process alone.

        Raises:
            ValueError: of a forward pass they could not be read.
        """
        if self._problem:
            raise ValueError(self._problem)
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes in the context count nowhere."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        """Leave the model unchanged."""
        self._hook.remove()

    def _after_forward(self, model: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
        if self._paused or not (model.training and torch.is_grad_enabled()):
            return
        try:
            self._sums += torch.stack(nats_and_tokens(inputs, output)).detach()
        except ValueError as error:
            # Not raised from here: after a Ctrl-C the hook is still there, and the model is its user's.
            self._problem = str(error)


def counted(inputs: Mapping[str, Any]) -> Tensor:
    """Which positions predict a token that is learned, (batch, time - 1); (batch, time) of labels that are shifted.

    Raises:
        ValueError: there are no labels.
    """
    if inputs.get("shift_labels") is not None:
        return inputs["shift_labels"] != IGNORED
    if inputs.get("labels") is None:
        raise ValueError(
            "ShannonCallback: the trainer called the model without labels, so that the model did not compute the loss; "
            "leave compute_loss_func and a compute_loss of your own out, and use a collator that gives labels"
        )
    return inputs["labels"][..., 1:] != IGNORED


def nats_and_tokens(inputs: Mapping[str, Any], output: Any) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of a micro-batch, and its number of supervised tokens; scalars in fp64.

    The model returns a mean: over the micro-batch, or over ``num_items_in_batch`` tokens where the trainer gives them.
    TRL's fused output has the log-probability of each token, which is free of an auxiliary loss.

    Args:
        inputs: what the model was called with.
        output: what it returned.

    Raises:
        ValueError: labels are missing, or the loss has an auxiliary part.
    """
    tokens = counted(inputs).sum().double()
    log_probs = getattr(output, "log_probs", None)
    if log_probs is not None:
        return -log_probs.double().sum(), tokens
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            "ShannonCallback: the model's loss has a part that balances its experts, which is no cost of the data; set "
            "model.config.output_router_logits = False"
        )
    items = inputs.get("num_items_in_batch")
    # A mean over no token is NaN, and they cost nothing.
    return output.loss.double().masked_fill(tokens == 0, 0.0) * (tokens if items is None else items), tokens
