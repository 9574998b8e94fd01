"""Conversations as the model reads them: through the tokenizer's chat template, with what it is to say marked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from granite_scu.config.errors import UserError, one_line
from granite_scu.data.sources.documents import ASSISTANT, REASONING, WEIGHT, Conversation
from granite_scu.data.tokens.pieces import Piece
from granite_scu.data.tokens.special_tokens import THINKING, Places, ReadAs, SpecialTokens, placeholders
from granite_scu.data.tokens.turns import Marked, Spelling, Text, mark, spellings

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag that a template has before what the model says, where it has one."""

_REASONING_BEGINS = re.compile(rf"{re.escape(THINKING[0])}\s*$")

_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError, SyntaxError),
)
"""What a template may raise: it is a program, and perhaps a stranger's."""


_SIGNS = "aAwdbBmyYHIMSfpzZjUWcxX"
DAY = datetime(2025, 1, 1)
"""What a template that writes the date, as Granite's does, is given for it. With the day on which a text is prepared,
the blocks would be others on each day: a run could not be continued, nor scored, on those that it was trained on."""

_WORDS = {"%-d": f"{DAY.day}", "%-m": f"{DAY.month}"} | {f"%{sign}": DAY.strftime(f"%{sign}") for sign in _SIGNS}
_DATED = (
    f"{{% macro strftime_now(form) %}}{{{{ form{''.join(f'.replace({a!r}, {b!r})' for a, b in _WORDS.items())} }}}}"
)
_DATED += "{% endmacro +%}"
"""Before a template, instead of the function that reads the clock: transformers passes no function on to one."""

_MAX_FORMS = 10_000
"""How many forms of conversations are remembered: a stream of tool calls may bring new ones for ever."""

_SAID = ("content", *REASONING)
"""Fields of a message that hold texts."""


