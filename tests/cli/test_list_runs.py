"""The list of runs, from folders as runs leave them: finished, cut off, damaged."""

import json
import os
import re

import pytest

from granite_scu.cli import list_runs as runs
from granite_scu.cli import main as commands


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder's files."""

    def make(name, time, *, finished=True, ticks=3, controller="pi", base=5.5, adapter=5.0, rate=1000.0):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        files = {
            "training_config.json": {"plan": {"steps": 30}, "base": {"name": "tiny-granite-h"}},
            "scu_config.json": {"controller": controller, "target_s": 0.05},
        }
        tick = {"s_target": 0.05, "tokens_per_s": rate}
        records = [tick | {"step": 10 * n, "s_ema": 0.01 * n, "lambda": 2.0 / n} for n in range(1, ticks + 1)]
        if finished:
            files |= {
                "scu_history.json": records,
                "scu_metrics.json": {
                    "steps": 30,
                    "base_test_bpt": base,
                    "adapter_test_bpt": adapter,
                    "tokens_per_s": rate,
                    "stopped": {"reason": "max_steps"},
                    "best_val_bpt": 5.1,
                    "best_val_step": 40,
                },
            }
        else:
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / "scu_history.jsonl").write_text(lines + '{"step": 99, "s_')
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
        for file in folder.iterdir():
            os.utime(file, (time, time))
        return folder

    return make


@pytest.fixture
def listed(capsys):
    def listed(*argv) -> tuple[int, str, str]:
        code = commands.main(["runs", *map(str, argv)])
        return code, *capsys.readouterr()

    return listed


def test_each_run_says_what_its_files_do(make_run, tmp_path):
    finished = runs.summarise(make_run("finished", 2e9))
    assert finished.items() >= {
        "finished": True, "step": 30, "steps": 30, "stopped": "max_steps", "controller": "pi", "s_target": 0.05,
        "s": 0.03, "strength": 2 / 3, "base_bpt": 5.5, "adapter_bpt": 5.0, "saved_bpt": 0.5, "best_val_bpt": 5.1,
        "best_val_step": 40, "tokens_per_s": 1000.0,
    }.items()  # fmt: skip
    cut_off = runs.summarise(make_run("cut-off", 2e9, finished=False, ticks=2))
    assert cut_off.items() >= {"finished": False, "step": 20, "s": 0.02, "base_bpt": None}.items()
    not_begun = runs.summarise(make_run("not-begun", 2e9, finished=False, ticks=0))
    assert not_begun.items() >= {"finished": False, "step": 0, "s": None, "s_target": 0.05}.items()


def test_newest_first_or_as_asked_with_what_is_unknown_last(make_run, tmp_path, listed):
    make_run("old", 1e9, adapter=4.0, rate=10.0)
    make_run("deep/new", 2e9, adapter=5.0, rate=30.0)
    make_run("cut", 1.5e9, finished=False, rate=20.0)

    def order(*argv):
        code, out, err = listed(tmp_path, "--json", *argv)
        assert (code, err) == (0, "")
        return [os.path.relpath(run["path"], tmp_path) for run in json.loads(out)["runs"]]

    assert order() == order("--sort", "time") == ["deep/new", "cut", "old"]
    assert order("--sort", "name") == ["cut", "deep/new", "old"]
    assert order("--sort", "bpt") == order("--sort", "saved") == ["old", "deep/new", "cut"]
    assert order("--sort", "speed") == ["deep/new", "cut", "old"]


