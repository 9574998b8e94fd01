"""One run of the comparison: trained as a user's run is, scored by document, and kept as one small record."""

import json
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.console import Console

from granite_scu.config.errors import Diverged
from granite_scu.config.request import Request
from granite_scu.config.settings import ControlConfig
from granite_scu.data.blocks.packing import Blocks
from granite_scu.evaluation.score import score
from granite_scu.model import loading
from granite_scu.model.loss import token_nats
from granite_scu.storage.provenance import git_revision
from granite_scu.storage.run_folder import CONTROL_CONFIG
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.module import GraniteModule
from granite_scu.training.prepared_run import PreparedRun, build_module
from granite_scu.training.recipe import prepare, train
from research.comparison.data import ComparedData, place_of
from research.comparison.document_scores import DocumentScores, score_documents
from research.comparison.evidence import Evidence, Spec
from research.comparison.protocol import EVAL_STEPS, TRAINING, VALIDATION_TOKENS
from research.laws import AUTO, auto
from research.laws import place_of as place_of_law
from research.run_store import origin, write_record

RESEARCH = Path(__file__).parents[1]
"""In which the other bases lie."""


def carry_out(spec: Spec, evidence: Path, scratch: Path | None = None) -> dict:
    """Do a run and write its record into the evidence folder; returns the record.

    A run that diverges is a result too: its record says so, and it is not done again. What fails for another reason
    says nothing about the arm, and leaves no record.

    Raises:
        RunFailed: another reason, such as too little memory.
    """
    git_revision()  # that of now: the code is loaded, and the tree may move on while it trains
    started, started_cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="granite-scu-run-", dir=scratch) as name:
        folder = Path(name)
        settings = dict(spec.settings)
        if "control.replay" in settings:
            settings |= recorded(Evidence(evidence, spec.precision).records[settings.pop("control.replay")])
        request = Request.from_dotted(dotted_settings(spec, settings, folder / "run"))
        data = ComparedData(request.data, request.seed, spec.task, request.base.name)
        run = prepare(request, Console(quiet=True), data=data)
        try:
            result = score_base(run, data) if spec.task.steps == 0 else _train(run, spec.law)
        except Diverged as error:
            result = {"failed": str(error)}
    record = {
        "key": spec.key,
        "task": spec.task.name,
        "arm": spec.arm,
        "setting": spec.setting,
        "seed": spec.seed,
        "settings": {**TRAINING, **spec.settings, "trainer.precision": spec.precision},
        "corpora": [corpus for corpus in (spec.task.corpus, spec.task.then) if corpus],
        **result,
        "text": data.text_digest,
        "wall_time_s": round(time.perf_counter() - started, 1),
        "cpu_time_s": round(time.process_time() - started_cpu, 1),
        **origin(),
    }
    write_record(evidence / spec.file, record)
    return record


