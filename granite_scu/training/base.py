"""What a run needs to know of its base model before that is loaded, and the machine that suits it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import SHORT_PRECISIONS, BaseConfig
from granite_scu.control.diagnostics import ceiling
from granite_scu.data.tokens import templates
from granite_scu.hardware import machine as machines
from granite_scu.hardware import peaks, presets
from granite_scu.hardware.detection import Device
from granite_scu.model import flops, loading, saved_adapter, step_time
from granite_scu.model.mamba2 import kernels
from granite_scu.training import defaults, memory_budget
from granite_scu.training.prepared_run import OF_PRINTED, RunLength
from granite_scu.training.resume import Resume

log = logging.getLogger(__name__)

FP32, WORTH_FP32 = "32-true", 0.9
"""The share of another precision's time from which on fp32 is taken: it holds twice the weights."""

TRIED = 4, 256
"""Blocks and their tokens, at most, of the step that is tried."""


class Base(NamedTuple):
    """The base model, not loaded.

    Attributes:
        tokenizer: with the chat template that is trained with.
        config: as transformers has it.
        start: the adapter that training starts from; None where it is a new one.
        size: parameters, adapted layers and operations, in blocks as asked for.
    """

    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    start: saved_adapter.InitialAdapter | None
    size: flops.Size

    @property
    def rows(self) -> int | None:
        """Of its embedding; None where nobody knows."""
        return loading.embedding_rows(self.config)

    def growth(self, request: Request, n_tokens: int) -> float | None:
        """G of ``control.diagnostics.ceiling``: how far the adapters can move.

        None where factors are measured, which are not zero at the start.
        """
        if request.control.measure != "delta":
            return None
        new = (ceiling.Matrix.new(*shape, request.lora.scale) for shape in self.size.adapted)
        return ceiling.growth(self.start.matrices if self.start else new, request.prior.sigma, n_tokens)


def open_base(
    request: Request, resume: Resume | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Request, Base]:
    """The base model with the adapter to start from; the request with what that decides.

    Args:
        request: what is asked for.
        resume: the checkpoint that the run continues from.
        tokenizer: in place of the model's own.

    Raises:
        UserError: there is no such model, or it has not the layers that are asked for; the adapter does not fit.
    """
    name, block_size = request.base.name, request.data.block_size
    tokenizer = templates.of_data(tokenizer or loading.load_tokenizer(name), request.data)
    request, start = with_start(request, resume)
    config = loading.known_config(name)
    if block_size < (width := getattr(config, "mamba_d_conv", 0)):
        raise UserError(
            f"--block-size {block_size}: shorter than the {width} tokens that a convolution of {name} spans"
        )
    most = loading.max_positions(config)
    if "data.block_size" in request.given and most and block_size > most and loading.has_position_table(config):
        raise UserError(f"--block-size {block_size}: {name} has {most} positions; --block-size {most} is the most")
    return request, Base(tokenizer, config, start, size_of(request, start))


def size_of(request: Request, start: saved_adapter.InitialAdapter | None) -> flops.Size:
    """Of the model with its adapters.

    Raises:
        UserError: it has not the layers that are asked for, or their matrices are of a lower rank than is asked for.
    """
    size = flops.measure(request.base.name, request.lora, request.data.block_size, start and start.shapes)
    rank, most = request.lora.resolved().rank, max((max(sides) for *sides, _ in size.adapted), default=None)
    if not start and most and rank and rank > most:
        raise UserError(f"--lora-r {rank}: no adapted matrix has more than {most:,} rows or columns, so that a higher "
                        f"rank adds nothing; give {most} at most, as a rule 8 to 256")  # fmt: skip
    return size


