import errno
import fcntl
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import refusal
from power import Disk

from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import (
    ANSWERS,
    DOCUMENTS,
    ELSEWHERE,
    HISTORY,
    HISTORY_LINES,
    LOCK,
    METRICS,
    MODEL_CARD,
    TRAINING_CONFIG,
    RunFolder,
    finite,
    read_json,
    require_writable_file,
)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder


def contents(path):
    return sorted(entry.name for entry in path.iterdir())


def refused(folder, **options) -> str:
    message = refusal(folder.check, **({"overwrite": False, "resuming": False} | options))
    assert str(folder.path) in message
    return message


# Who may write


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resuming": True}])
def test_a_folder_that_is_missing_or_empty_is_accepted_and_made_later(tmp_path, options):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check(**({"overwrite": False, "resuming": False} | options))
    assert contents(tmp_path) == []
    for _ in range(2):
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.check(overwrite=False, resuming=False)
        assert contents(folder.path) == []


def test_the_home_folder_may_be_abbreviated(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/run").path == tmp_path / "run"


def test_a_folder_that_is_not_empty_is_refused_but_a_run_may_be_replaced_or_gone_on_with(folder):
    (folder.path / TRAINING_CONFIG).write_text("{}")
    message = refused(folder)
    assert "--overwrite" in message and "--resume-from-checkpoint last" in message
    folder.check(overwrite=True, resuming=False)
    folder.check(overwrite=False, resuming=True)
    assert contents(folder.path) == [TRAINING_CONFIG]  # a check deletes nothing


def test_what_is_no_run_folder_is_never_overwritten(folder):
    (folder.path / "thesis.tex").write_text("years of work")
    assert "not a run folder" in refused(folder, overwrite=True)
    assert (folder.path / "thesis.tex").read_text() == "years of work"


def test_a_checkpoint_that_was_copied_into_a_folder_makes_it_no_run_folder(folder):
    """Else what is there would make way as a run's own: a README.md, other checkpoints."""
    (folder.path / "checkpoint-2").mkdir()
    assert "is no run folder (no training_config.json); name a new --output-dir" in refused(folder, resuming=True)


def test_what_no_run_has_written_is_neither_replaced_nor_cleared(folder):
    for name in (TRAINING_CONFIG, "notes.txt", "scu_history.json"):
        (folder.path / name).write_text("mine")
    assert "holds notes.txt, which no run has written" in refused(folder, overwrite=True)
    (folder.path / "notes.txt").rename(folder.path / "kept")
    (folder.path / "kept").unlink()
    for inside in ("logs/csv", "best", "checkpoint-3"):
        (folder.path / inside).mkdir(parents=True)
        (folder.path / inside / "mine.txt").write_text("mine")
        assert f"holds {inside}/mine.txt, which no run has written" in refused(folder, overwrite=True)
        (folder.path / inside / "mine.txt").unlink()
    for unfinished in (".new.77.tmp", "final/.new.77.tmp"):  # that a killed run leaves
        (folder.path / unfinished).mkdir(parents=True)
        (folder.path / unfinished / "tokenizer.json").write_text("half")
    folder.check(overwrite=True, resuming=False)
    (folder.path / "notes.txt").write_text("mine")
    folder.clear()
    assert contents(folder.path) == ["notes.txt"]


@pytest.mark.parametrize("name", [LOCK, HISTORY_LINES, "logs/training.log", "checkpoint-4/best/adapter_config.json"])
def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(folder, name):
    place = folder.path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(place)
    assert f"{place}: is neither a file nor a folder" in refused(folder, resuming=True)


def test_a_file_without_end_is_refused_by_its_size(folder):
    (folder.path / TRAINING_CONFIG).write_text("{}")
    with (folder.path / DOCUMENTS).open("wb") as file:
        file.truncate(1 << 30)  # of forty million documents
    folder.check(overwrite=False, resuming=True)
    for name in (HISTORY_LINES, TRAINING_CONFIG):
        with (folder.path / name).open("wb") as file:
            file.truncate(40 << 30)
    assert "42,949,672,960 bytes" in refused(folder, resuming=True)
    reads = {TRAINING_CONFIG: lambda: read_json(folder.path / TRAINING_CONFIG), HISTORY_LINES: folder.read_history}
    for name, read in reads.items():
        with pytest.raises(UserError, match=f"{name}: cannot be read .*42,949,672,960 bytes"):
            read()


def test_what_is_no_folder_or_lies_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        assert f"{tmp_path / 'file'} is a file, and not a folder" in refused(RunFolder(path))
    assert "cannot be written" in refused(RunFolder(tmp_path / "link"))


def test_a_file_that_is_written_to_is_a_regular_one_and_its_links_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("printed").touch()
    for name, of in (("to-pipe", "pipe"), ("circle", "circle"), ("new", "target"), ("to-printed", "printed")):
        Path(name).symlink_to(of)
    for name in ("pipe", "to-pipe", "circle"):
        assert "is no regular file" in refusal(require_writable_file, "--out", Path(name), begins=f"--out {name}: ")
    stdout = os.dup(1)
    with open("printed", "w") as printed:
        os.dup2(printed.fileno(), 1)
        try:
            assert "this command prints to" in refusal(require_writable_file, "--csv", Path("to-printed"))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert require_writable_file("--out", Path("to-printed")) == tmp_path / "printed"
    assert require_writable_file("--out", Path("new")) == tmp_path / "target"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(folder):
    folder.path.chmod(0o500)
    for refused in (folder, RunFolder(folder.path / "a" / "b")):
        assert "cannot be written" in refused(refused)


def test_clearing_empties_the_folder_and_follows_no_link(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "log").write_text("")
    (folder.path / TRAINING_CONFIG).write_text("{}")
    (folder.path / "best").symlink_to(outside)
    folder.clear()
    assert contents(folder.path) == []
    assert contents(outside) == ["kept"]


def test_the_mark_of_a_run_folder_goes_last(folder, monkeypatch):
    for name in ("adapter_config.json", TRAINING_CONFIG, "config.yaml"):
        (folder.path / name).write_text("{}")
    unlink, gone = Path.unlink, []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: (gone.append(path.name), unlink(path)))
    folder.clear()
    assert len(gone) == 3 and gone[-1] == TRAINING_CONFIG


