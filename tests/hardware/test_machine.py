"""Processes, attention and the device of a process, over machines that are described and not present."""

import dataclasses
import os
import re

import pytest
import torch
from devices import A100, CPU, P100, RTX_3090, T4

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import BaseConfig, RunConfig, TrainerConfig
from granite_scu.hardware import detection, machine
from granite_scu.hardware.machine import taking_tf32

SHARED = RunConfig(multi_gpu=True, fsdp=True)
SLURMS = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "6"}
SCRIPT = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}


@pytest.fixture
def on(monkeypatch):
    """Resolves a request on a described device, with the environment of a launcher."""

    def resolve(device, base=None, run=None, environment=None, gpus=None, card=None, isolate=False, **trainer):
        for name in [name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name or "SLURM" in name]:
            monkeypatch.delenv(name)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(detection, "detect", lambda accelerator: device)
        monkeypatch.setattr(detection, "detect_all", lambda: gpus or [device] * device.count)
        monkeypatch.setattr(detection, "free_gb", lambda: device.memory_gb)
        monkeypatch.setattr(machine, "resolve_accelerator", lambda asked: device.kind)
        asked = {"base": base or BaseConfig(), "run": run or RunConfig(), "trainer": TrainerConfig(**trainer)}
        request = Request.from_dotted({"data.isolate_documents": isolate})
        return machine.resolve_request(dataclasses.replace(request, **asked), card)

    return resolve


@pytest.mark.parametrize(
    ("environment", "run", "expected"),
    [
        ({}, RunConfig(), (1, 1)),
        ({}, RunConfig(multi_gpu=True), (8, 1)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, RunConfig(multi_gpu=True), (2, 2)),
        (SLURMS | {"SLURM_NTASKS_PER_NODE": "2"}, RunConfig(multi_gpu=True), (2, 3)),
        (SLURMS | {"SLURM_JOB_NAME": "interactive"}, RunConfig(multi_gpu=True), (8, 1)),
        (SCRIPT, RunConfig(multi_gpu=True), (8, 1)),
        (SCRIPT, RunConfig(), (1, 1)),
    ],
    ids=[
        "not asked for more",
        "every visible GPU",
        "torchrun's",
        "SLURM's",
        "a shell",
        "a script",
        "one in it",
    ],
)
def test_how_many_processes(on, environment, run, expected):
    found = on(dataclasses.replace(A100, count=8), run=run, environment=environment)
    assert (found.devices, found.nodes, found.world_size) == (*expected, expected[0] * expected[1])


def test_a_script_of_several_machines_is_told_that_one_trains(on, caplog):
    on(dataclasses.replace(A100, count=8), run=RunConfig(multi_gpu=True), environment=SCRIPT | {"SLURM_NNODES": "2"})
    assert "of the job's 2 machines only this one trains; put srun before" in caplog.text


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, {"RANK": "3"}, SLURMS])
def test_a_plan_for_another_machine_does_not_ask_what_launched_it(on, environment):
    card = dataclasses.replace(A100, count=2)
    for run, devices in ((RunConfig(multi_gpu=True), 2), (RunConfig(gpus=2), 2), (RunConfig(), 1)):
        found = on(CPU, run=run, environment=environment, card=card)
        assert (found.devices, found.nodes) == (devices, 1)


@pytest.mark.parametrize("turn", [1, -1])
def test_of_unlike_gpus_the_least_decides_and_one_process_minds_its_own_only(on, caplog, turn):
    gpus = [dataclasses.replace(gpu, count=2) for gpu in (A100, T4)][::turn]
    plain = BaseConfig(compile=False)
    found = on(gpus[0], plain, gpus=gpus, run=RunConfig(multi_gpu=True))
    assert (found.device.name, found.precision) == (T4.name, "16-mixed")
    assert "NVIDIA A100" in caplog.text and f"planned for {T4.name} and memory for 15.0 GiB" in caplog.text
    large = [dataclasses.replace(gpu, count=2) for gpu in (A100, RTX_3090)][::turn]
    found = on(large[0], plain, gpus=large, run=RunConfig(multi_gpu=True))
    assert (found.device.capability, found.free_gb) == (A100.capability, RTX_3090.memory_gb)
    caplog.clear()
    assert on(gpus[0], plain, gpus=gpus).device == gpus[0] and not caplog.text
    assert on(gpus[0], plain, run=RunConfig(multi_gpu=True)).device == gpus[0] and not caplog.text


