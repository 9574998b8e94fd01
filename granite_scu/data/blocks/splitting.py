"""Training, validation and test: by whole documents, or by blocks where documents are too few.

The division does not depend on the run's seed, so that runs with different seeds are compared on the
same held-out text.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from granite_scu.config.errors import UserError
from granite_scu.control.units import counted, per_cent
from granite_scu.data.blocks.filtering import taught
from granite_scu.data.sources.documents import SPLITS
from granite_scu.data.tokens.stream import Corpus

HELD_OUT = SPLITS[1:]
TENTHS = dict.fromkeys(HELD_OUT, 0.1)
MIN_DOCUMENTS = 10
"""Different texts below which a corpus is not divided by document."""
CROWD = 0.1
"""Share of the chats above which those that begin alike have a greeting in common rather than a chat, and are too many
to be held out. Where most are in such crowds, most of the others would be, and training hardly see their like."""
LONG = 0.05
"""Share of a part from which on a text is long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Division:
    """Which documents of a corpus are in which split.

    Attributes:
        corpus: all documents.
        by: "published" (as the corpus comes), "document", "block" where documents are too few to be divided, "files"
            where validation and test have files of their own, or "nothing" where nothing is held out.
        parts: the numbers of the documents of each split, by its name; None when they are divided by block.
        streamed: whether training reads more documents, of which there is no record.
        by_question: whether chats that begin with the same question are in one split, whatever the answer.
    """

    corpus: Corpus
    by: str
    parts: dict[str, NDArray[np.int64]] | None
    streamed: bool = False
    by_question: bool = False

    @property
    def held_out(self) -> frozenset[int]:
        """By which what is not to be trained on is known again: ``bare`` or ``question`` of documents."""
        assert self.parts is not None
        known = self.corpus.question if self.by_question else self.corpus.bare
        return frozenset(known[np.concatenate([self.parts[name] for name in HELD_OUT])].tolist())

    @property
    def n_copies(self) -> int:
        """Documents that are in no split, as another one has them."""
        if self.parts is None:
            return 0
        return self.corpus.n_documents - len(np.unique(np.concatenate([*self.parts.values()])))

    @property
    def trained_on(self) -> NDArray[np.uint64]:
        """By which the texts that are trained on, as far as they are known, are known again: ``Corpus.bare``."""
        return self.corpus.bare if self.parts is None else self.corpus.bare[self.parts["train"]]

    def record(self) -> Iterator[str]:
        """Which documents a run had, as the text of ``documents.json`` a line at a time: they may be millions.

        Those that several splits have a part of are ``shared``.
        """
        facts = {
            "schema": 1,
            "digest": "the first 16 hexadecimal digits of the SHA-256 of a text in UTF-8",
            "split_by": self.by,
            "streamed": self.streamed,
        }
        yield json.dumps(facts, indent=2).removesuffix("\n}")
        every = np.arange(self.corpus.n_documents)
        parts = dict.fromkeys((*SPLITS, "shared"), every[:0])
        parts |= {"shared": every} if self.parts is None else self.parts
        if self.streamed:
            parts["train"] = every[:0]
        for name, documents in parts.items():
            yield f',\n  "{name}": ['
            for number, document in enumerate(documents):
                yield f'{"," if number else ""}\n    "{self.corpus.digests[document]:016x}"'
            yield "\n  ]"
        yield "\n}\n"


