#!/usr/bin/env python3
"""What a run survives: kills and power cuts at random moments, damaged checkpoints, and signals to two processes.

    python benchmarks/faults.py --quick              a few minutes on two cores
    python benchmarks/faults.py --json > out.json    100 kills, 100 corruptions, 20 stops

Kills: runs of the embedded model are killed with SIGKILL between steps, inside a save or another writing, and in a
validation, and started again by the same command until they end; in a quarter of them the power fails too, so that
what was not synced is lost, or its name is there and its contents are not. A divergence is an end that differs from
that of the run that was let alone, in any byte of the adapters, in any record of the history or in any score.
``most_steps_lost`` is the largest number of optimizer steps that a kill took back. Corruptions: a bit of a checkpoint
is flipped, or a file of it cut short; detected means that going on from it is refused. Stops: SIGTERM to one or both of
two processes that train together; clean means that both exit with 143 and the step they were in is saved.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import killing, power
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.storage import checkpoint, checkpoint_list
from granite_scu.storage.run_folder import RunFolder

SAVE_STEPS = 5
FLAGS = (
    *("--test-run", "--precision", "fp32", "--block-size", 64, "--eval-iters", 4, "--max-steps", 24),
    *("--save-steps", SAVE_STEPS, "--eval-steps", 4, "--control-every", 1, "--lora-dropout", 0.1),
    *("--gradient-accumulation-steps", 2),
)
ALONE = (*FLAGS, "--batch-size", 2, "--num-workers", 1)
TOGETHER = (*FLAGS, "--batch-size", 1)


@dataclass
class Bench:
    """What the parts share: a folder to work in, a text, random numbers, and how progress is told."""

    place: Path
    rng: random.Random
    progress: Progress

    def __post_init__(self) -> None:
        self.text = killing.texts(self.place / "text")

    def line(self, flags: tuple, folder: Path) -> list:
        """The script's arguments: begin, or go on."""
        return [*flags, "--data-dir", self.text, "--output-dir", folder, "--resume-from-checkpoint", "auto"]


def survive_kills(bench: Bench, count: int) -> dict:
    """Kill until there were ``count`` kills, and compare every end that was reached."""
    whole = bench.place / "whole"
    _expect(killing.run(bench.line(ALONE, whole), whole.with_suffix(".log")) == 0, "the run that is let alone failed")
    expected, kills, ends, divergences, lost = killing.outcome(whole), 0, 0, 0, 0
    task = bench.progress.add_task("kills", total=count)
    while kills < count:
        folder = bench.place / f"killed-{ends}" / "run"
        folder.parent.mkdir()
        while True:
            strike = _moment(bench.rng, folder) if kills < count else lambda: None
            code = killing.run(bench.line(ALONE, folder), folder.with_suffix(".log"), strike)
            if code != -signal.SIGKILL:
                break
            kills += 1
            lost = max(lost, _steps_lost(folder))
            bench.progress.advance(task)
        _expect(code == 0, f"a resumed run failed: {folder.with_suffix('.log').read_text()[-2000:]}")
        ends += 1
        divergences += killing.outcome(folder) != expected
        shutil.rmtree(folder.parent)
    return {"count": kills, "runs": ends, "divergences": divergences, "most_steps_lost": lost, "save_steps": SAVE_STEPS}


def _moment(rng: random.Random, folder: Path):
    kind = rng.randrange(4)
    if kind == 0:
        return killing.at_call("on_before_optimizer_step", rng.randint(2, 12))
    if kind == 1:
        return killing.at_call("validation_step", rng.randint(1, 8))
    count = rng.randint(1, 90)
    if kind == 2:
        return killing.at_change(folder, count)
    return power.failing(folder, functools.partial(killing.at_change, folder, count), rng.random() < 0.5)


