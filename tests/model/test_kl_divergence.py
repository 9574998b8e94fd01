"""Drift, chunk by chunk, against the model's own logits, in float64."""

import pytest
import torch
from references import granite, of_type

from granite_scu.model import kl_divergence as divergence
from granite_scu.model.loss import has_plain_head


@pytest.fixture
def ids():
    return torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(0))


# Untied, so that the head is the same on both sides, as it is under adapters.
def other():
    return of_type("olmo2")


class Drift:
    """Drift on some positions of a batch as a function of the adapted model's hidden states, beside its definition."""

    def __init__(self, build, ids, dtype=torch.float64) -> None:
        self.model = build().eval().to(dtype)
        self.ids, self.positions = ids, torch.tensor([0, 2, 3, 9, 17])
        self.plain = has_plain_head(self.model)
        self.head = self.model.get_output_embeddings().weight
        with torch.no_grad():
            self.base = self.states()
            self.model.get_input_embeddings().weight += 0.1
            self.now = self.states()

    def states(self):
        return divergence.states(self.model, self.ids, self.positions, self.plain)

    def found(self, now, chunk=2):
        return divergence.drift_of(self.model, self.base, now, self.plain, chunk)

    def literal(self, now):
        scaling = getattr(self.model.config, "logits_scaling", 1.0)
        q, p = ((of @ self.head.T / scaling if self.plain else of).softmax(-1) for of in (now, self.base))
        return (p * (p / q).log()).sum()


@pytest.fixture(params=["granite", "other", "capped", "biased"])
def drift(request, ids):
    """Of a model known to have a plain head, of one that is found to have one, and of two that have another."""
    changed = {"capped": _capped, "biased": _biased}
    build = {"granite": granite, "other": other}.get(request.param, lambda: changed[request.param](other()))
    made = Drift(build, ids)
    assert made.plain == (request.param not in changed)
    with torch.no_grad():
        assert made.plain or torch.equal(made.now, made.model(ids).logits.flatten(0, 1)[made.positions])
    return made


def _biased(model):
    """Its head adds a bias, as Phi's does."""
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, model.config.vocab_size))
    return model


def _capped(model):
    """Its head squeezes the logits, as Gemma's does."""

    def squeezed(module, args, kwargs, output):
        output.logits = torch.tanh(output.logits)
        return output

    model.register_forward_hook(squeezed, with_kwargs=True)
    return model


def test_drift_is_what_its_definition_says(drift):
    expected = float(drift.literal(drift.now).detach())
    assert expected > 1e-3
    # Both in 53 bits; a KL is a difference of sums, whose terms are a thousand times as large.
    assert float(drift.found(drift.now)) == pytest.approx(expected, rel=1e-9)
    assert float(drift.found(drift.now, chunk=100)) == pytest.approx(expected, rel=1e-9)
    targets = torch.tensor([1, 2, 3, 4, 0])
    scaling = getattr(drift.model.config, "logits_scaling", 1.0)
    logits = drift.base @ drift.head.T / scaling if drift.plain else drift.base
    nats = -logits.log_softmax(-1)[range(5), targets].sum()
    # Where the head is not plain they are summed in fp32.
    found = float(divergence.nats_of(drift.model, drift.base, targets, drift.plain))
    assert found == pytest.approx(float(nats.detach()), rel=1e-9 if drift.plain else 1e-6)


def test_the_gradient_of_drift_is_its_own(drift):
    now = drift.now.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda of: drift.found(of), now)
    (found,) = torch.autograd.grad(3 * drift.found(now), now)
    (expected,) = torch.autograd.grad(3 * drift.literal(now), now)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_model_as_it_began_has_neither_drift_nor_a_gradient(drift):
    now = drift.base.clone().requires_grad_()
    total = drift.found(now)
    (gradient,) = torch.autograd.grad(total, now)
    # p (ln p - ln q) and q - p, both of the same bits; autograd's own rounds its sum of p, which is 1.
    assert abs(float(total.detach())) < 1e-12 and gradient.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_fewer_bits_it_is_the_same_up_to_their_rounding(dtype, ids):
    """Each state and the head are rounded, and the products, of 16 terms, too: some 20 roundings of logits below 1."""
    whole, drift = Drift(granite, ids), Drift(granite, ids, dtype)
    now = whole.now.clone().requires_grad_()
    (expected,) = torch.autograd.grad(whole.found(now), now)
    rounded = drift.now.clone().requires_grad_()
    total = drift.found(rounded)
    (found,) = torch.autograd.grad(total, rounded)
    assert (found.dtype, total.dtype) == (dtype, torch.float64)
    error = 20 * torch.finfo(dtype).eps / 2
    assert (found.double() - expected).norm() <= 4 * error * drift.base.double().norm() / 10 + error * expected.norm()


def test_what_is_padded_or_not_counted_leaves_no_trace(ids):
    drift = Drift(granite, ids)
    padded = torch.cat([ids, torch.full((3, 4), 5)], 1)
    at = drift.positions // 7 * 11 + drift.positions % 7
    found = divergence.states(drift.model, padded, at, drift.plain)
    torch.testing.assert_close(found, drift.now, rtol=1e-12, atol=1e-12)
