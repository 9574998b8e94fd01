"""Proof that lambda reaches the weights, and that everything else in a step's gradient is what it should be.

Real runs of a small model under Lightning's Trainer. ``Probe`` is an SGD that keeps what each optimizer step was
given; what it should have been given is worked out apart, with the model's own logits and autograd.
"""

import math
import traceback
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import lightning as L
import pytest
import torch
from rounding import OF_SMALL, rounding
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from granite_scu.config.errors import RunFailed
from granite_scu.model import loading, loss
from granite_scu.model.compilation import is_product
from granite_scu.training.module import GraniteModule, schedule

RATE = 0.05


@dataclass
class Step:
    """What an optimizer step was given: the factors before it, and their gradient."""

    weights: list[Tensor]
    gradient: list[Tensor]


class Probe(torch.optim.SGD):
    """SGD that remembers."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=RATE)
        self.seen: list[Step] = []

    def step(self, closure):
        loss = closure()  # the backward passes, then Lightning's hooks before an optimizer step
        parameters = self.param_groups[0]["params"]
        self.seen.append(Step([p.detach().clone() for p in parameters], [p.grad.clone() for p in parameters]))
        super().step()
        return loss


class Endless(IterableDataset):
    """Micro-batches without end, as a run's loader gives them."""

    def __init__(self, batches: list[dict]) -> None:
        self.batches = batches

    def __iter__(self):
        return cycle(self.batches)


class UnderSGD(GraniteModule):
    def configure_optimizers(self):
        return Probe(self.factors)


class UnderUnfusedAdam(GraniteModule):
    """As under a GradScaler."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.factors, lr=RATE, weight_decay=0.0, fused=False)


@torch.no_grad()
def set_factors(module, values) -> None:
    for factor, value in zip(module.factors, values, strict=True):
        factor.copy_(value)


def trained_factors(module, size: float = 0.1) -> None:
    """Give every B some value, as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for u in module.updates.values():
            u.b.copy_(size * torch.randn(u.b.shape, generator=generator))


def supervised(batch: dict) -> int:
    return int((batch["labels"] != -100).sum())


def plain_nats(module, batch: dict) -> Tensor:
    logits = module.language_model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


def mean_gradient(module, window: list[dict]) -> list[Tensor]:
    """Of the mean cross-entropy over every supervised token of a window."""
    nats = sum(plain_nats(module, batch) for batch in window)
    return list(torch.autograd.grad(nats / sum(map(supervised, window)), module.factors))


def gradient_of_mean_of_means(module, window: list[dict]) -> list[Tensor]:
    """Of what is often taken for it."""
    means = [plain_nats(module, batch) / supervised(batch) for batch in window]
    return list(torch.autograd.grad(sum(means) / len(means), module.factors))


def description_gradient(module) -> list[Tensor]:
    """Of ParamNPT, by autograd through its definition."""
    explicit = sum((u.scale * u.b @ u.a).square().sum() for u in module.updates.values())
    return list(torch.autograd.grad(explicit / (2 * module.prior_sigma**2 * module.n_tokens), module.factors))


def norm(tensors) -> float:
    return float(torch.nn.utils.get_total_norm(list(tensors)))


def minus(ones, others) -> list[Tensor]:
    return [one - other for one, other in zip(ones, others, strict=True)]


def plus(ones, others, weight: float = 1.0) -> list[Tensor]:
    return [one + weight * other for one, other in zip(ones, others, strict=True)]


def error(found, expected) -> float:
    return norm(minus(found, expected)) / norm(expected)


def run(make_module, fit, batches, lam=0.0, weights=None, **arguments) -> tuple[GraniteModule, list[Step]]:
    """Train under the probe; returns the module and what its steps were given."""
    settings = {name: arguments.pop(name) for name in ("accumulate_grad_batches", "callbacks") if name in arguments}
    module = make_module(UnderSGD, **arguments)
    if weights:
        set_factors(module, weights)
    module.lam = lam
    trainer = fit(module, batches, **settings)
    return module, trainer.optimizers[0].seen


# Lambda


