"""What a model is asked in the benchmarks: its lesson, what has nothing to do with it, and how it predicts text."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learning_rates_data import GENERAL, KNOWN, Lesson, Record, is_known
from granite_scu.config.settings import IGNORED, SEED
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.tokens.encoding import beginning
from granite_scu.evaluation.answers import Noise, continuations, ends_of
from granite_scu.evaluation.generate import tokenized
from granite_scu.evaluation.score import Score, score
from granite_scu.model.loss import summed_nats

NEW_TOKENS = {"facts": 24, "style": 40, "format": 56}
"""Tokens of an answer to the held-out questions, at most."""

DRAWN_TOKENS, KNOWN_TOKENS = 48, 20


def write(records: Iterable[Record], path: Path) -> Path:
    """The records as a file to train on."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def tokens_of(record: Record, tokenizer: Any) -> int:
    """Tokens of a record."""
    text = record["text"] if "text" in record else tokenizer.apply_chat_template(record["messages"], tokenize=False)
    return len(tokenizer(text)["input_ids"])


def longest(made: Lesson, tokenizer: Any) -> int:
    """Tokens of a block that holds the longest record."""
    return max(tokens_of(record, tokenizer) for record in made.train + made.held_out) + 1


def said_in(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Question and answer of each chat."""
    return [(chat["messages"][0]["content"], chat["messages"][1]["content"]) for chat in records]


class Elsewhere(NamedTuple):
    """What the base says to what has nothing to do with a lesson.

    Attributes:
        said: to each of ``GENERAL``, drawn at temperature 1.
        known: to each question with a known answer.
        bits: how it scores ``said``.
    """

    said: list[tuple[str, str]]
    known: list[str]
    bits: Score


_of_base: dict[str, Elsewhere] = {}
"""By model: it is the same for every cell."""


def elsewhere_of(name: str, model: Any, tokenizer: Any) -> Elsewhere:
    """What the model says as it is now, its adapter off, or said when it was asked before by this name."""
    if name not in _of_base:
        said = list(zip(GENERAL, drawn_answers(model, tokenizer), strict=True))
        known = answers_to_known(model, tokenizer)
        _of_base[name] = Elsewhere(said, known, predicted(model, tokenizer, said))
    return _of_base[name]


def own_answers(model: Any, tokenizer: Any, made: Lesson, kind: str) -> dict[str, Any]:
    """How many of a lesson's questions are answered as expected; nothing where there are none."""
    if made.right is None:
        return {}
    asked = said_in(made.held_out)
    found = answers(model, tokenizer, [question for question, _ in asked], NEW_TOKENS[kind])
    right = [made.right(answer, expected) for answer, (_, expected) in zip(found, asked, strict=True)]
    return {"questions": len(right), "right": sum(right), "answer": found[0]}


def known_answers(model: Any, tokenizer: Any, base: Elsewhere) -> dict[str, Any]:
    """Which of the general questions with known answers are still right."""
    now = answers_to_known(model, tokenizer)
    was, still = ([is_known(text, known) for text, (_, known) in zip(texts, KNOWN, strict=True)]
                  for texts in (base.known, now))  # fmt: skip
    wrong = [[question, text] for (question, _), a, b, text in zip(KNOWN, was, still, now, strict=True) if a and not b]
    return {
        "known": len(KNOWN),
        "known_right_base": sum(was),
        "known_right": sum(still),
        "known_lost": len(wrong),
        "became_wrong": wrong[:2],
    }


def answers(
    model: Any, tokenizer: Any, questions: Sequence[str], new_tokens: int, noise: Noise | None = None
) -> list[str]:
    """What a model answers to each question of a chat: the likeliest, or a draw."""
    prompts = [tokenized(tokenizer, question, chat=True)["input_ids"][0].tolist() for question in questions]
    ends = ends_of(model, tokenizer, [])
    found = continuations(model, prompts, new_tokens, ends, padding_of(tokenizer), noise=noise)
    return tokenizer.batch_decode(found, skip_special_tokens=True)


def answers_to_known(model: Any, tokenizer: Any) -> list[str]:
    """What a model answers to the general questions with known answers."""
    return answers(model, tokenizer, [question for question, _ in KNOWN], KNOWN_TOKENS)


def drawn_answers(model: Any, tokenizer: Any) -> list[str]:
    """An answer to each general question, drawn from the model as it is, so that bits on them are an entropy."""
    noise = Noise(torch.Generator(model.device).manual_seed(SEED))
    return answers(model, tokenizer, GENERAL, DRAWN_TOKENS, noise)


def predicted(model: Any, tokenizer: Any, said: Iterable[tuple[str, str]]) -> Score:
    """How well a model predicts the answers to questions of a chat."""
    return scored(model, rows_of_chats(tokenizer, said))


Row = tuple[list[int], list[int]]
"""Tokens that are given, and those that are to be predicted behind them."""


def rows_of_chats(tokenizer: Any, said: Iterable[tuple[str, str]]) -> list[Row]:
    """Of each question and answer."""
    rows = []
    for question, answer in said:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                               add_generation_prompt=True)  # fmt: skip
        first, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        rows.append((first, rest))
    return rows


def rows_of_texts(tokenizer: Any, texts: Iterable[str]) -> list[Row]:
    """Of each text, which begins as a document that is trained on."""
    start = beginning(tokenizer) or [tokenizer.eos_token_id]
    return [(start, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def scored(model: Any, rows: Sequence[Row]) -> Score:
    """How well a model predicts the second part of each row, behind the first."""
    return score(partial(summed_nats, model), batches_of(rows), model=model)


def batches_of(rows: Sequence[Row], at_once: int = 8) -> list[dict[str, torch.Tensor]]:
    """So many rows at a time, the second part of each counted."""
    inputs, labels = [], []
    for first, rest in rows:
        tokens = torch.tensor(first + rest)
        counted = tokens.clone()
        counted[: len(first)] = IGNORED
        inputs.append(tokens[:-1])
        labels.append(counted[1:])
    ids = pad_sequence(inputs, batch_first=True, padding_value=0)
    wanted = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return [{"input_ids": i, "labels": w} for i, w in zip(ids.split(at_once), wanted.split(at_once), strict=True)]
