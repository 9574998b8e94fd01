"""Attempts to break a command: each in a child of one process that has imported everything, with bounds on time and
memory; and the rule that every one of them must keep."""

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 10
"""Of processor time that a command may take, whatever it is given."""
WALL_SECONDS = 120
"""After which one is ended that waits: other processes may have the cores."""
MEGABYTES = 2000
"""That a command may have beyond what its imports take."""
USUAL = 0o022
"""The umask of an attempt that names none."""
MARKER = "hf_hostilemarker5f1e"
"""A secret of the environment, which nobody may tell."""


@dataclass(frozen=True)
class Attempt:
    """What became of a command.

    Attributes:
        argv: of the command.
        code: exit code; that of a signal is negative.
        out: what it printed, without the middle of what is long.
        err: as ``out``, on stderr.
        seconds: of processor time.
        megabytes: at its largest, imports included.
        changed: files that are other than before outside of the folder that it may write.
        leaks: files that it wrote and that hold the secret of the environment.
        environment: what the command had that the others have not: variables, and ``UMASK``.
        modes: files of a run that it wrote and whose mode is not that of the umask.
    """

    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    megabytes: float
    changed: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()


def broken(attempt: Attempt) -> str | None:
    """The rule: success, or one line that says what is wrong; in bounds, and nothing else changed.

    The exit code is then 2, or 1 where the request was right and the training that it began has failed.
    """
    errors = [line for line in attempt.err.splitlines() if re.match(r"(granite-scu.*: )?error: ", line)]
    if attempt.code in (-signal.SIGKILL, -signal.SIGXCPU) or attempt.seconds > SECONDS:
        return f"took {attempt.seconds:.0f} s of processor time and more"
    if attempt.code < 0:
        return f"died of {signal.Signals(-attempt.code).name}"
    if "Traceback (most recent call last)" in attempt.out + attempt.err:
        return "printed a traceback"
    if MARKER in attempt.out + attempt.err or attempt.leaks:
        return f"told a secret {' '.join(attempt.leaks)}"
    if attempt.code == 0:
        if errors:
            return "printed an error and ended with 0"
    elif attempt.code != 2 and not (attempt.code == 1 and _trains(attempt.argv)):
        return f"ended with {attempt.code}"
    elif any("--debug shows where" in line for line in errors):
        return "ended with an error that nobody had foreseen"
    elif len(errors) != 1 or not attempt.err.rstrip().endswith(errors[0].rstrip()):
        return f"ended with {attempt.code} and not with one line that says why"
    elif len(errors[0]) > 2000:
        return "said why in more than 2,000 characters"
    if attempt.changed:
        return f"changed {', '.join(attempt.changed)}"
    if attempt.modes:
        return f"gave another mode than the umask's to {', '.join(attempt.modes)}"
    return None


def _trains(argv: Sequence[str]) -> bool:
    """Whether a command trains: a run that was started right and diverges, say, is a failed run, whose code is 1."""
    return argv[0] in ("train", "fit") and not {"--dry-run", "--print_config"} & set(argv)


