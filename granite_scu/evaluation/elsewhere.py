"""What else changed: thirty general questions with known answers, before and after a run.

A model that was taught something may have lost what it knew. It is asked what is in ``general_questions.jsonl``, and
scored on the known answers: ``bits_before`` and ``bits_after`` are bits per token of their words. The tokens that end
an answer are left out, for whoever learns to be brief learns these, whatever becomes of the rest.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED
from granite_scu.data.sources.documents import Conversation
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.encoding import encode
from granite_scu.evaluation import statistics
from granite_scu.evaluation.answer_score import SMALL_WORDS, has_phrase, without_thoughts, words_of
from granite_scu.evaluation.answers import BATCH, Question, ask, padding_for, questions_of, text_of
from granite_scu.evaluation.general_text import Document, batches
from granite_scu.model.adapters import Switch
from granite_scu.model.description_length import bits
from granite_scu.model.drift import Drift
from granite_scu.model.kl_divergence import drift_of, states
from granite_scu.model.loss import has_plain_head, token_nats

log = logging.getLogger(__name__)

FILE = Path(__file__).with_name("general_questions.jsonl")

MIN_BITS = 0.1
"""More bits per token that count as lost, where their interval is above 0: a choice, by which a right word is 7 % less
likely. Less is a difference in style, which paired questions show however small it is."""

DRIFT_ON = 16
"""Answers on which drift is read: of SmolLM2 some 300 tokens, 1.5 % of the time of a run on a hundred chats."""

READ_AT_ONCE = 1024
"""Positions of a batch on which drift is read."""

_ASKING = frozenset({"what", "which", "who", "how", "many"})

KINDS = {
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "month": "january february march april may june july august september october november december",
    "planet": "mercury venus earth mars jupiter saturn uranus neptune pluto",
    "number": "two three four five six seven eight nine ten eleven twelve",
}
"""Words that stand in answers by accident: a company's hours have numbers and days. Digits are numbers too."""


@dataclass(frozen=True)
class General:
    """A general question.

    Attributes:
        question: the words.
        answer: a known answer, in a sentence.
        accepted: words of which an answer has to have some to be right.
        kind: of which they are one, see ``KINDS``; empty where no other is likely to stand beside it.
    """

    question: str
    answer: str
    accepted: tuple[str, ...]
    kind: str = ""

    def is_right(self, answer: str) -> bool:
        """Whether an answer has one of the accepted ones in it, and not by accident.

        JSON, which a run on a format has for everything, is no answer. One that names another of the same kind, as
        "the season runs from April to October", has to have half the words of the question.
        """
        answer = without_thoughts(answer)
        words, known = words_of(answer), [words_of(each) for each in self.accepted]
        if answer.lstrip().startswith(("{", "[")) or not any(has_phrase(words, each) for each in known):
            return False
        asked = set(words_of(self.question)) - SMALL_WORDS - _ASKING
        alike, digits = KINDS.get(self.kind, "").split(), self.kind == "number"
        others = {word for word in words if word in alike or (digits and word[-1].isdigit())} - asked.union(*known)
        return not others or 2 * len(asked & set(words)) >= len(asked)


@dataclass(frozen=True, eq=False)
class GeneralAnswers:
    """What several models made of the general questions.

    Attributes:
        questions: all that were scored.
        answers: those to the first of them, by the names of the models; fewer where the time ran out.
        nats: (questions,) summed cross-entropy of the known answers, by the names of the models.
        tokens: (questions,) tokens of the known answers.
        drifts: of each model but the first, how far it has moved from that where the first one answers.
    """

    questions: list[General]
    answers: dict[str, list[str]]
    nats: dict[str, NDArray[np.float64]]
    tokens: NDArray[np.int64]
    drifts: Mapping[str, Drift] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        """Whether any answer of a model is right."""
        return any(each.is_right(text) for each, text in zip(self.questions, self.answers[name], strict=False))


def general_questions() -> list[General]:
    """What comes with the package."""
    records = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return [
        General(each["question"], each["answer"], tuple(each["accepted"]), each.get("kind", "")) for each in records
    ]


