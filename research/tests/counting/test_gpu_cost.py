"""The counts of a GPU's work: by hand where that can be done, and held so that they cannot creep back."""

import copy
import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from running import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.model import loading, memory
from research.counting import gpu_cost
from research.counting import operators as counting
from research.counting.operators import Cost, Count, Step


def small(layers: int, **settings) -> Step:
    """The default model's first layers: Mamba-2 and, as the sixth, attention."""
    config = copy.deepcopy(loading.default_config())
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return Step(config, batch=1, block=256, **settings)


def test_a_product_and_a_sum_are_what_they_are_by_hand():
    counted = Count()
    with FakeTensorMode(), counted:
        left, right = torch.empty(4, 8), torch.empty(8, 32)
        (left @ right).add_(torch.empty(4, 1).expand(4, 32))
    product = Cost(1, 4 * (4 * 8 + 8 * 32 + 4 * 32), 2 * 4 * 8 * 32)
    total = Cost(1, 4 * (4 * 32 + 4 * 32 + 4), 0)  # what is expanded is read once
    assert counted.found == {("LoRA", "forward"): product, ("else", "forward"): total}  # a side of 16 or less


def test_what_a_mamba_layer_of_ours_costs_uncompiled_does_not_creep_back():
    costs = [counting.total(counting.count(small(layers))) for layers in (1, 2)]
    layer = costs[1] + costs[0] * -1
    assert layer.launches <= 500
    assert layer.bytes <= 1.3e9  # of 256 tokens, the weights' included


def compiled_cost(make) -> Cost:
    """Of the function that ``make`` returns, compiled."""
    from research.counting import lowering

    lowered = lowering.Lowering("function")
    with FakeTensorMode():
        torch.compile(make(), backend=lowered.backend)()
    return counting.total(lowered.found)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
def test_of_a_wide_tensor_a_kernel_moves_the_slice_that_it_reads():
    def make():
        wide, narrow = torch.empty(64, 1000), torch.empty(64, 10, requires_grad=True)

        def product_and_sum():
            product = wide[:, 5:15] * narrow
            return product, product.sum(-1)

        return product_and_sum

    assert compiled_cost(make) == Cost(1, 4 * (3 * 64 * 10 + 64), 0)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
def test_what_is_read_again_by_a_neighbour_and_the_slice_that_a_product_takes_are_moved_once():
    def make():
        numbers, right = torch.empty(64, 1000), torch.empty(10, 8, requires_grad=True)

        def differences_and_product():
            before, far = torch.arange(-1, 31).clamp(0, 31), torch.arange(33, 65).clamp(32, 63)
            part = numbers[:, 100:200]
            differences = part[:32] - part[before] + part[far]  # half of the rows, twice, and the other half
            return differences, differences[:, 5:15] @ right

        return differences_and_product

    assert compiled_cost(make).bytes == 4 * (64 * 100 + 32 * 100) + 4 * (32 * 10 + 10 * 8 + 32 * 8)


def test_the_products_inside_of_mamba_ssms_scan_are_those_worked_out_by_hand():
    from granite_scu.model.mamba2 import packages  # which makes the operator
    from research.counting import insides

    x, b = torch.empty(1, 512, 2, 16), torch.empty(1, 512, 1, 8)
    with_state = 2 * 512 * 2 * 16 * 8  # a sum over tokens, or over the state, for each head
    within, scores = 512 * packages.CHUNK * 2 * 16, 2 * 512 * packages.CHUNK * 8
    operator = torch.ops.granite_scu.mamba2_scan.default
    assert insides._product_flops(operator, (x, None, None, b)) == 2 * with_state + within + scores


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_a_kind_share_a_graph_and_move_a_third(checkpointing):
    from research.counting import lowering

    steps = [small(layers, gradient_checkpointing=checkpointing) for layers in (7, 8)]
    found = [lowering.count(step) for step in steps]
    for _, graphs in found:  # a Mamba-2 and an attention layer, norm, and loss's body
        assert sum(graph["phase"] == "forward" for graph in graphs) == 4
    parts = {"scan", "convolution", "gated norm", "LoRA", "base products", "RMS norm", "SwiGLU", "loss"}
    assert parts <= {part for part, _ in found[1][0]}
    compiled = counting.total(found[1][0]) + counting.total(found[0][0]) * -1
    eager = [counting.total(counting.count(step)) for step in steps]
    layer = eager[1] + eager[0] * -1
    share = 0.35 if checkpointing else 0.32  # the weights are read once more
    assert compiled.bytes < share * layer.bytes and compiled.launches < 0.2 * layer.launches


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
@pytest.mark.parametrize(("recomputed", "least"), [(False, 0.85), ("selective", 0.9)])
def test_a_compiled_layer_keeps_what_is_predicted_of_its_memory(recomputed, least):
    from research.counting import lowering

    kept, predicted = [], []
    for layers in (7, 8):
        step = replace(small(layers, gradient_checkpointing=recomputed), block=1024)
        graphs = [graph for graph in lowering.count(step)[1] if graph["name"] == "layers"]
        kept.append(sum(graph["kept"] * graph["calls"] for graph in graphs if graph["phase"] == "forward"))
        setting = memory.Setting(BaseConfig(gradient_checkpointing=recomputed), LoraConfig(), step.dtype, 1, 1024)
        predicted.append(memory.predict(step.config, setting).step)
    layer, expected = kept[1] - kept[0], predicted[1] - predicted[0]
    assert least * expected < layer < expected  # operator by operator a norm keeps its input in fp32 besides


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
def test_a_step_of_the_default_keeps_to_its_aim():
    from research.counting import lowering

    step = Step(loading.default_config(), batch=8, block=1024)
    total = counting.total(lowering.count(step)[0])
    assert total.bytes <= 286e9 and total.launches <= 2960
    assert gpu_cost.h200_tokens_per_s(step, total) >= 50_000


