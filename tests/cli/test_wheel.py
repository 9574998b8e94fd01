"""The wheel, installed where there is no checkout, has everything that a user needs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "evidence", "tests", "docs", "*.egg-info", "build")
SHORT = ("--max-steps", "8", "--eval-steps", "8", "--save-steps", "8", "--control-every", "2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs the installed command from a folder of its own; gives what it printed.

    The wheel alone is installed. What it depends on is found where this Python has it, without our own installation:
    files ending in .pth count in the first folder only.
    """
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, place / "source", ignore=LEFT_OUT)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place, "."]
    subprocess.run(build, cwd=place / "source", check=True)
    shutil.rmtree(place / "source")
    venv.create(place / "env", with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(place / "env"), "platbase": str(place / "env")}))
    (wheel,) = place.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "-q", "--python", place / "env"]
    subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (place / "elsewhere").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        line = [place / "env" / "bin" / "granite-scu", *arguments]
        done = subprocess.run(line, cwd=place / "elsewhere", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    run.wheel = wheel
    run.folder = place / "elsewhere"
    return run


@pytest.mark.slow
def test_it_holds_the_one_package(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"granite_scu"}
    assert "granite_scu/export/publish/secret_patterns.json" in names


@pytest.mark.slow
def test_it_plans_trains_scores_and_reports(installed):
    planned = json.loads(installed("plan", "--test-run", "--hardware", "cpu", *SHORT, "--json"))
    assert planned
    installed("train", "--test-run", *SHORT, "--output-dir", "mine")
    run = installed.folder / "mine"
    config = json.loads((run / "training_config.json").read_text())
    assert config["trainer"]["max_steps"] == 8
    assert len(json.loads((run / "elsewhere.json").read_text())["questions"]) == 30
    (run / "report.html").unlink()
    installed("report", "mine")
    assert (run / "report.html").is_file()
    scored = json.loads(installed("eval", "mine", "--json"))
    assert scored
    installed("plot", "mine", "--out", "plots")
    assert list((installed.folder / "plots").glob("*.png"))


@pytest.mark.slow
def test_it_has_the_files_that_commands_name(installed):
    printed = installed("train", "--test-run", "--config", "demo", "--hardware", "gpu_4090", "--print-config")
    assert "max_steps: 400" in printed
    assert len(installed("--help").splitlines()) > 20
