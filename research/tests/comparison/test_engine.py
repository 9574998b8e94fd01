"""The comparison's engine on the quick protocol, with real worker processes whose runs train nothing."""

import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from granite_scu.config.errors import UserError
from research.comparison import engine
from research.comparison.engine import Shard
from research.comparison.evidence import Evidence, Spec
from research.comparison.plan import Plan
from research.comparison.protocol import QUICK
from research.run_store import write_record

RUNS = 17
"""Of the quick protocol, the base model's among them; PI at the chosen setpoint is one of those it is chosen from."""


def nothing() -> None:
    """Before a worker's first run."""


def note(spec: Spec, evidence: Path, scratch: Path) -> dict:
    """Writes the record of a run that failed, and counts how often it was begun."""
    with (evidence.parent / "begun").open("a") as begun:
        begun.write(f"{spec.key}\n")
    scored = {"validation": {"final": 6.0}, "test": {"tokens": [1], "final": [6.0]}, "training": {"final": 6.0}}
    of_base = scored if spec.task.steps == 0 else {}
    names = {"key": spec.key, "task": spec.task.name, "arm": spec.arm, "seed": spec.seed, "settings": spec.settings}
    record = {**names, **of_base, "failed": "nothing was trained", "wall_time_s": 0.0}
    write_record(evidence / spec.file, record)
    return record


def die_once(spec: Spec, evidence: Path, scratch: Path) -> dict:
    """Kills its process, as the system does when memory runs out, in the second run that is begun."""
    note_of_death = evidence.parent / "died"
    if (evidence.parent / "begun").is_file() and not note_of_death.exists():
        note_of_death.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return note(spec, evidence, scratch)


def die(spec: Spec, evidence: Path, scratch: Path) -> dict:
    """Kills its process in every run of one arm."""
    if spec.arm == "pi":
        os.kill(os.getpid(), signal.SIGKILL)
    return note(spec, evidence, scratch)


def carry_out(folder: Path, run, shard: Shard = Shard(), jobs: int = 2) -> tuple[int, int, dict[str, str]]:  # noqa: B008
    """How many runs it has finished, how many it waits for, and what went wrong."""
    plan = Plan(QUICK, Evidence(folder / "runs"))
    before = len(plan.evidence.records)
    waiting, errors = engine.carry_out(plan, jobs, Console(quiet=True), nothing, shard=shard, run=run)
    return len(plan.evidence.records) - before, waiting, errors


def begun(folder: Path) -> list[str]:
    return (folder / "begun").read_text().split()


def test_every_run_is_done_once_and_none_again(tmp_path):
    assert carry_out(tmp_path, note) == (RUNS, 0, {})
    assert len(begun(tmp_path)) == len(set(begun(tmp_path))) == RUNS
    assert carry_out(tmp_path, note) == (0, 0, {})


def test_a_worker_that_is_killed_loses_no_run(tmp_path):
    assert carry_out(tmp_path, die_once) == (RUNS, 0, {})
    assert (tmp_path / "died").exists()


def test_a_run_that_kills_its_worker_is_named_and_the_others_are_done(tmp_path):
    done, _, errors = carry_out(tmp_path, die)
    assert errors and all("was killed twice" in error for error in errors.values())
    assert all(name.startswith("pi-") for name in errors)
    assert done + len(errors) <= RUNS and done > 0


def test_shards_do_every_run_between_them_and_none_twice(tmp_path):
    shards = [Shard(index, 3) for index in (1, 2, 3)]
    done, waiting, _ = carry_out(tmp_path, note, shards[0])
    assert 0 < done < RUNS and waiting
    for shard in [*shards, *shards]:  # what waits for another shard is done in a later round
        _, waiting, _ = carry_out(tmp_path, note, shard)
    assert waiting == 0
    assert len(begun(tmp_path)) == len(set(begun(tmp_path))) == RUNS


@pytest.mark.parametrize("text", ["3", "0/3", "4/3", "1/0", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(UserError, match="--shard"):
        Shard.parse(text)
