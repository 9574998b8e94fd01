"""The published ways to write a chat, token by token: what each shows, and what is learned of it."""

import jinja2
import pytest
from chat_forms import FORMS, GRANITE_42, LLAMA_3, NEMOTRON_3, QWEN_3, Form

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.sources.samples import as_document
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.encoding import encode
from granite_scu.data.tokens.templates import chosen
from granite_scu.model.loading import load_tokenizer

FIRST, SECOND, THIRD, FOURTH = 258, 259, 260, 261
"""The form's control tokens, in its order; 256 ends a text."""

SYSTEM = {"role": "system", "content": "be"}
TWO_TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "reasoning_content": "hm"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "by", "reasoning_content": "so"},
]


def chat(*messages, **fields):
    return as_document("chats.jsonl:1", {"messages": list(messages), **fields}, "text")


def spoken(tokenizer, document) -> tuple[list[str], int]:
    """The texts that are learned, and the number of thoughts that are left out."""
    found = Renderer(tokenizer).render(document)
    return [found.text[start:stop] for start, stop in found.spans], found.n_without_reasoning


SYSTEM_TURN = {
    "granite 3": [FIRST, *b"system", SECOND, *b"be", 256, 10],
    "granite 4": [FIRST, *b"system", SECOND, *b"be", 256, 10],
    "granite 4.2": [FIRST, *b"system\nbe", SECOND, 10],
    "nemotron 3": [FIRST, *b"system\nbe", SECOND, 10],
    "qwen 3": [FIRST, *b"system\nbe", SECOND, 10],
    "llama 3": [FOURTH, FIRST, *b"system", SECOND, *b"\n\nbe", THIRD],
}
# Behind it what is not learned and what is learned take turns.
EXPECTED = {
    "granite 3": (
        [FIRST, *b"user", SECOND, *b"hi", 256, 10, FIRST, *b"assistant", SECOND],
        [*b"yo", 256],
        [10, FIRST, *b"user", SECOND, *b"ok", 256, 10, FIRST, *b"assistant", SECOND],
        [*b"by", 256],
    ),
    "granite 4.2": (
        [FIRST, *b"user\nhi", SECOND, 10, FIRST, *b"assistant\n"],
        [*b"yo", SECOND],
        [10, FIRST, *b"user\nok", SECOND, 10, FIRST, *b"assistant\n<think>\n"],
        [*b"so\n</think>\nby", SECOND],
    ),
    "nemotron 3": (
        [FIRST, *b"user\nhi", SECOND, 10, FIRST, *b"assistant\n<think></think>"],
        [*b"yo", SECOND],
        [10, FIRST, *b"user\nok", SECOND, 10, FIRST, *b"assistant\n<think>\n"],
        [*b"so\n</think>\nby", SECOND],
    ),
    "qwen 3": (
        [FIRST, *b"user\nhi", SECOND, 10, FIRST, *b"assistant\n"],
        [*b"yo", SECOND],
        [10, FIRST, *b"user\nok", SECOND, 10, FIRST, *b"assistant\n"],
        [*b"<think>\nso\n</think>\n\nby", SECOND],
    ),
    "llama 3": (
        [FIRST, *b"user", SECOND, *b"\n\nhi", THIRD, FIRST, *b"assistant", SECOND, *b"\n\n"],
        [*b"yo", THIRD],
        [FIRST, *b"user", SECOND, *b"\n\nok", THIRD, FIRST, *b"assistant", SECOND, *b"\n\n"],
        [*b"by", THIRD],
    ),
}
EXPECTED["granite 4"] = EXPECTED["granite 3"]
LEFT_OUT = {"granite 3": 2, "granite 4": 2, "granite 4.2": 1, "nemotron 3": 1, "qwen 3": 1, "llama 3": 2}


BY_WORDS = {"granite 4.2", "nemotron 3", "qwen 3"}
"""These drop the thoughts of earlier answers, so that a beginning shows what the whole does not: without a look for the
words, what is learned could not be told."""


@pytest.mark.parametrize("name", FORMS)
def test_two_turns_with_thoughts_give_these_tokens(written_as, monkeypatch, name):
    tokenizer, document = written_as(FORMS[name]), chat(SYSTEM, *TWO_TURNS)
    looked_for, placed = [], Renderer._placed
    monkeypatch.setattr(Renderer, "_placed", lambda *given: looked_for.append(name) or placed(*given))
    stream = encode([document], tokenizer)
    assert bool(looked_for) == (name in BY_WORDS)
    parts = [SYSTEM_TURN[name] + EXPECTED[name][0], *EXPECTED[name][1:]]
    assert stream.tokens.tolist() == [token for part in parts for token in part]
    assert stream.targets.tolist() == [bool(i % 2) for i, part in enumerate(parts) for _ in part]
    assert Renderer(tokenizer).render(document).n_without_reasoning == LEFT_OUT[name]
    asked = Renderer(tokenizer).prompt([SYSTEM, *TWO_TURNS[:3]]).text
    assert tokenizer(asked, add_special_tokens=False).input_ids == [token for part in parts[:-1] for token in part]