@pytest.mark.parametrize("compile", [True, None])
def test_cuda_graphs_do_not_accumulate(on, monkeypatch, compile):
    monkeypatch.setattr(machine, "_lacking_for_triton", lambda capability: "")
    graphs = BaseConfig(compile=compile, compile_mode="reduce-overhead")
    with pytest.raises(UserError, match=r"^--compile-mode reduce-overhead: .*--gradient-accumulation-steps 1"):
        on(A100, base=graphs)
    assert on(A100, base=graphs, accumulate_grad_batches=1) and on(CPU, base=graphs)
    assert on(A100, base=dataclasses.replace(graphs, compile=False))


def test_kernels_that_wait_where_documents_begin_are_not_in_cuda_graphs(on, monkeypatch):
    monkeypatch.setattr(machine, "_lacking_for_triton", lambda capability: "")
    graphs, one = BaseConfig(compile_mode="reduce-overhead"), {"accumulate_grad_batches": 1, "isolate": True}
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert on(A100, graphs, **one).kernels == "auto"
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name == "fla" else None)
    assert on(A100, graphs, **one).kernels == "torch"
    assert on(A100, graphs, **one | {"isolate": False}).kernels == on(A100, isolate=True).kernels == "auto"
    with pytest.raises(UserError, match=r"--compile-mode reduce-overhead: .*fla-core.*; give --kernels torch"):
        on(A100, dataclasses.replace(graphs, kernels="cuda"), **one)


def test_as_many_gpus_train_as_are_asked_for_where_they_are_there(on):
    four = dataclasses.replace(A100, count=4)
    assert [on(four, run=RunConfig(gpus=n)).devices for n in (1, 2, 4)] == [1, 2, 4]
    assert on(four, run=RunConfig(gpus=2, multi_gpu=True)).devices == 2
    assert on(four, run=RunConfig(gpus=1, multi_gpu=True)).devices == 1
    with pytest.raises(UserError, match=r"--gpus 5: 4 visible .*--gpus 4, or plan"):
        on(four, run=RunConfig(gpus=5))
    with pytest.raises(UserError, match=r"--gpus 2: there is no GPU; .*plan --hardware"):
        on(CPU, run=RunConfig(gpus=2))
    with pytest.raises(UserError, match=r"--gpus 2: 4 processes were started"):
        on(four, run=RunConfig(gpus=2), environment={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(UserError, match=r"--gpus 0"):
        RunConfig(gpus=0)


def test_more_launched_processes_than_gpus_are_refused(on):
    four = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(UserError, match=r"^--multi-gpu: 4 processes .* sees 2 .*--nproc-per-node 2.*--gpus-per-node=4"):
        on(A100, run=RunConfig(multi_gpu=True), environment=four)
    assert on(CPU, run=RunConfig(multi_gpu=True), environment=four).devices == 4


def test_slurms_tasks_without_a_number_for_each_node_are_refused(on):
    with pytest.raises(UserError, match=r"^--multi-gpu: SLURM started 6 tasks.*--ntasks-per-node=2 in place of"):
        on(A100, run=RunConfig(multi_gpu=True), environment=SLURMS)


def test_several_launched_processes_without_multi_gpu_are_refused(on):
    with pytest.raises(UserError, match=r"2 processes were started.*--multi-gpu"):
        on(CPU, environment={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("environment", "run"),
    [
        ({"LOCAL_RANK": "1"}, RunConfig()),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RunConfig()),
        ({"RANK": "0", "WORLD_SIZE": "2"}, RunConfig()),
        ({"RANK": "0", "WORLD_SIZE": "2"}, RunConfig(multi_gpu=True)),
        ({"OMPI_COMM_WORLD_RANK": "0"}, RunConfig(multi_gpu=True)),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, RunConfig(multi_gpu=True)),
        ({"LOCAL_RANK": "0"}, RunConfig(multi_gpu=True)),
    ],
    ids=["a node's", "of all", "a pod's", "the same", "Open MPI's", "too large", "Lightning would wait"],
)
def test_a_rank_that_was_left_in_the_environment_is_refused(on, environment, run):
    with pytest.raises(UserError, match=r"RANK=\d: .*; unset"):
        on(dataclasses.replace(A100, count=2), run=run, environment=environment)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "abc"}, "RANK=abc: must be a whole number and at least 0; unset RANK"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: must be a whole number and at least 1; unset"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: must be"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "WORLD_SIZE=2: must be a whole number and at least 4"),
        (SLURMS | {"SLURM_NTASKS": "2(x3)"}, "SLURM_NTASKS=2(x3): must be"),
        (SLURMS | {"SLURM_NNODES": "2-4"}, "SLURM_NNODES=2-4: must be"),
        (SCRIPT | {"SLURM_NNODES": "2-4"}, "SLURM_NNODES=2-4: must be"),
    ],
)
def test_a_variable_of_a_launcher_that_is_no_number_is_named(on, environment, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}"):
        on(dataclasses.replace(A100, count=2), run=RunConfig(multi_gpu=True), environment=environment)


