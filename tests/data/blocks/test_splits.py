import json
import random

import numpy as np
import pytest

from granite_scu.data.blocks.splitting import TENTHS, assign, by_block, min_blocks
from granite_scu.data.sources.corpora import EMBEDDED
from granite_scu.data.sources.documents import Conversation, Document, Fingerprint


def corpus(n: int = 200, seed: int = 0) -> list[Document]:
    rng = random.Random(seed)
    return [Document(f"{i}", f"{i} " + "word " * rng.randint(1, 100)) for i in range(n)]


def by_document(documents: list[Document], seed: int = 0, shares=TENTHS) -> dict[str, list[Document]] | str:
    prints = [Fingerprint(seed) for _ in documents]
    for fingerprint, document in zip(prints, documents, strict=True):
        fingerprint.update(document.text)
    facts = (np.array([getattr(p, name) for p in prints], np.uint64) for name in ("place", "characters", "bare"))
    parts, reason = assign(*facts, shares)
    return reason or {name: [documents[i] for i in part.tolist()] for name, part in parts.items()}


def parts_of(documents: list[Document]) -> list[list[Document]]:
    parts = by_document(documents)
    return [parts[name] for name in ("train", "validation", "test")]


def test_is_80_10_10_by_characters_without_loss_or_overlap():
    documents = corpus()
    parts = parts_of(documents)
    assert sorted(d.name for part in parts for d in part) == sorted(d.name for d in documents)
    shares = [sum(len(d.text) for d in part) / sum(len(d.text) for d in documents) for part in parts]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.01)


def test_is_the_same_again_and_in_any_order_of_the_corpus():
    documents = corpus()
    split = by_document(documents)
    assert by_document(documents) == split
    assert by_document(documents[::-1]) == {name: part[::-1] for name, part in split.items()}


def test_is_a_shuffle_and_another_seed_gives_another():
    documents = corpus()
    held_out = {d.name for d in by_document(documents)["validation"]}
    assert held_out != {d.name for d in documents[: len(held_out)]}
    assert {d.name for d in by_document(documents, seed=1)["validation"]} != held_out


def test_notes_among_books_are_not_all_held_out():
    """As they would be if they filled what is too small for another book."""
    books = [Document(f"book {i}", f"{i} " + "word " * 10_000) for i in range(25)]
    notes = [Document(f"note {i}", f"{i} a note") for i in range(1000)]
    train = {document.name for document in by_document(books + notes)["train"]}
    assert sum(note.name in train for note in notes) > 500


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", ["", " ", "\n \n"])
def test_copies_stay_on_one_side_also_with_other_white_space_at_the_end(seed, end):
    documents = corpus(60, seed)
    copies = [Document(f"copy {i} of {d.name}", d.text + i * end) for d in documents for i in range(3)]
    sides = [{d.text.rstrip() for d in part} for part in parts_of(documents + copies)]
    assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
    assert all(sides)


def chat(*messages: dict, **more) -> Conversation:
    return Conversation("chat", json.dumps([messages, more.get("n_prompt")]), messages=messages, **more)


ASKED = {"role": "user", "content": "Is it?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}


def test_of_chats_copies_are_those_that_say_the_same():
    one = chat(ASKED, {"role": "assistant", "content": "Yes.", "tool_calls": [CALL | {"id": "a1"}]})
    parts = [{"type": "text", "text": "Yes.\n"}]
    same = {"role": "assistant", "content": parts, "tool_calls": [CALL | {"id": "b2"}], "weight": 1}
    assert chat(ASKED, same, n_prompt=1).bare == one.bare
    for other in (same | {"content": "No."}, same | {"tool_calls": []}, same | {"role": "user"}):
        assert chat(ASKED, other).bare != one.bare


@pytest.mark.parametrize("n", range(10, 40))
def test_texts_of_equal_length_leave_no_part_without_its_share(n):
    parts = parts_of([Document(f"{i}", f"{i:04}") for i in range(n)])
    assert all(len(part) >= n / 20 for part in parts)


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (corpus(9), "9 different documents, fewer than 10"),
        (corpus(9) + corpus(9), "9 different documents, fewer than 10"),
        ([*corpus(30), Document("large", "x" * 10**6)], "one document holds 99% of the characters"),
        ([Document(f"{i}", f"{i}" * 1000) for i in range(9)] + [Document("small", "x")], "too uneven"),
    ],
    ids=["few", "copies", "large", "uneven"],
)
def test_what_cannot_be_divided_by_document_is_said(documents, reason):
    assert reason in by_document(documents)


def test_any_share_is_held_out_for_one_part_alone():
    parts = by_document(corpus(), shares={"test": 0.3})
    assert parts.keys() == {"train", "test"}
    assert sum(len(d.text) for d in parts["test"]) == pytest.approx(0.3 * sum(len(d.text) for d in corpus()), rel=0.01)


def test_the_embedded_corpus_can_be_divided():
    split = by_document(EMBEDDED["stdlib-docs"]())
    assert len(split["validation"]) >= 3 and len(split["test"]) >= 3


def test_a_division_stays_what_it_was():
    """Golden: a run resumes and is scored by it. Uneven texts, of which the shortest fill what the longest leave."""
    documents = [Document(f"{i}", f"{i} " + "word " * 2 ** (i % 9)) for i in range(80)]
    split = by_document(documents)
    assert [len(part) for part in split.values()] == [53, 14, 13]
    assert sorted(int(document.name) for document in split["test"]) == [
        7,
        13,
        18,
        27,
        29,
        39,
        43,
        45,
        46,
        47,
        55,
        57,
        61,
    ]


@pytest.mark.parametrize("n_blocks", [min_blocks(), 13, 21, 22, 102, 999])
def test_tail_blocks_are_held_out_with_a_block_between(n_blocks):
    train, validation, test = by_block(n_blocks).values()
    assert train.start == 0 and test.stop == n_blocks
    assert validation.start == train.stop + 1
    assert test.start == validation.stop + 1
    assert len(validation) == len(test) == (n_blocks - 2) // 10 >= 1
    assert len(train) >= 0.8 * (n_blocks - 2)
