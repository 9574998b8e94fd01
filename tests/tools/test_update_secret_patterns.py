"""Rules of gitleaks become patterns of Python."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "update_secret_patterns.py"
RULES = r"""
[[rules]]
id = "own-form"
regex = '''\b(abc_(?i)[a-z0-9]{4})(?:[\x60'"\s;]|\\[nr]|$)'''
keywords = ["abc_"]

[[rules]]
id = "a-word-nearby"
regex = '''(?i)[\w.-]{0,50}?(?:cloud)[^a-z]([a-z0-9]{4})'''

[[rules]]
id = "curl-auth-user"
regex = '''curl .*'''
"""


def test_rules_whose_secrets_have_a_form_of_their_own_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("tomllib", reason="Python 3.11")
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "LICENSE").write_text("MIT")
    monkeypatch.setattr(sys, "argv", [str(TOOL), str(tmp_path / "rules.toml"), str(tmp_path / "LICENSE"), "v1"])
    tool = runpy.run_path(str(TOOL))
    monkeypatch.setitem(tool["main"].__globals__, "RESULT", tmp_path / "result.json")
    tool["main"]()
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["licence"] == "MIT" and [*written["rules"]] == ["own-form"]
    (words, pattern) = written["rules"]["own-form"]
    assert words == ["abc_"]
    assert [bool(re.search(pattern, text)) for text in ("x=abc_1B2d<", "ABC_1B2d", "abc_1B2de")] == [True, False, False]