def test_two_processes_do_not_share_a_folder(folder):
    """The lock goes with the process that holds it, however that ends."""
    line = "import sys, time; from granite_scu.storage.run_folder import RunFolder; folder = RunFolder(sys.argv[1]); "
    line += "folder.lock(); print('locked', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", line, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    who = rf"another process \({other.pid} on {re.escape(socket.gethostname())}\) is running in it"
    with pytest.raises(UserError, match=f"--output-dir {folder.path}: {who}.*remove {folder.path / LOCK}"):
        folder.lock()
    other.kill()
    other.wait()
    folder.lock()
    folder.lock()  # a process may have its own folder
    folder.unlock()


def test_where_what_is_locked_cannot_be_written_a_run_can_start(folder, monkeypatch):
    """As on Windows, where the lock is held of the bytes themselves."""

    def held(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "write_text", held)
    folder.lock()
    folder.unlock()


def test_a_file_system_without_locks_is_named(folder, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UserError, match=rf"--output-dir {folder.path}: .*No locks available.*another file system"):
        folder.lock()


def test_what_a_kill_left_half_written_is_swept(folder):
    (folder.path / ".checkpoint-5.123.tmp" / "best").mkdir(parents=True)
    (folder.path / "best").mkdir()
    (folder.path / "best" / ".validation.json.7.tmp").write_text("half")
    (folder.path / "kept.tmp").write_text("")
    (folder.path / ".best.7.old").mkdir()
    (folder.path / ".final.7.old" / "adapter").mkdir(parents=True)  # whose successor has not taken its place
    folder.sweep()
    assert sorted(path.name for path in folder.path.rglob("*")) == ["adapter", "best", "final", "kept.tmp"]


# JSON


def test_numbers_that_json_cannot_say_become_null():
    value = {"a": math.nan, "b": [1.0, math.inf, (-math.inf, 2)], "c": {"d": True, "e": None, "f": "NaN"}}
    assert finite(value) == {"a": None, "b": [1.0, None, [None, 2]], "c": {"d": True, "e": None, "f": "NaN"}}


def test_a_json_file_is_written_whole_or_not_at_all(folder):
    folder.write_json("metrics.json", {"s": math.nan, "steps": 3})
    assert json.loads((folder.path / "metrics.json").read_text()) == {"s": None, "steps": 3}
    with pytest.raises(TypeError):
        folder.write_json("metrics.json", {"s": object()})
    assert json.loads((folder.path / "metrics.json").read_text()) == {"s": None, "steps": 3}
    assert contents(folder.path) == ["metrics.json"]


# The history


def record(step: int, s: float = 0.5) -> dict:
    return {"step": step, "s": s}


