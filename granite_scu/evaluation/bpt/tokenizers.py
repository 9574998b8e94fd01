"""The tokenizer of everything that is scored: bits per token can be compared where all make the same tokens."""

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import Document
from granite_scu.data.tokens import templates
from granite_scu.data.tokens.encoding import beginning
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.model import loading
from granite_scu.model.loading import read_tokenizer

SAMPLE = 200_000
"""Characters of the texts on which tokenizers are compared."""


def load_tokenizer(base: str, subjects: Sequence[Subject], texts: Sequence[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of the base, which is everybody's.

    Args:
        base: the base model, or the first of whole models.
        subjects: where one has a tokenizer of its own, it must make the same tokens.
        texts: on which that is tried.

    Raises:
        UserError: a tokenizer differs, so that bits per token could not be compared.
    """
    tokenizer = loading.load_tokenizer(base)
    sample = "".join(islice(chain.from_iterable(document.text for document in texts), SAMPLE))
    expected = _tokens(tokenizer, sample)
    for subject in subjects:
        own = _own_tokenizer(subject) if subject.given != base else None
        if own and _tokens(own, sample) != expected:
            raise UserError(
                f"{subject.given}: its tokenizer makes other tokens than that of {base}, so bits per token cannot be "
                "compared; score it alone and compare bits per byte"
            )
    return tokenizer


def with_template(
    tokenizer: PreTrainedTokenizerBase,
    subjects: Sequence[Subject],
    has_chats: bool,
    template: str | None,
    arguments: Sequence[str] | None,
) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that conversations are scored through: the one asked for, or the subjects'.

    Args:
        tokenizer: of the base.
        subjects: where one has a template of its own, the others must have the same.
        has_chats: whether there is a conversation to score.
        template: ``--chat-template``.
        arguments: ``--chat-template-args``.

    Raises:
        UserError: the subjects have different ones and no one is named, or what ``templates.chosen`` raises.
    """
    places = [list(filter(None, (subject.path, subject.run))) for subject in subjects]
    own = [(place[0], found) for place, each in zip(places, subjects, strict=True)
           if (found := _own_template(each, place)) is not None]  # fmt: skip
    others = [place for place, found in own if found != own[0][1]]
    if others and has_chats and template is None:
        raise UserError(
            f"{others[0]}: has another chat template than {own[0][0]}, so that they would be scored on different "
            "texts; score them one at a time, or give one to both: --chat-template FILE, such as a folder's "
            f"{templates.FILE}"
        )
    with_own = templates.with_template(tokenizer, own[0][1] if own else None)
    return templates.chosen(with_own, template, arguments)


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a text's first token is predicted from: what the tokenizer puts before a text or, where that is nothing,
    beginning-of-text, and where there is none, end-of-text."""
    alone = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return beginning(tokenizer) or [alone]


def _own_template(subject: Subject, places: Sequence[Path]) -> templates.Template | None:
    """The template that a subject comes with; that of a whole model on the hub is its tokenizer's."""
    found = templates.saved_in(*places)
    if found is not None or subject.kind == "adapter":
        return found
    own = _own_tokenizer(subject)
    return own.chat_template if own else None


def _own_tokenizer(subject: Subject) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies in a model's or adapter's folder; None where an adapter has none."""
    if subject.kind == "model":
        return loading.load_tokenizer(subject.given)
    if not (subject.path / "tokenizer_config.json").is_file():
        return None
    try:
        return read_tokenizer(str(subject.path))
    except (OSError, ValueError) as error:
        raise UserError(f"{subject.given}: its tokenizer cannot be read ({error})") from error


def _tokens(tokenizer: PreTrainedTokenizerBase, sample: str) -> tuple[list[int], list[int]]:
    return beginning_of(tokenizer), tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