@pytest.mark.parametrize("lam", [0.03, 300.0])
def test_lambda_adds_exactly_its_multiple_of_the_description_gradient(make_module, fit, make_batches, lam):
    """At weights that training has reached, where B is not zero."""
    trained, _ = run(make_module, fit, make_batches(3))
    assert all(u.b.any() for u in trained.updates.values())
    weights = [factor.detach().clone() for factor in trained.factors]
    # A prior this narrow makes the penalty larger than the data's gradient, so that fp32 can tell the difference.
    prior = {"sigma": 0.02 * math.sqrt(0.03 / lam), "n_tokens": 1}
    (without,), (with_penalty,) = (
        run(make_module, fit, make_batches(1), each, weights, **prior)[1] for each in (0.0, lam)
    )
    set_factors(trained, weights)
    trained.prior_sigma, trained.n_tokens = prior["sigma"], prior["n_tokens"]
    expected = [lam * gradient for gradient in description_gradient(trained)]
    assert norm(expected) > norm(without.gradient)
    assert error(minus(with_penalty.gradient, without.gradient), expected) < rounding(
        2 * (32 + 4)
    )  # sums over a side of Delta W and over the rank


def test_every_step_follows_the_gradient_under_the_lambda_of_that_step(make_module, fit, make_batches):
    class SetStrength(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            module.lam = [0.0, 5.0, 50.0][index // 2]

    batches = make_batches(6)
    module, steps = run(make_module, fit, batches, accumulate_grad_batches=2, callbacks=[SetStrength()])
    for i, (lam, step) in enumerate(zip([0.0, 5.0, 50.0], steps, strict=True)):
        set_factors(module, step.weights)
        objective = plus(mean_gradient(module, batches[2 * i : 2 * i + 2]), description_gradient(module), lam)
        assert error(step.gradient, objective) < rounding(2 * OF_SMALL)  # there and back


# Other ways to act


def product(update) -> Tensor:
    return update.scale * update.b @ update.a


@pytest.fixture
def start(make_module):
    """Factors of which every B has some value."""
    module = make_module()
    trained_factors(module)
    return [factor.detach().clone() for factor in module.factors]


@pytest.mark.parametrize("each", [False, True], ids=["one lambda", "one a matrix"])
def test_decoupled_lambda_shrinks_the_update_by_exactly_its_factor_and_no_gradient(
    make_module, fit, make_batches, start, each
):
    runs = []
    for scale in (0.0, 1.0):
        module = make_module(UnderSGD, actuator="decoupled")
        set_factors(module, start)
        lams = [0.1 * i if each else 2.0 for i in range(len(module.updates))]
        module.lam, module.layer_lams = scale * 2.0, tuple(scale * lam for lam in lams) if each else None
        runs.append((module, fit(module, make_batches(1)).optimizers[0].seen[0]))
    (plain, without), (shrunk, with_lambda) = runs
    assert norm(minus(with_lambda.gradient, without.gradient)) == 0
    for lam, one, other in zip(lams, shrunk.updates.values(), plain.updates.values(), strict=True):
        rho = math.exp(-RATE * lam / (plain.prior_sigma**2 * plain.n_tokens))
        assert error([product(one)], [rho * product(other)]) < rounding(16)  # the factors', and over the rank
    window = shrunk.read_window()
    assert window.penalty_grad_norm == 0
    assert window.grad_norm == window.data_grad_norm > 0


def test_decoupled_lambda_acts_at_the_rate_of_the_step(make_module, fit, make_batches, start):
    """With the learning rate at half its peak, and at every step."""
    modules = []
    for lam in (0.0, 2.0):
        module = make_module(UnderSGD, actuator="decoupled", optimizer={"learning_rate": 123.0})
        set_factors(module, start)
        module.lam = lam

        class Halve(L.Callback):
            def on_train_start(self, trainer, module):
                trainer.optimizers[0].param_groups[0]["lr"] = RATE / 2

        empty = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in make_batches(3)]
        fit(module, empty, callbacks=[Halve()])  # without a label nothing else moves the factors
        modules.append(module)
    untouched, shrunk = modules
    rho = math.exp(-RATE / 2 * 2.0 / (shrunk.prior_sigma**2 * shrunk.n_tokens))
    for one, other in zip(shrunk.updates.values(), untouched.updates.values(), strict=True):
        assert error([product(one)], [rho**3 * product(other)]) < rounding(3 * 16)


def test_a_constant_decoupled_lambda_is_adamws_weight_decay(make_module, fit, make_batches, start):
    """Of lambda / (2 sigma^2 N), but for terms of second order in the learning rate."""
    rate, lam, batches = 1e-3, 40.0, make_batches(6)

    def trained(lam: float = 0.0, weight_decay: float = 0.0) -> list[torch.Tensor]:
        module = make_module(actuator="decoupled", optimizer={"learning_rate": rate, "weight_decay": weight_decay})
        set_factors(module, start)
        module.lam = lam
        fit(module, batches)
        return module.factors

    sigma, n_tokens = make_module().prior_sigma, make_module().n_tokens
    free, ours, adamw = trained(), trained(lam), trained(weight_decay=lam / (2 * sigma**2 * n_tokens))
    assert norm(minus(ours, free)) > 0.05 * norm(free)
    assert norm(minus(ours, adamw)) < 0.03 * norm(minus(ours, free))


@pytest.mark.parametrize("cls", [GraniteModule, UnderUnfusedAdam])
@pytest.mark.parametrize("way", ["decoupled", "projection"])
def test_a_skipped_step_leaves_the_update_alone_in_every_way(make_module, fit, make_batches, poison, start, cls, way):
    module = make_module(cls, actuator="decoupled")
    set_factors(module, start)
    if way == "decoupled":
        module.lam = 2.0
    else:
        module.param_bound = 1e-6
    (batch,) = make_batches(1)
    fit(module, [poison(module, batch)])
    assert same(module.factors, start)


def test_each_matrix_may_have_a_lambda_of_its_own(make_module, fit, make_batches, start):
    gradients = []
    lams = None
    for scale in (0.0, 1.0):
        module = make_module(UnderSGD, n_tokens=1)
        set_factors(module, start)
        lams = tuple(0.5 + 0.25 * i for i in range(len(module.updates)))
        module.lam, module.layer_lams = 77.0, tuple(scale * lam for lam in lams)
        (step,) = fit(module, make_batches(1)).optimizers[0].seen
        gradients.append(step.gradient)
    set_factors(module, start)
    expected = [lams[i // 2] * gradient for i, gradient in enumerate(description_gradient(module))]
    assert error(minus(gradients[1], gradients[0]), expected) < rounding(2 * OF_SMALL)


@pytest.mark.parametrize("measure", ["delta", "factors"])
def test_projection_keeps_the_description_on_its_bound_and_the_updates_direction(
    make_module, fit, make_batches, start, measure
):
    free, _ = run(make_module, fit, make_batches(1), 0.0, start, measure=measure)
    bound = math.fsum(free.layer_bpt()) / 3
    module = make_module(UnderSGD, measure=measure)
    set_factors(module, start)
    module.param_bound = bound
    fit(module, make_batches(1))
    assert math.fsum(module.layer_bpt()) == pytest.approx(bound, rel=1e-5)
    shares = [one / other for one, other in zip(module.layer_bpt(), free.layer_bpt(), strict=True)]
    assert shares == pytest.approx([1 / 3] * len(shares), rel=1e-5)
    for one, other in zip(module.updates.values(), free.updates.values(), strict=True):
        cosine = (product(one) * product(other)).sum() / (product(one).norm() * product(other).norm())
        assert cosine.item() == pytest.approx(1, abs=1e-5)


def test_projection_leaves_a_shorter_description_alone(make_module, fit, make_batches, start):
    free, _ = run(make_module, fit, make_batches(2), 0.0, start)
    module = make_module(UnderSGD)
    set_factors(module, start)
    module.param_bound = 1.01 * math.fsum(free.layer_bpt())
    fit(module, make_batches(2))
    assert same(module.factors, free.factors)


def test_lambda_on_the_factors_adds_their_own_gradient(make_module, fit, make_batches, start):
    (without,), (with_penalty,) = (
        run(make_module, fit, make_batches(1), lam, start, measure="factors")[1] for lam in (0.0, 3.0)
    )
    module = make_module(measure="factors")
    set_factors(module, start)
    explicit = sum(u.a.square().sum() + u.b.square().sum() for u in module.updates.values())
    unit = 2 * module.prior_sigma**2 * module.n_tokens
    expected = torch.autograd.grad(3.0 * explicit / unit, module.factors)
    assert error(minus(with_penalty.gradient, without.gradient), expected) < rounding(2 * OF_SMALL)
    assert math.fsum(module.layer_bpt()) == pytest.approx(float(explicit) / unit / math.log(2), rel=rounding(OF_SMALL))


# The data's gradient


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_data_gradient_is_the_mean_over_the_windows_supervised_tokens(make_module, fit, make_batches, accumulate):
    """Also in the short window at the end of an epoch, which Lightning divides like a full one."""
    batches = make_batches(7)
    module, steps = run(make_module, fit, batches, accumulate_grad_batches=accumulate)
    windows = [batches[i : i + accumulate] for i in range(0, 7, accumulate)]
    assert len(windows[-1]) == 1
    for step, window in zip(steps, windows, strict=True):
        set_factors(module, step.weights)
        assert error(step.gradient, mean_gradient(module, window)) < rounding(2 * OF_SMALL)
        if len(window) > 1:
            assert error(step.gradient, gradient_of_mean_of_means(module, window)) > 0.01


def test_a_window_without_supervised_tokens_leaves_the_weights_alone(make_module, fit, make_batches):
    (batch,) = make_batches(1)
    module, (step,) = run(make_module, fit, [batch | {"labels": torch.full_like(batch["labels"], -100)}])
    assert norm(step.gradient) == 0
    assert math.isnan(module.read_window().data_bpt)


def test_training_recomputes_activations_where_it_is_told_to(make_module, fit, make_batches):
    """transformers heeds gradient checkpointing in training mode only, and loads models in evaluation mode."""
    calls, steps = [], []
    for checkpointing in (False, True):
        module = make_module(UnderSGD, base={"gradient_checkpointing": checkpointing})
        counted = []
        module.language_model.model.layers[0].mamba.in_proj.register_forward_hook(lambda *_, c=counted: c.append(1))
        steps += fit(module, make_batches(1)).optimizers[0].seen
        calls.append(len(counted))
    assert calls == [1, 2]
    assert error(steps[1].gradient, steps[0].gradient) < rounding(2 * OF_SMALL)


def test_a_model_that_cannot_be_compiled_is_a_run_that_failed(make_module, make_batches, monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no compiler here")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=broken))
    module = make_module(base={"compile": True})
    with pytest.raises(RunFailed, match=r"--torch-compile: .*no compiler here.*--no-torch-compile"):
        module(**make_batches(1)[0])


def test_without_gradients_the_loss_is_in_the_form_that_takes_least_memory(make_module, make_batches):
    loss._compiled_work.cache_clear()
    with torch.no_grad():
        make_module(base={"compile": True})(**make_batches(1)[0])
    assert loss._compiled_work.cache_info().misses == 0


def test_a_layer_of_several_processes_is_compiled_as_one_however_large_its_adapters(
    make_module, make_batches, monkeypatch, group_of_one
):
    graphs, compile_with = [], torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=count))
    torch.compiler.reset()
    module = make_module(base={"compile": True}, lora={"rank": 2048})
    torch.nn.parallel.DistributedDataParallel(module.language_model)(make_batches(1)[0]["input_ids"])
    assert len(graphs) == 3  # a Mamba-2 and an attention layer, the norm


@pytest.mark.slow
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_a_compiled_model_that_recomputes_all_but_products_keeps_less_and_has_the_same_gradient(
    make_module, fit, make_batches, monkeypatch, in_4_bits
):
    if in_4_bits:
        pytest.importorskip("bitsandbytes")
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compile_with(function, backend="aot_eager_decomp_partition")
    )
    kept, steps = [], []

    def keep(tensor):
        kept[-1][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for recomputed in (False, "selective"):
        torch.compiler.reset()
        kept.append({})
        module = make_module(
            UnderSGD, base={"compile": True, "quantize_4bit": in_4_bits, "gradient_checkpointing": recomputed}
        )
        module.forward = partial(_hooked, module.forward, keep)
        steps += fit(module, make_batches(1)).optimizers[0].seen
    assert error(steps[1].gradient, steps[0].gradient) < rounding(2 * OF_SMALL)
    assert sum(kept[1].values()) < sum(kept[0].values())


def test_of_4_bits_the_product_is_kept_and_not_the_weights_that_are_made_for_it():
    pytest.importorskip("bitsandbytes")
    operators = torch.ops.bitsandbytes
    assert is_product(operators.gemm_4bit.default) and not is_product(operators.dequantize_4bit.default)


def _hooked(forward, keep, **batch):
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return forward(**batch)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_compiled_once(small_and_deeper, make_module, fit, make_batches, monkeypatch, backend):
    """Layers of a kind together, whatever lambda does, though validation has no gradients and a smaller last batch."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=backend))

    class Steer(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            module.lam = 0.1 * index

    class Validated(UnderSGD):
        def val_dataloader(self):
            return DataLoader([*make_batches(2), *make_batches(1, rows=1)], batch_size=None)

    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    loss._compiled_work.cache_clear()
    gradients = []
    for compiled in (False, True):
        counters.clear()
        base = {"name": small_and_deeper, "compile": compiled}
        module = make_module(Validated, base=base)
        trained_factors(module)
        trainer = fit(module, make_batches(5), callbacks=[Steer()], val_check_interval=2)
        gradients.append([step.gradient for step in trainer.optimizers[0].seen])
        assert (
            counters["stats"]["unique_graphs"] == 4 * compiled
        )  # a Mamba-2 and an attention layer, the norm, the loss
        assert not counters["graph_break"]
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < 1e-4
    loss._compiled_work.cache_clear()


# Clipping


def test_clipping_acts_on_the_sum_of_data_and_penalty(make_module, fit, make_batches):
    start = make_module()
    trained_factors(start)
    weights = [factor.detach().clone() for factor in start.factors]
    batches = make_batches(1)
    data, penalty = mean_gradient(start, batches), description_gradient(start)
    lam = norm(data) / norm(penalty)  # as large as the data's
    whole = plus(data, penalty, lam)
    limit = norm(data) / 10
    module, (step,) = run(make_module, fit, batches, lam, weights, optimizer={"gradient_clip": limit})
    assert norm(step.gradient) == pytest.approx(limit, rel=1e-4)
    assert error(step.gradient, [limit / norm(whole) * gradient for gradient in whole]) < 1e-4
    window = module.read_window()
    assert window.grad_norm == pytest.approx(norm(whole), rel=rounding(2 * OF_SMALL))  # before clipping
    assert window.data_grad_norm == pytest.approx(norm(data), rel=rounding(2 * OF_SMALL))
    assert window.penalty_grad_norm == pytest.approx(lam * norm(penalty), rel=rounding(2 * OF_SMALL))


def test_a_gradient_below_the_limit_is_not_touched(make_module, fit, make_batches):
    (unclipped,) = run(make_module, fit, make_batches(1))[1]
    (step,) = run(make_module, fit, make_batches(1), optimizer={"gradient_clip": 2 * norm(unclipped.gradient)})[1]
    assert norm(minus(step.gradient, unclipped.gradient)) == 0


# Steps that are not finite


class States(L.Callback):
    """The weights and Adam's state after every optimizer step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        state = trainer.optimizers[0].state_dict()["state"]
        tensors = [value for entry in state.values() for _, value in sorted(entry.items())]
        self.seen.append([t.detach().clone() for t in module.factors + tensors])


def same(ones, others) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("cls", [GraniteModule, UnderUnfusedAdam])
def test_a_step_with_a_loss_that_is_not_finite_is_skipped(make_module, fit, make_batches, poison, cls):
    states = States()
    module, batches = make_module(cls), make_batches(6)
    batches[3] = poison(module, batches[3])
    module.lam = 1.0
    (optimizer,) = fit(module, batches, accumulate_grad_batches=2, callbacks=[states]).optimizers
    first, skipped, third = states.seen[1::2]
    assert same(first, skipped)
    assert not same(skipped, third)
    assert all(torch.isfinite(t).all() for t in third)
    window = module.read_window()
    assert (window.applied, window.skipped) == (2, 1)
    assert window.lr_sum == pytest.approx(2 * optimizer.param_groups[0]["lr"])
    assert window.tokens == sum(supervised(batches[i]) for i in (0, 1, 4, 5))
    assert math.isfinite(window.nats) and math.isfinite(window.grad_norm)


@pytest.mark.parametrize("cls", [GraniteModule, UnderUnfusedAdam])
def test_a_first_step_that_is_not_finite_is_skipped(make_module, fit, make_batches, poison, cls):
    module, untouched, (first, second) = make_module(cls), make_module(cls), make_batches(2)
    fit(module, [poison(module, first), second])
    fit(untouched, [second])
    assert same(module.factors, untouched.factors)


class Waits(TorchDispatchMode):
    """Operators for which the host would wait for a GPU: they read a number, hang on one, or copy one there."""

    WAITED_FOR = tuple(
        getattr(torch.ops.aten, name) for name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh")
    )

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in self.WAITED_FOR:
            self.seen.append(f"{operator} in {traceback.extract_stack()[-4]}")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["loss", "decoupled", "projection"])
@pytest.mark.parametrize("documents", [False, True])
def test_nothing_waits_for_the_device_between_ticks(
    make_module, fit, make_batches, poison, monkeypatch, way, documents
):
    monkeypatch.setattr(loss, "_worth_selecting", lambda labels: None)  # a CPU alone selects
    monkeypatch.setattr(loading, "attention_on", lambda device, config, attention: attention)  # nor reads its masks
    waits = Waits()

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            waits.__enter__()

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            waits.__exit__(None, None, None)

    module = make_module(actuator="loss" if way == "loss" else "decoupled", optimizer={"gradient_clip": 1.0})
    module.lam, module.param_bound = (0.0, 1e-6) if way == "projection" else (1.0, None)
    batches = make_batches(4)
    if documents:
        batches = [batch | {"documents": torch.tensor([[0] * 5 + [1] * 7, [0] * 12])} for batch in batches]
    fit(module, [poison(module, batches[0]), *batches[1:]], accumulate_grad_batches=2, callbacks=[Watch()])
    assert waits.seen == []
    assert module.counts() == (1, 0)
    with waits:
        module.latest_step_was_finite  # noqa: B018
    assert waits.seen, "this one waits, so that it is seen above"


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.float32, "fused"), (torch.float16, "foreach")])
def test_the_optimizer_of_a_run_is_adam_in_few_kernels_without_weight_decay(make_module, dtype, kernels):
    module = make_module(optimizer={"beta2": 0.97}, dtype=dtype)
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {name for name in ("fused", "foreach") if optimizer.defaults[name]} == {kernels}
    assert optimizer.defaults["weight_decay"] == 0
    assert optimizer.defaults["betas"] == (0.9, 0.97)


