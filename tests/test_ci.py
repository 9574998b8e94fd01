"""The workflow names what is there, and no more rights than it needs."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_every_make_target_that_it_names_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for step in STEPS for target in re.findall(r"^\s*make ([\w-]+)", step.get("run", ""), re.MULTILINE)}
    assert named == {"setup", "lint", "test", "docs", "gpu-check"}
    assert named <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def test_the_oldest_torch_that_is_tried_is_the_oldest_that_is_supported():
    supported = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    steps = " ".join(step.get("run", "") for step in WORKFLOW["jobs"]["oldest-torch"]["steps"])
    assert f"torch=={supported}." in steps


def test_it_may_read_alone_and_every_job_ends():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all("permissions" not in job and job["timeout-minutes"] <= 60 for job in WORKFLOW["jobs"].values())


def test_actions_are_pinned_to_a_whole_version():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", name) for name in used)


def test_the_gpu_leg_waits_for_its_label():
    gpu = WORKFLOW["jobs"]["gpu"]
    assert gpu["runs-on"] == ["self-hosted", "gpu"]
    assert "contains(github.event.pull_request.labels.*.name, 'gpu')" in gpu["if"]
