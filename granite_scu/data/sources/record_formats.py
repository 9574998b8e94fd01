"""What the fields of a record mean: one table of the formats that conversations are written in, and how each becomes
messages.

To add a format, add a line to ``FORMATS``, its name to ``DataConfig.record_format`` and a test of one literal record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from granite_scu.config.untrusted_input import parse_json
from granite_scu.control.units import counted
from granite_scu.data.sources.documents import ASSISTANT, ROLES, WEIGHT
from granite_scu.data.sources.formats import Record, unambiguous

AUTO, TEXT = "auto", "text"
"""Values of ``--record-format`` beside the names of ``FORMATS``: recognise the format, or read the text column."""

TOOLS, FUNCTIONS = "tools", "functions"
"""Fields beside a conversation: descriptions of what the assistant may call, now and in OpenAI's first files."""

HISTORY = "history"
"""Field of an Alpaca record, as LLaMA-Factory has it: the requests and answers before its own, in pairs."""

EITHER = ("prompt", "completion")
"""Fields that hold texts or messages, both the same."""

OF_MESSAGES = ("messages", "conversations")
"""Fields that hold messages. All others but tools hold a text; null or missing is an empty one."""

SYSTEM = ("system", "system_prompt")
"""Fields for what the system says; the first counts that says something."""

CALL = "function_call"
"""Field of a message, of OpenAI's first files, and speaker of a message that is JSON, of LLaMA-Factory's."""

SPEAKERS = {
    **{role: role for role in ROLES},
    "function": "tool",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", CALL), ASSISTANT),
    "observation": "tool",
}
"""Who may speak in a conversation, by the names of chat templates and by ShareGPT's, and the role of each."""


class Chat(NamedTuple):
    """What a record says.

    Attributes:
        messages: ``role`` and ``content`` each.
        n_prompt: messages at the beginning that are not to be learned, whoever says them.
        plain: prompt and completion as texts, for a tokenizer without chat template; None where there is no usual way
            to write them.
    """

    messages: list[Any]
    n_prompt: int = 0
    plain: tuple[str, str] | None = None


@dataclass(frozen=True)
class RecordFormat:
    """A way to write conversations.

    Attributes:
        name: the value of ``--record-format``.
        label: as messages call it.
        needed: fields by which it is recognised.
        optional: fields that are read where they are there.
        chat: what a record says, given all its ``fields``, checked: texts, and lists of messages.
        is_common: whether its fields are words that other records have, too: any other format goes before it.
    """

    name: str
    label: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    chat: Callable[[Record], Chat]
    is_common: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """All that is read of a record."""
        return self.needed + self.optional


def from_prompt_and_completion(record: Record) -> Chat:
    """Both are texts, or both are messages; a system message may stand beside them."""
    system, prompt, completion = record["system"], record["prompt"], record["completion"]
    if isinstance(prompt, str):
        messages = turns(system, prompt, completion)
        plain = _joined(system, prompt) if system.strip() else prompt
        return Chat(messages, len(messages) - 1, (plain, completion))
    prompt = _with_system(system, prompt)
    return Chat(prompt + completion, len(prompt))


def from_alpaca(record: Record) -> Chat:
    """The instruction, a blank line and the input are what the user says; there is no preamble.

    An instruction model has its own way to mark a request, its chat template. "Below is an instruction ..." is how the
    base models of 2023, which had none, were told. A tokenizer without chat template still gets it.
    """
    system, instruction, context, output = (record[name] for name in ("system", "instruction", "input", "output"))
    *first, asked, answer = turns(system, _joined(instruction, context), output)
    if before := [message for pair in record[HISTORY] for message in turns("", *pair)]:
        return Chat([*first, *before, asked, answer])
    return Chat([*first, asked, answer], plain=(alpaca_prompt(instruction, context, system), output))


def from_messages(field: str) -> Callable[[Record], Chat]:
    """The messages of a field as they are, after the system message that may stand beside them."""
    return lambda record: Chat(_with_system(record["system"], record[field]))


def _pair(*asked: str, answer: str, is_common: bool = False) -> RecordFormat:
    """The format of a request and its answer, texts both, called after them; the fields of the request are what the
    user says, in this order and a blank line apart. Those with a question mark may be missing."""
    names = [name.rstrip("?") for name in asked]
    needed = (*(name for name in names if name in asked), answer)
    optional = (*(name for name in names if name not in asked), *SYSTEM)

    def chat(record: Record) -> Chat:
        return Chat(turns(record["system"], _joined(*(record[name] for name in names)), record[answer]))

    return RecordFormat("-".join(needed), " and ".join(needed), needed, optional, chat, is_common)


def _joined(*parts: str) -> str:
    """Texts a blank line apart; one alone as it is."""
    return "\n\n".join(part for part in parts if part.strip()) if parts[1:] else parts[0]


