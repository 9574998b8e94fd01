import json
import logging
import os
from pathlib import Path

import pytest

from granite_scu.data.sources.documents import Document
from granite_scu.data.sources.read import load
from granite_scu.errors import UserError


def refused(path: Path | str, column: str = "text") -> str:
    """The message, which must be one line."""
    with pytest.raises(UserError) as caught:
        load(str(path), column)
    message = str(caught.value)
    assert message.startswith("--data-dir ") and "\n" not in message and "; " in message
    return message


def jsonl(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "NOTES.TXT"])
def test_a_text_file_is_one_document_as_it_stands(tmp_path, name):
    (tmp_path / name).write_bytes("eins\r\nzwei\n\nthrée\n".encode())
    assert load(str(tmp_path / name), "text") == [Document(str(tmp_path / name), "eins\r\nzwei\n\nthrée\n")]


def test_a_jsonl_line_is_one_document(tmp_path):
    # The line separator U+2028 is legal inside a JSON string and ends no line.
    path = jsonl(tmp_path, '{"text": "one\\ntwo", "id": 7}', "", '{"text": "a\u2028b"}')
    assert load(str(path), "text") == [Document(f"{path}:1", "one\ntwo"), Document(f"{path}:3", "a\u2028b")]


def test_the_text_column_can_be_named(tmp_path):
    path = jsonl(tmp_path, '{"content": "here", "text": 3}')
    assert [document.text for document in load(str(path), "content")] == ["here"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "line"}')
    assert [document.text for document in load(str(tmp_path), "text")] == ["hello", "line"]


def test_a_folder_is_read_in_depth_sorted_and_what_is_skipped_is_counted(tmp_path, caplog):
    for name in ("b.txt", "a/z.md", "a/y.txt", "c.docx", "a/d.docx", "e.pdf", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.text for document in load(str(tmp_path), "text")] == ["a/y.txt", "a/z.md", "b.txt"]
    assert (
        "skipped 4 files that are not .txt, .md, .jsonl, .csv, .tsv or .parquet: 2 .docx, 1 .pdf, 1 no suffix"
        in caplog.text
    )


def test_embedded_corpora_are_loaded_by_name():
    assert load("stdlib-docs", "text")[0].name.startswith("topics/")


def test_empty_texts_are_counted_and_named(tmp_path, caplog):
    path = jsonl(tmp_path, '{"text": "one"}', '{"text": ""}', '{"text": " \\n"}')
    assert [document.text for document in load(str(path), "text")] == ["one"]
    assert f"left out 2 of 3 texts, which are empty; the first is {path}:2" in caplog.text


def test_a_missing_path_names_what_can_be_given(tmp_path):
    message = refused(tmp_path / "none.txt")
    assert "none.txt: no such file or folder" in message and "a .txt, .md, .jsonl" in message
    assert "stdlib-docs" in message


def test_neither_file_nor_folder():
    assert f"{os.devnull}: neither a file nor a folder" in refused(os.devnull)


@pytest.mark.parametrize("suffix", [".docx", ".json", ""])
def test_an_unsupported_file_names_those_that_are(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_text("a,b")
    message = refused(path)
    assert f"cannot read {suffix or 'files without suffix'}" in message and "a .txt, .md, .jsonl" in message


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    assert "the folder is empty" in refused(tmp_path)
    for name in ("a.docx", "b.docx"):
        (tmp_path / name).write_text("a")
    assert "holds only other files (2 .docx)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents"), [("a.txt", ""), ("a.txt", " \n\n"), ("a.jsonl", " \n\n"), ("a.jsonl", '{"text": ""}\n')]
)
def test_an_empty_file(tmp_path, name, contents):
    (tmp_path / name).write_text(contents)
    assert f"{name}: holds no text" in refused(tmp_path / name)
    assert f"{tmp_path}: holds no text" in refused(tmp_path)


def test_invalid_utf8_names_byte_and_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes("ok\nIl était".encode("latin-1"))
    message = refused(tmp_path)
    assert f"{tmp_path / 'latin.txt'}: byte 6 (line 2) is not valid UTF-8" in message and "iconv" in message


@pytest.mark.parametrize("line", ['{"text": "a"', "text", "[" * 10**6, '{"text": ' + "1" * 5000 + "}"])
def test_a_line_that_does_not_parse(tmp_path, line):
    message = refused(jsonl(tmp_path, '{"text": "fine"}', "", line))
    assert "lines.jsonl:3: not valid JSON (" in message and len(message) < 500


@pytest.mark.parametrize(("line", "kind"), [("[1]", "list"), ('"text"', "str"), ("null", "NoneType")])
def test_a_line_that_is_no_object(tmp_path, line, kind):
    message = refused(jsonl(tmp_path, line))
    assert f"lines.jsonl:1: a {kind}, not an object" in message and '{"text": "..."}' in message


def test_a_missing_column_names_those_there_are(tmp_path):
    message = refused(jsonl(tmp_path, '{"text": "a"}', '{"body": "b", "id": 1}'))
    assert "lines.jsonl:2: no field 'text', there are: body, id" in message and "--text-column" in message
    assert "there are: none" in refused(jsonl(tmp_path, "{}"))


@pytest.mark.parametrize(("value", "kind"), [(3, "int"), (["a"], "list")])
def test_text_that_is_no_string(tmp_path, value, kind):
    message = refused(jsonl(tmp_path, json.dumps({"text": value})))
    assert f"lines.jsonl:1: field 'text' is a {kind}, not text" in message and "--text-column" in message


def test_messages_beside_a_text_are_passed_over(tmp_path):
    assert load(str(jsonl(tmp_path, '{"messages": [], "text": "a"}')), "text")[0].text == "a"


def test_half_a_surrogate_pair(tmp_path):
    assert "lines.jsonl:1: field 'text' holds a lone surrogate at character 2" in refused(
        jsonl(tmp_path, r'{"text": "ab\ud800"}')
    )


@pytest.mark.parametrize("method", ["is_file", "open"])
def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, method):
    path = tmp_path / "secret.txt"
    path.write_text("text")

    def denied(self, *mode):  # not by permissions: root, as whom containers run, may read everything
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, method, denied)
    assert "secret.txt: cannot be read (Permission denied); check its permissions" in refused(path)


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "seen.txt").write_text("text")
    (tmp_path / "locked").mkdir()
    listed = os.scandir

    def denied(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", denied)
    for given in (tmp_path, tmp_path / "**" / "*.txt", tmp_path / "*" / "*.txt", tmp_path / "l*d" / "**" / "a.txt"):
        assert "locked: cannot be read (Permission denied)" in refused(given)


def test_logging_is_silent_about_a_plain_file(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("text")
    with caplog.at_level(logging.DEBUG):
        assert len(load(str(tmp_path), "text")) == 1
    assert not caplog.records


def test_folders_are_read_through_links_and_each_once(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    for place in (elsewhere, folder):
        place.mkdir()
        (place / "a.txt").write_text(place.name)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "round").symlink_to(folder)
    assert [document.text for document in load(str(folder), "text")] == ["folder", "elsewhere"]
