"""Whether a merged model is base and adapter still: what it has of the adapter's gain on the same held-out text."""

import gc
import logging
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.evaluation.bpt import texts
from granite_scu.evaluation.bpt.windows import ScoringCorpus, cut, score_windows, tokenised
from granite_scu.model import loading
from granite_scu.model.adapter_files import run_of
from granite_scu.model.adapters import load_adapted
from granite_scu.model.description_length import bits
from granite_scu.model.saved_adapter import SavedAdapter
from granite_scu.storage.run_folder import ADAPTER_CONFIG

_log = logging.getLogger(__name__)

LENGTH = 1024
"""The longest window of text, in tokens; also how many are scored at a time."""

TOKENS = 4096
"""Scored tokens after which there is enough text: rounding to bf16 moves the bits of a token by some 0.1, at random, so
that their mean is known to 0.1 / sqrt(4096) = 0.002 bits per token, which is 1 % of a gain of 0.2."""

CHARACTERS = 16 * TOKENS
"""Characters of documents that are tokenised for it: in chats, most of them are not scored."""

KEPT = 0.95
"""The share of what the adapter changes that a merged model has to keep without a warning. Rounding moves each weight
by up to 2^-9 of itself, however small the update is, and so takes more of a small update: of SmolLM2 135M in bf16, 0 to
4.3 %, the same as PEFT's own merge."""

AGREES = 1e-3
"""Bits per token of a window by which two ways to compute the same model in fp32 may differ. A sum of 10^4 products in
another order is off by sqrt(10^4) roundings of 2^-24, 6e-6 of itself, and the sum of 100 layers by 10 times that; of a
logit of 15 this is 1e-3, in a single token. A merge that lacks one matrix of hundreds differs by more."""

OWN = "what the run held out"
"""The text, in words, on which an adapter should be better than its base."""

