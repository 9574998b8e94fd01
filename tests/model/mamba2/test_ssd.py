"""The chunked scan against the recurrence it stands for, one token after the other in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import recurrence
from rounding import assert_rounded, rounding

from granite_scu.model.mamba2 import ssd
from granite_scu.model.mamba2.conv import runs_of
from granite_scu.model.mamba2.ssd import ssd_scan

NAMES = ("x", "dt", "a", "b", "c", "d")


def inputs(batch=2, time=37, heads=4, head_dim=5, groups=1, state=6, step=0.1, rate=1.0, seed=0):
    """Inputs of which ``step * rate`` is about the decay's exponent a token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return (
        normal(batch, time, heads, head_dim),
        step * (0.5 + torch.rand(batch, time, heads, generator=generator)),
        -rate * (0.5 + torch.rand(heads, generator=generator)),
        normal(batch, time, groups, state),
        normal(batch, time, groups, state),
        normal(heads),
    )


def relative_error(found, expected):
    return float(((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).detach())


def doubled(tensors):
    return tuple(t.detach().double().requires_grad_() for t in tensors)


def assert_scan_is_the_recurrence(tensors, chunk):
    """An output sums over the tokens and the state; the gradient of a rate over all numbers of a head."""
    tensors = tuple(t.requires_grad_() for t in tensors)
    exact = doubled(tensors)
    found, expected = ssd_scan(*tensors, chunk=chunk), recurrence(*exact)
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < rounding(100 + 6)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found_gradients = torch.autograd.grad((found * weight.float()).sum(), tensors)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    for name, one, other in zip(NAMES, found_gradients, expected_gradients, strict=True):
        assert torch.isfinite(one).all(), name
        assert relative_error(one, other) < rounding(2 * 100 * 5 * 6), (
            name
        )  # also one that all but vanishes beside the others


@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 32, 37, 100])
def test_outputs_and_gradients_are_those_of_the_recurrence_at_any_length(time):
    assert_scan_is_the_recurrence(inputs(time=time), chunk=16)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_heads_read_the_projections_of_their_own_group(groups):
    assert_scan_is_the_recurrence(inputs(heads=8, groups=groups), chunk=8)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(1e-4, 1e-4), (1e-3, 16.0), (0.1, 16.0), (5.0, 16.0), (100.0, 100.0)],
    ids=["hardly any decay", "slow", "common", "strong", "nothing survives a token"],
)
def test_decays_of_any_strength_are_exact_and_finite(step, rate):
    assert_scan_is_the_recurrence(inputs(time=70, step=step, rate=rate), chunk=32)


def test_a_token_that_wipes_the_state_leaves_what_comes_after_it_exact():
    """The decays after it are differences of sums that it made large."""
    x, dt, a, b, c, d = inputs(time=70, step=1e-2)
    dt[:, 10] = 1000.0
    x[:, 10] = 0.0  # or its own contribution would drown the others
    expected = recurrence(*(t.double() for t in (x, dt, a, b, c, d)))
    assert relative_error(ssd_scan(x, dt, a, b, c, d)[:, 11:], expected[:, 11:]) < rounding(70 + 6)


@pytest.mark.parametrize("case", ["mixed", "now and then", "once"])
def test_weak_decays_beside_strong_ones_keep_their_digits(case):
    """Decays, and the gradient of the rates, are differences of sums that one strong step makes large.

    Without D, which would hide the error.
    """
    x, dt, a, b, c, d = inputs(time=70, rate=16.0)
    generator = torch.Generator().manual_seed(1)
    if case == "mixed":
        dt = 10 ** (4 * torch.rand(dt.shape, generator=generator) - 3)
    elif case == "now and then":
        dt[:, ::16] = 20.0
    else:
        dt[:, 10] = 1e4
        x[:, 10] = 1e-4 * x[:, 10]
    tensors = tuple(t.requires_grad_() for t in (x, dt, a, b, c))
    exact = doubled(tensors)
    none = torch.zeros_like(d)
    found = ssd_scan(*tensors, none, chunk=32)
    expected = recurrence(*exact, none.double())
    assert relative_error(found, expected) < rounding(70 + 6)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weight.float()).sum(), tensors)
    for one, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
        assert relative_error(one, other) < rounding(2 * 70 * 5)  # of the state's six numbers each apart


def test_a_step_as_large_as_the_configuration_allows_leaves_everything_finite():
    x, dt, a, b, c, d = (t.requires_grad_() for t in inputs(time=70))
    dt = dt.detach().fill_(1e6).requires_grad_()  # the upper end of time_step_limit
    y = ssd_scan(x, dt, a, b, c, d)
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), (x, dt, a, b, c, d)))


@settings(max_examples=30)
@given(
    st.integers(1, 3), st.integers(1, 50), st.integers(1, 3), st.integers(1, 3), st.integers(1, 64), st.integers(0, 99)
)
def test_the_result_does_not_depend_on_the_chunk(batch, time, groups, heads_per_group, chunk, seed):
    tensors = inputs(batch=batch, time=time, groups=groups, heads=groups * heads_per_group, seed=seed)
    assert_rounded(ssd_scan(*tensors, chunk=chunk), ssd_scan(*tensors), 50 + 6)


