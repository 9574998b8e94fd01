"""Records as other tools write them: what is said in each, how it is recognised, and what is refused with its line."""

import json
import logging
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import refused_data

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources import hub, record_formats, samples
from granite_scu.data.sources.documents import ROLES, Conversation, Document
from granite_scu.data.sources.read import load
from granite_scu.data.sources.record_formats import AUTO, FORMATS, TEXT
from granite_scu.data.streaming import StreamedDataModule
from granite_scu.data.tokens.corpus import prepare
from granite_scu.data.tokens.encoding import encode


def said(*messages: str) -> list[dict[str, str]]:
    """Messages of ``role: content`` each."""
    return [dict(zip(("role", "content"), message.split(": ", 1), strict=True)) for message in messages]


LITERAL = {
    "messages": (
        {"system": "Be kind.", "messages": said("user: hi", "assistant: yo")},
        said("system: Be kind.", "user: hi", "assistant: yo"),
    ),
    "prompt-completion": (
        {"prompt": "hi", "completion": "yo", "system": "Be kind."},
        said("system: Be kind.", "user: hi", "assistant: yo"),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief."},
        said("system: Be brief.", "user: Add.\n\n1 and 2", "assistant: 3"),
    ),
    "sharegpt": (
        {
            "id": "x_0",
            "system": "Be kind.",
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "yo"},
                {"from": "tool", "value": "3"},
                {"role": "user", "content": "?"},
                {"from": "assistant", "value": "!"},
            ],
        },
        said("system: Be kind.", "user: hi", "assistant: yo", "tool: 3", "user: ?", "assistant: !"),
    ),
    "input-output": ({"input": "hi", "output": "yo"}, said("user: hi", "assistant: yo")),
    "question-answer": (
        {"question": "1 + 2?", "answer": "3", "context": "Add.", "system_prompt": "Be kind."},
        said("system: Be kind.", "user: Add.\n\n1 + 2?", "assistant: 3"),
    ),
    "instruction-response": (
        {"instruction": "Add.", "context": "1 and 2", "input": "Say it.", "response": "3", "category": "qa"},
        said("user: Add.\n\nSay it.\n\n1 and 2", "assistant: 3"),
    ),
    "prompt-response": ({"prompt": "hi", "input": "you", "response": "yo"}, said("user: hi\n\nyou", "assistant: yo")),
    "user-assistant": ({"user": "hi", "assistant": "yo"}, said("user: hi", "assistant: yo")),
}


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def refused(tmp_path: Path, *records: dict, column: str = "text", record_format: str = AUTO) -> str:
    path = write(tmp_path / "records.jsonl", *records)
    return refused_data(path, column, begins=f"--data-dir {path}:{len(records)}: ", record_format=record_format)


def test_a_text_beside_a_conversation_is_read_and_that_is_said_once(tmp_path, caplog):
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is an instruction. Add. 3"}
    path = write(tmp_path / "records.jsonl", record, record)
    documents = [load(str(path), "text") for _ in range(2)]
    assert {document.text for found in documents for document in found} == {record["text"]}
    [said] = [message for message in caplog.messages if "--record-format alpaca" in message]
    assert f"{path}:1" in said and "instruction and output" in said


def test_every_format_has_a_name_in_the_settings_and_a_literal_record():
    names = [each.name for each in FORMATS]
    assert list(get_args(get_type_hints(DataConfig)["record_format"])) == [AUTO, TEXT, *names]
    assert list(LITERAL) == names


@pytest.mark.parametrize("name", LITERAL)
@pytest.mark.parametrize("asked", [False, True], ids=["recognised", "asked for"])
def test_a_record_says_these_messages(name, asked):
    record, expected = LITERAL[name]
    document = samples.as_document("a", record, "text", name if asked else AUTO)
    assert isinstance(document, Conversation) and document.record_format == name
    assert list(document.messages) == expected


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=8)
SPOKEN = st.tuples(st.sampled_from(sorted({*record_formats.SPEAKERS} - {record_formats.CALL})), TEXTS)


