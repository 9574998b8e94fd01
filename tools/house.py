#!/usr/bin/env python3
"""Measure the package as a house: how much one must know before one can change a thing.

Prints a table of this tree beside commit ef4add5, which this script measured too, and the aim. Imports and names are
those anywhere in a file. tests/test_architecture.py keeps limits by the same functions.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# Where a run begins and what it trains; where a flag enters; where lambda passes.
LOOP = ("training/recipe.py", "training/module.py")
SHELL = ("cli/main.py", "cli/*_commands.py", "cli/train.py")
LAMBDA = ("control", "training", "integrations", "model/description_length.py", "model/drift.py")
# Lines that are seen at once.
SCREEN = 45


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_file(package: Path, name: str) -> Path | None:
    """Where a module of the package lies; None for what is none, as a class."""
    target = package.joinpath(*name.split(".")[1:])
    return next((path for path in (target.with_suffix(".py"), target / "__init__.py") if path.is_file()), None)


def own_imports(package: Path, path: Path) -> Iterator[tuple[Path, str]]:
    """Each name that a file imports from the package, and the module that has it."""
    own = f"{package.name}."
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found = [
                (module_file(package, alias.name), alias.name) for alias in node.names if alias.name.startswith(own)
            ]
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(own):
            module = module_file(package, str(node.module))
            found = [(module_file(package, f"{node.module}.{a.name}") or module, a.name) for a in node.names]
        else:
            continue
        yield from ((file, name) for file, name in found if file)


def modules_imported(package: Path, path: Path) -> set[Path]:
    """The modules of the package that a module takes names from. Late and guarded imports are included."""
    return {file for file, _ in own_imports(package, path)}


def reach(package: Path, starts: Iterable[str]) -> set[Path]:
    """The files that these import, one through another, with themselves and the packages that the files lie in."""
    found: set[Path] = set()
    left = [path for start in starts for path in (list(package.glob(start)) or [package / start])]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            above = {folder / "__init__.py" for folder in path.parents if package in (folder, *folder.parents)}
            left += modules_imported(package, path) | {file for file in above if file.is_file()}
    return found


def recipe_imports(package: Path) -> set[str]:
    """The names of our own that the recipe imports."""
    return {name for _, name in own_imports(package, package / LOOP[0])}


def words(path: Path) -> Iterator[str]:
    """Every identifier of a file, and every string that is one: a key, a flag, or the last part of a dotted key."""
    for node in ast.walk(syntax(path)):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(node, field, None), str):
                yield word.lstrip("_")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2].removeprefix("--").replace("-", "_")


def passage(package: Path, setting: str) -> set[Path]:
    """The files that name a setting, of those that a command of training reaches and that do not only draw."""
    return {path for path in reach(package, SHELL) if package / "viz" not in path.parents and setting in words(path)}


def names_of_lambda(package: Path) -> set[str]:
    """The identifiers that lambda has from law to gradient, without its bounds and settings."""
    files = [path for path in package.rglob("*.py") if f"{path.relative_to(package)}".startswith(LAMBDA)]
    found = {word for path in files for word in words(path) if word.isidentifier()}
    mine = {word for word in found if {"lam", "lambda", "strength", "strengths"} & {*word.split("_")}}
    return {word for word in mine if not word.startswith("lambda_")}


def helpers(package: Path) -> set[str]:
    """The functions of one statement, undecorated, that one place uses."""
    uses: Counter[str] = Counter()
    short: dict[str, str] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(syntax(path)):
            uses[getattr(node, "id", None) or getattr(node, "attr", None) or ""] += 1
            plain = isinstance(node, ast.FunctionDef) and not node.decorator_list
            if plain and len(node.body) == 1 + bool(ast.get_docstring(node)):
                short[node.name] = f"{path.relative_to(package)}:{node.lineno} {node.name}"
    return {place for name, place in short.items() if uses[name] == 1}


def long_functions(package: Path) -> set[str]:
    """The functions that fill more than a screen, docstrings aside."""
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef):
                begin = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
                if (node.end_lineno or begin) - begin >= SCREEN:
                    found.add(f"{path.relative_to(package)}:{node.lineno} {node.name}")
    return found


def lines(*places: Path) -> int:
    """Of Python in files and folders."""
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def counted(root: Path) -> list[tuple[str, Iterable[object], int, int]]:
    """What is counted, and how many it was at ef4add5 and is to be, 0 where nothing is."""
    package = root / "granite_scu"
    return [
        ("files that the training loop reaches", reach(package, LOOP), 146, 90),
        ("names of our own that the recipe imports", recipe_imports(package), 71, 35),
        ("files that name learning_rate on its way", passage(package, "learning_rate"), 6, 7),
        ("files that name output_dir on its way", passage(package, "output_dir"), 15, 10),
        ("names of lambda on its way", names_of_lambda(package), 8, 2),
        ("functions of one statement with one caller", helpers(package), 94, 0),
        (f"functions of more than {SCREEN} lines", long_functions(package), 8, 0),
    ]


def lengths(root: Path) -> list[tuple[str, Iterable[Path], int, int]]:
    """The places whose lines are counted, with their lines at ef4add5 and the aim, 0 where nothing is."""
    return [
        ("lines that the training loop reaches", reach(root / "granite_scu", LOOP), 19942, 13000),
        ("lines of the package", [root / "granite_scu"], 34833, 25000),
        ("lines of the tests", [root / "tests"], 32300, 25000),
        ("lines of benchmarks, scripts, tools", [root / name for name in ("benchmarks", "scripts", "tools")], 7491, 0),
        ("lines of research, apart from them", [root / "research"], 0, 0),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="of the repository")
    parser.add_argument("--list", action="store_true", help="also print what is counted")
    args = parser.parse_args()
    rows = [
        (what, sorted(map(str, found)), len([*found]), *rest) for what, found, *rest in counted(args.root.resolve())
    ]
    rows += [(what, [], lines(*places), *rest) for what, places, *rest in lengths(args.root.resolve())]
    print(f"{'':44}{'here':>9}{'ef4add5':>9}{'aim':>9}")
    for what, found, *values in rows:
        print(f"{what:44}" + "".join(f"{value or '-':>9}" for value in values))
        for each in found if args.list else ():
            print(f"    {each}")
