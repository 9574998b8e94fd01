"""What the legs of ``scripts/gpu_check.py`` have in common: what they find, and how they start programs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from granite_scu.config.errors import RunFailed
from granite_scu.storage import provenance
from granite_scu.storage.run_folder import LOG_FILES

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "train_granite_cuda.py"
VISIBLE = "CUDA_VISIBLE_DEVICES"
WEIGHTS, SUMMARY, MARK = "adapter_model.safetensors", "scu_metrics.json", "gpu_check_command.json"
_LONGEST = 300  # characters of what a program said last
_TAIL = 3000  # of its log, where a leg has failed


class Skipped(Exception):
    """The leg cannot be taken on this machine; the message says why."""


class OutOfTime(Exception):
    """The whole check has used up its time."""


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        title: its heading.
        columns: heading and format of each field shown, as ``{"seconds": "time, s|.1f"}``.
        rows: the fields, also those that are not shown.
    """

    title: str
    columns: dict[str, str]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """What a leg found.

    Attributes:
        said: a line on what it found.
        tables: the numbers.
        faults: what is not as it should be, a line each; with any, the leg has failed.
        left: what time did not allow; with any, the leg is taken again when the check is.
    """

    said: str
    tables: tuple[Table, ...] = ()
    faults: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Call(NamedTuple):
    """A program that has ended.

    Attributes:
        code: its exit code.
        out: what it wrote to stdout.
        err: what it wrote to stderr.
    """

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line that it wrote, to stderr by preference."""
        lines = (self.err.strip() or self.out.strip()).splitlines() or ["nothing"]
        return lines[-1].strip()[:_LONGEST]

    def require(self, name: str) -> "Call":
        """Itself. Raises RunFailed where the program did not end with 0."""
        if self.code:
            raise RunFailed(f"{name} ended with code {self.code}: {self.last_words}")
        return self


@dataclass
class Work:
    """Where a leg works, and with what.

    Attributes:
        folder: of its own; logs and run folders stay there.
        device: "cpu" or "cuda".
        steps: optimizer steps of a short run.
        machine: what ``granite-scu hardware --json`` says.
        deadline: when the leg has to have ended, on ``time.monotonic``'s clock, in seconds.
        end: the same of the whole check.
        jobs: short runs at a time, where their times are not compared.
        real: the folder of a real model, or where it would be.
        results: the folder for what is to be kept of a leg besides what it found.
        tell: keeps what a leg has found so far.
    """

    folder: Path
    device: str
    steps: int
    machine: dict[str, Any] = field(default_factory=dict)
    deadline: float = float("inf")
    end: float = float("inf")
    jobs: int = 1
    real: Path = Path("none")
    results: Path = Path()
    tell: Callable[[Finding], None] = lambda finding: None

    @property
    def seconds_left(self) -> float:
        """That the leg may still take."""
        return max(0.0, min(self.deadline, self.end) - time.monotonic())

    @property
    def precision(self) -> str:
        """What the device trains in by itself: bf16, fp16 or fp32."""
        names = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
        return names.get(self.machine["recommended"]["precision"], "fp32")

    def call(self, name: str, line: Sequence[Any], cards: int = 1) -> Call:
        """Run a command from the root of the checkout; its output stays in ``NAME.out`` and ``NAME.log``.

        Args:
            name: of the files.
            line: program and arguments.
            cards: how many of the visible GPUs it sees; none where the check is on a CPU.

        Raises:
            RunFailed: it took longer than the leg may.
            OutOfTime: it was stopped because the whole check is out of time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / f"{name}.{kind}" for kind in ("out", "log")]
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // self.jobs))} if self.jobs > 1 else {}
        with paths[0].open("w") as out, paths[1].open("w") as err:
            process = subprocess.Popen(
                list(map(str, line)),
                cwd=ROOT,
                env=_environment(cards if self.device == "cuda" else 0) | threads,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            try:
                code = process.wait(self.seconds_left)
            except subprocess.TimeoutExpired:
                if time.monotonic() >= self.end:
                    raise OutOfTime(f"stopped in {name}: the time was used up") from None
                raise RunFailed(f"{name} was stopped: the leg took several times what it should") from None
            finally:
                end_with_children(process)
        return Call(code, *(path.read_text(errors="replace") for path in paths))

    def python(self, name: str, *arguments: Any, cards: int = 1) -> Call:
        """The same with this Python."""
        return self.call(name, [sys.executable, *arguments], cards)

    def train(self, name: str, *flags: Any, device: str | None = None, processes: int = 1) -> dict[str, Any]:
        """The summary of a short run of the embedded model in the folder ``name``.

        A run of the same command that ended there before, at the same commit, is not made again.

        Raises:
            RunFailed: it did not end well.
        """
        folder, cards = self.folder / name, processes
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] * (processes > 1)
        given = [
            *("--test-run", "--accelerator", device or self.device, "--output-dir", folder, "--overwrite"),
            *("--max-steps", self.steps, "--eval-steps", self.steps, "--save-steps", self.steps, "--eval-iters", 2),
            *flags,
            *(["--multi-gpu"] * (processes > 1)),
        ]
        line = list(map(str, [*launcher, SCRIPT, *given]))
        mark = json.dumps({"command": line, "commit": provenance.git_revision()})
        if not self._is_done(folder, mark):
            shutil.rmtree(folder, ignore_errors=True)
            self.python(name, *line, cards=cards).require(name)
            (folder / MARK).write_text(mark)
        return json.loads((folder / SUMMARY).read_text())

    @staticmethod
    def _is_done(folder: Path, mark: str) -> bool:
        path = folder / MARK
        return path.is_file() and path.read_text() == mark

    def kernels(self, name: str) -> str:
        """What the Mamba-2 layers of a run ran in, as its log says."""
        log = (self.folder / name / LOG_FILES[self.device]).read_text(encoding="utf-8")
        return log.rpartition("Mamba-2 layers run in ")[2].partition("\n")[0]

    def logs(self) -> dict[str, str]:
        """The end of what each program of the leg wrote to stderr."""
        return {path.stem: path.read_text(errors="replace")[-_TAIL:] for path in sorted(self.folder.glob("*.log"))}

    def forget(self, name: str) -> None:
        """Have the run ``name`` made again when the leg is taken again."""
        (self.folder / name / MARK).unlink(missing_ok=True)

    def adapter(self, name: str) -> bytes:
        """The adapter of a run, as it lies on the disk."""
        return (self.folder / name / WEIGHTS).read_bytes()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_path() -> str:
    """This process's PYTHONPATH with our package in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _environment(cards: int) -> dict[str, str]:
    """This process's, with our package in front, and no more than so many of the GPUs that may be seen."""
    numbers = ",".join(map(str, range(cards)))
    visible = ",".join(os.environ.get(VISIBLE, numbers).split(",")[:cards])
    return os.environ | {"PYTHONPATH": python_path(), VISIBLE: visible}


def end_with_children(process: subprocess.Popen) -> None:
    """End a program that still runs, and the processes that it started; of one that has ended, nothing is left."""
    if process.poll() is not None:
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
