import gzip
import hashlib
import io
import json
import stat
import struct
import tarfile
import zlib

import pytest

from granite_scu.config.errors import UserError
from granite_scu.data.sources import read
from research import fetch_texts as fetch


def tarred(files, mode):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for path, contents in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(contents)
            tar.addfile(member, io.BytesIO(contents))
    return packed.getvalue()


def npm_archive(folder, files):
    path = folder / "some-package-1.0.0.tgz"
    path.write_bytes(tarred({f"package/{name}": contents for name, contents in files.items()}, "w:gz"))
    return path


def debian_archive(folder, files):
    """An ar archive of three members, as deb(5) has it; the first has an odd length and is padded."""
    data = tarred({f"./usr/share/{name}": contents for name, contents in files.items()}, "w:xz")
    members = {"debian-binary": b"2.0", "control.tar.xz": tarred({}, "w:xz"), "data.tar.xz": data}
    header = "{:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n"
    path = folder / "some-package_1.0_all.deb"
    path.write_bytes(
        b"!<arch>\n"
        + b"".join(
            header.format(name, 0, 0, 0, 100644, len(contents)).encode() + contents + b"\n" * (len(contents) % 2)
            for name, contents in members.items()
        )
    )
    return path


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A program on PATH that puts an archive where it is called, in place of npm and apt-get."""

    def stands_in(name, archive):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / name
        program.write_text(f"#!/bin/sh\n/bin/cp '{archive}' .\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", str(folder))

    return stands_in


@pytest.mark.parametrize("archive", [npm_archive, debian_archive])
def test_an_archive_gives_the_wanted_files_in_order(archive, tmp_path):
    files = {"b.txt": b"second", "a.txt": b"first", "c.txt.gz": gzip.compress(b"third"), "d.bin": b"unwanted"}
    found = fetch.files_of(archive(tmp_path, files), r".*\.txt(\.gz)?")
    assert [(path.split("/")[-1], contents) for path, contents in found] == [
        ("a.txt", b"first"),
        ("b.txt", b"second"),
        ("c.txt.gz", b"third"),
    ]


@pytest.mark.parametrize("name", ["broken.tgz", "broken.deb"])
def test_what_is_no_archive_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be read as an archive"):
        fetch.files_of(tmp_path / name, ".*")


@pytest.mark.parametrize(("registry", "program", "archive"), [
    ("npm", "npm", npm_archive),
    ("debian", "apt-get", debian_archive),
])  # fmt: skip
def test_a_corpus_is_fetched_written_and_read(registry, program, archive, client, tmp_path, monkeypatch, capsys):
    long, short = "A sentence.\r\n" * 100, "Too short."
    packed = archive(tmp_path, {"b.txt": long.encode(), "a.txt": b"X" + long.encode(), "c.txt": short.encode()})
    client(program, packed)
    package = fetch.Package(registry, "some-package", "1.0.0", sha256_of(packed))
    text = fetch.Text("prose", "public domain", (package,), r".*\.txt", fetch.whole_files)
    monkeypatch.setattr(fetch, "TEXTS", {"mine": text})

    assert fetch.main(["--output-dir", str(tmp_path / "out")]) == 0
    assert "mine" in capsys.readouterr().out
    file = tmp_path / "out" / "mine.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["name"].split("/")[-1] for line in lines] == ["a.txt", "b.txt"]
    assert lines[1]["text"] == "A sentence.\n" * 100
    assert [document.text for document in read.load(str(file), "text")] == [line["text"] for line in lines]

    before = file.read_bytes()
    assert fetch.main(["--output-dir", str(tmp_path / "out"), "--only", "mine"]) == 0
    assert file.read_bytes() == before


def refusal(capsys, *arguments):
    assert fetch.main([*arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_another_archive_is_refused_and_nothing_is_written(client, tmp_path, capsys):
    client("apt-get", debian_archive(tmp_path, {"jargon.txt": b"changed"}))
    assert "is not the archive it was" in refusal(
        capsys, "--only", "jargon-file", "--output-dir", str(tmp_path / "out")
    )
    assert not list((tmp_path / "out").iterdir())


def test_an_unknown_corpus_is_refused(tmp_path, capsys):
    assert "no corpus is called 'novels'; there are gutenberg, " in refusal(
        capsys, "--only", "novels", "--output-dir", str(tmp_path)
    )


def test_a_client_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm is not on PATH" in refusal(capsys, "--only", "eslint", "--output-dir", str(tmp_path))


def test_a_package_that_is_gone_is_named(client, tmp_path, capsys):
    client("apt-get", tmp_path / "nothing")
    said = refusal(capsys, "--only", "jargon-file", "--output-dir", str(tmp_path / "out"))
    assert "jargon-text=4.4.7-4.1 brought no archive" in said and "apt-get update" in said


def test_a_long_text_is_cut_between_paragraphs():
    text = "\n\n".join(f"Paragraph {i}. " + "Words. " * 400 for i in range(12))
    cut = list(fetch.pieces("book", text))
    assert [name for name, _ in cut] == [f"book/{i:03}" for i in range(len(cut))] and len(cut) > 2
    assert all(piece.startswith("Paragraph") for _, piece in cut)
    assert fetch.tidy("\n\n".join(piece for _, piece in cut)) == fetch.tidy(text)


def test_a_page_becomes_its_questions():
    page = b"<head><title>T</title></head><p>Intro.</p><h2>A.1 What?</h2><p>An <i>answer</i>\nin &lt;words&gt;.</p>"
    assert [fetch.tidy(text) for _, text in fetch.questions([("html/secA.html", page)])] == [
        "Intro.\n",
        "A.1 What?\n\nAn answer in <words>.\n",
    ]


def test_questions_are_numbered_in_pages_and_in_plain_text():
    page = b"<h2>Table of Contents</h2><h2>1 R</h2><p>On R.</p><h3 class='x'>1.1 What?</h3><p>This.</p>"
    plain = b"FAQ\n\n1.1. What?\n\n1.1: What?\n\nThat.\n\n1.2: Where?\n\nThere.\n"
    found = list(fetch.numbered_questions([("doc/R-FAQ.html", page), ("doc/zsh-common/FAQ.gz", plain)]))
    assert [(name, fetch.tidy(text)) for name, text in found if text.strip()] == [
        ("R-FAQ/02", "1 R\n\nOn R.\n"),
        ("R-FAQ/03", "1.1 What?\n\nThis.\n"),
        ("zsh-common/1.1", "1.1: What?\n\nThat.\n"),
        ("zsh-common/1.2", "1.2: Where?\n\nThere.\n"),
    ]


def test_a_dictionary_is_its_entries():
    terms = [chr(ord("A") + i) + "WORD" for i in range(13)]
    entries = "".join(f"{term}, n.  What it\nmeans.\n\n    A verse,\n\n" for term in terms)
    found = list(fetch.dictionary_entries([("devil.dict.dz", gzip.compress(b"PREFACE\n\n" + entries.encode()))]))
    assert [name for name, _ in found] == ["devil/000", "devil/001"]
    assert "".join(text for _, text in found) == entries
    assert found[1][1].startswith("MWORD, n.")


def test_a_script_is_what_is_said_in_it():
    room = b"""