def dotted_settings(spec: Spec, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the run is asked for as."""
    task = spec.task
    given = {
        "run.eval_steps": EVAL_STEPS,
        **TRAINING,
        **settings,
        "seed_everything": spec.seed,
        "trainer.precision": spec.precision,
        "data.path": place_of(task.scored_on),
        "data.isolate_documents": False,  # the protocol's: its evidence is from before documents were kept apart
        "run.output_dir": str(folder),
        "run.save_steps": 1_000_000,  # never: a run is minutes long
        "run.samples": 0,
        "trainer.limit_val_batches": VALIDATION_TOKENS,  # the text is cut to size itself
    }
    moves = given.get("control.target_s") == auto.AUTO and given.pop("control.target_s")
    given["control.controller"] = AUTO if moves else place_of_law(given["control.controller"])
    known = {f"control.{field.name}" for field in fields(ControlConfig)}
    own = [name for name in given if name.startswith("control.") and name not in known]
    if own:
        given["control.controller_args"] = [f"{name.partition('.')[2]}={given.pop(name)}" for name in own]
    if (base := RESEARCH / str(given["base.name"])).is_dir():
        given["base.name"] = str(base)
    if task.train_tokens:
        given["data.train_tokens"] = task.train_tokens
    if task.steps is None:
        given |= {"data.num_epochs": 1, "trainer.max_steps": -1}
    else:
        given["trainer.max_steps"] = max(task.steps, 1)
    return given


def recorded(record: dict[str, Any]) -> dict[str, Any]:
    """What ``Replay`` repeats of a finished run, as its settings."""
    ticks = record["ticks"]
    return {"control.steps": ticks["step"], "control.lams": ticks["lambda"], "control.initial": ticks["lambda"][0]}


def _train(run: PreparedRun, asked: dict[str, Any]) -> dict:
    """Train and score."""
    summary = train(run, final_score=ScoreByDocument)
    law, ticks = _controller_as_run(run.folder.path), summary.pop("ticks")
    return {
        **summary,
        "law": {**asked, "lambda_init": law["lambda_start"], "target_s": law["target_s"]},
        "ticks": ticks,
    }


def _controller_as_run(folder: Path) -> dict:
    """What the run folder says of the controller; empty where the run did not come to write it."""
    path = folder / CONTROL_CONFIG
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def score_base(run: PreparedRun, data: ComparedData) -> dict:
    """The base model on the training and validation texts and, by document, on the test text."""
    module = build_module(run)
    module.configure_model()  # its adapters are untrained: B = 0, and they add nothing
    autocast = partial(loading.autocast, torch.device("cpu"), run.machine.precision)  # the Trainer's, outside of it
    training = score(module, data.whole_training_text(), model=module, context=autocast())
    validation = score(module, data.val_dataloader(), model=module, context=autocast())
    test = by_document(module, data.test, data.config.batch_size, autocast())
    scored = np.flatnonzero(test.tokens)  # of a long test text blocks are left out, and whole documents with them
    return {
        "training": {"final": _rounded(training.bits_per_token), "tokens": training.tokens},
        "validation": {"final": _rounded(validation.bits_per_token), "tokens": validation.tokens},
        "test": {
            "documents": [data.test_documents[number] for number in scored.tolist()],
            "tokens": _tokens(test),
            "final": _nats(test),
        },
    }


class ScoreByDocument(FinalScore):
    """Scores the test documents with the final and with the best-validated adapter; saves nothing."""

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        self.stopwatch.stop()
        data, best = trainer.datamodule, self.best
        self.validate_last_step(trainer, module)
        context = trainer.precision_plugin.forward_context
        final = by_document(module, data.test, data.config.batch_size, context())
        at_best = final
        if best.step != trainer.global_step:
            best.restore(trainer, module)
            at_best = by_document(module, data.test, data.config.batch_size, context())
        ticks = self.folder.finish_history()
        self.summary = {
            "failed": None,
            "steps": trainer.global_step,
            "tokens": ticks[-1]["tokens"],
            "n_tokens": module.n_tokens,
            "skipped_steps": ticks[-1]["skipped"],
            "train_time_s": round(self.stopwatch.seconds, 1),
            "validation": {"final": _rounded(best.latest), "best": _rounded(best.val_bpt), "best_step": best.step},
            "test": {"tokens": _tokens(final), "final": _nats(final), "best": _nats(at_best)},
            "ticks": _course(ticks),
        }


def _course(ticks: list[dict]) -> dict[str, list]:
    """What a record keeps of the ticks, a list for each field."""
    names = ["step", "s", "lambda", "data_bpt"]
    sensed = dict.fromkeys(name for tick in ticks for name in tick if name.startswith(("saved_", "savings_")))
    if sensed:  # what a setpoint was moved by, and to where
        names += ["s_target", *sensed]
    return {name: [_short(tick.get(name)) for tick in ticks] for name in names}


def by_document(module: GraniteModule, test: Blocks, size: int, context: AbstractContextManager) -> DocumentScores:
    """The module's score on each document of a test text, ``size`` blocks at a time."""
    model = module.language_model
    return score_documents(partial(token_nats, model), test, size, model=module, context=context)


def _tokens(scores: DocumentScores) -> list[int]:
    """Of each document that was scored."""
    return [int(count) for count in scores.tokens if count]


def _nats(scores: DocumentScores) -> list[float]:
    """Of each document that was scored."""
    return [round(float(nats), 4) for nats, count in zip(scores.nats, scores.tokens, strict=True) if count]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _short(value: float | None) -> float | None:
    """Five digits: what a record keeps of a tick."""
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")
