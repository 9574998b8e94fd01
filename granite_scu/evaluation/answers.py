"""What a model answers to the questions of held-out chats, at temperature 0, beside what was expected."""

import itertools
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import SEED
from granite_scu.data.blocks.packing import Blocks, padding_of
from granite_scu.data.sources.documents import Conversation, Document
from granite_scu.data.tokens.chat import Renderer, answer_end
from granite_scu.data.tokens.encoding import encode
from granite_scu.data.tokens.special_tokens import THINKING, ReadAs
from granite_scu.data.tokens.stream import Stream
from granite_scu.evaluation.answer_score import RULE, is_as_expected, wilson
from granite_scu.evaluation.statistics import is_more
from granite_scu.model.adapters import Switch

log = logging.getLogger(__name__)

T = TypeVar("T")

_EMPTY_THOUGHT = re.compile(rf"\s*{THINKING[0]}\s*{THINKING[1]}\s*\S")

BATCH = 16
"""Questions that are answered at the same time. On a CPU 32 take a sixth less time each, and where the time runs out in
a batch none of it is answered; on a GPU thirty take seconds anyway."""

MAX_TOKENS = 16_384
"""Of the questions and answers of a batch: what their keys and values take is small beside what training took."""

LONGER, MORE, MAX_NEW_TOKENS = 1.5, 16, 512
"""An answer may have so many times the tokens of the longest that is expected in its batch, so many more, and so many
at most."""

SECONDS = 60.0
"""For the answers of a model to one kind of questions at the end of a run: a small one on one core takes a third of it
for thirty. Who asks for answers alone gets all of them."""

PLAIN = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""For ``generate``, whatever a model's own settings are: what is written is the likeliest, or a plain draw."""

_LOOKED_AT = 100
"""Documents that are looked at for each question that is wanted: in a text there may be none."""


@dataclass(frozen=True)
class Question:
    """The last question of a chat, and what the chat has for an answer.

    Attributes:
        tokens: all before the last answer, as the model is given it.
        text: what was asked last.
        expected: the answer.
        answer: its tokens, without what ends it.
        end: the token that ends the answer; None where no control token does.
    """

    tokens: tuple[int, ...]
    text: str
    expected: str
    answer: tuple[int, ...]
    end: int | None = None


