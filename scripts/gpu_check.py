#!/usr/bin/env python3
"""Check on an NVIDIA GPU what no test can without one, and measure: half an hour at most, one page at the end.

    make gpu-check                                         all legs, on one card
    make gpu-check ARGS="--only parity determinism"        some of them
    python scripts/gpu_check.py --minutes 9 --scratch DIR  as much as fits, the most wanted first
    python scripts/gpu_check.py --list
    python scripts/gpu_check.py --device cpu --steps 4 --minutes 60    as far as it goes without a GPU

The check is made of legs, those first that are worth most. The result of each is written to ``gpu_check.json`` as soon
as it ends, of some while they go on, and ``gpu_check.md`` has all of them as a page. Started again with the same
--output-dir it takes the legs that have not passed yet; --again takes one that has. A leg that fails does not end the
others. Exit code 1 if any failed. What a machine without a network lacks is carried by ``scripts/gpu_pack.py``.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

sys.path.insert(0, str(ROOT / "scripts"))

from fetch_smollm2 import default_folder

from benchmarks import gpu_page
from benchmarks.gpu_legs import LEGS
from benchmarks.gpu_work import Finding, OutOfTime, Skipped, Work, cores, python_path
from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import make_console
from granite_scu.config.errors import FAILED, RunFailed, UserError
from granite_scu.storage import provenance
from granite_scu.storage.atomic import replacing
from granite_scu.storage.run_folder import require_writable

JSON, PAGE = "gpu_check.json", "gpu_check.md"
PASSED, FAULTY, SKIPPED, PARTLY, NOT_RUN = "passed", "failed", "skipped", "in part", "not run"
PATIENCE = 3
"""Times its guessed minutes that a leg may take before it counts as hanging."""

HOW_TO_CONTINUE = "start the same command again; the legs that have ended are kept"


def build_parser() -> Parser:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gpu-check"), help="(default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="for logs and runs (default: the output folder)")
    parser.add_argument("--real", type=Path, default=default_folder(gguf_only=False), metavar="DIR",
                        help="SmolLM2-135M-Instruct, also as GGUF (default: %(default)s)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="LEG", help="these legs (default: all)")
    parser.add_argument("--again", nargs="+", default=[], metavar="LEG", help="these legs, also where they have passed")
    parser.add_argument("--list", action="store_true", help="print the legs, and take none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="that the check may take (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="runs at a time that are not timed (default: one for four cores)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a short run (default: %(default)s)")
    parser.add_debug()
    return parser


def parse(argv: list[str] | None) -> Namespace:
    """The flags given; ``legs`` are then the names of those to be taken, in their order."""
    options = build_parser().parse_args(argv)
    for flag, names in (("--only", options.only), ("--again", options.again)):
        for name in names:
            if name not in LEGS:
                raise UserError(f"{flag} {name}: no such leg; choose {', '.join(LEGS)}")
    if options.steps < 2:
        raise UserError(f"--steps {options.steps}: must be at least 2, for a run to have a middle")
    options.jobs = max(1, cores() // 4) if options.jobs is None else options.jobs
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    if not options.minutes > 0:  # nor NaN
        raise UserError(f"--minutes {options.minutes:g}: must be positive")
    options.legs = [name for name in LEGS if not options.only or name in (*options.only, *options.again)]
    return options


def look_at_machine(device: str) -> dict[str, Any]:
    """What ``granite-scu hardware --json`` says, in its own process: this one takes no memory of a GPU.

    Raises:
        UserError: there is no GPU, and one was asked for.
        RunFailed: the command fails.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    line = [sys.executable, "-m", "granite_scu", "hardware", "--json"]
    environment = os.environ | {"PYTHONPATH": python_path()} | hidden
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RunFailed(f"{' '.join(line[1:])} ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    machine = json.loads(done.stdout)
    if device == "cuda" and not machine["info"]["cuda_available"]:
        raise UserError(f"there is no CUDA device ({machine['info']['problem']}); --device cpu goes as far as it can")
    return machine


class Record:
    """What has been found so far, in a folder.

    Args:
        folder: of ``gpu_check.json`` and ``gpu_check.md``.
        device: "cpu" or "cuda".
        machine: see ``look_at_machine``.

    Raises:
        UserError: the folder has what was found on another device.
    """

    def __init__(self, folder: Path, device: str, machine: dict[str, Any]) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {"legs": {}}
        path = folder / JSON
        if path.exists():
            self.found = _read(path)
            try:
                before = self.found["device"], self.found["machine"]["info"]["gpu_name"]
            except (KeyError, TypeError) as error:
                raise UserError(f"{path} was not written by this check; name another --output-dir") from error
            if before != (device, machine["info"]["gpu_name"]):
                raise UserError(f"{path} is of another device ({before[1] or before[0]}); name another --output-dir")
        self.found |= {"device": device, "machine": machine, "versions": provenance.versions()}
        self.found["packages"] = sorted({f"{d.name}=={d.version}" for d in distributions()}, key=str.lower)

    def has_passed(self, name: str) -> bool:
        return self.status(name) == PASSED

    def status(self, name: str) -> str:
        return self.found["legs"].get(name, {"status": NOT_RUN})["status"]

    def put(
        self, name: str, status: str, finding: Finding, seconds: float | None, logs: dict[str, str] | None = None
    ) -> None:
        """Write what a leg found to the disk. Only a leg that was taken replaces what is known of it."""
        if status == NOT_RUN and self.status(name) != NOT_RUN:
            return
        self.found["legs"][name] = {
            "status": status,
            "said": finding.said,
            "faults": [*finding.faults, *finding.left],
            "seconds": seconds,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": provenance.git_revision() or "not from a checkout",
            "tables": [table._asdict() for table in finding.tables],
            "logs": logs or {},
        }
        self.write()

    def write(self) -> None:
        about = {name: leg.about for name, leg in LEGS.items()}
        for name, text in ((JSON, json.dumps(self.found, indent=1) + "\n"), (PAGE, gpu_page.page(self.found, about))):
            with replacing(self.folder / name) as path:
                path.write_text(text, encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not what a check leaves ({error}); delete it or name another --output-dir"
        ) from error


def take(name: str, work: Work) -> tuple[str, Finding]:
    """Do a leg; returns its status and what it found. Whatever happens in it stays in it."""
    try:
        finding = LEGS[name].run(work)
    except Skipped as reason:
        return SKIPPED, Finding(str(reason))
    except OutOfTime as reason:
        return NOT_RUN, Finding(str(reason))
    except Exception as error:  # the boundary of a leg: the next ones are independent of it
        said = str(error) if isinstance(error, RunFailed | UserError) else f"{type(error).__name__}: {error}"
        return FAULTY, Finding(said, faults=(said,))
    return (FAULTY if finding.faults else PARTLY if finding.left else PASSED), finding


def check(options: Namespace) -> int:
    """Take the legs; 1 if any of them has failed, 0 else."""
    console = make_console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    start, folder = time.monotonic(), options.output_dir.expanduser().absolute()
    scratch = (options.scratch or folder).expanduser().absolute()
    end = start + 60 * options.minutes
    require_writable("--output-dir", folder)
    record = Record(folder, options.device, machine := look_at_machine(options.device))
    say(f"{gpu_page.card(record.found)}; {len(options.legs)} legs, {options.minutes:g} minutes; results in {folder}")
    for number, name in enumerate(options.legs, start=1):
        begun = time.monotonic()
        place = f"[{number}/{len(options.legs)}] {name}"
        if record.has_passed(name) and name not in options.again:
            say(f"{place}: passed before, at commit {record.found['legs'][name]['commit'][:9]}")
            continue
        minutes, left = LEGS[name].minutes, (end - begun) / 60
        if left < minutes:
            why = Finding(f"{max(left, 0):.1f} minutes were left, and it takes about {minutes:g}")
            record.put(name, NOT_RUN, why, None)
            say(f"{place}: not run, {why.said}")
            continue
        if name in options.again:  # its short runs too, which are kept otherwise
            shutil.rmtree(scratch / name, ignore_errors=True)
        say(f"{place}: {LEGS[name].about} ...")
        deadline = end if len(options.legs) == 1 else begun + 60 * PATIENCE * minutes
        work = Work(
            scratch / name, options.device, options.steps, machine, deadline, end, options.jobs,
            options.real, folder, lambda found, name=name: record.put(name, PARTLY, found, None),
        )  # fmt: skip
        status, finding = take(name, work)
        seconds = time.monotonic() - begun
        record.put(name, status, finding, seconds, work.logs() if status in (FAULTY, NOT_RUN) else None)
        elapsed = f"{gpu_page.duration(seconds)}, {gpu_page.duration(time.monotonic() - start)} in all"
        say("\n".join([f"    {status} ({elapsed}): {finding.said}", *(f"    - {fault}" for fault in finding.faults)]))
    record.write()
    say(f"{folder / PAGE}")
    found = {record.status(name) for name in options.legs}
    return FAILED if FAULTY in found or found == {NOT_RUN} else 0


def show() -> int:
    """Print the legs; 0."""
    for name, leg in LEGS.items():
        print(f"{name:<12} {leg.minutes:>4g} min  {leg.about}")
    return 0


def run(argv: list[str] | None) -> int:
    options = parse(argv)
    return show() if options.list else check(options)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return exit_codes.exit_code_of(lambda: run(arguments), "--debug" in arguments, HOW_TO_CONTINUE)


if __name__ == "__main__":
    sys.exit(main())
