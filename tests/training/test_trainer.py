"""What a run sets in PyTorch besides its own numbers."""

import os
import subprocess
import sys

import pytest
from devices import A100, CPU

from granite_scu.hardware.machine import Machine
from granite_scu.training.trainer import _cudnn_benchmark


@pytest.mark.parametrize(
    ("device", "asked", "deterministic", "searches"),
    [
        (A100, None, False, True),
        (A100, None, None, True),
        (A100, None, True, False),
        (A100, None, "warn", False),
        (A100, False, False, False),
        (CPU, None, False, False),
    ],
)
def test_cudnn_searches_for_the_fastest_convolution_on_a_gpu(device, asked, deterministic, searches):
    found = Machine(device, device.kind, "bf16-mixed", 1, 1, "sdpa", "auto")
    assert _cudnn_benchmark({"benchmark": asked, "deterministic": deterministic}, found) is searches


@pytest.mark.parametrize(
    ("of_the_user", "segments"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ],
)
def test_segments_of_a_gpus_memory_grow_unless_the_user_says_otherwise(of_the_user, segments):
    others = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    code = "import os, granite_scu; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    done = subprocess.run([sys.executable, "-c", code], env=others | of_the_user, capture_output=True, text=True)
    assert done.stdout.strip() == segments
