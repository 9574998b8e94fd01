import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import Blocks, in_a_row, padding_of
from granite_scu.data.sources.documents import Document
from granite_scu.data.tokens import encoding, pieces
from granite_scu.data.tokens.encoding import bytes_by_offset, encode

EOS, PAD = 256, 257
# Any character but lone surrogates, which no UTF-8 file can hold; long enough to be cut, short enough to be many.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)
TEXTS = st.lists(TEXT, min_size=1, max_size=12)


def documents_of(*texts: str) -> list[Document]:
    return [Document(f"text {i}", text) for i, text in enumerate(texts)]


def pack(documents: list[Document], tokenizer, block_size: int) -> Blocks:
    stream = encode(documents, tokenizer)
    return in_a_row(stream, stream.bounds, block_size, padding_of(tokenizer))


def stacked(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels, _ = zip(*(blocks[i] for i in range(len(blocks))), strict=True)
    return np.stack(inputs), np.stack(labels)


def test_two_documents_give_these_blocks(tokenizer):
    blocks = pack(documents_of("ab", "cde"), tokenizer, block_size=4)
    inputs, labels = stacked(blocks)
    assert inputs.tolist() == [[97, 98, EOS, 99], [100, 101, EOS, PAD]]
    assert labels.tolist() == [[98, EOS, IGNORED, 100], [101, EOS, IGNORED, IGNORED]]
    assert (blocks.n_blocks, blocks.n_inputs, blocks.n_supervised, blocks.n_documents) == (2, 7, 5, 2)
    assert blocks.n_bytes == 3  # b, d, e; the end of text stands for no byte


def test_no_block_for_the_last_token_alone(tokenizer):
    inputs, labels = stacked(pack(documents_of("abcd"), tokenizer, block_size=4))
    assert inputs.tolist() == [[97, 98, 99, 100]]
    assert labels.tolist() == [[98, 99, 100, EOS]]


@settings(max_examples=40)
@given(texts=TEXTS, block_size=st.integers(1, 40), start=st.integers(0, 5), step=st.integers(1, 5))
def test_counts_of_every_nth_block_are_those_of_the_blocks(tokenizer, texts, block_size, start, step):
    whole = pack(documents_of(*texts), tokenizer, block_size)
    numbers = range(min(start, len(whole)), len(whole), step)
    part, alone = whole.select(numbers), [whole.select(range(number, number + 1)) for number in numbers]
    assert len(part) == part.n_blocks == len(numbers)
    assert part.stream is whole.stream and whole.n_documents == len(texts)
    assert all(np.array_equal(part[i], whole[number]) for i, number in enumerate(numbers))
    assert part.n_supervised == sum((whole[number][1] != IGNORED).sum() for number in numbers)
    assert part.n_inputs == sum((whole[number][0] != PAD).sum() for number in numbers)
    for count in ("n_supervised", "n_inputs", "n_bytes"):
        assert getattr(part, count) == sum(getattr(block, count) for block in alone)
    ends = whole.stream.ends.tolist()
    spans = [range(a + 1, b + 1) for a, b in zip([-1, *ends[:-1]], ends, strict=True)]
    inputs = {n * block_size + i for n in numbers for i in range(block_size)}
    # Of the last block the padding is no input, and the stream's last token predicts nothing.
    assert part.n_documents == sum(bool(inputs & set(span)) for span in spans)


def test_a_part_of_every_nth_block_is_cut_like_the_whole(tokenizer):
    part = pack(documents_of("abcdefghijklmnop"), tokenizer, block_size=2).select(range(1, 8, 2))
    assert part.select(range(0, 4, 3)).numbers == range(1, 9, 6)
    assert stacked(part.select(range(0, 4, 3)))[0].tolist() == [[99, 100], [111, 112]]
    with pytest.raises(IndexError):
        part[4]


@settings(max_examples=40)
@given(texts=TEXTS, data=st.data())
def test_documents_as_a_stream_of_their_own_are_those_encoded_alone(tokenizer, texts, data):
    numbers = data.draw(st.lists(st.integers(0, len(texts) - 1), unique=True, min_size=1).map(sorted))
    part = encode(documents_of(*texts), tokenizer).select(np.array(numbers))
    alone = encode([documents_of(*texts)[number] for number in numbers], tokenizer)
    for field in ("tokens", "ends", "widths", "targets"):
        np.testing.assert_array_equal(getattr(part, field), getattr(alone, field))


def test_padding_is_the_end_of_text_where_the_tokenizer_has_no_pad(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    inputs, labels = stacked(pack(documents_of("ab"), without, block_size=5))
    assert inputs.tolist() == [[97, 98, EOS, EOS, EOS]]
    assert labels.tolist() == [[98, EOS, IGNORED, IGNORED, IGNORED]]


def test_bytes_that_the_tokenizer_leaves_out_count_with_the_token_after_them_or_the_last():
    # "é" has two bytes; no token holds the space, nor the newline at the end.
    assert bytes_by_offset("é b\n", [(0, 1), (2, 3)]).tolist() == [2, 3]
    assert bytes_by_offset("a", []).tolist() == []


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        pack(documents_of("ab"), without, block_size=4)


@pytest.mark.parametrize(
    "word_split",
    [
        # GPT-2's, and that of cl100k, which Granite 4 has.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    ids=["gpt2", "cl100k"],
)
@pytest.mark.parametrize(
    "text",
    [
        "Une première ligne.\nThe second\n\n  is indented;\n\tso this, 12\nthe last 😀\nline (end)\nAgain\n",
        "2024-01-02 it's a log!\n17 is (no)\n2 letter; x²  two spaces, it 's\n",
        "one line without an end. It's 3 pm,  don't! 这是一句话。没有空格、也没有换行。名字 's ",
        "data:image/png;base64,iVBORw0KGgo5AAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4",
    ],
    ids=["lines", "log", "one line", "base64"],
)
def test_a_long_text_in_pieces_gives_the_tokens_and_bytes_of_the_whole(monkeypatch, word_split, text):
    text = text * 30
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(word_split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    trained = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end_of_text|>")

    whole = encode(documents_of(text, "short"), trained)
    monkeypatch.setattr(encoding, "CHUNK", 50)
    monkeypatch.setattr(pieces, "LIMIT", 200)
    monkeypatch.setattr(encoding, "GROUP", 200)
    assert len(list(pieces.pieces_of(documents_of(text)[0], 0, None, 0, 50))) > 20
    cut = encode(documents_of(text, "short"), trained)
    for field in ("tokens", "ends", "widths", "targets"):
        np.testing.assert_array_equal(getattr(cut, field), getattr(whole, field))


def test_a_text_without_a_word_is_cut_all_the_same_and_that_is_said(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(pieces, "LIMIT", 200)
    found = list(pieces.pieces_of(documents_of("a" * 501)[0], 0, None, 0, 50))
    assert [len(piece.text) for piece in found] == [200, 200, 101]
    assert caplog.text.count("no line and no word ends in 200 characters; it is cut there, within a token") == 2


def test_a_long_text_shows_its_progress_on_stderr_alone(tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(encoding, "LONG", 1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    encode(documents_of("ab"), tokenizer)
    shown = capsys.readouterr()
    assert "tokenising" in shown.err and not shown.out


def test_a_tokenizer_that_puts_a_space_before_each_text_has_it_in_larger_pieces(monkeypatch):
    text = "some words in a line\n" * 200
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([text], trainer)
    trained = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end_of_text|>")
    monkeypatch.setattr(encoding, "CHUNK", 50)
    expected = backend.encode(text, add_special_tokens=False).ids
    assert encode(documents_of(text), trained).tokens[:-1].tolist() == expected
