import io
import json
import re
import sys

import pytest

from granite_scu.cli import main as commands
from granite_scu.cli.inspect_data import describe
from granite_scu.config.settings import DataConfig
from granite_scu.evaluation.general_text import Document, GeneralText, of_files
from granite_scu.model.loading import load_tokenizer


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(40)))
    return path


def inspect(path, *more: str) -> int:
    return commands.main(["data", "inspect", "--model", "tiny-granite-h", "--data-dir", str(path), *more])


def test_samples_show_what_is_learned(chats, capsys):
    assert inspect(chats, "--block-size", "64", "--samples", "1") == 0
    shown = capsys.readouterr().out
    asked, answered = (
        r"user<\|end_of_role\|>q(\d+)<\|end_of_text\|>\n",
        r"assistant<\|end_of_role\|>«a\1<\|end_of_text\|>»",
    )
    turn = rf"{asked}<\|start_of_role\|>{answered}"
    assert len(re.findall(turn, shown)) > 1
    assert " | <|start_of_role|>user" in shown and "<|pad|>" not in shown and " % full" in shown


def test_a_system_prompt_is_shown_and_chats_that_have_one_keep_it(tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    own = [{"role": "system", "content": "mine"}, *turns]
    records = [{"messages": own}, *({"messages": [*turns, *turns[:1] * i, turns[1]]} for i in range(1, 30))]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["data", "inspect", str(chats), "--model", "tiny-granite-h", "--system", "be kind", "--samples", "99"]
    assert commands.main(command) == 0
    shown = capsys.readouterr()
    assert "1 of 30 conversations" in " ".join(shown.err.split()) and "system<|end_of_role|>be kind" in shown.out


def test_the_counts_are_in_words(capsys):
    split = {
        "documents": 5,
        "copies": 0,
        "blocks": 14,
        "supervised_tokens": 14088,
        "bytes": 46504,
        "utilisation": 0.983,
    }
    nothing = dict.fromkeys(("empty_documents", "gap_blocks", "dropped_tokens"), 0)
    facts = {
        **{
            "model": "tiny",
            "path": "mine",
            "kind": "document",
            "split_by": "document",
            "block_size": 1024,
            "long_documents": 1,
        },
        **{"copies_left_out": 2, "unsupervised_documents": 1, "cut_answers": 3},
        **{"train": split, "validation": split, "test": split},
        **nothing,
        "record_formats": {},
        "test_is_validation": False,
        "text_begins_with": "<s>",
        "document_tokens": {"p0": 1, "p10": 141, "p50": 483, "p90": 3900, "p99": 15195, "p100": 18040},
    }
    rows = describe(facts, "truncate")
    assert rows["text"] == "mine, divided by document"
    assert rows["training"] == "5 documents (46.50 kB): 14,088 tokens to learn, in 14 blocks of 1024, 98.3 % full"
    told = describe(facts | {"train": split | {"copies": 2}}, "split")["training"]
    assert told.startswith("5 documents, 2 of them copies (46.50 kB)")
    assert rows["longer than a block"] == "1 document: truncated (--on-long)"
    assert rows["cut answers"].startswith("3 answers; such lose their end")
    assert rows["a text begins with"].startswith("<s>")
    assert rows["left out"] == "2 repeated documents, 1 document without anything to learn"
    assert rows["length of a document"].startswith(
        "483 tokens in the middle; 10 % have at most 141, 90 % at most 3,900"
    )
    assert "left out" not in describe(facts | {"copies_left_out": 0, "unsupervised_documents": 0}, "split")
    chats = describe(facts | {"kind": "conversation", "split_by": "block", "record_formats": {"alpaca": 7}}, "split")
    assert chats["read as"] == "Alpaca: 7" and "read as" not in rows
    assert "divided by block" in chats["text"] and chats["test"].startswith("5 conversations (")


@pytest.mark.parametrize(("asked", "size"), [(["--block-size", "128"], 128), ([], 64)])
def test_counts_as_json(chats, capsys, asked, size):
    """In blocks as a run would make them: of eight tokens a chat none needs 1,024."""
    assert inspect(chats, *asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["block_size"] == size
    assert sum(found[split]["documents"] for split in ("train", "validation", "test")) == 40
    assert found["document_tokens"]["p0"] <= found["document_tokens"]["p50"] <= found["document_tokens"]["p100"]


def test_a_template_of_ones_own_and_what_is_read_otherwise_than_written(tmp_path, capsys):
    thinking = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    turns = [{"role": "user", "content": "<|pad|>"}, thinking]
    chats, template = tmp_path / "chats.jsonl", tmp_path / "mine.jinja"
    chats.write_text(
        "".join(json.dumps({"messages": [*turns, {**turns[0], "n": i}, thinking]}) + "\n" for i in range(40))
    )
    template.write_text(
        "{% for m in messages %}{{ m.role + (mark or ':') + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' + (mark or ':') }}{% endif %}"
    )
    asked = ("--chat-template", str(template), "--chat-template-args", "mark=>>", "--held-out-share", "0")
    assert inspect(chats, *asked) == 0
    found = capsys.readouterr()
    assert "assistant>>«yo<|end_of_text|>»" in found.out
    assert "control tokens that somebody wrote: 80, the first is <|pad|> in" in found.err
    assert "leaves out what was thought before 80 of the answers" in " ".join(found.err.split())


def test_of_texts_beside_chats_nothing_is_called_a_conversation(chats, capsys):
    chats.with_name("texts.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 400}) + "\n" for i in range(30)))
    assert inspect(chats, str(chats.with_name("texts.jsonl")), "--samples", "0") == 0
    shown = capsys.readouterr().out
    assert "30 documents: cut into pieces (--on-long)" in shown and "conversation" not in shown


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    assert inspect(tmp_path / "none") == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_neither_a_path_with_brackets_nor_a_terminal_of_few_characters_is_in_the_way(chats, monkeypatch):
    path = chats.rename(chats.with_name("[o]k[bold].jsonl"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
    assert inspect(path, "--block-size", "64") == 0
    shown = sys.stdout.buffer.getvalue().decode()
    unfolded = re.sub(r"\s*\|\n\|\s*\|\s*", "", shown)  # a long path goes on in the next row
    assert str(path) in unfolded and r"\xaba" in shown


def test_general_text_is_shown_with_what_is_counted_and_a_runs_too(tmp_path, capsys):
    records = [{"prompt": f"What is {i}?", "completion": f"It is the number {i}, and no other."} for i in range(60)]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["data", "inspect", "--general", "--model", "tiny-granite-h"]
    assert commands.main([*command, str(chats), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == found["ended_documents"] == 60 and found["repeated_documents"] == 0
    assert sum(found["parts"].values()) == found["counted_tokens"] < found["tokens"]
    assert found["parts"]["anchor"] > found["parts"]["held_out"] > 0
    tokenizer = load_tokenizer("tiny-granite-h")
    kept = tmp_path / "general.jsonl"
    of_files([str(chats)], DataConfig(), tokenizer, 700, 0).write(kept, tokenizer)
    (tmp_path / "training_config.json").write_text(json.dumps({"base": {"name": "tiny-granite-h"}}))
    assert commands.main(["data", "inspect", "--general", str(kept), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"user<\|end_of_role\|>What is (\d+)\?<\|end_of_text\|>\n.*«It is the number \1, and no other.<", shown
    )
    assert "tiny-granite-h" in shown and shown.count("text 0: ") == 1 and "text 1: " not in shown


def test_what_a_model_wrote_is_saved_to_train_on_and_of_what_was_cut_whole_sentences(tmp_path, capsys):
    tokenizer, cut = load_tokenizer("tiny-granite-h"), {7: "It is 7. Or", 8: "It is eight. Of such numbers:\n\n1. one"}
    answers = {i: cut.get(i, f"It is the number {i}, and no other.") for i in range(60)}
    opening, between = "<|start_of_role|>user<|end_of_role|>What", "\n<|start_of_role|>assistant<|end_of_role|>"
    parts = [
        [
            (opening, False),
            (f" is {i}?<|end_of_text|>", True),
            (between, False),
            (answer + "<|end_of_text|>" * (i not in cut), True),
        ]
        for i, answer in answers.items()
    ]
    documents = [Document.joined(*((tokenizer(text)["input_ids"], counts) for text, counts in part)) for part in parts]
    written, saved = tmp_path / "general.jsonl", tmp_path / "saved.jsonl"
    GeneralText(tuple(documents), "auto").write(written, tokenizer)
    command = ["data", "inspect", "--general", str(written), "--model", "tiny-granite-h", "--save", str(saved)]
    assert commands.main(command) == 0
    chats = [json.loads(line)["messages"] for line in saved.read_text().splitlines()]
    said = [[f"What is {i}?", "It is eight." if i == 8 else answers[i]] for i in range(60) if i != 7]
    assert [[message["content"] for message in chat] for chat in chats] == said
    for source, target in ((saved, tmp_path / "other.jsonl"), (written, written)):
        assert commands.main([*command[:3], str(source), *command[4:-1], str(target)]) == 2
        assert "--save" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_model_writes_is_kept_and_shown(capsys):
    command = ["data", "inspect", "--general", "--model", "tiny-granite-h", "--general-tokens", "1024", "--json"]
    assert commands.main(command) == 0
    first = capsys.readouterr()
    assert "the base model writes general text, 1,024 tokens" in first.err
    found = json.loads(first.out)
    assert found["source"] == "auto" and found["counted_tokens"] >= 1024
    assert commands.main(command) == 0
    again = capsys.readouterr()
    assert again.out == first.out and "writes" not in again.err