FORMATS = (
    RecordFormat("messages", "messages", ("messages",), (*SYSTEM, TOOLS, FUNCTIONS), from_messages("messages")),
    RecordFormat(
        "prompt-completion",
        "prompt and completion",
        ("prompt", "completion"),
        (*SYSTEM, TOOLS),
        from_prompt_and_completion,
    ),
    RecordFormat("alpaca", "Alpaca", ("instruction", "output"), ("input", *SYSTEM, HISTORY), from_alpaca),
    RecordFormat("sharegpt", "ShareGPT", ("conversations",), (*SYSTEM, TOOLS), from_messages("conversations")),
    _pair("input", answer="output"),
    _pair("context?", "question", answer="answer"),
    _pair("instruction", "input?", "context?", answer="response", is_common=True),
    _pair("prompt", "input?", answer="response", is_common=True),
    _pair("user", answer="assistant", is_common=True),
)

BY_NAME = {each.name: each for each in FORMATS}

LABELS = {TEXT: "text", **{each.name: each.label for each in FORMATS}}

FIELDS = tuple(dict.fromkeys(field for each in FORMATS for field in each.fields))
"""Every field that some format reads."""


def matching(record: Mapping[str, Any]) -> list[RecordFormat]:
    """The formats whose fields a record has: one, where it is written in one.

    A format whose fields are all fields of another that matches is none of its own: Alpaca has ``input`` and
    ``output``. In a table that was joined from several, the empty fields do not count.
    """
    every = [each for each in FORMATS if all(name in record for name in each.needed)]
    complete = [each for each in every if not each.is_common] or every
    if len(complete) < 2:
        return complete
    own = [
        each
        for each in complete
        if not any(each is not other and set(each.needed) <= set(other.fields) for other in complete)
    ]
    if len(own) < 2:
        return own
    return [each for each in own if any(record[name] for name in each.needed)] or own[:1]


def in_words(counts: Mapping[str, int], has_template: bool) -> str:
    """How records were read, for the user.

    Args:
        counts: documents by the name of the format.
        has_template: whether the tokenizer has a chat template.

    >>> in_words({"alpaca": 51760, "text": 1}, has_template=True)
    'read as Alpaca: 51,760 conversations; as text: 1 document'
    """
    nouns = {name: "document" if name == TEXT else "conversation" for name in counts}
    parts = [f"as {LABELS[name]}: {counted(count, nouns[name])}" for name, count in counts.items()]
    plain = "alpaca" in counts and not has_template
    without = "; the tokenizer has no chat template, so Alpaca's own prompt (### Instruction: ...) is written"
    return f"read {'; '.join(parts)}{without if plain else ''}"


def turns(system: str, user: str, assistant: str) -> list[dict[str, str]]:
    """Messages of a request and its answer; without a system message where it is empty."""
    said = [{"role": "user", "content": user}, {"role": ASSISTANT, "content": assistant}]
    return [*system_message(system), *said]


def system_message(text: str) -> list[dict[str, str]]:
    """The message in a list, which is empty where the text is."""
    return [{"role": "system", "content": text}] if text.strip() else []


def _with_system(text: str, messages: list[Any]) -> list[Any]:
    """The messages after a system message, but for one that they have already."""
    said = system_message(text)
    return messages if messages[:1] == said else [*said, *messages]


def alpaca_prompt(instruction: str, context: str, system: str) -> str:
    """The prompt that Stanford Alpaca was trained on; a system message stands in place of its first sentences."""
    paired = ", paired with an input that provides further context" if context.strip() else ""
    preamble = system if system.strip() else (
        f"Below is an instruction that describes a task{paired}. "
        "Write a response that appropriately completes the request."
    )  # fmt: skip
    given = f"### Input:\n{context}\n\n" if context.strip() else ""
    return f"{preamble}\n\n### Instruction:\n{instruction}\n\n{given}### Response:\n"


def as_message(entry: dict[str, Any]) -> dict[str, Any]:
    """A message with the names that chat templates know, where it has ShareGPT's.

    >>> as_message({"from": "gpt", "value": "Yes."})
    {'role': 'assistant', 'content': 'Yes.'}
    """
    message = {name: field for name, field in entry.items() if field is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message and theirs in message:
            message[ours] = message.pop(theirs)
    if (call := message.pop(CALL, None)) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": call}]
    if (train := message.pop("train", 1)) != 1:  # of axolotl
        message[WEIGHT] = train or 0
    role = message.get("role")
    if role == CALL:
        message["tool_calls"] = _calls(message.pop("content", None))
    return {**message, "role": SPEAKERS[role]} if isinstance(role, str) and role in SPEAKERS else message


def _calls(said: Any) -> list[Any]:
    """The calls that a text holds as JSON, one or a list; itself where it is none, which is refused where it shows."""
    try:
        found = parse_json(said, object_pairs_hook=unambiguous) if isinstance(said, str) else said
    except ValueError:
        found = said
    return found if isinstance(found, list) else [found]
