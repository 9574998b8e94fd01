"""Conversations as the model reads them: through the tokenizer's chat template, with what it is to say marked."""

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import ASSISTANT, Conversation, is_silent

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag that a template has before what the model says, where it has one."""

_MARK = "cb1c9f0e"
"""A text that no template has."""

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError)
"""What a template may raise."""


Rendered: TypeAlias = tuple[str, tuple[tuple[int, int], ...] | None]
"""A conversation as text, ended by the end of text where the template ends so; and the characters of it that are
supervised, [start, stop) each, or None for all."""


@dataclass(frozen=True)
class Renderer:
    """Renders conversations for a tokenizer.

    Attributes:
        tokenizer: its chat template is used.
        loss_on: "completion" supervises what the model says, with the end of text after it; "all" every token.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_on: str = "completion"
    _shown: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Kinds of messages, as ``_kinds``, that the template was seen to have a place for."""

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as text.

        What the model says is what stands within the template's generation tags. A template without them, such as
        Granite's, is rendered up to each turn of the assistant: what a turn adds to its prompt is what was said.

        Raises:
            UserError: no template, one that refuses the conversation, or one that renders its beginning differently
                from the whole, so that turns cannot be told apart.
        """
        if self.tokenizer.chat_template is None:
            return self._plain(conversation)
        whole = self._text(conversation, conversation.messages)
        self._check_shown(conversation)
        if self.loss_on == "all":
            return self._ended(whole), None
        if _GENERATION.search(self._template):
            spans = self._tagged(conversation, whole)
        else:
            spans = [self._turn(conversation, whole, i) for i in conversation.said]
        text = self._ended(whole)
        return text, tuple((start, min(self._to_end(text, stop), len(text))) for start, stop in spans)

    @property
    def _template(self) -> str:
        return self.tokenizer.get_chat_template()

    def _plain(self, conversation: Conversation) -> Rendered:
        """A prompt and its completion, one after the other, for a tokenizer without template."""
        if conversation.plain is None:
            raise UserError(
                f"--data-dir {conversation.name}: messages need a chat template, which the tokenizer of --model has "
                "not; take an instruct model, or give prompt and completion as texts"
            )
        prompt, completion = conversation.plain
        text = prompt + completion
        spans = ((len(prompt), len(text)),) if completion.strip() else ()
        return text, None if self.loss_on == "all" else spans

    def _text(self, conversation: Conversation, messages: Any, prompting: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=conversation.tools, tokenize=False, add_generation_prompt=prompting
            )
        except _REFUSALS as error:
            raise UserError(
                f"--data-dir {conversation.name}: the tokenizer's chat template refuses these messages "
                f"({' '.join(str(error).split())}); mend or remove them"
            ) from error

    def _check_shown(self, conversation: Conversation) -> None:
        """Refuse a kind of message that the template passes over: what is said in it would be lost without a word.

        Tried with a mark in place of a message's content, since templates may rewrite contents.
        """
        messages = conversation.messages
        for i, kind in enumerate(_kinds(messages)):
            content = messages[i].get("content")
            if kind in self._shown or not content:
                continue
            mark = [{"type": "text", "text": _MARK}] if isinstance(content, list) else _MARK
            try:
                rendered = self._text(
                    conversation, [*messages[:i], {**messages[i], "content": mark}, *messages[i + 1 :]]
                )
            except UserError:  # it wants more of this content than a word, so it does not pass over it
                continue
            if _MARK not in rendered or f"'text': '{_MARK}" in rendered:
                raise UserError(
                    f"--data-dir {conversation.name}: the tokenizer's chat template shows nothing of the content of "
                    f"message {i + 1}, whose role is {messages[i]['role']}, or prints its parts as Python does; give "
                    "its content as one text, leave it out beside tool_calls, or take the message out"
                )
            self._shown.add(kind)

    def _turn(self, conversation: Conversation, whole: str, i: int) -> tuple[int, int]:
        """The characters that message ``i`` adds to the prompt before it."""
        messages = conversation.messages
        prompt = self._text(conversation, messages[:i], prompting=True) if i else self._opening(conversation)
        said = self._text(conversation, messages[: i + 1])
        eos = said.rfind(self.tokenizer.eos_token, len(prompt))
        stop = len(said) if eos < 0 else eos + len(self.tokenizer.eos_token)
        if not (said.startswith(prompt) and whole.startswith(said[:stop])):
            raise UserError(
                f"--data-dir {conversation.name}: the tokenizer's chat template renders the beginning of a chat "
                "differently from the whole and has no {% generation %} tags, so what the assistant says cannot be "
                "told from the rest; use --loss-on all, or a template with those tags"
            )
        return len(prompt), stop

    def _opening(self, conversation: Conversation) -> str:
        """What stands before the answer that a conversation begins with.

        A template that refuses to render no message at all is asked what invites an answer behind a question, and that
        is looked for in the first message; where it is not there, ``_turn`` finds the beginnings to differ.
        """
        try:  # past the tokenizer, which takes no empty conversation whatever the template
            (nothing,), _ = self._by_template(conversation, [], add_generation_prompt=True)
            return nothing
        except _REFUSALS:
            question = [{"role": "user", "content": "?"}]
        asked = self._text(conversation, question)
        invitation = self._text(conversation, question, prompting=True).removeprefix(asked)
        if not invitation:
            return ""
        first = self._text(conversation, conversation.messages[:1])
        before, found, _ = first.partition(invitation)
        return before + found if found else first + invitation

    def _by_template(self, conversation: Conversation, messages: list[Any], **asked: bool) -> tuple[Any, Any]:
        tools, special = conversation.tools, self.tokenizer.special_tokens_map
        return render_jinja_template([messages], tools=tools, chat_template=self._template, **asked, **special)

    def _tagged(self, conversation: Conversation, whole: str) -> list[tuple[int, int]]:
        """The characters within the template's tags, of the messages that are not part of a prompt."""
        after = 0
        if conversation.n_prompt:
            after = len(self._text(conversation, conversation.messages[: conversation.n_prompt]))
        _, (spans,) = self._by_template(conversation, list(conversation.messages), return_assistant_tokens_mask=True)
        own = [message for message in conversation.messages if message["role"] == ASSISTANT]
        marks = tuple(self.tokenizer.all_special_tokens)
        found = []
        for number, (start, stop) in enumerate(spans):
            # An answer that says nothing is not learned, as in ``Conversation.said``.
            if start < after or (len(own) == len(spans) and is_silent(own[number])):
                continue
            said = whole[start:stop].rstrip()  # a line end behind the end of a turn is not the model's to say
            found.append((start, start + len(said) if said.endswith(marks) else stop))
        return found

    def _to_end(self, text: str, stop: int) -> int:
        """``stop``, or the end of the end of text that follows it: a model learns to stop by that."""
        eos = self.tokenizer.eos_token
        return stop + len(eos) if text.startswith(eos, stop) and not text.endswith(eos, 0, stop) else stop

    def _ended(self, text: str) -> str:
        """Without the line end that a template has behind the last end of text."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self.tokenizer.eos_token) else text


def _kinds(messages: tuple[dict[str, Any], ...]) -> list[tuple[Any, ...]]:
    """What a template may go by in whether it shows a message's content."""
    roles = [message["role"] for message in messages]
    return [
        (role, i == 0, role in roles[:i], isinstance(messages[i].get("content"), list), "tool_calls" in messages[i])
        for i, role in enumerate(roles)
    ]
