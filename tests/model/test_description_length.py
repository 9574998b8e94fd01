"""The closed forms are checked against the definitions: Delta W formed explicitly, and autograd, both in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.model import description_length as information
from granite_scu.model.description_length import (
    LowRankUpdate,
    bits,
    decay,
    information_ratio,
    layer_npt,
    penalty_gradient,
    scale_onto,
    squared_norms,
)

SIGMAS = st.floats(1e-4, 1e2)
N_TOKENS = st.integers(1, 10**10)


@st.composite
def adapters(draw, min_layers: int = 1) -> list[LowRankUpdate]:
    """Layers of any shape, rank and scale."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rank = draw(st.integers(1, 6))
    updates = []
    for _ in range(draw(st.integers(min_layers, 4))):
        rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        a = torch.randn(rank, columns, generator=generator, dtype=torch.float64)
        b = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
        updates.append(LowRankUpdate(a, b, draw(st.floats(0.01, 100))))
    return updates


def param_npt(*arguments) -> torch.Tensor:
    return layer_npt(*arguments).sum()


def delta(update: LowRankUpdate) -> torch.Tensor:
    return update.scale * update.b @ update.a


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_description_worked_out_by_hand():
    update = LowRankUpdate(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]), scale=0.5)  # Delta W = [[3, 4]]
    assert squared_norms([update]).tolist() == [25.0]
    assert param_npt([update, update], 0.5, 10).item() == 10.0  # 50 / (2 * 0.25 * 10)
    ((by_a, by_b),) = penalty_gradient([update], sigma=0.5, n_tokens=10)  # weight 0.25 / (0.25 * 10) = 0.1
    torch.testing.assert_close(by_a, torch.tensor([[1.2, 1.6]]))  # 0.1 * 4 * A
    torch.testing.assert_close(by_b, torch.tensor([[5.0]]))  # 0.1 * 2 * 25


@given(adapters())
def test_an_untrained_adapter_costs_nothing_and_is_not_pulled(updates):
    fresh = [LowRankUpdate(u.a, torch.zeros_like(u.b), u.scale) for u in updates]
    assert param_npt(fresh, 0.02, 1000) == 0
    assert not any(gradient.any() for pair in penalty_gradient(fresh, 0.02, 1000) for gradient in pair)


@given(adapters(), st.floats(0.01, 100))
def test_factors_that_give_the_same_model_cost_the_same(updates, c):
    rescaled = [LowRankUpdate(c * u.a, u.b / c, u.scale) for u in updates]
    torch.testing.assert_close(param_npt(rescaled, 0.02, 1000), param_npt(updates, 0.02, 1000), rtol=1e-9, atol=0)


def test_one_nat_is_1_4427_bits():
    assert bits(1.0) == pytest.approx(1.442695, abs=1e-6)


@pytest.mark.parametrize(
    ("data_bpt", "param_bpt", "ratio"),
    [(4.9, 0.1, 0.02), (3, 1, 0.25), (5, 0, 0), (0, 0, 0), (math.nan, 0.1, math.nan), (5, math.nan, math.nan)],
)
def test_ratios_worked_out_by_hand_and_none_of_a_failed_measurement(data_bpt, param_bpt, ratio):
    assert information_ratio(data_bpt, param_bpt) == pytest.approx(ratio, rel=1e-15, nan_ok=True)


@given(st.floats(0, 1e300), st.floats(0, 1e300))
def test_the_ratio_lies_between_zero_and_one(data_bpt, param_bpt):
    assert 0 <= information_ratio(data_bpt, param_bpt) <= 1


@given(st.floats(0.01, 100), st.floats(0, 100), st.floats(0.01, 100))
def test_the_ratio_grows_with_the_description(data_bpt, param_bpt, more):
    assert information_ratio(data_bpt, param_bpt + more) > information_ratio(data_bpt, param_bpt)


# The factors' own description


def test_a_description_of_the_factors_worked_out_by_hand():
    update = LowRankUpdate(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]), scale=0.5)  # 9 + 16 + 4
    assert squared_norms([update], "factors").tolist() == [29.0]
    assert layer_npt([update, update], 0.5, 10, "factors").tolist() == pytest.approx([5.8, 5.8])
    ((by_a, by_b),) = penalty_gradient([update], 0.5, 10, "factors")  # over 0.25 * 10
    torch.testing.assert_close(by_a, torch.tensor([[1.2, 1.6]]))
    torch.testing.assert_close(by_b, torch.tensor([[0.8]]))


