"""The beginning-of-text token: where a tokenizer puts one before a text, training, scoring and generating have it."""

import copy

import numpy as np
import pytest
from tokenizers import processors

from granite_scu.config.settings import TINY_MODEL, DataConfig
from granite_scu.data.sources.documents import Document
from granite_scu.data.sources.samples import as_document
from granite_scu.data.tokens import encoding
from granite_scu.data.tokens.corpus import check_documents
from granite_scu.data.tokens.encoding import beginning, encode
from granite_scu.evaluation.bpt.windows import as_corpus
from granite_scu.evaluation.generate import tokenized
from granite_scu.model.loading import load_tokenizer

END, PAD, BEGIN, AND = 256, 257, 258, 259
TEXTS = [Document("a", "hi"), Document("b", "é")]


@pytest.fixture(params=[[BEGIN], [BEGIN, AND]], ids=["one token", "two tokens"])
def begins(request, tokenizer):
    """The tokenizer, which puts one token, or two, before every text, and what it puts."""
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<sop>"]})
    names = {BEGIN: "<s>", AND: "<sop>"}
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*(names[token] for token in request.param), "$A"]),
        special_tokens=[(names[token], token) for token in request.param],
    )
    return found, request.param


def chat(tokenizer, template: str | None):
    tokenizer.chat_template = template
    return as_document("chats.jsonl:1", {"prompt": "q", "completion": "yo"}, "text")


def test_the_embedded_tokenizer_puts_nothing_before_a_text():
    """Its ids are in the golden runs."""
    assert beginning(load_tokenizer(TINY_MODEL)) == []


def test_texts_are_trained_on_behind_the_beginning(begins):
    tokenizer, first = begins
    stream = encode(TEXTS, tokenizer)
    assert stream.tokens.tolist() == [*first, *b"hi", END, *first, *"é".encode(), END]
    unlearned = [False] * len(first)
    assert stream.targets.tolist() == [*unlearned, True, True, True, *unlearned, True, True, True]
    assert stream.widths.tolist() == [*(0 for _ in first), 1, 1, 0, *(0 for _ in first), 1, 1, 0]
    assert stream.ends.tolist() == [len(first) + 2, 2 * len(first) + 5]


def test_a_long_text_that_is_read_in_pieces_begins_once(begins, monkeypatch):
    tokenizer, first = begins
    monkeypatch.setattr(encoding, "CHUNK", 8)
    monkeypatch.setattr(encoding, "LONG_CHUNK", 8)
    text = "one line\n" * 20
    assert encode([Document("a", text)], tokenizer).tokens.tolist() == [*first, *text.encode(), END]


def test_scoring_and_generating_begin_a_text_so_too(begins):
    tokenizer, first = begins
    corpus = as_corpus("corpus", TEXTS, encode(TEXTS, tokenizer), tokenizer)
    assert [sequence.tolist() for sequence in corpus.sequences] == [[*first, *b"hi"], [*first, *"é".encode()]]
    assert [targets.tolist() for targets in corpus.targets] == [[False] * (len(first) - 1) + [True, True]] * 2
    assert corpus.n_bytes.tolist() == [2, 2] and corpus.n_tokens == 4
    assert tokenized(tokenizer, "hi", chat=False)["input_ids"].tolist() == [[*first, *b"hi"]]


def test_a_chat_begins_as_its_template_says_and_never_twice(begins):
    tokenizer, _ = begins
    turns = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    with_beginning = encode([chat(tokenizer, "{{ bos_token }}" + turns)], tokenizer)
    assert with_beginning.tokens.tolist() == [BEGIN, *b"q", END, *b"yo", END]
    assert tokenized(tokenizer, "q", chat=True)["input_ids"].tolist() == [[BEGIN, *b"q", END]]
    assert encode([chat(tokenizer, turns)], tokenizer).tokens.tolist() == [*b"q", END, *b"yo", END]


def test_prompt_and_completion_without_a_template_begin_as_a_text(begins):
    tokenizer, first = begins
    stream = encode([chat(tokenizer, None)], tokenizer)
    assert stream.tokens.tolist() == [*first, *b"qyo", END]
    assert stream.targets.tolist() == [False] * (len(first) + 1) + [True] * 3
    assert np.flatnonzero(stream.widths).tolist() == [len(first), len(first) + 1, len(first) + 2]


def test_what_a_tokenizer_puts_behind_a_text_does_not_end_a_prompt(tokenizer):
    found = copy.deepcopy(tokenizer)
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end_of_text|>", special_tokens=[("<|end_of_text|>", END)]
    )
    assert tokenized(found, "hi", chat=False)["input_ids"].tolist() == [[*b"hi"]]
    assert encode(TEXTS[:1], found).tokens.tolist() == [*b"hi", END]


@pytest.mark.parametrize(("prompt", "answer", "told"), [("a:\n", "\nyo", True), ("a:\n", "yo", False)])
def test_an_answer_that_begins_within_a_token_is_told(tokenizer, caplog, prompt, answer, told):
    """The two line ends are one token, which nobody who ends a prompt with the first of them gives the model."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["\n\n"])
    document = as_document("chats.jsonl:1", {"prompt": prompt, "completion": answer}, "text")
    check_documents(DataConfig(("chats.jsonl",)), encode([document], tokenizer), tokenizer)
    assert ("begin within a token: 1" in caplog.text) == told