dialogId("a-1", "font_small", "What a \\"mess\\".")

dialogId("a-x", "", "")

dialogId("a-2", "font_big", "Indeed.")
"""
    scene = b"""void talk(void)
{
 say_stop("`4Good day.", &current_sprite);
 //say nothing
 say("Hm.", 1);
}
"""
    assert list(fetch.spoken([("script/cellar/dialogs_en.lua", room), ("dink/Story/MOM.c", scene)])) == [
        ("cellar/dialogs_en.lua", "small: What a 'mess'.\nbig: Indeed."),
        ("Story/MOM.c", "Good day.\nHm."),
    ]


def test_a_dialogue_is_who_and_what():
    scenario = """
        speaker=Konrad
        message= _ "They said ""halt"" and
            <i>ran</i>."
        message= _ "Again."
        speaker="Delfador"
        message=$variable
        message=_"Yes."
    """
    assert list(fetch.dialogues([("data/campaigns/X/scenarios/01_Start.cfg", scenario.encode())])) == [
        ("X/scenarios/01_Start", 'Konrad: They said "halt" and ran.\nKonrad: Again.\nDelfador: Yes.')
    ]


def test_a_mission_is_what_is_said_in_it():
    data = b"""# comment with `ticks`
mission "Free the Rim"
\tdescription "not said"
\ton fail
\t\tdialog `You have failed.`
\ton offer
\t\tconversation
\t\t\t`The mood is solemn.`
\t\t\tchoice
\t\t\t\t`\t"Yes, sir."`
mission `The next`
\tdialog `Well done.`
"""
    assert list(fetch.told([("data/free worlds.txt", data)])) == [
        ("free worlds/Free the Rim", 'You have failed.\nThe mood is solemn.\n"Yes, sir."'),
        ("free worlds/The next", "Well done."),
    ]


def test_a_manual_page_loses_its_commands():
    page = rb""".\" a comment