@pytest.mark.parametrize(("form", "times"), [(None, 1), (LLAMA_3, 4)], ids=["tags", "beginnings"])
def test_a_chat_is_rendered_once_and_so_is_each_of_its_beginnings(written_as, monkeypatch, form, times):
    """Of two answers without tags: the whole, both prompts, and the chat as far as the first answer."""
    tokenizer = written_as(form) if form else load_tokenizer(TINY_MODEL)
    renderer, rendered = Renderer(tokenizer), []
    renderer.render(chat(*TWO_TURNS))  # the first of its form is looked at more closely
    for name in ("render", "generate"):
        own = getattr(jinja2.Template, name)
        monkeypatch.setattr(jinja2.Template, name, lambda *a, own=own, **k: rendered.append(own) or own(*a, **k))
    renderer.render(chat(*TWO_TURNS))
    assert len(rendered) == times


@pytest.mark.parametrize("form", [GRANITE_42, NEMOTRON_3, QWEN_3], ids=["granite 4.2", "nemotron 3", "qwen 3"])
def test_thoughts_within_the_content_are_those_beside_it(written_as, form):
    inline = [
        {"role": m["role"], "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
        if m["role"] == "assistant"
        else m
        for m in TWO_TURNS
    ]
    tokenizer = written_as(form)
    assert spoken(tokenizer, chat(*inline)) == spoken(tokenizer, chat(*TWO_TURNS))


@pytest.mark.parametrize(
    ("form", "argument", "expected"),
    [
        (GRANITE_42, "enable_thinking=false", ["yo<|im_end|>", "by<|im_end|>"]),
        (NEMOTRON_3, "enable_thinking=false", ["yo<|im_end|>", "by<|im_end|>"]),
        (QWEN_3, "enable_thinking=false", ["yo<|im_end|>", "by<|im_end|>"]),
        (NEMOTRON_3, "truncate_history_thinking=false", ["hm\n</think>\nyo<|im_end|>", "so\n</think>\nby<|im_end|>"]),
    ],
    ids=str,
)
def test_with_an_argument_of_the_template_it_begins_where_that_one_invites(written_as, form, argument, expected):
    thinks = "truncate" in argument
    messages = [{k: v for k, v in m.items() if thinks or k != "reasoning_content"} for m in TWO_TURNS]
    assert spoken(chosen(written_as(form), arguments=[argument]), chat(*messages)) == (expected, 0)


def test_what_has_no_end_that_can_be_found_is_refused(written_as):
    tokenizer = written_as(QWEN_3)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- '<|im_end|>\\n' }}{% endfor", "{% endfor")
    tokenizer.chat_template += "{%- if messages[-1].role == 'assistant' %}{{- '<|im_end|>' }}{% endif %}"
    with pytest.raises(UserError, match=r"chats.jsonl:1: the chat template has no .* tags"):
        Renderer(tokenizer).render(chat(*TWO_TURNS))


GPT_OSS = Form(
    "{%- for m in messages %}{{- '<|start|>' + m.role }}{%- if m.tool_calls %}"
    "{{- '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant to=functions.' }}"
    "{{- m.tool_calls[0].function.name + '<|message|>' + m.tool_calls[0].function.arguments|tojson + '<|call|>' }}"
    "{%- else %}{%- if m.role == 'assistant' %}{{- '<|channel|>final' }}{% endif %}"
    "{{- '<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|return|>",
)


def test_an_earlier_answer_may_end_otherwise_than_the_last(written_as):
    said = spoken(written_as(GPT_OSS), chat(*({k: m[k] for k in ("role", "content")} for m in TWO_TURNS)))
    assert said == (["<|channel|>final<|message|>yo<|end|>", "<|channel|>final<|message|>by<|return|>"], 0)


def test_a_call_at_the_end_is_learned_with_the_thought_before_it_that_ends_by_itself(written_as):
    call = {"type": "function", "function": {"name": "dive", "arguments": {"to": "sea"}}}
    asked = [{k: m[k] for k in ("role", "content")} for m in TWO_TURNS[:3]]
    thought = {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]}
    said, _ = spoken(written_as(GPT_OSS), chat(*asked, thought))
    assert said[-1].startswith("<|channel|>analysis<|message|>so<|end|>")
    assert said[-1].endswith(' to=functions.dive<|message|>{"to": "sea"}<|call|>')


@pytest.mark.parametrize("form", [GRANITE_42, NEMOTRON_3, QWEN_3], ids=["granite 4.2", "nemotron 3", "qwen 3"])
def test_an_answer_that_is_only_a_thought_which_is_dropped_is_not_learned(written_as, form):
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    said, n_without_reasoning = spoken(written_as(form), chat(TWO_TURNS[0], thought, *TWO_TURNS[2:]))
    assert [text for text in said if "hm" in text] == [] and "by<|im_end|>" in said[-1] and n_without_reasoning == 1


LAST_QUESTION_IS_MARKED = (
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '[INST]' + ('!' if loop.index0 > messages|length - 3 else '') }}"
    "{{- m.content + '[/INST]' }}{% else %}{{- invites|default('') + m.content + eos_token }}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}{{- invites|default('') }}{% endif %}"
)


@pytest.mark.parametrize(("invites", "begins"), [("", "<think>"), ("<think>", "hm")], ids=["itself", "invited"])
def test_the_tag_before_a_thought_is_learned_where_the_model_writes_it(written_as, invites, begins):
    """The words are looked for, since the template shows a question otherwise once it is no longer the last."""
    tokenizer = written_as(QWEN_3)
    tokenizer.chat_template = LAST_QUESTION_IS_MARKED.replace("invites|default('')", repr(invites))
    content = "hm</think>yo" if invites else "<think>hm</think>yo"
    said, _ = spoken(tokenizer, chat(*[TWO_TURNS[0], {"role": "assistant", "content": content}] * 2))
    assert [text.startswith(begins) for text in said] == [True, True]
