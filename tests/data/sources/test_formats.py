"""Each kind of file, packed and not, gives the texts that are in it, and says where it is broken."""

import codecs
import csv
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import refused_data as refused

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources import files, formats
from granite_scu.data.sources.read import load, source
from granite_scu.data.tokens.corpus import prepare

TEXTS = ['Line one,\nline "two"; end', "日本語のテキスト。", "Ελληνικά και русский", "نص عربي 😀👩‍👩‍👧", "हिन्दी\u2028x"]


TORN = gzip.compress(b"text" * 100, mtime=0)[:-12]  # the same bytes in every process: they name a test


TORN_ZSTD = zstd.compress(b'{"text": "a"}\n' * 100)[:-3]


def write_jsonl(path: Path, texts: list[str | None]) -> None:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), encoding="utf-8")


def write_json(path: Path, texts: list[str | None]) -> None:
    path.write_text(json.dumps([{"id": 1, "text": text} for text in texts], indent=1), encoding="utf-8")


def write_csv(path: Path, texts: list[str], delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, delimiter=delimiter)
        rows.writerows([["id", "text"], *([1, text] for text in texts)])


def write_parquet(path: Path, texts: list[str | None]) -> None:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    pa.parquet.write_table(table, path, row_group_size=2)


WRITERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), write_jsonl),
    ".json": write_json,
    ".csv": write_csv,
    ".tsv": lambda path, texts: write_csv(path, texts, "\t"),
    ".parquet": write_parquet,
}


def texts_of(path: Path, **settings) -> list[str]:
    return [document.text for document in load(str(path), "text", **settings)]


def texts_of_column(path: Path, column: str) -> list[str]:
    return [document.text for document in load(str(path), column)]


def in_two_frames(data):
    return zstd.compress(data[:100]) + zstd.compress(data[100:])


