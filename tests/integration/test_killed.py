"""However a run was cut up, it ends as one that was not: byte for byte."""

import functools
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import killing
import power
import psutil
import pytest
from killing import at_call, at_change

from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import LOCK, LOG_FILES, MODEL_CARD, STOPPED, RunFolder, read_json

ROOT = Path(__file__).parents[2]

GENERAL = ROOT / "docs" / "guides"

FLAGS = (
    *("--test-run", "--samples", 0, "--precision", "fp32", "--batch-size", 2, "--block-size", 64, "--eval-iters", 2),
    *("--max-steps", 9, "--save-steps", 4, "--eval-steps", 2, "--control-every", 3, "--lora-dropout", 0.1),
)
WORSE = (*FLAGS, "--controller", "none", "--learning-rate", 0.05, "--lr-scheduler", "constant", "--warmup-steps", 0)
"""The last step's adapter is not the best validated one: both are written at the end."""
UNEVEN = (*FLAGS, "--gradient-accumulation-steps", 2, "--num-workers", 1)
DRIFT = (*FLAGS, "--max-drift", "0.01%", "--general-data", GENERAL, "--general-tokens", 2048)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return killing.texts(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Runs without an interruption, by their flags."""
    runs = {}

    def run(flags):
        if flags not in runs:
            folder = tmp_path_factory.mktemp("whole") / "run"
            log = folder.with_suffix(".log")
            assert killing.run([*flags, "--data-dir", text, "--output-dir", folder], log) == 0, log.read_text()
            runs[flags] = killing.outcome(folder)
        return runs[flags]

    return run


@pytest.fixture
def cut(text, tmp_path):
    """A run that is started again and again, each time struck somewhere else."""

    class Cut:
        folder, log = tmp_path / "run", tmp_path / "log"

        def start(self, flags, prepare=lambda: None):
            return killing.fork(self.line(flags), self.log, prepare)

        def run(self, flags, prepare=lambda: None):
            return killing.run(self.line(flags), self.log, prepare)

        def line(self, flags):
            return [*flags, "--data-dir", text, "--output-dir", self.folder, "--resume-from-checkpoint", "auto"]

        def finish(self, flags):
            assert self.run(flags) == 0, self.log.read_text()
            return killing.outcome(self.folder)

    return Cut()


def moments(folder, count, seed):
    """Kills between steps, inside a save or any other writing, and in a validation: each kind, in any order."""
    rng = random.Random(seed)
    kinds = [
        lambda: at_call("on_before_optimizer_step", rng.randint(2, 5)),
        lambda: at_call("validation_step", rng.randint(1, 4)),
        lambda: at_change(folder, rng.randint(1, 50)),
    ]
    chosen = [kinds[i % 3]() for i in range(count)]
    rng.shuffle(chosen)
    return chosen


def same(one, other):
    return {name: one[name] == other[name] for name in one} == dict.fromkeys(one, True)


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        pytest.param(UNEVEN, 1, id="uneven", marks=pytest.mark.slow),
        pytest.param(UNEVEN, 10, id="uneven-often", marks=pytest.mark.slow),
        pytest.param(FLAGS, 10, id="plain", marks=pytest.mark.slow),
        pytest.param(DRIFT, 3, id="drift", marks=pytest.mark.slow),
        pytest.param(WORSE, 10, id="worse", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_ends_as_if_it_had_not_been(whole, cut, flags, kills):
    codes = [
        cut.run(flags, moment) for moment in moments(cut.folder, kills, seed=len(flags) - 2)
    ]  # a seed with which each is reached
    assert codes.count(-signal.SIGKILL) == kills, (codes, cut.log.read_text())
    assert same(whole(flags), cut.finish(flags))


def kept_when_finished(folder, to):
    """What is on the disk of a run, once its last file is."""

    def prepare():
        disk = power.Disk(folder)
        os.fsync = disk.fsync
        disk.watch = lambda: disk.after_a_cut(to, False) if (folder / MODEL_CARD).exists() else None

    return prepare


def contents(folder):
    """Of the files of a run but for its logs."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {name: (folder / name).read_bytes() for name in files if name.parts[0] != "logs"}


@pytest.mark.slow
@pytest.mark.parametrize("names_first", [False, True])
def test_a_power_cut_takes_back_no_more_than_a_kill(whole, cut, tmp_path_factory, names_first):
    """And what it had written before is on the disk when it says that it has finished. A copy by hard links, made in
    between, stays as it was."""
    moment = functools.partial(at_call, "on_before_optimizer_step", 7)
    assert cut.run(UNEVEN, power.failing(cut.folder, moment, names_first)) == -signal.SIGKILL
    assert [path.name for path in RunFolder(cut.folder).checkpoints()] == ["checkpoint-4"]
    (cut.folder / LOG_FILES["cpu"]).touch()  # nobody syncs it
    copy, kept = (tmp_path_factory.mktemp("beside") / name for name in ("copy", "kept"))
    subprocess.run(["cp", "-al", cut.folder, copy], check=True)
    copied = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != LOCK}
    assert cut.run(UNEVEN, kept_when_finished(cut.folder, kept)) == 0, cut.log.read_text()
    assert same(whole(UNEVEN), killing.outcome(cut.folder))
    assert contents(kept) == contents(cut.folder)
    assert {path: path.read_bytes() for path in copied} == copied


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(FLAGS, marks=pytest.mark.slow, id="plain"),
        pytest.param((*FLAGS, "--controller", "research.laws.kl:KL"), marks=pytest.mark.slow, id="kl"),
        pytest.param(DRIFT, marks=pytest.mark.slow, id="drift"),
        pytest.param(WORSE, marks=pytest.mark.slow, id="worse"),
        # Its last step is no tick.
        pytest.param((*FLAGS, "--target-s", "10%", "--max-steps", 10), marks=pytest.mark.slow, id="pi"),
    ],
)
def test_a_run_killed_in_its_last_writings_needs_no_step_more(whole, cut, flags, monkeypatch):
    """The training is over, and only the last tick, the scoring, the summary or the model card is missing. That tick
    measures the KL on the newest batch, which is read again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the law of research/ is found
    assert cut.run(flags, at_call("on_test_epoch_start", 10**9)) == 0
    for missing in ("README.md", "scu_metrics.json"):
        (cut.folder / missing).unlink()
        outcome = cut.finish(flags)
        assert same(whole(flags), outcome)
        assert (cut.folder / "README.md").is_file()
    assert not (cut.folder / "best").exists()
    if flags != DRIFT:  # whose last adapter may be the best within its budget
        assert (cut.folder / "final").is_dir() == (flags == WORSE)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("--early-stopping", 1, "--learning-rate", 3), ("--max-time", "00:00:00:01")])
def test_a_run_that_had_stopped_before_its_last_step_takes_none_more(cut, stop):
    flags = (*FLAGS, "--max-steps", 500, "--warmup-steps", 0, "--eval-steps", 2, *stop)
    before = cut.finish(flags)
    assert before["metrics"]["steps"] < 500
    (cut.folder / "scu_metrics.json").unlink()
    assert same(before, cut.finish(flags))
    assert cut.run(flags) == 2
    assert f"the run ended there, at step {before['metrics']['steps']}, before --max-steps" in cut.log.read_text()
    assert same(before, killing.outcome(cut.folder))


@pytest.mark.slow
@pytest.mark.parametrize("error", [killing.FULL, killing.BROKEN, killing.READ_ONLY])
def test_a_write_that_fails_ends_the_run_and_loses_nothing(whole, cut, error):
    rng = random.Random(f"disk {error}")
    codes = [cut.run(FLAGS, at_change(cut.folder, rng.randint(15, 35), killing.fail_with(error)))]
    while codes[-1] == 1 and len(codes) < 3:
        codes.append(cut.run(FLAGS, at_change(cut.folder, rng.randint(15, 35), killing.fail_with(error))))
    assert 1 in codes and set(codes) <= {0, 1}  # what cannot be tidied up stops no run
    assert cut.log.read_text().count(f"{os.strerror(error)}; ") == codes.count(1)
    assert "Traceback" not in cut.log.read_text()
    checkpoint_list.find(RunFolder(cut.folder), "auto")  # refuses where there are some and none is intact
    if codes[-1]:
        assert cut.run(FLAGS) == 0
    assert same(whole(FLAGS), killing.outcome(cut.folder))


@pytest.mark.parametrize(
    "most", [pytest.param(150_000, marks=pytest.mark.slow), 500_000, pytest.param(1_500_000, marks=pytest.mark.slow)]
)
def test_a_disk_that_fills_up_inside_a_file_is_named(cut, most):
    """Tokenizer and adapter are written by Rust, the state by torch; each may be the one that no longer fits."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    assert cut.run(FLAGS, limit) == 1
    words = cut.log.read_text()
    assert "File too large; allow larger files (ulimit -f)" in words
    assert str(cut.folder) in words
    assert RunFolder(cut.folder).checkpoints() == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_the_step_end_and_saves_it(whole, cut, number, code):
    # A background shell has its children ignore Ctrl-C, nohup a hangup, and they theirs.
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    child = cut.start(UNEVEN, lambda: signal.signal(number, handler))
    killing.until(lambda: killing.ticks(cut.folder) >= 1)
    os.killpg(child, number)  # loader processes too, as a terminal, torchrun and SLURM do
    assert killing.wait(child) == code
    (*_, newest) = RunFolder(cut.folder).checkpoints()
    words = " ".join(cut.log.read_text().split())
    by, step = "Ctrl-C" if number == signal.SIGINT else number.name, newest.name.removeprefix("checkpoint-")
    assert f"stopped by {by} after step {step}, which is saved; continue with: " in words
    assert "Traceback" not in words and "error:" not in words
    assert f"granite-scu train --output-dir {cut.folder} --resume-from-checkpoint last" in words
    stopped = {"signal": number.name, "step": int(step), "checkpoint": newest.name}
    assert read_json(cut.folder / STOPPED) == stopped
    log = (cut.folder / "logs" / "training.log").read_text(encoding="utf-8")
    assert f" INFO stopped by {by} after step {step}, which is saved; continue with: " in log
    assert f"stopped by {number.name}" in (cut.folder / "report.html").read_text(encoding="utf-8")
    assert same(whole(UNEVEN), cut.finish(UNEVEN))
    assert not (cut.folder / STOPPED).exists(), "the run has gone on"


