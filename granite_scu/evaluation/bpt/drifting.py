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
from granite_scu.data.blocks.packing import padding_of
from granite_scu.evaluation import general_text
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.model.adapters import Switch
from granite_scu.model.drift import READ_AT_ONCE, Drift, GeneralPart, Trained
from granite_scu.storage.run_folder import GENERAL, METRICS, TRAINING_CONFIG, read_if_there, read_json


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
            batches = general_text.batches(text.parts().held_out, READ_AT_ONCE, padding_of(self.tokenizer))
            moved = drift_between(model, base, switches[name], batches, autocast)
            found = moved._asdict() | {"share": moved.share}
            metrics = read_if_there(run / METRICS)
            self.found[name] = found | {key: metrics.get("drift", {}).get(key) for key in ("budget", "within")}


def drift_between(
    model: PreTrainedModel,
    base: Switch,
    now: Switch,
    batches: Sequence[dict[str, Tensor]],
    autocast: Callable[[], AbstractContextManager],
) -> Drift:
    """Drift from what the model is in one context to what it is in the other, as a run measures it.

    Args:
        model: of transformers.
        base, now: the contexts; the first is entered within the second.
        batches: of ``input_ids`` and shifted ``labels``.
        autocast: of the forward passes.
    """
    embedding = model.get_input_embeddings().weight
    trained = Trained(model, (embedding,), base, autocast, lambda total: total, (0, 1), lambda: torch.ones(()))
    with now():
        return GeneralPart(trained, batches).read()


def _keeps_text(run: Path | None) -> bool:
    return bool(run and (run / GENERAL).is_file() and not read_json(run / TRAINING_CONFIG).get("start"))