@pytest.mark.parametrize(
    ("environment", "run"),
    [
        ({"LOCAL_RANK": "0", "RANK": "0"}, RunConfig()),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}, RunConfig(multi_gpu=True)),  # of Lightning's own
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, RunConfig(multi_gpu=True)),
        ({"LOCAL_RANK": "1", "SLURM_PROCID": "0", "WORLD_SIZE": "2"}, RunConfig(multi_gpu=True)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, RunConfig(multi_gpu=True)),
    ],
)
def test_a_rank_that_a_process_has_is_not(on, environment, run):
    assert on(dataclasses.replace(A100, count=2), run=run, environment=environment)


def test_a_process_loads_onto_its_own_gpu(on):
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    found = on(dataclasses.replace(A100, count=2), run=RunConfig(multi_gpu=True), environment=environment)
    assert str(found.torch_device) == "cuda:1"


@pytest.mark.parametrize(
    ("device", "installed", "precision", "expected"),
    [
        (A100, True, None, "flash_attention_2"),
        (A100, False, None, "sdpa"),
        (A100, True, "32-true", "sdpa"),
        (T4, True, None, "sdpa"),
        (CPU, True, None, "sdpa"),
    ],
)
def test_auto_takes_flash_attention_only_where_it_can_run(on, monkeypatch, device, installed, precision, expected):
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if installed else None)
    assert on(device, base=BaseConfig(attention="auto"), precision=precision).attention == expected


def test_a_deterministic_run_takes_no_compiled_kernels(on):
    assert on(A100).kernels == "auto" and on(A100, deterministic=True).kernels == "torch"


@pytest.mark.parametrize(
    ("device", "has", "words"),
    [
        (T4, ("triton", "gcc", "Python.h"), None),
        (T4, ("gcc", "Python.h"), "Triton is not installed"),
        (T4, ("triton", "Python.h"), "there is no C compiler; install one"),
        (T4, ("triton", "gcc"), "Python's headers are not installed"),
        (P100, ("triton", "gcc", "Python.h"), "Triton wants a GPU of compute capability 7.0 or more"),
        (CPU, ("triton", "gcc", "Python.h"), None),
    ],
)
def test_layers_are_compiled_by_default_where_triton_compiles(on, monkeypatch, tmp_path, caplog, device, has, words):
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name in has else None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in has else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    if "Python.h" in has:
        (tmp_path / "Python.h").touch()
    assert on(device).compiled is (words is None and device is not CPU)
    assert (words in caplog.text) if words else not caplog.text
    assert (
        on(device, base=BaseConfig(compile=True)).compiled and not on(device, base=BaseConfig(compile=False)).compiled
    )
    if device.kind == "cuda":
        assert not on(dataclasses.replace(device, count=2), run=SHARED).compiled


@pytest.mark.parametrize(
    ("has", "words"), [(["triton"], ""), ([], "Triton is not installed; pip install triton-windows")]
)
def test_on_windows_the_package_brings_all_that_triton_needs(on, monkeypatch, caplog, has, words):
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name in has else None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: "nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.sys, "platform", "win32")
    assert on(T4).compiled is (not words) and caplog.text.strip().endswith(words)


def test_one_process_has_nobody_to_share_with(on):
    with pytest.raises(UserError, match="one process has nobody to share"):
        on(dataclasses.replace(A100, count=2), run=RunConfig(fsdp=True))


@pytest.mark.parametrize(
    ("device", "run", "limits", "products"),
    [
        (A100, RunConfig(), [], "high"),
        (A100, RunConfig(tf32=False, memory_fraction=0.4), [(0.4, "cuda:1")], "highest"),
        (T4, RunConfig(), [], "highest"),
    ],
)
def test_a_process_claims_its_gpu_a_share_of_the_memory_and_tf32(on, monkeypatch, device, run, limits, products):
    current, limited = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.append(str(index)))
    limit = lambda fraction, index: limited.append((fraction, str(index)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    two = dataclasses.replace(device, count=2)
    found = on(two, run=dataclasses.replace(run, multi_gpu=True), environment=environment)
    with taking_tf32(products == "highest"):  # whatever it was before
        found.claim(run.memory_fraction)
        assert torch.get_float32_matmul_precision() == products
        assert torch.backends.cudnn.allow_tf32 is found.tf32 is (products == "high")
    assert (current, limited) == (["cuda:1"], limits)


def test_a_process_on_the_cpu_claims_nothing(on):
    found = on(CPU)
    with taking_tf32(True):
        found.claim(0.5)
        assert torch.get_float32_matmul_precision() == "high"
    assert not found.tf32
