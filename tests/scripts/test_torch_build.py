"""Which build of PyTorch fits which card and driver, and the scripts that ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import torch_build
from scripts.torch_build import Card, NoBuildError, choose_build

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("capability", "driver", "build"),
    [
        ((7, 5), "580.65.06", "cu130"),
        ((8, 9), "581.08", "cu130"),
        ((9, 0), "610.43.02", "cu130"),
        ((10, 0), "580.82.07", "cu130"),
        ((12, 0), "580.65.06", "cu130"),
        ((8, 9), "550.90.12", "cu126"),
        ((9, 0), "525.60.13", "cu126"),
        ((7, 0), "580.65.06", "cu126"),  # CUDA 13 has no kernels for Volta, whatever the driver
        ((6, 0), "580.65.06", "cu126"),
        ((12, 0), "570.86.10", "cu129"),
        ((10, 0), "575.51.03", "cu129"),
    ],
)
def test_a_card_and_its_driver_get_the_build_that_runs_there(capability, driver, build):
    assert choose_build([Card("A GPU", driver, capability)]) == build


def test_one_build_serves_all_cards():
    mixed = [Card("Tesla V100", "580.65.06", (7, 0)), Card("RTX 4090", "580.65.06", (8, 9))]
    assert choose_build(mixed) == "cu126"
    both = [Card("Tesla V100", "580.65.06", (7, 0)), Card("RTX 5090", "580.65.06", (12, 0))]
    assert choose_build(both) == "cu129"
    with pytest.raises(NoBuildError, match="for all of Tesla P100, RTX 5090"):
        choose_build([Card("Tesla P100", "580.65.06", (6, 0)), Card("RTX 5090", "580.65.06", (12, 0))])


@pytest.mark.parametrize(
    ("cards", "windows", "words"),
    [
        ([], False, "lists no GPU"),
        ([Card("Tesla T4", "470.57.02", (7, 5))], False, "driver 470.57.02 is older than 525"),
        ([Card("RTX 5090", "565.57.01", (12, 0))], False, "driver 565.57.01 is too old for RTX 5090, which needs 570"),
        ([Card("RTX 5090", "572.16", (12, 0))], True, "needs 580 or newer; update it"),
    ],
)
def test_where_no_build_fits_it_says_what_to_do(cards, windows, words):
    with pytest.raises(NoBuildError) as refused:
        choose_build(cards, windows)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not cards or "nvidia.com/drivers" in str(refused.value)


def test_the_versions_are_those_of_the_constraints():
    assert f"torch=={torch_build.TORCH}" in (ROOT / "constraints.txt").read_text().splitlines()


# The scripts, over a nvidia-smi that is a shell script.


@pytest.fixture
def setup_gpu(tmp_path):
    """Runs scripts/setup_gpu.sh where nvidia-smi prints what it is given; without torch, in a bare interpreter."""

    def run(*arguments: str, says: str | None, code: int = 0) -> subprocess.CompletedProcess:
        if says is not None:
            smi = tmp_path / "nvidia-smi"
            smi.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n")
            smi.chmod(0o755)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # -S: no site-packages, so no torch
        python.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(python), "HOME": os.environ.get("HOME", "/")}
        script = str(ROOT / "scripts" / "setup_gpu.sh")
        return subprocess.run([script, *arguments], capture_output=True, text=True, env=environment)

    return run


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_script_prints_the_commands_that_it_would_run(setup_gpu):
    done = setup_gpu("--dry-run", says="NVIDIA GeForce RTX 5090, 575.51.03, 12.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "found NVIDIA GeForce RTX 5090, compute capability 12.0, driver 575.51.03" in done.stdout
    assert f"torch=={torch_build.TORCH} --index-url https://download.pytorch.org/whl/cu129" in done.stdout
    assert "--prove" in done.stdout and done.stdout.endswith("nothing was run\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("says", "code", "words"),
    [
        (None, 0, "no nvidia-smi, so no NVIDIA driver"),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "Driver/library version mismatch; restart"),
        ('Field "compute_cap" is not a valid field to query.', 2, "the driver is older than 495"),
    ],
)
def test_the_script_says_in_one_line_what_is_wrong(setup_gpu, says, code, words):
    done = setup_gpu("--dry-run", says=says, code=code)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


def test_a_build_is_proved_by_a_kernel(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_build.main(["--prove"]) == 1
    assert "finds no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a simulated GPU")
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: randn(*size).to(dtype))
    assert torch_build.main(["--prove"]) == 0
    assert "a simulated GPU: multiplies matrices" in capsys.readouterr().out
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: torch.full(size, 300.0, dtype=dtype))  # overflows
    assert torch_build.main(["--prove"]) == 1
    assert "multiplies wrongly" in capsys.readouterr().err
