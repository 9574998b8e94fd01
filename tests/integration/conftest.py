"""Runs of the whole product: in this process where that will do, and as a user starts them."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_granite_cuda.py"


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(no_step_is_tried, tmp_path_factory):
    """No test writes into the checkout, asks the hub, or draws in this process, which takes a third of a short run."""
    from huggingface_hub import constants

    from granite_scu.export import present

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(present, "picture", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def command():
    """Runs a command of this Python as a user does; returns what it printed and its exit code."""

    def run(*arguments, **more_environment) -> subprocess.CompletedProcess:
        # One thread, so that two runs add in the same order; no GPU and no hub, so that every machine sees the same.
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environment = os.environ | fixed | more_environment
        line = [sys.executable, *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, env=environment)

    return run


@pytest.fixture(scope="session")
def script(command):
    """Runs the script with flags; ``launch`` is the same in this process, and faster."""
    return lambda *argv, **environment: command(SCRIPT, *argv, **environment)


@contextmanager
def _caught() -> Iterator[list[str]]:
    """Fills the list with what is printed meanwhile on stdout and stderr, by this process and by those it starts."""
    printed, kept = [], (sys.stdout, sys.stderr)
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", buffering=1)) for _ in kept]
        before = []
        for number, stream, file in zip((1, 2), kept, files, strict=True):
            stream.flush()
            before.append(os.dup(number))
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = files
        try:
            yield printed
        finally:
            sys.stdout, sys.stderr = kept
            for number, copy, file in zip((1, 2), before, files, strict=True):
                os.dup2(copy, number)
                os.close(copy)
                file.seek(0)
                printed.append(file.read())


@pytest.fixture(scope="session")
def call():
    """Calls the ``main`` of a command in this process; returns exit code, stdout and stderr."""
    import torch

    torch.set_num_threads(1)  # as ``command`` does

    def run(main: Callable[[list[str]], int], *argv) -> tuple[int, str, str]:
        with _caught() as printed:
            code = main([str(argument) for argument in argv])
        return code, *printed

    return run


@pytest.fixture(scope="session")
def launch(call):
    """Runs the script's ``main`` in this process; returns exit code, stdout and stderr."""
    from granite_scu.cli.main import main

    # Two seconds less for each run; a test that is about the samples asks for them again.
    return partial(call, main, "train", "--samples", 0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A short text file of prose about Python, some five thousand tokens."""
    from granite_scu.data.sources.corpora import stdlib_docs

    text = "\n\n".join(document.text for document in stdlib_docs())
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(text[:20_000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def topics(tmp_path_factory) -> Path:
    """Thirty topics of the documentation, a line each, all of them short."""
    from granite_scu.data.sources.corpora import stdlib_docs

    path = tmp_path_factory.mktemp("topics") / "topics.jsonl"
    lines = [json.dumps({"text": document.text[:900]}) + "\n" for document in stdlib_docs()[:30]]
    path.write_text("".join(lines), encoding="utf-8")
    return path


FEW = ("--max-steps", 4, "--control-every", 1, "--precision", "fp32", "--block-size", 64, "--batch-size", 2)


@pytest.fixture(scope="session")
def train(corpus, tmp_path_factory):
    """Trains the embedded model on the short corpus for a few steps, without pictures, and returns the run folder."""
    from rich.console import Console

    from granite_scu.cli import script_flags
    from granite_scu.training import recipe

    def run(*argv) -> Path:
        folder = tmp_path_factory.mktemp("train") / "run"
        flags = (
            "--test-run",
            "--samples",
            0,
            *FEW,
            "--eval-batch-size",
            16,
            *(() if "--data-dir" in argv else ("--data-dir", corpus)),
            "--output-dir",
            folder,
            *argv,
        )
        layers, _ = script_flags.translate([str(flag) for flag in flags])
        recipe.train(recipe.prepare(layers.request(), Console(quiet=True)))
        return folder

    return run


@pytest.fixture(scope="session")
def trained(train):
    """The same, once for the same flags: for those who only look at the folder."""
    return functools.cache(train)
