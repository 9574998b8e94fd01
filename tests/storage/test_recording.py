"""Reading what a replay repeats."""

import json

import pytest

from granite_scu.storage.recording import read_recording, recorded_weight

RECORDS = [{"step": 4, "lambda": 0.2}, {"step": 8, "lambda": 0.3}, {"step": 10, "lambda": 0.4}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scu_history.json").write_text(json.dumps(RECORDS))
    return tmp_path


def written(folder, text: str):
    path = folder / "scu_history.json"
    path.write_text(text)
    return path


def test_a_folder_and_its_history_are_the_same(folder):
    expected = {"steps": (4, 8, 10), "lams": (0.2, 0.3, 0.4), "initial": 0.2}
    assert read_recording(folder) == read_recording(folder / "scu_history.json") == expected


def test_before_the_first_tick_acts_what_the_run_started_with(folder):
    (folder / "scu_config.json").write_text(json.dumps({"lambda_init": 0.7}))
    assert read_recording(folder)["initial"] == 0.7
    (folder / "scu_config.json").write_text(json.dumps({"initial_strength": 0.0, "lambda_init": 0.7}))
    assert read_recording(folder)["initial"] == 0.0


@pytest.mark.parametrize("given", ["NaN", "-3", '"0.5"', "[]", "1e31"])
def test_a_start_that_no_run_has_is_refused(folder, given):
    (folder / "scu_config.json").write_text(f'{{"initial_strength": {given}}}')
    with pytest.raises(
        ValueError, match=r"its lambda before the first tick, .* in scu_config\.json, is no number from"
    ):
        read_recording(folder)


RUN = {"actuator": "loss", "measure": "delta"}


@pytest.mark.parametrize("name", RUN)
def test_a_lambda_that_acted_otherwise_is_refused(folder, name):
    (folder / "scu_config.json").write_text(json.dumps(RUN))
    assert read_recording(folder, acting=RUN)["steps"] == (4, 8, 10)
    (folder / "scu_config.json").write_text(json.dumps(RUN | {name: "other"}))
    with pytest.raises(ValueError, match=f"one for --{name} other, and this run has {RUN[name]}; give --{name} other"):
        read_recording(folder, acting=RUN)
    assert read_recording(folder)["steps"] == (4, 8, 10)


def test_a_projection_that_set_no_lambda_is_refused(folder):
    (folder / "scu_config.json").write_text('{"controller": "projection"}')
    with pytest.raises(ValueError, match="is of a projection, which sets no lambda; give a run of another controller"):
        read_recording(folder)


@pytest.mark.parametrize(
    ("config", "weight"), [({"prior_sigma": 0.1, "n_tokens": 500}, 5.0), ({"prior_sigma": 0.1}, None), (None, None)]
)
def test_what_the_penalty_was_divided_by_is_recorded(folder, config, weight):
    if config:
        (folder / "scu_config.json").write_text(json.dumps(config))
    assert recorded_weight(folder) == (weight and pytest.approx(weight))


@pytest.mark.parametrize("config", ["{}", "[]", None])
def test_a_recording_that_does_not_say_how_lambda_acted_is_taken(folder, config):
    if config:
        (folder / "scu_config.json").write_text(config)
    assert read_recording(folder, acting=RUN)["initial"] == 0.2


def test_the_lines_of_a_crashed_run_are_read_but_for_a_torn_one(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "scu_history.jsonl").write_text(lines + '{"step": 12, "la')
    assert read_recording(tmp_path)["steps"] == (4, 8, 10)


@pytest.mark.parametrize(("total", "every"), [(10, 1), (14, 4), (11, 1)])
def test_a_recording_may_end_a_tick_before_the_run(folder, total, every):
    read_recording(folder, total, every)


def test_a_short_recording_is_refused(folder):
    with pytest.raises(ValueError, match=r"ends at step 10, short of this run's 15; set --max-steps 10"):
        read_recording(folder, 15, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{", r"scu_history\.json is not JSON; give a run folder"),
        ("[]", "holds no records"),
        ('[{"step": 1, "lambda": 0.1}, {"loss": 2}]', "record 2 has no step or no lambda; give"),
        ('[{"step": 1, "lambda": null}]', "record 1: its lambda None is no number from 0 to 1e"),
        ('[{"step": 1, "lambda": -1}]', "record 1: its lambda -1 is no number from 0 to 1e"),
        ('[{"step": 1, "lambda": 1e31}]', r"record 1: its lambda 1e\+31 is no number from 0 to 1e\+30; give another"),
        ('[{"step": -1, "lambda": 1}]', "record 1: its step -1 is no whole number from 0"),
        ('[{"step": 1.5, "lambda": 1}]', r"record 1: its step 1\.5 is no whole number"),
        ('[{"step": 2, "lambda": 1}, {"step": 1, "lambda": 1}]', "record 2 is of step 1, after one of step 2"),
    ],
)
def test_what_is_no_history_is_refused_in_one_line(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=words) as refusal:
        read_recording(path)
    assert "\n" not in str(refusal.value)


def test_what_is_missing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder; give a run folder"):
        read_recording(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds no scu_history\.json; give a run folder"):
        read_recording(tmp_path)
    (tmp_path / "scu_history.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not JSON"):
        read_recording(tmp_path)
