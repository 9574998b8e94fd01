"""A stream is read once in a pass by all shares together, without what is held out, and goes on where it was."""

import copy
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED, DataConfig
from granite_scu.data import streaming
from granite_scu.data.blocks.packing import in_a_row
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.sources import hub
from granite_scu.data.sources.read import load
from granite_scu.data.streaming import StreamedBlocks, StreamedDataModule, beginning, shuffled
from granite_scu.data.tokens import encoding
from granite_scu.data.tokens.encoding import encode

TEXTS = [f"{number}: " + "the quick brown fox " * (1 + number % 4) for number in range(40)]


def lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def source(tmp_path):
    return lines(tmp_path / "a.jsonl", TEXTS)


def config_of(*sources, **fields):
    fields = {"block_size": 16, "batch_size": 2, **fields}
    return DataConfig([str(source) for source in sources], stream=True, **fields)


def streamed(tokenizer, *sources, seed=0, start=0, rank=None, **fields):
    data = StreamedDataModule(config_of(*sources, **fields), seed)
    data.prepare(tokenizer)
    data.start_batch = start
    if rank is not None:
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)
    return data


def batches(data, count):
    return [(batch["input_ids"], batch["labels"]) for batch in islice(data.train_dataloader(), count)]


def predicted(blocks):
    """How often each text of a predicted stretch occurs, and of which tokens they are made."""
    return Counter(int(label) for block in blocks for label in block.labels if label != IGNORED)


def a_pass(tokenizer, config, of, held_out=frozenset()):
    blocks = StreamedBlocks(config, tokenizer, in_a_row, held_out, seed=0)
    return [block for number in range(of) for block in blocks._in_order(number, of)]


@given(items=st.lists(st.integers(), max_size=60), window=st.integers(1, 70))
def test_shuffling_loses_and_invents_nothing(items, window):
    assert sorted(shuffled(items, Random(0), window)) == sorted(items)


@settings(max_examples=10)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=20), of=st.integers(1, 5)
)
def test_all_shares_together_read_every_token_once(tokenizer, tmp_path_factory, texts, of):
    path = lines(tmp_path_factory.mktemp("texts") / "a.jsonl", texts)
    whole = encode(load(str(path), "text"), tokenizer)
    assert predicted(a_pass(tokenizer, config_of(path), of)) == Counter(whole.tokens[whole.targets].tolist())


def test_a_file_too_long_for_memory_is_shared_out_in_pieces(tokenizer, tmp_path, monkeypatch):
    """It is one document: it has one end of text, and a piece's first token is not predicted from another's last."""
    monkeypatch.setattr(streaming, "BEGINNING", 500)
    monkeypatch.setattr(streaming, "SHARED", 100)
    text = "".join(f"line {number} of a long book\n" for number in range(100))
    (tmp_path / "book.txt").write_text(text)
    parts = a_pass(tokenizer, config_of(tmp_path / "book.txt"), of=3)
    seen = Counter(int(token) for block in parts for token in block.inputs if token != tokenizer.pad_token_id)
    n_pieces = sum(1 for _ in encoding.pieces_of(streaming.TextFile(tmp_path / "book.txt"), 0, None, 0, 100))
    assert n_pieces >= 20
    assert predicted(parts)[tokenizer.eos_token_id] == 1
    whole = Counter(text.encode())
    # The last token of a row is a label and no input, and the first is an input and no label.
    assert sum(whole.values()) - sum(predicted(parts).values()) == n_pieces - 1
    assert seen.keys() <= whole.keys() | {tokenizer.eos_token_id}


def test_a_document_longer_than_is_tokenised_at_once_is_read_as_one(tokenizer, tmp_path, monkeypatch):
    texts = ["a first line\nthen others\n" * 20, "short", "words without a line end " * 30]
    path = lines(tmp_path / "a.jsonl", texts)
    whole = encode(load(str(path), "text"), tokenizer)
    monkeypatch.setattr(streaming, "SHARED", 100)
    assert predicted(a_pass(tokenizer, config_of(path), of=2)) == Counter(whole.tokens[whole.targets].tolist())


def test_documents_longer_than_a_piece_do_not_pile_up(tokenizer, tmp_path, monkeypatch):
    """However they are cut, what is laid out together is little more than was asked for, and ends with a document."""
    monkeypatch.setattr(streaming, "SHARED", 100)
    path = lines(tmp_path / "a.jsonl", [f"text {number}\nof some lines\n" * (10 + number % 7) for number in range(60)])
    longest = max(len(document.text) for document in load(str(path), "text"))
    blocks = StreamedBlocks(config_of(path), tokenizer, in_a_row, frozenset(), seed=0)
    groups = list(encoding.groups_of(blocks._pieces(0, 1), streaming.SHARED, whole=True))
    lengths = [sum(len(piece.text) for piece in group) for group in groups]
    assert all(100 <= length < 100 + longest for length in lengths[:-1])
    assert max(map(len, groups)) > 1
    assert all(group[-1].is_last for group in groups)


