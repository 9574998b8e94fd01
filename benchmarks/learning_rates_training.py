"""One cell of ``benchmarks/learning_rates.py``, trained and asked: what was learned, and what was lost."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learning_rates_data import GENERAL, KNOWN, Lesson, is_known, lesson
from benchmarks.learning_rates_grid import RECORDS_A_STEP, Cell
from granite_scu import Request
from granite_scu.config.errors import Diverged
from granite_scu.config.sampling import Sampling
from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import padding_of
from granite_scu.evaluation.answers import ends_of, greedy
from granite_scu.evaluation.generate import stream, tokenized
from granite_scu.evaluation.score import Score, score
from granite_scu.model import loading
from granite_scu.model.loss import summed_nats
from granite_scu.model.modes import evaluation_mode
from granite_scu.training.recipe import prepare, train

WARMUP = 0.05
"""Share of the steps over which the rate rises."""

NEW_TOKENS = {"facts": 24, "style": 40, "format": 56}
"""Tokens of an answer to the held-out questions, at most."""

DRAWN = Sampling(max_new_tokens=48, temperature=1.0)
KNOWN_TOKENS = 20


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
            lines = "".join(json.dumps(record) + "\n" for record in records)
            Path(folder, f"{part}.jsonl").write_text(lines, encoding="utf-8")
        request = Request.from_dotted(_settings(cell, name, Path(folder), _longest(made, name)))
        request.trainer["callbacks"] = [asked]
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


def _settings(cell: Cell, name: str, folder: Path, longest: int) -> dict[str, Any]:
    """Plain LoRA at the product's defaults, but for what the grid varies and blocks as long as the longest record."""
    return {
        "base.name": name,
        "data.path": str(folder / "train.jsonl"),
        "data.validation_data": str(folder / "held-out.jsonl"),
        "data.held_out_share": 0,
        "data.cache_dir": str(folder / "cache"),
        "data.block_size": longest,
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


def _longest(made: Lesson, name: str) -> int:
    """Tokens of the longest record."""
    tokenizer = loading.load_tokenizer(name)

    def tokens(record: dict[str, Any]) -> int:
        if "text" in record:
            return len(tokenizer(record["text"])["input_ids"])
        return len(tokenizer(tokenizer.apply_chat_template(record["messages"], tokenize=False))["input_ids"])

    return max(map(tokens, made.train + made.held_out)) + 1


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
                if module.base.name not in _of_base:  # the same for every cell of a model
                    said = drawn_answers(model, tokenizer)
                    before = answers_to_known(model, tokenizer)
                    _of_base[module.base.name] = said, before, predicted(model, tokenizer, said)
            said, before, general_base = _of_base[module.base.name]
            now = answers_to_known(model, tokenizer)
            general = predicted(model, tokenizer, said)
            own = self._own(model, tokenizer)
        right_before, right_now = ([is_known(text, known) for text, (_, known) in zip(texts, KNOWN, strict=True)]
                                   for texts in (before, now))  # fmt: skip
        self.found = {
            **own,
            "general_tokens": general.tokens,
            "general_bits_base": round(general_base.bits_per_token, 4),
            "general_bits": round(general.bits_per_token, 4),
            "known": len(KNOWN),
            "known_right_base": sum(right_before),
            "known_right": sum(right_now),
            "known_lost": sum(was and not still for was, still in zip(right_before, right_now, strict=True)),
            "became_wrong": [
                [question, text]
                for (question, _), was, still, text in zip(KNOWN, right_before, right_now, now, strict=True)
                if was and not still
            ][:2],
        }

    def _own(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        if self.made.right is None:
            return {}
        turns = [record["messages"] for record in self.made.held_out]
        questions, expected = ([chat[place]["content"] for chat in turns] for place in (0, 1))
        found = answers(model, tokenizer, questions, NEW_TOKENS[self.cell.data])
        right = [self.made.right(*pair) for pair in zip(found, expected, strict=True)]
        return {"questions": len(right), "right": sum(right), "answer": found[0]}


_of_base: dict[str, tuple[list[str], list[str], Score]] = {}
"""By model: what the base says to the general questions, to those with known answers, and how it scores the former."""


def answers(model: Any, tokenizer: Any, questions: list[str], new_tokens: int) -> list[str]:
    """What a model answers to each question of a chat, at temperature 0."""
    prompts = [tokenized(tokenizer, question, chat=True)["input_ids"][0].tolist() for question in questions]
    found = greedy(model, prompts, new_tokens, ends_of(model, tokenizer, []), padding_of(tokenizer))
    return tokenizer.batch_decode(found, skip_special_tokens=True)


def answers_to_known(model: Any, tokenizer: Any) -> list[str]:
    """What a model answers to the general questions with known answers."""
    return answers(model, tokenizer, [question for question, _ in KNOWN], KNOWN_TOKENS)


def drawn_answers(model: Any, tokenizer: Any) -> list[str]:
    """An answer to each general question, drawn from the model as it is, so that bits on them are an entropy."""
    found = []
    for question in GENERAL:
        pieces: list[str] = []
        stream(model, tokenizer, tokenized(tokenizer, question, chat=True), DRAWN, pieces.append)
        found.append("".join(pieces))
    return found


def predicted(model: Any, tokenizer: Any, said: list[str]) -> Score:
    """How well a model predicts these answers to the general questions."""
    inputs, labels = [], []
    for question, answer in zip(GENERAL, said, strict=True):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                               add_generation_prompt=True)  # fmt: skip
        first, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        tokens = torch.tensor(first + rest)
        counted = tokens.clone()
        counted[: len(first)] = IGNORED
        inputs.append(tokens[:-1])
        labels.append(counted[1:])
    ids = pad_sequence(inputs, batch_first=True, padding_value=0)
    wanted = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    batches = [{"input_ids": i, "labels": w} for i, w in zip(ids.split(8), wanted.split(8), strict=True)]
    return score(lambda input_ids, labels: summed_nats(model, input_ids, labels), batches, model=model)