def test_the_backward_pass_is_the_derivative_in_double_precision():
    x, dt, a, b, c, d = (t.double().requires_grad_() for t in inputs(batch=1, time=7, heads=4, groups=2, head_dim=2))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda *tensors: ssd_scan(*tensors, 3, documents), (x, dt, a, b, c, d))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5), st.sampled_from([4, 16, 64]), st.integers(1, 2), st.booleans()
)
def test_documents_of_a_block_are_scanned_as_if_each_stood_alone(lengths, chunk, groups, numbers_come_back):
    time = sum(lengths)
    tensors = tuple(t.requires_grad_() for t in inputs(batch=1, time=time, groups=groups))
    numbers = [i % 2 if numbers_come_back else i for i in range(len(lengths))]
    documents = torch.repeat_interleave(torch.tensor(numbers), torch.tensor(lengths))[None]
    together = ssd_scan(*tensors, chunk, seq_idx=runs_of(documents))
    x, dt, a, b, c, d = tensors
    parts = zip(*(t.split(lengths, 1) for t in (x, dt, b, c)), strict=True)
    alone = torch.cat([ssd_scan(x, dt, a, b, c, d, chunk) for x, dt, b, c in parts], 1)
    assert_rounded(together, alone, 20 + 6)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(*(torch.autograd.grad((y * weight).sum(), tensors) for y in (together, alone)), strict=True):
        assert_rounded(one, other, time * 5 * 6)


def test_all_chunks_at_once_as_on_a_gpu_give_what_one_after_the_other_gives(monkeypatch):
    tensors = tuple(t.requires_grad_() for t in inputs(time=50, groups=2))
    results = []
    for spans in (ssd._spans, lambda x: [slice(0, x.shape[1])]):
        monkeypatch.setattr(ssd, "_spans", spans)
        y = ssd_scan(*tensors, chunk=8)
        results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    for one, other in zip(*results, strict=True):
        assert_rounded(one, other, 2 * 50 * 5 * 6)


def test_the_backward_pass_keeps_the_inputs_and_the_chunks_states_and_nothing_else():
    tensors = tuple(t.requires_grad_() for t in inputs(batch=2, time=64, heads=4, head_dim=5, state=6))
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ssd_scan(*tensors, chunk=16)
    states = 2 * 4 * 4 * 5 * 6  # batch, chunks, heads, head dimension, state
    assert sum(kept.values()) <= sum(t.numel() for t in tensors) + states


def test_bf16_inputs_give_what_the_recurrence_gives_to_their_precision():
    x, dt, a, b, c, d = inputs(time=200)
    x, b, c = x.bfloat16(), b.bfloat16(), c.bfloat16()
    found = ssd_scan(x, dt, a, b, c, d)
    assert found.dtype == torch.float32
    assert relative_error(found, recurrence(*(t.double() for t in (x, dt, a, b, c, d)))) < rounding(
        3, torch.bfloat16
    )  # step, decay and state


def test_in_fp16_a_state_may_be_larger_than_fp16s_largest_number():
    """What hardly decays adds up over tokens: here to 160,000, where fp16 ends at 65,504."""
    x, dt, a, b, c, d = inputs(time=200, step=1e-3, rate=1e-3)
    x, b = 20 + x, 40 + b
    halves = [x.half().requires_grad_(), b.half().requires_grad_(), (c * 1e-3).half().requires_grad_()]
    exact = doubled(halves)
    found, expected = (
        scan(x_, dt_ * 1e3, a_, b_, c_, d_)
        for scan, (x_, b_, c_), (dt_, a_, d_) in (
            (ssd_scan, halves, (dt, a * 1e-3, d)),
            (recurrence, exact, [t.double() for t in (dt, a * 1e-3, d)]),
        )
    )
    assert torch.isfinite(found).all()
    assert relative_error(found, expected) < rounding(3, torch.float16)
    gradients = torch.autograd.grad(1e-3 * found.sum(), halves)
    for one, other in zip(gradients, torch.autograd.grad(1e-3 * expected.sum(), exact), strict=True):
        assert relative_error(one, other) < rounding(20, torch.float16)  # there and back, and C is nearly subnormal


@pytest.mark.parametrize("step", [1e-3, 1e-2])
def test_in_fp16_a_small_state_is_as_exact_as_a_large_one(step):
    x, dt, a, b, c, d = inputs(time=512, step=step)
    x, b, c = (0.1 * x).half(), b.half(), c.half()
    found = ssd_scan(x, dt, a, b, c, 0 * d)
    assert relative_error(found, recurrence(*(t.double() for t in (x, dt, a, b, c, 0 * d)))) < rounding(
        3, torch.float16
    )


def test_decays_are_fp32_whatever_the_inputs_are():
    """One token fades for 20 steps of 1.0035, which in bf16 would be steps of 1 and 7 per cent off in the end."""
    x, b = torch.zeros(1, 21, 1, 1, dtype=torch.bfloat16), torch.ones(1, 21, 1, 1, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    y = ssd_scan(x, torch.full((1, 21, 1), 1.0035), torch.tensor([-1.0]), b, b, torch.zeros(1), chunk=8)
    expected = 1.0035 * (-1.0035 * torch.arange(21.0)).exp()
    torch.testing.assert_close(y.flatten(), expected, rtol=rounding(3, torch.bfloat16), atol=0)
