"""A training run from its configuration to its folder: prepare, plan, train, write."""

import contextlib
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from rich.console import Console

from granite_scu import control
from granite_scu.config.request import Plan, Request
from granite_scu.config.settings import DEFAULT_STEPS, BaseConfig
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.streaming import StreamedDataModule
from granite_scu.data.workers import errors_in_one_line
from granite_scu.errors import RunFailed, Stopped, UserError
from granite_scu.export.publish import model_card
from granite_scu.hardware import machine, presets
from granite_scu.model import initial_adapter as starting
from granite_scu.model import loading
from granite_scu.model.mamba2 import kernels
from granite_scu.storage import checkpoint
from granite_scu.storage.run_folder import DOCUMENTS, LOCK, MARK, RunFolder
from granite_scu.training import batch_size
from granite_scu.training import memory_budget as budget
from granite_scu.training import run_metadata as records
from granite_scu.training import setpoint_probe as probe
from granite_scu.training.announcement import announce
from granite_scu.training.assembly import assemble
from granite_scu.training.callbacks.best_adapter import BestAdapter
from granite_scu.training.callbacks.final_score import Finish
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.stopwatch import Stopwatch
from granite_scu.training.controller import build_controller, check_equilibrium_stop, check_length, setpoint_of_auto
from granite_scu.training.module import GraniteModule
from granite_scu.training.resume import Resume, check, go_on, open_checkpoint, rewind
from granite_scu.training.trainer import check_trainer, children

log = logging.getLogger(__name__)


