"""What users read: how much it is, in which words, and whether what it prints exists."""

import ast
import functools
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest

from granite_scu.cli import main
from granite_scu.cli.command_table import BY_NAME
from granite_scu.config import flags

ROOT = Path(__file__).parents[1]
README, CHANGELOG, DOCS = ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
MAX_WORDS, MAX_IN_README, MAX_IN_LOG = 24_000, 900, 3_000

NOT_OURS = {"--requeue", "--local-dir", "--max-restarts", "--max-lora-rank", "--signal"}
"""Flags of other programs that pages name."""


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_the_documents_keep_to_their_lengths():
    assert words(README) <= MAX_IN_README
    assert sum(map(words, [CHANGELOG, *PAGES])) <= MAX_WORDS
    assert words(ROOT / "notes" / "log.md") <= MAX_IN_LOG


def unused_words() -> list[str]:
    """The list that contributors are given, as patterns."""
    page = (DOCS / "develop" / "contributing.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- (.*): \*.*\*$", page.partition("## Words")[2].partition("\n## ")[0], re.MULTILINE)
    return [word for entry in entries for word in entry.split(", ")]


def said_in(path: Path) -> list[str]:
    """The messages of a module, first lines of its docstrings not included: strings that errors and logs are given."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "UserError", "RunFailed", "info", "warning", "error", "print",
        ):  # fmt: skip
            found += [
                text.value for text in ast.walk(node) if isinstance(text, ast.Constant) and isinstance(text.value, str)
            ]
    return found


def explained_in(path: Path) -> list[str]:
    """The comments of a module, and the first lines of its docstrings."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [token.string for token in tokens if token.type == tokenize.COMMENT] + [
        (ast.get_docstring(node) or "").partition("\n")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
    ]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`|^    .*$", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def read_by_users() -> dict[str, str]:
    """By place: the pages without their code, the messages, the comments, the help."""
    read = {str(page): without_code(page.read_text(encoding="utf-8")) for page in PAGES}
    contributing = str(DOCS / "develop" / "contributing.md")
    read[contributing] = re.sub(r"^- .*: \*.*\*$", "", read[contributing], flags=re.MULTILINE)
    for path in sorted((ROOT / "granite_scu").rglob("*.py")):
        read[str(path)] = "\n".join(said_in(path) + explained_in(path))
    return read | {"--help": "\n".join(flag.help for flag in flags.FLAGS.values())}


@pytest.mark.parametrize("word", unused_words())
def test_words_that_are_not_used(word):
    pattern = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    assert {place: pattern.findall(text) for place, text in read_by_users().items() if pattern.search(text)} == {}


def commands(page: Path) -> list[list[str]]:
    """The calls of granite-scu in a page's code."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?: {4}|\$ )?(?:\.venv/bin/)?granite-scu (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


CALLED = {words[0] for page in PAGES for words in commands(page) if not words[0].startswith("--")}


def test_commands_on_pages_are_commands():
    assert set(BY_NAME) >= CALLED and len(CALLED) > 8


@pytest.mark.parametrize("name", sorted(CALLED))
def test_what_pages_give_a_command_is_what_it_takes(name, capsys):
    given = {
        word.partition("=")[0]
        for page in PAGES
        for verb, *rest in commands(page)
        if verb == name
        for word in rest
        if word.startswith("--")
    }
    for flag in ("--help-all", "--help"):
        with pytest.raises(SystemExit):
            main.main([name, flag])
        if shown := capsys.readouterr().out:
            break
    accepted = set(re.findall(r"--[a-zA-Z0-9_.-]+", shown)) | {"--print-config"}
    dotted = {f"--{key}" for key in flags.DEFAULTS}
    assert {word for word in given if word not in accepted and word not in dotted} == set()


def test_flags_in_sentences_are_flags_of_a_program_here():
    folders = ("granite_scu/cli", "granite_scu/config", "granite_scu/viz", "benchmarks", "scripts", "tools", "research")
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh")
    )
    sentences = (re.sub(r"^```.*?^```|^    .*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
                 for page in PAGES)  # fmt: skip
    code = [code for text in sentences for code in re.findall(r"`([^`\n]+)`", text)]
    named = {flag for each in code for flag in re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*(?![\w.-])", each)}
    assert {flag for flag in named - NOT_OURS if not re.search(rf"{flag.replace('--no-', '--')}\b", sources)} == set()


def test_programs_and_make_targets_on_pages_are_there():
    text = re.sub(r"https?://\S+", "", "\n".join(page.read_text(encoding="utf-8") for page in PAGES))
    programs = set(
        re.findall(r"\b(?:benchmarks|scripts|tools|tests|granite_scu|configs|research)/[\w/.-]*\w\.\w+", text)
    )
    programs -= {name for name in programs if re.search("stepping|gpu_l4|NAME", name)}  # that a reader is to write
    assert {name for name in programs if not (ROOT / name).exists() and not (DOCS / name).exists()} == set()
    targets = set(
        re.findall(r"^([a-z0-9-]+)(?:[a-z0-9 -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    targets |= {"train-3090", "train-low-mem", "docs-serve"}  # named second on their line
    named = set(re.findall(r"(?:^    |^|`)make ([a-z0-9-]+)", text, re.MULTILINE))
    assert named - targets == set()
