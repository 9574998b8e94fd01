"""Records of tools, null contents, parts and names through templates that take them in different ways, or not."""

import pytest
from chat_forms import DEEPSEEK_3, GRANITE_4, HERMES, LLAMA_31, QWEN_3_CALLS, Form
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.sources.samples import as_document
from granite_scu.data.tokens.chat import Renderer
from granite_scu.model.loading import load_tokenizer

SMOL = Form(
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)
"""Of SmolLM: contents alone, which must be texts; a system turn of its own."""

QUESTION = {"role": "user", "content": "Paris?"}
SAYS = {"role": "assistant", "content": "Sun."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def calls(*arguments, **fields):
    made = [
        {"id": f"call{i}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "tool_calls": made, **fields}


def chat(*messages, **fields):
    return as_document("chats.jsonl:7", {"messages": list(messages), **fields}, "text")


def learned(tokenizer, document) -> list[str]:
    found = Renderer(tokenizer).render(document)
    return [found.text[start:stop] for start, stop in found.spans]


def refused(tokenizer, document) -> str:
    return refusal(Renderer(tokenizer).render, document, begins="--data-dir chats.jsonl:7: ")


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"é\\""}}\n</tool_call><|im_end|>'
LEARNED = {
    "hermes": (HERMES, HERMES_CALL),
    "qwen 3": (QWEN_3_CALLS, HERMES_CALL),
    "granite 4": (GRANITE_4, HERMES_CALL.replace("<|im_end|>", "<|end_of_text|>")),
    "llama 3.1": (LLAMA_31, '{"name": "weather", "parameters": {"city": "Paris \\"é\\""}}<|eot_id|>'),
    "deepseek 3": (DEEPSEEK_3, '<C>weather\n{"city": "Paris \\"é\\""}</C><|end|>'),
}


@pytest.mark.parametrize("arguments", ['{"city":"Paris \\"\\u00e9\\""}', {"city": 'Paris "é"'}], ids=["text", "object"])
@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}], ids=["none", "null", "empty"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_call_is_learned_as_the_template_writes_it_however_the_record_does(written_as, name, empty, arguments):
    form, expected = LEARNED[name]
    answer = {"role": "tool", "tool_call_id": "call0", "name": "weather", "content": "22"}
    document = chat(QUESTION, calls(arguments, **empty), answer, SAYS)
    assert learned(written_as(form), document) == [expected, f"Sun.{form.eos}"]


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{{ m.content | tojson if m.content is not string else m.content }}",
        "{{ m.content + '' }}",
        "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text + '\n' * (not loop.last) }}{% endif %}{% endfor %}",
    ],
    ids=["printed", "as JSON", "only text", "parts"],
)
def test_parts_of_a_content_are_one_text_where_the_template_takes_no_parts(chatting, content):
    chatting.chat_template = f"{{% for m in messages %}}{content}{{{{ eos_token }}}}{{% endfor %}}"
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    document = chat(QUESTION | {"content": parts}, SAYS | {"content": parts})
    assert learned(chatting, document) == ["one\ntwo<|end_of_text|>"]


def test_a_name_may_be_shown_within_the_id_of_its_call(chatting):
    """As Kimi K2 does; an id of another kind says nothing."""
    chatting.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.id + ' ' + c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    )
    called = calls('{"a": 1}')
    called["tool_calls"][0]["id"] = "functions.weather:0"
    renderer = Renderer(chatting)
    assert 'functions.weather:0 {"a": 1}' in renderer.render(chat(QUESTION, called)).text
    with pytest.raises(UserError, match="the tool calls of message 2"):
        renderer.render(chat(QUESTION, calls('{"a": 1}')))


FIRST_CALL = Form(HERMES.template.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]"), *HERMES[1:])
ANN, BOB = QUESTION | {"name": "ann"}, QUESTION | {"name": "bob"}
TOLD = "{% for m in messages %}{{ m.name | default(m.role) + ':' + m.content + eos_token }}{% endfor %}"
LOST = {
    "calls": (SMOL, chat(QUESTION, calls("{}", content=None)), "the tool calls of message 2"),
    "calls, in tags": (None, chat(QUESTION, calls("{}", content="hm")), "the tool calls of message 2"),
    "tools": (SMOL, chat(QUESTION, SAYS, tools=TOOLS), "the tools beside the messages"),
    "a name": (SMOL, chat(ANN, SAYS, BOB, SAYS), "the name of message 1"),
    "one of two": (FIRST_CALL, chat(QUESTION, calls("{}", '{"a": 1}')), "the tool calls of message 2"),
    "arguments": (
        Form(HERMES.template.replace("c.arguments | tojson", "'{}'"), *HERMES[1:]),
        chat(QUESTION, calls('{"a": 1}')),
        "the arguments of the tool calls of message 2",
    ),
    "what is said beside a call": (LLAMA_31, chat(QUESTION, calls("{}", content="Let me see.")), "the content of"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_leaves_out_is_refused_by_name(written_as, name):
    form, document, what = LOST[name]
    tokenizer = written_as(form) if form else load_tokenizer(TINY_MODEL)
    message = refused(tokenizer, document)
    assert f"shows nothing of {what}" in message and "--chat-template" in message


@pytest.mark.parametrize("shown", ["m.tool_calls", "m.tool_calls | string | tojson"])
def test_calls_that_are_printed_as_python_does_are_refused(chatting, shown):
    chatting.chat_template = f"{{% for m in messages %}}{{{{ m.content or {shown} }}}}{{{{ eos_token }}}}{{% endfor %}}"
    assert "tool calls of message 2, or not as it is written" in refused(chatting, chat(QUESTION, calls('{"a": 1}')))


@pytest.mark.parametrize("name", ["ann", "", 3, ["ann"], {"first": "ann"}], ids=str)
def test_a_name_that_tells_nobody_apart_may_be_left_out(written_as, name):
    named = QUESTION | {"name": name}
    assert learned(written_as(SMOL), chat(named, SAYS, named, SAYS)) == ["Sun.<|im_end|>"] * 2


def test_a_name_that_the_template_shows_is_shown(chatting):
    chatting.chat_template = TOLD
    assert "ann:Paris?" in Renderer(chatting).render(chat(ANN, SAYS, BOB, SAYS)).text


def test_every_conversation_of_a_new_form_is_looked_at(written_as):
    """Those of a form that was seen are not: they differ in their words alone."""
    renderer = Renderer(written_as(FIRST_CALL))
    for arguments in ('{"a": "x"}', '{"a": "y"}', "{}"):
        renderer.render(chat(QUESTION, calls(arguments)))
    with pytest.raises(UserError, match="shows nothing of the tool calls"):
        renderer.render(chat(QUESTION, calls("{}", "{}")))
