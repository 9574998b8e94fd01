#!/usr/bin/env python3
"""Scoring held-out text, as ``scripts/eval_bpt.py`` does, against a bare loop of forward passes.

    python benchmarks/scoring.py --quick                 the embedded model, about a minute on two quiet cores
    python benchmarks/scoring.py --json > out.json       and ten blocks of Granite-4.0-H-1B at full width

Both score the base and two adapters on the same batches of the embedded text, in the same model with the same kernels.
Ours makes the batches, switches adapters within each, and sums what every window costs; theirs has the batches ready,
makes the logits of all of them with one adapter after the other, and does nothing with the logits. ``speedup`` is
thus the tokens/s of scoring over those of bare forward passes; the goal is at least 0.9.

The sides take turns, each in a process of its own. ``extra_gb`` is the most memory on top of the loaded model:
resident on a CPU, of the allocator on CUDA. The last case of a model has four times the text: memory is to stay.
``max_rel_err`` is the difference of the cross-entropy from that of the bare loop's logits, over all models.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, training
from benchmarks.gate import Gate, race
from benchmarks.measure import ratio
from granite_scu.cli import exit_codes

GOAL = 0.9
ADAPTERS = 2

COLUMNS = {
    "case": "case", "ours_tokens_per_s": "scoring, tokens/s|,.0f", "theirs_tokens_per_s": "bare forward|,.0f",
    "speedup": "ratio|.2f", "goal_met": "at least 0.9", "ours_extra_gb": "scoring, GiB|.3f",
    "theirs_extra_gb": "bare|.3f", "max_rel_err": "difference|.0e", "reason": "not measured",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is scored: so many windows of a model's text, by the base and ``ADAPTERS`` adapters."""

    trained: training.Case
    windows: int

    @property
    def tokens(self) -> int:
        return (1 + ADAPTERS) * self.windows * self.trained.length

    def __str__(self) -> str:
        return f"{self.trained} x {self.windows // self.trained.batch} batches"


@dataclass(frozen=True)
class Ready:
    """What both sides start from."""

    model: Any
    switches: list[Any]
    corpus: Any
    autocast: Callable[[], Any]


def load(case: Case, device: str) -> Ready:
    """The model with its adapters, and the windows of the text."""
    import torch
    from transformers.utils import logging

    from granite_scu.config.request import Request
    from granite_scu.config.settings import PRECISIONS, BaseConfig, LoraConfig
    from granite_scu.data.sources.read import load as read
    from granite_scu.data.tokens.encoding import encode
    from granite_scu.evaluation.bpt.windows import as_corpus, cut
    from granite_scu.hardware import machine
    from granite_scu.model import adapters, loading

    logging.disable_progress_bar()
    trained = case.trained
    base = BaseConfig(trained.name)
    asked = {"trainer.accelerator": device, "trainer.precision": PRECISIONS[trained.precision]}
    asked["data.isolate_documents"] = False
    here = machine.resolve_request(Request.from_dotted(asked))
    with tempfile.TemporaryDirectory() as folder:
        plain = loading.load_model(base, torch.bfloat16)
        for number in range(ADAPTERS):
            torch.manual_seed(number)
            wrapped = adapters.attach(plain, LoraConfig())
            for update in adapters.low_rank_updates(wrapped).values():
                torch.nn.init.normal_(update.b, std=1e-3)
            wrapped.peft_config[adapters.ADAPTER].base_model_name_or_path = trained.name
            wrapped.save_pretrained(f"{folder}/{number}", save_embedding_layers=False)
            plain = wrapped.unload()
        del plain, wrapped
        named = {str(number): Path(folder) / str(number) for number in range(ADAPTERS)}
        dtype = loading.WEIGHT_DTYPES[here.precision]
        model, switches = adapters.load_adapted(
            replace(base, kernels=here.kernels), named, dtype, here.torch_device, here.attention
        )
    if dtype != torch.float32:
        adapters.leave_casting_to_autocast(model)
    tokenizer = loading.load_tokenizer(trained.name)
    documents = read(training.CORPUS, "text")
    corpus = as_corpus(training.CORPUS, documents, encode(documents, tokenizer), tokenizer)
    whole = [w for w in cut(corpus.lengths, trained.length, trained.length) if w.stop - w.start == trained.length]
    windows = [whole[i % len(whole)] for i in range(case.windows)]
    autocast = partial(loading.autocast, here.torch_device, here.precision)
    return Ready(model, switches, replace(corpus, windows=windows), autocast)


