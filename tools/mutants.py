#!/usr/bin/env python3
"""Plant faults in the modules that compute, and report those that no test notices: python tools/mutants.py

mutants.yaml, beside this file, has faults that were written by hand, each with the tests that must notice it, and names
the modules in which more are generated: from the syntax tree, drawn by a seed, as many in each module. A fault is
planted in a copy of the repository; then the quick tests of its file run, those that mirror it first. Each mutant is a
process forked from one that has imported the large libraries, and nothing of the package.

The report is a Markdown table, with every survivor and why it survives where mutants.yaml tells. The exit code is 1
where less than 90 per cent of the mutants were killed, and 2 where a planted text or a passing test is missing.
"""

import argparse
import ast
import compileall
import importlib
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
MIN_KILLED = 0.9

SWAPPED = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")), ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)), ast.And: ("and", ("or",)), ast.Or: ("or", ("and",)),
    ast.Add: ("+", ("-",)), ast.Sub: ("-", ("+",)), ast.Mult: ("*", ("/",)), ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)), ast.Mod: ("%", ("*",)), ast.Pow: ("**", ("*",)), ast.BitAnd: ("&", ("|",)),
}  # fmt: skip
"""Operators, and what each is changed to."""
NO_LOGIC = ("log", "logger", "logging", "warnings", "print", "isinstance", "cast")
"""Calls of these are left alone, with what they are given: they print, or only tell a type."""
SYMMETRIC = ("max", "min", "union1d", "array_equal", "maximum", "minimum")
"""Calls in which two swapped arguments change nothing."""
SLOW = "tests/integration/"
"""Tests of whole commands, which are not run beside the modules' own."""


class Refused(Exception):
    """What keeps the faults from being planted or judged."""


@dataclass(frozen=True)
class Mutant:
    """A fault: the bytes from ``start`` to ``end`` of a file become ``new``."""

    module: str
    path: str
    start: int
    end: int
    new: bytes
    source: bytes
    tests: tuple[str, ...]

    @property
    def line(self) -> int:
        return self.source.count(b"\n", 0, self.start) + 1

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def change(self) -> str:
        old, new = (" ".join(text.decode().split()) for text in (self.source[self.start : self.end], self.new))
        return f"{old} → {new or 'nothing'}"

    @property
    def text(self) -> str:
        """The line that the fault begins in."""
        return self.source.splitlines()[self.line - 1].decode().strip()

    @property
    def differs(self) -> bool:
        """Whether the file still has a syntax, and means something else."""
        try:
            return ast.dump(ast.parse(self.planted)) != ast.dump(ast.parse(self.source))
        except SyntaxError:
            return False

    @property
    def planted(self) -> bytes:
        return self.source[: self.start] + self.new + self.source[self.end :]