# The decoupled actuator


def test_a_decay_worked_out_by_hand():
    """exp(-0.1 * 2 / (0.5^2 * 8)) = exp(-0.1) of the update, and the root of it of each factor."""
    assert decay(2.0, 0.1, sigma=0.5, n_tokens=8) ** 2 == pytest.approx(math.exp(-0.1))
    assert decay(2.0, 0.1, sigma=0.5, n_tokens=8, measure="factors") == pytest.approx(math.exp(-0.1))
    assert decay(0.0, 0.1, sigma=0.5, n_tokens=8) == 1.0


@given(adapters(), st.floats(0, 2))
def test_decayed_factors_shrink_the_update_by_rho_and_its_description_by_the_square(updates, exponent):
    root = decay(exponent, 1.0, sigma=2.0, n_tokens=1)
    rho = math.exp(-exponent / 4)
    shrunk = [LowRankUpdate(root * u.a, root * u.b, u.scale) for u in updates]
    for one, other in zip(shrunk, updates, strict=True):
        torch.testing.assert_close(delta(one), rho * delta(other), rtol=1e-12, atol=1e-13)
    before, after = param_npt(updates, 2.0, 1), param_npt(shrunk, 2.0, 1)
    torch.testing.assert_close(after, rho**2 * before, rtol=1e-9, atol=0)


@given(st.floats(0, 1e30), st.floats(0, 10))
def test_no_step_takes_more_than_half_of_a_factor(lam, learning_rate):
    assert 0.5 <= decay(lam, learning_rate, sigma=0.02, n_tokens=1000) <= 1


def test_a_projection_worked_out_by_hand():
    """Half of every factor takes a sixteenth of |B A|^2, and a quarter of |A|^2 + |B|^2."""
    assert scale_onto(torch.tensor(16.0), 1.0).item() == 0.5
    assert scale_onto(torch.tensor(4.0), 1.0, "factors").item() == 0.5
    assert scale_onto(torch.tensor(0.9), 1.0).item() == 1.0


# From an adapter on


@st.composite
def started(draw) -> list[LowRankUpdate]:
    """Layers on their way from somewhere, by steps of any size, and some that started from zero."""
    updates = draw(adapters(min_layers=2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    step = 10.0 ** draw(st.floats(-6, 1))

    def near(factor: torch.Tensor) -> torch.Tensor:
        return factor + step * torch.randn(factor.shape, generator=generator, dtype=torch.float64)

    origins = [(near(u.a), near(u.b)) if draw(st.booleans()) else None for u in updates]
    return [replace(u, origin=origin) for u, origin in zip(updates, origins, strict=True)]


def moved(update: LowRankUpdate) -> torch.Tensor:
    """Delta W - Delta W_0, formed."""
    if update.origin is None:
        return delta(update)
    a0, b0 = update.origin
    return delta(update) - update.scale * b0 @ a0


def test_a_way_from_an_adapter_worked_out_by_hand():
    """From 1 * [1, 0] to 2 * [3, 4], halved: [2.5, 4]."""
    origin = (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0]]))
    update = LowRankUpdate(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]), 0.5, origin)
    assert squared_norms([update]).tolist() == [2.5**2 + 4**2]
    assert squared_norms([update], "factors").tolist() == [2**2 + 4**2 + 1]
    ((by_a, by_b),) = penalty_gradient([update], sigma=0.5, n_tokens=10)  # scale / (sigma^2 N) = 0.2
    torch.testing.assert_close(by_a, 0.2 * 2 * torch.tensor([[2.5, 4.0]]))
    torch.testing.assert_close(by_b, 0.2 * torch.tensor([[2.5 * 3 + 4 * 4]]))


@given(started())
def test_from_an_adapter_on_it_is_the_way_from_there_that_is_measured(updates):
    explicit = torch.stack([moved(u).square().sum() for u in updates])
    size = max(float(delta(u).norm()) for u in updates)  # what the explicit difference is rounded at
    torch.testing.assert_close(squared_norms(updates).sqrt(), explicit.sqrt(), rtol=1e-7, atol=1e-13 * size)


