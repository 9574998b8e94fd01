"""Scores, what they come to, and how they differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granite_scu.evaluation import statistics
from granite_scu.evaluation.bpt.windows import ScoringCorpus, ScoringWindow
from granite_scu.evaluation.statistics import LEAST_UNITS, Estimate
from granite_scu.model.description_length import bits

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class WindowScores:
    """What models scored on a corpus.

    Attributes:
        corpus: the texts.
        windows: that they were scored in.
        excluded: documents left out beforehand because a run had seen them.
        nats: summed cross-entropy of each window by the model's name, (windows,) each, as they come in.
    """

    corpus: ScoringCorpus
    windows: Sequence[ScoringWindow]
    excluded: int = 0
    nats: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return int(self.corpus.n_tokens.sum())

    def by_document(self, name: str) -> NDArray[np.float64]:
        """Nats that each document costs a model, (documents,)."""
        owners = np.array([window.document for window in self.windows])
        return np.bincount(owners, self.nats[name], len(self.corpus.documents))

    @property
    def units(self) -> str:
        """What the bootstrap draws: documents, or where those are too few for it the windows in them."""
        return "documents" if len(self.corpus.documents) >= LEAST_UNITS else "windows"

    def difference(self, arm: str, reference: str) -> Estimate:
        """Bits per token that one model costs more than another, with its interval."""
        if self.units == "documents":
            both = self.by_document(arm), self.by_document(reference)
            return statistics.difference_over_documents(*both, self.corpus.n_tokens)
        counts = np.array([self.corpus.counted(window) for window in self.windows], np.int64)
        some = counts > 0  # in a window of a conversation perhaps only the user speaks
        return statistics.difference_over_documents(self.nats[arm][some], self.nats[reference][some], counts[some])

    def totals(self, name: str) -> dict[str, float]:
        """Token-weighted: sums divided once."""
        nats = math.fsum(self.nats[name])
        per_token = nats / self.n_tokens
        return {
            "bits_per_token": bits(per_token),
            "bits_per_byte": bits(nats / int(self.corpus.n_bytes.sum())),
            "perplexity": math.exp(per_token) if per_token < 700 else math.inf,
        }

    def counts(self) -> dict[str, Any]:
        return {
            "data": self.corpus.name,
            "documents": len(self.corpus.documents),
            "tokens": self.n_tokens,
            "bytes": int(self.corpus.n_bytes.sum()),
            "excluded_documents": self.excluded,
            "units": self.units,
        }

    def pair(self, reference: str, arm: str) -> dict[str, Any]:
        """The difference ``arm`` - ``reference`` for JSON, with the verdict."""
        found = self.difference(arm, reference)
        better = int((self.by_document(arm) < self.by_document(reference)).sum())
        return {
            "a": reference,
            "b": arm,
            "difference_bits_per_token": found.mean,
            "low": None if math.isnan(found.low) else found.low,
            "high": None if math.isnan(found.high) else found.high,
            "confidence": statistics.LEVEL,
            "documents_better": better,
            "verdict": statistics.verdict(arm, reference, found),
        }


def report(
    scores: WindowScores, models: Sequence[dict[str, Any]], forgetting: WindowScores | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was found, for JSON.

    Args:
        scores: on the corpus.
        models: ``name``, ``adapter`` and ``base`` of each, in order; differences are the later minus the earlier.
        forgetting: scores on the second corpus.
        settings: how it was measured.
    """
    names = [model["name"] for model in models]
    first = names[0]

    def forgotten(name: str) -> dict[str, Any] | None:
        if forgetting is None:
            return None
        against = forgetting.pair(first, name) if name != first else None
        return {**forgetting.counts(), **forgetting.totals(name), "against": against}

    return {
        "schema": SCHEMA,
        **scores.counts(),
        **settings,
        "models": [
            {**model, **scores.totals(model["name"]), "forgetting": forgotten(model["name"])} for model in models
        ],
        "pairs": [scores.pair(a, b) for a, b in combinations(names, 2)],
    }


def by_document(scores: WindowScores) -> list[dict[str, Any]]:
    """A row for each document and model, for CSV."""
    corpus = scores.corpus
    nats = {name: scores.by_document(name) for name in scores.nats}
    return [
        {
            "data": corpus.name,
            "document": document,
            "model": name,
            "tokens": int(tokens),
            "bytes": int(size),
            "bits": bits(nats[name][number]),
            "bits_per_token": bits(nats[name][number] / tokens),
            "bits_per_byte": bits(nats[name][number] / size) if size else None,
        }
        for number, (document, tokens, size) in enumerate(
            zip(corpus.documents, corpus.n_tokens, corpus.n_bytes, strict=True)
        )
        for name in nats
    ]