def questions_of(
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    documents: NDArray[np.int64] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> list[Question]:
    """The last questions of some chats.

    A chat is a document that begins with what is not learned; its last answer is the last stretch that is learned. So
    there are none where all is learned (``--loss-on all``).

    Args:
        stream: the documents' tokens, those of answers its targets.
        tokenizer: the model's.
        documents: which are meant, by number; all by default.
        count: a sample of so many, in the order in which it was drawn; None takes all in their order.
        seed: of the sample.
    """
    numbers = np.arange(len(stream.ends)) if documents is None else documents
    if count is not None:
        numbers = np.random.default_rng(seed).permutation(numbers)[: _LOOKED_AT * count]
    bounds, around = stream.bounds_of(np.asarray(numbers, np.int64)), _around_a_question(tokenizer)
    found: list[Question] = []
    for start, stop in bounds.tolist():
        if count is not None and len(found) >= count:
            break
        if question := _last_question(stream.tokens[start:stop], stream.targets[start:stop], tokenizer, around):
            found.append(question)
    return found


def questions_in(
    documents: Iterable[Document],
    special_tokens: ReadAs,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int = SEED,
) -> list[Question]:
    """The last questions of a sample of the chats among documents, in their order; of other texts none.

    Args:
        documents: not yet tokenised.
        special_tokens: what becomes of those that somebody wrote.
        tokenizer: of the models.
        count: chats, at most.
        seed: of the sample.
    """
    chats = [document for document in documents if isinstance(document, Conversation)]
    order = np.random.default_rng(seed).permutation(len(chats))[:count]
    sample = [chats[number] for number in sorted(order)]
    return questions_of(encode(sample, tokenizer, special_tokens=special_tokens), tokenizer) if sample else []


def answerable(questions: Sequence[Question]) -> list[Question]:
    """Those whose expected answers are no longer than an answer may be; of others a model's would be cut."""
    found = [question for question in questions if len(question.answer) <= MAX_NEW_TOKENS]
    if longer := len(questions) - len(found):
        log.warning("%d of %d held-out questions are not asked: their answers have more than %d tokens",
                    longer, len(questions), MAX_NEW_TOKENS)  # fmt: skip
    return found


def beginning_in(blocks: Blocks) -> NDArray[np.int64]:
    """The numbers of the documents, in the blocks' stream, that begin in these blocks."""
    spans = np.concatenate([np.empty((0, 2), np.int64), *(blocks.spans_of(index) for index in range(len(blocks)))])
    owners = np.searchsorted(blocks.stream.ends, spans[:, 0])
    return np.unique(owners[blocks.stream.bounds_of(owners)[:, 0] == spans[:, 0]])


def _last_question(
    tokens: NDArray[np.int32], targets: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase, around: tuple[str, str]
) -> Question | None:
    learned = np.flatnonzero(targets)
    if not len(learned) or learned[0] <= 1:  # of a text all is learned but the first token
        return None
    last = learned[-1] + 1
    first = last - np.argmin(targets[:last][::-1])
    first += _unthought(tokens[first:last].tolist(), tokenizer)
    prompt, answer = tokens[:first].tolist(), tokens[first:last].tolist()
    text = text_of(tokenizer, answer)
    if not text:
        return None
    special, words = set(tokenizer.all_special_ids), len(answer)
    while words and (answer[words - 1] in special or not text_of(tokenizer, answer[words - 1 : words])):
        words -= 1
    end = next((token for token in answer[words:] if token in special), None)
    return Question(tuple(prompt), _asked_last(tokenizer, prompt, around), text, tuple(answer[:words]), end)


def _unthought(answer: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of an empty thought before an answer, by which a template has a model that can think not do so."""
    if not _EMPTY_THOUGHT.match(tokenizer.decode(answer)):
        return 0
    ended = next((n for n in range(len(answer)) if THINKING[1] in tokenizer.decode(answer[:n])), 0)
    return next((n for n in range(ended, len(answer)) if tokenizer.decode(answer[n : n + 1]).strip()), ended)


def _asked_last(tokenizer: PreTrainedTokenizerBase, prompt: list[int], around: tuple[str, str]) -> str:
    """What was asked last in the tokens of a chat, by what the template has ``around`` a question."""
    before, after = around
    whole = tokenizer.decode(prompt)
    start, stop = whole.rfind(before), whole.rfind(after)
    if before.strip() and after.strip() and 0 <= start < stop:
        return whole[start + len(before) : stop].strip()
    return text_of(tokenizer, prompt)


def _around_a_question(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What stands before and behind the last question in a chat, whether it is the first one or not."""
    if not tokenizer.chat_template:
        return "", ""
    sign, renderer = "Question 5550", Renderer(tokenizer)
    asked, answered = {"role": "user", "content": sign}, {"role": "assistant", "content": "Answer 5550"}
    try:
        first = renderer.prompt([asked]).text.rpartition(sign)
        later = renderer.prompt([asked, answered, asked]).text.rpartition(sign)
    except UserError:  # whether the template takes the user's own messages has been seen already
        return "", ""
    return _common(first[0][::-1], later[0][::-1])[::-1], _common(first[2], later[2])


def _common(first: str, second: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in pairs)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    switches: Mapping[str, Switch],
    *,
    seconds: float = math.inf,
    shown: Callable[[list[Sequence[Question]]], Iterable[Sequence[Question]]] = iter,
) -> dict[str, list[list[int]]]:
    """What a model answers, and what it can be switched to, a batch of questions after the other.

    Args:
        model: in evaluation mode (not wrapped by PEFT; its layers may be).
        tokenizer: the model's.
        questions: in the order in which they are answered.
        switches: what answers, by its name.
        seconds: after which no batch is begun, and the one that is not finished is left out.
        shown: gives the batches, and shows how far they are.

    Returns:
        The answers to the first questions, with the token that ends each, by the names of ``switches``: to all of them
        unless the time ran out.
    """
    deadline = time.monotonic() + seconds
    ends, padding = ends_of(model, tokenizer, questions), padding_for(model, tokenizer)
    found: dict[str, list[list[int]]] = {name: [] for name in switches}
    for batch in shown(list(batches_of(questions))):
        prompts, most, answers = [question.tokens for question in batch], max_answer_tokens(batch), []
        for switch in switches.values():
            with switch():
                if (left := deadline - time.monotonic()) > 0:
                    answers.append(continuations(model, prompts, most, ends, padding, seconds=left))
        if time.monotonic() >= deadline:
            break
        for name, rows in zip(switches, answers, strict=True):
            found[name] += rows
    return found


def batches_of(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    """The questions in their order, as many at a time as ``BATCH`` and ``MAX_TOKENS`` allow; one at the least."""

    def fits(batch: Sequence[Question]) -> bool:
        longest = max(len(each.tokens) for each in batch) + max_answer_tokens(batch)
        return len(batch) <= BATCH and longest * len(batch) <= MAX_TOKENS

    return grouped(questions, fits)


def grouped(items: Iterable[T], fits: Callable[[Sequence[T]], bool]) -> Iterator[Sequence[T]]:
    """The items in their order, as many at a time as ``fits`` allows; one at the least."""
    group: list[T] = []
    for item in items:
        if group and not fits([*group, item]):
            yield group
            group = []
        group = [*group, item]
    if group:
        yield group


def max_answer_tokens(batch: Sequence[Question]) -> int:
    """Tokens that an answer of a batch may have."""
    return min(MAX_NEW_TOKENS, math.ceil(LONGER * max(len(question.answer) for question in batch)) + MORE)


def padding_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills up a batch: one that the model has, though the tokenizer's own may have been added to it."""
    return padding_of(tokenizer, len(model.get_input_embeddings().weight))


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> list[int]:
    """The tokens that end an answer: what ends the expected ones, and those of template, tokenizer and model."""
    of_model = model.generation_config.eos_token_id
    ends = {question.end for question in questions} | {answer_end(tokenizer), tokenizer.eos_token_id}
    ends |= set(of_model) if isinstance(of_model, list) else {of_model}
    return sorted(end for end in ends if end is not None)


_TOGETHER = 256
"""Tokens of which one is drawn together: about the root of a vocabulary."""


class Noise(LogitsProcessor):
    """Makes the likeliest token a draw at temperature 1, by Gumbel noise from a generator of its own.

    First some tokens are drawn together, then one of them: noise for each token would take longer than a small model.

    Args:
        generator: on the device of the model.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        whole = F.pad(scores.float(), (0, -scores.shape[1] % _TOGETHER), value=-math.inf)
        some = whole.unflatten(1, (-1, _TOGETHER))
        which = self._drawn(some.logsumexp(2))
        one = self._drawn(some.take_along_dim(which.unsqueeze(2), 1).squeeze(1))
        return torch.full_like(scores, -math.inf).scatter(1, which * _TOGETHER + one, 0.0)

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        waiting = torch.empty_like(scores).exponential_(generator=self.generator)
        return (scores - waiting.clamp_min(torch.finfo(scores.dtype).tiny).log()).argmax(1, keepdim=True)


def continuations(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    padding: int,
    *,
    noise: Noise | None = None,
    seconds: float = math.inf,
) -> list[list[int]]:
    """What a model writes behind each prompt, all at the same time: the likeliest, or a draw.

    Prompts are padded on their left. Attention skips what is masked, and the state of a Mamba-2 layer is still 0
    behind it, so that each continuation is what it would be alone, up to the rounding of sums.

    Args:
        model: in evaluation mode.
        prompts: token ids, at least one each.
        most: tokens that are added at most.
        ends: token ids of which each ends a continuation.
        padding: token id.
        noise: by which it is a draw.
        seconds: after which it is cut.

    Returns:
        The new tokens; where one of ``ends`` is among them, it is the last.
    """
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    # The last states are a slice of all: PyTorch would copy the head's weights for each row that it multiplies by them.
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))
    try:
        found = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=most,
            eos_token_id=list(ends),
            pad_token_id=padding,
            max_time=None if math.isinf(seconds) else seconds,
            logits_processor=LogitsProcessorList([noise] if noise else []),
            **PLAIN,
            **{"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50},
        )[:, ids.shape[1] :].tolist()
    finally:
        hook.remove()
    stops = (next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in found)
    return [row[:stop] for row, stop in zip(found, stops, strict=True)]


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The words of some tokens, without control tokens, as that which ends an answer."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def scored(
    questions: Sequence[Question], rows: Mapping[str, list[list[int]]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """A record for each question that was answered: ``question``, ``expected``, the answers and their ``scores``.

    Args:
        questions: as they were asked.
        rows: the tokens of the answers to the first of them, by who gave them.
        tokenizer: of who gave them.
    """
    texts = {name: [text_of(tokenizer, row) for row in each] for name, each in rows.items()}
    answered = zip(*texts.values(), strict=False)  # models that were loaded apart had a time of their own
    return [
        {
            "question": question.text,
            "expected": question.expected,
            **dict(zip(texts, answers, strict=True)),
            "scores": {
                name: {"right": is_as_expected(answer, question.expected, question.text)}
                for name, answer in zip(texts, answers, strict=True)
            },
        }
        for question, answers in zip(questions, answered, strict=False)
    ]


def figures(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """How many answers of one of the models are right.

    >>> figures([{"scores": {"base": {"right": True}}}, {"scores": {"base": {"right": False}}}], "base")
    {'right': 1}
    """
    return {"right": sum(record["scores"][name]["right"] for record in records)}


def summary(records: Sequence[Mapping[str, Any]], asked: int) -> dict[str, Any]:
    """The answers of ``base`` and ``adapter`` for ``scu_metrics.json``; ``asked`` is what there was to be answered.
    ``better`` and ``worse``: more became right than wrong, or fewer, than chance explains."""
    of_adapter = figures(records, "adapter")
    changes = Counter(record["scores"]["adapter"]["right"] - record["scores"]["base"]["right"] for record in records)
    return {
        "n": len(records),
        "asked": asked,
        "base": figures(records, "base"),
        "adapter": of_adapter,
        "right": of_adapter["right"],
        "interval": list(wilson(of_adapter["right"], len(records))),
        "became_right": changes[1],
        "became_wrong": changes[-1],
        "better": is_more(changes[1], changes[-1], changes[0], of_adapter["right"]),
        "worse": is_more(changes[-1], changes[1], changes[0], len(records) - of_adapter["right"]),
        "rule": RULE,
    }