.TH div 3
.SH NAME
div \- compute \(aqquotient\(aq
.PP
.BI "div_t div(int " n ", int " d );
.I "two words" more
The \fBdiv\fP() function \(em like this.\c
.nf
.TS
tab(:);
T{
a cell
T}
.TE
.SH "SEE ALSO"
.SM WORDS
"""
    ((name, text),) = fetch.manual_pages([("usr/share/man/man3/div.3.gz", page)])
    assert name == "div.3"
    assert fetch.tidy(text) == (
        "# NAME\n\ndiv - compute 'quotient'\n\ndiv_t div(int n, int d);\ntwo words more\n"
        "The div() function -- like this."
        "\n\n# SEE ALSO\n\nWORDS\n"
    )


def test_a_web_page_begins_at_its_first_heading():
    page = b"<html><body><p>Prev Next</p><h1>Email</h1><p>Evolution is one.</p></body></html>"
    ((name, text),) = fetch.web_pages([("en-US/sect.email.html", page)])
    assert (name, text) == ("sect.email", "Email\n\nEvolution is one.\n")


def test_the_jargon_file_is_its_entries():
    words = b"   awk\n\n   :awk: /awk/, n.\n\n   A language.\n\n   :baz: n.\n\n   Third.\n"
    ((_, text),) = fetch.jargon_entries([("jargon.txt.gz", words)])
    assert text == ":awk: /awk/, n.\n\nA language.\n\n:baz: n.\n\nThird.\n"


def test_a_profile_leaves_bare_figures_out():
    sentence = "Mountains rise in the north. " * 6
    profile = {"Geography": {"Area": {"total": {"text": "12 sq km"}}, "Terrain": {"text": f"<b>{sentence}</b>"}}}
    assert list(fetch.countries([("europe/xx.json", json.dumps(profile).encode())])) == [
        ("xx", f"Terrain: {sentence.strip()}")
    ]


def test_a_commentary_is_its_chapters():
    book = (
        '<div type="book"/> <chapter n="1" osisID="Gen.1"/>First &amp; <b>best</b>.<chapter n="2" osisID="Gen.2"/>Next.'
    )
    packed = zlib.compress(book.encode())
    files = [("ot.bzs", struct.pack("<III", 0, len(packed), len(book))), ("ot.bzz", packed)]
    assert list(fetch.commentary(files)) == [("Gen.1", "First & best."), ("Gen.2", "Next.")]


def test_a_vector_of_r_is_its_lines():
    def vector(lines):
        header = b"X\n" + struct.pack(">iii", 3, 0, 0) + struct.pack(">i", 5) + b"UTF-8"
        strings = b"".join(struct.pack(">ii", 9, len(line)) + line for line in lines)
        serialised = header + struct.pack(">ii", 16, len(lines)) + strings
        return struct.pack(">i", len(serialised)) + zlib.compress(serialised)

    contents = vector([b"EMMA", b"", b"One."]) + vector([b"PERSUASION", b"Two."])
    assert [(name, fetch.tidy(text)) for name, text in fetch.vectors_of_r([("Rdata.rdb", contents)])] == [
        ("emma/000", "EMMA\n\nOne.\n"),
        ("persuasion/000", "PERSUASION\nTwo.\n"),
    ]
