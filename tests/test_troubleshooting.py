"""What docs/troubleshooting.md quotes is what granite-scu says."""

from pathlib import Path

import pytest
import torch
from devices import T4

from granite_scu.config.errors import Diverged
from granite_scu.config.request import Request
from granite_scu.config.settings import BaseConfig, DataConfig
from granite_scu.control import Fixed
from granite_scu.control.loop import SKIPPED_IN_A_ROW
from granite_scu.data.datamodule import TextDataModule
from granite_scu.hardware import machine, presets
from granite_scu.hardware.machine import resolve_precision
from granite_scu.hardware.nvml import why_no_cuda
from granite_scu.model import loading
from granite_scu.training import memory_budget
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.utilisation import advice

DOCUMENT = Path(__file__).parents[1] / "docs" / "troubleshooting.md"


def quoted(said: str) -> bool:
    """Whether the document has it; a line may be broken anywhere, and its end given by three dots."""
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    return said in text or any(said[:end] + " ..." in text for end in range(40, len(said)))


def refusal(ask, *arguments) -> str:
    with pytest.raises(Exception, match="--") as refused:
        ask(*arguments)
    return str(refused.value)


def test_refusals_of_what_the_card_lacks(monkeypatch):
    assert quoted(f"error: {refusal(resolve_precision, 'bf16-mixed', T4)}")
    assert quoted(f"error: {refusal(machine.attention_for, 'flash_attention_2', T4.supports_flash, '16-mixed')}")
    assert quoted(presets.mismatch("gpu_4090", T4))
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert quoted(f"error: {refusal(loading.load_model, BaseConfig(quantize_4bit=True), torch.float32)}")


def test_a_lone_process_on_the_cpu(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    request = Request.from_dotted({"run.multi_gpu": True, "trainer.accelerator": "cpu"})
    found = refusal(machine.resolve_request, request)
    assert quoted(f"error: {found}")


@pytest.mark.parametrize(
    ("driver", "build", "visible", "gpus"),
    [
        (None, None, None, ()),
        (13, None, None, ()),
        (12, "13.0", None, ()),
        (13, "13.0", "7", ("Tesla T4",)),
        (13, "13.0", None, ()),
    ],
)
def test_why_there_is_no_cuda_device(machine, monkeypatch, driver, build, visible, gpus):
    from devices import CPU

    machine(CPU, driver=driver, build=build, gpus=gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert quoted(why_no_cuda()[0].replace("580.65.06", "535"))


def test_out_of_memory(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib // 2, 12 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 11 * gib)
    asked = memory_budget._asked(torch.OutOfMemoryError("Tried to allocate 2.20 GiB. GPU 0 has ..."), "cuda")
    assert quoted(f"error: out of memory on NVIDIA GeForce RTX 3060: {asked}; try")


def test_steps_that_are_not_finite():
    control = ShannonControl(Fixed(0.1), 10, None)
    control.loop.step, control.loop.failing = 130, SKIPPED_IN_A_ROW
    with pytest.raises(Diverged) as caught:
        control._check_failure()
    assert quoted(f"error: {caught.value}")


def test_a_step_below_what_is_expected():
    record = {"gpu_memory_gb": 11.2, "gpu_memory_total_gb": 24.0, "gpu_utilisation": 99}
    settings = {
        "batch_size": 16,
        "accumulated": 2,
        "num_workers": 2,
        "compile": False,
        "gradient_checkpointing": False,
        "precision": "bf16-mixed",
    }
    assert quoted(f"mfu 8.0% is below the 20% to be expected: {advice(record, settings)}")


def test_too_few_chats_to_hold_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats = (Path(__file__).parents[1] / "docs" / "examples" / "faq" / "train.jsonl").read_text().splitlines()
    Path("two.jsonl").write_text("\n".join(chats[:2]))
    data = TextDataModule(DataConfig(path="two.jsonl", cache_dir=str(tmp_path / "cache")), 0)
    assert quoted(f"error: {refusal(data.prepare, loading.load_tokenizer('tiny-granite-h'))}")
