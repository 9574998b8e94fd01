"""What questions will take, by the first tokens of their answers."""

from types import SimpleNamespace

import pytest

from granite_scu.evaluation.answers import Question, max_answer_tokens
from granite_scu.training.callbacks import samples
from granite_scu.training.callbacks.samples import AnsweringPace, pace_of, seconds_of


def question(asked: int, expected: int) -> Question:
    return Question((2,) * asked, "?", "!", (3,) * expected)


def test_prompts_count_with_their_padding_and_answers_as_long_as_they_are_expected_or_may_be():
    pace = AnsweringPace(prompt=0.5, step=10.0)
    batch, another = [question(3, 4)] * 15 + [question(5, 6)], [question(2, 9)]
    learned = 16 * 5 * 0.5 + (6 + 1) * 10 + 2 * 0.5 + (9 + 1) * 10
    assert seconds_of(batch + another, pace, learned=True) == learned
    allowed = 16 * 5 * 0.5 + max_answer_tokens(batch) * 10 + 2 * 0.5 + max_answer_tokens(another) * 10
    assert seconds_of(batch + another, pace, learned=False) == allowed


@pytest.mark.parametrize(("tokens", "steps"), [(7, 6), (2, 2)], ids=["all go on", "all have ended"])
def test_the_pace_is_of_one_batch_and_of_the_tokens_that_came(monkeypatch, tokens, steps):
    """The first token takes 4 seconds here, of a prompt of 16 questions of 2 tokens, the others 3 in all."""
    clock = iter([0, 4, 4, 4 + 4 + 3])
    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(samples, "greedy", lambda model, prompts, most, *_: [[1] * min(most, tokens)] * len(prompts))
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=1))
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
    assert pace_of(model, tokenizer, [question(2, 9)] * 20) == AnsweringPace(4 / 32, 3 / steps)
