"""A run that can start: what was asked for, and all that was settled about it before a model is loaded."""

import math
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from granite_scu import control
from granite_scu.config.request import Request
from granite_scu.config.settings import DEFAULT_STEPS, Intervals, intervals_of
from granite_scu.control.diagnostics.ceiling import ceiling
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.tokens import templates
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.hardware.machine import Machine
from granite_scu.model.flops import Size
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.model.saved_adapter import InitialAdapter
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.learning_rate import PlannedRates
from granite_scu.training.module import GraniteModule
from granite_scu.training.resume import FILES, TEXT, Resume, settings_that_affect_numbers

OF_PRINTED = 0.2
"""Share that a training step is assumed to reach of the rate of matrix products that the vendor prints; the presets
expect a fifth too."""


@dataclass(frozen=True)
class RunLength:
    """How long the run is.

    Attributes:
        steps: optimizer steps.
        tokens_per_step: supervised and padded positions of a step, over all devices.
        n_tokens: N of ParamNPT.
    """

    steps: int
    tokens_per_step: int
    n_tokens: int


def validations(steps: int, done: int, every: int) -> int:
    """How many there are after so many steps are done; the last step has one in any case."""
    return math.ceil(steps / every) - done // every if steps > done else 0


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a run depends on. What settles more of it returns a new one.

    Attributes:
        request: what was asked for, with what an adapter to start from and the search for a batch size decide.
        console: where progress goes.
        machine: what it runs on.
        folder: its run folder.
        resume: the checkpoint that it continues from; None where it starts.
        tokenizer: of the base model, with the chat template that is trained with.
        start: the adapter that training starts from; None where it is a new one.
        data: prepared.
        length: steps and tokens.
        size: parameters, adapted layers and operations of the model.
        growth: G of ``control.diagnostics.ceiling``; None where the measure does not start at zero.
        controller: sets lambda.
        general: the general text that drift is held on; None where none is, or the base model writes it.
        chosen: settings that nobody gave and the data decided, a line each with why.
    """

    request: Request
    console: Console
    machine: Machine
    folder: RunFolder
    resume: Resume | None
    tokenizer: PreTrainedTokenizerBase
    start: InitialAdapter | None
    data: TextDataModule
    length: RunLength
    size: Size
    growth: float | None
    controller: control.Controller
    general: GeneralText | None
    chosen: list[str]

    @property
    def setpoint(self) -> float | None:
        """S*; None where S is held nowhere, as where drift is."""
        return None if self.request.drift.max_drift else self.controller.setpoint

    @property
    def intervals(self) -> Intervals:
        """When it validates and saves."""
        return intervals_of(self.request.run, self.length.steps)

    @property
    def validation_interval(self) -> int | None:
        """Optimizer steps between two validations; None where nothing is held out to validate on."""
        return self.intervals.validation if self.data.holds_out("validation") else None

    @property
    def course(self) -> dict[str, Any]:
        """What its course depends on."""
        return settings_that_affect_numbers(
            self.request, self.machine, self.length.steps, self.setpoint, self.intervals.validation
        )

    @property
    def validation_blocks(self) -> int:
        """Blocks that a validation reads, over all devices."""
        data, limit = self.request.data, self.request.trainer.limit_val_batches
        most = int(limit) * (data.eval_batch_size or data.batch_size) * self.machine.world_size
        return min(most, len(self.data.validation))

    @property
    def scored_blocks(self) -> int:
        """Test blocks that the end reads: under the adapter, the base, and the adapter that training started from."""
        return (3 if self.start else 2) * len(self.data.test)

    @property
    def s_ceiling(self) -> float | None:
        """The largest S to be expected of it, should the data cost ever so little; None where ``growth`` is unknown."""
        moved = PlannedRates(self.request.optimizer, self.length.steps).after(self.length.steps)
        return None if self.growth is None else ceiling(self.growth, moved)


def length_of(request: Request, n_blocks: float, n_tokens: int, processes: int) -> RunLength:
    """Steps and tokens of a run over epochs of so many blocks, in the mean, with so many supervised tokens."""
    blocks, most = request.blocks_per_step * processes, request.trainer.max_steps
    limits = [most] if most > 0 else []
    if request.data.num_epochs is not None:
        # Rounded up, so that the passes asked for are complete.
        limits.append(math.ceil(round(request.data.num_epochs * n_blocks / blocks, 9)))
    steps, tokens_per_step = min(limits, default=DEFAULT_STEPS), blocks * request.data.block_size
    # Nobody has counted a stream; what is read of it counts once.
    counted = steps * tokens_per_step if request.data.stream else n_tokens
    return RunLength(steps, tokens_per_step, n_tokens=request.prior.n_tokens or counted)


def build_module(run: PreparedRun, **changed: Any) -> GraniteModule:
    """The module that is trained, its model not yet loaded.

    Args:
        run: the run.
        changed: fields of the base's configuration that are to differ.
    """
    request, machine = run.request, run.machine
    return GraniteModule(
        replace(request.base, kernels=machine.kernels, attention=machine.attention, **changed),
        request.lora,
        request.optimizer,
        replace(request.prior, n_tokens=run.length.n_tokens),
        run.length.steps,
        WEIGHT_DTYPES[machine.precision],
        machine.torch_device,
        position={
            "--batch-size": request.data.batch_size,
            "processes": machine.world_size,
            "--isolate-documents": request.data.isolate_documents,
            **({"the chat template (its checksum)": templates.checksum(run.tokenizer)} if run.data.chats else {}),
            TEXT: run.data.checksum,
            **({"--num-workers": request.data.num_workers, FILES: run.data.files} if request.data.stream else {}),
        },
        measure=request.control.measure,
        actuator="loss" if request.drift.max_drift else request.control.actuator,
        start=run.start,
    )
