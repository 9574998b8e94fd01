"""What is said before a run: how far S can come, whether it fits, and whether its settings go together."""

import importlib.machinery

import pytest
from devices import A100, RTX_3060, RTX_4090

from granite_scu.cli import script_flags
from granite_scu.cli.requirements import AS_A_WHOLE, Check, can_start, with_the_run
from granite_scu.control import build
from granite_scu.hardware import machine as machine_
from granite_scu.training.preflight import beyond_the_bounds


@pytest.mark.parametrize(
    ("target", "bounds", "words"),
    [
        (0.004, {"lambda_max": 0.1}, "stay above it with lambda on that bound; raise --lambda-max to 3.2 or further"),
        (0.5, {"lambda_min": 0.3}, "stay below it with lambda on that bound; lower --lambda-min to 0.08 or further,"),
        (0.004, {"lambda_max": 1.1}, None),
        (0.5, {"lambda_min": 0.2}, None),
        (0.004, {}, None),
        (0.004, {"lambda_max": 0.1, "lambda_init": 0.05}, None),
    ],
)
def test_a_bound_far_from_the_lambda_that_is_expected_is_warned_of(target, bounds, words):
    said = beyond_the_bounds(build("pi", target_s=target, **bounds))
    assert said is None if words is None else words in said


def test_a_law_that_expects_no_lambda_is_not_warned_of():
    assert beyond_the_bounds(build("fixed", target_s=0.004, lambda_init=0.05)) is None


@pytest.fixture
def judged(machine):
    """The checks of a run on a simulated card, of which memory alone was looked at."""

    def judge(device, *argv) -> list[Check]:
        machine(device)
        request = script_flags.translate(["--data-dir", "stdlib-docs", *argv])[0].request()
        return with_the_run([Check("GPU memory", "12 GiB", None, False, "not yet known")], request)

    return judge


@pytest.mark.slow
def test_the_default_model_is_predicted_before_it_is_there(judged):
    (fits,) = judged(RTX_4090, "--hardware", "gpu_4090")
    assert fits.ok and not fits.remedy and " of 21.15 GiB" in fits.meaning


@pytest.mark.slow
def test_requirements_say_whether_the_run_fits_and_what_would(judged):
    (fits,) = judged(RTX_3060, "--model", "tiny-granite-h")
    assert fits.ok and not fits.remedy and " of 10.62 GiB" in fits.meaning
    (too_large,) = judged(RTX_3060, "--model", "tiny-granite-h", "--memory-fraction", "0.02")
    assert too_large.ok is None and too_large.remedy.startswith("try --batch-size")
    (unknown,) = judged(RTX_3060, "--model", "someone/model")
    assert unknown.meaning.startswith("not predicted before")


def test_requirements_find_settings_that_contradict_one_another(judged, monkeypatch):
    *_, check = judged(A100, "--fsdp")
    assert check.name == AS_A_WHOLE and check.blocks and check.remedy.startswith("--fsdp: one process")
    monkeypatch.setattr(machine_, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    assert can_start(judged(A100, "--attn", "auto"))


@pytest.mark.parametrize(
    ("flag", "file", "reason"),
    [
        ("--model", "config.json", "cannot be loaded"),
        ("--data-dir", "image.png", "holds only other files"),
        ("--adapter", "notes.txt", "is not a run folder"),
    ],
)
def test_what_cannot_be_read_is_a_lack_like_any_other(judged, tmp_path, flag, file, reason):
    (tmp_path / file).write_text("{")
    checks = judged(A100, "--model", "tiny-granite-h", flag, str(tmp_path))
    assert any(check.blocks and check.remedy.startswith(flag) and reason in check.remedy for check in checks)
