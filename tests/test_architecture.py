"""The import rules of docs/design.md, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_any(path: Path, *packages: str) -> set[str]:
    return {name for name in imported(path) if any(name == p or name.startswith(p + ".") for p in packages)}


ANALYSIS = ("plant", "identification", "tuning", "stability", "step_response")
"""Arithmetic on recordings and models, done after a run; no law needs it, and the package does not import it."""


@pytest.mark.parametrize("path", sorted((ROOT / "granite_scu" / "control").glob("*.py")), ids=lambda p: p.name)
def test_a_controller_imports_neither_torch_nor_lightning_nor_the_rest_of_the_product(path):
    assert not imports_any(path, "torch", "lightning", "transformers")
    if path.stem not in ANALYSIS:
        assert not imports_any(path, "numpy", "scipy", "control", *(f"granite_scu.control.{name}" for name in ANALYSIS))
    ours = imports_any(path, "granite_scu")
    assert all(name.startswith("granite_scu.control") for name in ours)


def test_information_imports_nothing_of_ours():
    assert not imports_any(ROOT / "granite_scu" / "information.py", "granite_scu", "lightning", "transformers", "peft")


def test_the_module_knows_no_controller():
    assert not imports_any(ROOT / "granite_scu" / "module.py", "granite_scu.control", "granite_scu.callbacks")


def test_one_callback_alone_joins_module_and_controller():
    both = [
        path.name
        for path in (ROOT / "granite_scu" / "callbacks").glob("*.py")
        if imports_any(path, "granite_scu.module") and imports_any(path, "granite_scu.control.base")
    ]
    assert both == ["scu.py"]


@pytest.mark.parametrize("path", sorted((ROOT / "viz").glob("*.py")), ids=lambda p: p.name)
def test_viz_reads_files_and_imports_no_training_code(path):
    assert not imports_any(path, "granite_scu", "torch", "lightning")


PUBLISHING = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "granite_scu" / "publishing").glob("*.py")])


@pytest.mark.parametrize("path", [*PUBLISHING, ROOT / "granite_scu" / "model_card.py"], ids=lambda p: p.name)
def test_publishing_reads_files_and_imports_no_training_code(path):
    assert not imports_any(path, "torch", "lightning", "transformers", "peft", "viz")
    names = ("config", "errors", "guard", "model_card", "parser", "publishing", "run_folder")
    light = {f"granite_scu.{name}" for name in names}
    ours = imports_any(path, "granite_scu") - {"granite_scu"}
    assert all(name in light or ".".join(name.split(".")[:2]) in light for name in ours), ours


def test_the_configuration_and_the_flags_import_nothing_heavy():
    for name in ("config.py", "flags.py", "errors.py", "guard.py"):
        assert not imports_any(ROOT / "granite_scu" / name, "torch", "lightning", "transformers", "peft", "numpy")
