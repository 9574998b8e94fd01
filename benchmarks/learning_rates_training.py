"""One cell of ``benchmarks/learning_rates.py``, trained and asked: what was learned, and what was lost."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console

from benchmarks.asking import elsewhere_of, known_answers, longest, own_answers, predicted, write
from benchmarks.learning_rates_data import Lesson, lesson
from benchmarks.learning_rates_grid import RECORDS_A_STEP, Cell
from granite_scu import Request
from granite_scu.config.errors import Diverged
from granite_scu.model import loading
from granite_scu.model.compilation import evaluation_mode
from granite_scu.training.recipe import prepare, train

WARMUP = 0.05
"""Share of the steps over which the rate rises."""


def run(cell: Cell, name: str) -> dict[str, Any]:
    """Train a cell and measure it: a line of ``runs.jsonl`` but for the cell itself.

    Args:
        cell: what is trained.
        name: of the model, as ``--model`` takes it.
    """
    torch.set_num_threads(1)
    made = lesson(cell.data, cell.records)
    asked = Asked(cell, made)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for part, records in (("train", made.train), ("held-out", made.held_out)):
            write(records, Path(folder, f"{part}.jsonl"))
        block = longest(made, loading.load_tokenizer(name))
        request = Request.from_dotted(_settings(cell, name, Path(folder), block))
        request = replace(request, trainer=replace(request.trainer, callbacks=[asked]))
        try:
            prepared = prepare(request, Console(quiet=True))
            summary = train(prepared)
        except Diverged as error:
            return {"steps": cell.steps, "failed": str(error)}
    return {
        "steps": summary["steps"],
        "tokens": prepared.data.train.n_inputs,
        "supervised_tokens": prepared.data.n_tokens,
        "bits_base": round(summary["base_test_bpt"], 4),
        "bits": round(summary["adapter_test_bpt"], 4),
        **asked.found,
        "train_s": round(summary["train_time_s"], 1),
        "cpu_s": round(time.process_time() - started, 1),
    }


def _settings(cell: Cell, name: str, folder: Path, block: int) -> dict[str, Any]:
    """Plain LoRA at the product's defaults, but for what the grid varies and blocks as long as the longest record."""
    return {
        "base.name": name,
        "data.path": str(folder / "train.jsonl"),
        "data.validation_data": str(folder / "held-out.jsonl"),
        "data.held_out_share": 0,
        "data.cache_dir": str(folder / "cache"),
        "data.block_size": block,
        "data.batch_size": RECORDS_A_STEP,
        "data.packing": "best-fit",
        "optimizer.learning_rate": cell.rate,
        "optimizer.warmup_steps": round(WARMUP * cell.steps),
        "control.controller": "none",
        "control.every": min(10, cell.steps),
        "run.output_dir": str(folder / "run"),
        "run.eval_steps": cell.steps,
        "run.save_steps": cell.steps,
        "run.samples": 0,
        "trainer.max_steps": cell.steps,
        "trainer.accumulate_grad_batches": 1,
        "trainer.limit_val_batches": 1,
        "trainer.accelerator": "cpu",
        "seed_everything": cell.seed,
    }


class Asked(L.Callback):
    """Asks the trained model, at the end: the held-out questions, general ones, and how it scores the base's answers.

    Attributes:
        found: figures of a line of ``runs.jsonl``.
    """

    def __init__(self, cell: Cell, made: Lesson) -> None:
        self.cell, self.made = cell, made
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        model, tokenizer = module.language_model, loading.load_tokenizer(module.base.name)
        with torch.no_grad(), trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
            with module.model.disable_adapter():
                base = elsewhere_of(module.base.name, model, tokenizer)
            general = predicted(model, tokenizer, base.said)
            self.found = {
                **own_answers(model, tokenizer, self.made, self.cell.data),
                "general_tokens": general.tokens,
                "general_bits_base": round(base.bits.bits_per_token, 4),
                "general_bits": round(general.bits_per_token, 4),
                **known_answers(model, tokenizer, base),
            }
