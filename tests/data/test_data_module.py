import hashlib
import json
import logging
import pickle
import re
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED, DataConfig
from granite_scu.data.datamodule import TextDataModule

WORDS = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture
def one_text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(WORDS * 100)
    return path


@pytest.fixture
def many_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} {WORDS * (1 + i % 5)}"}) + "\n" for i in range(60)))
    return path


def prepared(tokenizer, path, seed: int = 0, **fields) -> TextDataModule:
    path = None if path is None else str(path)
    config = DataConfig(**{"path": path, "block_size": 32, "batch_size": 4, **fields})
    data = TextDataModule(config, seed)
    data.prepare(tokenizer)
    return data


def on_rank(data: TextDataModule, rank: int, world_size: int) -> TextDataModule:
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data


def test_one_text_is_divided_by_block(tokenizer, one_text, caplog):
    with caplog.at_level(logging.INFO):
        data = prepared(tokenizer, one_text)
    assert "1 different document, fewer than 10: the last blocks are held out instead" in caplog.text
    text = WORDS * 100  # 4400 bytes and the end of text: 138 blocks of 32, of which the last has 17 tokens
    assert [len(part) for part in (data.train, data.validation, data.test)] == [110, 13, 13]
    assert bytes(data.validation[0][0].tolist()) == text[111 * 32 : 112 * 32].encode()
    assert data.n_tokens == 110 * 32
    assert data.test.n_supervised == 12 * 32 + 16
    summary = data.summary()
    assert (summary["split_by"], summary["gap_blocks"], summary["long_documents"]) == ("block", 2, 1)
    counts = {"documents": 1, "copies": 0, "blocks": 13, "supervised_tokens": 400, "bytes": 399, "utilisation": 0.9639}
    assert summary["test"] == counts


def test_a_source_that_is_held_out_whole_is_said(tokenizer, one_text, tmp_path, caplog):
    (tmp_path / "end.txt").write_text(WORDS * 10)
    config = DataConfig(path=[str(one_text), str(tmp_path / "end.txt")], block_size=32)
    TextDataModule(config, 0).prepare(tokenizer)
    assert "1 of the sources lie in these blocks whole" in caplog.text


def test_many_lines_are_divided_by_document(tokenizer, many_lines):
    with many_lines.open("a") as lines:
        lines.write('{"text": ""}\n')
    summary = prepared(tokenizer, many_lines).summary()
    parts = [summary[name] for name in ("train", "validation", "test")]
    assert (summary["split_by"], summary["empty_documents"], summary["gap_blocks"]) == ("document", 1, 0)
    assert sum(part["documents"] for part in parts) == 60
    n_bytes = sum(len(json.loads(line)["text"]) for line in many_lines.read_text().splitlines())
    assert sum(part["bytes"] for part in parts) == n_bytes - 60  # the first byte of each is not predicted
    assert sum(part["supervised_tokens"] for part in parts) == n_bytes  # but its end is
    json.dumps(summary)


def test_the_split_does_not_depend_on_the_runs_seed_but_the_order_does(tokenizer, many_lines):
    first, second = (prepared(tokenizer, many_lines, seed=seed) for seed in (1, 2))
    assert first.summary() == second.summary()
    for name in ("train", "validation", "test"):
        assert (getattr(first, name).stream.tokens[:] == getattr(second, name).stream.tokens[:]).all()
    one, other = (next(iter(data.train_dataloader()))["input_ids"] for data in (first, second))
    assert not torch.equal(one, other)


def test_a_validation_without_a_token_to_measure_on_is_refused(tokenizer, many_lines, monkeypatch):
    data = prepared(tokenizer, many_lines)
    data.check_validation(1)
    unlearned = data.validation[0]._replace(labels=np.full(32, IGNORED, np.int32))
    monkeypatch.setattr(type(data.validation), "__getitem__", lambda blocks, index: unlearned)
    with pytest.raises(UserError, match="--eval-iters: the 1 blocks"):
        data.check_validation(1)