def divide(
    corpus: Corpus,
    splits: Sequence[str],
    named: str,
    share: float | None = None,
    doubles: bool = False,
    streamed: bool = False,
) -> Division:
    """Divide a corpus; equal text gives an equal division.

    Args:
        corpus: its documents.
        splits: of each source the split that its documents are of; empty where they are to be divided.
        named: what those are called in messages.
        share: of them, that is held out; None takes what is usual.
        doubles: test has the documents of validation.
        streamed: whether it is the beginning of a stream.

    Raises:
        UserError: a split has nothing that no split after it has, or nothing can be held out as it was asked for.
    """
    given = {split: _of_sources(corpus, splits, split) for split in splits if split}
    rest = _of_sources(corpus, splits, "")
    if "validation" in given and "test" in given:
        given["validation"] = _not_in(corpus.bare, "validation", given["validation"], given["test"], "test has")
    if not streamed:  # what it has of them is passed over as it comes
        held_out = np.concatenate([rest[:0], *(given[split] for split in HELD_OUT if split in given)])
        given["train"] = _not_in(corpus.bare, "train", given.get("train", rest), held_out, "validation or test have")
    if "" not in splits:
        return Division(corpus, "published", {name: given[name] for name in SPLITS}, streamed)
    rest = given.pop("train", rest)
    if doubles:
        given["test"] = given["validation"]
    wanted = [split for split in HELD_OUT if split not in given]
    if not wanted or share == 0:
        nothing = dict.fromkeys(wanted, rest[:0])
        return Division(corpus, "files" if given else "nothing", {"train": rest, **nothing, **given}, streamed)
    parts, reason, by_question = _by_kind(corpus, rest, wanted, share)
    if parts is not None:
        return Division(corpus, "document", parts | given, streamed, by_question)
    chats = bool(corpus.is_chat[rest].all())
    few_chats = chats and (share is not None or len(np.unique(corpus.bare[rest])) < MIN_DOCUMENTS)
    if given or few_chats:
        kind = "conversations" if chats else "documents"
        files = " and ".join(f"--{split}-data" for split in wanted)
        use = " and ".join({"validation": "to validate on", "test": "to test on"}[split] for split in wanted)
        raise UserError(
            f"--data-dir {named}: {reason}, so that no {kind} can be held out {use}; give more, {files}, "
            f"{'another share, ' if share else ''}or --held-out-share 0, which trains on all"
        )
    _log.info("%s: the last blocks are held out instead, a block's gap before validation and before test", reason)
    if n_whole := _n_held_out_whole(corpus):
        _log.warning("%d of the sources lie in these blocks whole, and are not trained on; name texts to validate and "
                     "test on by --validation-data and --test-data", n_whole)  # fmt: skip
    if n_copies := corpus.n_documents - len(np.unique(corpus.bare)):
        _log.warning(
            "%d of the %d documents are copies of others; as they are not divided by document, what is held out may be "
            "trained on as well: leave the copies out",
            *(n_copies, corpus.n_documents),
        )
    return Division(corpus, "block", None, streamed)


def _n_held_out_whole(corpus: Corpus) -> int:
    """Sources of which nothing lies in the blocks that are trained on, as ``by_block`` divides them."""
    begin = corpus.bounds[:, 0] >= (1 - sum(TENTHS.values())) * len(corpus.tokens)
    return len(np.setdiff1d(corpus.sources, corpus.sources[~begin]))


def _of_sources(corpus: Corpus, splits: Sequence[str], split: str) -> NDArray[np.int64]:
    """The documents of the sources that are of a split."""
    return np.flatnonzero(np.isin(corpus.sources, [number for number, name in enumerate(splits) if name == split]))


def _by_kind(
    corpus: Corpus, documents: NDArray[np.int64], wanted: Sequence[str], share: float | None
) -> tuple[dict[str, NDArray[np.int64]] | None, str, bool]:
    """Chats and texts divided as ``_by_document`` does, each for themselves, so that both are held out: chats are
    counted and texts measured, and among long texts hardly a chat would be. Where one kind cannot be divided, it is
    trained on."""
    is_chat = corpus.is_chat[documents]
    kinds = {"conversations": documents[is_chat], "texts": documents[~is_chat]}
    kinds = {kind: own for kind, own in kinds.items() if len(own)} or {"texts": documents}
    divided = {kind: _by_document(corpus, own, wanted, share) for kind, own in kinds.items()}
    if all(parts is None for parts, _, _ in divided.values()):
        return [*divided.values()][-1]
    found = dict.fromkeys(("train", *wanted), documents[:0])
    for kind, (parts, reason, _) in divided.items():
        if parts is None:
            _log.warning("all %s are trained on, and none is held out: %s", kind, reason)
        for name, part in (parts or {"train": kinds[kind]}).items():
            found[name] = np.union1d(found[name], part)
    return found, "", all(by_question for parts, _, by_question in divided.values() if parts)


