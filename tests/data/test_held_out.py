"""What is held out: files of its own, a share of the documents, or nothing; and conversations, which are never cut."""

import json

import pytest
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.datamodule import TextDataModule


def write(path, *conversations: list[dict]) -> str:
    """Add conversations to a file."""
    with path.open("a") as lines:
        lines.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    return str(path)


def turn(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chats(path, n: int, first: int = 0, words: int = 1) -> str:
    """Conversations with answers of so many words."""
    return write(path, *(turn(f"Question {i}?", "answer " * words) for i in range(first, first + n)))


def read(chatting, **fields) -> TextDataModule:
    data = TextDataModule(DataConfig(**{"block_size": 128, "batch_size": 2, **fields}), seed=0)
    data.prepare(chatting)
    return data


def counts(data: TextDataModule) -> tuple[int, ...]:
    return tuple(part.n_documents for part in (data.train, data.validation, data.test))


@pytest.mark.parametrize(
    ("n", "held_out"), [(10, 1), (30, 3), (60, 3), (100, 5), (5_000, 250), (20_000, 500), (100_000, 500)]
)
def test_the_usual_share_of_conversations(n, held_out):
    from granite_scu.data.blocks.splitting import usual_share

    assert int(n * usual_share(True, n) + 1e-9) == held_out


def test_by_default_few_conversations_are_held_out_and_a_long_one_counts_as_one(chatting, tmp_path):
    chats(tmp_path / "train.jsonl", 59)
    data = read(chatting, path=write(tmp_path / "train.jsonl", turn("More?", "long " * 100)))
    assert counts(data) == (54, 3, 3)
    assert data.config.block_size == 576  # 568 bytes and marks, a multiple of 64
    assert data.summary()["cut_answers"] == 0


def texts(path, n: int) -> str:
    """Texts, each longer than many chats."""
    path.write_text("".join(json.dumps({"text": f"{number} " + "word " * 400}) + "\n" for number in range(n)))
    return str(path)


@pytest.mark.parametrize(
    ("n_chats", "n_texts", "expected", "told"),
    [
        (40, 30, [(34, 24), (3, 3), (3, 3)], ""),
        (40, 2, [(34, 2), (3, 0), (3, 0)], "all texts are trained on, and none is held out: the text has 2 different"),
        (5, 30, [(5, 24), (0, 3), (0, 3)], "all conversations are trained on"),
    ],
)
def test_chats_and_texts_are_divided_each_for_themselves(chatting, tmp_path, caplog, n_chats, n_texts, expected, told):
    path = [chats(tmp_path / "chats.jsonl", n_chats), texts(tmp_path / "texts.jsonl", n_texts)]
    data = read(chatting, path=path)
    of_kind = [data.division.corpus.is_chat[part] for part in data.division.parts.values()]
    assert [(int(part.sum()), int((~part).sum())) for part in of_kind] == expected
    assert told in caplog.text and ("none is held out" in caplog.text) == bool(told)


def asking(path, *questions: str) -> str:
    """Conversations that ask these, each answered otherwise."""
    return write(path, *(turn(question, f"answer {number}") for number, question in enumerate(questions)))


def test_copies_that_are_held_out_count_once_and_those_that_are_trained_on_are_told(chatting, tmp_path):
    path = tmp_path / "train.jsonl"
    chats(path, 30)
    path.write_text("".join(line * 3 for line in path.read_text().splitlines(keepends=True)))
    data = read(chatting, path=str(path))
    assert counts(data) == (72, 3, 3) and data.summary()["copies_left_out"] == 12
    assert data.summary()["train"]["copies"] == 48 and data.summary()["test"]["copies"] == 0


def test_answers_to_the_same_question_are_on_one_side(chatting, tmp_path):
    """Whatever a system turn says before it, as the user's name."""
    told = ({"role": "system", "content": f"Customer {number}."} for number in range(120))
    records = ([system, *turn(f"Question {n % 30}?", f"answer {n}")] for n, system in enumerate(told))
    data = read(chatting, path=write(tmp_path / "train.jsonl", *records))
    assert counts(data) == (96, 12, 12)
    asked = [{*data.division.corpus.question[part].tolist()} for part in data.division.parts.values()]
    assert [len(each) for each in asked] == [24, 3, 3] and len(set.union(*asked)) == 30


def test_a_chat_as_it_grew_turn_by_turn_is_on_one_side_and_a_greeting_makes_no_chats_one(chatting, tmp_path):
    hello = {"role": "assistant", "content": "Hello, what is it?"}
    turns = [(role, turn) for turn in range(4) for role in ("user", "assistant")]
    whole = [[hello, *({"role": role, "content": f"{role} {n}.{turn}"} for role, turn in turns)] for n in range(40)]
    records = [each[:end] for each in whole for end in (3, 5, 7, 9)]
    data = read(chatting, path=write(tmp_path / "train.jsonl", *records))
    sides = [{data.division.corpus.names[number] for number in part} for part in data.division.parts.values()]
    sides = [{(int(name.rpartition(":")[2]) - 1) // 4 for name in names} for names in sides]
    assert counts(data) == (136, 12, 12) and [len(chats) for chats in sides] == [34, 3, 3]


@pytest.mark.parametrize(
    "greetings", [["Tell me more!"] * 40, ["Hi!", "Hey!", "Hello!"] * 12 + ["Why?", "Who?", "How?", "What?"]]
)
def test_where_most_ask_the_same_the_whole_says_which_side(chatting, tmp_path, caplog, greetings):
    data = read(chatting, path=asking(tmp_path / "train.jsonl", *greetings))
    assert counts(data) == (34, 3, 3) and "most chats begin with the same questions" in caplog.text


def test_what_a_user_says_to_no_answer_takes_no_place_among_those_held_out_nor_in_blocks(chatting, tmp_path):
    path, asked = tmp_path / "train.jsonl", {"role": "user", "content": "What? " * 400}
    chats(path, 60)
    write(path, *([asked | {"content": f"{n}?"}] for n in range(199)), [asked], [*turn("Who?", "Me."), asked])
    data = read(chatting, path=str(path))
    assert counts(data) == (55, 3, 3) and data.config.block_size == 128
    assert {"unsupervised_documents": 200, "long_documents": 0, "dropped_tokens": 0}.items() <= data.summary().items()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"validation_data": "other"}, (40, 20, 20)),
        ({"validation_data": "other", "held_out_share": "10%"}, (36, 20, 4)),
        ({"test_data": "other"}, (37, 3, 20)),
        ({"test_data": "other", "held_out_share": 0}, (40, 0, 20)),
        ({"validation_data": "other", "test_data": "third"}, (40, 20, 5)),
        ({"held_out_share": 0.2}, (32, 4, 4)),
        ({"held_out_share": 0}, (40, 0, 0)),
    ],
    ids=str,
)
def test_what_is_held_out(chatting, tmp_path, fields, expected):
    files = {"other": chats(tmp_path / "other.jsonl", 20, 1000), "third": chats(tmp_path / "third.jsonl", 5, 2000)}
    fields = {name: files.get(value, value) for name, value in fields.items()}
    data = read(chatting, path=chats(tmp_path / "train.jsonl", 40), **fields)
    assert counts(data) == expected
    record = json.loads("".join(data.record()))
    assert tuple(len(record[split]) for split in ("train", "validation", "test")) == expected