FOR_FP32 = 512
"""Scored tokens on which that is seen."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Base, base with adapter and merged model on the same windows of text.

    Attributes:
        nats: (3, windows) summed cross-entropy of each of the three.
        tokens: (windows,) scored tokens, at least one each.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @cached_property
    def bits_per_token(self) -> tuple[float, float, float]:
        base, adapter, merged = (bits(math.fsum(row) / int(self.tokens.sum())) for row in self.nats)
        return base, adapter, merged

    @property
    def gain(self) -> float:
        """Bits per token that the adapter saves."""
        return self.bits_per_token[0] - self.bits_per_token[1]

    @property
    def difference(self) -> float:
        """Bits per token that the merged model costs more than base and adapter."""
        return self.bits_per_token[2] - self.bits_per_token[1]

    @property
    def error(self) -> float:
        """Standard error of the difference over the windows, in bits per token; 0 of a single one."""
        n, moved = len(self.tokens), (self.nats[2] - self.nats[1]) / math.log(2)
        rest = moved - self.difference * self.tokens
        return math.sqrt(float(rest @ rest) * n / max(1, n - 1)) / int(self.tokens.sum())

    @property
    def kept(self) -> float | None:
        """The share of the gain that the merged model has; None where no gain stands out from the rounding."""
        return 1 - self.difference / self.gain if self.gain > 2 * self.error else None

    @property
    def is_merged(self) -> bool:
        """Whether the merged model has, beyond chance, ``KEPT`` of what the adapter changes for better or worse."""
        changed = bits(float(np.abs(self.nats[1] - self.nats[0]).sum()) / int(self.tokens.sum()))
        return abs(self.difference) - 2 * self.error <= (1 - KEPT) * changed

    @property
    def largest(self) -> float:
        """The largest difference of a window, in bits per token."""
        return bits(float((np.abs(self.nats[2] - self.nats[1]) / self.tokens).max()))


def compare(
    adapter: SavedAdapter,
    base: BaseConfig,
    tokenizer: PreTrainedTokenizerBase,
    merged: Path,
    write_in_fp32: Callable[[Path], None],
    device: torch.device,
) -> dict[str, Any]:
    """Score base, base with adapter and merged model on held-out text, one model in memory at a time.

    The base is loaded as its training had it, in 4 bits of a QLoRA run; the merged model by transformers alone, its
    Mamba-2 layers in the library's own forward. All of them in the dtype that the merged model is stored in. Where
    more is lost than rounding explains, they are compared in fp32 again, in which a right merge loses nothing.

    Args:
        adapter: that was merged.
        base: that it was merged into.
        tokenizer: of both, with the chat template of the run.
        merged: folder of the merged model.
        write_in_fp32: writes into a folder the same merge in fp32.
        device: where they are scored.

    Returns:
        ``text`` that was scored, in words, its ``documents`` and scored ``tokens``; in bits per token ``base_bpt`` of
        the base alone, ``adapter_bpt`` of base and adapter, ``merged_bpt``, and ``difference``, merged minus adapter,
        with its standard ``error``; ``kept``, the share of the adapter's gain, null without a gain; ``dtype`` of the
        weights and the arithmetic; ``in_fp32``, the largest difference of a window in fp32 in bits per token, null
        where they were not compared in it; and ``is_merged``, whether as much is kept as rounding leaves.

    Raises:
        RunFailed: the merge is wrong, the adapter says nothing, or there is too little memory or disk to compare.
    """
    corpus, text = _held_out(adapter, tokenizer)
    dtype = _stored_dtype(merged)
    found = _scored(adapter, base, corpus, merged, dtype, device)
    is_exact = dtype == torch.float32 and not base.quantize_4bit
    worst = found.largest if is_exact else None
    if not (is_exact or found.is_merged):
        worst = _worst_in_fp32(adapter, base, corpus, merged / "fp32", write_in_fp32, device)
    base_bpt, adapter_bpt, merged_bpt = found.bits_per_token
    vocabulary = loading.load_model_config(base.name).get_text_config().vocab_size
    if base_bpt < math.log2(vocabulary) < adapter_bpt:
        raise RunFailed(
            f"{adapter.label}: on {text} base with adapter has {adapter_bpt:.4f} bits per token, worse than to guess "
            f"among all {vocabulary:,} tokens, and the base alone {base_bpt:.4f}, so that the adapter is damaged or "
            f"scaled wrongly (lora_alpha in {ADAPTER_CONFIG}); nothing was kept; --no-check merges it all the same"
        )
    if worst is not None and not worst <= AGREES:
        raise RunFailed(
            f"the merge is wrong: on {text} the merged model has {merged_bpt:.4f} bits per token, base with adapter "
            f"{adapter_bpt:.4f}, the base alone {base_bpt:.4f}, and in fp32, where a right merge loses nothing, a text "
            f"differs by {worst:.4f}; nothing was kept: please report it, and use the adapter unmerged (--no-check "
            "would keep the merged model)"
        )
    return {
        "text": text,
        "documents": len({window.document for window in corpus.windows}),
        "tokens": int(found.tokens.sum()),
        "base_bpt": base_bpt,
        "adapter_bpt": adapter_bpt,
        "merged_bpt": merged_bpt,
        "difference": found.difference,
        "error": found.error,
        "kept": found.kept,
        "dtype": str(dtype).removeprefix("torch."),
        "in_fp32": worst,
        "is_merged": is_exact or found.is_merged,
    }


def _scored(
    adapter: SavedAdapter,
    base: BaseConfig,
    corpus: ScoringCorpus,
    merged: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> Comparison:
    longest = max(window.stop - window.start for window in corpus.windows)
    score = partial(score_windows, corpus=corpus, batch_size=max(1, LENGTH // longest), autocast=nullcontext)
    try:
        model, switches = load_adapted(base, {adapter.label: adapter.folder}, dtype, device)
        nats = score(model, switches)
        del model, switches
        gc.collect()
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype, use_safetensors=True, trust_remote_code=False)
        return Comparison(np.concatenate([nats, score(model.to(device), [nullcontext])]), corpus.window_tokens)
    except (RunFailed, torch.OutOfMemoryError) as error:
        raise RunFailed(
            f"{device}: too little memory to compare the merged model with its adapter; compare on the CPU with "
            "--device cpu, or not at all with --no-check"
        ) from error


def _worst_in_fp32(
    adapter: SavedAdapter,
    base: BaseConfig,
    corpus: ScoringCorpus,
    folder: Path,
    write_in_fp32: Callable[[Path], None],
    device: torch.device,
) -> float:
    """The largest difference of a window between base with adapter and the merge in fp32, in bits per token."""
    folder.mkdir()
    write_in_fp32(folder)
    windows = _first(corpus, FOR_FP32)
    score = partial(_scored, adapter, base, replace(corpus, windows=windows), folder, torch.float32)
    try:
        found = score(device)
    except RunFailed:  # for want of memory, of which fp32 takes twice as much
        if device.type == "cpu":
            raise
        _log.info("comparing in fp32 on the CPU, for on %s there is too little memory", device)
        found = score(torch.device("cpu"))
    shutil.rmtree(folder)
    return found.largest


def _held_out(adapter: SavedAdapter, tokenizer: PreTrainedTokenizerBase) -> tuple[ScoringCorpus, str]:
    """What the run held out, each chat and text for itself; of the embedded documentation where that cannot be had."""
    run, words = run_of(adapter.folder), "Python's documentation"
    if run is not None:
        try:
            found, config = texts.held_out(run, [], ("validation", "test")), texts.data_config(run)
            found = replace(found, special_tokens=config.control_tokens, loss_on=config.loss_on)
            return _beginning(found, tokenizer, min(config.block_size, LENGTH)), OWN
        except UserError as error:
            _log.warning("the merged model is compared on other text, for the run's is not to be had: %s", error)
            words += ", for the run's text is not to be had"
    return _beginning(texts.named("stdlib-docs", "text", "utf-8", "auto", []), tokenizer, LENGTH), words


def _beginning(found: texts.Texts, tokenizer: PreTrainedTokenizerBase, length: int) -> ScoringCorpus:
    """As much of a text as is scored, in windows of ``length`` tokens. Raises UserError where nothing is."""
    if found.tail_of is None:
        sizes = np.cumsum([len(document.text) for document in found.documents])
        found = replace(found, documents=found.documents[: int(np.searchsorted(sizes, CHARACTERS)) + 1])
    corpus = tokenised(found, tokenizer)
    corpus = replace(corpus, windows=cut(corpus.lengths, length, length))
    if not corpus.window_tokens.any():
        raise UserError(f"{found.name}: nothing of it is learned, so there is nothing to score")
    return replace(corpus, windows=_first(corpus, TOKENS))


def _first(corpus: ScoringCorpus, tokens: int) -> list:
    """The first windows of a text that have so many scored tokens, of those that have any."""
    kept = [window for window, count in zip(corpus.windows, corpus.window_tokens, strict=True) if count]
    counts = corpus.window_tokens[corpus.window_tokens > 0]
    return kept[: int(np.searchsorted(np.cumsum(counts), tokens)) + 1]


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that a saved model's matrices have."""
    with safe_open(min(folder.glob("*.safetensors")), "pt") as tensors:
        return next(tensors.get_tensor(name).dtype for name in tensors.keys())  # noqa: SIM118 (no mapping)
