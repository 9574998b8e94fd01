"""Texts as tokens, the windows that long ones are scored in, and what models scored there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import in_a_row, padding_of
from granite_scu.data.datamodule import tail_held_out
from granite_scu.data.sources.documents import Conversation, Document
from granite_scu.data.tokens.encoding import beginning, encode, require_known
from granite_scu.data.tokens.stream import Stream
from granite_scu.evaluation.bpt.texts import Texts
from granite_scu.evaluation.bpt.tokenizers import beginning_of
from granite_scu.evaluation.score import each_batch, padded_length
from granite_scu.model.adapters import Switch
from granite_scu.model.loss import token_nats


class ScoringWindow(NamedTuple):
    """A stretch of a text that the model sees at once.

    Attributes:
        document: number of the text.
        start: first input, as a position in the text's sequence.
        stop: the position after the last input, which is the last one predicted.
        scored: how many of the predictions count, the last ones: those before were made in a window before.
    """

    document: int
    start: int
    stop: int
    scored: int


@dataclass(frozen=True, eq=False)
class ScoringCorpus:
    """Texts to be scored, and what models scored on them.

    Attributes:
        name: what the user calls it.
        documents: where each text comes from.
        sequences: of each text a token that is given, and the tokens that are scored: (1 + tokens,) int32.
        n_bytes: (documents,) UTF-8 bytes that the scored tokens stand for.
        targets: of each text which of the tokens behind the given one count, (tokens,) bool.
        windows: that they are scored in.
        excluded: documents left out beforehand because a run had seen them.
        nats: summed cross-entropy of each window by the model's name, (windows,) each, as they come in.
    """

    name: str
    documents: list[str]
    sequences: list[NDArray[np.int32]]
    n_bytes: NDArray[np.int64]
    targets: list[NDArray[np.bool_]]
    windows: list[ScoringWindow] = field(default_factory=list)
    excluded: int = 0
    nats: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(documents,) tokens behind the given one, whether they count or not."""
        return np.array([len(sequence) - 1 for sequence in self.sequences], np.int64)

    @cached_property
    def document_tokens(self) -> NDArray[np.int64]:
        """(documents,) tokens that are scored."""
        return np.array([np.count_nonzero(targets) for targets in self.targets], np.int64)

    @cached_property
    def window_tokens(self) -> NDArray[np.int64]:
        """(windows,) tokens that are scored."""
        return np.array([np.count_nonzero(self.counts(window)) for window in self.windows], np.int64)

    @property
    def n_tokens(self) -> int:
        """Tokens that are scored."""
        return int(self.document_tokens.sum())

    def counts(self, window: ScoringWindow) -> NDArray[np.bool_]:
        """Which of the predictions that a window alone makes are scored, (scored,)."""
        return self.targets[window.document][window.stop - window.scored : window.stop]

    def document_nats(self, name: str) -> NDArray[np.float64]:
        """Nats that each document costs a model, (documents,)."""
        owners = np.array([window.document for window in self.windows])
        return np.bincount(owners, self.nats[name], len(self.documents))


def as_corpus(
    name: str, documents: list[Document], stream: Stream, tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> ScoringCorpus:
    """The documents of a stream from position ``first`` on.

    As lm-evaluation-harness scores them: a text's first token is predicted from the beginning-of-text token, or where
    there is none from end-of-text, and no end of text is predicted, so that exactly the text's bytes are paid for.
    Where the tokenizer begins a text so by itself, the stream has that token already. A document that begins before
    ``first`` has the token there given. Of a conversation, what is to be learned is scored, each turn with its end of
    text.

    Args:
        name: of the corpus.
        documents: those of the stream, in its order.
        stream: their tokens.
        tokenizer: that made them.
        first: documents that end before it are left out.
    """
    n_own, given = len(beginning(tokenizer)), np.array(beginning_of(tokenizer), np.int32)
    names, sequences, n_bytes, targets = [], [], [], []
    for document, (start, end) in zip(documents, (stream.bounds - [0, 1]).tolist(), strict=True):
        is_chat = isinstance(document, Conversation)
        if is_chat or start < first:  # of a chat what the assistant says counts, and that it stops
            start, end = max(start, first), end + is_chat
            sequence, counts = stream.tokens[start:end], stream.targets[start + 1 : end]
            size = int(stream.widths[start + 1 : end].sum(dtype=np.int64, where=counts))
        else:
            sequence = np.append(given, stream.tokens[start + n_own : end])
            counts, size = np.arange(1, len(sequence)) >= len(given), len(document.text.encode())
        if counts.any():
            names.append(document.name)
            sequences.append(sequence)
            n_bytes.append(size)
            targets.append(counts)
    return ScoringCorpus(name, names, sequences, np.array(n_bytes, np.int64), targets)


def tokenised(
    text: Texts, tokenizer: PreTrainedTokenizerBase, rows: int | None = None, model: str = ""
) -> ScoringCorpus:
    """Texts as tokens, of which a model has ``rows``. Raises UserError for others, or none to end a text."""
    stream = encode(text.documents, tokenizer, loss_on=text.loss_on, special_tokens=text.special_tokens)
    require_known(stream.tokens, tokenizer, rows, model)
    if text.tail_of is None:
        return as_corpus(text.name, text.documents, stream, tokenizer)
    if text.has_chats:
        raise UserError(f"{text.name}: there were too few conversations to hold some out; give --data-dir")
    packing, on_long = text.tail_of.packing, text.tail_of.on_long
    if packing == "best-fit" or on_long in ("drop", "truncate"):  # the blocks were others than these
        raise UserError(
            f"{text.name}: it was divided by block under --packing {packing} --on-long {on_long}, so that its test "
            "blocks are not known; give --data-dir"
        )
    blocks = in_a_row(stream, stream.bounds, text.tail_of.block_size, padding_of(tokenizer))
    first = tail_held_out(blocks, text.tail_of)["test"].numbers.start * blocks.block_size
    return as_corpus(text.name, text.documents, stream, tokenizer, first)


def cut(n_tokens: NDArray[np.int64], max_length: int, stride: int) -> list[ScoringWindow]:
    """Windows over texts of so many tokens, those of a text one after the other.

    The first window predicts ``max_length`` tokens, each further one the next ``stride``, from ``max_length`` inputs:
    every token is predicted once, and one beyond the first window from at least ``max_length - stride`` tokens before
    it. The windows are those of lm-evaluation-harness for a context of ``max_length - stride + 1``.
    """
    windows = []
    for document, length in enumerate(n_tokens.tolist()):
        stop = min(max_length, length)
        windows.append(ScoringWindow(document, 0, stop, stop))
        while stop < length:
            scored = min(stride, length - stop)
            stop += scored
            windows.append(ScoringWindow(document, stop - max_length, stop, scored))
    return windows


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
        shape = len(numbers), padded_length(longest)
        inputs, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        for row, window in enumerate(windows[i] for i in numbers):
            tokens = torch.from_numpy(corpus.sequences[window.document][window.start : window.stop + 1])
            length = len(tokens) - 1
            inputs[row, :length] = tokens[:-1]
            predicted = tokens[length + 1 - window.scored :].long()
            counts = torch.from_numpy(np.array(corpus.counts(window)))
            labels[row, length - window.scored : length] = predicted.where(counts, IGNORED)
        yield {"numbers": torch.tensor(numbers), "input_ids": inputs, "labels": labels}
