import json
import os
from pathlib import Path

import pytest
from outcomes import refusal
from outcomes import refused_data as refused

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources import files
from granite_scu.data.sources.documents import Document
from granite_scu.data.sources.read import check_beginning, load, sources_of


def jsonl(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "NOTES.TXT"])
def test_a_text_file_is_one_document_as_it_stands(tmp_path, name):
    (tmp_path / name).write_bytes("eins \rzwei\n\nthrée\n".encode())
    assert load(str(tmp_path / name), "text") == [Document(str(tmp_path / name), "eins \rzwei\n\nthrée\n")]


def test_line_ends_of_windows_are_those_of_every_text(tmp_path, monkeypatch):
    """In a file of text, wherever it is cut in reading, and in each text of a record; a lone return stays."""
    monkeypatch.setattr(files, "PIECE", 3)
    (tmp_path / "a.txt").write_bytes(b"ab\r\ncd\r\n\r\r\n\r")
    (tmp_path / "b.csv").write_bytes(b'text\r\n"x\r\ny"\r\n')
    parts = [{"type": "text", "text": "c\r\n"}]
    turn = [{"role": "user", "content": "a\r\nb"}, {"role": "assistant", "content": parts}]
    (tmp_path / "c.jsonl").write_text(f'{{"text": "1\\r\\n2"}}\r\n{json.dumps({"messages": turn})}\r\n')
    (text,), (row,), (line, chat) = (load(str(tmp_path / name), "text") for name in ("a.txt", "b.csv", "c.jsonl"))
    assert (text.text, row.text, line.text) == ("ab\ncd\n\r\n\r", "x\ny", "1\n2")
    assert [message["content"] for message in chat.messages] == ["a\nb", [{"type": "text", "text": "c\n"}]]
    assert "\\r" not in chat.text


def test_the_line_of_what_cannot_be_decoded_is_counted_on_windows_too(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 2)
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\r\n\xff")
    with pytest.raises(UserError, match=r"byte 6 \(line 3\)"):
        load(str(tmp_path / "a.txt"), "text")


def test_a_jsonl_line_is_one_document(tmp_path):
    # The line separator U+2028 is legal inside a JSON string and ends no line.
    path = jsonl(tmp_path, '{"text": "one\\ntwo", "id": 7}', "", '{"text": "a\u2028b"}')
    assert load(str(path), "text") == [Document(f"{path}:1", "one\ntwo"), Document(f"{path}:3", "a\u2028b")]


def test_a_folder_is_read_in_depth_sorted_and_what_is_skipped_is_counted(tmp_path, caplog):
    root = tmp_path / ".mine"  # which is named, and read
    for name in ("b.txt", "a/z.md", "a/y.txt", "c.docx", "a/d.docx", "e.pdf", "LICENSE", ".git/a.txt", "a/.b.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "a" / "latest.txt").symlink_to(root / "b.txt")
    assert [document.text for document in load(str(root), "text")] == ["a/y.txt", "a/z.md", "b.txt"]
    assert "skipped 7 files" in caplog.text
    assert ".parquet: 2 .docx, 1 .pdf, 2 hidden, 1 linked twice, 1 no suffix" in caplog.text


@pytest.mark.parametrize("held", ["test.jsonl", "Validation-00000-of-00001.jsonl", "eval.jsonl"])
def test_a_folder_that_its_files_divide_is_refused_with_the_flags_to_give(tmp_path, held, caplog):
    for name in ("train-0.jsonl", "train-1.jsonl", "notes.jsonl", held):
        (tmp_path / name).write_text('{"text": "one"}\n')
    flag = "--test-data" if held.startswith("test") else "--validation-data"
    said = refused(str(tmp_path))
    assert f"{held} beside files for training" in said
    learned = " ".join(str(tmp_path / name) for name in ("notes.jsonl", "train-0.jsonl", "train-1.jsonl"))
    given = f"--data-dir {learned} {flag} {tmp_path / held}"
    assert f"give {given}" in said
    assert len(load(f"{tmp_path / 'train'}[-._]*", "text")) == 2
    sources_of(DataConfig(path=sorted(map(str, tmp_path.glob("*.jsonl")))))  # as the shell has it from *.jsonl
    assert f"give {given}" in caplog.text
    (tmp_path / "train-0.jsonl").rename(tmp_path / "tests.jsonl")
    (tmp_path / "train-1.jsonl").unlink()
    caplog.clear()
    assert len(sources_of(DataConfig(str(tmp_path)))[0].files) == 3
    assert f"give --data-dir {tmp_path / 'notes.jsonl'} {tmp_path / 'tests.jsonl'} {flag}" in caplog.text


@pytest.mark.parametrize(
    ("learned", "held", "given"),
    [
        (["my_train.jsonl"], ["my_test.jsonl"], "my_train.jsonl --test-data my_test.jsonl"),
        (["my_train_0.jsonl", "my_train_1.jsonl"], ["my_dev_v2.csv"],
         "my_train_0.jsonl my_train_1.jsonl --validation-data my_dev_v2.csv"),
        (["train/c.jsonl", "x.txt"], ["test/c.jsonl"], "train/c.jsonl x.txt --test-data test/c.jsonl"),
        ([f"train/{n}.jsonl" for n in range(4)], ["test/0.jsonl", "test/1.jsonl"],
         "FILES --test-data test/0.jsonl test/1.jsonl"),
        (["a_training/c.jsonl"], ["eval/c.jsonl", "test.jsonl"],
         "a_training/c.jsonl --validation-data eval/c.jsonl --test-data test.jsonl"),
        (["train/c.jsonl", "latest/c.jsonl", "more/test.jsonl", "contest.txt"], [], ""),
        (["train.txt", "a.txt"], ["test-0.txt"], "a.txt train.txt --test-data test-0.txt"),
        (["Training manual.txt", "Test procedures.txt", "train.txt"], [], ""),
        (["train_test.jsonl", "train/test_1.jsonl", "how_to_test_it.txt", "tests/c.jsonl"], [], ""),
    ],
)  # fmt: skip
def test_what_is_held_out_shows_in_the_names_of_files_and_folders(tmp_path, learned, held, given):
    for name in (*learned, *held):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}\n' if name.endswith(".jsonl") else "text\none\n")
    if held:
        given = " ".join(str(tmp_path / word) if "." in word else word for word in given.split())
        assert refused(str(tmp_path)).endswith(f"would be trained on; give --data-dir {given}")
    else:
        assert load(str(tmp_path), "text")