# The reading


class Read(L.Callback):
    """Reads the module's window at the end of the given micro-batches."""

    def __init__(self, *after: int):
        self.after, self.windows = after, []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index in self.after:
            self.windows.append(module.read_window())


def test_a_reading_covers_every_token_since_the_last_one(make_module, fit, make_batches):
    batches = make_batches(8)
    read = Read(3, 7)
    module, steps = run(make_module, fit, batches, 1.0, accumulate_grad_batches=2, callbacks=[read])
    for k, window in enumerate(read.windows):
        nats = tokens = 0
        for i in range(4 * k, 4 * k + 4):
            set_factors(module, steps[i // 2].weights)
            nats += plain_nats(module, batches[i]).item()
            tokens += supervised(batches[i])
        assert window.nats == pytest.approx(nats, rel=rounding(OF_SMALL))
        assert window.tokens == tokens
        assert window.data_bpt == pytest.approx(nats / tokens / math.log(2), rel=rounding(OF_SMALL))
        assert (window.applied, window.skipped) == (2, 0)
    assert read.windows[0].tokens != read.windows[1].tokens


def test_validation_weighs_tokens_and_not_batches(make_module, make_batches, tmp_path):
    module, batches = make_module(), make_batches(4)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.validate(module, loader, verbose=False)
    with torch.no_grad():
        nats = sum(plain_nats(module, batch).item() for batch in batches)
    expected = nats / sum(map(supervised, batches)) / math.log(2)
    assert float(trainer.callback_metrics["val_bpt"]) == pytest.approx(expected, rel=rounding(OF_SMALL))


# Checkpoints


def test_what_is_given_to_a_resumed_run_beats_the_checkpoints_optimizer(make_module, fit, make_batches, tmp_path):
    fit(make_module(), make_batches(2)).save_checkpoint(tmp_path / "state.ckpt")
    seen = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            (group,) = optimizer.param_groups
            seen.append((group["lr"], group["betas"], group["weight_decay"]))

    given = {"learning_rate": 0.1, "schedule": "linear", "beta2": 0.9, "weight_decay": 0.01}
    module = make_module(optimizer=given, total_steps=4)
    fit(module, make_batches(4), max_steps=4, callbacks=[Watch()], ckpt_path=tmp_path / "state.ckpt")
    assert seen == [(pytest.approx(rate), (0.9, 0.9), 0.01) for rate in (0.05, 0.025)]


# The schedule


def rates(kind: str, warmup: int = 4, total: int = 12) -> list[float]:
    return [schedule(step, kind, warmup, total) for step in range(total + 1)]


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("linear", [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("cosine", [1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060, 0]),
        ("constant", [1] * 9),
    ],
)
def test_the_rate_warms_up_from_above_zero_and_then_takes_its_course(kind, after):
    assert rates(kind) == pytest.approx([0.2, 0.4, 0.6, 0.8, *after], abs=1e-6)
    assert rates(kind, warmup=0)[0] == 1.0
    assert schedule(100, kind, 4, 12) == pytest.approx(after[-1], abs=1e-12), "it stays there"


def test_a_run_shorter_than_its_warm_up_has_a_rate():
    assert all(0 < rate <= 1 for rate in rates("cosine", warmup=20, total=10))
