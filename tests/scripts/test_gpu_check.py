import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from scripted import SCRIPTS, script
from torch.autograd import DeviceType

from benchmarks import gpu_legs, gpu_runs, gpu_steps
from benchmarks.gpu_legs import Leg
from benchmarks.gpu_work import Call, Finding, OutOfTime, Skipped, Table, Work, end_with_children
from granite_scu.config.errors import RunFailed
from granite_scu.storage.run_folder import LOG_FILES
from research.real.grid import STAGES

check = script("gpu_check")

INFO = {
    "cuda_available": False, "gpu_count": 0, "gpu_name": None, "gpu_memory_gb": 0.0, "compute_capability": None,
    "supports_bfloat16": False, "supports_tf32": False, "driver_version": None, "cuda_version": None,
    "pytorch_version": "2.13.0", "preset": "cpu", "problem": "no NVIDIA driver",
}  # fmt: skip
CPU = {"info": INFO, "recommended": {"precision": "32-true"}}
SPEED = Table("Speed", {"case": "case", "rate": "tokens/s|,.0f", "none": "unknown"}, [{"case": "a|b", "rate": 12345.6}])


@pytest.fixture
def taken(monkeypatch):
    """Puts a machine and four legs behind the command; the list has the names of those that were taken."""
    names = []

    def leg(name, result):
        def run(work):
            names.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return Leg(run, 1, f"what {name} shows")

    legs = {
        "good": leg("good", Finding("as it should be", (SPEED,))),
        "bad": leg("bad", Finding("two differ", faults=("one: off by 3",))),
        "broken": leg("broken", KeyError("gone")),
        "absent": leg("absent", Skipped("there is one card")),
        "half": leg("half", Finding("two of three", left=("the third",))),
        "late": leg("late", OutOfTime("stopped in run: the time was used up")),
    }
    monkeypatch.setattr(check, "LEGS", legs)
    monkeypatch.setattr(check, "look_at_machine", lambda device: CPU)
    return names


@pytest.fixture
def start(tmp_path):
    """Starts the command; returns its exit code, and what the two files say."""

    def start(*flags):
        code = check.main(["--device", "cpu", "--output-dir", str(tmp_path), *flags])
        return code, json.loads((tmp_path / check.JSON).read_text()), (tmp_path / check.PAGE).read_text()

    return start


def test_a_leg_that_fails_does_not_end_the_others_and_the_code_is_1(taken, start, capsys):
    code, found, page = start()
    assert code == 1
    assert taken == ["good", "bad", "broken", "absent", "half", "late"]
    statuses = {name: leg["status"] for name, leg in found["legs"].items()}
    good = {"good": "passed", "absent": "skipped", "half": "in part", "late": "not run"}
    assert statuses == good | {"bad": "failed", "broken": "failed"}
    out = capsys.readouterr().out
    assert "[2/6] bad: what bad shows" in out and "- one: off by 3" in out and "KeyError: 'gone'" in out
    assert "- one: off by 3" in page


def test_what_has_passed_is_not_run_again_unless_it_is_asked_for(taken, start):
    assert start("--only", "good", "absent")[0] == 0
    start()
    assert taken == ["good", "absent", "bad", "broken", "absent", "half", "late"]
    taken.clear()
    assert start("--only", "good")[0] == 0 and taken == []
    assert start("--only", "absent", "half", "--again", "good")[0] == 0
    assert taken == ["good", "absent", "half"]


def test_the_page_has_a_row_a_leg_and_the_numbers_in_their_formats(taken, start):
    _, _, page = start("--only", "good", "absent")
    assert r"| a\|b | 12,346 |" in page and "unknown" not in page
    assert "| good | what good shows | passed | 0:00 | as it should be |" in page
    assert "| absent | what absent shows | skipped | 0:00 | there is one card |" in page
    assert "| bad | what bad shows | not run | - | not asked for |" in page
    assert "## good" in page and "## absent" not in page


def test_what_no_longer_fits_is_named_and_keeps_what_is_known_of_it(taken, start):
    code, _, page = start("--minutes", "0.5")
    assert code == 1 and taken == []  # nothing was checked
    assert "| good | what good shows | not run | - | 0.5 minutes were left, and it takes about 1 |" in page
    start("--only", "bad")
    assert start("--only", "bad", "--minutes", "0.5")[1]["legs"]["bad"]["status"] == "failed"


