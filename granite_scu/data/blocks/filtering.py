"""Which documents go into the blocks, and how often: those that are too long, those that nothing is learned from."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.errors import UserError
from granite_scu.data.blocks.packing import Blocks, Layout, best_fit
from granite_scu.data.tokens.stream import StoredArray, Stream

BECOMES = {"split": "cut into pieces", "truncate": "truncated", "drop": "left out"}
"""What becomes of documents that are longer than a block, in words."""

CUT = {
    "split": "are cut, and the rest is learned without its beginning",
    "truncate": "lose their end, which teaches when to stop",
}
"""What becomes of answers in them, in words."""


def blocks_of(
    stream: Stream,
    documents: NDArray[np.int64],
    layout: Layout,
    padding: int,
    block_size: int,
    on_long: str,
    names: Sequence[str],
) -> tuple[Blocks, Counter[str]]:
    """The blocks of some documents, and counts of those that could not be taken as they are.

    Args:
        stream: all documents.
        documents: numbers of those that are meant; one may come several times.
        layout: makes the blocks.
        padding: token id that fills up blocks.
        block_size: predictions that a block has room for.
        on_long: what becomes of longer documents, as ``filter_documents``.
        names: where each of all documents came from.

    Returns:
        The blocks, and the counts of ``filter_documents`` with ``unused``: tokens in pieces of long documents in which
        nothing is learned, which best-fit packing leaves out.

    Raises:
        UserError: as ``filter_documents``.
    """
    bounds, counts = filter_documents(stream, documents, block_size, on_long, names)
    blocks = layout(stream, bounds, block_size, padding)
    if layout is best_fit:
        counts["unused"] = int((bounds[:, 1] - bounds[:, 0] - 1).sum()) - blocks.n_inputs
    return blocks, counts


def left_out(counts: Counter[str], layout: Layout, block_size: int, on_long: str) -> list[tuple[int, str]]:
    """How many documents or tokens were left out or cut, and which, in words that fit one as well as many."""
    # Where documents are cut in a row in any case, a long one is no news.
    n_long = counts["long"] if layout is best_fit or on_long != "split" else 0
    long = f"documents longer than --block-size {block_size}, {BECOMES.get(on_long)} (--on-long)"
    unused = "tokens left out in pieces of long documents, for nothing is learned there"
    reasons = (
        (counts["unsupervised"], "documents left out, without a token to learn"),
        (n_long, long),
        (counts["cut"] if n_long else 0, f"answers that {CUT.get(on_long)} (--on-long)"),
        (counts["dropped"], "tokens of long documents left out (--on-long)"),
        (counts["unused"], f"{unused}; a larger --block-size keeps them"),
    )
    return [(n, words) for n, words in reasons if n]


def filter_documents(
    stream: Stream, documents: NDArray[np.int64], block_size: int, on_long: str, names: Sequence[str]
) -> tuple[NDArray[np.int64], Counter[str]]:
    """Leave out what cannot be learned from, and treat what is longer than a block as was asked for.

    Args:
        stream: all documents.
        documents: numbers of those that are meant; one may come several times.
        block_size: predictions that a block has room for.
        on_long: "split" leaves it to the layout, "truncate" keeps the first ``block_size`` predictions, "drop" leaves
            the document out, "error" refuses it.
        names: where each of all documents came from.

    Returns:
        (documents, 2) where in the stream each that is left begins, and ends as ``taught``; and the counts

        long: documents longer than a block, whatever became of them; one that comes several times counts once.
        unsupervised: documents, counted in the same way, left out because no token of them is to be learned, or none
            that was not cut off; those of the second kind are long ones too, and their tokens among the dropped.
        cut: documents, counted in the same way, of which an answer is cut; not those of which all is learned.
        dropped: tokens left out with long documents, or cut off them.

    Raises:
        UserError: a long document under "error".
    """
    bounds = taught(stream.targets, stream.bounds_of(documents))
    teaches = bounds[:, 1] > bounds[:, 0]
    n_unsupervised = len(np.unique(documents[~teaches]))
    bounds, documents = bounds[teaches], documents[teaches]
    excess = bounds[:, 1] - bounds[:, 0] - 1 - block_size
    is_long = excess > 0
    dropped = 0
    n_long = len(np.unique(documents[is_long]))
    if on_long == "error" and n_long:
        first = int(np.flatnonzero(is_long)[0])
        length = int(excess[first]) + block_size + 1
        raise UserError(
            f"--on-long error: {names[int(documents[first])]} has {length} tokens, and --block-size {block_size} has "
            f"room for {block_size + 1} ({n_long} documents are too long); raise --block-size, or choose "
            "split, truncate or drop"
        )
    is_cut = [on_long in CUT and _is_cut(stream.targets[a:b], block_size, on_long) for a, b in bounds[is_long]]
    n_cut = len(np.unique(documents[is_long][is_cut]))
    if on_long == "truncate":
        dropped = int(excess[is_long].sum())
        kept = np.stack([bounds[:, 0], bounds[:, 1] - np.maximum(excess, 0)], 1)
        bounds = taught(stream.targets, kept)
        teaches = bounds[:, 1] > bounds[:, 0]  # of a long prompt nothing else may be left
        n_unsupervised += len(np.unique(documents[~teaches]))
        dropped += int((kept[~teaches, 1] - kept[~teaches, 0]).sum())
        bounds = bounds[teaches]
    elif on_long == "drop":
        dropped = int((bounds[is_long, 1] - bounds[is_long, 0]).sum())
        bounds = bounds[~is_long]
    return bounds, Counter(long=n_long, unsupervised=n_unsupervised, cut=n_cut, dropped=dropped)


def _is_cut(targets: NDArray[np.bool_], block_size: int, on_long: str) -> bool:
    """Whether a long document is cut within an answer: the last prediction before a border and the first behind it are
    both learned. In a text of which all is learned every border is so, which is no news."""
    borders = np.arange(block_size, len(targets) - 1, block_size)[: 1 if on_long == "truncate" else None]
    return bool((targets[borders] & targets[borders + 1]).any()) and not targets[1:].all()


def taught(targets: NDArray[np.bool_] | StoredArray, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """(documents, 2) the bounds up to the last supervised token between them, for what a user says behind it teaches
    nothing; empty where there is none."""
    ends = bounds[:, 0].copy()
    for number, (start, stop) in enumerate(bounds.tolist()):
        backward = targets[start:stop][::-1]
        last = int(backward.argmax())
        ends[number] += len(backward) - last if backward[last] else 0
    return np.stack([bounds[:, 0], ends], 1)


def repeated(
    documents: NDArray[np.int64],
    sources: NDArray[np.uint16],
    places: NDArray[np.uint64],
    weights: Sequence[float],
    epoch: int = 0,
) -> NDArray[np.int64]:
    """The documents of an epoch when each source is read ``weights`` times: in whole passes, then a part of one.

    The part goes on where that of the epoch before has ended, in the seeded order and round and round: after some
    epochs no text has been read more than once more than another of its source. The first has one at least. They are
    counted off among those that are to be read, for the first of all have gone to validation and test.

    Args:
        documents: numbers of all that are to be read, rising.
        sources: (all documents,) number of what each came from.
        places: (all documents,) in the seeded order, 64 bits.
        weights: of the sources.
        epoch: its number, from 0.
    """
    weight = np.array(weights, float)[sources[documents]]
    rank = np.zeros(len(documents))
    for source in range(len(weights)):
        (own,) = np.nonzero(sources[documents] == source)
        rank[own[np.argsort(places[documents[own]], kind="stable")]] = np.arange(len(own)) / max(1, len(own))
    before, after = (np.maximum(0, np.ceil(np.round(number * weight - rank, 9))) for number in (epoch, epoch + 1))
    times = after - before
    passes = int(times.max(initial=0))
    return np.concatenate([documents[:0], *(documents[times > done] for done in range(passes))])