class Changes(ast.NodeVisitor):
    """The faults of a file by their kind, (start, end, new): none in messages, annotations, assertions, decorators."""

    def __init__(self, source: bytes) -> None:
        self.source, self.found = source, list[tuple[str, tuple[int, int, bytes]]]()
        self._lines = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self.visit(ast.parse(source))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.expr | ast.stmt) -> bytes:
        return self.source[slice(*self._span(node))]

    def _add(self, kind: str, start: int, end: int, new: bytes) -> None:
        self.found.append((kind, (start, end, new)))

    def _operator(self, kind: str, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Change the operator between two operands."""
        old, others = SWAPPED.get(type(operator), ("", ()))
        at = self.source.find(old.encode(), self._span(left)[1], self._span(right)[0])
        for new in others:
            self._add(kind, at, at + len(old), new.encode())

    def _remove(self, node: ast.stmt) -> None:
        self._add("statement", *self._span(node), b"pass")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._operator("comparison", left, operator, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator("logic", left, node.op, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operator("arithmetic", node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, _ = self._span(node)
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            kind, length = ("logic", 3) if isinstance(node.op, ast.Not) else ("arithmetic", 1)
            self._add(kind, start, start + length, b"")
        if not isinstance(node.op, ast.USub):  # a negative number is one constant
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", *self._span(node), str(not value).encode())
        elif isinstance(value, int | float):
            for other in (value + 1, value - 1):
                self._add("constant", *self._span(node), f"({other!r})".encode() if other < 0 else repr(other).encode())

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._add("logic", *self._span(node.test), b"not (" + self._text(node.test) + b")")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.JoinedStr):
            self._add("return", *self._span(node), b"return None")
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if _prints(name):
            return
        if len(node.args) > 1 and name.split(".")[-1] not in SYMMETRIC:
            first, second = node.args[:2]
            between = self.source[self._span(first)[1] : self._span(second)[0]]
            new = self._text(second) + between + self._text(first)
            self._add("arguments", self._span(first)[0], self._span(second)[1], new)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: it asserts
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if not _prints(ast.unparse(node.value.func)):
                self._remove(node)
            self.visit(node.value)
        elif not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._remove(node)
        self._operator("arithmetic", node.target, node.op, node.value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._remove(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("statement", *self._span(node), b"break")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("statement", *self._span(node), b"continue")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._remove(node)  # its words are a message

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """It guards, and does nothing."""


def _prints(call: str) -> bool:
    """Whether a call, by its name, is of those that are left alone."""
    return call.split(".")[0] in NO_LOGIC or call.endswith(".print")


def planted(root: Path, entries: Iterable[dict]) -> Iterator[Mutant]:
    """The faults that were written by hand."""
    for entry in entries:
        path, old, new = entry["file"], entry["old"].encode(), entry["new"].encode()
        source = (root / path).read_bytes()
        if source.count(old) != 1:
            raise Refused(f"{path}: the text {entry['old']!r} of a planted fault is there {source.count(old)} times")
        start = source.index(old)
        yield Mutant("by hand", path, start, start + len(old), new, source, tuple(entry["tests"]))


def generated(root: Path, modules: dict[str, dict], count: int, seed: int) -> Iterator[Mutant]:
    """``count`` faults of the modules, as many in each, of each kind in turn, on lines that differ."""
    for number, (module, entry) in enumerate(modules.items()):
        drawing = random.Random(f"{seed} {module}")
        paths = sorted(str(path.relative_to(root)) for pattern in entry["files"] for path in root.glob(pattern))
        if not paths:
            raise Refused(f"{module}: no file is called {' or '.join(entry['files'])}")
        pools: dict[str, list[Mutant]] = {}
        for path in paths:
            source = (root / path).read_bytes()
            for kind, change in Changes(source).found:
                pools.setdefault(kind, []).append(Mutant(module, path, *change, source, ()))
        for pool in pools.values():
            drawing.shuffle(pool)
        order = (mutant for several in zip_longest(*pools.values()) for mutant in several if mutant is not None)
        wanted, seen = count // len(modules) + (number < count % len(modules)), set[tuple[str, int]]()
        for mutant in order:
            if len(seen) < wanted and (mutant.path, mutant.line) not in seen and mutant.differs:
                seen.add((mutant.path, mutant.line))
                yield mutant


def tests_of(root: Path, path: str, more: Iterable[str]) -> tuple[str, ...]:
    """The test files of a file: its own examples, the one that mirrors it, those that import it, and ``more``."""
    package, *parents, name = Path(path).with_suffix("").parts
    dotted = re.escape(".".join((package, *parents)))
    imports = re.compile(rf"{dotted}\.{name}\b|from {dotted} import .*\b{name}\b")
    files = sorted([*root.glob("tests/**/test_*.py"), *root.glob("research/tests/**/test_*.py")])
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
    mirror = str(Path("tests", *parents, f"test_{name}.py"))
    own = [path] if ">>> " in (root / path).read_text(encoding="utf-8") else []
    importers = [test for test, text in texts.items() if imports.search(text) and not test.startswith(SLOW)]
    return tuple(dict.fromkeys([*own, *([mirror] if mirror in texts else []), *importers, *more]))


def copy_of(root: Path, package: str, folder: Path) -> Path:
    """The repository's files, tracked and new, in a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name] or [
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()
    ]
    for name in names:
        if (root / name).is_file():  # deleted ones are still listed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    # By a hash: a planted file may have the size and the second of the one before.
    compileall.compile_dir(folder / package, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


@dataclass(frozen=True)
class Trial:
    """Quick tests to run, in a copy of the repository with a fault or without, for so many seconds at most."""

    tests: tuple[str, ...]
    limit: float
    mutant: Mutant | None = None


class Run:
    """A trial in a process of its own, forked from this one."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder, self.began = trial, folder, time.monotonic()
        if trial.mutant:
            (folder / trial.mutant.path).write_bytes(trial.mutant.planted)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (until the end)
        self._process = os.fork()
        if not self._process:
            self._become_pytest()

    def _become_pytest(self) -> None:
        code = 3
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._output.fileno(), 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path.insert(0, str(self.folder))
            import pytest

            flags = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header"]
            code = int(pytest.main([*flags, *self.trial.tests]))
            sys.stdout.flush()
        finally:
            os._exit(code)

    @property
    def code(self) -> int | None:
        """Pytest's exit code; negative for a process that was ended, by this one at the limit; None while it runs."""
        done, status = os.waitpid(self._process, os.WNOHANG)
        if not done and time.monotonic() < self.began + self.trial.limit:
            return None
        return os.waitstatus_to_exitcode(status if done else self.kill())

    def kill(self) -> int:
        """End it, with all that it started; returns how it ended."""
        os.killpg(self._process, signal.SIGKILL)
        return os.waitpid(self._process, 0)[1]

    def end(self) -> str:
        """Take the fault out again; returns what the tests printed."""
        if self.trial.mutant:
            (self.folder / self.trial.mutant.path).write_bytes(self.trial.mutant.source)
        self._output.seek(0)
        with self._output as output:
            return output.read().decode(errors="replace")


def outcomes(trials: Iterable[Trial], folders: Iterable[Path]) -> Iterator[tuple[Trial, int, float, str]]:
    """The trials as they end, one at a time in each folder: with exit code, seconds and what was printed."""
    waiting, free, running = [*trials][::-1], [*folders], list[Run]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(Run(waiting.pop(), free.pop()))
            for each in [*running]:
                if (code := each.code) is not None:
                    running.remove(each)
                    free.append(each.folder)
                    yield each.trial, code, time.monotonic() - each.began, each.end()
            time.sleep(0.02)
    finally:
        for each in running:
            each.kill()


def report(results: list[tuple[Mutant, bool]], known: list[dict]) -> str:
    """The Markdown tables."""
    reasons = {(entry["file"], entry["line"], entry["change"]): entry["why"] for entry in known}
    lines = ["| module | mutants | killed | survived |", "|---|---|---|---|"]
    for module in dict.fromkeys(mutant.module for mutant, _ in results):
        verdicts = [killed for mutant, killed in results if mutant.module == module]
        lines.append(f"| {module} | {len(verdicts)} | {sum(verdicts)} | {len(verdicts) - sum(verdicts)} |")
    killed = sum(killed for _, killed in results)
    lines += [f"| all | {len(results)} | {killed} ({killed / len(results):.0%}) | {len(results) - killed} |", ""]
    survivors = [mutant for mutant, killed in results if not killed]
    if survivors:
        lines += ["| survivor | change | why |", "|---|---|---|"]
    for mutant in survivors:
        why = reasons.get((mutant.path, mutant.text, mutant.change), "")
        change, why = (text.replace("|", "\\|") for text in (mutant.change, why))
        lines.append(f"| {mutant.place} | `{change}` | {why} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=100, help="faults to generate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their draw")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose module or file has this in its name")
    parser.add_argument("--jobs", type=int, default=1, help="processes that test at a time")
    parser.add_argument("--data", type=Path, default=ROOT / "tools" / "mutants.yaml", metavar="FILE")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="of the repository")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended, the copy removed
    data, root = yaml.safe_load(args.data.read_text(encoding="utf-8")), args.root.resolve()
    try:
        results = run(root, data, args.count, args.seed, args.only, args.jobs)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(results, data.get("known", [])))
    return int(sum(killed for _, killed in results) < MIN_KILLED * len(results))


