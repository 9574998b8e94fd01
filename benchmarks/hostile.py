"""How often the commands keep the rule of tests/hostile under inputs that are careless or meant to harm.

    python benchmarks/hostile.py --attempts 1000 --json hostile.json

Each attempt is the real command in a process of its own, in a folder of its own. The table says for each kind of input
how many attempts succeeded, how many were refused in one line, and how many broke the rule, with one example each.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hostile"))

from attempts import Attempt, Server, broken, serving
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from inputs import KINDS, OF_A_RUN, make_run, right_result
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from granite_scu.config.progress import Heartbeat
from granite_scu.hardware import detection


def attempts_of(kind: str, count: int, chosen: int, server: Server, run: Path, progress: Any) -> dict[str, Any]:
    """Counts of what became of so many attempts, and an example of each way in which the rule was broken."""
    codes: Counter[int] = Counter()
    wrongs: Counter[str] = Counter()
    examples: dict[str, dict[str, Any]] = {}
    seconds: list[float] = []
    largest = 0.0
    strategy = (KINDS | OF_A_RUN)[kind](server.workspace, *([run] if kind in OF_A_RUN else []))

    @seed(chosen)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def attempt(data: st.DataObject) -> None:
        nonlocal largest
        server.workspace.clear()
        found: Attempt = server.attempt(data.draw(strategy))
        codes[found.code] += 1
        seconds.append(found.seconds)
        largest = max(largest, found.megabytes)
        if wrong := broken(found) or right_result(found):
            wrongs[wrong] += 1
            examples.setdefault(wrong, {"argv": (*found.environment, *found.argv), "err": found.err[-1500:]})
        progress()

    attempt()
    return {
        "attempts": sum(codes.values()),
        "succeeded": codes[0],
        "refused": codes[2],
        "broke the rule": sum(wrongs.values()),
        "median seconds": round(sorted(seconds)[len(seconds) // 2], 3),
        "most seconds": round(max(seconds), 2),
        "most megabytes": round(largest),
        "ways": dict(wrongs),
        "examples": examples,
    }


def _progress(kind: str, total: int, bar: Progress) -> Callable[[], None]:
    """What is called after each attempt: moves the bar, or writes a line each minute where there is no terminal."""
    task, heartbeat, done = bar.add_task(kind, total=total), Heartbeat(total), itertools.count(1)

    def step() -> None:
        bar.advance(task)
        number = next(done)
        if not bar.console.is_terminal and (heartbeat.is_due() or number == total):
            bar.console.print(f"{kind}: {number:,} of {total:,} {heartbeat.left(number)}", highlight=False)
            heartbeat.beat()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1000, help="of each kind (default: 1000)")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *OF_A_RUN], default=[*KINDS, *OF_A_RUN])
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the inputs (default: another each time)"
    )
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    console, found, began, machine = Console(), {}, time.monotonic(), detection.detect("cpu").name
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, serving() as server, Progress(*columns, console=console) as bar:
        run = make_run(Path(folder) / "run")
        for kind in options.kinds:
            step = _progress(kind, options.attempts, bar)
            found[kind] = attempts_of(kind, options.attempts, options.seed, server, run, step)
            facts = {
                "machine": machine,
                "seed": options.seed,
                "seconds": round(time.monotonic() - began),
                "kinds": found,
            }
            if options.json:  # after each kind: all of them may take a day
                options.json.write_text(json.dumps(facts, indent=2))
    table = Table(
        "kind of input", "attempts", "succeeded", "refused", "broke the rule", "median s", "most s", "most MB"
    )
    for kind, counts in found.items():
        table.add_row(kind, *(f"{value:,}" for name, value in counts.items() if name not in ("ways", "examples")))
    console.print(table)
    for kind, counts in found.items():
        for way, number in counts["ways"].items():
            example = counts["examples"][way]
            console.print(
                f"{kind}: {number} times: {way}\n  {str(example['argv'])[:300]}\n  {example['err'][-600:]}",
                markup=False,
            )
    return int(any(counts["ways"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