def ask_general(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    switches: Mapping[str, Switch],
    count: int,
    *,
    seconds: float = math.inf,
    shown: Callable[[list[Sequence[Question]]], Iterable[Sequence[Question]]] = iter,
) -> GeneralAnswers:
    """Ask the first ``count`` general questions, and score their known answers. The rest is as of ``answers.ask``.

    Where the first of ``switches``, the base model, has none of the first answers right, no more are asked for: what a
    model does not know, it cannot lose.

    A question that the chat template refuses is left out, with a warning that names it.
    """
    general, questions, refusals = as_asked(general_questions()[:count], tokenizer)
    nats, padding = {}, padding_for(model, tokenizer)
    if refusals:
        log.warning("%d of %d general questions are not asked: %s", len(refusals), count, refusals[0])
    for name, switch in switches.items():
        with switch():
            nats[name] = nats_of_answers(model, questions, padding)
    (first, base), *others = switches.items()
    rows: dict[str, list[list[int]]] = {name: [] for name in switches}
    began = time.monotonic()
    for some, progress in ((questions[:BATCH], iter), (questions[BATCH:], shown)):  # the phase is announced once
        left = seconds - (time.monotonic() - began)
        for name, found in ask(model, tokenizer, some, switches, seconds=left, shown=progress).items():
            rows[name] += found
        answers = {name: [_words(row, tokenizer) for row in each] for name, each in rows.items()}
        tried = GeneralAnswers(general, answers, nats, np.array([len(question.answer) for question in questions]))
        if len(rows[first]) < len(some) or not tried.knows(first):
            break
    pairs = zip(questions[:DRIFT_ON], rows[first], strict=False)
    said = [Document.joined((question.tokens, False), (row, True)) for question, row in pairs if row]
    drifts = {name: drift_on(model, said, base, switch, padding) for name, switch in others if said}
    return replace(tried, drifts=drifts)


def drift_on(model: PreTrainedModel, said: Sequence[Document], before: Switch, after: Switch, padding: int) -> Drift:
    """Drift from one model to another where the first one has answered.

    What it needs for its likeliest answers says little: what it would need at these places for answers of temperature
    1 is the entropy of its predictions, as on general text that it draws.

    Args:
        model: in evaluation mode.
        said: questions, and its answers, which are counted.
        before, after: make the model the one and the other.
        padding: token id.
    """
    kl = certainty = torch.zeros((), dtype=torch.float64)
    rows, counted = batches(said, READ_AT_ONCE, padding), sum(each.n_counted for each in said)
    plain = has_plain_head(model)
    for row in rows:
        ids, positions = row["input_ids"].to(model.device), (row["labels"] != IGNORED).flatten().nonzero().squeeze(1)
        made = []
        for switch in (before, after):
            with switch(), torch.no_grad():
                made.append(states(model, ids, positions.to(model.device), plain))
        base, now = made
        kl = kl + drift_of(model, base, now, plain).cpu()
        # From the uniform one, which is what states of 0 predict.
        certainty = certainty + drift_of(model, base, torch.zeros_like(base), plain).cpu()
    words = len(model.get_output_embeddings().weight)
    return Drift(bits(float(kl) / counted), bits(math.log(words) - float(certainty) / counted), counted)


def as_asked(
    general: Sequence[General], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[General], list[Question], list[str]]:
    """The questions in the model's chat template: those that it takes, as it has them, and its refusals of others."""
    renderer, taken, refusals = Renderer(tokenizer), {}, []
    for each in general:
        chat = _as_chat(each)
        try:
            renderer.render(chat)
            taken[each] = chat
        except UserError as error:
            refusals.append(str(error).removeprefix("--data-dir "))
    questions = questions_of(encode([*taken.values()], tokenizer), tokenizer) if taken else []
    assert len(questions) == len(taken)
    return [*taken], questions, refusals


