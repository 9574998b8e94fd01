"""After the score: what base model and adapter answer, or how they continue texts, and what else has changed."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning as L
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from granite_scu.config.progress import tracked
from granite_scu.data.datamodule import TextDataModule
from granite_scu.evaluation import answers, elsewhere
from granite_scu.evaluation.bpt import texts
from granite_scu.evaluation.samples import SAMPLING, openings, sample
from granite_scu.model.adapters import Switch
from granite_scu.model.compilation import evaluation_mode
from granite_scu.storage.run_folder import ANSWERS, ELSEWHERE, METRICS, SAMPLES, RunFolder
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.module import GraniteModule

log = logging.getLogger(__name__)

MAX_SECONDS = 2 * answers.SECONDS
"""For the answers of both models to held-out questions, and as many for those to general ones."""

MAX_TEXTS = 2
"""Test documents that are continued: whoever reads the report reads no more."""


class Samples(L.Callback):
    """Writes ``answers.json`` (of texts ``samples.json``) and ``elsewhere.json``. Comes after ``FinalScore``.

    One process does it, the others wait at the end of the run: none has a part in another's forward pass, as long as
    the weights are not in shares. All is at temperature 0: no random number is drawn.

    Args:
        folder: the run folder.
        console: for the progress.
        tokenizer: of the base model.
        count: questions of each kind.
        final: has the summary of the run, to which the figures are added.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        tokenizer: PreTrainedTokenizerBase,
        count: int,
        final: FinalScore,
    ) -> None:
        self.folder, self.console, self.tokenizer, self.count = folder, console, tokenizer, count
        self.final = final

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if not trainer.is_global_zero:
            return
        parts: dict[str, Callable[[], None]] = {
            "samples": partial(self._held_out, trainer.datamodule, module),
            "general answers": partial(self._elsewhere, module),
        }
        for what, part in parts.items():
            try:
                with trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
                    part()
            except Exception as error:  # all is trained and scored, and must not be lost for some texts
                log.warning("the report has no %s: %s", what, " ".join(f"{type(error).__name__}: {error}".split()))

    def _held_out(self, data: TextDataModule, module: GraniteModule) -> None:
        """Answers to the questions of held-out chats; where there are none, continuations of held-out texts."""
        questions = answers.answerable(held_out_questions(data, self.tokenizer, self.count, self.folder))
        if not questions:
            self._continue(data, module)
            return
        shown = partial(tracked, phase="answering held-out questions", console=self.console)
        model, switches = module.language_model, {"base": module.model.disable_adapter, "adapter": nullcontext}
        found = answers.ask(model, self.tokenizer, questions, switches, seconds=MAX_SECONDS, shown=shown)
        records = answers.scored(questions, found, self.tokenizer)
        how = {"asked": len(questions), "temperature": 0.0, "seed": data.seed, "seconds_at_most": MAX_SECONDS}
        self.folder.write_json(ANSWERS, {**how, "answers": records})
        self._add("answers", answers.summary(records, len(questions)))

    def _continue(self, data: TextDataModule, module: GraniteModule) -> None:
        if beginnings := openings(data.test, min(self.count, MAX_TEXTS)):
            log.info("writing samples for the report")
            samples = sample(module.language_model, self.tokenizer, beginnings, module.model.disable_adapter)
            self.folder.write_json(SAMPLES, {**asdict(SAMPLING), "samples": samples})

    def _elsewhere(self, module: GraniteModule) -> None:
        shown = partial(tracked, phase="asking general questions", console=self.console)
        before: dict[str, Switch] = {"base model": module.model.disable_adapter}
        if module.start:  # what was lost before this run, it has not lost
            before = {"adapter at the start": module.at_start}
        model, switches = module.language_model, {**before, "adapter": nullcontext}
        tried = elsewhere.ask_general(model, self.tokenizer, switches, self.count, seconds=MAX_SECONDS, shown=shown)
        if not tried.questions:
            return
        self.folder.write_json(ELSEWHERE, {"questions": elsewhere.records(tried, *switches)})
        figures = elsewhere.summary(tried, *switches)
        self._add("elsewhere", figures)
        if figures["drift"] and "drift" not in self.final.summary:  # with a budget it is that on general text
            none = dict.fromkeys(("budget", "lambda", "bound", "within"))
            self._add("drift", {**none, **figures["drift"], "source": "general questions"})

    def _add(self, name: str, figures: dict[str, Any]) -> None:
        self.final.summary[name] = figures
        self.folder.write_json(METRICS, self.final.summary)


def held_out_questions(
    data: TextDataModule, tokenizer: PreTrainedTokenizerBase, count: int, folder: RunFolder
) -> list[answers.Question]:
    """A sample of the last questions of the test split's chats, of which ``folder`` has the record."""
    if not data.chats:
        return []
    if data.config.loss_on == "all":  # no token of the stream says where an answer begins: the chats are read again
        found = texts.held_out(folder.path, [])
        documents = [] if found.tail_of else found.documents  # divided by block, most of them are trained on
        return answers.questions_in(documents, data.config.control_tokens, tokenizer, count, data.seed)
    documents = answers.beginning_in(data.test)
    return answers.questions_of(data.test.stream, tokenizer, documents, count, data.seed)
