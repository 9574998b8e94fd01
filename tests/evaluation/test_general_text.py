"""General text: files of the user's, its parts and its batches."""

import json
import logging
import re
import time
from datetime import timedelta

import numpy as np
import pytest
import torch

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED, DataConfig
from granite_scu.data.sources.documents import Document as Text
from granite_scu.data.tokens.templates import with_template
from granite_scu.evaluation.general_text import (
    LONGEST,
    Document,
    GeneralText,
    anchor_batches,
    batches,
    of_files,
    of_first_process,
    read,
)


def document(*tokens: int, skip: int = 1) -> Document:
    """A document whose first ``skip`` tokens are not counted."""
    return Document(tokens, tuple(number >= skip for number in range(len(tokens))))


def test_parts_share_no_document_and_stay_where_they_are_when_some_are_added():
    every = tuple(document(number, number) for number in range(11))
    parts = GeneralText(every, "auto").parts()
    assert parts.anchor == tuple(every[number] for number in (0, 1, 4, 5, 8, 9))
    assert parts.steering == (every[2], every[6], every[10]) and parts.held_out == (every[3], every[7])
    fewer = GeneralText(every[:8], "auto").parts()
    assert parts.held_out == fewer.held_out and parts.steering[:2] == fewer.steering


def test_a_batch_has_a_document_a_row_padded_at_its_end_with_its_labels_shifted():
    some = [document(1, 2, 3, 4, skip=2), document(5, 6, 7), document(*range(20, 40))]
    first, second = batches(some, 32, padding=0)
    assert first["input_ids"].tolist() == [[1, 2, 3] + [0] * 13, [5, 6] + [0] * 14]
    assert first["labels"].tolist() == [[IGNORED, 3, 4] + [IGNORED] * 13, [6, 7] + [IGNORED] * 14]
    assert second["input_ids"].shape == (1, 32), "19 positions, a multiple of 16"
    assert second["labels"][0].tolist() == [*range(21, 40)] + [IGNORED] * 13
    counted = sum(int((batch["labels"] != IGNORED).sum()) for batch in (first, second))
    assert counted == sum(each.n_counted for each in some)


def test_an_anchors_batch_has_not_many_more_positions_than_it_is_to_have():
    """A long document is cut; where nothing of a piece counts, it is left out."""
    long = Document(tuple(range(300)), (*[False] * 130, *[True] * 170))
    found = anchor_batches([long, Document((1, 2, 3), (False, True, True))], 64, padding=0)
    assert [batch["input_ids"].shape for batch in found] == [(1, 128), (1, 48), (1, 16)]
    first = [batch["labels"][0, :3].tolist() for batch in found]
    assert first == [[IGNORED, 130, 131], [257, 258, 259], [2, 3, IGNORED]]
    assert sum(int((batch["labels"] != IGNORED).sum()) for batch in found) == 170 + 2


CHATS = [
    {"prompt": f"What is {number}?", "completion": f"It is the number {number},\u2028and no other."}
    for number in range(60)
]
TEXTS = [f"Of the number {number} nothing is known but that it is {number}, as ever." for number in range(60)]
"""Documents of some fifteen tokens each that are counted."""