@dataclass(frozen=True)
class Renderer:
    """Renders conversations for a tokenizer.

    Attributes:
        tokenizer: its chat template is used.
        loss_on: "completion" supervises what the model says, with the end of text after it; "all" every token.
        special_tokens: what becomes of those that somebody wrote, see ``SpecialTokens``.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_on: str = "completion"
    special_tokens: ReadAs = "text"
    _known: dict[int, tuple[Spelling, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """How the template takes conversations of a form, and the thoughts that it leaves out, by the form's hash."""

    @cached_property
    def control(self) -> SpecialTokens:
        """The control tokens of the tokenizer."""
        return SpecialTokens(self.tokenizer, self.special_tokens)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.all_special_tokens)

    def render(self, conversation: Conversation) -> Piece:
        """The conversation as text.

        What the model says is what stands within the template's generation tags. A template without them, such as
        Granite's, is rendered up to each turn of the assistant: what a turn adds to its prompt is what was said. Where
        a template renders the beginning of a chat differently from the whole, as those do that drop the thoughts of
        earlier turns, the words of each message are looked for in the whole, see ``turns``.

        Raises:
            UserError: no template, one that refuses the conversation, or one with which what the model says cannot be
                told from the rest; a control token, where these are refused.
        """
        if not self.tokenizer.chat_template:
            return self._plain(conversation)
        escaped = self.control.escape(conversation)
        text, spans, n_without_reasoning = self._laid_out(escaped.conversation)
        text, spans, written = escaped.restored(text, spans)
        if escaped.behind:
            spelled, _, _ = self._taken(conversation)
            if text != self._ended(self._text(spelled, spelled.messages)):
                raise UserError(
                    f"--data-dir {conversation.name}: the chat template goes by the control token {escaped.first} that "
                    "stands in a message, which is then no text; take it out, or choose --control-tokens tokens"
                )
        facts = spans, written, escaped.count, escaped.first, n_without_reasoning, conversation.has_system
        return Piece(text, conversation.name, *facts, is_conversation=True, is_begun=False)

    def prompt(self, turns: Sequence[dict[str, Any]]) -> Piece:
        """The messages of a chat that ends with a question, and what invites the answer; ``spans`` says nothing.

        Raises:
            UserError: no template, or one that refuses it.
        """
        if not self.tokenizer.chat_template:
            raise UserError("--chat: the model's tokenizer has no chat template; leave it out, or give --chat-template")
        escaped = self.control.escape(Conversation("--chat", "", tuple(turns)))
        try:
            template = self.tokenizer.get_chat_template(tools=None)  # which tells the day as it is
            text, _ = self._by_template(template, None, escaped.conversation.messages, prompting=True)
        except _REFUSALS as error:
            raise UserError(
                f"--chat: the chat template refuses a question ({one_line(error)}); choose another"
            ) from error
        text, _, written = escaped.restored(text, None)
        return Piece(text, "--chat", None, written, escaped.count, escaped.first, is_conversation=True)

    def _laid_out(self, conversation: Conversation) -> tuple[str, Places | None, int]:
        """The text, the characters of it that are supervised, and the number of thoughts that it leaves out."""
        conversation, n_without_reasoning, is_new = self._taken(conversation)
        shown = _Beginnings(self, conversation)
        if self.loss_on == "all":
            return self._ended(shown.whole), None, n_without_reasoning
        if _GENERATION.search(self._template(conversation)):
            whole, spans = self._tagged(conversation)
            if is_new:
                self._check_tags(conversation, whole, spans)
        else:
            whole = shown.whole
            turns = [self._turn(shown, i) for i in conversation.said]
            spans = [turn for turn in turns if turn]
            if len(spans) < len(turns):
                spans = self._placed(shown)
        text = self._ended(whole)
        spans = [(start, min(self._to_end(text, stop), len(text))) for start, stop in spans]
        # A turn of which the template shows its end alone would teach not to answer.
        return text, tuple(span for span in spans if self.control.words(text[slice(*span)])), n_without_reasoning

    def _template(self, conversation: Conversation) -> str:
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        return _DATED + template if "strftime_now" in template else template

    def _plain(self, conversation: Conversation) -> Piece:
        """A prompt and its completion, one after the other, for a tokenizer without template."""
        if conversation.plain is None:
            raise UserError(
                f"--data-dir {conversation.name}: messages need a chat template, which the tokenizer of --model has "
                "not; use an instruct model, give --chat-template, or give prompt and completion as texts"
            )
        prompt, completion = conversation.plain
        text = prompt + completion
        spans = ((len(prompt), len(text)),) if completion.strip() else ()
        found = self.control.places(text, conversation.name)
        first = text[slice(*found[0])] if found else ""
        written = () if self.special_tokens == "tokens" else found
        spans = None if self.loss_on == "all" else spans
        return Piece(text, conversation.name, spans, written, len(found), first, is_conversation=True)

    def _text(self, conversation: Conversation, messages: Sequence[Any], prompting: bool = False) -> str:
        return self._rendered(conversation, messages, prompting)[0]

    def _rendered(
        self, conversation: Conversation, messages: Sequence[Any], prompting: bool = False, tagged: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Messages as the template has them, and what stands within its tags where that is asked for."""
        try:
            template = self._template(conversation)
            return self._by_template(template, conversation.tools, messages, prompting, tagged)
        except _REFUSALS as error:
            raise UserError(self._refusal(conversation, error)) from error

    def _by_template(
        self, template: str, tools: list[Any] | None, messages: Sequence[Any], prompting: bool, tagged: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """As the tokenizer does it, which takes no empty conversation whatever the template."""
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        asked = {"add_generation_prompt": prompting, "return_assistant_tokens_mask": tagged}
        special = self.tokenizer.special_tokens_map
        texts, spans = render_jinja_template([said], tools=tools, chat_template=template, **asked, **special)
        return texts[0], spans[0] if tagged else []

    def _refusal(self, conversation: Conversation, error: BaseException) -> str:
        names = self.tokenizer.chat_template
        if isinstance(error, jinja2.TemplateSyntaxError):
            what = f"its chat template is no Jinja template ({error.message}, line {error.lineno})"
            return f"--model: {what}; correct it, or choose another with --chat-template"
        if isinstance(names, dict) and "default" not in names and isinstance(error, ValueError):
            what = "its chat templates have names, and none is called default"
            return f"--model: {what}; choose one with --chat-template: {', '.join(names)}"
        return (
            f"--data-dir {conversation.name}: the chat template refuses these messages ({one_line(error)}); correct or "
            "remove them, or choose another with --chat-template"
        )

    def _marked(self, conversation: Conversation) -> tuple[Marked, str]:
        """The conversation with marks for its texts, and rendered; empty where the template wants more than a mark."""
        marked = mark(conversation)
        return marked, self._tried(marked.conversation)

    def _tried(self, conversation: Conversation) -> str:
        try:
            return self._text(conversation, conversation.messages)
        except UserError:
            return ""

    def _taken(self, conversation: Conversation) -> tuple[Conversation, int, bool]:
        """The conversation as the template takes it. Of those that differ in their words alone, the first is tried.

        Returns:
            Conversation, the answers of which it leaves out what was thought, and whether its form was new.

        Raises:
            UserError: as ``_spelling``.
        """
        form = _form(conversation)
        if is_new := form not in self._known:
            if len(self._known) == _MAX_FORMS:
                self._known.clear()
            self._known[form] = self._spelling(conversation)
        spelling, n_without_reasoning = self._known[form]
        return spelling.of(conversation), n_without_reasoning, is_new

    def _spelling(self, conversation: Conversation) -> tuple[Spelling, int]:
        """The first spelling of which the template shows all but thoughts, and the answers without their thoughts.

        Raises:
            UserError: the template refuses each spelling, or leaves out something of it.
        """
        marked, refusals, losses = mark(conversation, everything=True), [], []
        for spelling in spellings(conversation):
            spelled = spelling.of(conversation)
            try:
                self._text(spelled, spelled.messages)
            except UserError as error:
                refusals.append(error)
                continue
            lost = self._lost(conversation, spelling, marked)
            said = [text for text in lost if text.what]
            if not said:
                return spelling, len({text.message for text in lost})
            losses.append(_loss(conversation, said[0]))
        raise (losses or refusals)[0]

    def _lost(self, conversation: Conversation, spelling: Spelling, marked: Marked) -> list[Text]:
        """The texts that a template does not show as they are written; of thoughts those of messages of which it shows
        none.

        Where it wants more than marks, each text is tried alone; one that it wants more of than a mark, it does not
        pass over.
        """
        rendered = self._tried(spelling.of(marked.conversation))
        lost = []
        for number, (sign, text) in enumerate(marked.behind.items()):
            if _is_shown(sign, text, rendered):
                continue
            alone = mark(conversation, everything=True, only=number).conversation
            found = self._tried(spelling.of(alone))
            if found and not _is_shown(sign, text, found):
                lost.append(text)
        thought = {text.message for sign, text in marked.behind.items() if not text.what and text not in lost}
        return [text for text in lost if text.what or text.message not in thought]

    def _turn(self, shown: "_Beginnings", i: int) -> tuple[int, int] | None:
        """The characters that message ``i`` adds to the prompt before it; None where the whole begins otherwise."""
        prompt, said = shown.prompt(i), shown.up_to(i + 1)
        eos = said.rfind(self.tokenizer.eos_token, len(prompt))
        stop = self._without_line_end(said, len(prompt)) if eos < 0 else eos + len(self.tokenizer.eos_token)
        return (len(prompt), stop) if said.startswith(prompt) and shown.whole.startswith(said[:stop]) else None

    def _placed(self, shown: "_Beginnings") -> list[tuple[int, int]]:
        """The characters of each turn of the assistant: its words, wherever they stand, and the end of the turn."""
        conversation = shown.conversation
        marked, rendered = self._marked(conversation)
        places = marked.places(rendered, shown.whole)
        if places is None:
            raise self._mask_undetermined(conversation)
        endings = self._endings(conversation)
        return [
            self._place(shown, i, places, endings)
            for i in conversation.said
            if marked.shows(i, rendered) or any(map(conversation.messages[i].get, ("content", "tool_calls")))
        ]

    def _place(self, shown: "_Beginnings", i: int, places: dict[int, Places], endings: list[str]) -> tuple[int, int]:
        """The characters of message ``i``.

        It begins behind what invites it, where that stands there; otherwise with its first word, or with the tag
        before a thought that nothing but the model writes.
        """
        conversation, whole = shown.conversation, shown.whole
        before = max((stop for number, each in places.items() if number < i for _, stop in each), default=0)
        after = min((start for number, each in places.items() if number > i for start, _ in each), default=len(whole))
        mine, calls = places.get(i, ()), conversation.messages[i].get("tool_calls", ())
        prompt, asked = shown.prompt(i), shown.up_to(i) if i else ""
        if prompt != asked and whole.startswith(prompt) and before <= len(prompt) <= (mine[0][0] if mine else after):
            start = len(prompt)
        elif mine:
            start = mine[0][0]
            opened = _REASONING_BEGINS.search(whole, before, start)
            start = opened.start() if opened and not _REASONING_BEGINS.search(prompt) else start
        else:
            start = self._start_of_calls(conversation, whole, i)
        stop = mine[-1][1] if mine else start
        for call in calls:  # what ends before them is a thought
            stop = max(stop, whole.find(call["function"]["name"], stop, after))
        # At ``stop`` itself where nothing ends a turn.
        ends = [at + len(end) for end in endings if (end or not calls) and (at := whole.find(end, stop, after)) >= 0]
        if calls and i + 1 == len(conversation.messages):
            ends.append(self._without_line_end(whole, stop))
        if not ends or not before <= start <= stop <= after:
            raise self._mask_undetermined(conversation)
        return start, ends[0]

    def _start_of_calls(self, conversation: Conversation, whole: str, i: int) -> int:
        """Where a message that says nothing and calls tools begins: where its words would stand."""
        sign = next(placeholders(whole))
        spoken = [*conversation.messages]
        spoken[i] = spoken[i] | {"content": sign}
        head, found, _ = self._text(conversation, spoken).partition(sign)
        if not (found and whole.startswith(head)):
            raise self._mask_undetermined(conversation)
        return len(head)

    def _endings(self, conversation: Conversation) -> list[str]:
        """What a template ends its last answer with, and an answer that a question follows, where that differs.

        Each is a control token, or any other text; empty where with nothing.
        """
        sign = next(placeholders(""))
        question, answer = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": sign}

        def ending(*messages: dict[str, Any]) -> str:
            try:
                behind = self._text(conversation, messages).partition(sign)[2]
            except UserError:
                return self.tokenizer.eos_token
            return self.control.first_in(behind) or behind.strip()

        last, earlier = ending(question, answer), ending(question, answer, question)
        begins = self.control.first_in(self._invitation(conversation, question))
        return [last, earlier] if begins and earlier != begins else [last]

    def _invitation(self, conversation: Conversation, question: dict[str, Any]) -> str:
        """What the template has behind a question when an answer is asked for."""
        asked = self._text(conversation, [question])
        return self._text(conversation, [question], prompting=True).removeprefix(asked)

    def _mask_undetermined(self, conversation: Conversation) -> UserError:
        return UserError(
            f"--data-dir {conversation.name}: the chat template has no {{% generation %}} tags and changes what "
            "it shows of the messages, so what the assistant says cannot be told from the rest; use --loss-on all, or "
            "give a template with those tags by --chat-template"
        )

    def _opening(self, conversation: Conversation) -> str:
        """What stands before the answer that a conversation begins with.

        A template that refuses to render no message at all is asked what invites an answer behind a question, and that
        is looked for in the first message; where it is not there, ``_turn`` finds the beginnings to differ.
        """
        try:
            return self._text(conversation, [], prompting=True)
        except UserError:
            invitation = self._invitation(conversation, {"role": "user", "content": "?"})
        if not invitation:
            return ""
        first = self._text(conversation, conversation.messages[:1])
        before, found, _ = first.partition(invitation)
        return before + found if found else first + invitation

    def _tagged(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The whole, and the characters within the template's tags, of the messages that are not part of a prompt."""
        whole, spans = self._rendered(conversation, conversation.messages, tagged=True)
        after = 0
        if conversation.n_prompt:
            after = len(self._text(conversation, conversation.messages[: conversation.n_prompt]))
        found = []
        for i, (start, stop) in zip(self._speakers(conversation, whole, spans), spans, strict=True):
            if start < after or i not in conversation.said:
                continue
            found.append((start, self._behind_ending(conversation, whole, self._without_line_end(whole[:stop], start))))
        says = (conversation.messages[i].get(field) for i in conversation.said for field in ("content", "tool_calls"))
        if any(says) and not any(whole[slice(*span)].strip() for span in found):
            raise UserError(
                f"--data-dir {conversation.name}: the chat template has nothing of what the assistant says between "
                "{% generation %} and {% endgeneration %}; correct the template, or use --loss-on all"
            )
        return whole, found

    def _speakers(self, conversation: Conversation, whole: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The message of the assistant that stands in each of the template's tags; some templates have several each.

        By the last message whose words begin before the end of the tag, or the answer that follows it: one that calls
        tools alone has none.
        """
        own = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        if len(own) == len(spans):
            return own
        if all(message.get(WEIGHT, 1) for message in conversation.messages) or not conversation.said:
            return (conversation.said[-1:] or [-1]) * len(spans)  # all are learned, or none
        marked, rendered = self._marked(conversation)
        places = marked.places(rendered, whole)
        if places is None:
            raise UserError(
                f"--data-dir {conversation.name}: the chat template has several {{% generation %}} tags for an answer "
                "and changes what it shows of the messages, so those of weight 0 cannot be told from the rest; leave "
                "the weights out, or give a template with one by --chat-template"
            )
        begun = [max((i for i, each in places.items() if each[0][0] < stop), default=0) for _, stop in spans]
        return [next((i for i in own if i >= before), own[-1]) for before in begun]

    def _behind_ending(self, conversation: Conversation, whole: str, stop: int) -> int:
        """``stop``, or behind the control token there that ends an answer, where the tags leave that out."""
        ahead = self.control.first_in(whole[stop:])
        if not ahead or not whole.startswith(ahead, stop) or whole.endswith(self._special, 0, stop):
            return stop
        return stop + (len(ahead) if self._endings(conversation)[0] == ahead else 0)

    def _check_tags(self, conversation: Conversation, whole: str, found: list[tuple[int, int]]) -> None:
        """Refuse tags that hold words of somebody else's."""
        marked, rendered = self._marked(conversation)
        for i, places in (marked.places(rendered, whole) or {}).items():
            role = conversation.messages[i]["role"]
            tagged = any(start < last and first < stop for start, stop in found for first, last in places)
            if tagged and role != ASSISTANT:
                raise UserError(
                    f"--data-dir {conversation.name}: the chat template has what message {i + 1} says, whose role is "
                    f"{role}, between {{% generation %}} and {{% endgeneration %}}; correct the template, or use "
                    "--loss-on all"
                )

    def _without_line_end(self, text: str, start: int) -> int:
        """The end of a text, or of the control token before it: a line end behind that is not the model's to say."""
        said = text[start:].rstrip()
        return start + len(said) if said.endswith(self._special) else len(text)

    def _to_end(self, text: str, stop: int) -> int:
        """``stop``, or the end of the end of text that follows it: a model learns to stop by that.

        Where no control token ends the last turn, that is the end of text which is put behind the whole.
        """
        eos = self.tokenizer.eos_token
        if text.startswith(eos, stop) and not text.endswith(eos, 0, stop):
            return stop + len(eos)
        is_ended = text.endswith(self._special, 0, stop)
        return stop if is_ended or text[stop:].strip() else len(text)

    def _ended(self, text: str) -> str:
        """Without the line end that a template has behind the last end of text."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self.tokenizer.eos_token) else text


class _Beginnings:
    """A conversation as far as each of its messages, as the template has it: each is rendered once, where it is wanted.

    Args:
        renderer: for the tokenizer.
        conversation: as the template takes it.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation) -> None:
        self.renderer, self.conversation = renderer, conversation
        self._known: dict[tuple[int, bool], str] = {}

    @property
    def whole(self) -> str:
        return self.up_to(len(self.conversation.messages))

    def prompt(self, i: int) -> str:
        """What stands before message ``i``."""
        return self.up_to(i, prompting=True) if i else self.renderer._opening(self.conversation)

    def up_to(self, count: int, prompting: bool = False) -> str:
        """So many messages, and what invites the answer to them."""
        key = count, prompting
        if key not in self._known:
            self._known[key] = self.renderer._text(self.conversation, self.conversation.messages[:count], prompting)
        return self._known[key]


def _is_shown(sign: str, text: Text, rendered: str) -> bool:
    return sign in rendered and not (text.wrong and text.wrong + sign in rendered)


def _loss(conversation: Conversation, lost: Text) -> UserError:
    return UserError(
        f"--data-dir {conversation.name}: the chat template shows nothing of {lost.what}, or not as it is written; "
        "leave it out, say it in a message's content, or choose a template that shows it with --chat-template"
    )


def _form(conversation: Conversation) -> int:
    """The same for conversations that differ in their words alone."""
    messages = (
        (m["role"], str(m.get("name")), tuple((name, _outline(m[name])) for name in _SAID if name in m), _calls(m))
        for m in conversation.messages
    )
    return hash((*messages, _outline(conversation.tools)))


def _calls(message: dict[str, Any]) -> Any:
    functions = ((call["function"], str(call.get("id"))) for call in message.get("tool_calls", ()))
    return tuple((_outline(function), function["name"] in identity) for function, identity in functions)


def _outline(value: Any) -> Any:
    """A value with only what is in it where a text stands: something or nothing, said or thought."""
    if isinstance(value, str):
        parts = value.split(THINKING[1]) if THINKING[1] in value else [value]
        return tuple("text" if part and not part.isspace() else "" for part in parts)
    if isinstance(value, dict):
        return tuple((name, _outline(entry)) for name, entry in value.items())
    return tuple(map(_outline, value)) if isinstance(value, list) else repr(value)


def answer_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The control token that ends an answer in the tokenizer's chat template, which is often not its end of text.

    None where there is no template, or none that takes a question and an answer and has such a token behind it.
    """
    if not tokenizer.chat_template:
        return None
    answer, renderer = "Answer 5550", Renderer(tokenizer)
    messages = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": answer}
    try:
        behind = renderer.render(Conversation("a question", answer, messages=messages)).text.partition(answer)[2]
    except UserError:
        return None
    end = renderer.control.first_in(behind)
    return tokenizer.convert_tokens_to_ids(end) if end else None