def test_a_result_is_on_the_disk_as_soon_as_it_is_known(taken, start, monkeypatch, tmp_path):
    def interrupted(work):
        work.tell(Finding("one of two"))
        raise KeyboardInterrupt

    monkeypatch.setitem(check.LEGS, "bad", Leg(interrupted, 1, ""))
    assert start()[0] == 130
    found = json.loads((tmp_path / check.JSON).read_text())["legs"]
    assert {name: leg["status"] for name, leg in found.items()} == {"good": "passed", "bad": "in part"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "speed"], "--only speed: no such leg; choose good, bad"),
        (["--minutes", "nan"], "--minutes nan: must be positive"),
        (["--steps", "1"], "--steps 1: must be at least 2"),
        (["--onl", "good"], "unrecognized arguments: --onl"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(taken, flags, said, capsys):
    assert check.main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_results_of_two_cards_are_not_mixed(taken, start, monkeypatch, capsys, tmp_path):
    start("--only", "good")
    monkeypatch.setattr(check, "look_at_machine", lambda device: CPU | {"info": INFO | {"gpu_name": "NVIDIA A10"}})
    assert start("--only", "good")[0] == 2
    assert "of another device (cpu); name another --output-dir" in capsys.readouterr().err
    (tmp_path / check.JSON).write_text('{"legs": {}}')
    assert start("--only", "good")[0] == 2
    assert "was not written by this check; name another --output-dir" in capsys.readouterr().err


# ---- parity ----


def summary(score, start=6.0):
    speed = {"tokens_per_s": 1.0, "peak_gpu_memory_gb": None, "skipped_steps": 0}
    return {"adapter_test_bpt": score, "base_test_bpt": start, **speed}


@pytest.fixture
def runs(monkeypatch):
    """Gives runs of these scores by their folders; the reference's is 5, and so is every other's. Under ``kernels`` is
    what their Mamba-2 layers ran in."""
    scores = {}

    def train(self, name, *flags, device=None, processes=1):
        score = scores.get(name, 5.0)
        if isinstance(score, Exception):
            raise score
        log = self.folder / name / LOG_FILES[device or self.device]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"INFO Mamba-2 layers run in {scores.get('kernels', 'fla-core')}\n")
        return summary(score)

    monkeypatch.setattr(Work, "train", train)
    return scores


def gpu_work(tmp_path, **info):
    info = INFO | {"supports_bfloat16": True, "supports_tf32": True, "gpu_count": 1} | info
    return Work(tmp_path, "cuda", 20, {"info": info, "recommended": {"precision": "bf16-mixed"}})


def test_a_run_is_held_to_its_own_reference_in_the_tolerance_of_its_precision(runs, tmp_path):
    runs |= {"fp32": 5.001, "bf16": 5.001, "compiled": RunFailed("no compiler"), "4-bits": float("nan")}
    runs |= {"reference-accumulated": 4.5, "accumulated-by-3": 4.5}
    found = gpu_runs.parity(gpu_work(tmp_path))
    assert {fault.partition(":")[0] for fault in found.faults} == {"fp32", "compiled", "4 bits"}
    assert "compiled: no compiler" in found.faults
    [table] = found.tables
    assert {row["run"]: row["verdict"] for row in table.rows}["bf16"] == "passed"


def test_runs_of_the_protocol_go_on_from_those_that_have_ended_and_what_time_cuts_is_no_fault(monkeypatch, tmp_path):
    def cut(self, name, *line, **cards):
        if time.monotonic() < self.end:
            raise RunFailed("it hangs")
        raise OutOfTime

    monkeypatch.setattr(Work, "python", cut)
    work = Work(tmp_path / "leg", "cpu", 2, CPU, deadline=time.monotonic(), results=tmp_path)
    (tmp_path / "evidence.jsonl").write_text('{"run":1}\n{"cut":')
    assert gpu_legs.evidence(work).said.startswith("1 runs")
    assert (tmp_path / "evidence.jsonl").read_text() == '{"run":1}\n'
    kept = gpu_legs.ROOT / "research" / "evidence" / "real"
    assert (work.folder / "runs.jsonl").read_text() == (kept / "runs.jsonl").read_text() + '{"run":1}\n'
    bases = {base for stage in STAGES.values() for base in stage.bases}
    written = {path.name for base in bases for path in kept.glob(f"*-{base}*")}
    assert written and written | {"runs.jsonl"} == {path.name for path in work.folder.iterdir()}


def test_precisions_that_the_card_lacks_are_skipped_with_the_reason(runs, tmp_path):
    work = gpu_work(tmp_path, supports_bfloat16=False, supports_tf32=False)
    work.machine["recommended"]["precision"] = "16-mixed"
    rows = {row["run"]: row for row in gpu_runs.parity(work).tables[0].rows}
    assert rows["bf16"]["reason"] == "the device has no bf16 products"
    assert rows["fp32 in TF32"]["verdict"] == "skipped" and rows["compiled"]["verdict"] == "passed"


def test_compiled_kernels_that_are_not_there_have_passed_nothing(runs, tmp_path):
    runs["kernels"] = "PyTorch"
    rows = {row["run"]: row for row in gpu_runs.parity(gpu_work(tmp_path)).tables[0].rows}
    assert rows["kernels auto"]["verdict"] == "skipped" and "no compiled kernels" in rows["kernels auto"]["reason"]
    assert (rows["bf16"]["verdict"], rows["bf16"]["kernels"]) == ("passed", "PyTorch")


