"""What the whole process asks of the system, its libraries in other languages included, as strace sees it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from granite_scu.storage.atomic import UNFINISHED

TRACED = "openat,write,pwrite64,writev,ftruncate,sendfile,copy_file_range,fsync,fdatasync,/^rename,/^unlink"
CALL = re.compile(r"(?P<time>[\d.]+) (?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>.*)")
FLAGS = ("--test-run", "--block-size", "64", "--batch-size", "2", "--save-steps", "2", "--eval-steps", "2",
         "--eval-iters", "1", "--target-s", "0.02", "--control-every", "1", "--samples", "0")  # fmt: skip


@pytest.fixture(scope="module")
def strace():
    """The program, where it is there and may follow a process."""
    found = shutil.which("strace")
    if not found or subprocess.run([found, "-o", "/dev/null", "true"]).returncode:
        pytest.skip("strace is not there, or may not follow a process")
    return found


def train(strace: str, place: Path, options: list, *more: str) -> None:
    """A run in ``place``, whose text lies there."""
    command = [sys.executable, "-m", "granite_scu", "train", *FLAGS, "--data-dir", str(place / "text.jsonl")]
    command += ["--output-dir", str(place / "run"), "--cache-dir", str(place / "cache"), *more]
    done = subprocess.run(
        [strace, "-qq", "-f", "--seccomp-bpf", "-y", *options, *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("traced").resolve()
    (place / "text.jsonl").write_text("".join(f'{{"text": "Line {i} of a text, and its end."}}\n' for i in range(400)))
    return place


def calls(folder: Path, place: Path) -> list[tuple[str, str, list[str]]]:
    """The successful calls on files below ``place``, in order: name, arguments and the paths in them."""
    matches = [CALL.match(line) for file in folder.iterdir() for line in file.read_text(errors="replace").splitlines()]
    found = sorted((match for match in matches if match), key=lambda match: float(match["time"]))
    succeeded = [match for match in found if not match["result"].startswith("-1")]
    paths = re.compile(rf'{re.escape(str(place))}(?:/[^>"]*)?')
    texts = [(match["name"], match["arguments"], match["result"]) for match in succeeded]
    return [(name, arguments, paths.findall(arguments + result)) for name, arguments, result in texts]


def in_place(path: str) -> bool:
    """Whether it is written where it lies: logs, locks, and the history, whose lines are only added."""
    return "/logs/" in path or path.endswith((".lock", "/scu_history.jsonl"))


def is_unfinished(path: str) -> bool:
    """Whether it has, or lies in a folder with, the name of what is not whole yet."""
    return any(UNFINISHED.fullmatch(part) for part in Path(path).parts)


@pytest.mark.slow
def test_every_rename_is_of_what_is_synced_and_is_synced_itself(strace, place):
    """In the run folder and the cache, of a run and its resumption; no file is truncated that has its name."""
    for name, more in (("first", ("--max-steps", "2")), ("resumed", ("--max-steps", "4"))):
        again = ("--resume-from-checkpoint", "last") if name == "resumed" else ()
        trace = place.with_name(f"trace-{name}")
        trace.mkdir()
        train(strace, place, ["-ff", "-ttt", "-e", f"trace={TRACED}", "-o", str(trace / "thread")], *more, *again)
        dirty: set[str] = set()
        unsynced: set[str] = set()
        renames = 0
        for call, arguments, paths in calls(trace, place):
            if not paths:
                continue
            if call in ("fsync", "fdatasync"):
                dirty.discard(paths[0])
                unsynced.discard(paths[0])
            elif call.startswith("unlink"):
                (name,) = re.findall(r'"([^"]*)"', arguments)
                dirty.discard(name if name.startswith("/") else f"{paths[0]}/{name}")
            elif call.startswith("rename"):
                source, target = paths[-2:]
                moved = {path for path in dirty if path == source or path.startswith(f"{source}/")}
                if is_unfinished(target):  # a library's own temporary file, in ours
                    dirty = dirty - moved | {target + path.removeprefix(source) for path in moved}
                    continue
                assert not moved, f"{call}({arguments})"
                unsynced.add(str(Path(target).parent))
                renames += 1
            elif call == "openat":
                truncated = "O_TRUNC" in arguments and not in_place(paths[-1]) and not is_unfinished(paths[-1])
                assert not truncated, f"{call}({arguments})"
            else:  # what is written to comes first, but where one file is copied into another
                opened = re.findall(r"\d+<(/[^>]*)>", arguments)
                file = opened[-1 if call == "copy_file_range" else 0] if opened else ""
                if file.startswith(str(place)) and not in_place(file):
                    dirty.add(file)
        assert renames > 10
        assert not {path for path in unsynced if "/logs" not in path}
        assert not {path for path in dirty if Path(path).exists()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_a_full_disk_never_leaves_half_of_a_tokenizers_file(strace, place, name):
    """As a resume would that writes it in place."""
    if not (place / "run").exists():
        train(strace, place, ["-e", "trace=none"], "--max-steps", "2")
    file = place / "run" / name
    before, steps = file.read_bytes(), 8 if name == "tokenizer.json" else 6
    fails = ["-P", str(file), "-e", "trace=write", "-e", "inject=write:error=ENOSPC"]
    train(strace, place, fails, "--max-steps", str(steps), "--resume-from-checkpoint", "last")
    assert file.read_bytes() == before