def jsonl(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_of_chats_the_answers_are_counted_and_of_texts_all_but_the_first_token(tmp_path, tokenizer):
    chats = of_files([jsonl(tmp_path / "chats.jsonl", CHATS)], DataConfig(), tokenizer, 5000, 0)
    said = {tokenizer.decode([t for t, c in zip(d.tokens, d.counted, strict=True) if c]) for d in chats.documents}
    assert said == {f"{chat['completion']}<|end_of_text|>" for chat in CHATS}
    assert all(tokenizer.decode(document.tokens).startswith("<|start_of_role|>user") for document in chats.documents)
    file = jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    texts = of_files([file], DataConfig(), tokenizer, 5000, 0)
    assert {tokenizer.decode(document.tokens) for document in texts.documents} == {f"{t}<|end_of_text|>" for t in TEXTS}
    assert {(document.counted[0], all(document.counted[1:])) for document in texts.documents} == {(False, True)}


def test_of_files_a_sample_is_taken_that_follows_its_seed_and_long_texts_are_cut(tmp_path, tokenizer):
    (tmp_path / "long.txt").write_text("\n".join(f"line {number}" for number in range(2000)))
    names = [str(tmp_path / "long.txt"), jsonl(tmp_path / "chats.jsonl", CHATS)]
    first, again, other = (of_files(names, DataConfig(), tokenizer, 6000, seed) for seed in (0, 0, 1))
    assert first == again != other and 6000 <= first.n_counted < 6000 + LONGEST
    whole = of_files(names, DataConfig(), tokenizer, 10**6, 0)
    assert max(len(document.tokens) for document in whole.documents) == LONGEST
    assert not any(document.counted[0] for document in whole.documents), "nothing predicts it"
    assert sum(document.tokens[-1] == tokenizer.eos_token_id for document in whole.documents) == 61
    assert whole.n_counted > first.n_counted and len(set(whole.documents)) == len(whole.documents)


def test_all_pieces_of_a_text_are_in_one_part_and_copies_are_left_out(tmp_path, tokenizer):
    """But of a single book."""
    for number in range(20):  # of one to five pieces
        lines = [f"book {number} line {line}" for line in range(60 * (1 + number % 5))]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))

    def books(part):
        return {number for each in part for number in re.findall(r"book (\d+) line", tokenizer.decode(each.tokens))}

    every = of_files([str(tmp_path)], DataConfig(), tokenizer, 10**6, 0)
    parts = every.parts()
    found = [books(part) for part in (parts.anchor, parts.steering, parts.held_out)]
    assert sum(map(len, found)) == 20 == len(set().union(*found)) and all(found)
    (tmp_path / "copy.txt").write_text((tmp_path / "4.txt").read_text() + "\n")
    assert len(of_files([str(tmp_path)], DataConfig(), tokenizer, 10**6, 0).documents) == len(every.documents)
    single = of_files([str(tmp_path / "4.txt")], DataConfig(), tokenizer, 10**6, 0)
    assert len(set(single.documents)) == len(single.documents) >= 4 and books(single.parts().held_out) == {"4"}


@pytest.mark.parametrize(
    ("texts", "words"),
    [("long.txt", "--general-tokens 1024: .*raise it"), ("head.jsonl", "--general-data .*head.jsonl: 0 texts")],
)
def test_too_little_text_is_told_by_what_gives_more(tmp_path, tokenizer, texts, words):
    (tmp_path / "long.txt").write_text("\n".join(f"line {number}" for number in range(2000)))
    GeneralText((), "auto").write(tmp_path / "head.jsonl", tokenizer)
    with pytest.raises(UserError, match=words):
        of_files([str(tmp_path / texts)], DataConfig(), tokenizer, 1024, 0)


def test_what_was_written_is_read_again(tmp_path, tokenizer):
    text = of_files([jsonl(tmp_path / "chats.jsonl", CHATS)], DataConfig(), tokenizer, 700, 0)
    file = tmp_path / "general.jsonl"
    text.write(file, tokenizer)
    assert read(file, tokenizer).digest == text.digest
    assert read(file, tokenizer) == text == of_files([str(file)], DataConfig(), tokenizer, 1, 0)
    assert json.loads(file.read_text().split("\n")[1])["text"].startswith("<|start_of_role|>user")
    with pytest.raises(UserError, match="another chat template"):
        read(file, with_template(tokenizer, "{{ messages[0].content }}"))
    with pytest.raises(UserError, match="has a token of the number"):
        read(file, tokenizer, rows=50)
    file.write_text(file.read_text().replace('"counted"', '"Counted"'))
    with pytest.raises(UserError, match=r"general.jsonl: damaged"):
        read(file, tokenizer)


def test_texts_that_are_trained_on_are_counted_in_a_warning(tmp_path, tokenizer, caplog):
    file = jsonl(tmp_path / "texts.jsonl", [{"text": f"{text}\n"} for text in TEXTS])
    trained_on = np.array([Text("", f"{text} \n").bare for text in TEXTS[:7]] + [5], np.uint64)
    with caplog.at_level(logging.WARNING, "granite_scu"):
        of_files([file], DataConfig(), tokenizer, 5000, 0, trained_on=trained_on)
    assert "7 of its 60 texts are trained on too" in caplog.text


def _processes_find_it(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.distributed.barrier()  # to start takes longer
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))

    def find() -> GeneralText:
        time.sleep(3)
        return GeneralText((document(1, 2),), "auto")

    assert of_first_process(rank == 0, find).documents == (document(1, 2),)


@pytest.mark.slow
def test_processes_wait_for_the_one_that_writes_for_longer_than_they_do_elsewhere(tmp_path):
    torch.multiprocessing.spawn(_processes_find_it, (str(tmp_path),), 2)