def test_a_batch_is_the_blocks_as_int64(tokenizer, one_text):
    data = prepared(tokenizer, one_text)
    batch = next(iter(data.val_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    for name, tensor in batch.items():
        assert tensor.shape == (4, 32) and tensor.dtype == torch.int64, name
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert batch["input_ids"][2].tolist() == data.validation[2][0].tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_that_starts_late_gives_what_another_gives_from_there(tokenizer, one_text, rank):
    data = on_rank(prepared(tokenizer, one_text), rank, 2)
    loaded = list(islice(data.train_dataloader(), 40))
    data.start_batch = 33
    for batch, expected in zip(islice(data.train_dataloader(), 7), loaded[33:], strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in ("input_ids", "labels"))


@pytest.mark.parametrize("world_size", [1, 2, 5, 13, 20])
@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_has_each_block_once_over_all_ranks(tokenizer, one_text, world_size, split):
    data = prepared(tokenizer, one_text, eval_batch_size=3)
    blocks = data.validation if split == "val" else data.test
    loaders = [getattr(on_rank(data, rank, world_size), f"{split}_dataloader")() for rank in range(world_size)]
    for rank, loader in enumerate(loaders):
        read = [row for batch in loader for row in batch["labels"].tolist() if any(label != IGNORED for label in row)]
        assert read == [blocks[i][1].tolist() for i in range(rank, len(blocks), world_size)]
    shares = [-(-len(range(rank, len(blocks), world_size)) // 3) for rank in range(world_size)]
    assert {len(list(loader)) for loader in loaders} == {max(shares)}  # as many forward passes on every rank
    total = sum((batch["labels"] != IGNORED).sum().item() for loader in loaders for batch in loader)
    assert total == blocks.n_supervised


def test_reading_leaves_the_runs_random_numbers_alone(tokenizer, one_text):
    data = prepared(tokenizer, one_text)
    before = torch.random.get_rng_state()
    next(iter(data.train_dataloader()))
    list(data.val_dataloader())
    assert torch.equal(torch.random.get_rng_state(), before)


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=30, max_size=60),
    packing=st.sampled_from(["blocks", "best-fit"]),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 2),
    workers=st.sampled_from([0, 0, 2]),
)
def test_every_token_comes_once_an_epoch_over_all_ranks_and_workers(
    tokenizer, tmp_path_factory, lengths, packing, world_size, batch_size, workers
):
    """And none is invented: what the loaders give is counted against the documents themselves."""
    texts = [f"{number} " + "abcdefgh"[number % 8] * length for number, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("round") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = prepared(tokenizer, path, block_size=16, batch_size=batch_size, packing=packing, num_workers=workers)
    assume(min(len(data.validation), len(data.test)) >= world_size)
    seen = {"train": Counter(), "validation": Counter()}
    for rank in range(world_size):
        on_rank(data, rank, world_size)
        epochs = islice(data.train_dataloader(), len(data.train))  # so many batches are batch_size * world_size epochs
        for name, loader in (("train", epochs), ("validation", data.val_dataloader())):
            for batch in loader:
                seen[name].update(batch["labels"][batch["labels"] != IGNORED].tolist())
    digests = {hashlib.sha256(text.encode()).hexdigest()[:16]: text for text in texts}
    record = json.loads("".join(data.record()))
    for name, times in (("train", batch_size * world_size), ("validation", 1)):
        held = [digests[digest].encode() for digest in record[name]]
        expected = Counter(byte for text in held for byte in [*text[1:], tokenizer.eos_token_id])
        assert seen[name] == Counter({token: times * count for token, count in expected.items()})


def test_weights_of_documents_that_cannot_be_divided_are_refused(tokenizer, one_text):
    with pytest.raises(UserError, match=r"--data-weights: .* has too few or too uneven documents"):
        prepared(tokenizer, one_text, weights=[2.0])


def test_chats_in_which_nobody_answers_have_nothing_to_learn(chatting, tmp_path):
    path = tmp_path / "chats.jsonl"
    chats = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with pytest.raises(UserError, match=r"the train split has no token to learn .* messages in which the assistant"):
        prepared(chatting, path)


def test_dropping_every_long_document_names_the_flag(tokenizer, many_lines):
    with pytest.raises(UserError, match=r"--on-long drop: every document \(train: 4\d\) is longer than --block-size"):
        prepared(tokenizer, many_lines, on_long="drop")


def test_a_text_too_short_to_hold_out_names_a_block_size_that_works(tokenizer, one_text):
    with pytest.raises(UserError, match=r": 4401 tokens are too few .*add 6,864 tokens .*--block-size 256.*share 0"):
        prepared(tokenizer, one_text, block_size=1024)
    assert len(prepared(tokenizer, one_text, block_size=256).validation) == 1
    one_text.write_text("hello")
    with pytest.raises(UserError, match=r"6 tokens are too few .*; add 347 tokens of text or more, or --held-out"):
        prepared(tokenizer, one_text)


def test_a_training_split_below_one_block_names_a_block_size_that_works(tokenizer, many_lines):
    n_train = prepared(tokenizer, many_lines).train.n_inputs
    with pytest.raises(UserError, match=rf"the training split has {n_train} tokens, too few .* --block-size 4096"):
        prepared(tokenizer, many_lines, block_size=n_train)
    assert len(prepared(tokenizer, many_lines, block_size=4096).train) == 2


@pytest.mark.parametrize(("tokens", "blocks"), [(32, 1), (320, 10), (1000, 31), (109 * 32, 109), (10**9, 110)])
def test_a_training_split_may_be_thinned_to_about_so_many_tokens(tokenizer, one_text, tokens, blocks):
    whole, thinned = prepared(tokenizer, one_text), prepared(tokenizer, one_text, train_tokens=tokens)
    assert len(thinned.train) == blocks and thinned.train.numbers.step == 110 // blocks  # spread evenly
    assert thinned.n_tokens == sum(
        int((labels != IGNORED).sum()) for _, labels, _ in list(map(thinned.train.__getitem__, range(blocks)))
    )
    assert thinned.n_tokens == blocks * 32  # one text has no end before its last block
    for part in ("validation", "test"):
        assert getattr(thinned, part).numbers == getattr(whole, part).numbers


@pytest.mark.parametrize("weight", [0.05, 0.1, 0.5, 1.5])
def test_a_weight_reads_that_share_of_what_its_source_trains_on(tokenizer, tmp_path, weight):
    for name in "ab":
        lines = (json.dumps({"text": f"{name}{i:03d}"}) + "\n" for i in range(200))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    once, found = (
        TextDataModule(DataConfig(sources, block_size=32, batch_size=4, packing="best-fit", weights=weights), seed=0)
        for weights in (None, [1.0, weight])
    )
    for data in (once, found):
        data.prepare(tokenizer)
    counts = [Counter(_texts(data.train)) for data in (once, found)]
    of_b = [sum(n for text, n in count.items() if text.startswith("b")) for count in counts]
    assert of_b[1] == pytest.approx(weight * of_b[0], abs=1) and of_b[1] > 0
    assert sum(counts[0].values()) - of_b[0] == sum(counts[1].values()) - of_b[1]
    # In the end all of the source is read alike, by another process too.
    n_blocks, loader = sum(map(found.epochs.size, range(20))), found.served(batch_size=1).train_dataloader()
    assert n_blocks == round(20 * found.epochs.mean(20.0))
    read = Counter(_texts([batch["input_ids"][0:1] for batch in islice(loader, n_blocks)]))
    assert read == {text: 20 * (weight if text[0] == "b" else 1) for text in counts[0]}
    elsewhere = pickle.loads(pickle.dumps(found.epochs))
    assert np.array_equal(elsewhere[1, 0].inputs, found.epochs[1, 0].inputs)


def test_an_epoch_may_be_empty_and_all_that_decides_the_others_is_in_the_checksum(tokenizer, tmp_path):
    source = tmp_path / "b.jsonl"
    source.write_text("".join(json.dumps({"text": f"b{i:03d}"}) + "\n" for i in range(3)))
    fields = {"held_out_share": 0, "batch_size": 1, "packing": "best-fit"}
    some, fewer = (prepared(tokenizer, source, weights=[weight], **fields) for weight in (0.2, 0.1))
    assert [some.epochs.size(epoch) for epoch in range(5)] == [1, 1, 0, 1, 0]
    assert len(list(islice(some.train_dataloader(), 6))) == 6
    assert some.train.checksum() == fewer.train.checksum() and some.checksum != fewer.checksum


def test_a_document_too_long_that_a_later_epoch_reads_is_refused_at_once(tokenizer, tmp_path):
    for name, longest in (("a", 20), ("b", 90)):
        texts = [f"{number:02d}".ljust(longest if number == 39 else 20, name) for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fields = {"path": [str(tmp_path / f"{name}.jsonl") for name in "ab"], "weights": [1.0, 0.02], "held_out_share": 0}
    for on_long, raised in (("truncate", False), ("error", True)):
        data = TextDataModule(DataConfig(**fields, block_size=32, batch_size=1, on_long=on_long), seed=0)
        with pytest.raises(UserError, match=r"b\.jsonl.* 91 tokens") if raised else nullcontext():
            data.prepare(tokenizer)
            assert data.summary()["long_documents"] == 1 and data.lengths[data.epoch].max() < 91


def _texts(blocks) -> list[str]:
    """The documents in blocks of whole ones."""
    rows = (bytes(min(token, 255) for token in block[0].tolist()) for block in (blocks[i] for i in range(len(blocks))))
    return [text.decode("latin-1") for row in rows for text in re.findall(rb"[ab][0-9]{3}", row)]


def test_loader_processes_go_on_between_passes(tokenizer, many_lines):
    data = prepared(tokenizer, many_lines, num_workers=2)
    loader = data.val_dataloader()

    def processes() -> list[int]:
        list(loader)
        return [process.pid for process in loader.processes]

    assert len(set(processes())) == 2 and processes() == processes()
    assert loader.pin_memory == torch.cuda.is_available()
