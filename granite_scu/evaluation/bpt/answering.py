"""What the models that are scored answer to the questions of the chats, and to general ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.progress import tracked
from granite_scu.evaluation import answers, elsewhere
from granite_scu.evaluation.answer_score import RULE, wilson
from granite_scu.evaluation.bpt.texts import Texts
from granite_scu.model.adapters import Switch

log = logging.getLogger(__name__)


class Asked:
    """Questions, and what each model says to them.

    Args:
        text: a sample of its chats is asked; of other texts only general questions are.
        tokenizer: of the models.
        count: questions of each kind; 0 asks none.
    """

    def __init__(self, text: Texts, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
        self.tokenizer, self.count = tokenizer, count
        self.answers: dict[str, list[str]] = {}
        self.tried: dict[str, elsewhere.Tried] = {}
        self.questions = answers.questions_in(text.documents, text.special_tokens, tokenizer, count)

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
                found = elsewhere.try_out(model, self.tokenizer, switches, self.count, shown=shown)
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
            records = answers.scored(self.questions, self.answers)
            models = {name: answers.figures(records, name) for name in names}
            for each in models.values():
                each["interval"] = list(wilson(int(each["right"]), len(records)))
            counts = {"n": len(records), "asked": len(self.questions), "rule": RULE}
            found["answers"] = {**counts, "models": models, "records": records}
        return found
