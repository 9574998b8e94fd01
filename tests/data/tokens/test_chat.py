"""What is learned of a conversation, token by token, through templates with and without generation tags."""

import json
from datetime import datetime

import pytest
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.sources.documents import Conversation
from granite_scu.data.sources.read import load, source
from granite_scu.data.tokens.encoding import encode
from granite_scu.data.tokens.templates import chosen

END, PAD, START, ROLE = 256, 257, 258, 259
TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def conversations(tmp_path, *records) -> list[Conversation]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return list(source(str(path), "text").read())


def learned(tokenizer, documents, loss_on="completion") -> list[int]:
    stream = encode(documents, tokenizer, loss_on=loss_on)
    return stream.tokens[stream.targets].tolist()


def said(tokenizer, documents) -> str:
    return tokenizer.decode(learned(tokenizer, documents))


def refused(tokenizer, documents) -> str:
    return refusal(encode, documents, tokenizer)


def test_a_turn_of_each_gives_these_tokens(chatting, tmp_path):
    stream = encode(conversations(tmp_path, {"messages": TURN}), chatting)
    prompt = [START, *b"user", ROLE, *b"hi", END, *b"\n", START, *b"assistant", ROLE]
    assert stream.tokens.tolist() == [*prompt, *b"yo", END]  # no line end behind the last, and one end of text
    assert stream.targets.tolist() == [False] * len(prompt) + [True] * 3
    assert stream.ends.tolist() == [len(prompt) + 2]
    assert stream.widths.tolist()[-3:] == [1, 1, 0]  # the marks are no text


def test_loss_on_all_learns_all_but_the_first_token(chatting, tmp_path):
    stream = encode(conversations(tmp_path, {"messages": TURN}), chatting, loss_on="all")
    assert stream.targets.tolist() == [False] + [True] * (len(stream.tokens) - 1)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "completion": "yo"},
        {"prompt": TURN[:1], "completion": TURN[1:]},
        {"prompt": [TURN[0], {"role": "assistant", "content": "not this"}, TURN[0]], "completion": TURN[1:]},
    ],
    ids=["texts", "messages", "several turns"],
)
@pytest.mark.parametrize("tags", [False, True])
def test_of_prompt_and_completion_the_completion_is_learned(chatting, tmp_path, record, tags):
    if tags:
        from granite_scu.model.loading import load_tokenizer

        chatting = load_tokenizer(TINY_MODEL)
    assert said(chatting, conversations(tmp_path, record)) == "yo<|end_of_text|>"


def test_without_a_template_prompt_and_completion_follow_each_other(tokenizer, tmp_path):
    stream = encode(conversations(tmp_path, {"prompt": "hi ", "completion": "yo"}), tokenizer)
    assert stream.tokens.tolist() == [*b"hi yo", END]
    assert stream.targets.tolist() == [False] * 3 + [True] * 3


COUNTED = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_where_beginnings_are_rendered_differently_the_words_are_looked_for(chatting, tmp_path):
    chatting.chat_template = COUNTED
    again = [TURN[0], {"role": "assistant", "content": "hi"}]  # told apart although both say the same
    assert said(chatting, conversations(tmp_path, {"messages": again})) == "hi<|end_of_text|>"


@pytest.mark.parametrize("shown", ["m.content | replace('yo', 'z')", "m.content * 2"])
def test_where_the_words_cannot_be_told_from_the_rest_that_is_explained(chatting, tmp_path, shown):
    chatting.chat_template = COUNTED.replace("m.content", shown)
    message = refused(chatting, conversations(tmp_path, {"messages": TURN}))
    assert "chats.jsonl:1: the chat template has no {% generation %} tags" in message
    assert "--loss-on all" in message and "--chat-template" in message
    assert learned(chatting, conversations(tmp_path, {"messages": TURN}), "all")