@given(instruction=TEXTS, context=st.none() | TEXTS, output=TEXTS, system=st.none() | TEXTS)
def test_an_alpaca_record_is_the_chat_that_it_stands_for(instruction, context, output, system):
    record = {"instruction": instruction, "input": context, "output": output, "system": system}
    document = samples.as_document("a", record, "text")
    assert isinstance(document, Conversation)
    *before, user, answer = document.messages
    assert before == ([{"role": "system", "content": system}] if system and system.strip() else [])
    assert user["content"] == "\n\n".join(part for part in (instruction, context or "") if part.strip())
    assert (user["role"], answer) == ("user", {"role": "assistant", "content": output})
    chat = samples.as_document("a", {"messages": list(document.messages)}, "text")
    assert (chat.digest, chat.n_prompt) == (document.digest, 0)  # a copy of the same chat is known as one


@given(spoken=st.lists(SPOKEN, max_size=5), answer=TEXTS)
def test_a_sharegpt_record_is_the_chat_that_it_stands_for(spoken, answer):
    entries = [{"from": speaker, "value": text} for speaker, text in [*spoken, ("gpt", answer)]]
    document = samples.as_document("a", {"conversations": entries}, "text")
    names = {
        "human": "user",
        **dict.fromkeys(("function", "observation"), "tool"),
        **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    }
    assert [message["role"] for message in document.messages] == [names.get(e["from"], e["from"]) for e in entries]
    assert [message["content"] for message in document.messages] == [entry["value"] for entry in entries]
    assert {message["role"] for message in document.messages} <= set(ROLES)


@given(st.data())
def test_a_record_of_one_format_is_recognised_whatever_else_is_in_it(data):
    name = data.draw(st.sampled_from(list(LITERAL)))
    read = {field for each in FORMATS for field in each.fields}
    keys = st.text(max_size=8).filter(lambda key: key not in read)
    others = data.draw(st.dictionaries(keys, st.none() | TEXTS, max_size=3))
    record = {**others, **LITERAL[name][0]}
    assert [each.name for each in record_formats.matching(record)] == [name]


def test_the_text_column_goes_first(tmp_path):
    record = {"text": "a text", **LITERAL["alpaca"][0]}
    assert samples.as_document("a", record, "text") == Document("a", "a text")
    assert samples.as_document("a", record, "output").text == "3"
    assert isinstance(samples.as_document("a", record, "text", "alpaca"), Conversation)
    with pytest.raises(UserError, match="--record-format alpaca: has no text column; leave it or --text-column body"):
        DataConfig(text_column="body", record_format="alpaca")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([LITERAL["alpaca"][0], LITERAL["sharegpt"][0]], "is ShareGPT (conversations), and what comes before it is"),
        (
            [{"instruction": "a", "output": "b", "conversations": [{"from": "gpt", "value": "c"}]}],
            "has the fields of more than one format, Alpaca (instruction, output) and ShareGPT (conversations); say "
            "which is meant with --record-format alpaca or sharegpt",
        ),
        ([{"instruction": "a", "reply": "b"}], "no field 'text', there are: instruction, reply; name one with"),
        (
            [{"prompt": "a", "response": "b", "user": "c", "assistant": "d"}],
            "has the fields of more than one format, p",
        ),
        ([{"prompt": "a", "completion": "b", "label": False}], "is preference data (prompt, completion, label), and"),
        ([{"prompt": "a", "completion": "b", "label": "True"}], "is preference data (prompt, completion, label), and"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "is preference data (prompt, chosen, rejected), and all"),
        (
            [{"contents": [{"role": "user", "parts": []}]}],
            "no field 'text', and 'contents' holds a list of objects; ca",
        ),
        (
            [{"conversations": [{"from": "gpt", "value": "a", "train": "false"}]}],
            "conversations, message 1 has the wei",
        ),
        (
            [{"conversations": [{"from": "gpt", "value": "a", "train_detail": []}]}],
            "conversations, message 1 has train",
        ),
        (
            [{"conversations": [{"from": "function_call", "value": "f()"}]}],
            "conversations, message 1: tool_calls has a",
        ),
        ([{"instruction": "a", "output": 3}], "field 'output' is a int, not text; give a text"),
        (
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}],
            "conversations, message 2 has the unknown role 'narrator'; roles are system, developer, user, assistant, "
            "tool, function, human, gpt",
        ),
        ([{"conversations": [{"from": "gpt", "value": None}]}], "conversations, message 1 has no content; give a"),
        ([{"conversations": ["a"]}], 'conversations, message 1 is no object; give {"role"'),
    ],
)
def test_what_cannot_be_read_is_named_by_line_and_fields(tmp_path, records, message):
    assert f": {message}" in refused(tmp_path, *records)


