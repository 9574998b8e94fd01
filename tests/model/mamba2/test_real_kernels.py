"""Runs ``real_kernels`` and ``compiling`` in processes of their own: they change Triton as it is imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("triton", "fla", "mamba_ssm", "einops")
NEEDS_PACKAGES = pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason="needs the packages that make test-slow installs"
)


@pytest.mark.slow
@NEEDS_PACKAGES
def test_the_real_kernels_are_right():
    file = Path(__file__).with_name("real_kernels.py")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(Path(sys.prefix) / "hub")])
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(line, env=interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


# On Turing ptxas takes minutes for each of mamba-ssm's kernels; there a run does not try them.
CARDS = [("fla-core", capability) for capability in (75, 80, 86, 89, 90, 100, 120)]
CARDS += [("mamba-ssm", capability) for capability in (80, 86, 89, 90, 100, 120)]


@pytest.mark.slow
@NEEDS_PACKAGES
@pytest.mark.parametrize(("package", "capability"), CARDS)
def test_the_real_kernels_compile_and_fit_every_card(package, capability):
    """What the interpreter cannot show: Triton's compiler and ptxas take them, and shared memory is enough."""
    file = Path(__file__).with_name("compiling.py")
    paths = os.pathsep.join([str(file.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, str(file), package, str(capability)]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["failed"] == [] and 0 < report["largest"] <= report["shared"]
    scan = "chunk_fwd_kernel_o" if package == "fla-core" else "_chunk_scan_fwd_kernel"
    assert scan in report["compiled"] and any("bwd" in name for name in report["compiled"])
