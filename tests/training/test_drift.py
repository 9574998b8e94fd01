"""Drift on general text against its definition, its gradient against finite differences, and what it leaves alone."""

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from rounding import OF_SMALL, rounding
from torch import Tensor
from torch.nn import functional as F

from granite_scu.config.settings import TINY_MODEL
from granite_scu.model import kl_divergence
from granite_scu.model.drift import MIN_ANCHOR, GeneralPart, Turns, anchor_tokens
from granite_scu.model.loading import WEIGHT_DTYPES
from granite_scu.model.saved_adapter import open_initial_adapter
from granite_scu.storage.checkpoint import save_adapter
from granite_scu.training.module import GraniteModule

LAMBDA = 3.0
FAST = {"learning_rate": 5e-2}


class Anchored(L.Callback):
    """Has drift on some general text join the loss, and keeps what the optimizer is given."""

    def __init__(self, general: list[dict], lam: float = LAMBDA) -> None:
        self.general, self.lam, self.given = general, lam, []
        self.drifts, self.modes = [], []

    def on_train_start(self, trainer, module):
        self.part = GeneralPart(module.as_trained(), self.general)
        module.drift_gradient, module.lam = self.part.gradient, self.lam
        self.at_first = self.part.read().bpt
        optimizer = trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda *_: self.given.append([p.grad.clone() for p in module.factors]))

    def on_train_batch_end(self, trainer, module, *_):
        self.drifts.append((self.part.read().bpt, float(literal(module, self.general)) / 0.6931471805599453))
        self.modes.append(module.model.training)


class UnderSGD(GraniteModule):
    """Steps that depend on the gradient's size, and one at a time small enough to compare."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.factors, lr=0.05)


@torch.no_grad()
def give_size(module, std: float = 0.3) -> None:
    """Give every factor some value, as training does."""
    generator = torch.Generator().manual_seed(1)
    for factor in module.factors:
        factor += std * torch.randn(factor.shape, generator=generator).to(factor)


@torch.no_grad()
def literal(module, batches: list[dict]) -> Tensor:
    """KL(model as training began || now) in nats per counted token, by the models' own logits and the definition."""
    nats, tokens = 0.0, 0
    module.model.eval()
    for batch in batches:
        counted = batch["labels"] != -100
        now = module.language_model(input_ids=batch["input_ids"], use_cache=False).logits[counted].double().softmax(-1)
        with module.as_it_began():
            base = module.language_model(input_ids=batch["input_ids"], use_cache=False).logits[counted].double()
        p = base.softmax(-1)
        nats, tokens = nats + (p * (p / now).log()).sum(), tokens + int(counted.sum())
    module.model.train()
    return nats / tokens


@torch.no_grad()
def objective(module, window: list[dict], general: list[dict]) -> float:
    """CE + lambda F, each in nats per token."""
    module.model.eval()
    nats = sum(float(module(**batch)) for batch in window)
    module.model.train()
    return nats / sum(int((b["labels"] != -100).sum()) for b in window) + LAMBDA * float(literal(module, general))


