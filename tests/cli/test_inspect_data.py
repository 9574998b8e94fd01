import io
import json
import re
import sys

import pytest

from granite_scu.cli import main as commands


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(40)))
    return path


def test_samples_show_what_is_learned(chats, capsys):
    assert (
        commands.main(
            [
                "data",
                "inspect",
                "--model",
                "tiny-granite-h",
                "--data-dir",
                str(chats),
                "--block-size",
                "64",
                "--samples",
                "1",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    asked, answered = (
        r"user<\|end_of_role\|>q(\d+)<\|end_of_text\|>\n",
        r"assistant<\|end_of_role\|>«a\1<\|end_of_text\|>»",
    )
    turn = rf"{asked}<\|start_of_role\|>{answered}"
    assert len(re.findall(turn, shown)) > 1
    assert " | <|start_of_role|>user" in shown and "<|pad|>" not in shown and "utilisation" in shown


def test_counts_as_json(chats, capsys):
    assert (
        commands.main(
            ["data", "inspect", "--model", "tiny-granite-h", "--data-dir", str(chats), "--block-size", "64", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert sum(found[split]["documents"] for split in ("train", "validation", "test")) == 40
    assert found["document_tokens"]["p0"] <= found["document_tokens"]["p50"] <= found["document_tokens"]["p100"]


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    assert commands.main(["data", "inspect", "--model", "tiny-granite-h", "--data-dir", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_neither_a_path_with_brackets_nor_a_terminal_of_few_characters_is_in_the_way(chats, monkeypatch):
    path = chats.rename(chats.with_name("[o]k[bold].jsonl"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
    assert (
        commands.main(["data", "inspect", "--model", "tiny-granite-h", "--data-dir", str(path), "--block-size", "64"])
        == 0
    )
    shown = sys.stdout.buffer.getvalue().decode()
    assert str(path) in shown.replace("\n", "") and r"\xaba" in shown
