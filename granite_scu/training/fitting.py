"""The text of a request, read and cut, and what nobody gave fitted to it: ``defaults``, applied."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from granite_scu.config.request import Request
from granite_scu.config.settings import DataConfig, TrainerConfig
from granite_scu.control.units import counted
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.streaming import StreamedDataModule
from granite_scu.model import loading
from granite_scu.training import defaults

log = logging.getLogger(__name__)


def build_data(request: Request) -> TextDataModule:
    """The text that a request describes, not yet prepared."""
    kind = StreamedDataModule if request.data.stream else TextDataModule
    return kind(request.data, request.seed, uniform_batches=bool(request.base.compile))


def fit_to_text(
    request: Request, data: TextDataModule, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, processes: int
) -> tuple[Request, list[str]]:
    """Read the text; the request with what nobody gave fitted to it, and why each is what it is, a line each.

    Args:
        request: what was asked for.
        data: not yet read.
        tokenizer: of the model.
        config: of the model.
        processes: that train.

    Raises:
        UserError: the text cannot be read, or makes no blocks.
    """
    data.read(tokenizer, loading.embedding_rows(config), request.base.name)
    given = {key: value for key in request.given if (value := _value(request, key)) is not None}
    # A small step that is given makes no much text of a little.
    batch = DataConfig.batch_size if "data.batch_size" in given else request.data.batch_size
    accumulated = TrainerConfig.accumulate_grad_batches
    if "trainer.accumulate_grad_batches" not in given:
        accumulated = request.trainer.accumulate_grad_batches
    usual = defaults.Usual(batch, accumulated, request.data.block_size)
    text, lines = cut_to_fit(data, tokenizer, config, usual, "data.block_size" in given, processes)
    request = request.with_values({"data.block_size": data.config.block_size})
    train, validation = data.train, data.validation
    n_blocks = round(data.epochs.mean(text.epochs)) if text else len(train)
    cut = defaults.Cut(data.config.block_size, max(1, n_blocks), len(validation), validation.n_documents, data.kind)
    width, controlled = getattr(config, "hidden_size", 0) or defaults.RATE_WIDTH, request.control.controller != "none"
    holds_drift = request.drift.max_drift is not None
    chosen = defaults.settle(text, cut, usual, given, width, processes, controlled, holds_drift)
    if len(data.train) < request.data.batch_size and "data.batch_size" in given:
        few = counted(len(data.train), "training block")
        log.warning("%s for --batch-size %d: a batch has some several times", few, request.data.batch_size)
    return request.with_values({choice.key: choice.value for choice in chosen}), [
        *lines,
        *(choice.why for choice in chosen if choice.why),
    ]


def cut_to_fit(
    data: TextDataModule,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    usual: defaults.Usual,
    block_given: bool,
    processes: int = 1,
) -> tuple[defaults.Text | None, list[str]]:
    """Cut what was read into blocks, of the usual size unless the text asks for others and the user for none.

    Returns:
        What there is to train on, None of a stream; and why blocks are not of the usual size, a line or none.

    Raises:
        UserError: the text makes no blocks.
    """
    text, lines, most = None, [], loading.max_positions(config)
    data.grow(block_given, most)
    size = data.config.block_size
    if most and size > most and not block_given:
        size, usual = most, usual._replace(block=most)
        lines.append(f"blocks of {most:,} tokens: the model was made for no more")
    elif size > usual.block:
        lines.append(f"blocks of {size:,} tokens: the longest conversation has {data.longest_chat:,}")
    if not data.config.stream and len(data.epoch):  # without a document to train on, the cut is refused
        text = _text_of(data, size)
        block = defaults.block_size(text, usual, processes)
        if block and not block_given:
            size, lines = block.value, [block.why]
    data.cut(tokenizer, replace(data.config, block_size=size))
    if text:  # what packing and data.train_tokens kept of it
        tokens = min(text.tokens, data.config.train_tokens or text.tokens)
        readings = len(data.epoch) / len(np.unique(data.epoch))  # of a document, which a block has several times
        text = text._replace(documents=round(readings * data.train.n_documents), tokens=tokens)
    return text, lines


def _text_of(data: TextDataModule, block_size: int) -> defaults.Text:
    """What an epoch reads, without what is too long for blocks of a size where that is dropped. It is of chats where
    these are the most of it: one among texts makes no small set of chats of them."""
    lengths, epoch, is_chat = data.lengths, data.epoch, data.division.corpus.is_chat
    fits = lengths - 1 <= block_size
    if data.config.on_long != "drop" or not fits[epoch].any():
        fits = np.ones(len(lengths), bool)
    epoch, longest = epoch[fits[epoch]], lengths[fits & is_chat].max(initial=0)
    tokens, of_chats = lengths[epoch].sum(), lengths[epoch[is_chat[epoch]]].sum()
    counts = len(epoch), int(tokens), int(longest)
    return defaults.Text(2 * of_chats > tokens, *counts, data.config.num_epochs, data.filled)


def _value(request: Request, key: str) -> Any:
    """What a request has under a dotted key; None for a number of steps that says that there is none."""
    group, _, name = key.partition(".")
    value = getattr(getattr(request, group, None), name, None)
    return None if key == "trainer.max_steps" and value == -1 else value
