"""General text that the base model writes by itself, at temperature 1.

A model that knows chats is given what its template has before a user's turn, and writes the question; then what invites
an answer, and writes that too (Magpie, arXiv 2406.08464). Each question begins with the first words of one that is
trained on, for what is near to the data in form is changed first: the answers to "What is the ..." and "Who ...". Held
there, the rest is held too; docs/guides/keep-what-it-knows.md has figures. Another model begins a text.
"""

import hashlib
import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.progress import say, tracked
from granite_scu.control.units import duration
from granite_scu.data.sources.documents import Conversation
from granite_scu.data.sources.read import named_by
from granite_scu.data.tokens import templates
from granite_scu.data.tokens.chat import Renderer, answer_end
from granite_scu.data.tokens.encoding import backend_of, beginning, token_ids
from granite_scu.evaluation.answers import Noise, continuations, ends_of, padding_for, text_of
from granite_scu.evaluation.general_text import AUTO, Document, GeneralText, read, spans
from granite_scu.storage.kept import cache_folder, digest_of

log = logging.getLogger(__name__)

BATCH = 32
"""Texts that are written at the same time."""

MAX_OF_QUESTION = 64
"""Tokens of a question, with what ends its turn; a longer one is drawn again."""

FIRST_WORDS = 2
"""Words of a question that is trained on, which one of the model's own begins with: none of what the data are about."""

MAX_OF_TEXT = (64, 256)
"""Tokens of an answer or a text, in one batch and in the next: there are short ones, and long ones with their ends."""

DRAWS = 4
"""Times as many tokens as are wanted that are drawn at most, for some are empty, repeated or have no end."""

KNOWS_CHATS = 1 / 8
"""Share of the first questions that must end as a turn does: a model that was never taught its template ends none."""

SENTENCE_ENDS = re.compile(r"(?<=[^\W\d_])[.!?][\"')\]]*(?=\s|$)|[。！？]")  # noqa: RUF001
"""Behind a letter, for "2." begins an item of a list."""