def test_what_is_not_trained_on_is_counted(tokenizer, tmp_path, caplog):
    path = lines(tmp_path / "a.jsonl", [*TEXTS[:3], *[" "] * 12])
    with caplog.at_level("WARNING", "granite_scu"):
        a_pass(tokenizer, config_of(path, on_long="truncate"), of=1)
    assert [record.getMessage() for record in caplog.records] == [
        "share 1 of 1 of the stream: empty documents left out so far: 12",
        "share 1 of 1 of the stream: documents longer than --block-size 16, truncated (--on-long) so far: 3",
        "share 1 of 1 of the stream: tokens of long documents left out (--on-long) so far: 81",
    ]


def test_a_file_that_vanishes_is_missed(tokenizer, tmp_path):
    """And another one is not taken up: where a share stands hangs on what a pass has."""
    for name in "ab":
        lines(tmp_path / f"{name}.jsonl", TEXTS[:4])
    blocks = StreamedBlocks(config_of(tmp_path), tokenizer, in_a_row, frozenset(), seed=0)
    whole = predicted(blocks._in_order(0, 1))
    lines(tmp_path / "c.jsonl", TEXTS)
    assert predicted(blocks._in_order(0, 1)) == whole
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(UserError, match=r"b\.jsonl: has vanished since the corpus was listed"):
        list(blocks._in_order(0, 1))


def test_a_share_of_nothing_but_empty_documents(tokenizer, tmp_path):
    blocks = StreamedBlocks(config_of(lines(tmp_path / "a.jsonl", [" ", " "])), tokenizer, in_a_row, frozenset(), 0)
    with pytest.raises(UserError, match="too few documents to learn from for 2 shares"):
        next(blocks.share(1, 2))


def test_what_is_held_out_is_never_trained_on_nor_are_its_copies(tokenizer, tmp_path, source, monkeypatch):
    monkeypatch.setattr(streaming, "BEGINNING", 1200)
    copies = lines(tmp_path / "b.jsonl", reversed(TEXTS))
    data = streamed(tokenizer, source, copies)
    record = json.loads("".join(data.record()))
    assert {"validation", "test"} <= record.keys() and record["streamed"] and not record["train"]
    held_out = {*record["validation"], *record["test"]}
    texts = {document.digest: document.text for document in load(str(source), "text")}
    assert 2 <= len(held_out) < 10
    blocks = data.train_dataloader().dataset
    trained = "".join(bytes(t for t in block.inputs.tolist() if t < 256).decode() for block in blocks._in_order(0, 1))
    begins = {digest: text.split(":")[0] + ": the" for digest, text in texts.items()}
    found = {digest for digest, start in begins.items() if f"fox {start}" in trained or trained.startswith(start)}
    assert found == texts.keys() - held_out
    assert held_out <= {d.digest for d in beginning(data.config)[0]}  # for scoring afterwards


def test_a_question_that_is_held_out_is_not_trained_on_with_another_answer(chatting, tmp_path):
    path = tmp_path / "chats.jsonl"
    pairs = [{"prompt": prompt, "completion": answer} for prompt in ("Who?", "Why?") for answer in ("One.", "Two.")]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    held_out = frozenset({load(str(path), "text")[0].question})
    pieces = StreamedBlocks(config_of(path), chatting, in_a_row, held_out, 0)._pieces(0, 1)
    assert [piece.name.rpartition(":")[2] for piece in pieces] == ["3", "4"]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_where_it_was(tokenizer, source, workers):
    """Past the end of a pass too, and whichever loader process comes next."""
    whole = batches(streamed(tokenizer, source, num_workers=workers), 90)
    loader = streamed(tokenizer, source, num_workers=workers, start=4).train_dataloader()
    itself = loader.dataset.batches(3, max(1, workers))  # as where the processes are lost
    assert all(torch.equal(loader.collate_fn(next(itself))["input_ids"], inputs) for inputs, _ in whole[7:16])
    for start in (7, 64):
        rest = batches(streamed(tokenizer, source, num_workers=workers, start=start), 90 - start)
        for (inputs, labels), (others, other_labels) in zip(whole[start:], rest, strict=True):
            assert torch.equal(inputs, others) and torch.equal(labels, other_labels)


def test_ranks_differ_and_seeds_order(tokenizer, source):
    first, second = (batches(streamed(tokenizer, source, rank=rank), 8) for rank in (0, 1))
    assert not any(torch.equal(one, other) for (one, _), (other, _) in zip(first, second, strict=True))
    other = batches(streamed(tokenizer, source, seed=1), 8)
    again = batches(streamed(tokenizer, source), 8)
    assert not all(torch.equal(one, two) for (one, _), (two, _) in zip(again, other, strict=True))


@pytest.mark.parametrize(("most", "found"), [(streaming.BEGINNING, "1 whole document"), (1000, "0 whole documents")])
def test_too_few_documents_to_hold_some_out(tokenizer, tmp_path, monkeypatch, most, found):
    monkeypatch.setattr(streaming, "BEGINNING", most)
    (tmp_path / "book.txt").write_text("a book\n" * 500)
    with pytest.raises(UserError, match=rf"--stream: the beginning of .* has {found} of up to"):
        streamed(tokenizer, tmp_path / "book.txt")


