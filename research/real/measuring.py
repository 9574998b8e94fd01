"""What a run of the protocol has learned and lost: bits of each record and text, and which answers are right."""

import json
import math
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from filelock import FileLock
from torch import Tensor

from benchmarks.asking import (
    Row,
    answers,
    answers_to_known,
    batches_of,
    drawn_answers,
    rows_of_chats,
    rows_of_texts,
    said_in,
)
from benchmarks.cells import ROOT
from benchmarks.learning_rates_data import GENERAL, KNOWN, Record, is_known
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.sources import corpora
from granite_scu.evaluation import general_text
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.evaluation.score import each_batch
from granite_scu.model import loading
from granite_scu.model.compilation import evaluation_mode
from granite_scu.model.drift import READ_AT_ONCE, GeneralPart
from granite_scu.model.loss import token_nats
from granite_scu.storage.atomic import replacing
from granite_scu.storage.run_folder import read_json
from research.real.grid import Cell, Line
from research.real.tasks import TASKS, split

EMA_SHARE = 0.1
"""Of the steps, over which the factors are averaged."""

CHECKPOINTS, AVERAGED = 5, 3
SCALES = (0.75, 0.5, 0.25)

CHATS = {"format": "observatory.jsonl"}
"""The chats of another kind than a task's, in ``benchmarks/chats``."""
OTHER_CHATS = "orders.jsonl"
SPEECH = ROOT / "benchmarks" / "speech.txt"
"""Prose in the public domain: of a president's yearly message to Congress."""
PIECES, LETTERS = 8, 600
"""Of prose, and of Python source: so many pieces of so many letters."""

_at_base: dict[tuple[str, str], Line] = {}
"""By base and task: it is the same for every run of a process."""


def once(file: Path) -> FileLock:
    """Held while a file is looked for, and made: several processes have the same one."""
    return FileLock(Path(tempfile.gettempdir()) / f"granite-scu-{zlib.crc32(bytes(file.resolve()))}.lock")


