"""Which kernels the Mamba-2 layers get, and what becomes of packages that do not work.

Whether the real packages are right is shown in ``real_kernels`` and, where there is a GPU, below.
"""

import importlib.metadata
import inspect
import logging
import sys

import pytest
import torch
from outcomes import refusal
from torch.nn import functional as F
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from granite_scu.config.errors import UserError
from granite_scu.config.settings import LoraConfig
from granite_scu.model import adapters
from granite_scu.model.mamba2 import kernels, mamba
from granite_scu.model.mamba2.proof import Sizes, prove

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TORCH = mamba.TORCH


@pytest.fixture
def installed(monkeypatch):
    """Has packages installed, and none besides, whose kernels are ours or have a fault."""
    versions: dict[str, str] = {}

    def version(distribution):
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    def install(**faults):
        versions.update({name.replace("_", "-"): "9.9" for name in faults})
        for name in versions:
            named = mamba.Kernels(f"{name} 9.9's Triton kernels", TORCH.scan, TORCH.conv)
            monkeypatch.setitem(kernels.CANDIDATES, name, lambda named=named: named)
        found = {name.replace("_", "-"): fault for name, fault in faults.items()}
        monkeypatch.setattr(kernels, "fault_in_subprocess", lambda name, *_: found[name])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    monkeypatch.setattr(importlib.metadata, "version", version)
    kernels.choose.cache_clear()
    yield install
    kernels.choose.cache_clear()


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_check_that_takes_long_says_so_and_is_given_up(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    caplog.set_level("INFO", "granite_scu")
    monkeypatch.setattr(kernels, "A_WHILE", 0.2)
    monkeypatch.setattr(kernels, "PATIENCE", 0.3)
    monkeypatch.setattr(kernels, "named", str)
    fault = kernels.fault_in_subprocess("fla-core", torch.device("cpu"), torch.float32, Sizes())
    assert fault == "no answer after 0 minutes"
    assert caplog.messages == ["checking fla-core: compiling or running it for 0 of at most 0 minutes"] * 2


def choose(request, device=GPU, dtype=torch.float32):
    return kernels.choose(request, device, dtype, Sizes())


# Which


def test_on_the_cpu_the_layers_run_in_pytorch(installed):
    installed(mamba_ssm=None, fla_core=None)
    assert choose("auto", CPU) is choose("torch", CPU) is choose("torch", GPU) is TORCH


def test_without_packages_the_layers_run_in_pytorch(installed, warnings_of):
    assert choose("auto") is TORCH
    assert warnings_of() == []


@pytest.mark.parametrize("request_", ["auto", "cuda"])
def test_of_two_that_are_right_mamba_ssm_is_taken(installed, warnings_of, caplog, request_):
    caplog.set_level("INFO", "granite_scu")
    installed(fla_core=None)
    assert choose(request_).name == "fla-core 9.9's Triton kernels"
    assert caplog.messages[-1].startswith("the first step tries variants of fla-core 9.9's Triton kernels")
    kernels.choose.cache_clear()
    installed(fla_core=None, mamba_ssm=None)
    assert choose(request_).name == "mamba-ssm 9.9's Triton kernels"
    assert warnings_of() == []


def test_after_a_wrong_one_the_next_is_tried(installed, warnings_of):
    installed(mamba_ssm="the output is off", fla_core=None)
    assert choose("auto") is choose("auto") is choose("cuda")
    words = "mamba-ssm 9.9 failed its self-check (the output is off)"
    taken = "the Mamba-2 layers run in fla-core 9.9's Triton kernels"
    assert warnings_of() == 2 * [f"{words}; {taken}"], "once for each request"


def test_on_turing_mamba_ssm_is_not_tried(installed, warnings_of, monkeypatch):
    installed(mamba_ssm=None, fla_core=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose("auto").name == "fla-core 9.9's Triton kernels"
    assert len(warnings_of()) == 1 and warnings_of()[0].startswith("mamba-ssm 9.9 is not tried: for this GPU")


def test_several_wrong_ones_cost_one_warning_and_are_refused_where_they_are_insisted_on(installed, warnings_of):
    installed(mamba_ssm="A", fla_core="B")
    assert choose("auto") is choose("auto") is TORCH
    words = "mamba-ssm 9.9 failed its self-check (A); fla-core 9.9 failed its self-check (B)"
    assert warnings_of() == [f"{words}; the Mamba-2 layers run in PyTorch"]
    assert refusal(choose, "cuda") == f"--kernels cuda: {words}; use --kernels auto, or another version"


def test_insisting_where_there_is_nothing_to_try_is_refused(installed):
    with pytest.raises(UserError, match=r"--kernels cuda: .*pip install 'granite-scu\[kernels\]'"):
        choose("cuda")
    installed(fla_core=None)
    with pytest.raises(UserError, match=r"--kernels cuda: the run is on the CPU.*use --kernels auto"):
        choose("cuda", CPU)


def test_the_hub_is_asked_where_it_is_named_alone(installed):
    with pytest.raises(UserError, match=r"--kernels hub: .*pip install 'granite-scu\[hub-kernels\]'"):
        choose("hub")
    installed(kernels=None)
    assert choose("auto") is TORCH
    assert choose("hub").name == "kernels 9.9's Triton kernels"
    with pytest.raises(UserError, match=r"--kernels hub: the run is on the CPU.*use --kernels auto"):
        choose("hub", CPU)
    kernels.choose.cache_clear()
    installed(kernels="no answer")
    with pytest.raises(UserError, match=r"--kernels hub: kernels 9.9 failed its self-check \(no answer\)"):
        choose("hub")


# The check in a process of its own


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os; os.abort()", "its process ended with code -6"),
        ("print('noise'); raise RuntimeError('PassManager failed\\nat line 3')", "RuntimeError: PassManager failed"),
    ],
    ids=["kills its process", "raises"],
)
def test_a_package_that_does_not_work_is_a_fault_and_no_more(tmp_path, monkeypatch, source, words):
    for folder in ("fla", "fla/modules"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "fla" / "modules" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert kernels.fault_in_subprocess("fla-core", CPU, torch.float32, Sizes()).startswith(words)


def test_the_process_answers_what_the_check_finds(monkeypatch, capsys):
    wrong = mamba.Kernels("wrong", TORCH.scan, lambda inputs, conv, **_: 0.9 * TORCH.conv(inputs, conv))
    asked = '{"name": "%s", "device": "cpu", "dtype": "torch.bfloat16", "sizes": {"heads": 2}}'
    for name, candidate in (("right", TORCH), ("wrong", wrong)):
        monkeypatch.setitem(kernels.CANDIDATES, name, lambda candidate=candidate: candidate)
        monkeypatch.setattr(sys, "argv", ["-c", asked % name])
        kernels.answer()
    right, found = capsys.readouterr().out.splitlines()
    assert right == '{"fault": null}' and "the convolution: the output is off by 1.0e-01" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", kernels.CANDIDATES)
def test_what_is_installed_proves_right(name, dtype):
    if name not in kernels.installed():
        pytest.skip(f"{name} is not installed")
    sizes = Sizes(heads=48, head_dim=64, groups=1, state=128)
    assert prove(kernels.CANDIDATES[name](), GPU, dtype, sizes) is None


# What must not change with it


def test_every_adapter_of_a_layer_is_trained_and_the_fused_kernel_is_not_called(monkeypatch, library_model):
    def fused(*args, **kwargs):
        raise AssertionError("the fused kernel was called")

    monkeypatch.setattr(modeling, "mamba2_split_conv1d_scan_combined", fused)
    tokens = torch.randint(2, 4096, (2, 20), generator=torch.Generator().manual_seed(0))
    mamba.install(library_model, TORCH)
    adapted = adapters.attach(library_model, LoraConfig(rank=2, targets=["in_proj", "out_proj"])).train()
    logits = adapted(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    updates = adapters.low_rank_updates(adapted)
    assert len(updates) == 8
    assert adapters.untrained(updates) == []


def test_a_loaded_model_says_what_it_runs_in(model):
    assert mamba.kernels_in_use(model) is TORCH
    assert mamba.kernels_in_use(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("argument", mamba._ARGUMENTS)
def test_a_library_whose_layer_takes_other_arguments_is_refused(library_model, monkeypatch, argument):
    layer = type(library_model.model.layers[0].mamba)
    others = [name for name in inspect.signature(layer.forward).parameters if name != argument]
    forward = eval(f"lambda {', '.join(others).replace('kwargs', '**kwargs')}: None")
    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(UserError, match=rf"mamba .* has no argument {argument}; .* not supported"):
        mamba.install(library_model)
