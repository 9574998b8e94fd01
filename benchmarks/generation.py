#!/usr/bin/env python3
"""What a model writes, in batches against one text after the other.

    python benchmarks/generation.py --quick                          the embedded model in two minutes
    python benchmarks/generation.py --model embedded FOLDER          and one that is there

Both sides hand the same prompts to ``continuations``, as a run does: the beginnings of two texts (its samples), thirty
general questions, and general text, 32 times from nothing at temperature 1. Time is of a token that was written, for
draws end at other places. ``same`` counts the likeliest texts that both wrote: sums in another order may change one.
``reference`` is a batch through transformers' own forward of Mamba-2 layers, ``than_reference`` its time over ours.

The sides take turns, each in a process of its own.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, training
from benchmarks.gate import Gate, Outcome, race
from benchmarks.measure import ratio
from granite_scu.cli import exit_codes

WRITTEN = {"samples": 40, "answers": 40, "general": 64}
"""What is written, and how many tokens of each at most."""
DRAWN = "general"

COLUMNS = {
    "case": "case", "texts": "texts|d", "ours_tokens_per_s": "in batches, tokens/s|,.0f",
    "theirs_tokens_per_s": "one by one|,.0f", "speedup": "speedup|.1f", "than_reference": "than reference|.1f",
    "same": "same|d", "reason": "not measured",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is written by a model: a key of ``WRITTEN``."""

    trained: training.Case
    written: str

    def __str__(self) -> str:
        return f"{Path(self.trained.model).name} {self.trained.precision}, {self.written}"


def prompts_of(written: str, tokenizer: Any) -> list[list[int]]:
    """What is gone on from."""
    from granite_scu.data.sources.read import load as read
    from granite_scu.data.tokens.encoding import beginning, encode
    from granite_scu.evaluation import elsewhere, general_writing

    if written == "answers":
        return [list(asked.tokens) for asked in elsewhere.as_asked(elsewhere.general_questions(), tokenizer)[1]]
    if written == "samples":
        stream = encode(read(training.CORPUS, "text"), tokenizer)
        return [stream.tokens[start : start + 32].tolist() for start in (0, int(stream.ends[0]))]
    return [beginning(tokenizer) or [tokenizer.eos_token_id]] * general_writing.BATCH


def write(gate: Gate, case: Case, alone: bool = False, reference: bool = False) -> None:
    """Write everything again and again, in batches or each text alone."""
    import torch

    from granite_scu.config.request import Request
    from granite_scu.config.settings import PRECISIONS, BaseConfig
    from granite_scu.data.blocks.packing import padding_of
    from granite_scu.evaluation.answers import BATCH, Noise, continuations, ends_of
    from granite_scu.hardware import machine
    from granite_scu.model import loading
    from granite_scu.model.mamba2.mamba import layers_of

    name, precision = case.trained.name, PRECISIONS[case.trained.precision]
    asked = {"base.name": name, "trainer.accelerator": gate.device, "trainer.precision": precision}
    here = machine.resolve_request(Request.from_dotted(asked))
    model = loading.load_model(BaseConfig(name), loading.WEIGHT_DTYPES[here.precision]).to(here.torch_device).eval()
    if reference:
        for layer in layers_of(model).values():
            layer.forward = types.MethodType(type(layer).forward, layer)
    tokenizer, drawn = loading.load_tokenizer(name), case.written == DRAWN
    prompts = prompts_of(case.written, tokenizer)
    at_once = 1 if alone else len(prompts) if drawn else BATCH
    found: list[list[int]] = []
    while True:
        gate.wait(lambda: {"texts": [*found]})
        noise = Noise(torch.Generator(model.device).manual_seed(training.SEED)) if drawn else None
        with loading.autocast(here.torch_device, here.precision):
            found[:] = [
                text
                for start in range(0, len(prompts), at_once)
                for text in continuations(
                    model, prompts[start : start + at_once], WRITTEN[case.written], ends_of(model, tokenizer, []),
                    padding_of(tokenizer), noise=noise,
                )
            ]  # fmt: skip


def run_case(case: Case, device: str, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Write with both sides in turn, and by the reference where the model has Mamba-2 layers."""
    from granite_scu.model import loading

    sides = {"ours": (write, (case,)), "theirs": (write, (case, True))}
    if "linear_attention" in (getattr(loading.load_model_config(case.trained.name), "layer_types", None) or ()):
        sides["reference"] = (write, (case, False, True))
    outcomes = race(sides, device, repeats, advance)
    rates = {name: ratio(_tokens(outcome), outcome.seconds) for name, outcome in outcomes.items()}
    drawn = case.written == DRAWN
    texts = [outcome.reports[-1]["texts"] if outcome.reports else [] for outcome in outcomes.values()]
    found = measure.compared(str(case), device, outcomes["ours"], outcomes["theirs"])
    return found | {
        "texts": len(texts[0]),
        "same": None if drawn else sum(one == other for one, other in zip(*texts[:2], strict=False)),
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        "speedup": ratio(rates["ours"], rates["theirs"]),
        "than_reference": ratio(rates["ours"], rates.get("reference")),
    }


def _tokens(outcome: Outcome) -> int | None:
    return sum(map(len, outcome.reports[-1]["texts"])) if outcome.reports else None


def main() -> int:
    parser = measure.build_parser(str(__doc__), repeats=5, quick=2)
    training.add_flags(parser)
    parser.add_argument("--written", nargs="+", choices=tuple(WRITTEN), default=list(WRITTEN), help="default: all")
    options = measure.parse(parser)
    options.model = options.model or ["embedded"]
    models = training.with_models(training.cases(options, block=1), options.device)
    found = measure.measure_each(
        (Case(trained, written) for trained in models for written in options.written),
        options.turns,
        partial(_measured, options.device, options.repeats),
    )
    measure.present(found, COLUMNS, "in batches against one text after the other", options.json)
    return 0


def _measured(device: str, repeats: int, case: Case, advance: Callable[[], None]) -> dict[str, Any]:
    return run_case(case, device, repeats, advance)


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
