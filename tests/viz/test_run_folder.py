"""What is read besides the history: validations of every leg, settings, warnings."""

import os

import numpy as np
import pytest
from folders import record, settings, write_csv, write_run

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import only_files
from granite_scu.storage.run_folder import LOG_FILES
from granite_scu.viz.run_folder import read_measured_run, read_run


def test_validations_stand_at_the_step_they_were_made_after(finished):
    assert read_run(finished).validations == ((100, 6.1), (200, 5.95), (300, 5.92), (400, 5.9)), "the last in metrics"


def test_a_resumed_run_did_again_what_came_after_its_checkpoint(cut_off):
    leg = cut_off / "logs" / "csv" / "from-checkpoint-100" / "metrics.csv"
    write_csv(cut_off / "logs" / "csv" / "metrics.csv", [(50, 6.3), (100, 6.1), (150, 7.0), (175, 7.1)])
    write_csv(leg, [(150, 6.0), (200, 5.9)])
    write_csv(leg.parents[1] / "from-checkpoint-175" / leg.name, [(200, 5.8)])
    for log in (cut_off / "logs" / "csv").rglob(leg.name):
        os.utime(log, (0, 0))  # a copy keeps no times
    assert read_run(cut_off).validations == ((50, 6.3), (100, 6.1), (150, 6.0), (200, 5.8))


def test_a_torn_line_of_the_log_is_left_out(cut_off):
    with (cut_off / "logs" / "csv" / "metrics.csv").open("a") as file:
        file.write(",199,5.")
    assert read_run(cut_off).validations == ((100, 6.1),)


def test_a_damaged_log_is_named(cut_off):
    (cut_off / "logs" / "csv" / "metrics.csv").write_text("step,val_bpt\nx,5.0\n")
    with pytest.raises(UserError, match=r"metrics\.csv: not the CSV log of a run"):
        read_run(cut_off)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("logs/csv/metrics.csv", "step,val_bpt\n1," + "x" * 200_000 + "\n", r"metrics\.csv: not the CSV log of a run"),
        ("scu_history.jsonl", '{"step": 1' + "0" * 400 + "}\n", "a number of 401 digits"),
        ("scu_history.jsonl", '{"step": 1, "s_ema": [1]}\n', "not records of ticks, each with a step"),
        ("scu_metrics.json", '{"final_val_bpt": 1' + "0" * 400 + "}", "a number of 401 digits"),
    ],
)
def test_what_a_stranger_wrote_there_is_refused_by_name(cut_off, file, text, words):
    (cut_off / file).write_text(text)
    with pytest.raises(UserError, match=words):
        read_run(cut_off)


def test_a_pipe_is_not_waited_for(cut_off):
    (cut_off / "logs" / "csv" / "metrics.csv").unlink()
    os.mkfifo(cut_off / "logs" / "csv" / "metrics.csv")
    with pytest.raises(UserError, match=r"metrics\.csv: cannot be read \(is no file"):
        read_run(cut_off)
    with pytest.raises(UserError, match=r"metrics\.csv: is neither a file nor a folder"):
        only_files(cut_off)


def test_warnings_are_those_of_the_log_with_all_their_lines(finished):
    log = "00:00:00,000 INFO step 10\n{0} WARNING first\n{0} INFO x\n{0} ERROR second\n  its cause\n{0} INFO y\n"
    (finished / LOG_FILES["cpu"]).write_text("2026-01-01 " + log.format("2026-01-01 00:00:01,000"))
    assert read_run(finished).warnings == ("first", "second\n  its cause")
    (finished / LOG_FILES["cuda"]).write_text("2026-01-02 00:00:00,000 WARNING third\n")
    assert read_run(finished).warnings == ("first", "second\n  its cause", "third")


def test_a_run_that_measured_nothing_is_refused_by_what_draws(tmp_path):
    history = [record(10, s=None, s_ema=None, data_bpt=None), record(20, s=None, s_ema=None, data_bpt=float("nan"))]
    folder = write_run(tmp_path / "run", history, {}, settings())
    assert not read_run(folder).measured
    with pytest.raises(UserError, match="nothing was measured in its 2 ticks"):
        read_measured_run(folder)


def test_a_field_that_is_no_number_is_named(tmp_path):
    folder = write_run(tmp_path / "run", [record(10, s="high")], {}, settings())
    with pytest.raises(UserError, match="run: s is not a number in every record"):
        read_run(folder).column("s")
    assert np.isfinite(read_run(folder).column("lambda")).all()
