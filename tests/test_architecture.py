"""The layers of docs/develop/architecture.md, read from the imports of every module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools import house

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "granite_scu"

LAYERS = (
    ("control",),
    ("config",),
    ("storage",),
    ("hardware", "model", "data", "viz"),
    ("evaluation",),
    ("training", "export", "integrations"),
    ("cli",),
)
"""From the bottom up. A package imports itself and what lies on lower layers."""

FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}

HEAVY = ("torch", "lightning", "transformers", "peft")
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import; name the package"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_any(path: Path, *packages: str) -> set[str]:
    return {name for name in imported(path) if any(name == p or name.startswith(p + ".") for p in packages)}


def parts(path: Path) -> tuple[str, ...]:
    """``granite_scu/model/loss.py`` as ``("model", "loss")``; a package's ``__init__.py`` is the package."""
    names = path.relative_to(PACKAGE).with_suffix("").parts
    return names[:-1] if names[-1] == "__init__" else names


def upward(path: Path) -> Iterator[str]:
    """The imports of a module that are neither of its own package nor of a lower layer, and those of research."""
    here, *_ = parts(path)
    for name in sorted(imports_any(path, "granite_scu") - {"granite_scu"}):
        there = name.split(".")[1]
        if there != here and FLOOR.get(there, FLOOR[here]) >= FLOOR[here]:
            yield name
    yield from imports_any(path, "research")


def test_the_root_holds_the_layers_and_the_way_in():
    entries = {path.name for path in PACKAGE.iterdir() if path.is_file() or any(path.rglob("*.py"))}
    assert entries == {*FLOOR, "__init__.py", "__main__.py", "py.typed"}
    assert len(entries) <= 16


def test_every_module_imports_its_own_package_and_lower_layers():
    packaged = [path for path in MODULES if path.parent != PACKAGE or path.stem in FLOOR]
    offenders = {str(path.relative_to(PACKAGE)): found for path in packaged if (found := list(upward(path)))}
    assert not offenders


def test_imports_are_statements():
    """Others would escape these tests. Public names, commands and laws from outside are found when asked for."""
    late = re.compile(r"\b(import_module|__import__)\b")
    found = {str(path.relative_to(PACKAGE)) for path in MODULES if late.search(path.read_text(encoding="utf-8"))}
    assert found == {"__init__.py", "cli/main.py", "control/__init__.py"}


def test_no_circle_of_imports():
    """Also within a package: leaves are taken off until nothing is left."""
    graph = {path: house.modules_imported(PACKAGE, path) for path in MODULES}
    while leaves := {path for path, needs in graph.items() if not needs & graph.keys()}:
        graph = {path: needs for path, needs in graph.items() if path not in leaves}
    assert not graph, sorted(str(path.relative_to(PACKAGE)) for path in graph)


def test_what_one_must_know_does_not_grow():
    """Limits at what ``tools/house.py`` counts today: what is added makes room first, and lowers them where it can."""
    assert len(house.recipe_imports(PACKAGE)) <= 35
    assert len(house.reach(PACKAGE, house.LOOP)) <= 139
    assert len(house.passage(PACKAGE, "learning_rate")) <= 7
    assert len(house.passage(PACKAGE, "output_dir")) <= 10
    assert house.names_of_lambda(PACKAGE) == {"lam", "lambda"}  # the second in files
    assert len(house.long_functions(PACKAGE)) <= 2


def test_control_needs_the_standard_library_alone():
    assert not {
        path.name
        for path in (PACKAGE / "control").rglob("*.py")
        if imports_any(path, *HEAVY, "numpy", "scipy", "control")
    }


def test_description_length_imports_nothing_of_ours():
    assert not imports_any(
        PACKAGE / "model" / "description_length.py", "granite_scu", "lightning", "transformers", "peft"
    )


def test_the_module_knows_no_controller():
    assert not imports_any(PACKAGE / "training" / "module.py", "granite_scu.control", "granite_scu.training.callbacks")


def test_viz_reads_files_and_imports_no_training_code():
    assert not {path.name for path in (PACKAGE / "viz").glob("*.py") if imports_any(path, "torch", "lightning")}


def test_what_answers_at_once_imports_nothing_heavy():
    light = [
        *(PACKAGE / "config" / f"{name}.py" for name in ("errors", "flags", "sampling", "settings", "shipped")),
        *(PACKAGE / "export" / "publish").glob("*.py"),
        *(
            PACKAGE / "cli" / f"{name}.py"
            for name in (
                "argument_parser",
                "command_table",
                "console",
                "exit_codes",
                "main",
                "push_to_hf",
                "script_flags",
                "run_commands",
            )
        ),
        *(ROOT / "tools").glob("*.py"),
    ]
    assert not {path.name for path in light if imports_any(path, *HEAVY)}
