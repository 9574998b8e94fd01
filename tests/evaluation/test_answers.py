"""The last questions of chats, and batched answers to them, on the embedded hybrid model and on a Llama."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.data.sources.documents import Conversation, Document
from granite_scu.data.tokens.encoding import encode
from granite_scu.data.tokens.templates import with_template
from granite_scu.evaluation import answers
from granite_scu.evaluation.answers import ask, batches_of, continuations, ends_of, questions_of
from granite_scu.evaluation.generate import tokenized_chat
from granite_scu.model.loading import load_model


def chat(*said: str) -> Conversation:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[number % 2], "content": text} for number, text in enumerate(said))
    return Conversation("chat", "".join(said), messages=messages)


CHATS = [
    chat("Who are you?", "A ferry."),
    chat("Where do you go?", "To Eldhaven.", "And when?", "At 5.20 in the morning."),
    chat("Tell me: how long does the crossing take, and what does it cost?", "47 minutes, 14 crowns."),
]


def test_the_question_is_all_before_the_last_answer(tokenizer):
    found = questions_of(encode([*CHATS, Document("text", "No question at all.")], tokenizer), tokenizer)
    assert [(question.text, question.expected) for question in found] == [
        ("Who are you?", "A ferry."),
        ("And when?", "At 5.20 in the morning."),
        ("Tell me: how long does the crossing take, and what does it cost?", "47 minutes, 14 crowns."),
    ]
    for question, whole in zip(found, CHATS, strict=True):
        asked = tokenized_chat(tokenizer, whole.messages[:-1])
        assert list(question.tokens) == asked["input_ids"][0].tolist()
        assert question.end in (tokenizer.eos_token_id, *tokenizer.all_special_ids)


ANOTHER_END = (
    "{% for each in messages %}<|start_of_role|>{{ each.role }}<|end_of_role|>{{ before if each.role == 'assistant' }}"
    "{{ each.content }}<|fim_suffix|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)


def test_what_ends_a_turn_in_the_template_ends_an_answer_and_an_empty_thought_is_no_part_of_it(tokenizer):
    thinking = "{% set before = '<think>\n\n</think>\n\n' %}" + ANOTHER_END
    for template in (ANOTHER_END, thinking):
        other = with_template(tokenizer, template)
        (question,) = questions_of(encode(CHATS[:1], other), other)
        assert (question.expected, question.text) == ("A ferry.", "Who are you?")
        assert other.decode(question.tokens).endswith("</think>\n\n" if template == thinking else "<|end_of_role|>")
        turn_end = tokenizer.convert_tokens_to_ids("<|fim_suffix|>")
        assert turn_end in ends_of(llama(), other, []) and turn_end not in ends_of(llama(), tokenizer, [])


def test_where_all_is_learned_there_is_no_question(tokenizer):
    assert questions_of(encode(CHATS, tokenizer, loss_on="all"), tokenizer) == []


def test_a_sample_follows_the_seed_and_keeps_to_the_documents(tokenizer):
    stream = encode([chat(f"What is {i}?", f"It is {i}.") for i in range(9)], tokenizer)
    drawn = [questions_of(stream, tokenizer, np.arange(5), 3, seed) for seed in (0, 0, 1)]
    texts = [[question.text for question in some] for some in drawn]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3
    assert set(itertools.chain(*texts)) <= {f"What is {i}?" for i in range(5)}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("make", [lambda: load_model(BaseConfig(TINY_MODEL), torch.float32).eval(), llama])
def test_answers_are_the_same_alone_and_in_a_batch_with_longer_questions(tokenizer, make):
    """In fp32 a sum in another order moves a logit by some 1e-6 of it, and the likeliest two differ by more."""
    model, questions = make(), questions_of(encode(CHATS, tokenizer), tokenizer)
    prompts, ends = [question.tokens for question in questions], ends_of(model, tokenizer, questions)
    assert len(set(map(len, prompts))) == 3
    together = continuations(model, prompts, 12, ends, tokenizer.pad_token_id)
    assert together == [continuations(model, [prompt], 12, ends, tokenizer.pad_token_id)[0] for prompt in prompts]
    assert len(set(map(tuple, together))) == 3, "the questions matter"


def test_an_answer_stops_with_each_of_the_ends_and_draws_no_random_number():
    model, prompts, state = llama(), [[5, 6], [7, 8, 9]], torch.get_rng_state()
    whole = continuations(model, prompts, 6, [], 0)
    ends = {whole[0][3], whole[1][1]}
    assert continuations(model, prompts, 6, sorted(ends), 0) == [
        row[: 1 + next(at for at, token in enumerate(row) if token in ends)] for row in whole
    ]
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_answered_in_the_time_is_left_out_for_all_models(tokenizer, monkeypatch):
    monkeypatch.setattr(answers, "BATCH", 1)
    model, questions, clock = llama(), questions_of(encode(CHATS, tokenizer), tokenizer), [0.0]

    def slow():
        clock[0] += 1.0
        return nullcontext()

    monkeypatch.setattr(answers.time, "monotonic", lambda: clock[0])
    found = ask(model, tokenizer, questions, {"base": slow, "adapter": slow}, seconds=2.5)
    assert {name: len(each) for name, each in found.items()} == {"base": 1, "adapter": 1}
    assert len(ask(model, tokenizer, questions, {"base": nullcontext})["base"]) == 3


def test_a_question_whose_answer_is_longer_than_one_may_be_is_not_asked(tokenizer, caplog):
    questions = questions_of(encode(CHATS, tokenizer), tokenizer)
    long = replace(questions[0], answer=questions[0].answer * 600)
    assert answers.answerable([long, *questions]) == questions
    assert "1 of 4 held-out questions" in caplog.text


def test_the_summary_says_what_chance_does_not_explain():
    def of(*counts: int) -> dict:
        kinds = [(False, True), (True, False), (True, True)]
        scores = [{"base": {"right": before}, "adapter": {"right": after}}
                  for (before, after), count in zip(kinds, counts, strict=True) for _ in range(count)]  # fmt: skip
        return answers.summary([{"scores": each, "expected": "x"} for each in scores], 30)

    more, less, same = of(6, 0, 10), of(1, 9, 0), of(9, 6, 5)
    assert (more["became_right"], more["became_wrong"], more["better"], more["worse"]) == (6, 0, True, False)
    assert (less["better"], less["worse"]) == (False, True) and not same["better"] and not same["worse"]


def test_batches_hold_as_many_tokens_as_they_may(tokenizer, monkeypatch):
    questions = questions_of(encode(CHATS, tokenizer), tokenizer)
    assert [len(batch) for batch in batches_of(questions * 6)] == [16, 2]
    monkeypatch.setattr(answers, "MAX_TOKENS", 1)
    assert [len(batch) for batch in batches_of(questions)] == [1, 1, 1]
