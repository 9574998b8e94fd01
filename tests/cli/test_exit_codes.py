"""What becomes of an exception: one line and an exit code."""

import gc
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from granite_scu.cli import exit_codes
from granite_scu.cli.main import main
from granite_scu.config.errors import WRONG_REQUEST, RunFailed, Stopped, UserError


def test_debug_shows_where_an_error_came_from(capsys):
    assert main(["fit", "--control.kd=1", "--debug"]) == WRONG_REQUEST
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.splitlines()[-1].startswith("error: ")


def _because_of(cause: OSError) -> UserError:
    refused = UserError("--cache-dir a: cannot be read; name another folder")
    refused.__cause__ = cause
    return refused


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("--seed -1: too small"), 2, "--seed -1: too small"),
        (UserError(f"--seed {'9' * 5000}: too large"), 2, f"--seed {'9' * 100}...{'9' * 49}: too large"),
        (RunFailed("step 3: not finite"), 1, "step 3: not finite"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C; steps since the last checkpoint are lost; where there is one,"),
        (Stopped("stopped by SIGTERM after step 3", 143), 143, "stopped by SIGTERM after step 3"),
        (FileNotFoundError(2, "No such file", b"run/h.jsonl"), 1, "run/h.jsonl: No such file; it was deleted or moved"),
        (_because_of(OSError(28, "No space left on device", "a")), 1, "--cache-dir a: cannot be read; name another"),
        (_because_of(OSError(24, "Too many open files", "a")), 1, "Too many open files: 'a'; allow more open files"),
        (RuntimeError("two\n  lines"), 1, "RuntimeError: two lines; --debug shows where"),
        (RuntimeError("very " * 1000 + "long"), 1, "very ...; --debug shows where"),
        (ZeroDivisionError(), 1, "ZeroDivisionError: no message"),
    ],
)
def test_an_exception_becomes_an_exit_code_and_one_line(error, code, words, capsys):
    def run():
        raise error

    assert exit_codes.exit_code_of(run, debug=False) == code
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.startswith("error: ") != (code > 128)  # what somebody asked for is none
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("home", "words"), [(None, "no home folder of this user is known"), ("/", "begins with ~ and no")]
)
def test_a_home_that_is_not_known_is_told_from_a_user_that_is_not(monkeypatch, home, words, capsys):
    monkeypatch.delenv("HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where nobody's home is known
    assert exit_codes.exit_code_of(lambda: Path.home() and 0, debug=False) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--general-data", "~nosuchuser/x"], ["--general-data=~nosuchuser/x"]])
def test_a_user_that_there_is_not_is_named_with_the_flag(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["granite-scu", "train", "--output-dir", "~/run", *given])
    assert exit_codes.exit_code_of(lambda: Path("~nosuchuser/x").expanduser() and 0, debug=False) == 2
    assert "--general-data ~nosuchuser/x: begins with ~ and no user of this machine" in capsys.readouterr().err


def test_ctrl_c_while_libraries_are_imported_has_written_nothing(capsys):
    def run():
        with exit_codes.importing():
            raise KeyboardInterrupt

    assert exit_codes.exit_code_of(run, debug=False) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C; nothing was written\n"


def test_no_garbage_is_collected_while_libraries_are_imported_and_what_they_made_is_left_alone():
    with exit_codes.importing():
        collects = gc.isenabled()
    kept = gc.get_freeze_count()
    gc.unfreeze()
    assert not collects and gc.isenabled() and kept > 0


def test_a_thread_that_cannot_write_prints_no_traceback(capsys, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    def run():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        return 0

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own
    for debug, lines in ((False, 0), (True, 1)):
        assert exit_codes.exit_code_of(run, debug) == 0
        assert capsys.readouterr().err.count("Traceback") == lines


def test_a_process_that_sigterm_ends_outside_of_training_waits_for_no_other():
    with pytest.raises(Stopped) as stopped, exit_codes._hooks(debug=False, how_to_continue=""):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.alone


def test_slurms_signal_before_the_end_does_not_end_what_is_not_training(capfd, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.getsignal(signal.SIGUSR1)
    assert exit_codes.exit_code_of(lambda: os.kill(os.getpid(), signal.SIGUSR1) or 0, debug=False) == 0
    assert "SIGUSR1: nothing is being trained" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) is before
