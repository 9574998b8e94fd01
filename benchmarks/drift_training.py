"""One cell of ``benchmarks/drift.py``, trained and measured: what was learned, how far it drifted, what was lost."""

import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.asking import (
    elsewhere_of,
    known_answers,
    longest,
    own_answers,
    predicted,
    rows_of_texts,
    said_in,
    scored,
    tokens_of,
    write,
)
from benchmarks.cells import ROOT
from benchmarks.drift_grid import RECORDS_A_STEP, Cell
from benchmarks.learning_rates_data import Lesson, Record, chat, lesson
from granite_scu import Request
from granite_scu.config.errors import Diverged
from granite_scu.config.settings import BaseConfig, DriftConfig
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.sources import corpora
from granite_scu.evaluation import general_text, general_writing
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.hardware import detection, machine
from granite_scu.model import loading
from granite_scu.model.adapters import names_in_file
from granite_scu.model.compilation import evaluation_mode
from granite_scu.model.drift import READ_AT_ONCE, GeneralPart, anchor_tokens
from granite_scu.storage.run_folder import read_json
from granite_scu.training.recipe import prepare, train
from research.laws.ziegler import Ziegler

FREE, NEAR = "free", "near"
"""Kinds of general text: what the base writes freely, on which drift is measured in every cell; and what a run has it
write by itself, where each question begins as one that is trained on."""

CHECKPOINTS, AVERAGED = 5, 3
SCALES = (0.75, 0.5, 0.25)
NEVER = 10**6
"""Steps between validations, and between checkpoints: the last step has one in any case."""

CHATS = {"format": "observatory.jsonl"}
"""The chats of another kind than a lesson's, in ``benchmarks/chats``."""
OTHER_CHATS = "orders.jsonl"
SPEECH = ROOT / "benchmarks" / "speech.txt"
"""Prose in the public domain: of a president's yearly message to Congress."""
PIECES, LETTERS = 8, 600
"""Of prose, and of Python source: so many pieces of so many letters."""

ANY_BUDGET = 0.99
"""Of a run whose lambda has one value: nothing holds it."""


def run(cell: Cell, name: str, folder: Path) -> dict[str, Any]:
    """Train a cell and measure it: a line of ``runs.jsonl`` but for the cell itself.

    Args:
        cell: what is trained.
        name: of the base, as ``--model`` takes it.
        folder: where the general texts are kept.
    """
    torch.set_num_threads(1)
    made, tokenizer = lesson(cell.data, cell.records), loading.load_tokenizer(name)
    texts = {FREE: general_file(name, folder / f"general-{cell.base}.jsonl")}
    if cell.text == NEAR:
        place = folder / f"general-{cell.base}-near-{cell.data}-{cell.records}.jsonl"
        texts[NEAR] = general_file(name, place, [record["messages"][0]["content"] for record in made.train])
    general, judge = (general_text.read(texts[kind], tokenizer) for kind in (cell.text, FREE))
    measured = Measured(cell, made, judge, time.process_time())
    with tempfile.TemporaryDirectory() as working:
        place = Path(working)
        block = block_of(made, tokenizer, general)
        share = cell.value * anchor_tokens(block) / block if cell.arm == "replay" else 0.0
        of_run = cell.epochs, cell.rate, cell.seed
        asked = settings(name, place, made, tokenizer, general, block, of_run, share)
        request = Request.from_dotted(asked | _of_arm(cell, place, texts[cell.text]))
        request = replace(request, trainer=replace(request.trainer, callbacks=[measured]))
        try:
            prepared = prepare(request, Console(quiet=True))
            if cell.arm == "ziegler":
                prepared = replace(prepared, controller=_ziegler(prepared.controller))
            summary = train(prepared)
        except Diverged as error:
            return {"failed": str(error)}
        history = read_json(place / "run" / "scu_history.json", kind=list)
    return {
        "steps": summary["steps"],
        "step_tokens": prepared.length.tokens_per_step,
        "tokens": prepared.data.train.n_inputs,
        **({"loop": of_loop(summary["drift"], history)} if request.drift.max_drift else {}),
        **measured.found,
        "train_s": round(summary["train_time_s"], 1),
    }


