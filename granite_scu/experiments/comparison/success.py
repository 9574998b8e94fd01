"""What a protocol called success before its first run, and what came of it."""

from typing import Any

from granite_scu.experiments.comparison.protocol import Protocol

MEAN, WORST = 0.002, 0.01
"""What the judged arm may end above each task's swept best lambda: on average, and on the worst task."""

EARLY_STOPPING = "early-stopping"


def success(protocol: Protocol, overview: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The criteria of ``docs/research/protocol.md``; none where the protocol judges no arm, or has not all tasks yet.

    Returns:
        Of each criterion ``asked``, in words, ``found``, a ratio of bits per token minus 1, and whether it is ``met``.
    """
    lines = {line["name"]: line for line in overview if len(line["excess"]) == len(protocol.tasks)}
    judged, rival = lines.get(protocol.judged), lines.get(EARLY_STOPPING)
    if judged is None or rival is None:
        return []
    name = protocol.judged
    of_rival = (1 + judged["mean"]) / (1 + rival["mean"]) - 1
    return [
        _criterion(f"{name} at most {MEAN:.1%} above the swept best λ, on average", judged["mean"], MEAN),
        _criterion(f"{name} at most {WORST:.0%} above it on every task; the worst", judged["worst"], WORST),
        _criterion(f"{name} below {EARLY_STOPPING}, on average", of_rival, 0.0),
    ]


def _criterion(asked: str, found: float, most: float) -> dict[str, Any]:
    return {"asked": asked, "found": found, "met": found <= most}
