"""After the score: what base model and adapter answer, or how they continue texts, and what else has changed."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import lightning as L
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.progress import tracked
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.datamodule import TextDataModule
from granite_scu.evaluation import answers, elsewhere
from granite_scu.evaluation.answers import Question, batches_of, ends_of, greedy, max_answer_tokens
from granite_scu.evaluation.bpt import texts
from granite_scu.evaluation.samples import SAMPLING, openings, sample
from granite_scu.model.adapters import Switch
from granite_scu.model.compilation import evaluation_mode
from granite_scu.storage.run_folder import ANSWERS, ELSEWHERE, METRICS, SAMPLES, RunFolder
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.callbacks.progress import ProgressLine
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

    After the first validation a few answers are timed, so that the time that is left has the questions in it.

    Args:
        folder: the run folder.
        console: for the progress.
        tokenizer: of the base model.
        count: questions of each kind.
        final: has the summary of the run, to which the figures are added.
        line: shows the time that is left.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        tokenizer: PreTrainedTokenizerBase,
        count: int,
        final: FinalScore,
        line: ProgressLine,
    ) -> None:
        self.folder, self.console, self.tokenizer, self.count = folder, console, tokenizer, count
        self.final, self.line = final, line
        self._questions: list[answers.Question] | None = None
        self._timed = False

    def on_validation_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if self._timed or not trainer.is_global_zero or trainer.global_step >= trainer.max_steps:
            return
        self._timed = True
        self.final.stopwatch.stop()
        began = time.monotonic()
        try:
            with trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
                seconds = self._seconds(trainer.datamodule, module)
        except Exception as error:  # no estimate is worth a run
            log.warning("the questions at the end are not in the time that is left: %s", error)
            seconds = 0.0
        self.line.expect(seconds, aside=time.monotonic() - began)
        self.final.stopwatch.start()

    def _seconds(self, data: TextDataModule, module: GraniteModule) -> float:
        """Of all that is asked at the end, by the base's answers to the first general questions, and a few tokens."""
        model, tokenizer, base = module.language_model, self.tokenizer, module.model.disable_adapter
        held_out = self._held_out_questions(data)
        began = time.monotonic()
        first_ones = min(self.count, answers.BATCH)
        tried = elsewhere.ask_general(model, tokenizer, {"base": base}, first_ones, seconds=answers.SECONDS)
        of_batch = time.monotonic() - began
        _, general, _ = elsewhere.as_asked(elsewhere.general_questions()[: self.count], tokenizer)
        batches = len(list(answers.batches_of(general))) if tried.knows("base") else 1
        with base():
            pace = pace_of(model, tokenizer, held_out or general)
        first = 2 * pace.step * SAMPLING.max_new_tokens * min(self.count, MAX_TEXTS)
        if held_out:
            first = sum(seconds_of(held_out, pace, learned) for learned in (False, True))
        return min(first, MAX_SECONDS) + min(2 * batches * of_batch, MAX_SECONDS)

    def _held_out_questions(self, data: TextDataModule) -> list[answers.Question]:
        if self._questions is None:
            self._questions = held_out_questions(data, self.tokenizer, self.count, self.folder)
        return self._questions

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
        questions = self._held_out_questions(data)
        if not questions:
            self._continue(data, module)
            return
        shown = partial(tracked, phase="answering held-out questions", console=self.console)
        model, switches = module.language_model, {"base": module.model.disable_adapter, "adapter": nullcontext}
        found = answers.ask(model, self.tokenizer, questions, switches, seconds=MAX_SECONDS, shown=shown)
        records = answers.scored(questions, found)
        how = {"asked": len(questions), "temperature": 0.0, "seed": data.seed, "seconds_at_most": MAX_SECONDS}
        self.folder.write_json(ANSWERS, {**how, "answers": records})
        self._add("answers", answers.summary(records, len(questions)))

    def _continue(self, data: TextDataModule, module: GraniteModule) -> None:
        if beginnings := openings(data.test, min(self.count, MAX_TEXTS)):
            log.info("writing samples for the report")
            samples = sample(module.language_model, self.tokenizer, beginnings, module.model.disable_adapter)
            self.folder.write_json(SAMPLES, {**asdict(SAMPLING), "samples": [asdict(each) for each in samples]})

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
        documents = texts.held_out(folder.path, []).documents
        return answers.questions_in(documents, data.config.control_tokens, tokenizer, count, data.seed)
    documents = answers.beginning_in(data.test)
    return answers.questions_of(data.test.stream, tokenizer, documents, count, data.seed)


STEPS = 6
"""Tokens that are timed."""


@dataclass(frozen=True)
class AnsweringPace:
    """Seconds.

    Attributes:
        prompt: for a token of a batch's prompts, padding among them.
        step: for the next token of all answers of a batch.
    """

    prompt: float
    step: float


def pace_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> AnsweringPace:
    """Time the first tokens of a batch's answers.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        questions: at least one.
    """
    batch = next(batches_of(questions))
    prompts, ends, took = [question.tokens for question in batch], ends_of(model, tokenizer, batch), []
    for most in (1, 1 + STEPS):
        began = time.monotonic()
        answers = greedy(model, prompts, most, ends, padding_of(tokenizer)) or [[]]
        took.append(time.monotonic() - began)
    steps = min(STEPS, max(1, *map(len, answers)))  # fewer where all answers have ended
    return AnsweringPace(took[0] / _padded(batch), max(0.0, took[1] - took[0]) / steps)


def seconds_of(questions: Sequence[Question], pace: AnsweringPace, learned: bool) -> float:
    """What the answers of one model take.

    Args:
        questions: all that are asked.
        pace: the model's.
        learned: whether the answers are about as long as those expected; else as long as they may be.
    """
    return sum(
        _padded(batch) * pace.prompt
        + pace.step * (1 + max(len(question.answer) for question in batch) if learned else max_answer_tokens(batch))
        for batch in batches_of(questions)
    )


def _padded(batch: Sequence[Question]) -> int:
    return len(batch) * max(len(question.tokens) for question in batch)
