"""The command, in this process where it trains nothing, and as a user starts it where it does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from research.comparison import engine
from research.comparison.command import main
from research.comparison.plan import Cell, Plan
from research.comparison.protocol import FULL, NONE
from research.run_store import write_record

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "compare_controllers.py"


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its workers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--arms", "pid"],
            "--arms pid: there is none of that name; there are none, early-stopping, fixed, fixed-stopped, pi, pi-auto",
        ),
        (["--tasks", "docs"], "--tasks docs: there is none of that name; there are docs-small"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--jobs", "-1"], "--jobs -1: must be at least 1"),
        (["--seeds", "10"], "--seeds 10: the full protocol has 5; give 5 or fewer"),
        (["--quick", "--seeds", "4"], "--seeds 4: the quick protocol has 3; give 3 or fewer"),
        (["--precision", "fp16"], "--precision fp16: must be one of"),
        (["--seeds", "many"], "--seeds many: must be a whole number"),
        (["--list", "--report-only"], "--report-only: not allowed with argument --list"),
        (["--report-only", "--max-runs", "3"], "--report-only: trains nothing; leave out --max-runs"),
        (["--varied", "--quick"], "--quick: not allowed with argument --varied"),
        (["--varied", "--tasks", "docs-small"], "there is none of that name; there are docs-medium-rank-2,"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, words, capsys, tmp_path):
    assert main(arguments, root=tmp_path) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert words in printed.err


@pytest.mark.parametrize(
    ("text", "lacks"), [("{}", "arm, failed, key, law,"), ('{"key": "a", "seed": 0}', "arm, failed, law, n_tokens,")]
)
def test_a_record_that_lacks_something_is_named_with_it(capsys, tmp_path, text, lacks):
    (tmp_path / "torn.json").write_text(text)
    assert main(["--report-only", "--evidence", str(tmp_path)], root=tmp_path) == 2
    error = capsys.readouterr().err
    assert f"torn.json is not the record of a run, for it lacks {lacks}" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("asked", ["--list", "--report-only"])
def test_a_file_is_no_folder_of_evidence(capsys, tmp_path, asked):
    file = tmp_path / "run.json"
    file.write_text("{}")
    assert main([asked, "--evidence", str(file)], root=tmp_path) == 2
    assert f"--evidence {file}: is a file; give the folder" in capsys.readouterr().err


def test_where_nothing_can_be_written_is_refused_before_the_first_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "carry_out", lambda *_: pytest.fail("a run was started"))
    file = tmp_path / "out"
    file.write_text("mine")
    for place in (file, file / "inside"):
        assert main(["--quick", "--output-dir", str(place)], root=tmp_path) == 2
        error = capsys.readouterr().err
        assert f"--output-dir {place}: " in error and len(error.splitlines()) == 1
    assert file.read_text() == "mine"
    inside = ["--evidence", str(file / "inside"), "--output-dir", str(tmp_path / "new")]
    assert main(["--quick", *inside], root=tmp_path) == 2
    assert "--evidence" in capsys.readouterr().err


def test_list_counts_and_trains_nothing(capsys, tmp_path):
    assert main(["--quick", "--list"], root=tmp_path) == 0
    printed = capsys.readouterr().out
    # Of three seeds none, two lambdas, cascade and PI, of which two on the first seed, and the base model.
    assert "0 of 18 runs finished" in printed
    assert not list(tmp_path.rglob("*.json"))


def test_the_varied_protocol_has_a_place_of_its_own(bf16, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "carry_out", lambda *_: (0, {}))
    assert main(["--varied", "--list"], root=tmp_path) == 0
    # Of eight tasks three lambdas, the default and the cascade on three seeds, and the base model.
    assert "0 of 200 runs finished" in capsys.readouterr().out
    assert main(["--varied"], root=tmp_path) == 0
    assert "claim" not in (tmp_path / "research" / "evidence" / "varied" / "comparison.md").read_text()


def test_list_does_not_import_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from research.comparison.command import main;"
        f"main(['--list'], root=Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def begun(monkeypatch) -> list[Plan]:
    """The plans whose runs would have been done."""
    plans: list[Plan] = []
    monkeypatch.setattr(engine, "carry_out", lambda plan, *_: plans.append(plan) or (0, {}))
    return plans


def test_a_cpu_with_bf16_takes_it_and_says_nothing(bf16, begun, capsys, tmp_path):
    assert main([], root=tmp_path) == 0
    [plan] = begun
    assert plan.next().precision == "bf16-mixed"
    assert plan.evidence.folder == tmp_path / "research" / "evidence" / "comparison" / "runs"
    assert "runs in" not in capsys.readouterr().out


def test_a_cpu_without_bf16_takes_fp32_and_keeps_it_apart(no_bf16, begun, capsys, tmp_path):
    """Of the full protocol too: its folder in the repository is of the published precision."""
    for arguments in ([], ["--quick"]):
        assert main(arguments, root=tmp_path) == 0
        words = (
            "runs in 32-true, since PyTorch finds neither AMX nor AVX512-BF16 in this CPU: compared among themselves,"
        )
        assert words in " ".join(capsys.readouterr().out.split())
        plan = begun.pop()
        assert plan.evidence.precision == plan.next().precision == "32-true"
        assert plan.evidence.folder == tmp_path / "runs" / "compare" / "runs"
    assert not list((tmp_path / "research" / "evidence").rglob("*"))


def test_bf16_is_refused_where_it_would_be_emulated(no_bf16, begun, capsys, tmp_path):
    assert main(["--quick", "--precision", "bf16"], root=tmp_path) == 2
    error = capsys.readouterr().err
    assert "bf16 would be emulated; use --precision fp32" in error and len(error.splitlines()) == 1 and not begun


def test_tables_of_runs_from_elsewhere_do_not_go_into_the_repository_s_evidence(capsys, tmp_path, evidence, finish):
    places = tmp_path / "elsewhere", tmp_path / "research" / "evidence" / "comparison" / "runs"
    elsewhere = ["--report-only", "--evidence", str(places[0])]
    assert main(elsewhere, root=tmp_path) == 2
    assert f"--evidence {places[0]}: there is no such folder" in capsys.readouterr().err
    places[0].mkdir()
    assert main(elsewhere, root=tmp_path) == 2
    assert f"--evidence {places[0]}: holds no finished run" in capsys.readouterr().err
    record = finish(Plan(FULL, evidence).spec(Cell(FULL.tasks[0], NONE, 0, FULL.rates[0])))
    write_record(places[0] / "none.json", record)
    assert main(elsewhere, root=tmp_path) == 0
    assert (tmp_path / "runs" / "compare" / "comparison.md").is_file() and not (
        tmp_path / "research" / "evidence"
    ).exists()
    shutil.copytree(places[0], places[1])
    assert main(["--report-only", "--evidence", str(places[1])], root=tmp_path) == 0
    assert (tmp_path / "research" / "evidence" / "comparison" / "comparison.md").is_file()


def command(folder: Path, script: Path = SCRIPT) -> list[str]:
    wanted = ["--quick", "--steps", "4", "--seeds", "1", "--arms", "none", "pi", "--jobs", "1"]
    return [
        sys.executable,
        str(script),
        *wanted,
        "--evidence",
        str(folder / "runs"),
        "--output-dir",
        str(folder / "out"),
    ]


def lines(folder: Path) -> list[str]:
    return (folder / "runs.jsonl").read_text().splitlines()


def gone_within(group: int, seconds: float) -> bool:
    """Whether no process of the group is left; one that nobody waited for is none."""
    end = time.time() + seconds
    while time.time() < end:
        alive = (process for process in psutil.process_iter(["status"]) if process.info["status"] != "zombie")
        if not any(_group(process.pid) == group for process in alive):
            return True
        time.sleep(0.2)
    return False


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def check_ended(folder: Path, done: subprocess.CompletedProcess, runs: int) -> list[dict]:
    """So many runs are there, with table, JSON and plot; returns the rows of the only task."""
    assert done.returncode == 0, done.stderr
    assert len(lines(folder)) == runs and max(map(len, lines(folder))) < 8_000
    assert not list((folder / "runs").rglob("*.json"))
    (task,) = json.loads((folder / "out" / "comparison.json").read_text())["tasks"]
    assert task["rows"][0]["name"] == "none"
    assert task["rows"][0]["test_bpt"]["mean"] < task["base_bpt"]  # four steps help
    assert {row["verdict"] for row in task["rows"]} == {None}  # nothing is said of one seed
    assert (folder / "out" / "comparison.png").stat().st_size > 10_000
    assert "bits/token" in done.stdout
    return task["rows"]


@pytest.mark.slow
def test_it_does_its_runs_and_ends_with_table_json_and_plot(tmp_path):
    done = subprocess.run([*command(tmp_path), "--arms", "none"], capture_output=True, text=True)
    check_ended(tmp_path, done, runs=2)  # the base model's and none


@pytest.mark.slow
def test_it_goes_on_after_ctrl_c(tmp_path):
    process = subprocess.Popen(
        command(tmp_path),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
    )
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "runs").rglob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("stopped by Ctrl-C") and "Traceback" not in errors
    assert gone_within(process.pid, seconds=60)  # multiprocessing's own helper takes a moment to see that we left
    assert not [*tmp_path.rglob("*.tmp"), *tmp_path.glob("granite-scu-run*")]

    before = [path.read_text().strip() for path in sorted((tmp_path / "runs").rglob("*.json"))]
    # The base model, none, and PI at two setpoints.
    _, pi = check_ended(tmp_path, subprocess.run(command(tmp_path), capture_output=True, text=True), runs=4)
    assert pi["name"].startswith("pi (S* = ")
    assert before and {*before} < {*lines(tmp_path)}


@pytest.mark.slow
def test_it_trains_on_a_cpu_without_bf16(tmp_path):
    def run(*more: str) -> str:
        script = Path(__file__).with_name("without_bf16.py")
        done = subprocess.run([*command(tmp_path, script), *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    assert "runs in 32-true, since" in run("--arms", "none")
    records = list(map(json.loads, lines(tmp_path)))
    assert sorted(record["task"] for record in records) == ["base", "docs-quick"]
    assert {record["settings"]["trainer.precision"] for record in records} == {"32-true"}
    [none] = json.loads((tmp_path / "out" / "comparison.json").read_text())["tasks"][0]["rows"]
    assert none["test_bpt"]["mean"] < 6
    # Where nothing is trained, the runs that are there count; no others were found by a key of another precision.
    assert "2 of 2 runs finished" in run("--arms", "none", "--list")
