"""Peaks against the figures of the vendor's sheets, and what takes their place."""

import devices
import pytest
import torch

from granite_scu.hardware.peaks import matmul_tflops, peak_flops, printed_peak


@pytest.mark.parametrize(
    ("device", "half", "single"),
    [
        ("T4", 65, 8.1),
        ("V100", 125, 15.7),
        ("V100_32", 112, 14),
        ("RTX_4090", 165.2, 82.6),
        ("A100", 312, 19.5),
        ("H200X8", 989, 67),
        ("B200", 2250, 75),
        ("RTX_5090", 209.5, 104.8),
    ],
)
def test_a_known_card_has_the_dense_figures_of_its_sheet(device, half, single):
    device = getattr(devices, device)
    for precision, tera in (("bf16-mixed", half), ("16-mixed", half), ("32-true", single)):
        peak = peak_flops(device, precision)
        assert peak.flops == pytest.approx(tera * 1e12) and "NVIDIA" in peak.source


@pytest.mark.parametrize(
    ("device", "tera"), [("A100", 156), ("A30X2", 82.5), ("RTX_3090", 35.6), ("RTX_4090", 82.6), ("H100", 494.5)]
)
def test_tf32_has_the_figure_of_its_sheet(device, tera):
    assert peak_flops(getattr(devices, device), "32-true", tf32=True).flops == pytest.approx(tera * 1e12)
    assert peak_flops(getattr(devices, device), "bf16-mixed", tf32=True).flops > tera * 1e12


def test_variants_are_told_apart():
    pcie, nvl = devices.gpu("NVIDIA H100 PCIe", 79.0, (9, 0)), devices.gpu("NVIDIA H200 NVL", 139.0, (9, 0))
    assert peak_flops(pcie, "bf16-mixed").flops == 756e12
    assert peak_flops(nvl, "bf16-mixed").flops == 835e12
    assert peak_flops(devices.P100, "16-mixed").flops == 18.7e12
    assert peak_flops(devices.gpu("Tesla P100-SXM2-16GB", 16.0, (6, 0)), "16-mixed").flops == 21.2e12
    assert peak_flops(devices.gpu("NVIDIA GB200", 178.0, (10, 0)), "bf16-mixed").flops == 2250e12


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "Quadro P1000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_what_only_begins_as_a_card_is_called_and_a_part_of_one_have_not_its_figure(name):
    assert printed_peak(devices.gpu(name, 5.0, (8, 0)), "bf16-mixed") is None


def test_a_cpu_is_measured_once():
    peak = peak_flops(devices.CPU, "32-true")
    assert 1e8 < peak.flops < 1e15 and peak.source.startswith("measured")
    assert peak_flops(devices.CPU, "32-true") == peak


def test_the_rate_of_matrix_products_is_measured_and_the_runs_randomness_left_alone():
    before = torch.get_rng_state()
    assert 1e-4 < matmul_tflops("cpu", torch.float32, seconds=0.01) < 1e3
    assert torch.equal(before, torch.get_rng_state())