@pytest.mark.slow
def test_under_nohup_a_lost_terminal_stops_nothing(whole, cut):
    child = cut.start(UNEVEN, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    killing.until(lambda: killing.ticks(cut.folder) >= 1)
    os.kill(child, signal.SIGHUP)
    assert killing.wait(child) == 0
    assert same(whole(UNEVEN), killing.outcome(cut.folder))


def _full() -> None:
    for number in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


@pytest.mark.slow
def test_a_run_outlives_its_console(whole, cut):
    """Its disk is full: the log file says so, and the run ends well."""
    assert cut.run(FLAGS, _full) == 0
    log = (cut.folder / LOG_FILES["cpu"]).read_text()
    assert "standard output cannot be written any more" in log and "the run continues without it" in log
    assert same(whole(FLAGS), killing.outcome(cut.folder))


@pytest.mark.slow
def test_a_signal_in_a_validation_saves_what_came_before_it(whole, cut):
    tell = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    assert cut.run(FLAGS, at_call("validation_step", 1, tell)) == 143
    assert [path.name for path in RunFolder(cut.folder).checkpoints()] == ["checkpoint-2"]
    assert same(whole(FLAGS), cut.finish(FLAGS))


def test_slurms_signal_saves_and_puts_the_job_back_into_the_queue(cut, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    job = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "mine", "SLURM_PROCID": "0"}
    job |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    tell = lambda: os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731
    assert cut.run(FLAGS, at_call("training_step", 3, tell)) == 143
    assert asked.read_text() == "requeue 77\n"
    assert len(RunFolder(cut.folder).checkpoints()) == 1


@pytest.mark.parametrize(("number", "apart", "code"), [(signal.SIGINT, 0, 130), (signal.SIGTERM, 1.1, 143)])
def test_a_second_interrupt_does_not_wait(cut, number, apart, code):
    def twice():
        os.kill(os.getpid(), number)
        time.sleep(apart)
        os.kill(os.getpid(), number)

    assert cut.run(FLAGS, at_call("training_step", 3, twice)) == code
    assert RunFolder(cut.folder).checkpoints() == []


def test_two_sigterms_at_once_are_one(cut):
    twice = lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]  # noqa: E731
    assert cut.run(FLAGS, at_call("training_step", 3, twice)) == 143
    assert len(RunFolder(cut.folder).checkpoints()) == 1