def test_a_record_without_the_fields_of_the_format_that_is_asked_for(tmp_path):
    message = refused(tmp_path, {"question": "a", "answer": "b"}, record_format="alpaca")
    assert "no field 'instruction', which --record-format alpaca needs, there are: question, answer; name" in message
    message = refused(tmp_path, {"question": "a", "answer": "b"}, record_format="text")
    assert "no field 'text', there are: question, answer; name one with --text-column" in message


def test_files_of_a_folder_may_each_have_their_own_format(tmp_path):
    for name, (record, _) in LITERAL.items():
        write(tmp_path / f"{name}.jsonl", record, record)
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    found = load(str(tmp_path), "text")
    assert [document.record_format for document in found] == sorted([*2 * list(LITERAL), TEXT])


def test_a_data_set_of_the_hub_is_read_alike(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([LITERAL["alpaca"][0], {"instruction": "a", "output": "b"}]))
    try:
        found = load(f"hf:{tmp_path}", "text")  # where a row lacks a field the table has null
        assert [list(document.messages) for document in found] == [
            LITERAL["alpaca"][1],
            said("user: a", "assistant: b"),
        ]
        with pytest.raises(UserError, match=r"train: row 1: no field 'question', which --record-format question-answ"):
            load(f"hf:{tmp_path}", "text", record_format="question-answer")
    finally:
        hub._load.cache_clear()


def test_axolotls_train_and_llama_factorys_history_are_heeded():
    speak = [("human", "a", None), ("gpt", "b", False), ("gpt", "c", 0), ("gpt", "d", True)]
    turns = [{"from": who, "value": text} | ({} if train is None else {"train": train}) for who, text, train in speak]
    assert samples.as_document("a", {"conversations": turns}, "text").said == [3]
    assert samples.as_document("a", {"conversations": turns[:1]}, "text").said == []  # counted, as in other formats
    record = {"instruction": "and why?", "input": "", "output": "because", "history": [["is it?", "yes"]]}
    found = samples.as_document("a", record, "text")
    assert list(found.messages) == said("user: is it?", "assistant: yes", "user: and why?", "assistant: because")
    with pytest.raises(UserError, match="history is no list of pairs"):
        samples.as_document("a", record | {"history": ["is it?"]}, "text")


