"""A run folder to publish, a hub to publish it on, and the command as users call it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import TOKEN, Hub

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "push_to_hf.py"


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run of four steps of the embedded model."""
    from granite_scu.cli import run_commands
    from granite_scu.data.sources.corpora import stdlib_docs

    where = tmp_path_factory.mktemp("published")
    corpus = where / "letters.txt"
    corpus.write_text("\n\n".join(document.text for document in stdlib_docs())[:30_000], encoding="utf-8")
    folder = where / "run"
    few = ("--max-steps", "4", "--control-every", "1", "--precision", "fp32", "--data-dir", str(corpus))
    assert run_commands.main(["--test-run", "--samples", "0", *few, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.close()


@pytest.fixture(scope="session")
def drawn() -> dict[bytes, dict[str, bytes]]:
    """By a run's history, the pictures that a card has of it: to draw them takes longer than to publish them."""
    return {}


@pytest.fixture
def push(hub, run, drawn, monkeypatch, capfd):
    """Calls the command in this process, with a token; returns exit code, stdout and stderr."""
    from huggingface_hub import close_session, constants

    from granite_scu.cli.push_to_hf import main
    from granite_scu.export.publish import selection

    draw = selection.pictures_of

    def drawn_once(folder: Path) -> dict[str, bytes]:
        history = (folder / "scu_history.json").read_bytes()
        if history not in drawn:
            drawn[history] = draw(folder)
        return drawn[history]

    monkeypatch.setattr(selection, "pictures_of", drawn_once)

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def call(*arguments, repo_id: str = "ada/adapter", yes: bool = True) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(run), "--repo-id", repo_id, *(["--yes"] if yes else []), *map(str, arguments)])
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    yield call
    close_session()


@pytest.fixture
def tool(hub, tmp_path):
    """Runs the tool as a user does, with no token but that in the environment given."""

    def call(*arguments, stdin=subprocess.DEVNULL, **environment) -> subprocess.CompletedProcess:
        hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        fixed = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "200"}
        line = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(
            line, capture_output=True, text=True, cwd=tmp_path, env=inherited | fixed | environment, stdin=stdin
        )

    return call
