"""What fits into a device, and what is said where it does not; the devices are simulated, the model is not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from devices import CPU, RTX_3060, T4
from transformers.modeling_layers import GradientCheckpointingLayer

from granite_scu.cli.script_flags import translate
from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import LoraConfig, OptimizerConfig, PriorConfig
from granite_scu.hardware import machine as machines
from granite_scu.hardware.detection import GIB
from granite_scu.model.memory import Footprint
from granite_scu.training import batch_size, memory_budget
from granite_scu.training.module import GraniteModule
from granite_scu.training.recipe import prepare, train

TINY = ("--base.name=tiny-granite-h", "--data.block_size=512", "--data.batch_size=6")


@pytest.fixture
def asked(machine):
    """The request and the machine of a command line on a device."""

    def ask(device, *flags: str):
        machine(device)
        request = translate([*TINY, "--trainer.accumulate_grad_batches=4", *flags])[0].request()
        return request, machines.resolve_request(request)

    return ask


def test_the_memory_fraction_makes_a_small_card_of_a_large_one(asked):
    _, found = asked(T4)
    assert found.memory_limit(None) == pytest.approx(0.9 * 15 * GIB)
    assert found.memory_limit(0.5) == pytest.approx(0.9 * 7.5 * GIB)


def test_of_a_gpu_no_more_is_taken_than_others_have_left(asked, machine, monkeypatch):
    request, whole = asked(T4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (6 * GIB, 15 * GIB))
    here, planned = (machines.resolve_request(request, card) for card in (None, T4))
    assert [here.memory_limit(share) / GIB for share in (None, 0.5, 0.2)] == pytest.approx([5.4, 5.4, 2.7])
    assert planned.memory_limit(None) == whole.memory_limit(None)


def test_processes_on_one_cpu_share_its_memory(asked):
    _, found = asked(CPU, "--trainer.accelerator=cpu")
    assert replace(found, devices=4).memory_limit(None) == pytest.approx(found.memory_limit(None) / 4)


@pytest.mark.slow
def test_the_largest_batch_that_fits_leaves_the_blocks_of_a_step_alone(asked):
    request, found = asked(T4, "--run.memory_fraction=0.05")
    sizes = memory_budget.sizes(request.blocks_per_step)
    assert sizes == [24, 12, 8, 6, 4, 3, 2, 1]
    chosen = memory_budget.largest_that_fits(request, found)
    assert chosen.blocks_per_step == 24
    larger = memory_budget.with_batch(request, min(size for size in sizes if size > chosen.data.batch_size))
    predicted = [memory_budget.predict(each, found).total for each in (chosen, larger)]
    assert predicted[0] <= found.memory_limit(0.05) < predicted[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_recomputed_is_what_costs_least_in_the_advice_and_for_the_search_of_a_batch(asked, compiled):
    request, found = asked(T4, "--run.memory_fraction=0.0035")
    found, one = replace(found, compiled=compiled), memory_budget.with_batch(request, 1)
    said = memory_budget.advice(one, found)
    assert said.startswith(f"try --gradient-checkpointing {'selective' if compiled else 'on'} (")
    guessed = batch_size.first_guess(one, found).base.gradient_checkpointing
    assert guessed == ("selective" if compiled else True)


@pytest.mark.slow
def test_where_nothing_fits_the_advice_is_another_model_or_device(asked):
    request, found = asked(T4, "--run.memory_fraction=0.0001")
    assert memory_budget.advice(request, found) == (
        "no batch, block or quantisation of it is predicted to fit: take a smaller --model, or a larger device"
    )


@pytest.mark.parametrize(
    ("processes", "continues", "first", "searches"),
    [(1, False, "--batch-size", True), (2, False, "--batch-size", False), (1, True, "--gradient-checkpointing", False)],
)
def test_out_of_memory_says_what_was_asked_what_there_was_and_what_to_try(
    asked, monkeypatch, processes, continues, first, searches
):
    """A run that continues keeps its batch, and several processes search for none."""
    several = ("--run.multi_gpu=true",) if processes > 1 else ()
    request, found = asked(replace(RTX_3060, count=processes), "--run.memory_fraction=0.01", *several)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB // 2, 12 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 11 * GIB)
    words = "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 11.76 GiB"
    with pytest.raises(RunFailed) as failed, memory_budget.explain_oom(request, found, continues):
        raise torch.OutOfMemoryError(words)
    said = str(failed.value)
    there_was = "2.2 GiB asked for, 0.5 of 12.0 GiB free, 11.0 held"
    assert said.startswith(f"out of memory on NVIDIA GeForce RTX 3060: {there_was}")
    assert f"try {first}" in said and ("--auto-batch-size" in said) == searches


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_cudas_own_errors_say_that_memory_ran_out_too(words):
    assert memory_budget.ran_out(RuntimeError(words))
    assert not memory_budget.ran_out(RuntimeError("CUDA error: device-side assert triggered"))


def test_the_cpu_runs_out_in_words_of_its_own_and_other_errors_pass(asked, monkeypatch):
    request, found = asked(CPU, "--trainer.accelerator=cpu")
    monkeypatch.setattr(memory_budget, "predict", lambda *_: Footprint(1, 1, 1))
    said = r"out of memory on Plain CPU: 93\.1 GiB asked for, "
    with pytest.raises(RunFailed, match=said), memory_budget.explain_oom(request, found):
        _ask_for_too_much()
    with pytest.raises(RuntimeError, match="shapes"), memory_budget.explain_oom(request, found):
        raise RuntimeError("shapes differ")


def _ask_for_too_much():
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 100000000000 bytes. Error code 12 (Cannot allocate memory)"
    )


def test_several_processes_find_no_batch(asked):
    with pytest.raises(UserError, match="--auto-batch-size: one process looks for the batch"):
        batch_size.first_guess(*asked(replace(T4, count=2), "--run.multi_gpu=true"))


def test_activations_are_recomputed_where_they_are_predicted_not_to_fit_and_nothing_else_is_asked_for(asked):
    def settled(fraction, *flags):
        request, found = asked(T4, f"--run.memory_fraction={fraction}", *flags)
        return memory_budget.with_checkpointing_settled(request, found).base.gradient_checkpointing

    assert [settled(0.02), settled(0.01), settled(0.001)] == [False, True, True]
    assert settled(0.01, "--base.gradient_checkpointing=false") is False
    assert settled(0.02, "--base.gradient_checkpointing=true") is True


def test_of_a_model_that_cannot_be_simulated_activations_are_recomputed(asked, monkeypatch):
    request, found = asked(T4)
    monkeypatch.setattr(memory_budget, "predict", lambda *_: Footprint(1, 1, None))
    assert memory_budget.with_checkpointing_settled(request, found).base.gradient_checkpointing is True
    assert "step not predicted" in memory_budget.describe(Footprint(1, 1, None))


def test_products_are_kept_only_where_the_compiler_sees_what_is_recomputed(asked, monkeypatch):
    def settled(*flags):
        request, found = asked(T4, "--run.memory_fraction=0.016", *flags)
        return memory_budget.with_checkpointing_settled(request, replace(found, compiled=True)).base

    assert settled().gradient_checkpointing == "selective"
    with pytest.raises(UserError, match="--gradient-checkpointing selective: layers are not compiled"):
        GraniteModule(replace(settled(), compile=None), LoraConfig(), OptimizerConfig(), PriorConfig(), 1)
    # As before transformers 5.23, where a compiled layer is called inside of the checkpoint.
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", torch.nn.Module.__call__)
    assert settled().gradient_checkpointing is True
    with pytest.raises(UserError, match="--gradient-checkpointing selective: transformers"):
        settled("--base.gradient_checkpointing=selective")


def test_the_search_for_a_batch_recomputes_activations_only_where_no_block_fits_without(asked):
    few = ("--data.batch_size=1", "--trainer.accumulate_grad_batches=2")
    for fraction, recomputed in ((0.05, False), (0.003, True)):
        found = batch_size.first_guess(*asked(T4, f"--run.memory_fraction={fraction}", *few))
        assert bool(found.base.gradient_checkpointing) is recomputed


@pytest.mark.slow
def test_a_card_on_which_not_even_a_block_fits_is_refused(asked):
    with pytest.raises(UserError, match=r"one block takes 0\.\d\d GiB: weights .* of 0.02 GiB that .* Tesla T4; "):
        batch_size.first_guess(*asked(T4, "--run.memory_fraction=0.0015"))


@pytest.mark.slow
def test_a_run_finds_its_batch_by_training_on_it(machine, tmp_path, monkeypatch):
    """As on a CPU that has little memory left."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {n} says that {n} times {n} is {n * n}." for n in range(400)))
    out = tmp_path / "out"
    flags = ("--data.block_size=64", f"--data.path={text}", f"--run.output_dir={out}", "--trainer.max_steps=3",
             "--trainer.accumulate_grad_batches=4")  # fmt: skip
    request = translate(
        [*TINY, *flags, "--trainer.accelerator=cpu", "--run.auto_batch_size=true", "--data.batch_size=4",
         "--control.every=1", "--control.target_s=0.1", "--trainer.precision=32-true", "--optimizer.warmup_steps=0"]
    )[0].request()  # fmt: skip
    asked: list[int] = []
    real = batch_size._try
    # The first is told not to fit, so that a smaller one is taken.
    monkeypatch.setattr(batch_size, "_try", lambda run: asked.append(run.request.data.batch_size) or (
        None if len(asked) == 1 else real(run)))  # fmt: skip
    run = prepare(request)
    assert run.request.data.batch_size == 16  # 4 x 4 blocks at once are predicted to fit
    summary = train(run)
    assert asked == [16, 8]
    assert summary["steps"] == 3 and summary["tokens"] > 2 * 16 * 64
    again = translate([f"--config={out / 'config.yaml'}"])[0].request()
    assert (again.data.batch_size, again.trainer.accumulate_grad_batches) == (8, 2)
    assert not again.run.auto_batch_size and Path(again.run.output_dir) == out
