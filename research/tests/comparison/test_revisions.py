"""Whether the laws' code is that which the runs of the evidence were done with. Recorded in ``law_code.json`` by

    python -m research.tests.comparison.test_revisions

since the key of a run knows a law's settings and its revision, and neither its code nor its constants.
"""

import ast
import hashlib
import io
import json
import textwrap
import tokenize
from pathlib import Path

import pytest

from research.comparison import evidence
from research.comparison.evidence import LAW_REVISIONS, Spec
from research.comparison.protocol import FULL
from research.laws import LAWS

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).with_name("law_code.json")

BESIDE = {
    "kl": ("granite_scu/model/kl_divergence.py",),
    "projection": ("granite_scu/model/plant.py:act_on_update", "granite_scu/model/plant.py:_scale_factors"),
    "auto": ("research/laws/auto.py",),
}
"""What is measured for one law alone, how it acts, and the rule that gives it a setpoint. A colon comes before a
function's name."""

LOOP = (
    "granite_scu/model/description_length.py",
    "granite_scu/training/module.py:prepare_gradient",
    *(
        f"granite_scu/model/plant.py:{name}"
        for name in ("regularise", "_penalty", "count_step", "read_window", "set_regularisation")
    ),
    *(f"granite_scu/control/loop.py:{name}" for name in ("after_step", "tick", "_measure")),
)
"""The rest of the loop, which every law is measured by and acts through."""

CHANGED = """{part} is not as it was when its digest was recorded. It makes the runs of {laws}.
Would a stored run of these come out otherwise? Then count their revisions up, LAW_REVISIONS in
research/comparison/evidence.py (for auto AUTO_RULE, for all laws VERSION).
That sets aside the stored runs of research.tracking as well.
When that is settled: python -m research.tests.comparison.test_revisions"""


def imported(path: str, known: frozenset[str] = frozenset()) -> set[str]:
    """The files of laws that one of them needs, itself among them; of the ``known`` ones no more."""
    names = [node.module for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ImportFrom)]
    files = {
        f"{name.replace('.', '/')}.py"
        for name in names
        if name and name.startswith(("granite_scu.control.", "research.laws."))
    } - (known | {path})
    return {path}.union(*(imported(file, known | {path} | files) for file in files))


def parts() -> dict[str, list[str]]:
    """Every piece of code that makes a law's runs, and which laws it serves."""
    needed = {law: imported(f"{kind.__module__.replace('.', '/')}.py") for law, kind in LAWS.items()}
    for law, more in BESIDE.items():
        known = [imported(part) if part.startswith("research/laws/") else {part} for part in more]
        needed[law] = needed.get(law, set()).union(*known)
    needed = {law: found.union(LOOP) for law, found in needed.items()}
    return {part: [law for law in needed if part in needed[law]] for part in sorted(set().union(*needed.values()))}


def code_of(source: str) -> str:
    """A source text without imports, docstrings, comments and empty lines: the same under every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(source)):
        said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if said or isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest(part: str) -> str:
    path, _, function = part.partition(":")
    source = (ROOT / path).read_text(encoding="utf-8")
    if function:
        [node] = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function]
        source = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n")
    return hashlib.sha256(code_of(source).encode()).hexdigest()[:12]


def recorded() -> dict[str, str]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("part", "laws"), parts().items(), ids=parts())
def test_the_code_of_a_law_is_that_of_its_stored_runs(part, laws):
    assert digest(part) == recorded().get(part), CHANGED.format(part=part, laws=", ".join(laws))


def test_what_is_recorded_is_there():
    assert recorded().keys() == parts().keys(), "python -m research.tests.comparison.test_revisions"


def test_every_law_is_watched_with_what_it_acts_through_and_is_measured_by():
    watched = parts()
    assert (
        "cascade" in watched["granite_scu/control/laws/pi.py"]
        and "p" in watched["granite_scu/control/laws/feedback.py"]
    )
    assert watched["granite_scu/control/laws/base.py"] == [*LAWS, "auto"]
    assert watched["research/laws/kl_from_start.py"] == ["kl"]
    assert watched["research/laws/slopes.py"] == ["auto"]
    assert watched["granite_scu/model/plant.py:act_on_update"] == ["projection"]
    assert watched["granite_scu/training/module.py:prepare_gradient"] == [*LAWS, "auto"]


def keys() -> dict[str, str]:
    return {law: Spec(FULL.tasks[0], law, "", 0, {"control.controller": law}).key for law in LAWS}


def test_another_revision_of_a_law_is_another_run_of_it_and_of_what_acts_through_it(monkeypatch):
    before = keys()
    monkeypatch.setitem(evidence.LAW_REVISIONS, "pi", 99)
    after = keys()
    assert {law for law in LAWS if before[law] != after[law]} == {"pi", "cascade"}


def test_revisions_are_of_laws_and_none_is_the_first():
    assert LAW_REVISIONS.keys() <= LAWS.keys() and all(number > 1 for number in LAW_REVISIONS.values())


if __name__ == "__main__":
    found = {part: digest(part) for part in parts()}
    RECORDED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
