"""How far the adapters that are scored have drifted from their base, on the general text that their runs have kept."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED
from granite_scu.data.blocks.packing import padding_of
from granite_scu.evaluation import general_text
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.model import kl_divergence
from granite_scu.model.adapters import Switch
from granite_scu.model.description_length import bits
from granite_scu.model.loss import summed_nats
from granite_scu.storage.run_folder import GENERAL, METRICS, TRAINING_CONFIG, read_json

_AT_ONCE = 2048
"""Positions of a batch."""


class Drifts:
    """Drift of the adapters of runs, each on what its run kept and its loop never saw.

    Args:
        subjects: what is scored. A run that started from an adapter is left out: it drifted from that.
        tokenizer: of the models.

    Attributes:
        found: ``share``, ``bpt``, ``base_bpt``, ``tokens``, ``budget`` and ``within`` by the names of the adapters.
    """

    def __init__(self, subjects: Sequence[Subject], tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.runs = {each.name: each.run for each in subjects if each.kind == "adapter" and _keeps_text(each.run)}
        self.found: dict[str, dict[str, Any]] = {}

    def measure(
        self,
        model: PreTrainedModel,
        base: Switch,
        switches: Mapping[str, Switch],
        autocast: Callable[[], AbstractContextManager],
        console: Console,
    ) -> None:
        """Take the drift of those of the adapters that are of such a run."""
        for name in self.runs.keys() & switches.keys():
            run = self.runs[name]
            assert run
            try:
                text = general_text.read(run / GENERAL, self.tokenizer, len(model.get_input_embeddings().weight))
            except UserError as error:
                console.print(f"{name}: drift is not measured: {error}", highlight=False, markup=False)
                continue
            batches = general_text.batches(text.parts().held_out, _AT_ONCE, padding_of(self.tokenizer))
            with torch.no_grad(), autocast():
                found = drift_between(model, base, switches[name], batches)
            metrics = read_json(run / METRICS) if (run / METRICS).is_file() else {}
            self.found[name] = found | {key: metrics.get("drift", {}).get(key) for key in ("budget", "within")}


def drift_between(
    model: PreTrainedModel, base: Switch, now: Switch, batches: Sequence[dict[str, Tensor]]
) -> dict[str, float]:
    """KL(base || now) and what the base itself needs, bits per counted token; ``share`` is their ratio.

    Args:
        model: without gradients and dropout.
        base, now: the contexts in which it is either.
        batches: of ``input_ids`` and shifted ``labels``.
    """
    plain = kl_divergence.has_plain_head(model, batches[0]["input_ids"][:1].to(model.device))
    kl = cost = 0.0
    tokens = 0
    for batch in ({name: part.to(model.device) for name, part in batch.items()} for batch in batches):
        positions = (batch["labels"] != IGNORED).flatten().nonzero().squeeze(1)
        tokens += len(positions)
        with base():
            cost += float(summed_nats(model, **batch))
            before = kl_divergence.states(model, batch["input_ids"], positions, plain)
        with now():
            after = kl_divergence.states(model, batch["input_ids"], positions, plain)
        kl += float(kl_divergence.drift_of(model, before, after, plain))
    return {"share": kl / cost, "bpt": bits(kl / tokens), "base_bpt": bits(cost / tokens), "tokens": tokens}


def _keeps_text(run: Path | None) -> bool:
    return bool(run and (run / GENERAL).is_file() and not read_json(run / TRAINING_CONFIG).get("start"))