def _steps_lost(folder: Path) -> int:
    """Steps that the history knows of and the newest whole checkpoint does not."""
    records = RunFolder(folder).read_history() if folder.is_dir() else []
    newest = checkpoint_list.find(checkpoint_list.AUTO, folder) if folder.is_dir() else None
    reached = records[-1]["step"] if records else 0
    return max(0, reached - (checkpoint.load_state(newest)["global_step"] if newest else 0))


def detect_corruptions(bench: Bench, count: int) -> dict:
    """Damage a checkpoint ``count`` times, each time in one place, and try to go on from it."""
    original = RunFolder(bench.place / "whole").checkpoints()[-1]
    names = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    task, detected = bench.progress.add_task("corruptions", total=count), 0
    for number in range(count):
        damaged = bench.place / "damaged"
        shutil.copytree(original, damaged)
        _damage(damaged / bench.rng.choice(names), bench.rng, cut=number % 4 == 0)
        try:
            checkpoint_list.find(str(damaged), bench.place)
        except UserError:
            detected += 1
        shutil.rmtree(damaged)
        bench.progress.advance(task)
    return {"count": count, "detected": detected}


def _damage(file: Path, rng: random.Random, cut: bool) -> None:
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def stop_two(bench: Bench, count: int) -> dict:
    """Send SIGTERM to processes that train together, ``count`` times."""
    task, clean = bench.progress.add_task("stops of two processes", total=count), 0
    for number in range(count):
        folder = bench.place / f"stopped-{number}"
        logs = [bench.place / f"stopped-{number}-{rank}.log" for rank in range(2)]
        children = killing.fork_two(bench.line(TOGETHER, folder), logs)
        ticks = bench.rng.randint(1, 15)
        killing.until(lambda folder=folder, ticks=ticks: killing.ticks(folder) >= ticks)
        for rank in bench.rng.choice(([0], [1], [0, 1])):
            os.kill(children[rank], signal.SIGTERM)
        codes = [killing.wait(child) for child in children]
        reached = RunFolder(folder).read_history()[-1]["step"]
        clean += codes == [143, 143] and _steps_lost(folder) == 0 and reached >= ticks
        shutil.rmtree(folder)
        bench.progress.advance(task)
    return {"count": count, "clean": clean}


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise RuntimeError(otherwise)


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 kills, 40 corruptions, 2 stops")
    parser.add_argument("--kills", type=int, help="(default: 100)")
    parser.add_argument("--corruptions", type=int, help="(default: 100)")
    parser.add_argument("--stops", type=int, help="(default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_debug()
    options = parser.parse_args()
    usual = (
        {"kills": 6, "corruptions": 40, "stops": 2}
        if options.quick
        else {"kills": 100, "corruptions": 100, "stops": 20}
    )
    counts = {name: usual[name] if getattr(options, name) is None else getattr(options, name) for name in usual}
    if min(counts.values()) < 0:
        raise UserError("--kills, --corruptions and --stops: must not be negative")
    with tempfile.TemporaryDirectory() as place, Progress(console=Console(stderr=True), transient=True) as progress:
        bench = Bench(Path(place), random.Random(options.seed), progress)
        found = {
            "kills": survive_kills(bench, counts["kills"]),
            "corruptions": detect_corruptions(bench, counts["corruptions"]),
            "stops": stop_two(bench, counts["stops"]),
        }
    kills, corruptions, stops = found["kills"], found["corruptions"], found["stops"]
    found["goal_met"] = (
        kills["divergences"] == 0
        and kills["most_steps_lost"] <= SAVE_STEPS
        and corruptions["detected"] == corruptions["count"]
        and stops["clean"] == stops["count"]
    )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{kills['count']} kills of {kills['runs']} runs: {kills['divergences']} ended otherwise; at most "
              f"{kills['most_steps_lost']} steps lost (a checkpoint every {SAVE_STEPS})")  # fmt: skip
        print(f"{corruptions['count']} corruptions: {corruptions['detected']} detected")
        print(f"{stops['count']} signals to two processes: {stops['clean']} clean stops")
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
