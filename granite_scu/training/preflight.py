"""What a run will cost, said before it starts. Estimates, and marked as such."""

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from granite_scu import hardware
from granite_scu.config.settings import OptimizerConfig
from granite_scu.control import PI, Controller
from granite_scu.control.diagnostics.ceiling import ceiling, growth, growth_from
from granite_scu.control.diagnostics.setpoint import probe_steps
from granite_scu.data.workers import errors_in_one_line
from granite_scu.experiments.identification.wrapper import Wrapper
from granite_scu.model import flops
from granite_scu.training import memory_budget as budget
from granite_scu.training.module import DTYPES, schedule

if TYPE_CHECKING:
    from granite_scu.training.recipe import Run


FEED_FORWARD_ERROR = 3.0
"""Factor within which the lambda that PI starts from is what holds S*; see ``control.pi``."""

UTILISATION = 0.3
"""Share of the measured matrix-product rate that a training step is assumed to reach."""


def describe(run: "Run") -> dict:
    """The plan of a run as readable facts: steps, tokens, first batch, memory and time estimates.

    Memory: what ``model.memory`` finds. Time: the operations of ``model.flops`` at ``UTILISATION`` of the rate that
    matrix products are measured to have here.
    """
    request, plan, machine = run.request, run.plan, run.machine
    size = flops.measure(request.base.name, request.lora, request.data.block_size, run.start and run.start.shapes)
    dtype = DTYPES[machine.precision]
    with errors_in_one_line():
        batch = next(iter(run.data.train_dataloader()))
    rate = hardware.matmul_tflops(machine.device, dtype, tf32=machine.tf32) * 1e12 * UTILISATION
    steps = plan.steps + (probe_steps(plan.steps) if run.seeks_setpoint else 0)
    seconds = steps * plan.tokens_per_step / machine.world_size * size.flops_per_token / rate
    return {
        "model": request.base.name,
        "parameters": f"{size.frozen:,} frozen, {size.trained:,} trained in {len(size.adapted)} adapters",
        "data": run.data.summary(),
        "first_batch": f"{tuple(batch['input_ids'].shape)} tokens, {int((batch['labels'] != -100).sum()):,} supervised",
        "device": machine.device.name,
        "precision": machine.precision,
        "processes": machine.world_size,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "tokens": plan.steps * plan.tokens_per_step,
        "n_tokens": plan.n_tokens,
        "controller": request.control.controller,
        "target_s": _setpoint(run),
        **_reach(run, [(out, rank) for out, _, rank in size.adapted]),
        **_memory(run),
        "time_s_estimate": round(seconds),
        "output_dir": str(run.folder.path),
    }


def _memory(run: "Run") -> dict:
    """What the run takes of the device's memory, what it may take, and what to change where that is less; GiB."""
    footprint, allowed = budget.predict(run.request, run.machine), budget.limit(run.request, run.machine)
    fits = footprint.total <= allowed
    return {
        "batch": f"{run.request.data.batch_size} x {run.request.data.block_size} tokens, accumulated "
        f"{run.request.trainer['accumulate_grad_batches']} times",
        "memory_gib_estimate": round(footprint.total / hardware.GIB, 3),
        "memory_parts": budget.in_words(footprint),
        "memory_gib_allowed": round(allowed / hardware.GIB, 3),
        "memory_fits": fits,
        **({} if fits else {"memory_advice": budget.advice(run.request, run.machine)}),
    }


def _setpoint(run: "Run") -> float | str | None:
    if run.seeks_setpoint:
        return f"auto: a probe of {probe_steps(run.plan.steps)} steps comes first"
    return run.controller.setpoint


def _reach(run: "Run", shapes: Iterable[tuple[int, int]]) -> dict:
    """How far S can come, and what to change where a setpoint that is known already lies above that."""
    shapes = list(shapes)
    most = s_ceiling(run, shapes)
    said = out_of_reach(run, shapes)
    return {
        "s_ceiling_estimate": None if most is None else float(f"{most:.3g}"),
        **({"target_s_advice": "; ".join(said)} if said else {}),
    }


def out_of_reach(run: "Run", shapes: Iterable[tuple[int, int]]) -> list[str]:
    """Why the run's setpoint cannot be expected to be held and what to change, a line each; none where it can be.

    Of ``identify`` too, whose laws act around one that holds a setpoint. A setpoint that is still sought is not judged.
    """
    setpoint = run.controller.setpoint
    if setpoint is None or (run.seeks_setpoint and run.found is None):
        return []
    warnings = beyond_the_ceiling(setpoint, s_ceiling(run, shapes)), beyond_the_bounds(run.controller)
    return [warning for warning in warnings if warning]


def cumulated_rates(optimizer: OptimizerConfig, steps: int) -> list[float]:
    """The sum of the learning rates of the first 0, 1, ... ``steps`` optimizer steps."""
    rates = (optimizer.learning_rate * schedule(step, optimizer, steps) for step in range(steps))
    return list(accumulate(rates, initial=0.0))


def update_growth(run: "Run", shapes: Iterable[tuple[int, int]]) -> float | None:
    """G of ``control.ceiling``, for new adapters of these (out, rank), or for those that the run starts from.

    None under the measure of factors, which is not zero at the start.
    """
    if run.request.control.measure != "delta":
        return None
    if run.start:
        return growth_from(run.start.matrices, run.request.prior.sigma, run.plan.n_tokens)
    lora = run.request.lora.resolved()
    return growth(shapes, lora.alpha / lora.rank, run.request.prior.sigma, run.plan.n_tokens)


def s_ceiling(run: "Run", shapes: Iterable[tuple[int, int]]) -> float | None:
    """The largest S to be expected of the run, by ``control.ceiling``, should the data cost ever so little."""
    found = update_growth(run, shapes)
    moved = cumulated_rates(run.request.optimizer, run.plan.steps)[-1]
    return None if found is None else ceiling(found, moved)


def beyond_the_ceiling(setpoint: float, most: float | None) -> str | None:
    """A warning in one line, if the setpoint lies above the ceiling."""
    if most is None or setpoint <= most:
        return None
    return (
        f"S* = {setpoint:.3g} cannot be expected: with this many steps at these learning rates S comes to {most:.2g} "
        "at the very most, and usually to a fraction of that; lower --target-s (auto finds one), train longer, raise "
        "--learning-rate, or take a smaller --prior-sigma (sigma and S* are one knob: only sigma^2 N counts)"
    )


def beyond_the_bounds(controller: Controller[Any]) -> str | None:
    """A warning in one line, if the lambda that PI expects to hold its setpoint lies far beyond a bound."""
    law = controller.law if isinstance(controller, Wrapper) else controller
    if not isinstance(law, PI):
        return None
    wanted, low, high = law.feed_forward, law.lambda_min, law.lambda_max
    if low / FEED_FORWARD_ERROR <= wanted <= high * FEED_FORWARD_ERROR:
        return None
    flag, bound, change, other, side = (
        ("--lambda-max", high, "raise", "raise --target-s", "above")
        if wanted > high
        else ("--lambda-min", low, "lower", "lower --target-s", "below")
    )
    return (
        f"{flag} {bound:g}: S* = {law.setpoint:.3g} is expected to take a lambda of {wanted:.2g}, so S may come "
        f"to rest {side} it with lambda on that bound; {change} {flag} to {wanted:.2g} or further, or {other}"
    )
