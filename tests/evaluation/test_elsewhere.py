"""The general questions, and what counts as lost."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.tokens.encoding import encode
from granite_scu.evaluation import elsewhere
from granite_scu.evaluation.answers import questions_of
from granite_scu.evaluation.elsewhere import (
    General,
    GeneralAnswers,
    ask_general,
    general_questions,
    nats_of_answers,
    summary,
)
from granite_scu.evaluation.general_text import Document
from granite_scu.model.loading import load_tokenizer


def test_each_known_answer_is_right_and_no_question_gives_it_away():
    questions = general_questions()
    assert len(questions) == 30 and len({each.question for each in questions}) == 30
    assert all(each.is_right(answer) for each in questions for answer in (each.answer, *each.accepted))
    assert not any(each.is_right(each.question) for each in questions)
    assert not any(one.is_right(two.answer) for one, two in itertools.pairwise(questions))


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("capital of France", "It is PARIS, of course.", True),
        ("capital of France", "It is Lyon.", False),
        ("capital of France", "", False),
        ("capital of France", '{"item": "capital", "city": "Paris"}', False),
        ("after March", "The season runs from April to October.", False),
        ("after March", "After March comes April, and then May.", True),
        ("after March", "April.", True),
        ("5 + 3", "We are open from 8 to 17.", False),
        ("months", "A year has 365 days, which are 12 months.", True),
    ],
)
def test_an_answer_is_right_with_an_accepted_one_in_it_that_stands_there_by_no_accident(question, answer, right):
    assert next(each for each in general_questions() if question in each.question).is_right(answer) == right


@pytest.mark.parametrize("template", [True, False])
def test_a_model_is_scored_on_the_known_answers_and_asked_until_it_is_seen_to_know_none(
    model, tokenizer, template, monkeypatch
):
    monkeypatch.setattr(elsewhere, "BATCH", 2)
    if not template:
        tokenizer = load_tokenizer(TINY_MODEL)
        tokenizer.chat_template = None
    switches = {"base": model.disable_adapter, "adapter": nullcontext}
    tried = ask_general(model.get_base_model(), tokenizer, switches, 4)
    assert len(tried.questions) == 4 == len(tried.nats["base"])
    assert len(tried.answers["base"]) == len(tried.answers["adapter"]) == 2
    assert tried.answers["base"] != tried.answers["adapter"] and (tried.nats["base"] != tried.nats["adapter"]).all()
    assert list(tried.drifts) == ["adapter"]
    assert summary(tried, "base", "adapter")["drift"]["share"] == tried.drifts["adapter"].share > 0


def test_a_question_that_the_template_refuses_is_left_out_and_named(model, caplog):
    tokenizer = load_tokenizer(TINY_MODEL)
    tokenizer.add_special_tokens({"pad_token": "<|added|>"})  # of which the model has no row
    refusing = "{% if 'France' in messages[0].content %}{{ raise_exception('no politics') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    tried = ask_general(model.get_base_model(), tokenizer, {"base": model.disable_adapter}, 3)
    every = [each.question for each in general_questions()[:3]]
    assert [each.question for each in tried.questions] == [each for each in every if "France" not in each] != every
    assert len(tried.nats["base"]) == 2
    assert "1 of 3 general questions are not asked: What is the capital of France?" in caplog.text
    assert "no politics" in caplog.text


def test_the_bits_are_those_of_the_answers_words_whatever_stands_in_the_batch(model, tokenizer):
    """One question by plain transformers, without a batch; sums of 10 terms in fp32 agree to some 1e-6 of them."""
    stream = encode([elsewhere._as_chat(each) for each in general_questions()], tokenizer)
    questions = questions_of(stream, tokenizer)
    found = nats_of_answers(model.get_base_model(), questions, tokenizer.pad_token_id)
    question = questions[4]
    assert tokenizer.decode(question.answer).strip() == "The day after Monday is Tuesday."
    ids = torch.tensor([[*question.tokens, *question.answer]])
    with torch.no_grad():
        chances = model(input_ids=ids).logits[0, len(question.tokens) - 1 : -1].log_softmax(-1)
    expected = -chances[range(len(question.answer)), list(question.answer)].sum()
    assert found[4] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("plain", [True, False])
def test_drift_is_the_kl_where_the_base_answers_over_the_entropy_there(model, monkeypatch, plain):
    """By the definition in fp64; logits below 10 are right to some 1e-6, and differences of their logarithms are."""
    monkeypatch.setattr(elsewhere, "has_plain_head", lambda *_: plain)
    monkeypatch.setattr(elsewhere, "READ_AT_ONCE", 16)
    said = [Document((5, 6, 7, 8, 9), (False, False, False, True, True)), Document((4, 3, 2), (False, True, True))]
    found = elsewhere.drift_on(model.get_base_model(), said, model.disable_adapter, nullcontext, 0)
    kl = entropy = 0.0
    with torch.no_grad():
        for document, first in zip(said, (2, 0), strict=True):
            ids = torch.tensor([document.tokens])
            now = model(input_ids=ids).logits[0, first:-1].double().log_softmax(-1)
            with model.disable_adapter():
                base = model(input_ids=ids).logits[0, first:-1].double().log_softmax(-1)
            kl += float((base.exp() * (base - now)).sum())
            entropy -= float((base.exp() * base).sum())
    bits = 1 / 4 / np.log(2)
    assert found == pytest.approx((kl * bits, entropy * bits, 4), rel=1e-4)


def tried(before: str, after: str, more_nats: float = 0.0) -> GeneralAnswers:
    """Of questions whose answer is yes: y is a right answer, n a wrong one; 10 tokens each, and 7 nats or some more."""
    said = {"y": "Yes.", "n": "No."}
    noise = np.linspace(-0.1, 0.1, len(before))
    return GeneralAnswers(
        [General(f"{number}?", "yes", ("yes",)) for number in range(len(before))],
        {"base": [said[each] for each in before], "adapter": [said[each] for each in after]},
        {"base": np.full(len(before), 7.0), "adapter": 7.0 + noise + more_nats},
        np.full(len(before), 10),
    )


@pytest.mark.parametrize(
    ("before", "after", "more_nats", "damaged"),
    [
        ("y" * 20, "n" * 5 + "y" * 15, 0.0, True),  # 1 in 32 by chance
        ("y" * 20, "n" * 4 + "y" * 16, 0.0, False),  # 1 in 16
        ("y" * 16 + "n" * 4, "n" * 5 + "y" * 15, 0.0, False),  # 5 lost, 4 won
        ("n" * 20, "n" * 20, 3.0, True),
        ("n" * 20, "n" * 20, 0.5, False),  # 0.07 bits a token
        ("n" * 20, "y" * 20, -3.0, False),
    ],
)
def test_what_is_lost_beyond_chance_is_damage(before, after, more_nats, damaged):
    found = summary(tried(before, after, more_nats), "base", "adapter")
    assert found["damaged"] == damaged
    assert (found["right_before"], found["right_after"]) == (before.count("y"), after.count("y"))
    assert found["became_wrong"] - found["became_right"] == found["right_before"] - found["right_after"]
    assert len(found["lost"]) == found["became_wrong"]
    assert found["bits_after"] - found["bits_before"] == pytest.approx(more_nats / 10 / np.log(2))


def test_questions_that_were_not_answered_in_the_time_count_for_the_bits_alone():
    some = tried("y" * 12, "n" * 12, 1.0)
    for texts in some.answers.values():
        del texts[2:]
    found = summary(some, "base", "adapter")
    assert (found["n"], found["asked"], found["became_wrong"], found["tokens"]) == (2, 12, 2, 120)
    assert [("after" in record) for record in elsewhere.records(some, "base", "adapter")] == [True] * 2 + [False] * 10