def test_what_is_validated_on_is_not_trained_on(chatting, tmp_path, caplog):
    held_out = chats(tmp_path / "other.jsonl", 20, 30)  # of which ten are among the forty
    data = read(chatting, path=chats(tmp_path / "train.jsonl", 40), validation_data=held_out)
    assert counts(data) == (30, 20, 20)
    assert "too, left out: 10" in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"held_out_share": "100%"}, ["--held-out-share", "less than 100%"]),
        ({"held_out_share": "1%"}, ["--data-dir", "less than one", "--held-out-share 0"]),
        ({"path": "two"}, ["--data-dir", "2 different", "--validation-data", "--held-out-share 0"]),
        ({"path": "one"}, ["--data-dir", "1 different", "--validation-data", "--held-out-share 0"]),
        ({"validation_data": "train"}, ["--validation-data", "is trained on too"]),
        ({"validation_data": "texts"}, ["--validation-data", "texts", "conversations"]),
        ({"validation_data": "fields"}, ["--validation-data", "fields.jsonl:1", "there are: q, a"]),
        ({"validation_data": "silent"}, ["--validation-data", "silent.jsonl: the validation split has no token"]),
        ({"test_data": "calls"}, ["--test-data", "calls.jsonl:1: the chat template shows nothing of"]),
        ({"test_data": "nothing"}, ["--test-data", "no such file"]),
        ({"validation_data": "two", "test_data": "two"}, ["--test-data", "--validation-data"]),
        ({"validation_data": "two", "test_data": "one", "held_out_share": 0.1}, ["--held-out-share", "leave it out"]),
    ],
    ids=str,
)
def test_one_line_says_what_is_wrong(chatting, tmp_path, fields, words):
    files = {
        "train": chats(tmp_path / "train.jsonl", 40),
        "two": chats(tmp_path / "two.jsonl", 2, 100),
        "one": chats(tmp_path / "one.jsonl", 1, 200),
        **{name: str(tmp_path / f"{name}.jsonl") for name in ("texts", "fields", "silent", "calls", "nothing")},
    }
    question, function = {"role": "user", "content": "?"}, {"name": "f", "arguments": {"not": "in the template"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    write(tmp_path / "silent.jsonl", [question])
    write(tmp_path / "calls.jsonl", [question, call])
    (tmp_path / "texts.jsonl").write_text('{"text": "no conversation"}\n')
    (tmp_path / "fields.jsonl").write_text('{"q": "of", "a": "another kind"}\n')
    given = {"path": files["train"], **{name: files.get(value, value) for name, value in fields.items()}}
    message = refusal(read, chatting, **given)
    assert all(word in message for word in words)


def test_a_block_that_was_asked_for_and_is_too_short_is_refused_with_one_that_holds_all(chatting, tmp_path):
    data = TextDataModule(DataConfig(chats(tmp_path / "train.jsonl", 40, words=100), block_size=128), seed=0)
    data.read(chatting)
    with pytest.raises(UserError, match=r"--block-size 128: .*--block-size 768 .*--on-long drop"):
        data.grow(asked_for=True)
    with pytest.raises(UserError, match=r"takes 512; choose .* --on-long"):
        data.grow(most=512)
    data.grow(most=750)
    assert data.config.block_size == 750
