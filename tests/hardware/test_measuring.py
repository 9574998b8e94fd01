"""The rate of matrix products, measured on this machine."""

import torch

from granite_scu.hardware import matmul_tflops


def test_the_rate_of_matrix_products_is_measured():
    assert 1e-4 < matmul_tflops("cpu", torch.float32, seconds=0.01) < 1e3


def test_measuring_leaves_the_runs_randomness_alone():
    before = torch.get_rng_state()
    matmul_tflops("cpu", torch.float32, seconds=0.001)
    assert torch.equal(before, torch.get_rng_state())