class Measured(L.Callback):
    """Measures the adapter that the run keeps, and the last one; of a plain run those on the way, and what is made of
    them without training, too. Of those that may be judged the answers as well.

    Args:
        cell: the run.
        general: text of the base's own, on which drift is measured.
        folder: as of ``Asked``.

    Attributes:
        found: figures of a line of ``runs.jsonl``.
    """

    def __init__(self, cell: Cell, general: GeneralText, folder: Path) -> None:
        self.cell, self.general, self.folder, self.began = cell, general, folder, time.process_time()
        self.training_began = self.began
        self.kept: dict[int, list[Tensor]] = {}
        self.mean: list[Tensor] = []
        self.found: Line = {}

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.training_began = time.process_time()  # a loop's general text is at hand by now

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.mean = [factor.detach().clone() for factor in module.factors]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step, last = trainer.global_step, trainer.max_steps
        factors = [factor.detach() for factor in module.factors]
        torch._foreach_lerp_(self.mean, factors, min(1.0, 1 / (EMA_SHARE * last)))
        if step in {math.ceil(last * part / CHECKPOINTS) for part in range(1, CHECKPOINTS + 1)}:
            self.kept[step] = [factor.clone() for factor in factors]

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        used = time.process_time() - self.training_began
        adapters = dict(self._adapters([factor.detach().clone() for factor in module.factors]))
        with torch.no_grad(), trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
            asked, points = Asked(self.cell, module, self.general, self.folder), {}
            for name, factors in adapters.items():
                module.put(factors)
                points[name] = asked.bits()
            for name in self._judged(points):
                module.put(adapters[name])
                points[name] |= asked.answers()
            if "end" not in points:
                points["end"] = points["best"]
        self.found = {
            "at_base": asked.at_base,
            "points": points,
            "train_cpu_s": round(used, 1),
            "cpu_s": round(time.process_time() - self.began, 1),
        }

    def _judged(self, points: dict[str, Line]) -> list[str]:
        """Of plain's scaled adapters the one that validates best; of replay all, for each may be F."""
        if self.cell.arm == "replay":
            return list(points)
        scaled = sorted((name for name in points if name.startswith("x ")), key=lambda name: points[name]["validation"])
        return [name for name in self.cell.judged if name in points] + scaled[:1]

    def _adapters(self, best: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Names and factors, A and B in turn; the last where it is not the best."""
        kept = list(self.kept.values())
        yield "best", best
        if not all(map(torch.equal, best, kept[-1])):
            yield "end", kept[-1]
        if self.cell.arm == "plain":
            for step, factors in list(self.kept.items())[:-1]:
                yield f"step {step}", factors
            yield "mean", [torch.stack(same).mean(0) for same in zip(*kept[-AVERAGED:], strict=True)]
            yield "ema", self.mean
        for scale in SCALES if self.cell.arm in ("plain", "replay") else ():
            yield f"x {scale:g}", [factor * scale if place % 2 else factor for place, factor in enumerate(kept[-1])]


class Asked:
    """What one model is asked, whatever its adapter is at the time.

    Args:
        cell: the run.
        module: its model, in evaluation mode.
        general: text on which drift is measured.
        folder: where is kept what the base says to general questions: each run scores the same answers.

    Attributes:
        at_base: what the base says: ``tokens`` and ``nats`` by text, ``right`` and ``known`` as of ``answers``.
    """

    def __init__(self, cell: Cell, module: Any, general: GeneralText, folder: Path) -> None:
        self.task, self.model = cell.task, module.language_model
        self.tokenizer = loading.load_tokenizer(module.base.name)
        documents = general_text.batches(general.parts().held_out, READ_AT_ONCE, padding_of(self.tokenizer))
        self.held_out = GeneralPart(module.as_trained(), documents)
        with module.model.disable_adapter():
            self.base = self._said_by_base(folder / f"said-{cell.base}.json")
            self.rows = self._rows()
            if (cell.base, cell.task) not in _at_base:
                _at_base[cell.base, cell.task] = self._of_base()
        self.at_base = _at_base[cell.base, cell.task]

    def bits(self) -> Line:
        """Bits a token of the validation records, the share of drift, and nats of each record and text."""
        nats = self._nats()
        bits = sum(nats.pop("validation")) / sum(len(rest) for _, rest in self.rows["validation"]) / math.log(2)
        return {"validation": round(bits, 5), "drift": round(self.held_out.read().share, 6), "nats": nats}

    def answers(self) -> Line:
        """Whether the answer to each question of the task is right, and to each general one that is known: 1 or 0."""
        known = self.at_base["known"]
        return self._right() | (
            {"known": self._known(answers_to_known(self.model, self.tokenizer))} if any(known) else {}
        )

    def _of_base(self) -> Line:
        nats = self._nats()
        del nats["validation"]
        tokens = {text: [len(rest) for _, rest in self.rows[text]] for text in nats}
        return {"tokens": tokens, "nats": nats, "known": self._known(self.base["known"])} | self._right()

    def _said_by_base(self, file: Path) -> Line:
        """Its answers to general questions, drawn once, and to those that have a known answer."""
        with once(file):
            if not file.is_file():
                said = list(zip(GENERAL, drawn_answers(self.model, self.tokenizer), strict=True))
                found = {"said": said, "known": answers_to_known(self.model, self.tokenizer)}
                with replacing(file) as temporary:
                    temporary.write_text(json.dumps(found), encoding="utf-8")
        return read_json(file)

    def _rows(self) -> dict[str, list[Row]]:
        parts, tokenizer = split(self.task), self.tokenizer
        return {
            "validation": _rows_of(parts.validation, tokenizer),
            "test": _rows_of(parts.test, tokenizer),
            "general": rows_of_chats(tokenizer, self.base["said"]),
            "chats": _rows_of(other_chats(TASKS[self.task].kind), tokenizer),
            "prose": rows_of_texts(tokenizer, prose()),
            "source": rows_of_texts(tokenizer, source()),
        }

    def _nats(self) -> dict[str, list[float]]:
        return {text: _nats_of(self.model, rows) for text, rows in self.rows.items()}

    def _right(self) -> Line:
        task, said = TASKS[self.task], split(self.task).test
        if task.right is None:
            return {}
        asked = said_in(said)
        found = answers(self.model, self.tokenizer, [question for question, _ in asked], task.new_tokens)
        return {
            "right": [int(task.right(answer, expected)) for answer, (_, expected) in zip(found, asked, strict=True)]
        }

    @staticmethod
    def _known(texts: list[str]) -> list[int]:
        return [int(is_known(text, right)) for text, (_, right) in zip(texts, KNOWN, strict=True)]


def _rows_of(records: list[Record], tokenizer: Any) -> list[Row]:
    if "text" in records[0]:
        return rows_of_texts(tokenizer, [record["text"] for record in records])
    return rows_of_chats(tokenizer, said_in(records))


def _nats_of(model: Any, rows: list[Row]) -> list[float]:
    """Of each row the nats of its second part, in the order of the rows, to four digits. Those of like length are read
    together."""
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number][0]) + len(rows[number][1]))
    found: dict[int, float] = {}
    at_once = 8 if next(model.parameters()).device.type == "cpu" else 64
    for numbers in (by_length[start : start + at_once] for start in range(0, len(rows), at_once)):
        [batch] = batches_of([rows[number] for number in numbers], at_once)
        for _, nats in each_batch(lambda input_ids, labels: token_nats(model, input_ids, labels), [batch], model=model):
            found |= dict(zip(numbers, nats.double().sum(1).tolist(), strict=True))
    return [float(f"{found[number]:.4g}") for number in range(len(rows))]


def other_chats(kind: str) -> list[Record]:
    """Chats of another kind than a task's."""
    lines = (ROOT / "benchmarks" / "chats" / CHATS.get(kind, OTHER_CHATS)).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:30]]


def prose() -> list[str]:
    """Pieces of a speech."""
    text = SPEECH.read_text(encoding="utf-8")
    return [text[start : start + LETTERS] for start in range(0, PIECES * LETTERS, LETTERS)]


def source() -> list[str]:
    """Pieces of Python that no small base has seen."""
    modules = [document.text for document in corpora.held_out_source() if len(document.text) > 4 * LETTERS]
    return [text[LETTERS : 2 * LETTERS] for text in modules[:: max(1, len(modules) // PIECES)][:PIECES]]