def test_the_table(make_run, tmp_path, listed):
    make_run("[mine]", 2e9)
    make_run("cut", 1.5e9, finished=False, ticks=1, controller="fixed")
    code, out, _ = listed(tmp_path)
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    mine = next(row for row in rows if row[:1] == ["[mine]"])
    assert mine[3:] == ["finished", "pi", "5.00%", "3.00%", "0.667", "5.5000", "->", "5.0000", "+0.5000", "1,000"]
    cut = next(row for row in rows if row[:1] == ["cut"])
    assert cut[3:] == ["unfinished,", "10/30", "fixed", "5.00%", "1.00%", "2", "-", "-", "1,000"]


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_run_and_state_are_readable_however_narrow_the_terminal_is(make_run, tmp_path, listed, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    for each in ("plain-seed-1", "held-seed-1"):
        make_run(each, 2e9, finished=False, ticks=1)
    out = re.sub(r"\x1b\[[\d;]*m", "", listed(tmp_path)[1])
    rows = [line for line in out.splitlines() if "seed" in line]
    assert "…" not in out and [row.split()[0] for row in rows] == ["held-seed-1", "plain-seed-1"]
    assert columns < 40 or all("unfinished, 10/30" in row for row in rows)
    assert ("left out, for the terminal is narrow: base -> adapter, saved" in " ".join(out.split())) == (columns < 120)


def test_linked_runs_are_listed_once(make_run, tmp_path, listed):
    make_run("elsewhere/far", 2e9)
    make_run("runs/near", 2e9)
    for name, of in (("a-link", "elsewhere/far"), ("latest", "runs/near"), ("around", "runs")):
        (tmp_path / "runs" / name).symlink_to(tmp_path / of)
    names = [os.path.basename(run["path"]) for run in json.loads(listed(tmp_path / "runs", "--json")[1])["runs"]]
    assert sorted(names) == ["a-link", "near"]


def test_drift_has_a_column_where_a_run_has_any(make_run, tmp_path, listed):
    folder = make_run("held", 2e9)
    assert "drift" not in listed(tmp_path)[1]
    metrics = json.loads((folder / "scu_metrics.json").read_text()) | {"drift": {"share": 0.018, "budget": 0.02}}
    (folder / "scu_metrics.json").write_text(json.dumps(metrics))
    asked = json.loads((folder / "training_config.json").read_text()) | {"drift": {"max_drift": 0.02}}
    (folder / "training_config.json").write_text(json.dumps(asked))
    make_run("other", 1e9)
    rows = {line.split()[0]: line.split() for line in listed(tmp_path)[1].splitlines() if line.split()}
    assert "1.80% of 2.00%" in " ".join(rows["held"]) and rows["other"][5:9] == ["5.00%", "3.00%", "-", "0.667"]


def test_broken_folders_are_named_and_not_fatal(make_run, tmp_path, listed):
    make_run("sound", 2e9)
    (make_run("torn", 2e9) / "scu_metrics.json").write_text('{"steps": 3')
    (make_run("unmarked", 2e9) / "training_config.json").unlink()
    (make_run("emptied", 2e9) / "training_config.json").write_text("{}")
    (make_run("listed", 2e9) / "scu_config.json").write_text("[]")
    (make_run("gibberish", 2e9, finished=False) / "scu_history.jsonl").write_text("\0\n")
    make_run("worded", 2e9, rate="fast")
    code, out, err = listed(tmp_path)
    assert (code, err) == (0, "")
    broken = {line.split(": ")[1]: line for line in out.splitlines() if line.startswith("broken: ")}
    assert {os.path.basename(path) for path in broken} == {
        "torn",
        "unmarked",
        "emptied",
        "listed",
        "gibberish",
        "worded",
    }
    assert "tokens_per_s is no number in its files, but 'fast'" in broken[str(tmp_path / "worded")]
    assert "training_config.json: cannot be read" in broken[str(tmp_path / "unmarked")]
    assert "'plan' is missing" in broken[str(tmp_path / "emptied")]
    assert "sound" in out


def test_nothing_there(tmp_path, listed):
    for argv, words in (((tmp_path,), "holds no run folder"), ((tmp_path / "none",), "no such folder")):
        code, out, err = listed(*argv)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
    code, _, err = listed(tmp_path, "--sort", "colour")
    assert (code, err.count("\n")) == (2, 1)
    assert "--sort" in err


@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: os.truncate(path, 40 << 30)])
@pytest.mark.parametrize("name", ["training_config.json", "tokenizer.json"])
def test_a_pipe_or_a_file_without_end_hides_no_other_run(make_run, tmp_path, listed, spoil, name):
    make_run("right", 1e9)
    file = make_run("wrong", 2e9) / name
    file.unlink(missing_ok=True)
    if spoil is not os.mkfifo:
        file.touch()
    spoil(file)
    code, out, _ = listed(tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and [run["path"] for run in found["runs"]] == [str(tmp_path / "right")]
    assert [(run["path"], name in run["reason"]) for run in found["broken"]] == [(str(tmp_path / "wrong"), True)]