# ---- benchmarks ----


@pytest.mark.parametrize(
    ("leg", "rows", "said"),
    [
        ("step", [], "no case of benchmarks/train_step.py is for this device"),  # a Turing has no bf16
        ("controller", [], "no case of benchmarks/controller_overhead.py"),
        ("variants", [{"case": "a", "ours_s": None, "reason": "it broke"}], None),
        ("trl", [{"case": "a", "sides": ["trl"], "ours_s": None, "trl_reason": "it broke"}], "nothing .*: it broke"),
    ],
)
def test_a_leg_that_measured_nothing_has_not_passed(monkeypatch, tmp_path, leg, rows, said):
    monkeypatch.setattr(gpu_legs, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_legs, "weights", lambda work, model: tmp_path)
    monkeypatch.setattr(Work, "python", lambda self, *_: Call(0, json.dumps(rows), ""))
    if said:
        with pytest.raises(Skipped, match=said):
            gpu_legs.LEGS[leg].run(gpu_work(tmp_path))
    else:
        assert gpu_legs.LEGS[leg].run(gpu_work(tmp_path)).faults == ("a: it broke",)


# ---- how programs are started ----


def is_running(number):
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_does_not_end_is_ended_with_those_that_it_started(tmp_path):
    inner = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    program = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = int(program.stdout.readline())
    end_with_children(program)
    patience = time.monotonic() + 10
    while is_running(child) and time.monotonic() < patience:
        time.sleep(0.05)
    assert program.returncode and not is_running(child)


@pytest.mark.parametrize(("end", "error"), [(0.5, OutOfTime), (60, RunFailed)])
def test_a_leg_that_hangs_has_failed_and_one_that_time_ran_out_for_has_not(tmp_path, end, error):
    now = time.monotonic()
    work = Work(tmp_path, "cpu", 2, CPU, deadline=now + 0.5, end=now + end)
    with pytest.raises(error):
        work.call("sleeping", ["sleep", "60"])
    assert time.monotonic() - now < 20


def test_how_a_program_failed_is_told_with_its_last_words(tmp_path):
    work = Work(tmp_path, "cpu", 2, CPU)
    with pytest.raises(RunFailed, match="the run ended with code 2: error: no such flag"):
        work.python("run", "-c", "import sys; print('error: no such flag', file=sys.stderr); sys.exit(2)").require(
            "the run"
        )


# ---- what a step waits for ----


def test_waiting_is_refused_between_ticks_only():
    modes, steps = [], 12
    watch = gpu_steps.NoWaiting(every=5, steps=steps, set_mode=modes.append)
    refused = []
    for done in range(steps):
        watch.on_train_batch_start(SimpleNamespace(global_step=done))
        if modes and modes[-1] == "error":
            refused.append(done + 1)
        if done + 1 < steps:
            watch.on_train_batch_end(SimpleNamespace(global_step=done + 1))
    with pytest.raises(gpu_steps.Enough):
        watch.on_train_batch_end(SimpleNamespace(global_step=steps))
    assert refused == [4, 6, 7, 8, 9, 11, 12] and watch.guarded == len(refused)
    assert modes[-1] == "default"


def test_of_a_trace_on_a_gpu_its_kernels_count_and_not_what_they_were_launched_by():
    def event(key, device_type, microseconds, is_user_annotation=False):
        times = {"self_device_time_total": microseconds, "self_cpu_time_total": 7000}
        return SimpleNamespace(
            key=key, count=6, device_type=device_type, is_user_annotation=is_user_annotation, **times
        )

    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("aten::mm", cpu, 0),
        event("copy", cuda, 3000),
        event("gemm", cuda, 6000),
        event("step", cuda, 9000, True),
    ]
    found = gpu_steps.kernels(SimpleNamespace(key_averages=lambda: events), "cuda")
    assert found == [{"name": "gemm", "calls": 2.0, "ms": 2.0}, {"name": "copy", "calls": 2.0, "ms": 1.0}]


def test_the_line_that_waits_is_named_and_not_one_that_cleans_up_after_it():
    def waiting():
        raise RuntimeError("called a synchronizing CUDA operation")

    def cleaning_up():
        try:
            waiting()
        finally:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError) as caught:
        cleaning_up()
    assert re.fullmatch(r"test_gpu_check\.py:\d+ waiting", gpu_steps.where(caught.value))


@pytest.mark.slow
def test_on_a_cpu_a_leg_runs_for_real(tmp_path):
    line = [sys.executable, SCRIPTS / "gpu_check.py", "--device", "cpu", "--only", "determinism", "--steps", "2"]
    done = subprocess.run([*line, "--output-dir", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end with the same bytes" in (tmp_path / check.PAGE).read_text()
    assert json.loads((tmp_path / check.JSON).read_text())["legs"]["determinism"]["status"] == "passed"