def test_a_template_that_writes_the_time_makes_the_same_blocks_at_any_time(chatting, tmp_path):
    with_time = "{{ strftime_now('%d %B %Y, %H:%M:%S.%f') }}" + chatting.chat_template
    chatting.chat_template = with_time
    documents = conversations(tmp_path, {"messages": TURN})
    first, later = (encode(documents, chatting, loss_on="all").tokens.tolist() for _ in range(2))
    assert first == later
    assert chatting.decode(first).startswith("01 January 2025, 00:00:00.000000")
    assert chatting.chat_template == with_time  # what is saved with the adapter goes by the clock as before


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content", ("no Jinja", "line 1")),
        ({"rag": "x", "tool_use": "y"}, ("rag, tool_use",)),
    ],
    ids=["no Jinja", "several and no default"],
)
def test_a_template_that_is_wrong_itself_is_not_blamed_on_the_messages(chatting, tmp_path, template, words):
    chatting.chat_template = template
    message = refused(chatting, conversations(tmp_path, {"messages": TURN}))
    assert message.startswith("--model: ") and "--chat-template" in message and all(word in message for word in words)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages, message 1 has the unknown role 'robot'; roles"),
        ({"messages": [TURN[0], {"role": "user"}]}, "messages, message 2 has no content; give a text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages, message 1 has a int as content; give a text"),
        ({"messages": ["hi"]}, 'messages, message 1 is no object; give {"role": "user"'),
        ({"messages": {"role": "user"}}, "messages is a dict, not a list of messages"),
        ({"prompt": "x", "completion": TURN}, "field 'completion' is a list, not text; give prompt and completion"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages, message 1 holds a lone surrogate"),
        ({"messages": TURN, "tools": "[{"}, "tools is a text that is not JSON; give a list of tools"),
        ({"messages": "[" * 10**5}, "messages is a text that is not JSON; give a list of messages"),
    ],
)
def test_messages_that_are_none_are_named_by_line(tmp_path, record, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TURN}) + "\n" + json.dumps(record) + "\n")
    assert f"chats.jsonl:2: {message}" in refusal(load, str(path), "text")


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content + eos_token }}{% endfor %}"
REFUSES = "{% if not messages %}{{ raise_exception('nothing to say') }}{% endif %}"
INVITES = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "learned_text"),
    [
        (REFUSES + TURNS + INVITES, "yo<|end_of_text|>"),
        (TURNS + INVITES, "yo<|end_of_text|>"),
        ("SYSTEM" + TURNS, "<|assistant|>yo<|end_of_text|>"),  # which never invites: the role is learned everywhere
        (
            REFUSES + TURNS + INVITES.replace("{% if ", "{% if messages[-1].role != 'assistant' and "),
            "yo<|end_of_text|>",
        ),
    ],
    ids=["refuses", "takes nothing", "never invites", "invites after a question"],
)
def test_of_a_chat_that_begins_with_the_answer_that_is_learned(chatting, tmp_path, template, learned_text):
    chatting.chat_template = template
    assert said(chatting, conversations(tmp_path, {"messages": TURN[1:]})) == learned_text


def test_an_opening_that_is_invited_otherwise_begins_with_its_first_word(chatting, tmp_path):
    chatting.chat_template = REFUSES + TURNS + INVITES.replace("|>{%", "|><think>{%")
    assert said(chatting, conversations(tmp_path, {"messages": TURN[1:]})) == "yo<|end_of_text|>"


def test_tool_calls_are_missed_though_the_template_writes_a_name_there(chatting, tmp_path):
    """Without an invitation the name of the role is part of the turn, which then looks as if something was said."""
    chatting.chat_template = TURNS.replace("m.content", "(m.content or '')")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert "shows nothing of the tool calls of message 2" in refused(
        chatting, conversations(tmp_path, {"messages": [TURN[0], call]})
    )


@pytest.mark.parametrize("tagged", [False, True], ids=["by prefixes", "by tags"])
def test_a_system_prompt_is_read_and_the_same_is_learned(chatting, tmp_path, tagged):
    later = [*TURN, {"role": "user", "content": "be?"}, {"role": "assistant", "content": "be kind"}]
    documents = conversations(tmp_path, {"messages": later}, {"messages": TURN[::-1]})
    if tagged:
        chatting.chat_template = TAGGED
    without = learned(chatting, documents)
    prompted = chosen(chatting, system="be kind")
    assert learned(prompted, documents) == without
    assert chatting.decode(encode(documents, prompted).tokens).count("be kind") == 3  # once in each, and once said