def test_a_file_too_long_for_memory_before_all_others_leaves_them_to_be_held_out(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BEGINNING", 1000)
    for number, text in enumerate(["a long book " * 100, *TEXTS]):
        (tmp_path / f"{number:02}.txt").write_text(text)
    data = streamed(tokenizer, tmp_path)
    record = json.loads("".join(data.record()))
    assert len(record["validation"]) >= 1 and len(record["test"]) >= 1


def test_files_to_validate_on_are_read_whole(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BEGINNING", 20)
    path, own = lines(tmp_path / "a.jsonl", TEXTS), lines(tmp_path / "own.jsonl", [f"text {n}" for n in range(9)])
    _, validated = streaming.beginning(config_of(path, validation_data=str(own)))
    assert len(validated) == 9


def test_a_data_set_of_the_hub_is_streamed_with_its_splits(tokenizer, tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for name, numbers in (("train", range(8)), ("validation", range(8, 10)), ("test", range(10, 11))):
        lines(root / f"{name}.jsonl", [TEXTS[number] for number in numbers])
    data = streamed(tokenizer, f"hf:{root}")
    assert data.summary()["split_by"] == "published"
    assert (data.validation.n_documents, data.test.n_documents) == (2, 1)
    text = bytes(
        t for block in data.train_dataloader().dataset._in_order(0, 1) for t in block.inputs.tolist() if t < 256
    ).decode()
    assert all(f"{number}: the" in text for number in range(8)) and "8: the" not in text.replace("38: the", "")


def test_every_loader_process_sees_all_files_of_a_data_set_of_the_hub(tokenizer, tmp_path):
    """The library would hand each of them some files alone."""
    root = tmp_path / "set"
    root.mkdir()
    for number in range(2):
        lines(root / f"train-{number:05}-of-00002.jsonl", TEXTS[20 * number : 20 * (number + 1)])
    data = streamed(tokenizer, f"hf:{root}", num_workers=2)
    found = batches(data, 30)
    shares = [data.train_dataloader().dataset.share(number, 2) for number in range(2)]
    for number, (inputs, _) in enumerate(found):
        wanted = [block.inputs.tolist() for block in islice(shares[number % 2], 2)]
        assert inputs.tolist() == wanted


def test_a_data_set_of_the_hub_that_cannot_be_read_any_further(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"row \d of train cannot be read \(.*--resume-from-checkpoint last") as caught:
        list(hub.read(f"hf:{tmp_path}", "text", streamed=True))
    assert "\n" not in str(caught.value)


def test_what_is_refused_of_a_text_read_first_is_refused_of_a_stream(tokenizer, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": text, "completion": text}) + "\n" for text in TEXTS))
    with pytest.raises(UserError, match="--text-column contnet: no record of"):
        streamed(tokenizer, pairs, text_column="contnet")
    assert streamed(tokenizer, pairs).summary()["conversations"] > 0


@pytest.mark.parametrize("kind", [TextDataModule, StreamedDataModule])
def test_a_token_that_the_model_lacks_is_named_when_the_text_is_prepared(kind, tokenizer, tmp_path):
    """One that was added to the tokenizer and occurs; one that does not occur, and rows without a token, do no harm."""
    tokenizer, rows = copy.deepcopy(tokenizer), len(tokenizer)
    tokenizer.add_tokens(["<walrus>"])
    for texts, n_rows, is_refused in (
        ([*TEXTS, "a <walrus> sings"], rows, True),
        ([*TEXTS, "a <walrus> sings"], rows + 1, False),
        (TEXTS, rows, False),
        (TEXTS, rows + 100, False),
    ):
        config = replace(config_of(lines(tmp_path / "a.jsonl", texts)), stream=kind is StreamedDataModule)
        with pytest.raises(UserError, match="the token <walrus> of the text") if is_refused else nullcontext():
            kind(config, 0).prepare(tokenizer, n_rows, "mine")


def test_a_token_that_the_model_lacks_is_named_where_it_first_comes_in_a_stream(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BEGINNING", 2000)
    tokenizer, rows = copy.deepcopy(tokenizer), len(tokenizer)
    tokenizer.add_tokens(["<walrus>"])
    data = StreamedDataModule(config_of(lines(tmp_path / "a.jsonl", [*TEXTS, *TEXTS, "a <walrus> sings"])), 0)
    data.prepare(tokenizer, rows, "mine")
    with pytest.raises(UserError, match="the token <walrus>"):
        batches(data, 500)


def test_padding_that_was_added_to_the_tokenizer_alone_is_not_put_into_blocks(tokenizer, source):
    tokenizer, rows = copy.deepcopy(tokenizer), len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad of ours>"})
    data = TextDataModule(replace(config_of(source, block_size=64, packing="best-fit"), stream=False), 0)
    data.prepare(tokenizer, rows, "mine")
    ids = torch.cat([batch["input_ids"].flatten() for batch in data.val_dataloader()])
    assert tokenizer.pad_token_id == rows and int(ids.max()) < rows
