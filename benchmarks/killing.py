"""Runs of the training script that are killed, robbed of their disk or stopped, and then resumed.

Each is a fork of one process that has imported everything, so that it takes seconds; it is ended by the real signal or
the real error of the real call, at a place that can be chosen exactly.
"""

import errno
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLOCKED = {"tokens_per_s", "samples_per_s", "mfu", "peak_tflops", "train_time_s", "wall_time_s"}
"""What is measured with a clock, and so differs between any two runs."""

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
"""Python's audit events of calls that change a file system, beside ``open``."""


def fork(arguments: list, log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Start the script in a child; returns its process id.

    Args:
        arguments: the script's.
        log: what the child prints is added to it.
        prepare: called in the child before anything else.
    """
    from granite_scu.cli import train  # noqa: F401 (what the child would have to import itself)
    from granite_scu.cli.main import main

    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setpgid(0, 0)  # a kill takes the loader's processes along
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # whose threads, had the parent any, are not in the child
        # OpenMP would wait for its threads, which a fork has not: one thread, and none that the run takes later.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # the parent's may lead elsewhere, under pytest say
        prepare()
        code = main(["train", *map(str, arguments)])
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_two(arguments: list, logs: list[Path], prepare: Callable[[int], None] = lambda rank: None) -> list[int]:
    """Start two processes of one run on the CPU, as torchrun would; returns their ids.

    Args:
        arguments: the script's.
        logs: what each prints is added to its own.
        prepare: called in each child with its rank before anything else.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def join(rank: int) -> None:
        from lightning.fabric.utilities import rank_zero

        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "here"}  # by which Lightning starts no others
        rank_zero.rank_zero_only.rank = rank  # read from the environment when Lightning was imported
        prepare(rank)

    several = [*arguments, "--multi-gpu", "--accelerator", "cpu"]
    return [fork(several, log, functools.partial(join, rank)) for rank, log in enumerate(logs)]


def wait(child: int) -> int:
    """The child's exit code, negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(arguments: list, log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Carry the script out in a child; returns the exit code."""
    return wait(fork(arguments, log, prepare))


def until(ready: Callable[[], bool], patience: float = 120.0) -> None:
    """Wait for something to be the case."""
    give_up = time.monotonic() + patience
    while not ready():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.002)


def ticks(folder: Path) -> int:
    """Ticks that a run in progress has recorded."""
    path = folder / "scu_history.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


# Where a run may be struck


def die() -> None:
    """End this process as ``kill -9`` does, its children too."""
    os.killpg(0, signal.SIGKILL)


def fail_with(number: int) -> Callable[[], None]:
    """Make the call in progress fail with this error of the system."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def at_call(name: str, count: int, strike: Callable[[], None] = die) -> Callable[[], None]:
    """Strike before the ``count``-th call of a method of the module, such as ``validation_step``."""

    def prepare() -> None:
        from granite_scu.training.module import GraniteModule

        original, calls = getattr(GraniteModule, name), 0

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                strike()
            return original(*args, **kwargs)

        setattr(GraniteModule, name, counted)

    return prepare


def at_change(folder: Path, count: int, strike: Callable[[], None] = die) -> Callable[[], None]:
    """Strike before the ``count``-th call that would change a file or folder below ``folder``."""
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if (event in CHANGES or (event == "open" and _writes(args))) and _within(folder, args[0]):
            seen += 1
            if seen == count:
                strike()

    return lambda: sys.addaudithook(hook)


def _writes(args: tuple) -> bool:
    mode, flags = args[1], args[2]
    return (
        any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
    )


def _within(folder: Path, path: object) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(folder))


FULL, BROKEN, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS


# What is left


def outcome(folder: Path) -> dict[str, object]:
    """Everything that a finished run leaves and that does not hang on a clock."""
    history = json.loads((folder / "scu_history.json").read_text())
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    weights = [folder / "adapter_model.safetensors", *folder.glob("final/adapter_model.safetensors")]
    return {
        "history": [unclocked(record) for record in history],
        "metrics": unclocked(metrics),
        "weights": [path.read_bytes() for path in weights],
    }


def unclocked(record: dict) -> dict:
    """Without what was measured with a clock or read from the GPU's sensors."""
    return {name: value for name, value in record.items() if name not in CLOCKED and "gpu_" not in name}


def texts(folder: Path) -> Path:
    """Write documents of very different lengths, of which the last block of an epoch is mostly padding."""
    from granite_scu.data.sources.corpora import stdlib_docs

    folder.mkdir(parents=True)
    for number, document in enumerate(stdlib_docs()[:20]):
        (folder / f"{number:02}.txt").write_text(document.text[: 200 + 150 * number], encoding="utf-8")
    return folder