def run(root: Path, data: dict, count: int, seed: int, only: str, jobs: int) -> list[tuple[Mutant, bool]]:
    """Every mutant, and whether it was killed."""
    modules = data["modules"]
    mutants = [*planted(root, data.get("planted", [])), *generated(root, modules, count, seed)]
    mutants = [mutant for mutant in mutants if only in mutant.module or only in mutant.path]
    if not mutants:
        raise Refused(f"--only {only}: no mutant is in such a module or file")
    tests = {m: m.tests or tests_of(root, m.path, modules[m.module].get("tests", ())) for m in mutants}
    for library in data.get("libraries", ()):
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        package = Path(mutants[0].path).parts[0]
        folders = [copy_of(root, package, Path(place, str(job))) for job in range(jobs)]
        seconds = {}
        every = sorted({test for several in tests.values() for test in several})
        for trial, code, took, output in outcomes([Trial((test,), 600) for test in every], folders):
            if code not in (0, 5):  # 5: there are only slow tests
                raise Refused(f"{trial.tests[0]}: fails without a fault:\n{output[-3000:]}")
            seconds[trial.tests[0]] = took
        print(f"{len(every)} test files pass without a fault ({sum(seconds.values()):.0f} s)", file=sys.stderr)
        trials = [Trial(tests[m], 60 + 5 * sum(seconds[test] for test in tests[m]), m) for m in mutants]
        killed: dict[Mutant | None, bool] = {}
        for trial, code, took, _ in outcomes(trials, folders):
            killed[trial.mutant] = code not in (0, 5)
            verdict = "out of time" if code < 0 else "killed" if killed[trial.mutant] else "SURVIVED"
            words = f"{verdict}, {took:.0f} s: {trial.mutant.place} {trial.mutant.change}"
            print(f"{len(killed)}/{len(mutants)} {words}", file=sys.stderr, flush=True)
    return [(mutant, killed[mutant]) for mutant in mutants]


if __name__ == "__main__":
    sys.exit(main())