def _by_document(
    corpus: Corpus, documents: NDArray[np.int64], wanted: Sequence[str], share: float | None
) -> tuple[dict[str, NDArray[np.int64]] | None, str, bool]:
    """Documents of one kind divided as ``assign`` does, and whether those that ask the same are together, as where that
    can be.

    Of chats each counts as one, however long, and copies of it not at all: held out, they are left out.
    """
    chats, unanswered = bool(corpus.is_chat[documents].all()), documents[:0]
    if chats:
        answered = np.diff(taught(corpus.targets, corpus.bounds_of(documents)))[:, 0] > 0
        answered |= not answered.any()  # where none is, the split for training is refused
        unanswered, documents = documents[~answered], documents[answered]  # held out, those would measure nothing
    firsts = documents[np.unique(corpus.bare[documents], return_index=True)[1]]
    sizes = np.isin(documents, firsts).astype(np.uint64) if chats else corpus.characters[documents]

    def divided(known: NDArray[np.uint64]) -> tuple[dict[str, NDArray[np.int64]] | None, str]:
        each = usual_share(chats, len(np.unique(known[documents]))) if share is None else share / len(wanted)
        shares, least = dict.fromkeys(wanted, each), MIN_DOCUMENTS if share is None else 2
        return assign(corpus.places[documents], sizes, known[documents], shares, least)

    owners = np.unique(corpus.question[documents], return_inverse=True)[1]
    alike = np.bincount(owners, sizes)[owners]  # chats that begin as each does
    crowded = chats and 2 * sizes[alike > max(1, CROWD * len(firsts))].sum() > len(firsts)
    parts, reason = (None, "") if crowded else divided(corpus.question)  # of texts the same as ``bare``
    by_question = parts is not None
    if not by_question:
        parts, reason = divided(corpus.bare)
        if parts is not None:
            _log.warning("most chats begin with the same questions: one held out may be trained on with another answer")
    if parts is None:
        return None, reason, False
    found = {name: documents[part] for name, part in parts.items()}
    if chats:
        found |= {name: np.intersect1d(found[name], firsts) for name in wanted}
    found["train"] = np.union1d(found["train"], unanswered)
    return found, "", by_question


def usual_share(chats: bool, n: int) -> float:
    """The share of ``n`` different documents that is held out for validation, and again for test, where nobody says how
    much.

    A tenth of text, which says most things more than once. Of conversations a twentieth, for what is held out is often
    a fact that is never learned; of few up to a tenth, so that there are three of each, and of many 500 of each.
    """
    return min(0.1, max(0.05, 3 / n), 500 / n) if chats and n else 0.1


def _not_in(
    digests: NDArray[np.uint64], name: str, documents: NDArray[np.int64], others: NDArray[np.int64], who: str
) -> NDArray[np.int64]:
    """The documents of a split whose text none of the others has."""
    copied = np.isin(digests[documents], digests[others])
    if copied.any() and copied.all():
        raise UserError(
            f"--data-dir: every document of the {name} split is one that {who} too; give it others, or the training "
            "split alone, which is then divided"
        )
    if copied.any():
        _log.warning("%s: documents that %s too, left out: %d", name, who, np.count_nonzero(copied))
    return documents[~copied]


