"""What measures a run and steers it by that."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from granite_scu import control, hardware
from granite_scu.control.diagnostics.reachability import Reachability
from granite_scu.data.blocks.packing import padding_of
from granite_scu.model.drift import anchor_tokens, steering_tokens
from granite_scu.training import general_data
from granite_scu.training.callbacks.audit import AdapterAudit
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.held_out_savings import Savings
from granite_scu.training.callbacks.reachability import ReachabilityMonitor
from granite_scu.training.callbacks.shannon_control import Listener, ShannonControl
from granite_scu.training.callbacks.threads import FreeCores, may_change
from granite_scu.training.callbacks.throughput import Monitor, Stopwatch
from granite_scu.training.callbacks.utilisation import UtilisationWatch
from granite_scu.training.learning_rate import PlannedRates
from granite_scu.training.prepared_run import PreparedRun


class Measuring(NamedTuple):
    """In their order; None where the run needs none."""

    cores: FreeCores | None
    drift: DriftMeter | None
    stopwatch: Stopwatch
    audit: AdapterAudit
    control: ShannonControl
    reachability: ReachabilityMonitor | None
    savings: Savings | None


def measuring(run: PreparedRun, listeners: Sequence[Listener]) -> Measuring:
    """The callbacks that measure; ``listeners`` hear of each tick after those of the group."""
    drift, reachability, stopwatch = _drift(run), _reachability(run), Stopwatch()
    own = (reachability, drift, _utilisation(run))
    scu = ShannonControl(
        run.controller,
        run.request.control.every,
        stopwatch,
        run.folder.append_history,
        _monitor(run),
        [*(listener for listener in own if listener), *listeners],
        drift and drift.plant,
    )
    savings = Savings(scu.set_benefit, stopwatch) if getattr(run.controller, "needs_benefit", False) else None
    ours_to_choose = may_change(run.machine.accelerator, bool(run.request.trainer.get("deterministic")))
    cores = FreeCores() if ours_to_choose else None
    return Measuring(cores, drift, stopwatch, AdapterAudit(), scu, reachability, savings)


def _drift(run: PreparedRun) -> DriftMeter | None:
    """What measures drift; None where none is held."""
    asked = run.request.drift
    if asked.max_drift is None:
        return None
    step, every = run.length.tokens_per_step, run.request.control.every
    sizes = anchor_tokens(step), steering_tokens(step * every)
    budget, bounds = float(asked.max_drift), (run.controller.lambda_min, run.controller.lambda_max)
    return DriftMeter(partial(general_data.obtain, run), budget, bounds, *sizes, padding_of(run.tokenizer))


def _reachability(run: PreparedRun) -> ReachabilityMonitor | None:
    config = run.request.control
    if not control.tracks(type(run.controller)) or run.setpoint is None:
        return None
    planned = PlannedRates(run.request.optimizer, run.length.steps)
    law, bounds = Reachability(run.setpoint, run.growth), (config.lambda_min, config.lambda_max)
    return ReachabilityMonitor(law, bounds, planned, in_gradient=config.actuator == "loss")


def _utilisation(run: PreparedRun) -> UtilisationWatch | None:
    expected = run.request.run.expected_mfu
    used = asdict(run.request.base) | asdict(run.request.data) | {"precision": run.machine.precision}
    return UtilisationWatch(expected, used) if expected else None


def _monitor(run: PreparedRun) -> Monitor:
    length, machine = run.length, run.machine
    return Monitor(
        blocks_per_step=length.tokens_per_step // run.request.data.block_size,
        flops_per_step=length.tokens_per_step * run.size.flops_per_token,
        peak=hardware.peak_flops(machine.device, machine.precision, machine.tf32),
        devices=machine.world_size,
        on_gpu=machine.accelerator == "cuda",
    )