def test_a_run_whose_loader_is_killed_reads_the_rest_itself(whole, cut):
    kill = lambda: [os.kill(child.pid, signal.SIGKILL) for child in psutil.Process().children()]  # noqa: E731
    assert cut.run(UNEVEN, at_call("training_step", 4, kill)) == 0, cut.log.read_text()
    assert "--num-workers 0" in cut.log.read_text() and "--shm-size" in cut.log.read_text()
    assert same(whole(UNEVEN), killing.outcome(cut.folder))


@pytest.mark.parametrize(
    ("number", "place", "code", "words"),
    [
        (signal.SIGTERM, "configure_model", 143, "where there is none, the same command with --overwrite"),
        (
            signal.SIGINT,
            "as_it_began",
            130,
            "nothing was trained yet; the same command with --overwrite starts",
        ),  # there general text is written
    ],
)
def test_a_signal_before_training_ends_the_run_at_once(cut, number, place, code, words):
    def tell():
        if number == signal.SIGINT:  # which a shell's background job ignores
            signal.signal(number, signal.default_int_handler)
        os.kill(os.getpid(), number)

    assert cut.run(DRIFT, at_call(place, 1, tell)) == code
    assert words in cut.log.read_text()
    assert RunFolder(cut.folder).checkpoints() == []
