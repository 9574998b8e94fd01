"""What scores come to, and how they differ."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from granite_scu.evaluation import statistics
from granite_scu.evaluation.bpt.windows import ScoringCorpus
from granite_scu.evaluation.statistics import MIN_UNITS, Estimate
from granite_scu.model.description_length import bits

SCHEMA = 1


def units(corpus: ScoringCorpus) -> str | None:
    """What the bootstrap draws: documents, or where those are too few for it the windows in them; None of too few."""
    counts = {"documents": len(corpus.documents), "windows": np.count_nonzero(corpus.window_tokens)}
    return next((name for name, count in counts.items() if count >= MIN_UNITS), None)


def difference(corpus: ScoringCorpus, arm: str, reference: str) -> Estimate:
    """Bits per token that one model costs more than another, with its interval."""
    if units(corpus) == "documents":
        both = corpus.document_nats(arm), corpus.document_nats(reference)
        return statistics.difference_over_documents(*both, corpus.document_tokens)
    some = corpus.window_tokens > 0  # in a window of a conversation perhaps only the user speaks
    of_windows = corpus.nats[arm], corpus.nats[reference], corpus.window_tokens
    return statistics.difference_over_documents(*(each[some] for each in of_windows))


def _totals(corpus: ScoringCorpus, name: str) -> dict[str, float]:
    """Token-weighted: sums divided once."""
    nats = math.fsum(corpus.nats[name])
    per_token = nats / corpus.n_tokens
    return {
        "bits_per_token": bits(per_token),
        "bits_per_byte": bits(nats / int(corpus.n_bytes.sum())),
        "perplexity": math.exp(per_token) if per_token < 700 else math.inf,
    }


def _counts(corpus: ScoringCorpus) -> dict[str, Any]:
    return {
        "data": corpus.name,
        "documents": len(corpus.documents),
        "tokens": corpus.n_tokens,
        "bytes": int(corpus.n_bytes.sum()),
        "excluded_documents": corpus.excluded,
        "units": units(corpus),
    }


def _pair(corpus: ScoringCorpus, reference: str, arm: str) -> dict[str, Any]:
    """The difference ``arm`` - ``reference`` for JSON, with the verdict."""
    found = difference(corpus, arm, reference)
    better = int((corpus.document_nats(arm) < corpus.document_nats(reference)).sum())
    return {
        "a": reference,
        "b": arm,
        "difference_bits_per_token": found.mean,
        "low": None if math.isnan(found.low) else found.low,
        "high": None if math.isnan(found.high) else found.high,
        "confidence": statistics.LEVEL,
        "documents_better": better,
        "verdict": verdict(arm, reference, found),
    }


def verdict(arm: str, reference: str, found: Estimate) -> str:
    """One sentence on a difference, in which what an arm gains and its interval count upwards.

    >>> verdict("run", "base", Estimate(-0.4755, -0.5336, -0.4278))
    'run is better than base by 0.4755 bits/token (nominal 95 % interval 0.4278 to 0.5336)'
    >>> verdict("run", "base", Estimate(0.02, 0.01, 0.05))
    'run is worse than base by 0.0200 bits/token (nominal 95 % interval +0.0100 to +0.0500)'
    >>> verdict("run", "base", Estimate(0.31, -0.3, 0.9)).partition("; ")[2]
    'texts that differ so much show differences from about 0.6 bits/token on'
    >>> verdict("run", "base", Estimate(0.02, math.nan, math.nan))
    'no difference shown between run and base (+0.0200 bits/token, too few documents for an interval)'
    """
    interval = f"nominal 95 % interval {found.low:+.4f} to {found.high:+.4f}"
    if found.differs and found.mean < 0:
        interval = f"nominal 95 % interval {-found.high:.4f} to {-found.low:.4f}"
        return f"{arm} is better than {reference} by {-found.mean:.4f} bits/token ({interval})"
    if found.differs:
        return f"{arm} is worse than {reference} by {found.mean:.4f} bits/token ({interval})"
    none = f"no difference shown between {arm} and {reference} ({found.mean:+.4f} bits/token, "
    if math.isnan(found.low):
        return f"{none}too few documents for an interval)"
    least = (found.high - found.low) / 2
    return f"{none}{interval}); texts that differ so much show differences from about {least:.2g} bits/token on"


def report(
    corpus: ScoringCorpus, models: Sequence[dict[str, Any]], forgetting: ScoringCorpus | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was found, for JSON.

    Args:
        corpus: with the scores on it.
        models: ``name``, ``adapter`` and ``base`` of each, in order; differences are the later minus the earlier.
        forgetting: the second corpus.
        settings: how it was measured.
    """
    names = [model["name"] for model in models]

    def forgotten(name: str) -> dict[str, Any] | None:
        if forgetting is None:
            return None
        against = _pair(forgetting, names[0], name) if name != names[0] else None
        return {**_counts(forgetting), **_totals(forgetting, name), "against": against}

    return {
        "schema": SCHEMA,
        **_counts(corpus),
        **settings,
        "models": [
            {**model, **_totals(corpus, model["name"]), "forgetting": forgotten(model["name"])} for model in models
        ],
        "pairs": [_pair(corpus, a, b) for a, b in combinations(names, 2)],
    }


def by_document(corpus: ScoringCorpus) -> list[dict[str, Any]]:
    """A row for each document and model, for CSV."""
    nats = {name: corpus.document_nats(name) for name in corpus.nats}
    texts = zip(corpus.documents, corpus.document_tokens, corpus.n_bytes, strict=True)
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
        for number, (document, tokens, size) in enumerate(texts)
        for name in nats
    ]
