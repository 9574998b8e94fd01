"""The comparison's engine on the quick protocol with workers that train nothing: each notes the run and says it failed.

    python untrained.py FOLDER

Its evidence is in ``FOLDER/runs``. ``FOLDER/log`` gets the key of each run that is begun. While there is a file
``FOLDER/hold``, no run ends. A script, since several of it run on one folder, and workers are spawned.
"""

import contextlib
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from granite_scu.experiments.comparison import engine, pool
from granite_scu.experiments.comparison.evidence import Evidence, Spec, write_record
from granite_scu.experiments.comparison.plan import Plan
from granite_scu.experiments.comparison.protocol import QUICK


def work(connection: Connection, evidence: Path) -> None:
    """As the real worker, but for the run."""
    with contextlib.suppress(EOFError):
        while True:
            spec = connection.recv()
            with (evidence.parent / "log").open("a") as log:
                log.write(f"{spec.key}\n")
            while (evidence.parent / "hold").exists():
                time.sleep(0.05)
            write_record(evidence / spec.file, record(spec))
            connection.send(None)


def record(spec: Spec) -> dict:
    scored = {"validation": {"final": 6.0}, "test": {"tokens": [1], "final": [6.0]}, "training": {"final": 6.0}}
    of_base = scored if spec.task.steps == 0 else {}
    names = {"key": spec.key, "task": spec.task.name, "arm": spec.arm, "seed": spec.seed, "settings": spec.settings}
    return {**names, **of_base, "failed": "nothing was trained", "wall_time_s": 0.0}


if __name__ == "__main__":
    pool._work = work
    outcome = engine.carry_out(Plan(QUICK, Evidence(Path(sys.argv[1], "runs"))), 1, Console(quiet=True))
    print(outcome.done)