def ours(gate: Gate, case: Case) -> None:
    """The product's pass, again and again."""
    from granite_scu.evaluation.bpt.windows import score_windows

    ready = load(case, gate.device)
    found: list[float] = []

    def report() -> dict[str, Any]:
        return {"nats": found}

    warm_up(ready, gate.device)
    while True:
        gate.wait(report)
        nats = score_windows(
            ready.model,
            ready.switches,
            ready.corpus,
            case.trained.batch,
            autocast=ready.autocast,
        )
        found = nats.sum(1).tolist()


def theirs(gate: Gate, case: Case) -> None:
    """Forward passes over ready batches."""
    import torch
    from torch.nn import functional as F

    from granite_scu.config.settings import IGNORED
    from granite_scu.evaluation.bpt.windows import batches

    ready = load(case, gate.device)
    model = ready.model
    made = [
        (batch["input_ids"].to(gate.device), batch["labels"].to(gate.device))
        for batch in batches(ready.corpus, case.trained.batch)
    ]
    checked: list[list[float]] = []

    @torch.no_grad()
    def report() -> dict[str, Any]:
        if not checked:  # once, and not timed
            found = []
            for switch in ready.switches:
                nats = 0.0
                with switch(), ready.autocast():
                    for inputs, labels in made:
                        logits = model(input_ids=inputs, use_cache=False).logits.float()
                        nats += float(F.cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="sum"))
                found.append(nats)
            checked.append(found)
        return {"nats": checked[0]}

    warm_up(ready, gate.device)
    while True:
        gate.wait(report)
        with torch.no_grad():
            for switch in ready.switches:
                with switch(), ready.autocast():
                    for inputs, _ in made:
                        model(input_ids=inputs, use_cache=False)


def warm_up(ready: Ready, device: str) -> None:
    """Code and weights in memory before it is measured."""
    import torch

    with torch.no_grad(), ready.autocast():
        for switch in (nullcontext, *ready.switches):
            with switch():
                ready.model(input_ids=torch.arange(16, device=device)[None], use_cache=False)


def run_case(case: Case, device: str, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Score with both sides in turn."""
    outcomes = race({"ours": (ours, (case,)), "theirs": (theirs, (case,))}, device, repeats, advance)
    nats = [outcome.reports[-1]["nats"] if outcome.reports else [] for outcome in outcomes.values()]
    facts: dict[str, Any] = {"max_rel_err": training.largest_difference(*nats), "windows": case.windows}
    for name, outcome in outcomes.items():
        facts[f"{name}_tokens_per_s"] = ratio(case.tokens, outcome.seconds)
    found = measure.compared(str(case), device, *outcomes.values(), **facts)
    return {**found, "goal_met": found["speedup"] and found["speedup"] >= GOAL}


def main() -> int:
    parser = measure.build_parser(str(__doc__), repeats=9, quick=3)
    training.add_flags(parser)
    parser.add_argument(
        "--batches", type=int, help="in a turn (default: 8 of the embedded model, 2 of a larger one, and with --quick)"
    )
    options = measure.parse(parser)
    measure.require_positive(batches=options.batches)
    if options.quick and not options.precisions:
        options.precisions = ["fp32"]

    def sizes(trained: training.Case) -> list[Case]:
        usual = 8 if trained.model == "embedded" and not options.quick else 2
        windows = trained.batch * (options.batches or usual)
        return [Case(trained, windows), Case(trained, 4 * windows)]

    def each() -> Any:
        for trained in training.with_models(training.cases(options, block=1), options.device):
            yield from sizes(trained)

    found = measure.measure_each(
        each(), options.turns, lambda case, advance: run_case(case, options.device, options.repeats, advance)
    )
    measure.present(found, COLUMNS, "scoring against bare forward passes", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