def test_in_a_joined_csv_an_empty_text_is_none(tmp_path):
    (tmp_path / "a.csv").write_text("text,question,answer\nword,,\n,q,a\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "", "prompt": "q", "response": "a", "system": NaN}\n')
    for name, wanted in (("a.csv", "question-answer"), ("a.jsonl", "prompt-response")):
        assert [each.record_format for each in load(str(tmp_path / name), "text")] == ["text", wanted]


def test_a_format_of_common_fields_stands_back_behind_any_other():
    """A file that was read before still reads the same, whatever pairs of fields are added."""
    record = {"prompt": "a", "response": "b", "user": "c", "assistant": "d"}
    for name, (known, _) in LITERAL.items():
        if not record_formats.BY_NAME[name].is_common:
            assert samples.as_document("a", record | known, "text").record_format == name


def test_fields_that_are_not_read_are_named_once_for_a_file(tmp_path, caplog):
    rows = [{"question": "a", "answer": "b", "system_prompt": "c", "category": "d", "id": 1}] * 2
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", *[{"text": "a", "url": "b"}] * 2)
    for level in (logging.WARNING, logging.INFO, logging.INFO):  # a command looks at the beginning before it logs
        caplog.set_level(level, "granite_scu")
        load(str(tmp_path), "text")
    assert [line.partition(": fields ")[2] for line in caplog.messages if "fields" in line] == [
        "not read: category, id",
        "not read: url",
    ]


def test_in_a_joined_table_the_empty_fields_do_not_count(tmp_path):
    rows = [{"instruction": "a", "output": "b", "question": None, "answer": None}] * 2
    pa.parquet.write_table(pa.Table.from_pylist([*rows, {**rows[0], "output": ""}]), tmp_path / "a.parquet")
    assert [each.record_format for each in load(str(tmp_path / "a.parquet"), "text")] == ["alpaca"] * 3


PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
    "### Response:\n"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"system": ""}, PROMPT),
        ({}, "Be brief." + PROMPT[PROMPT.index("\n\n###") :]),
        (
            {"system": "", "input": ""},
            PROMPT.replace("### Input:\n1 and 2\n\n", "").replace(
                ", paired with an input that provides further context", ""
            ),
        ),
    ],
    ids=["whole", "system message", "no input"],
)
def test_without_a_chat_template_alpaca_has_its_own_prompt(tokenizer, changes, expected):
    """The prompt of litgpt and of axolotl; what is learned is the answer."""
    document = samples.as_document("a", LITERAL["alpaca"][0] | changes, "text")
    stream = encode([document], tokenizer)
    assert tokenizer.decode(stream.tokens) == f"{expected}3<|end_of_text|>"
    assert tokenizer.decode(stream.tokens[stream.targets]) == "3<|end_of_text|>"


@pytest.mark.parametrize("name", ["sharegpt", "question-answer", "input-output"])
def test_without_a_chat_template_other_records_are_refused(tokenizer, name):
    document = samples.as_document("a", LITERAL[name][0], "text")
    with pytest.raises(UserError, match="need a chat template"):
        encode([document], tokenizer)


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Alpaca records, one of them empty, and a text."""
    records = [{"instruction": f"Add {i}.", "input": "", "output": str(i)} for i in range(30)]
    path = write(tmp_path / "alpaca.jsonl", *records, {"instruction": "", "input": "", "output": ""}, {"text": "a"})
    return DataConfig(str(path), cache_dir=str(tmp_path / "cache"), block_size=64, batch_size=2)


def test_how_records_were_read_is_said_by_every_run(tokenizer, chatting, config, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    for deleted in (False, False, True):
        for path in Path(config.cache_dir).glob("*.formats") if deleted else ():
            path.unlink()
        caplog.clear()
        assert prepare(config, chatting).record_formats() == {"alpaca": 30, "text": 1}
        assert "read as Alpaca: 30 conversations; as text: 1 document" in caplog.messages
    apart = replace(config, test_data=[str(write(tmp_path / "others.jsonl", {"question": "Why?", "answer": "So."}))])
    prepare(apart, chatting)
    assert f"{apart.test_data[0]}: read as question and answer: 1 conversation" in caplog.messages
    assert f"{config.path}: read as Alpaca: 30 conversations; as text: 1 document" in caplog.messages
    (notes := tmp_path / "prompt.md").write_text("Be kind.")
    prepare(replace(config, path=[config.path, str(notes)]), chatting)
    assert f"{notes}: read as text: 1 document" in caplog.messages
    prepare(config, tokenizer)
    assert "the tokenizer has no chat template, so Alpaca's own prompt (### Instruction: ...) is written" in caplog.text


def test_a_stream_of_records_continues_exactly(chatting, config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    other = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hi"}]
    other.write_text(json.dumps([{"conversations": [*turns, {"from": "gpt", "value": f"{i}"}]} for i in range(30)]))
    data = StreamedDataModule(replace(config, path=[config.path, str(other)], stream=True), seed=0)
    data.prepare(chatting)
    assert "read as Alpaca: 30 conversations; as ShareGPT: 30 conversations; as text: 1 document" in caplog.messages
    whole = [batch["input_ids"].tolist() for batch in islice(data.train_dataloader(), 6)]
    data.start_batch = 3
    rest = [batch["input_ids"].tolist() for batch in islice(data.train_dataloader(), 3)]
    assert rest == whole[3:]