def along(module, direction: list[Tensor], f, h: float) -> float:
    """The derivative of f along a direction of the factors, by a central difference of fourth order."""

    def at(x: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(module.factors, direction, alpha=x)
            found = f()
            torch._foreach_add_(module.factors, direction, alpha=-x)
        return found

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


@pytest.fixture
def from_adapter(make_module, tmp_path):
    """What a run that starts from an adapter is made with."""
    first = make_module()
    give_size(first, 0.1)
    save_adapter(first.model, tmp_path / "adapter", first.base.name)
    return {"start": open_initial_adapter(str(tmp_path / "adapter"), first.base.name)}


@pytest.mark.parametrize("case", ["plain", "checkpointed", "another head", "from an adapter", "experts"])
def test_the_optimizer_is_given_the_gradient_of_loss_and_drift(
    make_module, fit, make_batches, case, request, monkeypatch
):
    """Along random directions of all factors, at weights away from where it began; norms compute in fp32."""
    more = request.getfixturevalue("from_adapter") if case == "from an adapter" else {}
    if case == "checkpointed":
        more = {"base": {"gradient_checkpointing": True}}
    elif case == "experts":
        more = {"base": {"name": request.getfixturevalue("small_mixture")}, "lora": {"experts": True}}
    elif case == "another head":
        monkeypatch.setattr("granite_scu.model.drift.has_plain_head", lambda *_: False)
    window, general = make_batches(2), make_batches(2, seed=9, rows=3)
    module, anchored = make_module(UnderSGD, **more), Anchored(general)
    give_size(module)
    weights = [factor.detach().clone() for factor in module.factors]
    # Experts' products have no float64; and a longer way would send tokens to other experts, at a jump.
    bits, h = ({}, 1e-3) if case == "experts" else ({"precision": "64-true"}, 0.03)
    fit(module, window, callbacks=[anchored], accumulate_grad_batches=2, **bits)
    module.put(weights)
    generator, found, expected = torch.Generator().manual_seed(2), [], []
    for _ in range(4):
        direction = [torch.randn(w.shape, generator=generator).to(w) for w in weights]
        size = sum(d.square().sum() for d in direction).sqrt()
        direction = [d / size for d in direction]
        found.append(sum(float((g * d).sum()) for g, d in zip(anchored.given[0], direction, strict=True)))
        # The first batch of general text is that of the first step.
        expected.append(along(module, direction, lambda: objective(module, window, general[:1]), h))
        drift = along(module, direction, lambda: float(literal(module, general[:1])), h)
        assert abs(LAMBDA * drift) > 2e-3, "it would be missed"
    # Two roundings of a loss of six nats in each of the differences, which are divided by h.
    assert found == pytest.approx(expected, rel=1e-4, abs=1.5 / h * 6 * rounding(2))


def test_batches_of_general_text_take_turns_and_drift_is_read_on_all(make_module, fit, make_batches):
    general = make_batches(3, seed=9)
    module, anchored = make_module(UnderSGD), Anchored(general)
    turns, read = [], GeneralPart._nats

    def nats(part, number):
        if torch.is_grad_enabled():
            turns.append(number)
        return read(part, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneralPart, "_nats", nats)
        fit(module, make_batches(10), callbacks=[anchored], accumulate_grad_batches=2)
    assert turns == [0, 1, 2, 0, 1]
    found, expected = zip(*anchored.drifts, strict=True)
    assert found[0] == 0 < found[-1]  # within the first window
    # Drift is a difference of logarithms: each is right to so many roundings of logits below 10.
    assert found == pytest.approx(expected, rel=1e-3, abs=10 * rounding(OF_SMALL))
    assert all(anchored.modes)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_the_gradient_is_the_same_however_the_window_is_cut(make_module, fit, make_batches, accumulate):
    whole, general = make_batches(4), make_batches(2, seed=9)
    size = 4 // accumulate
    cut = [whole[i : i + size] for i in range(0, 4, size)]
    given = []
    for windows in ([whole], cut):
        joined = [{name: torch.cat([b[name] for b in w]) for name in w[0]} for w in windows]
        module, anchored = make_module(UnderSGD), Anchored(general)
        give_size(module)
        fit(module, joined, callbacks=[anchored], accumulate_grad_batches=len(joined))
        given.append(torch.cat([g.flatten() for g in anchored.given[0]]))
    # There and back through the layers, for the loss and for drift.
    assert (given[0] - given[1]).norm() <= rounding(4 * OF_SMALL) * given[0].norm()


@pytest.mark.parametrize("growth", [1.0, 2.0, 0.9])
def test_a_sum_is_followed_by_one_part_at_a_time(growth):
    """Parts that differ tenfold, each at its own size of the first reading, grow together: nothing is left out."""
    parts, turns = [1.0, 10.0, 3.0], Turns()
    assert turns.begin(parts) == 14
    read = []
    for tick in range(1, 8):
        turns.next_tick()
        read.append(turns.due)
        assert turns.follow(parts[turns.due] * growth**tick) == pytest.approx(14 * growth**tick)
        assert turns.stale == (growth == 2.0)
        turns.load_state_dict(turns.state_dict())
    turns.next_tick()
    assert read == [0, 1, 2, 0, 1, 2, 0]
    assert math.isnan(turns.follow(math.nan)) and turns.due == 1  # and again
    turns.next_tick()
    assert turns.follow(10.0 * growth**9) == pytest.approx(14 * growth**9)


def test_an_anchor_has_a_tenth_of_a_step_and_no_more_than_a_micro_batch():
    assert [anchor_tokens(32_768, 4), anchor_tokens(32_768, 32), anchor_tokens(100)] == [3276, 1024, MIN_ANCHOR]


def test_a_run_that_is_continued_with_other_ticks_reads_all_parts_anew_and_attention_drops_nothing(
    make_module, fit, make_batches
):
    class Look(L.Callback):
        def on_train_start(self, trainer, module):
            part, turns = GeneralPart(module.as_trained(), make_batches(3, seed=9)), Turns()
            turns.begin([1.0])
            dropping = [layer for layer in module.model.modules() if hasattr(layer, "attention_dropout")]
            for layer in dropping:
                layer.attention_dropout = 0.5
            embedding = module.language_model.get_input_embeddings()
            embedding.dropout = 0.5  # as OPT's layers have it, without a layer of dropout
            embedding.register_forward_hook(lambda of, _, out: F.dropout(out, of.dropout, of.training))
            assert dropping and max(float(g.abs().max()) for g in part.gradient(0)) == 0  # as it began
            give_size(module)
            assert part.follow(turns) == part.read() and len(turns.latest) == 3
            assert {layer.attention_dropout for layer in dropping} | {embedding.dropout} == {0.5}

    fit(make_module(), make_batches(1), callbacks=[Look()])


def test_where_the_head_is_not_plain_a_row_is_read_at_a_time_and_the_sum_is_the_same(
    make_module, fit, make_batches, monkeypatch
):
    heads = []
    states = kl_divergence.states

    def noted(model, ids, *rest):
        heads.append(len(ids))
        return states(model, ids, *rest)

    class Look(L.Callback):
        def on_train_start(self, trainer, module):
            give_size(module)
            plain = GeneralPart(module.as_trained(), make_batches(2, seed=9)).read()
            monkeypatch.setattr("granite_scu.model.drift.has_plain_head", lambda *_: False)
            monkeypatch.setattr(kl_divergence, "states", noted)
            other = GeneralPart(module.as_trained(), make_batches(2, seed=9)).read()
            assert set(heads) == {1}
            assert other.tokens == plain.tokens
            assert (other.bpt, other.base_bpt) == pytest.approx((plain.bpt, plain.base_bpt), rel=1e-4)

    fit(make_module(), make_batches(1), callbacks=[Look()])


class Counted(L.Callback):
    """Reads the general text, and has lambda at 0."""

    def __init__(self, general) -> None:
        self.general = general

    def on_train_start(self, trainer, module):
        self.part = GeneralPart(module.as_trained(), self.general)
        module.drift_gradient = self.part.gradient

    def on_before_optimizer_step(self, trainer, module, optimizer):
        before = [factor.grad.clone() for factor in module.factors]
        self.part.gradient(trainer.global_step)
        self.part.read()
        assert all(torch.equal(factor.grad, b) for factor, b in zip(module.factors, before, strict=True))


@pytest.mark.parametrize("plain_head", [True, False])
def test_with_lambda_at_0_a_run_is_the_plain_one_to_the_bit(make_module, fit, make_batches, monkeypatch, plain_head):
    """Dropout draws the same numbers, and nothing of the run's is left changed by reading drift or its gradient."""
    dropping = {"optimizer": FAST, "lora": {"dropout": 0.3}, "base": {"gradient_checkpointing": True}}
    monkeypatch.setattr("granite_scu.model.drift.has_plain_head", lambda *_: plain_head)
    states = []
    for callbacks in ([], [Counted(make_batches(3, seed=9))]):
        module = make_module(**dropping)
        torch.manual_seed(5)
        fit(module, make_batches(6), callbacks=callbacks, accumulate_grad_batches=2)
        states.append(([factor.detach().clone() for factor in module.factors], torch.get_rng_state()))
    (plain, state), (read, after) = states
    assert all(torch.equal(a, b) for a, b in zip(plain, read, strict=True))
    assert torch.equal(state, after)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_in_half_precision_the_gradient_is_that_of_fp32_but_for_rounding(make_module, fit, make_batches, precision):
    general, given = make_batches(2, seed=9, rows=4), []
    plugins = {
        "16-mixed": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
        "bf16-mixed": MixedPrecision("bf16-mixed", "cpu"),
    }
    for name in ("32-true", precision):
        module = make_module(UnderSGD, dtype=WEIGHT_DTYPES[name])

        class Take(L.Callback):
            def on_train_start(self, trainer, module):
                give_size(module)
                given.append(torch.cat([g.flatten() for g in GeneralPart(module.as_trained(), general).gradient(0)]))

        fit(module, make_batches(1), callbacks=[Take()], plugins=[plugins[name]] if name in plugins else [])
    exact, rounded = given
    assert exact.norm() > 1e-2
    # Each of the layers' sums is rounded at its end, and the two ways of some ten sums count once each way.
    assert (exact - rounded).norm() <= rounding(2 * 10, torch.bfloat16) * exact.norm()


def test_a_gradient_that_is_not_finite_lets_the_step_be_skipped(make_module, fit, make_batches):
    class Broken(Anchored):
        def on_train_start(self, trainer, module):
            super().on_train_start(trainer, module)
            real = module.drift_gradient
            module.drift_gradient = lambda step: [g * (torch.nan if step == 1 else 1.0) for g in real(step)]

    module = make_module(optimizer=FAST)
    fit(module, make_batches(3), callbacks=[Broken(make_batches(1, seed=9))])
    window = module.read_window()
    assert (window.applied, window.skipped) == (2, 1)
    assert all(factor.isfinite().all() for factor in module.factors)


def test_its_norm_is_told_apart_from_the_losss(make_module, fit, make_batches):
    module, anchored = make_module(UnderSGD), Anchored(make_batches(1, seed=9))
    give_size(module)
    weights = [factor.detach().clone() for factor in module.factors]
    fit(module, make_batches(1), callbacks=[anchored])
    window = module.read_window()
    module.put(weights)
    expected = LAMBDA * torch.nn.utils.get_total_norm(anchored.part.gradient(0))
    assert window.penalty_grad_norm == pytest.approx(float(expected), rel=rounding(OF_SMALL))
    fit(module, make_batches(1))
    assert window.data_grad_norm == pytest.approx(module.read_window().data_grad_norm, rel=rounding(OF_SMALL))


@pytest.mark.slow
def test_of_a_base_in_4_bits_too(make_module, fit, make_batches):
    """The base's side and the model's have the same rounded weights: drift is 0 at first, and then it is held."""
    ends = []
    for lam in (0.0, 300.0):
        module = make_module(base={"name": TINY_MODEL, "quantize_4bit": True}, optimizer={"learning_rate": 1e-3})
        anchored = Anchored(make_batches(1, seed=9), lam)
        fit(module, make_batches(8), callbacks=[anchored])
        assert anchored.at_first == 0
        ends.append(anchored.drifts[-1][0])
    assert 0 < ends[1] < ends[0] / 4