class Run:
    """A run that has been asked for. Constructing it refuses what can be refused without loading a model.

    Args:
        request: what was asked for.
        console: where progress goes.
        controller: steers in place of the one that ``request.control`` describes.

    Raises:
        UserError: the request cannot be met on this machine or its data is wrong.
    """

    def __init__(
        self, request: Request, console: Console | None = None, controller: control.Controller | None = None
    ) -> None:
        self.request = request
        self.console = console or Console()
        check_trainer(request.trainer)
        if controller is None:
            build_controller(probe.provisional(request.control))  # refuses what is wrong before the data is read
        self._is_steered = controller is not None
        self.found: dict | None = None  # what --target-s auto found
        self.probe_seconds = 0.0  # and how long that took
        if request.run.stop_at_equilibrium:
            check_equilibrium_stop(request.control)
        self.machine = machine.resolve_request(request)
        kernels.check(self.machine.kernels, self.machine.accelerator)
        if warning := presets.mismatch(request.hardware, self.machine.device):
            log.warning(warning)
        self.folder = RunFolder(request.run.output_dir)
        self.tokenizer = loading.load_tokenizer(request.base.name)
        self.start = self._open_start()
        if self.start:
            self.request = request = replace(request, lora=starting.lora_of(request.lora, self.start))
        self._check_block_size()
        if request.run.auto_batch_size:
            batch_size.check(request, self.machine)
            self.request = request = batch_size.first_guess(request, self.machine)
        self.data = self.make_data()
        self.data.prepare(self.tokenizer)
        self.data.check_processes(self.machine.world_size)
        self.plan = self._plan()
        check_length(request, self.plan.steps)
        if self.seeks_setpoint:
            probe.check_length(self.plan.steps)
        self.controller = controller or build_controller(probe.provisional(request.control), self.plan.steps)

    def _open_start(self) -> starting.Start | None:
        path, base = self.request.lora.adapter, self.request.base.name
        if path is None:
            return None
        starting.check_control(self.request.control)
        resume = self._checkpoint()
        if resume and not Path(path).expanduser().is_dir():  # the checkpoint has all that is needed of it
            return starting.from_checkpoint(resume.path, path, base, resume.state["frozen"])
        return starting.open_start(path, base)

    def _check_block_size(self) -> None:
        name, size = self.request.base.name, self.request.data.block_size
        width = getattr(loading.load_model_config(name), "mamba_d_conv", 0)
        if size < width:
            raise UserError(f"--block-size {size}: shorter than the {width} tokens that a convolution of {name} spans")

    def take_request(self, request: Request) -> None:
        """Go on with a request that differs in the size of the micro-batches alone."""
        self.request = request
        self.data.config = request.data

    def make_data(self) -> TextDataModule:
        """The data of the run, not yet prepared."""
        kind = StreamedDataModule if self.request.data.stream else TextDataModule
        data = kind(self.request.data, self.request.seed)
        data.alike = self.request.base.compile
        return data

    def make_finish(self, scu: ShannonControl, best: BestAdapter, stopwatch: Stopwatch) -> Finish:
        """The callback that scores and saves at the end."""
        return Finish(self.folder, scu, best, stopwatch, self.tokenizer, self.console)

    def _plan(self) -> Plan:
        data, trainer = self.request.data, self.request.trainer
        blocks = data.batch_size * trainer["accumulate_grad_batches"] * self.machine.world_size
        limits = [trainer["max_steps"]] if trainer["max_steps"] > 0 else []
        if data.num_epochs is not None:
            # Rounded up, so that the passes asked for are complete.
            limits.append(math.ceil(data.num_epochs * self.data.steps_per_epoch(blocks)))
        steps, tokens_per_step = min(limits, default=DEFAULT_STEPS), blocks * data.block_size
        # Nobody has counted a stream; what is read of it counts once.
        counted = steps * tokens_per_step if data.stream else self.data.n_tokens
        return Plan(steps, tokens_per_step, n_tokens=self.request.prior.n_tokens or counted)

    def fit(self) -> dict:
        """Train, score and write the run folder; returns the summary that ``scu_metrics.json`` holds."""
        main = L.pytorch.utilities.rank_zero_only.rank == 0
        try:
            resume = self.check_folder() if main else self._checkpoint()
            self.machine.claim(self.request.run.memory_fraction)
            with budget.explained(lambda: self.request, self.machine):
                return self._fit(main, resume)
        finally:  # of a run that failed too: a notebook's process goes on, and may try again
            self.folder.unlock()

    def _fit(self, main: bool, resume: Resume | None) -> dict:
        if self.request.run.auto_batch_size:
            self._settle_batch()
        request = self.request
        if self.seeks_setpoint:
            self._find_setpoint(resume)
        module = self.make_module()
        if resume:
            check(self, module, resume)
        self.console.print(f"loading {request.base.name}", highlight=False)
        module.configure_model()
        finish, trainer = assemble(self, module, resume)
        if resume:
            go_on(self, module, resume)
        if main:  # only now is the folder touched: a request that is refused loses nothing
            self._open_folder(resume)
            announce(self, module)
        if resume:
            self.console.print(f"going on from {resume.path.name} at step {resume.step}", highlight=False)
            finish.best.resume(resume.path / checkpoint.BEST, write=main)
        try:
            self.train(trainer, module, resume)
            if trainer.global_step == (resume.step if resume else 0):
                _conclude(trainer, module)
        except BaseException:
            for child in children(trainer):  # all that was to be saved, this process has saved
                child.kill()
            children(trainer).clear()
            # How far a run got that failed or was stopped; should that fail too, the first failure counts.
            with contextlib.suppress(OSError, ValueError, UserError):
                if main and self.folder.read_history():
                    self.report()
            raise
        if main:
            self.illustrate()
        _part(trainer)
        return finish.summary

    def _settle_batch(self) -> None:
        """Prove the batch, and write it down as if it had been given."""
        found = batch_size.prove(self)
        given = yaml.safe_load(found.yaml)
        given["data"]["batch_size"] = found.data.batch_size
        given["trainer"]["accumulate_grad_batches"] = found.trainer["accumulate_grad_batches"]
        given["run"]["auto_batch_size"] = False
        self.take_request(
            replace(found, run=replace(found.run, auto_batch_size=False), yaml=yaml.safe_dump(given, sort_keys=False))
        )

    def check_folder(self) -> Resume | None:
        """Refuse a run folder that must not be written to; returns the checkpoint to go on from, if there is one."""
        resume, overwrite = self._checkpoint(), self.request.run.overwrite
        self.folder.check(self._replaces(resume), resuming=self.continues(resume))
        if (self.folder.path / LOCK).is_file():  # otherwise nobody has it, and a refusal leaves nothing behind
            self.folder.lock()
        if overwrite and not self.continues(resume):
            for source in self.request.data.sources:
                self._refuse_to_delete("--data-dir", source)
            self._refuse_to_delete("--model", self.request.base.name)
            self._refuse_to_delete("--replay", self.request.control.replay)
            self._refuse_to_delete("--adapter", self.request.lora.adapter)
        return resume

    def _refuse_to_delete(self, flag: str, path: str | None) -> None:
        folder, source = self.folder.path.resolve(), Path(path).expanduser().resolve() if path else None
        if source and source.exists() and folder in (source, *source.parents):
            raise UserError(f"--overwrite: would delete {flag} {path}, which lies in {folder}; move one of them")

    def _checkpoint(self) -> Resume | None:
        return open_checkpoint(self.request.run.resume, self.request.run.output_dir)

    def continues(self, resume: Resume | None) -> bool:
        """Whether the run goes on in the folder that its checkpoint lies in, and not in a new one."""
        return resume is not None and self.folder.path.resolve() in resume.path.resolve().parents

    def _replaces(self, resume: Resume | None) -> bool:
        """Whether a run that lies in the folder makes way: as was asked, or because it ended before a checkpoint."""
        begun = self.request.run.resume == checkpoint.AUTO and resume is None and not self.folder.trained
        return begun or (self.request.run.overwrite and not self.continues(resume))

    def train(self, trainer: L.Trainer, module: GraniteModule, resume: Resume | None) -> None:
        """Train to the end, or to a signal."""
        try:
            with errors_in_one_line():
                trainer.fit(module, datamodule=self.data, ckpt_path=resume and resume.path, weights_only=True)
        except Stopped:  # on every rank, between two steps
            _part(trainer)
            raise
        except SystemExit as stop:  # Lightning's answer to Ctrl-C
            raise KeyboardInterrupt from stop
        except RuntimeError as error:
            if cause := _lost(error):
                raise RunFailed(f"{cause}; --resume-from-checkpoint last goes on from the last checkpoint") from error
            raise

    @property
    def seeks_setpoint(self) -> bool:
        """Whether a probe comes first, to find the setpoint."""
        return not self._is_steered and probe.needed(self.request.control)

    def _find_setpoint(self, resume: Resume | None) -> None:
        target, self.found, self.probe_seconds = setpoint_of_auto(self, resume)
        self.controller = build_controller(replace(self.request.control, target_s=target), self.plan.steps)

    def base(self) -> BaseConfig:
        """The base's configuration, with the kernels that this machine allows it."""
        return replace(self.request.base, kernels=self.machine.kernels)

    def make_module(self, **changed: Any) -> GraniteModule:
        """The module that is trained; ``changed`` are fields of the base's configuration that are to differ."""
        request = self.request
        return GraniteModule(
            replace(self.base(), **changed),
            request.lora,
            request.optimizer,
            request.prior.sigma,
            self.plan.n_tokens,
            self.plan.steps,
            loading.WEIGHT_DTYPES[self.machine.precision],
            self.machine.attention,
            self.machine.torch_device,
            position={
                "--batch-size": request.data.batch_size,
                "processes": self.machine.world_size,
                "--isolate-documents": request.data.isolate_documents,
                "the text of --data-dir (its checksum)": self.data.checksum,
                **({"--num-workers": request.data.num_workers} if request.data.stream else {}),
            },
            measure=request.control.measure,
            actuator=request.control.actuator,
            start=self.start,
        )

    def _open_folder(self, resume: Resume | None) -> None:
        self.folder.make()
        self.folder.lock()
        if self._replaces(resume):
            self.folder.clear()
        self.folder.sweep()
        self.folder.write_json(MARK, records.training_config(self))  # first: it says whose the rest is
        (self.folder.path / "logs").mkdir(exist_ok=True)
        self.folder.write_text("config.yaml", self.request.yaml)
        self.folder.write_json("scu_config.json", records.scu_config(self))
        self.folder.write_lines(DOCUMENTS, self.data.record())
        handler = logging.FileHandler(self.folder.path / "logs" / "cuda_optimized_training.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("granite_scu").addHandler(handler)
        if resume:
            rewind(self.folder, resume, self.continues(resume), drop_later=self.request.run.overwrite)

    def report(self) -> None:
        """The page about the run, as far as it got."""
        from viz.report import NAME, write_report
        from viz.run_folder import read_run

        write_report(read_run(self.folder.path), self.folder.path / NAME)

    def illustrate(self) -> None:
        """The picture of S and lambda, the report, and the model card."""
        from viz.control_plot import plot_control
        from viz.run_folder import read_run
        from viz.style import save

        save(plot_control(read_run(self.folder.path)), self.folder.path / "control")
        self.report()
        model_card.write_model_card(self.folder.path)


def _conclude(trainer: L.Trainer, module: GraniteModule) -> None:
    """What comes after the last step. Lightning passes over it where steps or time leave no step to take."""
    trainer.strategy.model_to_device()
    for callback in trainer.callbacks:
        callback.on_train_start(trainer, module)
    for callback in trainer.callbacks:
        callback.on_train_end(trainer, module)


def _lost(error: RuntimeError) -> str | None:
    """What ended without a word of its own, as the libraries' errors tell it."""
    words = str(error)
    if "DataLoader worker" in words:
        return "a loader process died, as one does when memory runs out; lower --num-workers or --prefetch-factor"
    if isinstance(error, torch.distributed.DistError) or "closed by peer" in words or "gloo" in words:
        return "another process of this run was lost"
    return None


def _part(trainer: L.Trainer) -> None:
    """End the bond between processes, all at once and when the last file is written.

    One that ended early, with gloo's threads still running, could be aborted by them; torchrun then stops the others.
    """
    children(trainer).clear()
    if torch.distributed.is_initialized():
        trainer.strategy.barrier()
        torch.distributed.destroy_process_group()