def assign(
    places: NDArray[np.uint64],
    characters: NDArray[np.uint64],
    texts: NDArray[np.uint64],
    shares: Mapping[str, float] = TENTHS,
    least: int = MIN_DOCUMENTS,
) -> tuple[dict[str, NDArray[np.int64]] | None, str]:
    """Divide documents by their sizes: shares of them are held out.

    Copies of a text count as one, so all fall on one side. Texts are taken in the order of their places, copies at the
    first of theirs; one that fits into what the part that lacks most still lacks goes there, any other to training. A
    text's side thus depends on the texts and not on their order or names. Where most texts would be held out so, as
    notes among books would fill every gap, a part that is half full and too small for a long text takes no more.

    Args:
        places: of the documents' texts in the seeded order, (documents,).
        characters: of the same texts, or 1 each where all count alike.
        texts: numbers that copies have in common.
        shares: of their sum, by the name of each part that is held out.
        least: different documents that there must be.

    Returns:
        The numbers of the documents of each part, rising. None, and why, where the documents cannot be divided: too
        few, one with more than half of the characters, or lengths of which no such shares can be put together.
    """
    different, owners = np.unique(texts, return_inverse=True)
    sizes = np.bincount(owners, characters, len(different)).astype(np.int64)  # of the copies of a text together
    firsts = np.full(len(different), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(firsts, owners, places)
    total, longest = int(sizes.sum()), int(sizes.max(initial=0))
    names = ("train", *shares)
    wanted = {side: int(total * share + 1e-9) for side, share in enumerate(shares.values(), start=1)}
    in_order = np.argsort(firsts)
    sides, lacking = _filled(sizes, in_order, wanted)
    if 2 * np.count_nonzero(sides) > len(sides):
        sides, lacking = _filled(sizes, in_order, wanted, long=LONG)
    if len(different) < least:
        return None, f"the text has {counted(len(different), 'different document')}, fewer than {least}"
    if 0 in wanted.values():
        return (
            None,
            f"{per_cent(min(shares.values()))} of {counted(len(different), 'different document')} is less than one",
        )
    if 2 * longest > total:
        return None, f"one document holds {longest / total:.0%} of the characters"
    if any(lacking[side] > wanted[side] // 2 for side in wanted):
        much = per_cent(max(shares.values()))
        return None, f"the documents are too few and too uneven in length to set {much} of the text apart"
    return {name: np.flatnonzero(sides[owners] == side) for side, name in enumerate(names)}, ""


def _filled(
    sizes: NDArray[np.int64], in_order: NDArray[np.int64], wanted: Mapping[int, int], long: float = math.inf
) -> tuple[NDArray[np.int8], dict[int, int]]:
    """The part of each text, 0 that for training, and what the others lack then.

    Args:
        sizes: of the texts.
        in_order: their numbers.
        wanted: the size of each part.
        long: share of a part from which on a text that does not fit closes it, where it is half full.
    """
    sides, lacking, is_open = np.zeros(len(sizes), np.int8), dict(wanted), set(wanted)
    for number in in_order:
        if not is_open:
            break
        size = int(sizes[number])
        neediest = max(sorted(is_open), key=lambda side: lacking[side])  # the first of equals
        if size <= lacking[neediest]:
            sides[number] = neediest
            lacking[neediest] -= size
        elif lacking[neediest] <= wanted[neediest] // 2 and size > long * wanted[neediest]:
            is_open.remove(neediest)
    return sides, lacking


def by_block(n_blocks: int, each: float = 0.1) -> dict[str, range]:
    """Divide consecutive blocks: the first for training, then a share each for validation and test, with a block left
    out before each of the two, so that no held-out text continues text just before it. Needs ``min_blocks``.
    """
    assert n_blocks >= min_blocks(each), n_blocks
    held_out = int((n_blocks - 2) * each)
    validation = n_blocks - 1 - 2 * held_out  # training is a block shorter: the gap
    test = n_blocks - held_out
    parts = range(validation - 1), range(validation, validation + held_out), range(test, n_blocks)
    return dict(zip(SPLITS, parts, strict=True))


def min_blocks(each: float = 0.1) -> int:
    """Blocks below which ``by_block`` has nothing to hold out: such a share of the rest is less than one."""
    return 2 + math.ceil(1 / each)
