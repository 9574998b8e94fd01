"""What a cell asks of the product, and the general text that it has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.asking import longest, said_in, tokens_of, write
from benchmarks.cells import REAL
from benchmarks.learning_rates_data import Lesson
from granite_scu.config.settings import BaseConfig, ControlConfig, DriftConfig, holding_drift
from granite_scu.evaluation import general_writing
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.hardware import detection, machine
from granite_scu.model import loading
from research.laws import AUTO
from research.real.grid import Cell
from research.real.measuring import once
from research.real.tasks import TASKS, split

RECORDS_A_STEP = 8
ANY_BUDGET = 0.99
"""Of a run whose lambda has one value: nothing holds it."""
NEVER = 10**6
"""Steps between checkpoints: the last step has one in any case."""


def general_files(cell: Cell, name: str, folder: Path, device: str) -> tuple[Path, Path]:
    """The general text that an arm has, and that drift is measured on; written by the base where it is not there yet.

    Of chats the real model writes what a run has it write: questions that begin as those that are trained on.

    Args:
        cell: the run.
        name: of the base, as ``--model`` takes it.
        folder: where the texts are kept.
        device: ``cpu`` or ``cuda``.
    """
    train, free = split(cell.task).train, folder / f"general-{cell.base}.jsonl"
    texts = {free: []}
    if cell.base == REAL and "messages" in train[0]:
        texts[folder / f"general-{cell.base}-{cell.task}.jsonl"] = [question for question, _ in said_in(train)]
    for path, questions in texts.items():
        with once(path):
            if not path.is_file():
                _write_general(path, name, questions, device)
    return [*texts][-1], free


def _write_general(path: Path, name: str, questions: Sequence[str], device: str) -> None:
    tokenizer = loading.load_tokenizer(name)
    dtype = loading.WEIGHT_DTYPES[machine.resolve_precision(None, detection.detect("cpu"))]
    model = loading.load_model(BaseConfig(name), dtype).to(device).eval()
    tokens, console = DriftConfig.general_tokens, Console(stderr=True)
    with torch.no_grad():
        text = general_writing.general_text(model, tokenizer, tokens, 0, console, questions=questions)
    text.write(path, tokenizer)


def block_of(made: Lesson, tokenizer: Any, general: GeneralText) -> int:
    """Tokens of a step. Records lie in one long row, apart from each other, which holds a document of the general text
    too: so that an arm that trains on it has the same steps."""
    longest_text = max(len(document.tokens) for document in general.documents)
    return max(RECORDS_A_STEP * longest(made, tokenizer), longest_text + 8)


def settings(
    cell: Cell, name: str, folder: Path, made: Lesson, tokenizer: Any, general: GeneralText, device: str
) -> dict[str, Any]:
    """The product's defaults, but for what the protocol sets and a cell varies.

    Args:
        cell: the run.
        name: of the base, as ``--model`` takes it.
        folder: where the records go.
        made: the records.
        tokenizer: of the base.
        general: the general text of the run.
        device: ``cpu`` or ``cuda``.
    """
    own, sources = write(made.train, folder / "train.jsonl"), [str(folder / "train.jsonl")]
    weights, epochs = None, TASKS[cell.task].epochs
    if cell.arm == "replay":
        texts = general_writing.records(general.parts().anchor, tokenizer)
        sources.append(str(write(texts, folder / "general.jsonl")))
        tokens = [sum(tokens_of(each, tokenizer) for each in records) for records in (made.train, texts)]
        # One epoch that reads each file so often, as these runs began: then each of several read the same part.
        weights, epochs = [epochs, cell.value * epochs * tokens[0] / tokens[1]], 1.0
    return {
        "base.name": name,
        "base.compile": False,
        "data.path": sources if weights else str(own),
        "data.weights": weights,
        "data.validation_data": str(write(made.held_out, folder / "held-out.jsonl")),
        "data.held_out_share": 0,
        "data.cache_dir": str(folder / "cache"),
        "data.block_size": block_of(made, tokenizer, general),
        "data.batch_size": 1,
        "data.packing": "best-fit",
        "data.num_epochs": epochs,
        "optimizer.learning_rate": cell.rate,
        "run.output_dir": str(folder / "run"),
        "run.save_steps": NEVER,
        "run.samples": 0,
        "trainer.accumulate_grad_batches": 1,
        "trainer.limit_val_batches": len(made.held_out),
        "trainer.accelerator": device,
        "trainer.precision": "bf16-mixed",
        "seed_everything": cell.seed,
    }


def of_arm(cell: Cell, general: Path) -> dict[str, Any]:
    """What an arm adds to the settings."""
    plain, held = {"control.controller": "none"}, {"drift.general_data": [str(general)]}
    weight = holding_drift(ControlConfig(), cell.value, ()).lambda_init if cell.arm == "held" else cell.value
    one = dict.fromkeys(("control.lambda_init", "control.lambda_min", "control.lambda_max"), weight)
    of_lora = {"lora.rank": round(cell.value), "lora.alpha": 2 * cell.value}
    return {
        "plain": plain,
        "replay": plain,
        "auto": {"control.controller": AUTO},
        "drift": held | {"drift.max_drift": cell.value},
        "wide": held | {"drift.max_drift": cell.value, "control.lambda_max": 1e3},
        "both": held | {"drift.max_drift": cell.value},
        "held": held | {"drift.max_drift": cell.value} | one,
        "kl": held | {"drift.max_drift": ANY_BUDGET} | one,
        "lambda": {"control.controller": "fixed", "control.lambda_init": cell.value},
        "decay": plain | {"optimizer.weight_decay": cell.value},
        "dropout": plain | {"lora.dropout": cell.value},
        "rank": plain | of_lora,
    }[cell.arm]
