"""One cell of the protocol, trained and measured: a line of ``runs.jsonl``."""

import copy
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.asking import said_in
from benchmarks.cells import REAL
from benchmarks.drift_training import ANY_BUDGET, block_of, general_file, of_loop, settings
from benchmarks.learning_rates_data import Lesson
from granite_scu import Request
from granite_scu.config.errors import Diverged
from granite_scu.evaluation import general_text
from granite_scu.hardware.detection import detect
from granite_scu.model import loading
from granite_scu.model.description_length import weighted_penalty
from granite_scu.model.mamba2 import mamba
from granite_scu.storage.run_folder import read_json
from granite_scu.training.recipe import prepare, train
from research.laws import AUTO
from research.real.grid import Cell, Line
from research.real.measuring import Measured, once
from research.real.tasks import TASKS, digest, split

VALIDATIONS = 10
LAMBDA_OF_BOTH = 0.01
"""Of S, beside a budget of drift."""


def run(cell: Cell, name: str, folder: Path, device: str) -> Line:
    """Train a cell and measure it: a line but for the cell itself.

    Args:
        cell: what is trained.
        name: of the base, as ``--model`` takes it.
        folder: where the general texts are kept.
        device: ``cpu`` or ``cuda``.
    """
    torch.set_num_threads(1)
    tokenizer, files = loading.load_tokenizer(name), general_files(cell, name, folder, device)
    text, judge = (general_text.read(file, tokenizer) for file in files)
    parts, measured = split(cell.task), Measured(cell, judge, folder)
    with tempfile.TemporaryDirectory() as working:
        place, made = Path(working), Lesson(parts.train, parts.validation, None)
        block, replayed = block_of(made, tokenizer, text), cell.value if cell.arm == "replay" else 0.0
        of_run = TASKS[cell.task].epochs, cell.rate, cell.seed
        request = Request.from_dotted(
            settings(name, place, made, tokenizer, text, block, of_run, replayed)
            | of_arm(cell, files[0])
            | {
                "trainer.limit_val_batches": len(parts.validation),
                "trainer.accelerator": device,
                "base.compile": False,
                "trainer.precision": "bf16-mixed",
            }
        )
        callbacks = [measured, *([SmallToo()] if cell.arm == "both" else [])]
        request = replace(request, trainer=replace(request.trainer, callbacks=callbacks))
        try:
            prepared = prepare(request, Console(quiet=True))
            every = math.ceil(prepared.length.steps / VALIDATIONS)
            summary = train(replace(prepared, request=prepared.request.with_values({"run.eval_steps": every})))
        except Diverged as error:
            return {"digest": digest(cell.task), "device": device, "failed": str(error)}
        history = read_json(place / "run" / "scu_history.json", kind=list)
    return {
        "digest": digest(cell.task),
        "device": device,
        "processor": detect(device).name,
        "steps": summary["steps"],
        "step_tokens": prepared.length.tokens_per_step,
        "tokens": summary["steps"] * prepared.length.tokens_per_step,
        "best_step": summary["best_val_step"],
        **({"loop": of_loop(summary["drift"], history)} if request.drift.max_drift else {}),
        **measured.found,
        "train_s": round(summary["train_time_s"], 1),
    }


def general_files(cell: Cell, name: str, folder: Path, device: str) -> tuple[Path, Path]:
    """The general text that an arm has, and that drift is measured on; written by the base where it is not there yet.

    Of chats the real model writes what a run has it write: questions that begin as those that are trained on.
    """
    train, free = split(cell.task).train, folder / f"general-{cell.base}.jsonl"
    texts = {free: []}
    if cell.base == REAL and "messages" in train[0]:
        texts[folder / f"general-{cell.base}-{cell.task}.jsonl"] = [question for question, _ in said_in(train)]
    for path, questions in texts.items():
        with once(path):
            general_file(name, path, questions, device)
    return [*texts][-1], free


def of_arm(cell: Cell, general: Path) -> dict[str, Any]:
    """What an arm adds to the settings."""
    plain, held = {"control.controller": "none"}, {"drift.general_data": [str(general)]}
    one = dict.fromkeys(("control.lambda_init", "control.lambda_min", "control.lambda_max"), cell.value)
    of_lora = {"lora.rank": round(cell.value), "lora.alpha": 2 * cell.value}
    return {
        "plain": plain,
        "replay": plain,
        "auto": {"control.controller": AUTO},
        "drift": held | {"drift.max_drift": cell.value},
        "wide": held | {"drift.max_drift": cell.value, "control.lambda_max": 1e3},
        "both": held | {"drift.max_drift": cell.value},
        "kl": held | {"drift.max_drift": ANY_BUDGET} | one,
        "lambda": {"control.controller": "fixed", "control.lambda_init": cell.value},
        "decay": plain | {"optimizer.weight_decay": cell.value},
        "dropout": plain | {"lora.dropout": cell.value},
        "rank": plain | of_lora,
    }[cell.arm]


def keep_models() -> None:
    """Read each base once in this process, and give every run a copy. One with Mamba layers is read again: these hold
    on to the kernels that were chosen for them."""
    load, kept = loading.load_model, {}

    def load_once(*of: Any) -> Any:
        if str(of) in kept:
            return copy.deepcopy(kept[str(of)])
        model = load(*of)
        if not mamba.layers_of(model):
            kept[str(of)] = copy.deepcopy(model)
        return model

    loading.load_model = load_once


class SmallToo(L.Callback):
    """Adds to the gradient of drift that of the adapter's size, under a lambda of its own."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        drift = module.drift_gradient

        def gradient(step: int) -> list[Tensor]:
            lams = [LAMBDA_OF_BOTH / module.lam] * len(module.layer_updates)  # what is returned is multiplied by lam
            size = weighted_penalty(module.layer_updates, lams, module.prior_sigma, module.n_tokens)
            return torch._foreach_add(drift(step), size)

        module.drift_gradient = gradient
