"""A run folder to publish, a hub to publish it on, and the command as users call it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import TOKEN, Hub
from untried import no_step_tried

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "push_to_hf.py"


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run of four steps of the embedded model."""
    from granite_scu.cli.main import main
    from granite_scu.data.sources.corpora import stdlib_docs

    place = tmp_path_factory.mktemp("published")
    corpus = place / "letters.txt"
    corpus.write_text("\n\n".join(document.text for document in stdlib_docs())[:30_000], encoding="utf-8")
    folder = place / "run"
    few = ("--max-steps", "4", "--control-every", "1", "--precision", "fp32", "--block-size", "64", "--batch-size", "2")
    where = ("--data-dir", str(corpus), "--output-dir", str(folder))
    with no_step_tried():
        assert main(["train", "--test-run", "--samples", "0", *few, *where]) == 0
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


@pytest.fixture(scope="session")
def searched() -> dict[tuple, tuple | None]:
    """By a text and the secrets of the environment, what was found in it: most files are those of the run each time."""
    return {}


@pytest.fixture(autouse=True)
def _once(drawn, searched, monkeypatch):
    """Nothing is drawn or searched again."""
    from granite_scu.export.publish import leaks, selection

    draw, search = selection.pictures_of, leaks.secret_in

    def drawn_once(folder: Path) -> dict[str, bytes]:
        history = (folder / "scu_history.json").read_bytes()
        if history not in drawn:
            drawn[history] = draw(folder)
        return drawn[history]

    def searched_once(text: str, environment) -> tuple | None:
        key = text, *((name, value) for name, value in environment.items() if leaks.SECRET_NAME.search(name))
        if key not in searched:
            searched[key] = search(text, environment)
        return searched[key]

    monkeypatch.setattr(selection, "pictures_of", drawn_once)
    monkeypatch.setattr(leaks, "secret_in", searched_once)


@pytest.fixture
def push(hub, run, monkeypatch, capfd):
    """Calls the command in this process, with a token; returns exit code, stdout and stderr."""
    from huggingface_hub import close_session, constants

    from granite_scu.cli.main import main

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def call(*arguments, repo_id: str = "ada/adapter", yes: bool = True) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["publish", str(run), "--repo-id", repo_id, *(["--yes"] if yes else []), *map(str, arguments)])
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
