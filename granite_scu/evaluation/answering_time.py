"""How long questions will take to be answered, by a few tokens of the first of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.data.blocks.packing import padding_of
from granite_scu.evaluation.answers import Question, batches_of, ends_of, greedy, max_answer_tokens

STEPS = 6
"""Tokens that are timed."""


@dataclass(frozen=True)
class AnsweringPace:
    """Seconds.

    Attributes:
        prompt: for a token of a batch's prompts, padding among them.
        step: for the next token of all answers of a batch.
    """

    prompt: float
    step: float


def pace_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> AnsweringPace:
    """Time the first tokens of a batch's answers.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        questions: at least one.
    """
    batch = next(batches_of(questions))
    prompts, ends, took = [question.tokens for question in batch], ends_of(model, tokenizer, batch), []
    for most in (1, 1 + STEPS):
        began = time.monotonic()
        answers = greedy(model, prompts, most, ends, padding_of(tokenizer)) or [[]]
        took.append(time.monotonic() - began)
    steps = min(STEPS, max(1, *map(len, answers)))  # fewer where all answers have ended
    return AnsweringPace(took[0] / _padded(batch), max(0.0, took[1] - took[0]) / steps)


def seconds_of(questions: Sequence[Question], pace: AnsweringPace, learned: bool) -> float:
    """What the answers of one model take.

    Args:
        questions: all that are asked.
        pace: the model's.
        learned: whether the answers are about as long as those expected; else as long as they may be.
    """
    return sum(
        _padded(batch) * pace.prompt
        + pace.step * (1 + max(len(question.answer) for question in batch) if learned else max_answer_tokens(batch))
        for batch in batches_of(questions)
    )


def _padded(batch: Sequence[Question]) -> int:
    return len(batch) * max(len(question.tokens) for question in batch)
