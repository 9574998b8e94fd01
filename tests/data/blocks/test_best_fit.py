"""Best-fit packing: every supervised token once, documents whole, and each with the loss that it has alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import OF_SMALL, rounding

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.filtering import blocks_of, filter_documents, left_out, repeated
from granite_scu.data.blocks.packing import LEAST_IN_ROUND, Blocks, best_fit, in_a_row
from granite_scu.data.datamodule import collate
from granite_scu.data.tokens.stream import Stream

PAD = 1


def stream_of(lengths: list[int], masked: float = 0.0, seed: int = 0) -> Stream:
    """Documents of random tokens of these lengths, of whose tokens some are not supervised."""
    random = np.random.default_rng(seed)
    tokens = random.integers(2, 60, sum(lengths)).astype(np.int32)
    ends = np.cumsum(lengths) - 1
    targets = random.random(len(tokens)) >= masked
    targets[[0, *(ends[:-1] + 1)]] = False
    return Stream(tokens, ends, np.ones(len(tokens), np.uint16), targets)


def predictions(blocks: Blocks) -> list[tuple[int, int]]:
    """(input, label) of every supervised position."""
    rows = [blocks[i] for i in range(len(blocks))]
    return [(int(i), int(x)) for row in rows for i, x in zip(row.inputs, row.labels, strict=True) if x != IGNORED]


LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=25)


@given(
    lengths=LENGTHS,
    size=st.integers(2, 40),
    masked=st.sampled_from([0.0, 0.5]),
    layout=st.sampled_from([in_a_row, best_fit]),
)
def test_every_supervised_token_is_predicted_once_from_the_token_before(lengths, size, masked, layout):
    stream = stream_of(lengths, masked)
    blocks = layout(stream, stream.bounds, size, PAD)
    expected = [(int(stream.tokens[i - 1]), int(stream.tokens[i])) for i in np.flatnonzero(stream.targets)]
    assert sorted(predictions(blocks)) == sorted(expected)
    assert blocks.n_supervised == len(expected) == blocks.n_bytes
    assert blocks.n_inputs == sum(int((blocks[i].inputs != PAD).sum()) for i in range(len(blocks)))


@given(lengths=LENGTHS, size=st.integers(30, 60))
def test_best_fit_keeps_documents_whole_and_wastes_less_than_half(lengths, size):
    stream = stream_of(lengths)
    blocks = best_fit(stream, stream.bounds, size, PAD)
    assert [len(blocks.cuts.every), blocks.n_documents] == [len(lengths)] * 2
    assert len(blocks) <= 2 * -(-sum(lengths) // size)
    for i in range(len(blocks)):
        row = blocks[i]
        for number in range(row.documents.max() + 1):
            found = row.inputs[row.documents == number]
            document = int(blocks.documents(i)[row.documents == number][0])
            start, end = stream.bounds[document]
            assert found[: end - start - 1].tolist() == stream.tokens[start : end - 1].tolist()


@given(lengths=LENGTHS, size=st.integers(30, 60))
def test_the_blocks_are_as_full_as_those_of_a_plain_loop(lengths, size):
    rooms: list[int] = []
    for length in sorted((length - 1 for length in lengths), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else size) - length)
    stream = stream_of(lengths)
    blocks = best_fit(stream, stream.bounds, size, PAD)
    used = [int((blocks.spans_of(i) @ [-1, 1]).sum()) for i in range(len(blocks))]
    assert sorted(size - n for n in used) == sorted(rooms)


@pytest.mark.parametrize("layout", [in_a_row, best_fit])
def test_each_packed_document_has_the_loss_that_it_has_alone(make_module, layout):
    model = make_module().language_model
    stream = stream_of([9, 3, 17, 2, 30, 11], masked=0.3)
    from granite_scu.model.loss import token_nats

    blocks = layout(stream, stream.bounds, 48, PAD)
    found = np.zeros(6)
    for i in range(len(blocks)):
        batch = collate([blocks[i]])
        nats = token_nats(model, **batch)[0].double().numpy()
        counted = (batch["labels"][0] != IGNORED).numpy()
        if layout is in_a_row:  # a document that is cut goes on in the next block without what stood before
            whole = {int(d) for d in blocks.documents(i)[counted] if np.isin(d, _cut(blocks)).item()}
            counted &= ~np.isin(blocks.documents(i), list(whole))
        found += np.bincount(blocks.documents(i)[counted], nats[counted], 6)
    for document, (start, end) in enumerate(stream.bounds.tolist()):
        if layout is in_a_row and document in _cut(blocks):
            continue
        ids = torch.from_numpy(stream.tokens[start : end - 1]).long()[None]
        labels = np.where(stream.targets[start + 1 : end], stream.tokens[start + 1 : end], IGNORED)
        alone = token_nats(model, ids, torch.from_numpy(labels).long()[None]).sum().item()
        assert found[document] == pytest.approx(alone, rel=rounding(OF_SMALL))


def test_batches_are_alike_where_they_are_asked_to_be():
    """For a compiled model: one of whole documents has their numbers too."""
    stream = stream_of([48])
    block = best_fit(stream, stream.bounds, 48, PAD)[0]
    assert "documents" not in collate([block])
    assert "documents" not in collate([block], isolate=False, uniform=True)
    assert not collate([block], uniform=True)["documents"].any()


def _cut(blocks: Blocks) -> list[int]:
    """Documents that lie in several blocks."""
    owners = [set(np.searchsorted(blocks.stream.ends, blocks.spans_of(i)[:, 0]).tolist()) for i in range(len(blocks))]
    return [d for d in range(len(blocks.stream.ends)) if sum(d in found for found in owners) > 1]


def filtered(stream, on_long, size=10):
    return filter_documents(
        stream, np.arange(len(stream.ends)), size, on_long, [f"doc {number}" for number in range(len(stream.ends))]
    )


@pytest.mark.parametrize("layout", [in_a_row, best_fit])
def test_of_a_truncated_document_nothing_behind_is_predicted(layout):
    stream = stream_of([11, 12, 5, 30])
    blocks = layout(stream, filtered(stream, "truncate")[0], 10, PAD)
    kept = [range(start, min(start + 10, stop - 1)) for start, stop in stream.bounds.tolist()]
    expected = [(int(stream.tokens[i]), int(stream.tokens[i + 1])) for positions in kept for i in positions]
    assert sorted(predictions(blocks)) == sorted(expected)


def test_long_documents_are_counted_whatever_becomes_of_them():
    stream = stream_of([11, 12, 5, 30])
    assert {on_long: filtered(stream, on_long)[1]["long"] for on_long in ("split", "truncate", "drop")} == {
        "split": 2, "truncate": 2, "drop": 2,
    }  # fmt: skip
    assert (filtered(stream, "split")[0] == stream.bounds).all()
    bounds, counts = filtered(stream, "truncate")
    assert (bounds[:, 1] - bounds[:, 0]).tolist() == [11, 11, 5, 11] and counts["dropped"] == 1 + 19
    bounds, counts = filtered(stream, "drop")
    assert bounds.tolist() == stream.bounds[[0, 2]].tolist() and counts["dropped"] == 42
    with pytest.raises(UserError, match=r"--on-long error: doc 1 has 12 tokens, and --block-size 10 .* \(2 documents"):
        filtered(stream, "error")


def test_documents_without_a_label_are_left_out_and_counted():
    stream = stream_of([5, 6, 7])
    stream.targets[5:11] = False
    bounds, counts = filtered(stream, "split")
    assert counts["unsupervised"] == 1 and bounds.tolist() == stream.bounds[[0, 2]].tolist()


def test_what_is_learned_behind_the_window_is_missed_by_name():
    """A prompt of 24 tokens and an answer of 6, in blocks of 10: of the three pieces one has all that is learned."""
    stream = stream_of([5, 30])
    stream.targets[5:29] = False
    bounds, counts = filtered(stream, "truncate")
    assert bounds.tolist() == [[0, 5]] and counts == {"long": 1, "unsupervised": 1, "cut": 0, "dropped": 30}
    blocks, found = blocks_of(stream, np.arange(2), best_fit, PAD, 10, "split", ["", ""])
    assert blocks.n_inputs == 4 + 9 and found["unused"] == 20


@pytest.mark.parametrize(
    ("learned", "truncated", "split"),
    [
        (range(8, 15), 1, 1),  # an answer of which the first border leaves the end
        (range(5, 11), 0, 0),  # its end is the last prediction before the border
        (range(11, 15), 0, 0),  # it begins behind it
        ([9, *range(15, 25)], 0, 1),  # cut at the second border, which truncating never reaches
        (range(1, 30), 0, 0),  # a text, of which everything is learned
    ],
    ids=["its end", "just whole", "behind", "later", "a text"],
)
def test_answers_that_a_border_cuts_are_counted(learned, truncated, split):
    """A document of 30 tokens in blocks of 10 predictions: borders behind the tokens 10 and 20."""
    stream = stream_of([5, 30])
    stream.targets[5:] = False
    stream.targets[[5 + place for place in learned]] = True
    for on_long, expected in (("truncate", truncated), ("split", split), ("drop", 0)):
        _, counts = filter_documents(stream, np.array([0, 1, 1]), 10, on_long, ["", ""])
        assert counts["cut"] == expected
        told = [n for n, words in left_out(counts, best_fit, 10, on_long) if words.startswith("answers")]
        assert told == [1] * expected


@given(lengths=LENGTHS, times=st.lists(st.integers(1, 5), min_size=25, max_size=25), size=st.integers(30, 60))
def test_no_block_has_a_document_twice_and_each_comes_as_often_as_it_is_given(lengths, times, size):
    stream = stream_of(lengths)
    given_times = np.array(times[: len(lengths)])
    blocks = best_fit(stream, np.repeat(stream.bounds, given_times, axis=0), size, PAD)
    starts = [blocks.spans_of(i)[:, 0] for i in range(len(blocks))]
    rounds = max(
        1, min(int((given_times * (np.array(lengths) - 1)).sum()) // size // LEAST_IN_ROUND, given_times.max())
    )
    most = -(-given_times // rounds)  # copies that a round has, at most
    assert all((np.bincount(stream.ends.searchsorted(block), minlength=len(lengths)) <= most).all() for block in starts)
    assert np.array_equal(np.sort(np.concatenate(starts)), np.repeat(stream.bounds[:, 0], given_times))
    assert len(blocks) <= 2 * -(-int((given_times * lengths).sum()) // size) + rounds


@given(weights=st.lists(st.integers(0, 3000).map(lambda n: n / 1000), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_each_source_is_read_as_often_as_its_weight_says(weights, seed):
    random = np.random.default_rng(seed)
    sources = random.integers(0, len(weights), 400).astype(np.uint16)
    places = random.integers(0, 2**64, 400, dtype=np.uint64)
    every, times = np.arange(400), np.zeros(400, int)
    for epoch in range(4):
        times += np.bincount(repeated(every, sources, places, weights, epoch), minlength=400)
        for source, weight in enumerate(weights):
            found, wanted = times[sources == source], (epoch + 1) * weight
            assert set(found.tolist()) <= {int(wanted), int(wanted) + (wanted % 1 > 1e-9)}
            assert found.sum() == np.ceil(round(wanted * len(found), 6))