@pytest.mark.slow
@pytest.mark.skipif(bool(gpu_cost.lacking_for("with packages")), reason="needs the kernels of make test-slow")
def test_with_the_packages_a_step_is_estimated_at_four_times_the_rate_of_hugging_face():
    step = Step(loading.default_config(), batch=8, block=1024)
    ours, theirs = (counting.total(gpu_cost.measured(side, step)[0]) for side in ("with packages", "theirs"))
    assert gpu_cost.h200_tokens_per_s(step, ours) >= 4 * gpu_cost.h200_tokens_per_s(step, theirs)


@pytest.mark.slow
@pytest.mark.skipif(bool(gpu_cost.lacking_for("with packages")), reason="needs the kernels of make test-slow")
def test_the_gradient_of_mamba_ssms_scan_is_not_copied_on_its_way_to_the_convolution():
    from research.counting import lowering

    one, two = (lowering.count(small(layers, kernels=gpu_cost.PACKAGES))[0] for layers in (1, 2))
    for part in ("convolution", "Mamba-2, else"):  # the last is the step sizes' gradient
        assert two[part, "backward"].launches - one[part, "backward"].launches == 1


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")
def test_a_kernel_that_python_launches_moves_each_tensor_once(monkeypatch):
    import triton

    from research.counting import insides

    @triton.jit
    def kernel(x, y, count):
        pass

    @torch.library.custom_op("granite_scu_tests::two_kernels", mutates_args=())
    def two_kernels(x: torch.Tensor) -> torch.Tensor:
        between, y = x.double(), torch.empty_like(x)  # a launch of PyTorch's, and none
        kernel[(1,)](x, between, 10)
        kernel[(1,)](between, y, 10)
        return y

    monkeypatch.setattr(insides, "_function", lambda operator: two_kernels._init_fn)
    found = insides.Insides().beyond(torch.ops.granite_scu_tests.two_kernels.default, (torch.empty(10),))
    moved = (40 + 80) + (40 + 80) + (80 + 40)  # the conversion and both kernels; x and y are counted outside
    assert found == Cost(3 - 1, moved - (40 + 40), 0)


@pytest.mark.slow
def test_the_command_prints_every_part(monkeypatch, capsys):
    cut = small(6).config
    monkeypatch.setattr(loading, "default_config", lambda: cut)
    monkeypatch.setattr(sys, "argv", ["gpu_cost.py", "--batch", "1", "--block", "64", "--sides", "eager", "--json"])
    assert gpu_cost.main() == 0
    (side,) = json.loads(capsys.readouterr().out)
    assert {"scan", "convolution", "gated norm", "LoRA", "loss", "base products"} <= {p["part"] for p in side["parts"]}
    assert side["gb"] == pytest.approx(sum(part["gb"] for part in side["parts"]))
    monkeypatch.setattr(sys, "argv", ["gpu_cost.py", "--batch", "1", "--block", "64", "--sides", "eager", "theirs"])
    assert gpu_cost.main() == 0
    assert capsys.readouterr().out.count("launches,") == 2


def test_bad_input_is_refused_in_a_line():
    refuses("research/counting/gpu_cost", ["--block", "0"], "--block 0: must be at least 1")
    if find_spec("triton") is None:
        refuses(
            "research/counting/gpu_cost",
            ["--sides", "compiled"],
            "--sides compiled: Triton is not installed; make .venv/.kernels",
        )