def in_a_wide_window(data):
    """As ``zstd --long=28``, with which large dumps are packed."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    return compressor.compress(data) + compressor.flush()


PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".many.zst": in_two_frames,
    ".wide.zst": in_a_wide_window,
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_texts_in_it(tmp_path, suffix, packed):
    WRITERS[suffix](tmp_path / f"data{suffix}", TEXTS)
    data = (tmp_path / f"data{suffix}").read_bytes()
    (tmp_path / f"data{suffix}").unlink()
    plain = tmp_path / f"data{suffix}{packed[packed.rfind('.') :] if packed else ''}"
    plain.write_bytes(PACKED[packed](data))
    assert texts_of(plain) == TEXTS
    assert texts_of(tmp_path) == TEXTS


def test_every_kind_of_record_file_is_tested():
    assert set(formats.RECORDS) == set(WRITERS)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_text_file_is_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "PIECE", size)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + "\n".join(TEXTS).encode()))
    write_csv(tmp_path / "b.csv", TEXTS)
    assert texts_of(tmp_path) == ["\n".join(TEXTS), *TEXTS]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"text": "x"}\n%s'), ("a.csv", "text\nx\n%s"), ("b.csv", 'text\n"%s'), ("a.json", '[{"text": "%s')],
)
def test_a_line_too_long_to_be_a_record_is_refused(tmp_path, monkeypatch, name, text):
    """Or else it is all in memory, several times, before anything can be said of it."""
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    monkeypatch.setattr(files, "PIECE", 100)
    (tmp_path / name).write_text(text % ("two words\n" * 200 if name == "b.csv" else "y" * 2000))
    with pytest.raises(
        UserError, match=rf"{name}:\d: (a (line|record) of more than 1,000 char|not valid csv .field larger than)"
    ):
        texts_of(tmp_path / name)


def test_places_are_the_lines_at_which_rows_begin(tmp_path):
    write_csv(tmp_path / "a.csv", ["one", "two\nlines", "three"])
    assert [d.name for d in load(str(tmp_path / "a.csv"), "text")] == [f"{tmp_path / 'a.csv'}:{n}" for n in (2, 3, 5)]
    write_parquet(tmp_path / "b.parquet", ["one", "two", "three"])
    assert [d.name for d in load(str(tmp_path / "b.parquet"), "text")][2] == f"{tmp_path / 'b.parquet'}: row 3"


@pytest.mark.parametrize("delimiter", formats.DELIMITERS)
def test_the_separator_of_a_csv_file_shows_in_its_header(tmp_path, delimiter):
    write_csv(tmp_path / "a.csv", TEXTS, delimiter)
    assert texts_of(tmp_path) == TEXTS


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    write_csv(tmp_path / "a.csv", ["x" * 300_000])
    assert texts_of(tmp_path) == ["x" * 300_000]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_missing_value_is_an_empty_text(tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"a{suffix}", ["a", None])
    assert [document.text for document in source(str(tmp_path), "text").read()] == ["a", ""]


def test_a_pattern_matches_files_in_depth(tmp_path):
    for name in ("a/1.txt", "a/b/2.txt", "a/b/3.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path / "**" / "*.txt") == ["a/1.txt", "a/b/2.txt"]
    assert "no file matches; give a .txt" in refused(tmp_path / "*.csv")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16"])
def test_another_encoding_can_be_named(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("Il était\nune fois", encoding=encoding)
    (tmp_path / "b.jsonl").write_text('{"text": "à"}\n', encoding=encoding)
    assert texts_of(tmp_path, encoding=encoding) == ["Il était\nune fois", "à"]


@given(before=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), size=st.integers(1, 9), bom=st.booleans())
def test_what_cannot_be_decoded_is_named_by_byte_and_line(tmp_path_factory, before, size, bom):
    path = tmp_path_factory.mktemp("broken") / "a.txt"
    data = (b"\xef\xbb\xbf" if bom else b"") + before.encode()
    path.write_bytes(data + b"\xff rest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", size)
        assert f"a.txt: byte {len(data)} (line {before.count(chr(10)) + 1}) is not valid UTF-8" in refused(path)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.csv", b"id,text\n1,a\n2,b,c\n", "a.csv:3: 3 fields under a header of 2; quote fields"),
        ("a.csv", b'id,text\n1,a\n2,"b\nc', "a.csv:3: not valid csv (unexpected end of data); close quotes"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: not valid JSON ("),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', "a.jsonl:1: not valid JSON ('text' comes twice in an object)"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl:1: not valid JSON ("),
        (
            "a.jsonl",
            b'[\n {"text": "a"}]',
            "a.jsonl:1: not valid JSON (Expecting value, column 2); each line must be one",
        ),
        (
            "a.jsonl",
            b'[{"text": "a"}]',
            "a.jsonl:1: a list, not an object; each line must be one JSON object; call a file",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b", "id": 1}', "a.jsonl:2: no field 'text', there are: body, id; name"),
        ("a.json", b'{"data": [{"text": "a"}]}', "'data' holds a list of objects; give what is in that list alone"),
        ("a.jsonl", b'{"chat": [{"role": "user"}]}', "'chat' holds a list of objects; call chat messages"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1: field 'text' is a int, not text; name another with --text-column"),
        ("a.jsonl", rb'{"text": "ab\ud800"}', "a.jsonl:1: field 'text' holds a lone surrogate at character 2"),
        ("a.json", b'[{"text": "a"},\n {"text": }]', "a.json:2: not valid JSON (Expecting value, column 11); correct"),
        ("a.json", b'[{"text": "a"}\n {"text": "b"}]', "a.json:2: not valid JSON ('{' where a comma or the end"),
        ("a.json", b'[{"text": "a"},\n', "a.json:2: not valid JSON (Expecting value"),
        ("a.json", b'[{"text": "a"}\n', "a.json:2: not valid JSON (the list does not end)"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "a.json:1: not valid JSON (Unterminated string"),
        ("a.json", b'[{"text": "a"}]\n[]', "a.json:2: not valid JSON (something follows the list)"),
        ("a.json", b'[{"text": "a"},\n\n"b"]', "a.json:3: a str, not an object; each record must be one, as"),
        ("a.json", b'[{"text": "a", "text": "b"}]', "a.json:1: not valid JSON ('text' comes twice in an object)"),
        ("a.csv", b"\n\nid,text\n1,a\n2,b,c\n", "a.csv:5: 3 fields under a header of 2"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: several columns are called 'text'; give each a name of its own"),
        ("a.csv", b"id,text\r1,a\r", "a.csv:1: lines end in a carriage return alone; convert the file"),
        (
            "a.tsv",
            b"text\nb,c\td\n",
            r"a.tsv:2: 2 fields under a header of 1; quote fields that hold the separator '\t'",
        ),
        ("a.tsv", b'id\ttext\nq1\t"Hello\nq2\tworld"\n', "a.tsv:2: not valid csv (a quote that begins here ends on a"),
        ("a.tsv", b'id\ttext\nq1\t"Hello\nthere\n', "a.tsv:2: not valid csv (unexpected end of data); close"),
        ("a.csv", b'id,text\n1,"a" b\n', "a.csv:2: not valid csv (',' expected after"),
        ("a.parquet", b"PAR1 and then nothing", "a.parquet: not a complete parquet file ("),
        ("a.txt.gz", TORN, "a.txt.gz: damaged or not compressed as its name says ("),
        ("a.txt.zst", b"", "a.txt.zst: damaged or not compressed as its name says (Compressed file ended before"),
        ("a.jsonl.zst", TORN_ZSTD, "a.jsonl.zst: damaged or not compressed as its name says (Compressed file ended"),
        ("a.parquet.zst", zstd.compress(b"PAR1"), "a.parquet.zst: not a complete parquet file ("),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, contents, message):
    (tmp_path / name).write_bytes(contents)
    line = refused(tmp_path)
    assert message in line and len(line) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(max_examples=40)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=4),
    indent=st.sampled_from([None, 1]),
    escaped=st.booleans(),
    as_list=st.booleans(),
    size=st.integers(1, 9),
)
def test_records_of_a_json_file_are_those_that_the_standard_library_reads(
    tmp_path_factory, records, indent, escaped, as_list, size
):
    """However few bytes are read at a time; as a list, and one after the other."""
    path = tmp_path_factory.mktemp("list") / "a.json"
    whole = json.dumps(records, indent=indent, ensure_ascii=escaped)
    apart = "\n".join(json.dumps(record, indent=indent, ensure_ascii=escaped) for record in records)
    path.write_text(f" \n{whole}\n" if as_list else apart, encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", size)
        assert [record for _, record in formats.read_json(path, "utf-8", ())] == records


def test_a_record_of_a_json_file_is_named_by_the_line_it_begins_at(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"text": "a\\nb",\n  "id": 1},\n\n {"text": "c"}\n]\n')
    assert [d.name for d in load(str(tmp_path / "a.json"), "text")] == [f"{tmp_path / 'a.json'}:{n}" for n in (2, 5)]


def test_an_error_far_into_a_file_of_one_line_is_named_by_its_column(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 10)
    (tmp_path / "a.json").write_text('[{"text": "a"},{"text": "b"},{"text": ?}]')
    assert "a.json:1: not valid JSON (Expecting value, column 39)" in refused(tmp_path)


def test_a_long_list_takes_no_more_memory_than_a_piece_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 1 << 16)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 8000))  # 8 MB
    tracemalloc.start()
    assert sum(1 for _ in formats.read_json(path, "utf-8", ())) == 8000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def test_a_name_may_be_repeated_where_it_is_not_needed(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,prompt,text\na,b,c\n")
    assert texts_of(tmp_path) == ["c"]


def test_tools_alone_are_no_conversation(tmp_path):
    pa.parquet.write_table(pa.table({"tools": ["hammer"], "body": ["a"]}), tmp_path / "a.parquet")
    assert "a.parquet: row 1: no field 'text', there are: tools, body; name one" in refused(tmp_path)
    assert texts_of_column(tmp_path, "body") == ["a"]


def test_commas_may_stand_in_the_only_column_of_a_tsv_file(tmp_path):
    (tmp_path / "a.tsv").write_text("text\none, two\n")
    assert texts_of(tmp_path) == ["one, two"]


def test_quotes_in_a_tsv_file_may_be_characters_like_others(tmp_path):
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"Yes" he said\n"a" b\tHis "no"\n3\t"two\nlines"\n')
    assert texts_of(tmp_path) == ['"Yes" he said', 'His "no"', "two\nlines"]
    assert [document.name[-1] for document in load(str(tmp_path), "text")] == ["2", "3", "4"]


def test_headings_of_a_spreadsheet_are_known_where_no_other_name_is(tmp_path):
    (tmp_path / "a.csv").write_text("Id;Question;Answer\n1;q;a\n")
    (tmp_path / "b.csv").write_text("Question,Text,question,answer\nx,y,q,a\n")
    for name in ("a.csv", "b.csv"):
        [chat] = load(str(tmp_path / name), "text")
        assert [message["content"] for message in chat.messages] == ["q", "a"]


@pytest.mark.parametrize(("name", "lines"), [("a.jsonl", "{0}\n{0}\n"), ("a.json", "[{0},\n{0}]")])
def test_a_record_may_be_the_messages_alone(tmp_path, name, lines):
    turns = [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]
    (tmp_path / name).write_text(lines.format(json.dumps(turns)))
    assert [[message["content"] for message in chat.messages] for chat in load(str(tmp_path), "text")] == [
        ["q", "a"]
    ] * 2


def test_a_parquet_file_whose_texts_are_none_is_named_with_its_rows(tmp_path):
    """pyarrow takes bytes for text without a look at them."""
    texts = pa.array([b"a", b"caf\xe9"]).view(pa.string())
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert "a.parquet: rows 1 to 2: cannot be read (bytes that are not UTF-8 in a column" in refused(tmp_path)


def test_a_column_of_parquet_that_comes_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet: has two columns text; name one of them differently" in refused(tmp_path)


def test_a_missing_byte_order_mark_is_explained(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    assert "a.txt: not valid utf-16 (UTF-16 stream does not start with BOM); name the" in refused(
        tmp_path, encoding="utf-16"
    )


def test_a_link_that_leads_nowhere_is_named_and_a_pipe_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a")
    assert texts_of(tmp_path) == ["a"] == texts_of(tmp_path / "*.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    assert "b.txt: a link to " in refused(tmp_path) and "b.txt: a link to " in refused(tmp_path / "b.txt")


def test_the_bytes_of_a_files_name_need_be_no_text(tmp_path, tokenizer):
    name = os.fsdecode(b"caf\xe9.jsonl")
    write_jsonl(tmp_path / name, ["a", "b"])
    found = prepare(DataConfig(str(tmp_path), cache_dir=str(tmp_path / "cache")), tokenizer)  # in the same folder
    assert found.n_documents == 2 and found.names[1].endswith("caf\\udce9.jsonl:2")


def test_what_is_packed_twice_is_not_read_as_text(tmp_path):
    (tmp_path / "a.txt.zst.gz").write_bytes(gzip.compress(zstd.compress(b"a")))
    assert "holds only other files (1 .gz)" in refused(tmp_path)
    assert "unpack" in refused(tmp_path / "a.txt.zst.gz")


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_mark_of_utf_16_is_known(tmp_path, mark):
    path = tmp_path / "a.txt"
    path.write_bytes(mark + "text".encode("utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"))
    assert texts_of(path) == ["text"]


def test_a_binary_file_is_refused_by_name(tmp_path):
    """So is UTF-16 without a mark, which is valid UTF-8 as long as it is English."""
    (tmp_path / "a.txt").write_bytes("One.\nTwo.".encode("utf-16-le"))
    assert "a.txt:1: has the character NUL" in refused(tmp_path)


def test_a_file_that_vanishes_while_the_corpus_is_read(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    documents = source(str(tmp_path), "text").read()
    next(documents)
    later = next(documents)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt: has vanished since the corpus was listed; start again"):
        list(later.pieces())


def test_a_small_file_of_which_a_few_rows_fill_the_memory_is_refused_in_little(tmp_path):
    path = tmp_path / "long.parquet"
    table = pa.table({"text": ["a" * 1_000_000] * 100})
    pa.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    before = pa.total_allocated_bytes()
    assert "rows 1 to 16 unpack to more than 200 times" in refused(path)
    assert pa.total_allocated_bytes() - before < 100_000_000


def write_in_one_group(path: Path, texts: list[str]) -> None:
    pa.parquet.write_table(pa.table({"text": texts}), path, compression="zstd")


def write_packed(path: Path, texts: list[str]) -> None:
    write_jsonl(path, texts)
    path.write_bytes(zstd.compress(path.read_bytes()))


@pytest.mark.parametrize(("name", "write"), [("a.parquet", write_in_one_group), ("a.jsonl.zst", write_packed)])
def test_what_says_the_same_in_every_record_may_be_packed_to_little(tmp_path, name, write):
    """As chats with one long system prompt: what counts is what is in memory at a time."""
    texts = [f"{'You are helpful. ' * 500}{number}" for number in range(1200)]
    write(tmp_path / name, texts)
    assert sum(map(len, texts)) > max(8_000_000, 200 * (tmp_path / name).stat().st_size)
    assert sum(len(document.text) for document in source(str(tmp_path), "text").read()) == sum(map(len, texts))
