#!/usr/bin/env python3
"""Take the patterns of secrets over from gitleaks: python tools/update_secret_patterns.py gitleaks.toml LICENSE VERSION

Both files are those of https://github.com/gitleaks/gitleaks (config/gitleaks.toml) at the version. Kept are the rules
whose secrets have a form of their own; those that guess by a word nearby would refuse ordinary files. Needs Python
3.11, whose regular expressions the result is checked with.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import tomllib

RESULT = Path(__file__).resolve().parents[1] / "granite_scu" / "export" / "publish" / "secret_patterns.json"

NEARBY = r"[\w.-]{0,50}?"
"""How the rules begin that look for a word before the secret."""

BARE = {
    "curl-auth-header": "a command line",
    "curl-auth-user": "a command line",
    "facebook-access-token": "two numbers with a bar between them",
    "private-key": "needs the key's end, which its beginning may lack",
    "sourcegraph-access-token": "any 40 hexadecimal digits, as a commit's",
    "vault-service-token": "any word after s.",
}
"""Rules left out, and what they would match or miss."""

END = r"""(?:[\x60'"\s;]|\\[nr]|$)"""
"""What a secret ends with in gitleaks, where a file is source code."""


def main() -> None:
    """Write the patterns as Python has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", type=Path)
    parser.add_argument("licence", type=Path)
    parser.add_argument("version")
    options = parser.parse_args()
    rules = tomllib.loads(options.rules.read_text(encoding="utf-8"))["rules"]
    found = {rule["id"]: [rule.get("keywords", []), in_python(rule["regex"])] for rule in rules if has_own_form(rule)}
    for name, (_, pattern) in found.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise SystemExit(f"{name}: {error}: {pattern}") from error
    content = {
        "source": f"https://github.com/gitleaks/gitleaks {options.version}, by tools/update_secret_patterns.py",
        "licence": options.licence.read_text(encoding="utf-8"),
        "rules": found,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} of {len(rules)} rules: {RESULT}")


def has_own_form(rule: dict[str, Any]) -> bool:
    """Whether the secret is known by itself, wherever it stands."""
    return "regex" in rule and "path" not in rule and NEARBY not in rule["regex"][:30] and rule["id"] not in BARE


def in_python(pattern: str) -> str:
    """A pattern of Go, whose flags may begin anywhere, as one of Python.

    >>> in_python(r"a((?i)b[)]c)\\z")
    'a((?i:b[)]c))\\\\Z'
    """
    pattern = pattern.replace(END, r"(?!\w)").replace(r"\z", r"\Z").replace("[[:alnum:]]", "[A-Za-z0-9]")
    written, open_flags, depth = "", [], 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?i\)|.", pattern, re.DOTALL):
        if part == "(?i)" and written:
            written += "(?i:"
            open_flags.append(depth)
            continue
        if part == ")":
            while open_flags and open_flags[-1] == depth:
                written, _ = written + ")", open_flags.pop()
        depth += part.startswith("(") - (part == ")")
        written += part
    return written + ")" * len(open_flags)


if __name__ == "__main__":
    main()
