"""Runs ``real_kernels`` in a process of its own: Triton must find that it is to interpret before it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("triton", "fla", "mamba_ssm", "einops")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs the packages that make test-slow installs")
def test_the_real_kernels_are_right():
    file, interpreted = Path(__file__).with_name("real_kernels.py"), os.environ | {"TRITON_INTERPRET": "1"}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(line, env=interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