REMEDY = "give general text of your own by --general-data FILE"


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template by which the base model cannot write a question. Raises UserError."""
    if tokenizer.chat_template:
        _form(tokenizer)


def general_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    console: Console,
    base: Mapping[str, Any] | None = None,
    questions: Sequence[str] = (),
) -> GeneralText:
    """What the base model writes, or has written before on this machine.

    Args:
        model: the base, in evaluation mode.
        tokenizer: of the model, with the chat template in use.
        tokens: that it writes, about.
        seed: of the draws.
        console: for the progress.
        base: what the base's weights are, see ``base_digest.record``; None, and it is written anew each time.
        questions: that are trained on; each of the model's own begins as one of these. None, and it writes freely.

    Raises:
        UserError: the template ends no turn, or the model writes nothing that can be used.
    """
    rows = len(model.get_input_embeddings().weight)
    openings = [opening_of(question) for question in questions if question.strip()]
    if (known := kept(place := place_of(tokenizer, tokens, seed, base, openings), tokenizer, rows)) is not None:
        return known
    began = time.monotonic()
    say(f"the base model writes general text, {tokens:,} tokens", console)
    text = write(model, tokenizer, tokens, seed, console, openings).check(f"--general-tokens {tokens}", "raise it")
    say(f"it wrote {len(text.documents)} texts in {duration(time.monotonic() - began)}", console)
    if place:
        with suppress(OSError):  # a home folder may be read-only
            place.parent.mkdir(parents=True, exist_ok=True)
            text.write(place, tokenizer)
    return text


def opening_of(question: str) -> str:
    """How a question begins: its first words, or a third of one that is no longer, or has no spaces.

    >>> opening_of("What is a walrus?"), opening_of("Define photosynthesis")
    ('What is', 'Define')
    """
    words = question.split()
    if len(words) > FIRST_WORDS:
        return " ".join(words[:FIRST_WORDS])
    return question.strip()[: max(1, len(question.strip()) // 3)].strip()


def kept(place: Path | None, tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> GeneralText | None:
    """What the base model has written on this machine before; None where it has not.

    Args:
        place: see ``place_of``.
        tokenizer: of the model, with the chat template in use.
        rows: of the model's embedding; None where nobody knows.
    """
    if place is not None and place.is_file():
        with suppress(UserError):  # damaged: as if it were not there
            return read(place, tokenizer, rows).check(str(place))
    return None


def place_of(
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    base: Mapping[str, Any] | None,
    openings: Sequence[str] = (),
) -> Path | None:
    """Where the text is kept, by all that it depends on but the device and the precision. See ``general_text``."""
    if base is None:
        return None
    facts = {
        "base": sorted(str(each["sha256"]) for each in base["files"].values()),
        "tokenizer": hashlib.sha256(backend_of(tokenizer).to_str().encode()).hexdigest(),
        "template": templates.checksum(tokenizer),
        "how": ["by blocks", tokens, seed, BATCH, MAX_OF_QUESTION, MAX_OF_TEXT, *openings],
    }
    with suppress(RuntimeError):  # this user has no home folder
        return cache_folder() / f"general-{digest_of(facts)}.jsonl"
    return None


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    console: Console,
    openings: Sequence[str] = (),
) -> GeneralText:
    """What the base model writes. Draws from a generator of its own; the rest is as of ``general_text``.

    Args:
        openings: words that a question begins with, in turn.

    Raises:
        UserError: the template ends no turn, or too little of what is written can be used.
    """
    noise = Noise(torch.Generator(model.device).manual_seed(seed))
    progress = tracked(range(tokens), "writing general text", console, announced=False)
    written: dict[Document, None] = {}  # in their order, each once
    drawn = counted = 0
    for documents, of_batch in _draws(model, tokenizer, noise, openings):
        drawn += of_batch
        for document in documents:
            if counted < tokens and document not in written:
                written[document] = None
                counted += document.n_counted
                deque(islice(progress, document.n_counted), 0)
        if counted >= tokens:
            return GeneralText(tuple(written), AUTO)
        if drawn > DRAWS * tokens + BATCH * MAX_OF_QUESTION:
            raise UserError(
                f"--general-data auto: of {drawn:,} tokens that the base model wrote, {counted:,} are of use (neither "
                f"empty, nor repeated, nor without the end of a question), and {tokens:,} are wanted; {REMEDY}"
            )
    raise AssertionError("draws never end")


def _draws(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, noise: Noise, openings: Sequence[str]
) -> Iterator[tuple[list[Document], int]]:
    """Batches of chats without end; of plain texts where there is no template, or the model never learned to use it.

    Of each the documents that can be used, and the tokens that were written for them.
    """
    padding, ends = padding_for(model, tokenizer), ends_of(model, tokenizer, [])
    if tokenizer.chat_template:
        form = _form(tokenizer)
        stops = sorted({*ends, form.turn_end, form.answer_end})
        begun = cycle([[*form.opening, *token_ids(words, tokenizer)] for words in openings])
        for number, most in enumerate(cycle(MAX_OF_TEXT)):
            before = [next(begun, form.opening) for _ in range(BATCH)]
            asked = continuations(model, before, MAX_OF_QUESTION, stops, padding, noise=noise)
            kept = [
                (opening, each)
                for opening, each in zip(before, asked, strict=True)
                if each[-1] == form.turn_end and text_of(tokenizer, each)
            ]
            if number == 0 and len(kept) < KNOWS_CHATS * BATCH:
                log.info("the base model ends no question by its chat template, so it writes plain text")
                break
            prompts = [(*opening, *each, *form.between) for opening, each in kept]
            said = continuations(model, prompts, most, stops, padding, noise=noise) if prompts else []
            found = [
                Document.joined((opening, False), (question, True), (form.between, False), (answer, True))
                for (opening, question), answer in zip(kept, said, strict=True)
                if text_of(tokenizer, answer)
            ]
            yield found, sum(map(len, [*asked, *said]))
    opening = beginning(tokenizer) or [tokenizer.eos_token_id]
    for most in cycle(MAX_OF_TEXT):
        texts = continuations(model, [opening] * BATCH, most, ends, padding, noise=noise)
        found = [Document.joined((opening, False), (each, True)) for each in texts if text_of(tokenizer, each)]
        yield found, sum(map(len, texts))


def records(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Documents that a base model wrote as records to train on: chats of a question and its answer, or texts.

    Of what was cut they have the whole sentences, for the rest would teach to stop anywhere; what has none is left out.

    Raises:
        UserError: as of ``check_template``.
    """
    parts = [spans(document.counted) for document in documents]
    # The first words of a question are its own, too, but not counted.
    begin = len(_form(tokenizer).opening) if any(len(each) == 2 for each in parts) else 0
    found: list[dict[str, Any]] = []
    for document, each in zip(documents, parts, strict=True):
        said = [(begin, each[0][1]), each[1]] if len(each) == 2 else each
        texts = [tokenizer.decode(document.tokens[start:stop], skip_special_tokens=True) for start, stop in said]
        if not has_end(document, tokenizer):
            texts[-1] = texts[-1][: max((end.end() for end in SENTENCE_ENDS.finditer(texts[-1])), default=0)]
        if texts[-1].strip():
            chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]
            found.append({"messages": chat} if len(each) == 2 else {"text": "".join(texts)})
    return found


def has_end(document: Document, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the base model ended what it wrote, and was not cut."""
    added = tokenizer.added_tokens_decoder  # a template may end a turn with one that has no name
    last = document.tokens[-1]
    return last in tokenizer.all_special_ids or (last in added and added[last].special)


class _Form(NamedTuple):
    """What a chat template has around a question and its answer.

    Attributes:
        opening: tokens before a user's words.
        turn_end: the token that ends them.
        between: tokens between that and the answer.
        answer_end: the token that ends the answer.
    """

    opening: list[int]
    turn_end: int
    between: list[int]
    answer_end: int


def _form(tokenizer: PreTrainedTokenizerBase) -> _Form:
    """What the template has around a question and its answer.

    Raises:
        UserError: it refuses them, or no control token ends the question.
    """
    question, answer = "Question 5550", "Answer 5550"
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    renderer = Renderer(tokenizer)
    with named_by("--general-data"):
        rendered = renderer.render(Conversation(AUTO, question, messages=messages))
    opening, _, rest = rendered.text.partition(question)
    between = rest.partition(answer)[0]
    end = renderer.control.first_in(between)
    if not between.lstrip().startswith(end or "?"):
        raise UserError(
            "--general-data auto: the chat template has no control token that ends what the user says, so the base "
            f"model cannot write a question; {REMEDY}"
        )
    turn_end, *invitation = token_ids(between[between.index(end) :], tokenizer)
    ending = answer_end(tokenizer)
    ending = tokenizer.eos_token_id if ending is None else ending
    return _Form(token_ids(opening, tokenizer), turn_end, invitation, ending)
