"""What the fields of a record mean: one table of the formats that conversations are written in, and how each becomes
messages.

To add a format, add a line to ``FORMATS``, its name to ``DataConfig.record_format`` and a test of one literal record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from granite_scu.control.units import counted
from granite_scu.data.sources.documents import ASSISTANT, ROLES, WEIGHT
from granite_scu.data.sources.formats import Record

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

SPEAKERS = {
    **{role: role for role in ROLES},
    "function": "tool",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT),
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
    """

    name: str
    label: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    chat: Callable[[Record], Chat]

    @property
    def fields(self) -> tuple[str, ...]:
        """All that is read of a record."""
        return self.needed + self.optional


def from_messages(record: Record) -> Chat:
    """The messages as they are, after the system message that may stand beside them."""
    return Chat(_with_system(record["system"], record["messages"]))


def from_prompt_and_completion(record: Record) -> Chat:
    """Both are texts, or both are messages; a system message may stand beside them."""
    system, prompt, completion = record["system"], record["prompt"], record["completion"]
    if isinstance(prompt, str):
        messages = turns(system, prompt, completion)
        plain = "\n\n".join(part for part in (system, prompt) if part.strip()) if system.strip() else prompt
        return Chat(messages, len(messages) - 1, (plain, completion))
    prompt = _with_system(system, prompt)
    return Chat(prompt + completion, len(prompt))


def from_alpaca(record: Record) -> Chat:
    """The instruction, a blank line and the input are what the user says; there is no preamble.

    An instruction model has its own way to mark a request, its chat template. "Below is an instruction ..." is how the
    base models of 2023, which had none, were told. A tokenizer without chat template still gets it.
    """
    system, instruction, context, output = (record[name] for name in ("system", "instruction", "input", "output"))
    request = "\n\n".join(part for part in (instruction, context) if part.strip())
    *first, asked, answer = turns(system, request, output)
    if before := [message for pair in record[HISTORY] for message in turns("", *pair)]:
        return Chat([*first, *before, asked, answer])
    return Chat([*first, asked, answer], plain=(alpaca_prompt(instruction, context, system), output))


def from_sharegpt(record: Record) -> Chat:
    """The messages, after the system message that may stand beside them."""
    return Chat(_with_system(record["system"], record["conversations"]))


def from_input_and_output(record: Record) -> Chat:
    """A text of the user and the answer to it."""
    return Chat(turns(record["system"], record["input"], record["output"]))


def from_question_and_answer(record: Record) -> Chat:
    """The user gives a context, a blank line and a question; the answer to it."""
    asked = "\n\n".join(part for part in (record["context"], record["question"]) if part.strip())
    return Chat(turns(record["system"], asked, record["answer"]))


FORMATS = (
    RecordFormat("messages", "messages", ("messages",), ("system", TOOLS, FUNCTIONS), from_messages),
    RecordFormat(
        "prompt-completion",
        "prompt and completion",
        ("prompt", "completion"),
        ("system", TOOLS),
        from_prompt_and_completion,
    ),
    RecordFormat("alpaca", "Alpaca", ("instruction", "output"), ("input", "system", HISTORY), from_alpaca),
    RecordFormat("sharegpt", "ShareGPT", ("conversations",), ("system", TOOLS), from_sharegpt),
    RecordFormat("input-output", "input and output", ("input", "output"), ("system",), from_input_and_output),
    RecordFormat(
        "question-answer",
        "question and answer",
        ("question", "answer"),
        ("context", "system"),
        from_question_and_answer,
    ),
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
    complete = [each for each in FORMATS if all(name in record for name in each.needed)]
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
    if (call := message.pop("function_call", None)) and not message.get("tool_calls"):  # of OpenAI's first files
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message.pop("train", True) is False:  # of axolotl
        message[WEIGHT] = 0
    role = message.get("role")
    return {**message, "role": SPEAKERS[role]} if isinstance(role, str) and role in SPEAKERS else message
