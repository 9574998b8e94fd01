"""One cell of the protocol, trained and measured: a line of ``runs.jsonl``."""

import copy
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor

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
from research.real.grid import Cell, Line
from research.real.measuring import Measured
from research.real.product import general_files, of_arm, settings
from research.real.tasks import digest, split

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
        asked = settings(cell, name, place, made, tokenizer, text, device) | of_arm(cell, files[0])
        request = Request.from_dotted(asked)
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


def of_loop(drift: dict[str, Any], history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How a run with an anchor went: drift at the end on what of its text the loop did not see, and each tick."""
    last = history[-1]
    return {
        "held_out": drift["share"],
        "steering": last["drift"],
        **({"scale": round(drift["scale"], 4)} if drift.get("scale", 1) < 1 else {}),
        "lambda": last["lambda"],
        "at_bound": bool(last.get("saturated")),
        "course": [[tick["step"], round(tick["drift"], 5), float(f"{tick['lambda']:.4g}")] for tick in history],
    }


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