def general_file(name: str, path: Path, questions: Sequence[str] = (), device: str = "cpu") -> Path:
    """The file of general text, written by the base of this name where it is not there yet."""
    if not path.is_file():
        tokenizer = loading.load_tokenizer(name)
        dtype = loading.WEIGHT_DTYPES[machine.resolve_precision(None, detection.detect("cpu"))]
        model = loading.load_model(BaseConfig(name), dtype).to(device).eval()
        with torch.no_grad():
            text = general_writing.general_text(
                model, tokenizer, DriftConfig.general_tokens, 0, Console(stderr=True), questions=questions
            )
        text.write(path, tokenizer)
    return path


def block_of(made: Lesson, tokenizer: Any, general: GeneralText) -> int:
    """Tokens of a step. Records lie in one long row, apart from each other, which holds a document of the general text
    too: so that an arm that trains on it has the same steps."""
    longest_text = max(len(document.tokens) for document in general.documents)
    return max(RECORDS_A_STEP * longest(made, tokenizer), longest_text + 8)


def settings(
    name: str, folder: Path, made: Lesson, tokenizer: Any, general: GeneralText, block: int,
    of_run: tuple[float, float, int], replayed: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The product's defaults, but for what a grid varies.

    Args:
        name: of the base.
        folder: where the records go.
        made: the records.
        tokenizer: of the base.
        general: the general text of the run.
        block: tokens of a step.
        of_run: epochs, rate and seed.
        replayed: general text that is trained on too, a share of the records' tokens.
    """
    epochs, rate, seed = of_run
    own, sources = write(made.train, folder / "train.jsonl"), [str(folder / "train.jsonl")]
    weights = None
    if replayed:
        texts = [_as_record(document, tokenizer) for document in general.parts().anchor]
        sources.append(str(write(texts, folder / "general.jsonl")))
        tokens = [sum(tokens_of(each, tokenizer) for each in records) for records in (made.train, texts)]
        weights = [1.0, replayed * tokens[0] / tokens[1]]
    return {
        "base.name": name,
        "data.path": sources if weights else str(own),
        "data.weights": weights,
        "data.validation_data": str(write(made.held_out, folder / "held-out.jsonl")),
        "data.held_out_share": 0,
        "data.cache_dir": str(folder / "cache"),
        "data.block_size": block,
        "data.batch_size": 1,
        "data.packing": "best-fit",
        "data.num_epochs": epochs,
        "optimizer.learning_rate": rate,
        "run.output_dir": str(folder / "run"),
        "run.eval_steps": NEVER,
        "run.save_steps": NEVER,
        "run.samples": 0,
        "trainer.accumulate_grad_batches": 1,
        "trainer.limit_val_batches": 1,
        "trainer.accelerator": "cpu",
        "seed_everything": seed,
    }


def _of_arm(cell: Cell, folder: Path, general: Path) -> dict[str, Any]:
    """What an arm adds to the settings."""
    if cell.arm in ("loop", "ziegler"):
        held = {"drift.max_drift": cell.value, "drift.general_data": [str(general)]}
        return held | {"control.lambda_max": 1e3}  # the bound when its first runs were made
    if cell.arm in ("fixed", "inputs"):
        text = general if cell.arm == "fixed" else folder / "train.jsonl"
        one = dict.fromkeys(("control.lambda_init", "control.lambda_min", "control.lambda_max"), cell.value)
        return {"drift.max_drift": ANY_BUDGET, "drift.general_data": [str(text)], **one}
    if cell.arm == "size":
        return {"control.target_s": cell.value}
    return {"control.controller": "none"}


def _ziegler(law: Any) -> Ziegler:
    """The rival, from the same lambda on, within the same bounds."""
    same = ("setpoint", "lambda_init", "lambda_min", "lambda_max")
    return Ziegler(**{name: getattr(law, name) for name in same})


def _as_record(document: Document, tokenizer: Any) -> Record:
    """A text, or a chat of the question and the answer that the base wrote."""
    spans: list[list[int]] = [[]]
    for token, counted in zip(document.tokens, document.counted, strict=True):
        if counted:
            spans[-1].append(token)
        elif spans[-1]:
            spans.append([])
    said = [tokenizer.decode(span, skip_special_tokens=True) for span in spans if span]
    return chat(*said) if len(said) == 2 else {"text": "".join(said)}


def of_loop(drift: dict[str, Any], history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How a run with an anchor went: drift at the end on what of its text the loop did not see, and each tick."""
    last = history[-1]
    return {
        "held_out": drift["share"],
        "steering": last["drift"],
        **({"scale": round(drift["scale"], 4)} if drift.get("scale", 1) < 1 else {}),
        "lambda": last["lambda"],
        "at_bound": bool(last.get("saturated")),
        "course": [[tick["step"], round(tick["drift"], 5), float(f"{tick['lambda']:.4g}")] for tick in history],
    }


class Measured(L.Callback):
    """Measures the last adapter; of a plain run those on the way, and what is made of them without training, too.

    Attributes:
        found: figures of a line of ``runs.jsonl``.
    """

    def __init__(self, cell: Cell, made: Lesson, general: GeneralText, began: float) -> None:
        self.cell, self.made, self.general, self.began = cell, made, general, began
        self.kept: dict[int, list[Tensor]] = {}
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        steps, last = trainer.global_step, trainer.max_steps
        if steps in {math.ceil(last * part / CHECKPOINTS) for part in range(1, CHECKPOINTS + 1)}:
            self.kept[steps] = [factor.detach().clone() for factor in module.factors]

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        used = time.process_time() - self.began
        model, tokenizer = module.language_model, loading.load_tokenizer(module.base.name)
        documents = self.general.parts().held_out
        held_out = GeneralPart(
            module.as_trained(), general_text.batches(documents, READ_AT_ONCE, padding_of(tokenizer))
        )
        with torch.no_grad(), trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
            with module.model.disable_adapter():
                base = elsewhere_of(module.base.name, model, tokenizer)
                at_base = self._predicted(model, tokenizer, base)
            points = {}
            for point, factors in self._points():
                module.load_adapter(dict(zip(names_in_file(module.model), factors, strict=True)))
                points[point] = {
                    "drift": held_out.read().share,
                    **own_answers(model, tokenizer, self.made, self.cell.data),
                    **known_answers(model, tokenizer, base),
                    **self._predicted(model, tokenizer, base),
                }
        self.found = {
            "at_base": at_base | {"drift_bits": round(held_out.base_bpt, 4), "drift_tokens": held_out.tokens},
            "points": points,
            "train_cpu_s": round(used, 1),
            "cpu_s": round(time.process_time() - self.began, 1),
        }

    def _points(self) -> Iterator[tuple[str, list[Tensor]]]:
        """What is measured: names and factors, A and B in turn."""
        kept = list(self.kept.values())
        yield "end", kept[-1]
        if self.cell.arm != "plain":
            return
        for step, factors in list(self.kept.items())[:-1]:
            yield f"step {step}", factors
        for scale in SCALES:
            yield f"x {scale:g}", [factor * scale if place % 2 else factor for place, factor in enumerate(kept[-1])]
        yield f"mean of {AVERAGED}", [torch.stack(same).mean(0) for same in zip(*kept[-AVERAGED:], strict=True)]

    def _predicted(self, model: Any, tokenizer: Any, base: Any) -> dict[str, float]:
        """Bits a token: of the lesson's held-out records, and of what has nothing to do with it."""

        def bits_of(texts: list[str]) -> Any:
            return scored(model, rows_of_texts(tokenizer, texts))

        held_out = self.made.held_out
        found = {
            "bits": predicted(model, tokenizer, said_in(held_out)) if self.made.right
            else bits_of([record["text"] for record in held_out]),
            "general": predicted(model, tokenizer, base.said),
            "chats": predicted(model, tokenizer, said_in(other_chats(self.cell.data))),
            "prose": bits_of(prose()),
            "source": bits_of(source()),
        }  # fmt: skip
        return {name: round(score.bits_per_token, 4) for name, score in found.items()}


def other_chats(data: str) -> list[Record]:
    """Chats of another kind than a lesson's."""
    lines = (ROOT / "benchmarks" / "chats" / CHATS.get(data, OTHER_CHATS)).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:30]]


def prose() -> list[str]:
    """Pieces of a speech."""
    text = SPEECH.read_text(encoding="utf-8")
    return [text[start : start + LETTERS] for start in range(0, PIECES * LETTERS, LETTERS)]


def source() -> list[str]:
    """Pieces of Python that no small base has seen."""
    modules = [document.text for document in corpora.held_out_source() if len(document.text) > 4 * LETTERS]
    return [text[LETTERS : 2 * LETTERS] for text in modules[:: max(1, len(modules) // PIECES)][:PIECES]]