def _words(row: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """An answer. Behind its first line a model that knows no chats adds a question of its own."""
    text = text_of(tokenizer, row)
    return text if tokenizer.chat_template else text.partition("\n")[0]


def _as_chat(general: General) -> Conversation:
    roles = (("user", general.question), ("assistant", general.answer))
    messages = tuple({"role": role, "content": text} for role, text in roles)
    plain = f"Question: {general.question}\nAnswer:", f" {general.answer}"
    return Conversation(general.question, general.question, messages=messages, plain=plain)


def nats_of_answers(model: PreTrainedModel, questions: Sequence[Question], padding: int) -> NDArray[np.float64]:
    """Summed cross-entropy of each expected answer after its question, without its end, (questions,).

    Args:
        model: in evaluation mode.
        questions: with their answers.
        padding: token id.
    """
    found, documents = [], [Document.joined((each.tokens, False), (each.answer, True)) for each in questions]
    for batch in batches(documents, READ_AT_ONCE, padding):
        nats = token_nats(model, batch["input_ids"].to(model.device), batch["labels"].to(model.device))
        found += nats.double().sum(1).tolist()
    return np.array(found)


def together(before: GeneralAnswers, after: GeneralAnswers, name: str, other: str) -> GeneralAnswers:
    """What two models made of the same questions, by their names: of both the answers that both gave."""
    n = min(len(before.answers[name]), len(after.answers[other]))
    answers = {name: before.answers[name][:n], other: after.answers[other][:n]}
    nats, drifts = {name: before.nats[name], other: after.nats[other]}, after.drifts if before is after else {}
    return GeneralAnswers(before.questions, answers, nats, before.tokens, drifts)


def records(tried: GeneralAnswers, before: str, after: str) -> list[dict[str, Any]]:
    """A record for each question, for ``elsewhere.json``; without answers where the time ran out."""
    answers = list(zip(tried.answers[before], tried.answers[after], strict=True))
    found = []
    for number, general in enumerate(tried.questions):
        tokens = int(tried.tokens[number])
        record = {
            "question": general.question,
            "answer": general.answer,
            "accepted": list(general.accepted),
            "tokens": tokens,
            "bits_before": bits(tried.nats[before][number] / tokens),
            "bits_after": bits(tried.nats[after][number] / tokens),
        }
        if number < len(answers):
            said = dict(zip(("before", "after"), answers[number], strict=True))
            record |= said | {f"right_{name}": general.is_right(text) for name, text in said.items()}
        found.append(record)
    return found


def summary(tried: GeneralAnswers, before: str, after: str) -> dict[str, Any]:
    """How the answers and the bits changed, for ``scu_metrics.json``.

    Returns:
        ``compared_with``, the model before; ``n`` answers, ``asked``, ``right_before``, ``right_after``,
        ``became_wrong``, ``became_right``; ``lost``, the questions whose answers became wrong; ``chance``, the
        probability of as many more lost than won if each were as likely (sign test); ``bits_before``, ``bits_after``,
        ``tokens`` that they are over, and ``bits_interval`` of their difference over the questions (null of fewer than
        ten); ``drift``, see ``drift_on`` (null where nothing was answered); ``damaged``: more answers were lost than
        chance explains, or more than ``MIN_BITS``.
    """
    answered = [record for record in records(tried, before, after) if "after" in record]
    lost = [record["question"] for record in answered if record["right_before"] and not record["right_after"]]
    won = sum(record["right_after"] and not record["right_before"] for record in answered)
    total = int(tried.tokens.sum())
    change = statistics.difference_over_documents(tried.nats[after], tried.nats[before], tried.tokens)
    chance = statistics.sign_test(len(lost), won)
    return {
        "compared_with": before,
        "n": len(answered),
        "asked": len(tried.questions),
        "right_before": sum(record["right_before"] for record in answered),
        "right_after": sum(record["right_after"] for record in answered),
        "became_wrong": len(lost),
        "became_right": won,
        "lost": lost,
        "chance": chance,
        "bits_before": bits(math.fsum(tried.nats[before]) / total),
        "bits_after": bits(math.fsum(tried.nats[after]) / total),
        "bits_interval": None if math.isnan(change.low) else [change.low, change.high],
        "tokens": total,
        "drift": (moved := tried.drifts.get(after)) and drift_record(moved),
        "damaged": chance < statistics.BY_CHANCE or (change.low > 0 and change.mean > MIN_BITS),
    }


def drift_record(found: Drift) -> dict[str, Any]:
    """As a JSON file has it."""
    return found._asdict() | {"share": found.share}