@pytest.mark.parametrize(
    "tagged",
    ["", "{{ m.content }}", "{{ m.content[0] }}{% endgeneration %}{% generation %}{{ m.content[1:] }}"],
    ids=["by prefixes", "by tags", "by several"],
)
def test_a_message_of_weight_0_is_not_learned(chatting, tmp_path, tagged):
    if tagged:
        answers = f"{{% if m.role == 'assistant' %}}{{% generation %}}{tagged}{{{{ eos_token }}}}{{% endgeneration %}}"
        chatting.chat_template = (
            f"{{% for m in messages %}}{answers}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
        )
    weighted = [TURN[0], TURN[1] | {"weight": 0}, TURN[0], TURN[1] | {"content": "aye", "weight": 1}]
    assert said(chatting, conversations(tmp_path, {"messages": weighted})) == "aye<|end_of_text|>"
    with pytest.raises(
        UserError, match=r"messages, message 2 has the weight 0.5; give 0 where it is not to be learned"
    ):
        conversations(tmp_path, {"messages": [TURN[0], TURN[1] | {"weight": 0.5}]})


def test_a_template_may_change_letters(chatting, tmp_path):
    chatting.chat_template = TURNS.replace("m.content", "m.content | upper") + INVITES
    assert said(chatting, conversations(tmp_path, {"messages": TURN})) == "YO<|end_of_text|>"


def test_a_message_is_known_by_what_is_said_in_it(tmp_path):
    """Copies with numbers and times of their own fall into the same split."""
    stamped = [{**message, "id": number, "sent": "today"} for number, message in enumerate(TURN)]
    turned = [dict(reversed(message.items())) for message in TURN]
    chats = conversations(tmp_path, *({"messages": m} for m in (TURN, stamped, turned, TURN[:1])))
    one, other, third, *others = chats + conversations(tmp_path, {"prompt": "hi", "completion": "yo"})
    assert one.digest == other.digest == third.digest not in {each.digest for each in others}
    assert other.messages[1]["id"] == 1  # which a template may use all the same


def test_what_a_table_adds_to_messages_is_left_out_again(tmp_path):
    """A column has one type: a time that JSON has not, and each field that any message of it has."""
    import pyarrow as pa
    import pyarrow.parquet

    def call(**arguments):
        made = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [made], "sent": datetime(2024, 1, 1)}

    rows = [[TURN[0], call(city="Rome")], [TURN[0], call(hour=5)]]
    pa.parquet.write_table(pa.table({"messages": rows, "n": [1, 2]}), tmp_path / "a.parquet")
    found = load(str(tmp_path / "a.parquet"), "text")
    arguments = [document.messages[1]["tool_calls"][0]["function"]["arguments"] for document in found]
    assert arguments == [{"city": "Rome"}, {"hour": 5}]
    assert found[0].messages[1]["sent"] == datetime(2024, 1, 1) and "sent" not in found[0].messages[0]


TAGGED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ '<|end_of_text|>' }}{% endgeneration %}{% else %}{{ m.content }}{{ '<|end_of_text|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{{ '<|end_of_text|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|end_of_text|>' }}"),
        ("<|end_of_text|>' }}{% endgen", "<|end_of_text|>\n' }}{% endgen"),  # as in templates with tags put in
        ("{{ '<|end_of_text|>' }}", ""),
    ],
    ids=["behind the tags", "a line end within the tags", "no end of text"],
)
def test_an_answer_is_learned_with_the_end_of_text_wherever_the_template_has_that(chatting, tmp_path, before, after):
    chatting.chat_template = TAGGED.replace(before, after)
    assert said(chatting, conversations(tmp_path, {"messages": TURN})) == "yo<|end_of_text|>"


@pytest.mark.parametrize(
    "end", ["{{ '<|im_end|>\n' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"], ids=["in", "behind"]
)
def test_a_turn_may_end_otherwise_than_the_text(chatting, tmp_path, end):
    """Within the tags or behind them: without its end an answer would not teach to stop."""
    chatting.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    chatting.chat_template = TAGGED.replace("{{ '<|end_of_text|>' }}{% endgeneration %}", end)
    documents = conversations(tmp_path, {"messages": SILENT + TURN})
    assert said(chatting, documents) == "yo<|im_end|>"


SILENT = [TURN[0], {"role": "assistant", "content": "  "}]


