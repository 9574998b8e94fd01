"""What benchmarks over a grid of cells share: a finished cell is a line of a file, and is not run again."""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError

ROOT = Path(__file__).parents[1]
REAL = "smollm2"
BASES = {name: ROOT / "research" / "evidence" / "bases" / name for name in ("tiny-prose-dense", "tiny-prose-hybrid")}
"""Those that are neither embedded nor fetched."""

C = TypeVar("C")
Line = dict[str, Any]


def build_parser(description: str, results: Path) -> Parser:
    """The flags that such a benchmark has."""
    parser = Parser(description=description.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="the folder of SmolLM2-135M-Instruct; the default is where "
                        "scripts/fetch_smollm2.py puts it")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="only cells whose names have all of "
                        "these words, as in --list")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=60.0, help="start no cell after so many minutes")
    parser.add_argument("--results", type=Path, default=results, help="the finished runs: read, and added to")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are finished")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the finished runs")
    parser.add_debug()
    return parser


def chosen(cells: Iterable[C], words: list[str]) -> list[C]:
    """The cells whose names have all of these words. Raises UserError where there are none."""
    found = [cell for cell in cells if all(each in str(cell) for each in words)]
    if not found:
        raise UserError(f"--only {' '.join(words)}: no cell has these words; see --list")
    return found


def read(path: Path, cell_of: Callable[[Line], C], wanted: Callable[[Line], bool] = bool) -> dict[C, Line]:
    """The finished runs by their cells, of all or of the wanted lines; none where there is no file."""
    return {cell_of(line): line for line in map(json.loads, lines_of(path)) if wanted(line)}


def lines_of(path: Path) -> list[str]:
    """The whole lines of a file; others, which a full disk or a kill has cut, are passed over with a warning. None
    where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    whole = [line.endswith("\n") and _is_json(line) for line in lines]
    for number in (number for number, is_whole in enumerate(whole, start=1) if not is_whole):
        warnings.warn(f"{path}, line {number}: is cut, and passed over", stacklevel=2)
    return [line for line, is_whole in zip(lines, whole, strict=True) if is_whole]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def append(path: Path, line: Line) -> None:
    """Add a line to a file. Raises UserError where not all of it can be written."""
    with path.open("a+b", buffering=0) as file:  # one write, for others may add lines at the same time
        if file.tell():
            file.seek(-1, os.SEEK_END)
        cut = file.read(1) not in (b"", b"\n")  # by a run that was killed: what is added must not be glued to it
        text = b"\n" * cut + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if (written := file.write(text)) != len(text):
            raise UserError(f"--results {path}: took {written} of {len(text)} bytes; is the disk full?")


def finished_lines(cells: Iterable[C], finished: dict[C, Line], results: Path) -> list[Line]:
    """The lines of these cells. Raises UserError where there are none."""
    lines = [finished[cell] for cell in cells if cell in finished]
    if not lines:
        raise UserError(f"--results {results}: has no finished run of these cells")
    return lines


def show(cells: Iterable[C], finished: dict[C, Line], console: Console) -> None:
    """Print the cells and whether they are finished."""
    for cell in cells:
        console.print(f"{'finished' if cell in finished else 'to do   '}  {cell}", highlight=False)


def run_each(
    cells: Iterable[Any], base_of: Callable[[Any], str], run: Callable[[Any, str], Line], options: argparse.Namespace,
    console: Console,
) -> None:  # fmt: skip
    """Run the cells one by one while there is time, and add a line of each to the results.

    Args:
        cells: dataclasses.
        base_of: a cell's base.
        run: a cell and the name of its base, as ``--model`` takes it -> what its line has beside the cell's fields.
        options: the flags.
        console: for the lines.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    from fetch_smollm2 import default_folder

    started = time.monotonic()
    smollm2 = Path(options.model) if options.model else default_folder(gguf_only=False)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if time.monotonic() - started > 60 * options.minutes:
            return
        base = base_of(cell)
        if base == REAL and not smollm2.is_dir():
            raise UserError(f"--model {smollm2}: no such folder; python scripts/fetch_smollm2.py makes it")
        console.print(str(cell), highlight=False)
        line = asdict(cell) | run(cell, str(smollm2 if base == REAL else BASES.get(base, base)))
        append(options.results, line)
        console.print(f"    {line}", highlight=False)
