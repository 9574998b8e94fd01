"""From what was asked to what was found: read the texts, load the models, score, compare."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import nn

from granite_scu.config.flags import PRECISIONS
from granite_scu.config.settings import BaseConfig, RunConfig
from granite_scu.errors import UserError
from granite_scu.evaluation.bpt import models, results, texts
from granite_scu.evaluation.bpt.passes import Switch, score_windows
from granite_scu.evaluation.bpt.results import WindowScores
from granite_scu.evaluation.bpt.subjects import BASE, Subject, shared_base
from granite_scu.evaluation.bpt.windows import cut
from granite_scu.hardware import machine
from granite_scu.hardware.machine import Machine
from granite_scu.model import loading
from granite_scu.model.mamba2 import kernels
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import TRAINING_CONFIG, read_json

MAX_LENGTH = 1024
"""Tokens of a window where no run says what it was trained at."""


def evaluate(
    subjects: Sequence[Subject], options: Namespace, console: Console
) -> tuple[dict[str, Any], list[WindowScores]]:
    """Carry out a request.

    Args:
        subjects: what was named.
        options: the flags.
        console: for the progress.

    Returns:
        The report as JSON has it, and the scores on each corpus.

    Raises:
        UserError: something wrong with the models, their tokenizers or the texts.
    """
    base = shared_base(subjects, options.model)
    runs = list(dict.fromkeys(subject.run for subject in subjects if subject.run))
    if not base and not subjects:
        raise UserError("nothing to score: name run folders, adapters or models, or a base with --model; see --help")
    asked = _texts(options, runs)
    adapters, wholes = ([s for s in subjects if s.kind == kind] for kind in ("adapter", "model"))
    length, stride = _window([*([base] if base else []), *(whole.given for whole in wholes)], runs, options)
    quantize = _quantised(runs) if options.quantize_4bit is None else options.quantize_4bit
    here = _machine(BaseConfig(base or subjects[0].given, quantize, options.attn, options.kernels), options)
    tokenizer = models.load_tokenizer(base or subjects[0].given, subjects, asked[0].documents)
    scores = []
    for text in asked:
        corpus = text.tokenised(tokenizer)
        scores.append(WindowScores(corpus, cut(corpus.lengths, length, stride), text.excluded))
    here.claim(None)
    wanted = [(BaseConfig(base, quantize), BASE, adapters)] if base else []
    # A model that a QLoRA adapter was merged into is whole without 4 bits: rounding it again would round the adapter.
    whole_in_4_bits = bool(options.quantize_4bit)
    wanted += [(BaseConfig(whole.given, whole_in_4_bits), whole.name, []) for whole in wholes]
    loaded = (models.load_with_adapters(*each, here) for each in wanted)
    autocast = partial(loading.autocast, here.torch_device, here.precision)
    seconds = _score(loaded, scores, options.batch_size, autocast, console)
    named = [
        *([{"name": BASE, "adapter": None, "base": base}] if base else []),
        *({"name": s.name, "adapter": s.given, "base": base} for s in adapters),
        *({"name": s.name, "adapter": None, "base": s.given} for s in wholes),
    ]
    settings = {
        "max_length": length,
        "stride": stride,
        "batch_size": options.batch_size,
        "quantize_4bit": quantize,
        "precision": here.precision,
        "device": here.device.name,
        "tokens_per_s": sum(each.n_tokens for each in scores) * len(named) / seconds,
        "versions": versions(),
    }
    return results.report(scores[0], named, scores[1] if len(scores) > 1 else None, settings), scores


def _texts(options: Namespace, runs: Sequence[Path]) -> list[texts.Texts]:
    """The text that is scored, and that on which forgetting is."""
    if options.data_dir is not None:
        asked = [texts.named(options.data_dir, options.text_column, runs)]
    elif runs:
        asked = [texts.held_out(runs[0], runs[1:])]
    else:
        raise UserError("--data-dir: name the text to score; only a run folder says by itself what it held out")
    if options.forgetting is not None:
        asked.append(texts.named(options.forgetting, options.text_column, runs, "--forgetting"))
    return asked


def _window(names: Sequence[str], runs: Sequence[Path], options: Namespace) -> tuple[int, int]:
    """Tokens of a window, and those by which it moves on."""
    length = options.max_length or max((texts.data_config(run).block_size for run in runs), default=MAX_LENGTH)
    for name in names:
        most = getattr(loading.load_model_config(name), "max_position_embeddings", None)
        if most and length > most:
            raise UserError(f"--max-length {length}: {name} was made for {most} tokens at most")
    stride = options.stride or max(1, length // 2)
    if stride > length:
        raise UserError(f"--stride {stride}: must not exceed the window, --max-length {length}")
    return length, stride


def _machine(request: BaseConfig, options: Namespace) -> Machine:
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("--accelerator cuda: there is no CUDA device; use --accelerator cpu")
    cpu = options.accelerator == "auto" and not torch.cuda.is_available()  # scoring alone does not need a GPU
    accelerator = "cpu" if cpu else options.accelerator
    precision = "auto" if options.precision == "auto" else PRECISIONS[options.precision]
    found = machine.resolve(request, RunConfig(), {"accelerator": accelerator, "precision": precision})
    kernels.check(found.kernels, found.accelerator)
    return found


def _quantised(runs: Sequence[Path]) -> bool:
    """Whether the runs were trained on a base in 4 bits; they are scored on what they were trained on."""
    found = {bool(read_json(run / TRAINING_CONFIG).get("base", {}).get("quantize_4bit")) for run in runs}
    if len(found) > 1:
        raise UserError(
            "--4bit-quantization: some of the runs were trained on a base in 4 bits and some were not; "
            "say on which all are to be scored, with --4bit-quantization or --no-4bit-quantization"
        )
    return found == {True}


def _score(
    each_model: Iterable[tuple[nn.Module, dict[str, Switch]]],
    scores: Sequence[WindowScores],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    console: Console,
) -> float:
    """Score every corpus with every model, of which one at a time is in memory.

    Returns:
        The seconds it took without loading.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    seconds = 0.0
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        for model, switches in each_model:
            for of_corpus in scores:
                what = f"{', '.join(switches)} on {of_corpus.corpus.name}"
                task = progress.add_task(what, total=of_corpus.n_tokens)
                started = time.perf_counter()
                whole = of_corpus.corpus, of_corpus.windows
                told = partial(progress.advance, task)
                nats = score_windows(model, [*switches.values()], *whole, batch_size, autocast=autocast, advance=told)
                seconds += time.perf_counter() - started
                of_corpus.nats.update(zip(switches, nats, strict=True))
                for name in switches:
                    _check_finite(name, of_corpus)
    return seconds


def _check_finite(name: str, of_corpus: WindowScores) -> None:
    for window, nats in zip(of_corpus.windows, of_corpus.nats[name], strict=True):
        if np.isfinite(nats):
            continue
        document = of_corpus.corpus.documents[window.document]
        raise UserError(
            f"{name}: scores {nats} on {document}; its weights are not finite, or too large for the "
            "precision (try --precision fp32)"
        )
