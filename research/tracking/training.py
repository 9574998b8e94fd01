"""One cell of the grid of ``research.tracking``, trained: a user's run, but for the callback that disturbs it."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from granite_scu.config.errors import UserError
from research.laws import place_of
from research.tracking.grid import CORPORA, EVERY, TOKENS, TrackingCell, moved

ROOT = Path(__file__).parents[2]

NO_TRAINING = ("help", "h", "print_config", "dry_run", "check_requirements", "json", "debug")
"""Flags of the training script that ask for something else than a run."""


def train(cell: TrackingCell, scratch: Path | None = None) -> list[dict[str, Any]]:
    """The run's history. The run is a user's, but for the callback that disturbs it."""
    import torch

    from granite_scu.cli.console import quiet
    from granite_scu.training import recipe

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        request = request_of(cell, folder)
        console = Console(quiet=True)
        quiet(console)
        if cell.disturbance:
            request = replace(request, trainer=replace(request.trainer, callbacks=[_disturbance(cell, request)]))
        run = recipe.prepare(request, console)
        recipe.train(run)
        return json.loads((run.folder.path / "scu_history.json").read_text(encoding="utf-8"))


def request_of(cell: TrackingCell, folder: str) -> Any:
    """What a user would ask for to have the run in that folder. Makes nothing there.

    Raises:
        UserError: no run can be made of the cell's settings, or they change what the grid varies or counts on.
    """
    from granite_scu.cli import script_flags

    _check_names([setting.partition("=")[0].strip("-").replace("-", "_") for setting in cell.settings])
    layers, _ = script_flags.translate(
        [
            "--test-run", "--output-dir", folder, "--data-dir", cell.corpus, "--data.train_tokens", str(TOKENS),
            "--max-steps", str(cell.steps), "--no-isolate-documents",  # as the published grid was measured
            "--warmup-steps", "20", "--eval-steps", str(cell.steps), "--control-every", str(EVERY),
            "--learning-rate", str(cell.learning_rate), "--lora-r", str(cell.rank),
            "--lora-alpha", str(2 * cell.rank), "--seed", str(cell.seed),
            "--controller", place_of(cell.controller), "--target-s", str(cell.setpoint), *cell.settings,
        ]
    )  # fmt: skip

    request = layers.request()
    settled = {
        "--output-dir": (request.run.output_dir, folder),
        "--data-dir": (request.data.path, cell.corpus),
        "--max-steps": (request.trainer.max_steps, cell.steps),
        "--max-time": (request.trainer.max_time, None),
        "--num-epochs": (request.data.num_epochs, None),
        "--early-stopping": (request.run.early_stopping, None),
        "--stop-at-equilibrium": (request.run.stop_at_equilibrium, None),
        "--control-every": (request.control.every, EVERY),
        "--learning-rate": (request.optimizer.learning_rate, cell.learning_rate),
        "--lora-r": (request.lora.rank, cell.rank),
        "--seed": (request.seed, cell.seed),
        "--controller": (request.control.controller, place_of(cell.controller)),
        "--target-s": (request.control.target_s, cell.setpoint),
    }
    for flag, (found, ours) in settled.items():
        if found != ours:
            raise UserError(f"--set: {flag} is the grid's own; leave it out")
    request.control.law()  # for the law's own refusals
    return request


def _check_names(settings: list[str]) -> None:
    for name in settings:
        if name in NO_TRAINING:
            raise UserError(f"--set: {name} is no setting of a run; leave it out")
        if settings.count(name) > 1:
            raise UserError(f"--set: {name} is given twice; leave one out")


def _disturbance(cell: TrackingCell, request: Any) -> Any:
    """A callback that disturbs the run once, at its middle."""
    import lightning as L

    from granite_scu.data.datamodule import TextDataModule
    from granite_scu.model import loading
    from granite_scu.training.callbacks.shannon_control import ShannonControl

    class Disturbance(L.Callback):
        others = None

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if cell.disturbance == "corpus switched":
                corpus = CORPORA[cell.corpus == CORPORA[0]]
                data = TextDataModule(replace(request.data, path=corpus), request.seed)
                data.prepare(loading.load_tokenizer(request.base.name))
                self.others = iter(data.train_dataloader())

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: dict, index: int) -> None:
            if self.others is not None and index >= cell.steps // 2:
                for name, tensor in next(self.others).items():
                    batch[name].copy_(tensor)
            if index != cell.steps // 2:
                return
            if cell.disturbance == "learning rate x3":
                scheduler = trainer.lr_scheduler_configs[0].scheduler
                scheduler.base_lrs = [3 * rate for rate in scheduler.base_lrs]
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] *= 3
            elif cell.disturbance.startswith("S*"):
                loop = next(c for c in trainer.callbacks if isinstance(c, ShannonControl)).loop
                loop.law = replace(loop.law, setpoint=moved(cell.setpoint, cell.disturbance))

    return Disturbance()
