"""What else the models that are scored are asked: questions of the chats and general ones, and how far their adapters
have drifted from the base on the general text that their runs have kept."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.progress import tracked
from granite_scu.evaluation import answers, elsewhere, general_text
from granite_scu.evaluation.answer_score import RULE, wilson
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.evaluation.bpt.texts import Texts
from granite_scu.model.adapters import Switch
from granite_scu.model.drift import MARGIN, READ_AT_ONCE, Drift, GeneralPart, Trained
from granite_scu.storage.run_folder import GENERAL, TRAINING_CONFIG, read_json

log = logging.getLogger(__name__)


class AnswerScoring:
    """Questions, and what each model says to them.

    Args:
        text: a sample of its chats is asked; of other texts only general questions are.
        tokenizer: of the models.
        count: questions of each kind; 0 asks none.
    """

    def __init__(self, text: Texts, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
        self.tokenizer, self.count = tokenizer, count
        self.answers: dict[str, list[list[int]]] = {}
        self.tried: dict[str, elsewhere.GeneralAnswers] = {}
        self.questions: list[answers.Question] = []
        try:
            found = answers.questions_in(text.documents, text.special_tokens, tokenizer, count)
            self.questions = answers.answerable(found)
        except UserError as error:
            if text.loss_on != "all":
                raise
            # Of a template that tells no answer from the rest all is scored, and nothing can be asked.
            log.warning("no question of the text is asked: %s", error)

    def ask(
        self,
        model: PreTrainedModel,
        switches: Mapping[str, Switch],
        autocast: Callable[[], AbstractContextManager],
        console: Console,
    ) -> None:
        """Ask a model, and what it can be switched to, all questions however long they take.

        What fails costs a warning: all has been scored by now.
        """
        if not self.count:
            return
        try:
            with autocast():
                shown = partial(tracked, phase="answering the questions of the text", console=console)
                self.answers |= answers.ask(model, self.tokenizer, self.questions, switches, shown=shown)
                shown = partial(tracked, phase="asking general questions", console=console)
                found = elsewhere.ask_general(model, self.tokenizer, switches, self.count, shown=shown)
            self.tried |= dict.fromkeys(switches, found)
        except Exception as error:
            who = ", ".join(switches)
            log.warning("%s: not asked: %s", who, " ".join(f"{type(error).__name__}: {error}".split()))

    def found(self, names: Sequence[str]) -> dict[str, Any]:
        """For the JSON: ``answers`` and ``elsewhere``, of each model by its name, and each question with all answers.

        What is ``elsewhere`` is what changed from the first model; the first is compared with itself.
        """
        first, general = names[0], {}
        for name in names if all(name in self.tried and self.tried[name].questions for name in names) else ():
            both = elsewhere.together(self.tried[first], self.tried[name], first, name)
            general[name] = elsewhere.summary(both, first, name) | {"records": elsewhere.records(both, first, name)}
        found: dict[str, Any] = {"elsewhere": general} if general else {}
        if self.questions and all(name in self.answers for name in names):
            records = answers.scored(self.questions, self.answers, self.tokenizer)
            models: dict[str, Any] = {name: answers.figures(records, name) for name in names}
            for each in models.values():
                each["interval"] = list(wilson(each["right"], len(records)))
            counts = {"n": len(records), "asked": len(self.questions), "rule": RULE}
            found["answers"] = {**counts, "models": models, "records": records}
        return found


class DriftScoring:
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
                file, rows = run / GENERAL, len(model.get_input_embeddings().weight)
                text = general_text.read(file, self.tokenizer, rows).check(str(file), "copy it again")
                padding = answers.padding_for(model, self.tokenizer)
                batches = general_text.batches(text.parts().held_out, READ_AT_ONCE, padding)
                moved = drift_between(model, base, switches[name], batches, autocast)
            except Exception as error:  # as of the questions
                console.print(f"{name}: drift is not measured: {error}", highlight=False, markup=False)
                continue
            self.found[name] = beside(moved, read_json(run / TRAINING_CONFIG).get("drift", {}).get("max_drift"))


def beside(moved: Drift, budget: float | None) -> dict[str, Any]:
    """Drift as the JSON has it, beside the budget of its run, if any."""
    within = None if budget is None else moved.share <= MARGIN * budget
    return elsewhere.drift_record(moved) | {"budget": budget, "within": within}


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
