"""One pass over the windows: each batch goes through every adapter before the next batch is made."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from granite_scu.config.errors import RunFailed
from granite_scu.config.settings import IGNORED
from granite_scu.evaluation.bpt.windows import ScoringCorpus
from granite_scu.evaluation.score import each_batch
from granite_scu.model.adapters import Switch
from granite_scu.model.loss import token_nats

MULTIPLE = 16
"""Batches are padded to a multiple of so many tokens: kernels are compiled for few lengths, and a convolution is never
wider than its input."""


def score_windows(
    model: nn.Module,
    switches: Sequence[Switch],
    corpus: ScoringCorpus,
    batch_size: int,
    *,
    autocast: Callable[[], AbstractContextManager],
    advance: Callable[[int], None] = lambda tokens: None,
) -> NDArray[np.float64]:
    """Summed cross-entropy of each window under each switch, in nats, (switches, windows).

    Sums stay on the device until the end, so that nothing waits for it. The result depends on neither the batch size
    nor the padding, but for the rounding of the products.

    Args:
        model: a transformers causal language model (not wrapped by PEFT; its layers may be), in evaluation mode.
        switches: what it is scored as.
        corpus: the texts in their windows.
        batch_size: windows at a time.
        autocast: makes the context of the forward passes.
        advance: told after each batch how many tokens were scored.

    Raises:
        RunFailed: the device has too little memory for a batch.
    """
    sums = torch.zeros(len(switches), len(corpus.windows), dtype=torch.float64, device=next(model.parameters()).device)

    def under_each_switch(numbers: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        found = []
        try:
            for switch in switches:
                with switch(), autocast():
                    found.append(token_nats(model, input_ids, labels).double().sum(1))
        except torch.OutOfMemoryError as error:
            batch, time = input_ids.shape
            raise RunFailed(
                f"{input_ids.device} has too little memory for {batch} windows of {time} tokens; "
                f"set --batch-size below {batch} or, of one window, --max-length below {time}"
            ) from error
        return torch.stack(found)

    for batch, nats in each_batch(under_each_switch, batches(corpus, batch_size), model=model):
        sums[:, batch["numbers"]] = nats
        advance(int(corpus.window_tokens[batch["numbers"].tolist()].sum()))
    return sums.cpu().numpy()


def batches(corpus: ScoringCorpus, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """The windows in batches of about one length: ``numbers``, and ``input_ids`` and ``labels``, (windows, time) int64.

    Long ones come first, so that a batch that is too large fails at once. They are padded at the end, where causality
    keeps it from mattering.
    """
    windows = corpus.windows
    order = sorted(range(len(windows)), key=lambda i: windows[i].start - windows[i].stop)
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        longest = windows[numbers[0]].stop - windows[numbers[0]].start
        shape = len(numbers), -(-longest // MULTIPLE) * MULTIPLE
        inputs, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        for row, window in enumerate(windows[i] for i in numbers):
            tokens = torch.from_numpy(corpus.sequences[window.document][window.start : window.stop + 1])
            length = len(tokens) - 1
            inputs[row, :length] = tokens[:-1]
            predicted = tokens[length + 1 - window.scored :].long()
            counts = torch.from_numpy(np.array(corpus.counts(window)))
            labels[row, length - window.scored : length] = predicted.where(counts, IGNORED)
        yield {"numbers": torch.tensor(numbers), "input_ids": inputs, "labels": labels}
