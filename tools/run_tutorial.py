#!/usr/bin/env python3
"""Run the commands of a tutorial and put what they print into it.

    python tools/run_tutorial.py docs/tutorials/your-data.md

A block that is fenced as ``console`` holds commands, each behind ``$ ``, and under each what it printed. All of a
page run in one new folder, which has ``docs`` and ``scripts`` of this repository, one after the other, through a shell
in which ``granite-scu`` is this installation's.
``--check`` writes nothing, and ends with exit code 1 where a command ends otherwise than it did.

A comment in HTML before a block says what is expected or left out of it: ``<!-- exit 130 -->`` where the last command
ends with another exit code than 0, ``<!-- lines 12 -->`` where only the first and last lines are shown. A last comment
has the checksum of all blocks, by which a test sees that nobody has edited one.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"(?P<asked>(?:<!-- [^\n]* -->\n)*)```console\n(?P<body>.*?)```\n", re.DOTALL)
SEAL = re.compile(r"\n<!-- blocks made by tools/run_tutorial.py: (\w+) -->\n")
COLUMNS = "100"
ROOT = Path(__file__).resolve().parents[1]


def commands(body: str) -> list[str]:
    """Those of a block; lines right behind one that begin with ``> `` continue it. Further down they were printed."""
    found: list[str] = []
    continues = False
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
            continues = True
        elif continues and line.startswith("> "):
            found[-1] += f"\n{line[2:]}"
        else:
            continues = False
    return found


def run(command: str, folder: Path) -> tuple[int, str]:
    """A command's exit code, and what it prints to both outputs."""
    inside = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{inside}:{os.environ['PATH']}", "COLUMNS": COLUMNS, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def shortened(printed: str, lines: int | None) -> str:
    """The output, or its beginning and its end where it has more lines than are wanted."""
    all_lines = [line.rstrip() for line in printed.splitlines()]
    if lines is None or len(all_lines) <= lines:
        return "\n".join(all_lines)
    first = lines - lines // 3
    return "\n".join([*all_lines[:first], "...", *all_lines[len(all_lines) - lines // 3 :]])


def sealed(page: str) -> str:
    """The page with the checksum of its blocks as its last line; as it is without any."""
    page = SEAL.sub("", page)
    if not (blocks := [match[0] for match in BLOCK.finditer(page)]):
        return page
    digest = hashlib.sha256("".join(blocks).encode()).hexdigest()[:16]
    return f"{page}\n<!-- blocks made by tools/run_tutorial.py: {digest} -->\n"


def renewed(page: str, folder: Path) -> tuple[str, list[str]]:
    """The page with what its commands print, and a line for each that ended otherwise than expected."""
    failures: list[str] = []

    def block(match: re.Match[str]) -> str:
        asked = match["asked"]
        expected = re.search(r"<!-- exit (\d+) -->", asked)
        lines = re.search(r"<!-- lines (\d+) -->", asked)
        found = commands(match["body"])
        text = ""
        for number, command in enumerate(found):
            print(f"$ {command}", file=sys.stderr)
            code, printed = run(command, folder)
            wanted = int(expected[1]) if expected and number == len(found) - 1 else 0
            if code != wanted:
                failures.append(f"$ {command}\nended with exit code {code} and not {wanted}:\n{printed}")
            shown = command.replace("\n", "\n> ")
            output = shortened(printed.replace(str(folder), "."), int(lines[1]) if lines else None)
            text += f"$ {shown}\n{output}\n" if output else f"$ {shown}\n"
        return f"{asked}```console\n{text}```\n"

    return sealed(BLOCK.sub(block, page)), failures


def main() -> int:
    """Run the pages that are named; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", metavar="PAGE", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a command fails")
    options = parser.parse_args()
    failed = False
    for path in options.pages:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("docs", "scripts"):
                Path(folder, name).symlink_to(ROOT / name)
            page, failures = renewed(path.read_text(encoding="utf-8"), Path(folder))
        for failure in failures:
            print(f"error: {path}: {failure}", file=sys.stderr)
        failed |= bool(failures)
        if not options.check and not failures:
            path.write_text(page, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