def test_a_text_about_the_records_beside_it_is_left_out_unless_it_is_named(tmp_path, caplog):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "a record"}\n')
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "README.md").write_text("These are records.")
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "data/a.jsonl"}}')
    assert [document.text for document in load(str(tmp_path), "text")] == ["a record", "a text"]
    assert f"left out {tmp_path / 'README.md'}, {tmp_path / 'dataset_info.json'}" in caplog.text
    assert [document.text for document in load(str(tmp_path / "README.md"), "text")] == ["These are records."]


def test_empty_texts_are_counted_and_named(tmp_path, caplog):
    path = jsonl(tmp_path, '{"text": "one"}', '{"text": ""}', '{"text": " \\n"}')
    assert [document.text for document in load(str(path), "text")] == ["one"]
    assert f"left out 2 of 3 texts, which are empty; the first is {path}:2" in caplog.text


def test_a_missing_path_names_what_can_be_given(tmp_path):
    message = refused(tmp_path / "none.txt")
    assert "none.txt: no such file or folder" in message and "a .txt, .md, .jsonl" in message
    assert "stdlib-docs" in message
    assert f"{os.devnull}: neither a file nor a folder" in refused(os.devnull)


@pytest.mark.parametrize("suffix", [".docx", ".yaml", ""])
def test_an_unsupported_file_names_those_that_are(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"a\0b")
    message = refused(path)
    assert f"cannot read {suffix or 'files without suffix'}" in message and "a .txt, .md, .jsonl" in message


def test_code_is_read_where_its_suffix_is_named(tmp_path, caplog):
    (tmp_path / "a.py").write_text("print()")
    (tmp_path / "b.py").write_bytes(b"\x89PNG\0")
    (tmp_path / "c.md").write_text("about it")
    assert [document.text for document in load(str(tmp_path / "*.py"), "text")] == ["print()"]
    assert "skipped 1 files" in caplog.text
    assert [document.text for document in load(str(tmp_path), "text")] == ["about it"]


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


@pytest.mark.parametrize("method", ["is_file", "open"])
def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, method):
    path = tmp_path / "secret.txt"
    path.write_text("text")

    def denied(self, *mode):  # not by permissions: root, as whom containers run, may read everything
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, method, denied)
    words = "secret.txt: cannot be read (Permission denied); check its permissions"
    assert words in refused(path) and words in refusal(check_beginning, str(path), "text", "utf-8", "auto")


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


def test_folders_are_read_through_links_and_each_once(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    for place in (elsewhere, folder):
        place.mkdir()
        (place / "a.txt").write_text(place.name)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "round").symlink_to(folder)
    assert [document.text for document in load(str(folder), "text")] == ["folder", "elsewhere"]
    for flag, split in (("--data-dir", "path"), ("--test-data", "test_data")):
        config = DataConfig(**{"path": "stdlib-docs", split: [str(folder), str(elsewhere / "*.txt")]})
        assert f"a.txt is in {folder} too" in refusal(sources_of, config, begins=f"{flag} {elsewhere}")