@dataclass(frozen=True)
class Workspace:
    """Folders of an attempt: ``given`` may be read and must not change, ``out`` may be written.

    Attributes:
        root: has both, and is the home and the working folder.
    """

    root: Path

    @property
    def given(self) -> Path:
        return self.root / "given"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def clear(self) -> None:
        """Make both folders empty."""
        for folder in (self.given, self.out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def state(self) -> dict[str, str]:
        """A digest of each file that must not change, by its path; of a link or folder what it is."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if name.split("/")[0] not in ("out", ".cache"):  # where the program keeps its predictions
                is_file = path.is_file() and not path.is_symlink()
                found[name] = hashlib.sha256(_beginning(path)).hexdigest() if is_file else "no file"
        return found

    def leaks(self) -> list[str]:
        """The files that the command has written and that hold the secret."""
        written = (path for path in self.out.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in written if MARKER.encode() in _beginning(path))

    def modes(self, umask: int, before: set[Path]) -> list[str]:
        """The files that the command has written into run folders and whose mode is not that of the umask."""
        written = {path for path in self.out.glob("run*/**/*") if path.is_file()} - before
        odd = (path for path in written if path.stat().st_mode & 0o777 != 0o666 & ~umask)
        return sorted(str(path.relative_to(self.root)) for path in odd)


def _beginning(path: Path) -> bytes:
    """The first gigabyte of a file, which is all of it unless it has no end."""
    with path.open("rb") as file:
        return file.read(1 << 30) if path.stat().st_size < 1 << 30 else file.read(1 << 20)


class Server:
    """A process that has imported the program and forks a child for each attempt."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))},
            "HOME": str(workspace.root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1", "MPLCONFIGDIR": str(workspace.out / "mpl"), "HF_TOKEN": MARKER,
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # a child of large pages is made and ended a quarter faster
            "WANDB_CACHE_DIR": str(workspace.out / "wandb"),  # its own log, where it is installed
        }  # fmt: skip
        workspace.root.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            cwd=workspace.root,
        )  # fmt: skip

    def attempt(self, argv: Sequence[str]) -> Attempt:
        """Run the command in the workspace as it stands.

        Args:
            argv: as after ``env``: variables first, of which an empty one is taken out of the environment.
        """
        environment = tuple(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), argv))
        argv, before = tuple(argv[len(environment) :]), self.workspace.state()
        files = {path for path in self.workspace.out.rglob("*") if path.is_file()}
        assert self._process.stdin and self._process.stdout
        print(json.dumps([environment, argv]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        after = self.workspace.state()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        modes = self.workspace.modes(_umask_of(environment), files)
        more = {"changed": tuple(changed), "leaks": tuple(self.workspace.leaks()), "modes": tuple(modes)}
        return Attempt(**answer | more | {"argv": argv, "environment": environment})

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _umask_of(environment: Sequence[str]) -> int:
    return next((int(word.removeprefix("UMASK="), 8) for word in environment if word.startswith("UMASK=")), USUAL)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server with a workspace of its own in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Workspace(Path(folder) / "home"))
        try:
            yield server
        finally:
            server.close()


def _serve() -> None:
    """Read environments and commands from stdin, a JSON list a line, and answer each with what became of it."""
    # What the commands import late, too; and the small model once, so that its classes are there.
    import granite_scu

    for module in pkgutil.walk_packages(granite_scu.__path__, "granite_scu."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of what is not installed
                importlib.import_module(module.name)
    from granite_scu.cli import main as command
    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.model.loading import load_model_config, load_tokenizer

    load_tokenizer(TINY_MODEL)
    load_model_config(TINY_MODEL)
    gc.collect()
    gc.freeze()  # a child that collected what was made here would copy the pages of all of it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        environment, argv = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                _become(out.fileno(), err.fileno(), environment)
                code = 70
                try:
                    code = command.main(argv)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code, usage = _waited(child)
            found = Attempt((), code, _read(out), _read(err), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
        print(json.dumps(asdict(found)), file=answers, flush=True)


def _become(out: int, err: int, environment: Sequence[str]) -> None:
    """What the child has in place of the server's: its own output, variables and umask, and bounds."""
    os.setpgid(0, 0)
    os.umask(_umask_of(environment))
    for name, _, value in (word.partition("=") for word in environment):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, out), (2, err)):
        os.dup2(file, number)
    data = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + (MEGABYTES << 20),) * 2)
    # Softly a second later: the program takes SIGXCPU for a wish to be stopped.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 1, SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def _waited(child: int) -> tuple[int, resource.struct_rusage]:
    watched = os.pidfd_open(child)
    try:
        if not select.select([watched], [], [], WALL_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    finally:
        os.close(watched)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # whatever it has left behind
    return os.waitstatus_to_exitcode(status), usage


def _read(file) -> str:
    """What was written to a file, without the middle of what is long."""
    file.seek(0)
    text = file.read().decode(errors="backslashreplace")
    return text if len(text) < 200_000 else f"{text[:100_000]}\n...\n{text[-100_000:]}"


if __name__ == "__main__":
    _serve()
