"""What a run is told to use, on simulated machines."""

import logging

import pytest
from devices import A100, AMX, B200, CPU, P100, RTX_4090, T4, V100
from outcomes import refusal

from granite_scu.config.request import Request
from granite_scu.hardware.machine import resolve_accelerator, resolve_precision, resolve_request, slow_four_bits


@pytest.mark.parametrize(
    ("device", "fitting", "others"),
    [
        (P100, "32-true", ["16-mixed"]),
        (V100, "16-mixed", []),
        (T4, "16-mixed", ["32-true"]),
        (A100, "bf16-mixed", ["16-mixed"]),
        (RTX_4090, "bf16-mixed", []),
        (B200, "bf16-mixed", ["32-true"]),
        (CPU, "32-true", []),
        (AMX, "bf16-mixed", []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_precision_follows_the_device_and_one_that_it_has_is_taken_as_asked(device, fitting, others):
    assert resolve_precision(None, device) == resolve_precision("auto", device) == fitting
    for asked in (fitting, *others):
        assert resolve_precision(asked, device) == asked


@pytest.mark.parametrize(
    ("requested", "device", "names", "remedy"),
    [
        ("bf16-mixed", T4, "--precision bf16: Tesla T4 has compute capability 7.5", "--precision fp16"),
        ("bf16-mixed", P100, "compute capability 6.0", "--precision fp32"),
        ("bf16-mixed", CPU, "neither AMX nor AVX512-BF16", "--precision fp32"),
        ("16-mixed", CPU, "--precision fp16: fp16 needs a CUDA device", "--precision fp32"),
        ("16-mixed", AMX, "--precision fp16: fp16 needs a CUDA device", "--precision bf16"),
    ],
)
def test_a_precision_the_device_lacks_is_refused_with_one_that_works(requested, device, names, remedy):
    message = refusal(resolve_precision, requested, device)
    assert names in message and remedy in message


@pytest.mark.parametrize("requested", ["auto", "cuda", "gpu"])
def test_a_run_is_on_the_cpu_only_where_that_is_asked_for(machine, requested):
    machine(A100)
    assert (resolve_accelerator(requested), resolve_accelerator("cpu")) == ("cuda", "cpu")
    machine(CPU)
    assert resolve_accelerator("cpu") == "cpu"
    message = refusal(resolve_accelerator, requested, begins=f"--accelerator {requested}: no CUDA device")
    assert all(remedy in message for remedy in ("--accelerator cpu", "--test-run", "granite-scu check"))


def test_four_bits_under_fp32_are_warned_of_on_a_gpu_that_has_something_faster():
    assert "--precision bf16 or auto" in slow_four_bits(True, "32-true", RTX_4090)
    assert "than in fp16" in slow_four_bits(True, "32-true", T4)
    for asked in ((True, "bf16-mixed", RTX_4090), (False, "32-true", RTX_4090), (True, "32-true", CPU)):
        assert slow_four_bits(*asked) is None
    assert slow_four_bits(True, "32-true", P100) is None, "nothing is faster there"


def test_a_plan_for_a_card_has_the_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    asked = {"base.quantize_4bit": True, "trainer.accelerator": "cuda", "trainer.precision": "32-true"}
    resolve_request(Request.from_dotted(asked), RTX_4090)
    assert any(line.startswith("--precision fp32: with --4bit-quantization") for line in caplog.messages)
