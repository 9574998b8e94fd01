"""From what was asked to what was found: read the texts, load the models, score, compare."""

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from granite_scu.config.flags import PRECISIONS
from granite_scu.config.settings import BaseConfig, RunConfig
from granite_scu.errors import UserError
from granite_scu.evaluation.bpt import models, results, texts
from granite_scu.evaluation.bpt.passes import score_windows
from granite_scu.evaluation.bpt.results import WindowScores
from granite_scu.evaluation.bpt.subjects import BASE, Subject, read_json, runs_of, shared_base
from granite_scu.evaluation.bpt.windows import cut
from granite_scu.hardware import machine
from granite_scu.hardware.machine import Machine
from granite_scu.model import loading
from granite_scu.model.mamba2 import kernels
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import TRAINING_CONFIG

MAX_LENGTH = 1024
"""Tokens of a window where no run says what it was trained at."""


@dataclass(frozen=True)
class ScoringPlan:
    """What is scored, and how.

    Attributes:
        base: the base model of the adapters; None where only whole models are scored.
        subjects: adapters and whole models.
        quantize_4bit: whether the base's frozen layers are held in 4 bits.
        quantize_models: whether those of whole models are. One that a QLoRA adapter was merged into is whole without:
            rounding it again would round the adapter.
        machine: device, precision and kernels.
        max_length: tokens of a window.
        stride: tokens by which it moves on.
        batch_size: windows at a time.
    """

    base: str | None
    subjects: Sequence[Subject]
    quantize_4bit: bool
    quantize_models: bool
    machine: Machine
    max_length: int
    stride: int
    batch_size: int

    @property
    def named_models(self) -> list[dict[str, Any]]:
        """Name, adapter and base of each model, in the order of scoring."""
        base = [{"name": BASE, "adapter": None, "base": self.base}] if self.base else []
        return [
            *base,
            *({"name": s.name, "adapter": s.given, "base": self.base} for s in self.subjects if s.kind == "adapter"),
            *({"name": s.name, "adapter": None, "base": s.given} for s in self.subjects if s.kind == "model"),
        ]

    def load(self) -> Iterator[models.Loaded]:
        """The base with its adapters, then whole models, one at a time in memory."""
        if self.base:
            adapters = [subject for subject in self.subjects if subject.kind == "adapter"]
            yield models.load_with_adapters(BaseConfig(self.base, self.quantize_4bit), BASE, adapters, self.machine)
        for subject in self.subjects:
            if subject.kind == "model":
                whole = BaseConfig(subject.given, self.quantize_models)
                yield models.load_with_adapters(whole, subject.name, [], self.machine)


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
    base, runs = shared_base(subjects, options.model), runs_of(subjects)
    if not base and not subjects:
        raise UserError("nothing to score: name run folders, adapters or models, or a base with --model; see --help")
    asked = _texts(options, runs)
    plan = _plan(base, subjects, runs, options)
    tokenizer = models.load_tokenizer(base or subjects[0].given, subjects, asked[0].documents)
    scores = []
    for text in asked:
        corpus = text.tokenised(tokenizer)
        scores.append(WindowScores(corpus, cut(corpus.lengths, plan.max_length, plan.stride), text.excluded))
    plan.machine.claim(None)
    seconds = _score(plan, scores, console)
    scored = sum(each.n_tokens for each in scores) * len(plan.named_models)
    first, second = scores[0], scores[1] if len(scores) > 1 else None
    return results.report(first, plan.named_models, second, _settings(plan, scored / seconds)), scores


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


def _plan(base: str | None, subjects: Sequence[Subject], runs: Sequence[Path], options: Namespace) -> ScoringPlan:
    length = options.max_length or max((texts.data_config(run).block_size for run in runs), default=MAX_LENGTH)
    for name in [*([base] if base else []), *(subject.given for subject in subjects if subject.kind == "model")]:
        _check_length(name, length)
    stride = options.stride or max(1, length // 2)
    if stride > length:
        raise UserError(f"--stride {stride}: must not exceed the window, --max-length {length}")
    quantize = _quantised(runs) if options.quantize_4bit is None else options.quantize_4bit
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("--accelerator cuda: there is no CUDA device; use --accelerator cpu")
    cpu = options.accelerator == "auto" and not torch.cuda.is_available()  # scoring alone does not need a GPU
    accelerator = "cpu" if cpu else options.accelerator
    precision = "auto" if options.precision == "auto" else PRECISIONS[options.precision]
    request = BaseConfig(base or subjects[0].given, quantize, options.attn, options.kernels)
    found = machine.resolve(request, RunConfig(), {"accelerator": accelerator, "precision": precision})
    kernels.check(found.kernels, found.accelerator)
    return ScoringPlan(base, subjects, quantize, bool(options.quantize_4bit), found, length, stride, options.batch_size)


def _check_length(name: str, length: int) -> None:
    config = loading.load_model_config(name)
    most = getattr(config, "max_position_embeddings", None)
    if most and length > most:
        raise UserError(f"--max-length {length}: {name} was made for {most} tokens at most")


def _quantised(runs: Sequence[Path]) -> bool:
    """Whether the runs were trained on a base in 4 bits; they are scored on what they were trained on."""
    found = {bool(read_json(run / TRAINING_CONFIG).get("base", {}).get("quantize_4bit")) for run in runs}
    if len(found) > 1:
        raise UserError(
            "--4bit-quantization: some of the runs were trained on a base in 4 bits and some were not; "
            "say on which all are to be scored, with --4bit-quantization or --no-4bit-quantization"
        )
    return found == {True}


def _score(plan: ScoringPlan, scores: Sequence[WindowScores], console: Console) -> float:
    """Score every corpus with every model; returns the seconds it took without loading."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    seconds = 0.0
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        for loaded in plan.load():
            for of_corpus in scores:
                what = f"{', '.join(loaded.names)} on {of_corpus.corpus.name}"
                task = progress.add_task(what, total=of_corpus.n_tokens)
                started = time.perf_counter()
                nats = score_windows(
                    loaded.model,
                    loaded.switches,
                    of_corpus.corpus,
                    of_corpus.windows,
                    plan.batch_size,
                    autocast=partial(loading.autocast, plan.machine.torch_device, plan.machine.precision),
                    advance=partial(progress.advance, task),
                )
                seconds += time.perf_counter() - started
                for name, found in zip(loaded.names, nats, strict=True):
                    _check_finite(name, found, of_corpus)
                    of_corpus.nats[name] = found
    return seconds


def _check_finite(name: str, nats: NDArray[np.float64], of_corpus: WindowScores) -> None:
    wrong = np.flatnonzero(~np.isfinite(nats))
    if len(wrong):
        document = of_corpus.corpus.documents[of_corpus.windows[wrong[0]].document]
        raise UserError(
            f"{name}: scores {nats[wrong[0]]} on {document}; its weights are not finite, or too large for the "
            "precision (try --precision fp32)"
        )


def _settings(plan: ScoringPlan, tokens_per_s: float) -> dict[str, Any]:
    return {
        "max_length": plan.max_length,
        "stride": plan.stride,
        "batch_size": plan.batch_size,
        "quantize_4bit": plan.quantize_4bit,
        "precision": plan.machine.precision,
        "device": plan.machine.device.name,
        "tokens_per_s": tokens_per_s,
        "versions": versions(),
    }