@given(started(), SIGMAS, N_TOKENS, st.sampled_from(["delta", "factors"]))
def test_its_gradient_is_what_autograd_finds(updates, sigma, n_tokens, measure):
    tracked = [replace(u, a=u.a.requires_grad_(), b=u.b.requires_grad_()) for u in updates]

    def squared(u: LowRankUpdate) -> torch.Tensor:
        if measure == "delta":
            return moved(u).square().sum()
        a0, b0 = u.origin or (0, 0)
        return (u.a - a0).square().sum() + (u.b - b0).square().sum()

    explicit = sum(map(squared, tracked)) / (2 * sigma**2 * n_tokens)
    expected = torch.autograd.grad(explicit, [factor for u in tracked for factor in (u.a, u.b)])
    found = [g for pair in penalty_gradient(tracked, sigma, n_tokens, measure) for g in pair]
    by_autograd = torch.autograd.grad(
        param_npt(tracked, sigma, n_tokens, measure), [factor for u in tracked for factor in (u.a, u.b)]
    )
    for one, other, third in zip(found, expected, by_autograd, strict=True):
        assert relative_error(one, other) < 1e-7  # the explicit difference cancels, ours does not
        assert relative_error(one, third) < 1e-9
        assert not one.requires_grad


@given(adapters(), st.sampled_from([torch.float32, torch.float64]), st.sampled_from(["delta", "factors"]))
def test_at_the_start_it_is_zero_to_the_last_bit(updates, dtype, measure):
    here = [LowRankUpdate(u.a.to(dtype), u.b.to(dtype), u.scale) for u in updates]
    here = [replace(u, origin=(u.a.clone(), u.b.clone())) for u in here]
    assert squared_norms(here, measure).tolist() == [0.0] * len(here)
    assert not any(gradient.any() for pair in penalty_gradient(here, 0.02, 1000, measure) for gradient in pair)


@given(adapters(), st.floats(0.25, 4))
def test_factors_that_give_the_adapter_at_the_start_cost_nothing_but_rounding(updates, c):
    turned = [LowRankUpdate((c * u.a).float(), (u.b / c).float(), u.scale, (u.a.float(), u.b.float())) for u in updates]
    for norm, u in zip(squared_norms(turned).tolist(), updates, strict=True):
        size = float(u.scale**2 * u.a.square().sum() * u.b.square().sum())
        assert 0 <= norm <= 1e-5 * size


@given(started(), st.sampled_from(["delta", "factors"]))
def test_in_batches_as_on_a_gpu_it_is_what_it_is_one_by_one(updates, measure):
    def flipped(u: LowRankUpdate) -> LowRankUpdate:
        origin = u.origin and (u.origin[0].flip(1), u.origin[1].flip(0))
        return LowRankUpdate(u.a.flip(1), u.b.flip(0), u.scale, origin)

    updates = [*updates, *map(flipped, updates)]
    kinds = {}
    for layer, u in enumerate(updates):
        kinds.setdefault((u.a.shape, u.b.shape, u.scale, u.origin is None), []).append(layer)
    alone = squared_norms(updates, measure), penalty_gradient(updates, 0.5, 10, measure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(information, "_alike", lambda _: list(kinds.values()))
        batched = squared_norms(updates, measure), penalty_gradient(updates, 0.5, 10, measure)
    torch.testing.assert_close(batched, alone)


def test_s_and_lambda_are_exact_where_a_run_takes_tf32(monkeypatch):
    """The switch is the process's, so what acts on a GPU can be seen here."""
    taken, product = [], torch.Tensor.__matmul__

    def watched(self, other):
        taken.append(torch.get_float32_matmul_precision())
        return product(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    update = LowRankUpdate(torch.ones(2, 3), torch.ones(4, 2), 1.0)
    torch.set_float32_matmul_precision("high")
    try:
        layer_npt([update], 0.02, 10)
        penalty_gradient([update], 0.02, 10)
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(taken) == {"highest"} and len(taken) >= 4


def test_s_is_exact_under_the_newer_switch_of_transformers_too(monkeypatch):
    taken, product, switches = set(), torch.Tensor.__matmul__, (torch.backends.cuda.matmul, torch.backends)

    def watched(self, other):
        taken.add(torch.backends.cuda.matmul.fp32_precision)
        return product(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32"  # as TrainingArguments(tf32=True) does
    try:
        layer_npt([LowRankUpdate(torch.ones(2, 3), torch.ones(4, 2), 1.0)], 0.02, 10)
        assert taken == {"ieee"} and torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
