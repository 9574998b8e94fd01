"""Windows against the definition of lm-evaluation-harness, and texts against their bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.data.sources.documents import Document
from granite_scu.data.tokens.encoding import encode
from granite_scu.evaluation.bpt.windows import as_corpus, cut


def rolling_windows(tokens: list[int], prefix: int, max_length: int, context: int):
    """(inputs, predictions) as lm-evaluation-harness makes them for ``loglikelihood_rolling``."""
    predicted = min(max_length, len(tokens))
    yield [prefix, *tokens[: predicted - 1]], tokens[:predicted]
    while predicted < len(tokens):
        new = min(len(tokens) - predicted, max_length - context + 1)
        end = predicted + new
        yield tokens[end - max_length - 1 : end - 1], tokens[end - new : end]
        predicted += new


@given(length=st.integers(1, 60), max_length=st.integers(2, 20), data=st.data())
def test_windows_are_those_of_the_harness(length, max_length, data):
    stride = data.draw(st.integers(1, max_length))
    tokens = list(range(100, 100 + length))
    sequence = [0, *tokens]
    expected = list(rolling_windows(tokens, 0, max_length, max_length - stride + 1))
    found = cut(np.array([length]), max_length, stride)
    assert [(sequence[w.start : w.stop], sequence[w.stop + 1 - w.scored : w.stop + 1]) for w in found] == expected


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), stride=st.integers(1, 16))
def test_every_token_is_scored_once_with_the_context_promised(lengths, stride):
    times = [np.zeros(length, int) for length in lengths]
    for window in cut(np.array(lengths), 16, stride):
        assert window.stop - window.start <= 16
        first = window.stop - window.scored  # of the scored predictions: their inputs end there
        times[window.document][first : window.stop] += 1
        assert first - window.start >= min(first, 16 - stride)
    assert all((each == 1).all() for each in times)


TEXTS = [Document("a", "A function is a thing.\n"), Document("b", "x"), Document("c", "naïve “café” 🐍 " * 9)]


def test_whole_texts_are_their_tokens_after_the_beginning_and_all_their_bytes(tokenizer):
    corpus = as_corpus("corpus", TEXTS, encode(TEXTS, tokenizer), tokenizer)
    assert corpus.documents == ["a", "b", "c"]
    beginning = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    for text, sequence, size in zip(TEXTS, corpus.sequences, corpus.n_bytes, strict=True):
        assert sequence.tolist() == [beginning, *tokenizer(text.text, add_special_tokens=False)["input_ids"]]
        assert size == len(text.text.encode())


def test_a_document_cut_at_the_start_has_its_first_token_there_given(tokenizer):
    stream = encode(TEXTS, tokenizer)
    start = int(stream.ends[1]) + 1  # of document c
    corpus = as_corpus("corpus", TEXTS, stream, tokenizer, first=start + 5)
    assert corpus.documents == ["c"]
    assert corpus.sequences[0].tolist() == stream.tokens[start + 5 : stream.ends[2]].tolist()
    whole = as_corpus("corpus", TEXTS, stream, tokenizer)
    skipped = tokenizer.decode(stream.tokens[start : start + 6])
    assert whole.n_bytes[2] - corpus.n_bytes[0] == pytest.approx(len(skipped.encode()), abs=3)  # a character cut apart


@pytest.mark.parametrize("before_the_end", [0, 1])
def test_a_document_of_which_nothing_can_be_scored_is_left_out(tokenizer, before_the_end):
    stream = encode(TEXTS, tokenizer)
    corpus = as_corpus("corpus", TEXTS, stream, tokenizer, first=int(stream.ends[0]) - before_the_end)
    assert corpus.documents == ["b", "c"]


def test_of_a_conversation_what_the_assistant_says_is_scored(tokenizer):
    from granite_scu.data.sources.samples import as_document

    chat = as_document("chat", {"prompt": "What is it?", "completion": "A naïve “café”."}, "text")
    both = [chat, TEXTS[1]]
    corpus = as_corpus("corpus", both, encode(both, tokenizer), tokenizer)
    said = corpus.sequences[0][1:][corpus.targets[0]]
    assert tokenizer.decode(said) == "A naïve “café”.<|end_of_text|>"
    assert corpus.n_bytes.tolist() == [len("A naïve “café”.".encode()), 1]
    assert corpus.document_tokens.tolist() == [len(said), 1] and corpus.lengths[0] > len(said)
    corpus = replace(corpus, windows=cut(corpus.lengths, 8, 3))
    assert corpus.window_tokens.sum() == corpus.n_tokens


def test_tokens_of_a_prompt_are_no_labels(tokenizer):
    from granite_scu.config.settings import IGNORED
    from granite_scu.data.sources.samples import as_document
    from granite_scu.evaluation.bpt.windows import batches

    chats = [as_document("chat", {"prompt": "What is it?", "completion": "A thing."}, "text")]
    corpus = as_corpus("corpus", chats, encode(chats, tokenizer), tokenizer)
    (batch,) = batches(replace(corpus, windows=cut(corpus.lengths, 64, 32)), batch_size=1)
    labels = batch["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "A thing.<|end_of_text|>"
