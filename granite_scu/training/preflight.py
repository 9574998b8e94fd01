"""What a run is warned of before it starts."""

import logging
import math
from typing import Any

import torch

from granite_scu.config.request import Request
from granite_scu.config.settings import TrainerConfig
from granite_scu.control import PI, Controller
from granite_scu.control.diagnostics.reachability import OTHER_WAYS
from granite_scu.control.units import counted, per_cent
from granite_scu.model.attention import can_isolate
from granite_scu.model.loading import announce_kernels, known_config, max_positions, untested
from granite_scu.training.prepared_run import PreparedRun

log = logging.getLogger(__name__)


FEED_FORWARD_ERROR = 3.0
"""Factor within which the lambda that PI starts from is what holds S*; see ``control.pi``."""

FOUND_OF_CEILING = 0.2
"""Share of the ceiling that S was found at, roughly: ``control.diagnostics.ceiling``."""

HANDFUL = 100
"""Optimizer steps below which a run by epochs is called short."""

MANY = 30
"""Passes over the data from which a length in steps is said to be a large one."""

FEW_CHATS = 30
"""Conversations to validate on below which it is said what they can show."""


def out_of_reach(run: PreparedRun) -> list[str]:
    """Why the run's setpoint cannot be expected to be held and what to change, a line each; none where it can be.

    Also of a law that acts around one that holds a setpoint. A setpoint that moves is not judged.
    """
    setpoint = run.setpoint
    if setpoint is None:
        return []
    warnings = beyond_the_ceiling(setpoint, run.s_ceiling), beyond_the_bounds(run.controller)
    return [warning for warning in warnings if warning]


def beyond_the_ceiling(setpoint: float, most: float | None) -> str | None:
    """A warning in one line, if the setpoint lies above the ceiling."""
    if most is None or setpoint <= most:
        return None
    lower = float(f"{FOUND_OF_CEILING * most:.1g}")
    return (
        f"S* = {per_cent(setpoint)} cannot be expected: with this many steps at these learning rates S reaches "
        f"{per_cent(most)} at the very most, and usually a fraction of that; try --target-s {lower:g} "
        f"({per_cent(lower)}); {OTHER_WAYS}"
    )


def beyond_the_bounds(controller: Controller[Any]) -> str | None:
    """A warning in one line, if the lambda that PI expects to hold its setpoint lies far beyond a bound."""
    law = getattr(controller, "law", controller)  # that which it acts around, if any
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
        f"{flag} {bound:g}: S* = {per_cent(law.setpoint)} is expected to take a lambda of {wanted:.2g}, so S may stay "
        f"{side} it with lambda on that bound; {change} {flag} to {wanted:.2g} or further, or {other}"
    )


# Settings that do not go together with the length of the run


def out_of_proportion(request: Request, steps: int, passes: float | None, seconds: float | None = None) -> list[str]:
    """What is too long or too rare for a run of so many optimizer steps, a line each with a number that would do.

    Args:
        request: what was asked for.
        steps: of the run.
        passes: that the run makes over its data; None in a stream.
        seconds: that it takes; None where nobody knows.
    """
    found = (
        _long_blocks(request.data.block_size, request.base.name),
        _long_warmup(request.optimizer.warmup_steps, steps),
        _few_steps(request.data.num_epochs, request.trainer, steps),
        _many_passes(request.data.num_epochs, passes, steps),
        _cut_short(request.trainer.max_time, seconds),
        _no_validation(request.run.eval_steps, steps) if request.data.is_validated else None,
    )
    return [line for line in found if line]


def _long_blocks(length: int, model: str) -> str | None:
    most = max_positions(known_config(model))
    if not most or length <= most:
        return None
    return f"--block-size {length}: {model} was made for {most} tokens at most; --block-size {most} is safe"


def _long_warmup(warmup: int, steps: int) -> str | None:
    if warmup <= steps / 10:
        return None
    much = f"takes {per_cent(warmup / steps)} of the {steps} steps"
    if warmup >= steps:
        much = f"the run has {counted(steps, 'step')}, so the learning rate never reaches its peak"
    return f"--warmup-steps {warmup}: {much}; --warmup-steps {steps // 10} takes a tenth"


def _few_steps(epochs: float | None, trainer: TrainerConfig, steps: int) -> str | None:
    shortened = trainer.max_steps > 0 and steps >= trainer.max_steps
    if epochs is None or shortened or steps >= HANDFUL:
        return None
    accumulated = trainer.accumulate_grad_batches
    more = f"--num-epochs {math.ceil(epochs * HANDFUL / steps)} makes {HANDFUL} or more"
    if accumulated > 1:
        more = f"--gradient-accumulation-steps 1 makes about {steps * accumulated} of the same text"
    return f"--num-epochs {epochs:g}: makes {counted(steps, 'step')}, few for an adapter to learn in; {more}"


def _many_passes(epochs: float | None, passes: float | None, steps: int) -> str | None:
    if epochs is not None or passes is None or passes <= MANY:
        return None
    fewer = f"--max-steps {math.ceil(steps * 3 / passes)} reads it three times"
    if passes >= 3 * steps:
        fewer = f"a step alone reads it {passes / steps:,.0f} times; give a smaller --batch-size"
    return f"--max-steps {steps}: reads the data {passes:,.0f} times; {fewer}"


def _cut_short(limit: str | None, seconds: float | None) -> str | None:
    """That a run's time, DD:HH:MM:SS, ends before its steps do, and what does not end it so."""
    if limit is None or seconds is None:
        return None
    days, hours, minutes, rest = map(int, limit.split(":"))
    allowed = ((24 * days + hours) * 60 + minutes) * 60 + rest
    if seconds <= allowed:
        return None
    return (
        f"--max-time {limit}: ends the run after about {per_cent(allowed / seconds)} of its steps, where the learning "
        "rate is still high; a run with fewer, by --num-epochs or --max-steps, ends with a low one"
    )


def _no_validation(every: int | None, steps: int) -> str | None:
    if every is None or every < steps or steps == 1:
        return None
    return (
        f"--eval-steps {every}: the run has {counted(steps, 'step')}, so only the last adapter is validated; "
        f"--eval-steps {max(1, steps // 5)} lets the run keep the best of five"
    )


def run_warnings(run: PreparedRun) -> list[str]:
    """What nobody has tried of the run, or what is too little to rely on; a line each."""
    return [line for line in (untested(run.request.base.name), _few_held_out(run)) if line]


def _few_held_out(run: PreparedRun) -> str | None:
    """What so few conversations can show."""
    n = run.data.validation.n_documents if run.data.chats else 0
    if not 0 < n < FEW_CHATS:
        return None
    shows = "which is all that is measured" if n == 1 else f"so each is {per_cent(1 / n)} of what is measured"
    return (
        f"{counted(n, 'conversation')} to validate on, {shows}; a larger --held-out-share, or --validation-data FILE, "
        "tells more"
    )


# What the log has before the first step


def announce(run: PreparedRun, model: torch.nn.Module) -> None:
    """Say it all. The model is loaded, and its adapters are in place."""
    request = run.request
    announce_kernels(model)
    if request.base.compile:
        log.info("--torch-compile: the first steps compile the layers for their shapes, which may take minutes")
    if request.data.isolate_documents and not can_isolate(model):
        log.warning(
            "%s cannot keep the documents of a block apart, so that each sees those before it; --no-isolate-documents "
            "says that this is meant",
            request.base.name,
        )
    if run.start and (mismatch := run.start.mismatch(request.base.quantize_4bit)):
        log.warning(mismatch)
    for warning in out_of_reach(run):
        log.warning(warning)
