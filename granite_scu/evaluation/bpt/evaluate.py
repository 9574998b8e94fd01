"""From what was asked to what was found: read the texts, load the models, score, compare."""

import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.flags import PRECISIONS
from granite_scu.config.progress import advancing
from granite_scu.config.request import Request
from granite_scu.config.settings import BaseConfig, DataConfig, TrainerConfig
from granite_scu.evaluation.bpt import results, texts
from granite_scu.evaluation.bpt.answering import AnswerScoring, DriftScoring
from granite_scu.evaluation.bpt.subjects import BASE, Subject, shared_base
from granite_scu.evaluation.bpt.tokenizers import load_tokenizer, with_template
from granite_scu.evaluation.bpt.windows import ScoringCorpus, cut, score_windows, tokenised
from granite_scu.hardware import machine
from granite_scu.hardware.machine import Machine
from granite_scu.model import base_digest, loading, saved_adapter
from granite_scu.model.adapters import leave_casting_to_autocast, load_adapted
from granite_scu.model.mamba2 import kernels
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import METRICS, TRAINING_CONFIG, read_json

log = logging.getLogger(__name__)

MAX_LENGTH = 1024
"""Tokens of a window where no run says what it was trained at."""


def evaluate(
    subjects: Sequence[Subject], options: Namespace, console: Console
) -> tuple[dict[str, Any], list[ScoringCorpus]]:
    """Carry out a request.

    Args:
        subjects: what was named.
        options: the flags.
        console: for the progress.

    Returns:
        The report as JSON has it, and the corpora with the scores on each.

    Raises:
        UserError: something wrong with the models, their tokenizers or the texts.
    """
    base = shared_base(subjects, options.model)
    runs = list(dict.fromkeys(subject.run for subject in subjects if subject.run))
    how = options.text_column, options.encoding, options.record_format
    asked = _texts(options.data_dir, options.forgetting, how, runs)
    adapters, wholes = ([s for s in subjects if s.kind == kind] for kind in ("adapter", "model"))
    for adapter in adapters:  # before PEFT allocates what its configuration says, or changes the base
        saved_adapter.find(adapter.path, adapter.given).updates(base or adapter.base)
    length = options.max_length or max((texts.data_config(run).block_size for run in runs), default=MAX_LENGTH)
    stride = options.stride or max(1, length // 2)
    _check_window(length, stride, [*([base] if base else []), *(whole.given for whole in wholes)])
    quantize = _quantised(runs) if options.quantize_4bit is None else options.quantize_4bit
    first = BaseConfig(base or subjects[0].given, quantize, options.attn, options.kernels)
    here = _machine(first, options.accelerator, options.precision)
    tokenizer = load_tokenizer(first.name, subjects, asked[0].documents)
    has_chats, given = any(text.has_chats for text in asked), (options.chat_template, options.chat_template_args)
    tokenizer = with_template(tokenizer, subjects, has_chats, *given)
    corpora = _corpora(asked, tokenizer, first.name, length, stride)
    said, drifts = AnswerScoring(asked[0], tokenizer, options.samples), DriftScoring(subjects, tokenizer)
    here.claim(None)
    # A model that a QLoRA adapter was merged into is whole without 4 bits: rounding it again would round the adapter.
    wanted = [(BaseConfig(s.given, bool(options.quantize_4bit), options.attn), [(s.name, None)]) for s in wholes]
    if base:
        of_base = [(BASE, None), *((each.name, each.given) for each in adapters)]
        wanted = [(BaseConfig(base, quantize, options.attn), of_base), *wanted]
    named = [_described(name, given, model.name) for model, each in wanted for name, given in each]
    seconds = sum(_score(*each, corpora, options.batch_size, here, console, said, drifts) for each in wanted)
    settings = {
        "max_length": length,
        "stride": stride,
        "batch_size": options.batch_size,
        "quantize_4bit": quantize,
        "precision": here.precision,
        "device": here.device.name,
        "tokens_per_s": sum(corpus.n_tokens for corpus in corpora) * len(named) / seconds,
        "versions": versions(),
    }
    found = results.report(corpora[0], named, corpora[1] if len(corpora) > 1 else None, settings)
    own = None if options.data_dir else _own_figures(subjects, runs)
    found |= said.found([each["name"] for each in named]) | ({"drift": drifts.found} if drifts.found else {})
    return found | ({"run": own} if own else {}), corpora


def _described(name: str, given: str | None, base: str) -> dict[str, Any]:
    """What the report says of a model; ``given`` is its adapter."""
    sha256 = {"adapter_sha256": saved_adapter.find(given).sha256} if given else {}
    return {"name": name, "adapter": given, "base": base} | sha256


def _corpora(
    asked: Sequence[texts.Texts], tokenizer: PreTrainedTokenizerBase, model: str, length: int, stride: int
) -> list[ScoringCorpus]:
    """The texts as tokens, in windows of ``length`` that begin each ``stride``."""
    rows = loading.embedding_rows(loading.load_model_config(model))
    tokens = [tokenised(text, tokenizer, rows, model) for text in asked]
    for corpus in tokens:
        if not corpus.n_tokens:
            raise UserError(f"{corpus.name}: has nothing to score, for in none of its chats does the assistant answer")
    windows = [cut(corpus.lengths, length, stride) for corpus in tokens]
    each = zip(tokens, windows, asked, strict=True)
    return [replace(corpus, windows=of_it, excluded=text.excluded) for corpus, of_it, text in each]


def _own_figures(subjects: Sequence[Subject], runs: Sequence[Path]) -> dict[str, Any] | None:
    """What the run whose text is scored says of itself, where it was named by its folder."""
    whole = [subject.run for subject in subjects if subject.run and subject.run.resolve() == subject.path.resolve()]
    if not runs or runs[0] not in whole or not (runs[0] / METRICS).is_file():
        return None
    metrics = read_json(runs[0] / METRICS)
    scores = {name: metrics.get(name) for name in ("base_test_bpt", "adapter_test_bpt")}
    if any(score is None for score in scores.values()):
        return None
    return {"name": runs[0].name, **scores, "block_size": texts.data_config(runs[0]).block_size}


def _texts(
    data_dir: str | None, forgetting: str | None, how: tuple[str, str, str], runs: Sequence[Path]
) -> list[texts.Texts]:
    """The text that is scored, and that on which forgetting is; read by a text column, an encoding and a record
    format."""
    if data_dir is not None:
        asked = [texts.named(data_dir, *how, runs)]
    elif runs:
        asked = [texts.held_out(runs[0], runs[1:])]
    else:
        raise UserError("--data-dir: name the text to score; only a run folder records what it held out")
    if forgetting is not None:
        asked.append(texts.named(forgetting, *how, runs, "--forgetting"))
    of_run = texts.data_config(runs[0]) if runs else DataConfig()
    return [replace(text, special_tokens=of_run.control_tokens, loss_on=of_run.loss_on) for text in asked]


def _check_window(length: int, stride: int, models: Sequence[str]) -> None:
    for name in models:
        most = loading.max_positions(loading.load_model_config(name))
        if most and length > most:
            raise UserError(f"--max-length {length}: {name} was made for {most} tokens at most")
    if stride > length:
        raise UserError(f"--stride {stride}: must not exceed the window, --max-length {length}")


def _machine(model: BaseConfig, accelerator: str, precision: str) -> Machine:
    accelerator = loading.device_named(accelerator, "--accelerator").type  # scoring alone does not need a GPU
    request = replace(
        Request.from_dotted({"data.isolate_documents": False}),
        base=replace(model, compile=False),  # its forward passes differ in shape, each would be compiled again
        trainer=TrainerConfig(accelerator=accelerator, precision=PRECISIONS.get(precision)),
    )
    found = machine.resolve_request(request)
    kernels.check(found.kernels, found.accelerator)
    return found


def _quantised(runs: Sequence[Path]) -> bool:
    """Whether the runs were trained on a base in 4 bits; they are scored on what they were trained on."""
    found = {bool(read_json(run / TRAINING_CONFIG).get("base", {}).get("quantize_4bit")) for run in runs}
    if len(found) > 1:
        raise UserError(
            "--4bit-quantization: some of the runs were trained on a base in 4 bits and some were not; "
            "choose one for all, with --4bit-quantization or --no-4bit-quantization"
        )
    return found == {True}


def _score(
    model: BaseConfig,
    scored_as: Sequence[tuple[str, str | None]],
    corpora: Sequence[ScoringCorpus],
    batch_size: int,
    here: Machine,
    console: Console,
    said: AnswerScoring,
    drifts: DriftScoring,
) -> float:
    """Score every corpus with a model and its adapters, and ask them; then they leave the memory.

    Args:
        model: that is loaded.
        scored_as: name and adapter: the model itself, without one, and what is scored on it.
        corpora: take the scores.
        batch_size: windows at a time.
        here: what is scored on.
        console: for the progress.
        said: has the questions, and takes the answers.
        drifts: has the general text of runs, and takes how far their adapters have drifted.

    Returns:
        The seconds that the scoring took, without loading.

    Raises:
        UserError: an adapter does not fit, or a score is not finite.
    """
    names = [name for name, _ in scored_as]
    folders = {given: Path(given).expanduser() for _, given in scored_as if given}
    dtype, device = loading.WEIGHT_DTYPES[here.precision], here.torch_device
    loaded, switches = load_adapted(replace(model, kernels=here.kernels), folders, dtype, device, here.attention)
    for given, folder in folders.items():  # now that all of the base is on this machine
        base_digest.check(saved_adapter.find(folder, given).training, given, model.name, refuse=False)
    if dtype != torch.float32:
        leave_casting_to_autocast(loaded)
    autocast = partial(loading.autocast, device, here.precision)
    seconds = 0.0
    for corpus in corpora:
        with advancing(f"scoring {', '.join(names)} on {corpus.name}", corpus.n_tokens, console) as advance:
            started = time.perf_counter()
            nats = score_windows(loaded, switches, corpus, batch_size, autocast=autocast, advance=advance)
            seconds += time.perf_counter() - started
        corpus.nats.update(zip(names, nats, strict=True))
        for row, window in np.argwhere(~np.isfinite(nats)):
            raise UserError(
                f"{names[row]}: scores {nats[row, window]} on "
                f"{corpus.documents[corpus.windows[window].document]}; its weights are not finite, or too large "
                "for the precision (try --precision fp32)"
            )
    by_name = dict(zip(names, switches, strict=True))
    try:
        said.ask(loaded, by_name, autocast, console)
        drifts.measure(loaded, switches[0], by_name, autocast, console)
    except KeyboardInterrupt:  # the scores may have taken hours
        log.warning("Ctrl-C: %s: not asked; the report has the scores", ", ".join(names))
    return seconds