@pytest.mark.parametrize(
    "record", [{"messages": SILENT}, {"prompt": "hi", "completion": None}, {"prompt": "hi", "completion": ""}], ids=str
)
@pytest.mark.parametrize("tags", [False, True])
def test_an_answer_that_says_nothing_is_not_learned(chatting, tmp_path, record, tags):
    """Its end of text alone would teach the model not to answer."""
    if tags:
        chatting.chat_template = TAGGED
    documents = conversations(tmp_path, record) + conversations(tmp_path, {"messages": SILENT + TURN})
    assert learned(chatting, documents[:1]) == []
    assert said(chatting, documents) == "yo<|end_of_text|>"


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "input_text", "text": "gone"}, "text", {"type": "text"}])
def test_a_part_of_a_message_that_is_no_text_is_refused(tmp_path, part):
    with pytest.raises(UserError, match=r"chats.jsonl:1: messages, message 1 has a part of type '.*'; only"):
        conversations(tmp_path, {"messages": [{"role": "user", "content": [part]}, TURN[1]]})


def with_template(tokenizer, content: str):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' }}"
        + content
        + "{{ '<|end_of_text|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


CALLING = {**TURN[1], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("content", "messages", "number"),
    [
        ("{% if m.role != 'developer' %}{{ m.content }}{% endif %}", [{"role": "developer", "content": "x"}, *TURN], 1),
        ("{% if m.tool_calls %}call{% else %}{{ m.content }}{% endif %}", [TURN[0], CALLING], 2),
        ("{% if m.tool_calls %}call{% else %}{{ m.content }}{% endif %}", [*TURN, TURN[0], CALLING], 4),
        (
            "{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}",
            [{"role": "system", "content": "s"}, {"role": "system", "content": "s"}, *TURN],
            2,
        ),
    ],
    ids=["role", "beside a call", "beside a later call", "second system message"],
)
def test_a_message_whose_content_the_template_passes_over_is_refused(chatting, tmp_path, content, messages, number):
    documents = conversations(tmp_path, {"messages": TURN}, {"messages": messages})
    words = f"chats.jsonl:2: the chat template shows nothing of the content of message {number}"
    assert words in refused(with_template(chatting, content), documents)


def test_tools_that_the_template_passes_over_are_refused_though_others_are_shown(chatting, tmp_path):
    with_template(chatting, "{{ m.content }}{{ tools[0].function.name if tools }}")
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "other")]
    documents = conversations(tmp_path, {"messages": TURN, "tools": tools[:1]}, {"messages": TURN, "tools": tools})
    assert "chats.jsonl:2: the chat template shows nothing of the tools beside" in refused(chatting, documents)


def test_messages_count_where_the_text_beside_them_is_empty(tmp_path):
    """As in a table that was joined from texts and chats, and as pandas writes it without nulls."""
    both = {"text": "a text", "messages": TURN}
    empty = {"text": "", "messages": TURN}
    documents = conversations(tmp_path, {"text": None, "messages": TURN}, both, empty, {"text": None, "messages": []})
    assert [isinstance(document, Conversation) for document in documents] == [True, False, True, False]
    assert (documents[1].text, documents[3].text) == ("a text", "")


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            "{{ m.content + eos_token }}{% generation %}{% endgeneration %}",
            "nothing of what the assistant says between",
        ),
        (
            "{% generation %}{{ m.content + eos_token }}{% endgeneration %}",
            "has what message 1 says, whose role is user",
        ),
    ],
    ids=["nothing", "what the user says"],
)
def test_tags_around_something_else_are_refused_by_name(chatting, tmp_path, turn, words):
    chatting.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    assert words in refused(chatting, conversations(tmp_path, {"messages": TURN}))


def test_where_no_control_token_ends_a_turn_the_end_of_text_is_learned(chatting, tmp_path):
    """As with a template of another model's, whose tokens are none of this tokenizer's; by position, too."""
    turns = "{% for m in messages %}[{{ m.role }}]{{ '!' if loop.last }}{{ m.content }}[end]\n{% endfor %}"
    chatting.chat_template = turns + "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert said(chatting, conversations(tmp_path, {"messages": TURN})) == "yo[end]\n<|end_of_text|>"
