#!/usr/bin/env python3
"""An optimizer step of granite-scu against one of Hugging Face's Trainer with PEFT.

    python benchmarks/train_step.py --quick                     the embedded model, under a minute on two cores
    python benchmarks/train_step.py --json > out.json           and ten blocks of Granite-4.0-H-1B at full width
    python benchmarks/train_step.py --model whole --sweep        all forty, on a GPU

Both sides train the same LoRA adapters on every linear layer of the same weights with the same batches in the same
order, AdamW, cosine schedule and clipping, so their loss curves must coincide: ``max_rel_err`` is the largest relative
difference between the losses of a step. Under bf16 both hold the base in bf16 and the adapters in fp32 and compute
under bf16 autocast (``from_pretrained(dtype=bf16)`` with ``bf16=True`` there). Ours is what a user gets from
``train_granite_cuda.py --controller none --no-isolate-documents``, with every callback and logger: lambda would move
the losses apart, and so would documents that do not see one another, which transformers' reference scan cannot do. What
SCU costs is in ``controller_overhead.py``; S is measured here all the same, once in ten steps. Theirs takes the kernels
of mamba-ssm and causal-conv1d where they are installed.

The sides take turns, each in a process of its own, a block of steps at a time: ten, or one where a step takes seconds.
A step's time is everything from its beginning to that of the next. ``extra_gb`` is the most memory on top of the loaded
model: resident on a CPU, of the allocator on CUDA; ``ours_first_s`` is our first block,
which compiles. ``mfu`` counts 4 operations a token and frozen weight; none on a CPU
unless ``--peak-tflops`` says what it could do. ``predicted_s`` is what ``granite-scu plan``
expects of a step on this CPU, ``predicted_ratio`` that over ``computed_s``, what ours took without its waiting for
others (``theirs_computed_s``, ``trl_computed_s``). ``bound_s`` is what the matrix products of a step take by themselves
on a CPU, ``of_bound`` how many times that ours took. ``--model`` takes a folder too. ``--sides`` may be one alone, and
has ``trl`` too: TRL's SFTTrainer as it comes.
``--chats 48`` trains on chats of 20 to 1,200 characters, and times are of a pass over all: ours packs them into blocks
of ``--length`` in which none sees another, theirs pads them to the longest of a batch, of as many batches; TRL packs.
``--variants`` trains ours with further flags too, one after the other, so that no more memory is needed, and so do the
sides with ``--apart``: ``eager_s``, ``eager_extra_gb``, ``eager_last_loss``, and ``eager_reason`` where it could not be
measured.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, training
from benchmarks.gate import Outcome, race
from benchmarks.measure import ratio, shown
from granite_scu.cli import exit_codes
from granite_scu.config.errors import UserError
from granite_scu.config.settings import PRECISIONS
from granite_scu.hardware import detection, peaks

BATCHES, LENGTHS = (1, 2, 4, 8), (512, 1024, 2048, 4096)
OURS = ("--controller", "none", "--no-isolate-documents")
ON_CHATS = ("--controller", "none", "--held-out-share", "0")

SIDES = ("ours", "theirs", "trl")

VARIANTS = {
    "eager": ("--torch-compile", "off"),
    "recomputed": ("--gradient-checkpointing", "on"),
    "four_bits": ("--4bit-quantization",),
}
"""Further flags of ours."""

COLUMNS = {
    "case": "case", "ours_s": "ours s/step|.3f", "theirs_s": "theirs s/step|.3f", "speedup": "speedup|.2f",
    "ours_tokens_per_s": "ours tokens/s|,.0f", "theirs_tokens_per_s": "theirs|,.0f",
    "ours_mfu": "ours MFU|.1%", "theirs_mfu": "theirs|.1%",
    "ours_extra_gb": "ours GiB|.3f", "theirs_extra_gb": "theirs|.3f", "memory_ratio": "ratio|.2f",
    "computed_s": "computed s|.3f", "theirs_computed_s": "theirs|.3f", "trl_computed_s": "TRL|.3f",
    "bound_s": "products s|.3f", "of_bound": "of them|.2f",
    "predicted_s": "predicted s|.3f", "predicted_ratio": "of it|.2f",
    "first_loss": "first loss|.4f", "ours_last_loss": "ours last|.4f", "theirs_last_loss": "theirs|.4f",
    "max_rel_err": "difference|.0e",
    "ours_first_s": "ours first s|.1f",
    **{f"{name}_s": f"{name.replace('_', ' ')} s/step|.3f" for name in ("trl", *VARIANTS)},
    **{f"{name}_tokens_per_s": f"{name.replace('_', ' ')} tokens/s|,.0f" for name in ("trl", *VARIANTS)},
    **{f"{name}_extra_gb": f"{name.replace('_', ' ')} GiB|.3f" for name in ("trl", *VARIANTS)},
    "trl_reason": "TRL not measured",
    "reason": "not measured",
}  # fmt: skip


def run_case(
    case: training.Case,
    device: str,
    repeats: int,
    peak: float | None,
    advance: Callable[[], None],
    sides: tuple[str, ...] = SIDES[:2],
    flags: tuple[str, ...] = (),
    variants: tuple[str, ...] = (),
    apart: bool = False,
) -> dict[str, Any]:
    """Train the sides in turn, then variants of ours.

    Args:
        case: what is trained.
        device: "cpu" or "cuda".
        repeats: timed blocks of steps.
        peak: operations a second that the device could do, in units of 1e12.
        advance: called after each round of the sides.
        sides: of ``SIDES``.
        flags: further ones of ours.
        variants: of ``VARIANTS``.
        apart: train the sides one after the other, for which less memory is needed.
    """
    steps = case.block * (1 + repeats) + 1  # the last one only closes the block before it
    usual = ON_CHATS if case.chats else OURS
    if case.chats:
        steps *= 2  # theirs may take more to a pass
    known = {
        "ours": (training.run_ours, (case, steps, (*usual, *flags), False)),
        "theirs": (training.run_theirs, (case, steps)),
        "trl": (training.run_trl, (case, steps)),
    }
    asked = {name: known[name] for name in sides}
    groups = [{name: side} for name, side in asked.items()] if apart else [asked]
    found = {}
    for group in groups:
        found |= race(group, device, repeats, advance)
    for name in variants:
        found |= race(
            {name: (training.run_ours, (case, steps, (*usual, *flags, *VARIANTS[name]), False))}, device, repeats
        )
    if case.chats:
        case = replace(case, block=1)  # times are of a pass
    outcomes = {name: found.get(name, Outcome()) for name in SIDES[:2]}
    facts = _facts(case, outcomes, peak)
    if device == "cpu" and "ours" in sides:
        predicted, computed = predicted_seconds(case), ratio(found["ours"].computed, case.block)
        facts |= {"predicted_s": predicted, "computed_s": computed, "predicted_ratio": ratio(predicted, computed)}
        facts |= {f"{name}_computed_s": ratio(side.computed, case.block) for name, side in found.items()}
        facts |= {"bound_s": (bound := training.bound_seconds(case)), "of_bound": ratio(computed, bound)}
    facts["sides"] = sides
    for name in {*found} - {*SIDES[:2]}:
        facts |= _alone(name, found[name], case)
    return measure.compared(str(case), device, *outcomes.values(), units=case.block, **facts)


def _facts(case: training.Case, outcomes: dict[str, Outcome], peak: float | None) -> dict[str, Any]:
    losses = {name: [loss for report in o.reports for loss in report["losses"]] for name, o in outcomes.items()}
    facts: dict[str, Any] = {
        "max_rel_err": None if case.chats else training.largest_difference(*losses.values()),
        "first_loss": losses["ours"][0] if losses["ours"] else None,
        "batch": case.batch,
        "length": case.length,
        "precision": case.precision,
    }
    # What the device could do in a step, in such steps a second.
    most = peak and peak * 1e12 / (4 * case.tokens * training.frozen_weights(case.name))
    for name, outcome in outcomes.items():
        step = ratio(outcome.seconds, case.block)
        facts[f"{name}_first_s"] = outcome.reports[0]["seconds"] if outcome.reports else None
        facts[f"{name}_last_loss"] = losses[name][-1] if losses[name] else None
        facts[f"{name}_tokens_per_s"] = ratio(case.tokens, step)
        facts[f"{name}_mfu"] = ratio(1, step and most and step * most)
    return facts


def predicted_seconds(case: training.Case) -> float:
    """Of an optimizer step, as ``granite-scu plan`` expects it on this CPU."""
    from granite_scu.hardware import machine
    from granite_scu.model import loading, step_time
    from granite_scu.training import memory_budget

    with tempfile.TemporaryDirectory() as folder:
        request = training.make_request("cpu", case, case.block, OURS, folder)
        setting = memory_budget.setting_of(request, machine.resolve_request(request))
        return step_time.measure(loading.load_model_config(case.name), setting).step * case.tokens


def _alone(name: str, outcome: Outcome, case: training.Case) -> dict[str, Any]:
    losses = [loss for report in outcome.reports for loss in report["losses"]]
    seconds = ratio(outcome.seconds, case.block)
    return {
        f"{name}_s": seconds,
        f"{name}_tokens_per_s": ratio(case.tokens, seconds),
        f"{name}_extra_gb": outcome.extra_gb,
        f"{name}_last_loss": losses[-1] if losses else None,
        f"{name}_reason": outcome.reason,
    }


def peak_tflops(device: str, case: training.Case) -> float | None:
    """Of a GPU in the precision of a case; None on a CPU, whose own is rarely known."""
    if device != "cuda":
        return None
    found = detection.detect(device)
    return peaks.peak_flops(found, PRECISIONS[case.precision], tf32=found.supports_tf32).flops / 1e12


def swept(cases: list[training.Case]) -> list[training.Case]:
    """Each model and precision at every batch size and length."""
    grid = list(product(cases, BATCHES, LENGTHS))
    return list(dict.fromkeys(replace(case, batch=batch, length=length) for case, batch, length in grid))


def main() -> int:
    parser = measure.build_parser(str(__doc__), repeats=5, quick=2)
    training.add_flags(parser)
    parser.add_argument("--block", type=int, help="optimizer steps in a turn (default: 10, or 1 where a step is long)")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device, for the MFU (default: the GPU's in the case's precision)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help=f"batches of {shown(BATCHES)}, lengths of {shown(LENGTHS)}"
    )
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=[], help="of ours, besides")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:2], help=f"default: {' '.join(SIDES[:2])}")
    parser.add_argument("--ours", default="", metavar="FLAGS", help="further flags of ours")
    parser.add_argument("--chats", type=int, metavar="N", help="train on so many short chats, a pass in a turn")
    parser.add_argument("--apart", action="store_true", help="one side after the other, where memory is short")
    options = measure.parse(parser)
    measure.require_positive(block=options.block, chats=options.chats)
    if options.peak_tflops is not None and not options.peak_tflops > 0:  # nor NaN
        raise UserError(f"--peak-tflops {options.peak_tflops}: must be positive")
    cases = training.cases(options, options.block)
    if options.sweep:
        cases = swept(cases)
    found = measure.measure_each(
        training.ready(cases, options.device, options.chats),
        options.turns,
        lambda case, advance: run_case(
            case,
            options.device,
            options.repeats,
            options.peak_tflops or peak_tflops(options.device, case),
            advance,
            tuple(options.sides),
            tuple(shlex.split(options.ours)),
            tuple(options.variants),
            options.apart,
        ),
    )
    measure.present(found, COLUMNS, "an optimizer step, ours against Hugging Face's Trainer with PEFT", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