def settle_machine(request: Request, model: Base, card: Device | None) -> tuple[Request, machines.Machine, list[str]]:
    """The machine, with an attention that the model has; the request with whether the model is compiled on it; and
    why a CPU's precision is what it is, where that was measured.

    Args:
        request: what is asked for; what is wrong with it alone has been refused.
        model: the base, not loaded.
        card: is planned for in place of this machine's device.

    Raises:
        UserError: the machine has not what is asked for.
    """
    machine = machines.resolve_request(request, card)
    if not card:
        kernels.check(machine.kernels, machine.accelerator)
    attention = loading.choose_attention(model.config, request.base.attention, machine.attention)
    if attention != machine.attention:
        log.info("--attn auto: %s, as %s models have no %s", attention, model.config.model_type, machine.attention)
    if warning := presets.mismatch(request.hardware, machine.device):
        log.warning(warning)
    base = replace(request.base, compile=machine.compiled)
    request, machine = replace(request, base=base), replace(machine, attention=attention)
    seconds = {} if card else _seconds_of_a_step(request, model, machine)
    if not seconds:
        return request, machine, []
    precision = faster(seconds)
    if precision == FP32 and not memory_budget.fits(request, replace(machine, precision=FP32)):
        precision = machine.precision
    [other] = seconds.keys() - {precision}
    taken, instead = SHORT_PRECISIONS[precision], SHORT_PRECISIONS[other]
    why = f"a step measured here takes {seconds[precision] / seconds[other]:.2f} times as long as in {instead}"
    return request, replace(machine, precision=precision), [f"--precision {taken}: {why}"]


def compile_where_it_pays(
    request: Request, machine: machines.Machine, model: Base, length: RunLength, asked: BaseConfig
) -> tuple[Request, machines.Machine, list[str]]:
    """Request and machine with the model compiled or not, by ``defaults.compiles``; and why, where nobody chose.

    All processes decide the same, as nothing is measured.

    Args:
        request: of a run.
        machine: which may compile.
        model: the base.
        length: of the run.
        asked: what was asked for of the base.
    """
    chosen = asked.compile is not None or asked.gradient_checkpointing == "selective"
    if not machine.compiled or chosen or "base.compile_mode" in request.given:
        return request, machine, []
    peak = peaks.printed_peak(machine.device, machine.precision, machine.tf32)
    flops = length.steps * length.tokens_per_step * model.size.flops_per_token / machine.world_size
    micro_batches = length.steps * request.trainer.accumulate_grad_batches
    layers = getattr(model.config, "num_hidden_layers", 0)
    choice = defaults.compiles(flops / (OF_PRINTED * peak.flops) if peak else 0.0, micro_batches, layers)
    return request.with_values({choice.key: choice.value}), replace(machine, compiled=choice.value), [choice.why]


def faster(seconds: Mapping[str, float]) -> str:
    """The precision that a CPU trains in, by the seconds that a step takes in fp32 and in another, by Lightning's name.

    >>> faster({"bf16-mixed": 0.54, "32-true": 0.45}), faster({"bf16-mixed": 0.5, "32-true": 0.48})
    ('32-true', 'bf16-mixed')
    """
    [narrow] = seconds.keys() - {FP32}
    return FP32 if seconds[FP32] < WORTH_FP32 * seconds[narrow] else narrow


def _seconds_of_a_step(request: Request, model: Base, machine: machines.Machine) -> dict[str, float]:
    """Of a token, by precision, where nobody chose one and a CPU has another than fp32. Few layers are tried, once
    for a machine and a model; several processes, and runs that are to be the same elsewhere, have no time to agree on.
    """
    fixed = request.trainer.precision or request.trainer.deterministic or request.base.quantize_4bit
    if fixed or machine.accelerator != "cpu" or machine.precision == FP32 or machine.world_size > 1:
        return {}
    if 4 * (model.size.frozen + 4 * model.size.trained) > machine.memory_limit(None):  # of fp32, and Adam's moments
        return {}
    block_size = min(TRIED[1], loading.max_positions(model.config) or TRIED[1])
    setting = replace(memory_budget.setting_of(request, machine), batch_size=TRIED[0], block_size=block_size)
    known = [machine.device.name, torch.get_num_threads()]
    paces = {
        name: step_time.on_cpu(model.config, replace(setting, dtype=loading.WEIGHT_DTYPES[name]), known)
        for name in (machine.precision, FP32)
    }
    return {name: pace.step for name, pace in paces.items()}


def with_start(request: Request, resume: Resume | None) -> tuple[Request, saved_adapter.InitialAdapter | None]:
    """The adapter that training starts from, None where it is a new one; the request with what that decides.

    Raises:
        UserError: it is not there, or does not fit.
    """
    path, base = request.lora.adapter, request.base.name
    if path is None:
        return request, None
    if resume and not Path(path).expanduser().is_dir():  # the checkpoint has all that is needed of it
        start = saved_adapter.from_checkpoint(resume.path, path, base, resume.state["frozen"])
    else:
        start = saved_adapter.open_initial_adapter(path, base)
    return replace(request, lora=saved_adapter.lora_of(request.lora, start)), start