def test_a_record_is_on_the_disk_once_it_is_appended(folder):
    assert folder.read_history() == []
    folder.append_history(record(1))
    folder.append_history(record(2, math.nan))
    lines = (folder.path / HISTORY_LINES).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record(1), {"step": 2, "s": None}]
    assert folder.read_history() == [record(1), {"step": 2, "s": None}]


def test_the_records_that_a_checkpoint_counts_on_outlive_a_power_cut(folder, tmp_path, monkeypatch):
    disk = Disk(folder.path)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    for step in (1, 2):
        folder.append_history(record(step))
        folder.sync_history()
        for names_first in (False, True):
            left = RunFolder(disk.after_a_cut(tmp_path / "left", names_first))
            assert left.read_history() == folder.read_history()


def test_a_damaged_line_is_named(folder):
    for step in (1, 2):
        folder.append_history(record(step))
    lines = folder.path / HISTORY_LINES
    lines.write_bytes(b"\xff" + lines.read_bytes()[1:])
    with pytest.raises(UserError, match=rf"{HISTORY_LINES}: line 1 is damaged"):
        folder.read_history()


def test_a_resumed_run_appends_after_its_checkpoint(folder):
    for step in (1, 2, 3):
        folder.append_history(record(step))
    lines = folder.path / HISTORY_LINES
    lines.write_text(lines.read_text()[:-5])
    assert folder.read_history() == [record(1), record(2)], "without the line that a crash tore"
    folder.truncate_history(2)
    folder.append_history(record(3, 0.25))
    assert folder.read_history() == [record(1), record(2), record(3, 0.25)]


def test_a_finished_run_can_be_gone_on_with(folder):
    for step in (1, 2, 3):
        folder.append_history(record(step))
    assert folder.finish_history() == folder.read_history() == [record(1), record(2), record(3)]
    assert contents(folder.path) == [HISTORY]
    folder.write_json(METRICS, {"steps": 3})
    for name in (MODEL_CARD, ANSWERS, ELSEWHERE):
        folder.write_text(name, "of three steps")
    assert folder.finished
    folder.truncate_history(2)
    assert contents(folder.path) == [HISTORY_LINES]  # it does not look finished
    folder.append_history(record(3, 0.25))
    assert folder.finish_history() == [record(1), record(2), record(3, 0.25)]
    assert contents(folder.path) == [HISTORY]


# Checkpoints


def test_a_tree_that_cannot_be_copied_whole_says_which_file_and_why(tmp_path):
    """A disk that is full, or a limit on the size of files: the library has a list of texts in place of an error."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "big").write_bytes(bytes(10_000))
    code = f"""
import resource, shutil
from pathlib import Path
from granite_scu.storage.atomic import replacing
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with replacing(Path({str(tmp_path / "to")!r})) as temporary:
        shutil.copytree({str(tmp_path / "from")!r}, temporary)
except OSError as error:
    print(error.errno, error.strerror, Path(error.filename).name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{errno.EFBIG} {os.strerror(errno.EFBIG)} big\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_checkpoints_are_listed_by_step_and_half_written_ones_are_not(folder):
    others = (".checkpoint-300.17.tmp", "checkpoint-best", "checkpoint-\N{SUPERSCRIPT TWO}", "checkpoint-4x", "logs")
    for name in ("checkpoint-1000", "checkpoint-200", *others):
        (folder.path / name).mkdir()
    assert [path.name for path in folder.checkpoints()] == ["checkpoint-200", "checkpoint-1000"]


def test_what_a_run_leaves_that_was_killed_at_its_start_is_no_run(folder):
    for name in (LOCK, ".training_config.json.77.tmp"):
        (folder.path / name).write_text("")
    folder.check(overwrite=False, resuming=False)
    (folder.path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        folder.check(overwrite=False, resuming=False)


def test_a_link_that_leads_out_of_the_folder_is_refused_before_anything_is_written(tmp_path):
    """A run that goes on in a stranger's folder would write through it."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    (folder / "logs").mkdir(parents=True)
    (folder / TRAINING_CONFIG).write_text("{}")
    victim.write_text("mine")
    (folder / "inside").symlink_to("logs")
    RunFolder(folder).check(overwrite=False, resuming=True)
    (folder / "chat_template.jinja").symlink_to(victim)
    with pytest.raises(UserError, match=r"chat_template.jinja is a link that leads out of the folder"):
        RunFolder(folder).check(overwrite=False, resuming=True)
