"""Several turns with the embedded model: what it is given, and what ends a conversation."""

import io
import sys

import pytest
import torch

from granite_scu.cli.generate import converse
from granite_scu.config.errors import UserError
from granite_scu.config.sampling import Sampling
from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.evaluation.generate import Conversation, ConversationFull
from granite_scu.model import loading


def test_each_answer_is_to_all_turns_before_it(tokenizer):
    model = loading.load_model(BaseConfig(TINY_MODEL), torch.float32)
    conversation, pieces = Conversation(tokenizer, None, TINY_MODEL), []
    for question in ("What is a tuple?", "And a list?"):
        conversation.answer(model, question, Sampling(6), pieces.append)
    first, second = (turn["content"] for turn in conversation.turns if turn["role"] == "assistant")
    assert "".join(pieces) == first + second
    given = tokenizer.decode(conversation.inputs("Why?", 6)["input_ids"][0])
    role, end = "<|start_of_role|>{}<|end_of_role|>".format, "<|end_of_text|>\n"
    assert given == (
        f"{role('user')}What is a tuple?{end}{role('assistant')}{first}{end}"
        f"{role('user')}And a list?{end}{role('assistant')}{second}{end}{role('user')}Why?{end}{role('assistant')}"
    )
    prompt = tokenizer(given.partition(second)[0], return_tensors="pt")
    plain = model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(plain[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == second


def test_one_that_is_full_says_so_and_keeps_its_turns(tokenizer):
    conversation = Conversation(tokenizer, 60, TINY_MODEL)
    conversation.turns = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "yes"}]
    assert conversation.inputs("more?", 8)["input_ids"].shape[1] + 8 <= 60
    with pytest.raises(ConversationFull, match=r"full: .* more than the 60 that tiny-granite-h can read; begin a new"):
        conversation.inputs("more?", 50)
    assert len(conversation.turns) == 2


def piped(monkeypatch, content: bytes) -> list[str]:
    """What is done about what a pipe says: its questions, and where the conversation begins anew."""
    done: list[str] = []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    def ask(question: str) -> None:
        if question == "too long":
            raise ConversationFull("the conversation is full")
        done.append(question)

    converse(ask, lambda: done.append("RESET"))
    return done


def test_each_line_of_a_pipe_is_a_question(monkeypatch):
    assert piped(monkeypatch, "über\r\n\n /reset\nlast".encode()) == ["über", "RESET", "last"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n \n", "standard input: the text is empty"),
        (b"one\n\xff\n", "standard input, line 2: is not UTF-8 text"),
        (b"one\n\ntoo long\ntwo", "standard input, line 3: the conversation is full"),
    ],
)
def test_what_a_pipe_must_not_say(monkeypatch, content, words):
    with pytest.raises(UserError, match=words):
        piped(monkeypatch, content)
