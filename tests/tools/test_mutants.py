"""Faults are planted in a copy, and those that no test notices are reported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TOOL = Path(__file__).parents[2] / "tools" / "mutants.py"
spec = importlib.util.spec_from_file_location("mutants", TOOL)
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants  # dataclasses look for it there
spec.loader.exec_module(mutants)

SUMS = '''
def mean(values: list[float | int]) -> float:
    """At least 1 value."""
    if not values:
        raise ValueError(f"{len(values) + 1}")
    assert values[0] < 2
    print(len(values) - 3)
    return sum(values) / 4
'''
DATA = """
libraries: [pytest, hypothesis, xdist.plugin]
modules: {{sums: {{files: [tiny/*.py]}}}}
planted:
  - {{file: tiny/sums.py, old: sum(values) /, new: sum(values) *, tests: [tests/test_sums.py]}}
  - {{file: tiny/sums.py, old: "{old}", new: "if False:", tests: [tests/test_sums.py]}}
known:
  - {{file: tiny/sums.py, line: "if not values:", change: "if not values: → if False:", why: nobody gives none}}
"""


@pytest.fixture
def tiny(tmp_path):
    """Runs the tool on a package of one function and one test, with the second fault planted at a text."""
    for name, text in {
        "tiny/__init__.py": "",
        "tiny/sums.py": SUMS,
        "tests/test_sums.py": "from tiny.sums import mean\n\n\ndef test_it():\n    assert mean([1, 1, 1, 1]) == 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(old: str, *flags: str) -> subprocess.CompletedProcess:
        (tmp_path / "mutants.yaml").write_text(DATA.format(old=old), encoding="utf-8")
        command = [sys.executable, TOOL, "--root", tmp_path, "--data", tmp_path / "mutants.yaml", *flags]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
        assert (tmp_path / "tiny" / "sums.py").read_text() == SUMS
        return done

    return run


def test_what_a_test_notices_is_killed_and_the_rest_survives_with_a_reason(tiny):
    done = tiny("if not values:", "--count", "1")
    assert done.returncode == 1, done.stderr  # too few are killed
    assert "| by hand | 2 | 1 | 1 |" in done.stdout and "| sums | 1 |" in done.stdout
    assert "| tiny/sums.py:4 | `if not values: → if False:` | nobody gives none |" in done.stdout


def test_a_planted_text_that_is_no_longer_there_is_an_error(tiny):
    done = tiny("if no values:", "--count", "0")
    assert done.returncode == 2 and "if no values:" in done.stderr


def test_the_faults_and_survivors_that_are_written_down_are_in_the_files():
    data, root = yaml.safe_load(TOOL.with_suffix(".yaml").read_text(encoding="utf-8")), TOOL.parents[1]
    assert len(list(mutants.planted(root, data["planted"]))) == len(data["planted"])  # otherwise it refuses
    for known in data["known"]:
        lines = (root / known["file"]).read_text(encoding="utf-8").splitlines()
        assert known["line"] in map(str.strip, lines)


def test_faults_are_of_what_computes_and_not_of_what_is_said(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    found = [*mutants.generated(tmp_path, {"sums": {"files": ["*.py"]}}, 99, seed=0)]
    assert all(mutant.differs for mutant in found)
    assert sorted(mutant.line for mutant in found) == [4, 5, 8]  # one a line: not the words, what is said, what asserts
    changes = {new for _, (_, _, new) in mutants.Changes(SUMS.encode()).found}
    assert changes == {b"", b"not (not values)", b"pass", b"return None", b"*", b"5", b"3"}
