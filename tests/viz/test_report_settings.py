"""How a run was set up: first what differs from the defaults."""

from folders import METRICS, rising, settings, write_run

from granite_scu.viz.report_settings import configuration
from granite_scu.viz.run_folder import read_run


def split(folder, **changes) -> tuple[str, str]:
    """What is in sight, and what is behind the switch."""
    run = read_run(write_run(folder, rising(), {"controller": "pi"}, settings(**changes), metrics=METRICS))
    sight, behind = configuration(run).split("<details>")
    return sight, behind


def test_what_differs_from_the_defaults_is_in_sight_and_the_rest_is_behind(tmp_path):
    changed = ["optimizer.learning_rate", "control.lambda_init", "optimizer.warmup_steps"]
    sight, behind = split(tmp_path / "run", changed=changed, given=changed[:2])
    assert "warmup_<wbr>steps" not in sight, "the data decided it"
    assert "learning_<wbr>rate" in sight and "<td>0.001</td>" in sight
    assert "lambda_<wbr>init" in sight and "<td>none</td>" in sight, "it was set to nothing"
    assert "rank" not in sight and "rank" in behind and "learning_<wbr>rate" in behind


def test_a_run_of_defaults_says_so(tmp_path):
    sight, _ = split(tmp_path / "run", changed=[], given=[])
    assert "All settings are the defaults." in sight


def test_a_run_that_does_not_say_what_was_changed_has_everything_behind(tmp_path):
    sight, behind = split(tmp_path / "run")
    assert "<table>" not in sight and "learning_<wbr>rate" in behind
