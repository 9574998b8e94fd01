"""Training that starts from an adapter: what is measured, what λ adds, what comes along, what is refused."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from outcomes import refusal
from safetensors.torch import load_file, save_file
from test_module import Endless, trained_factors

from granite_scu.config.errors import UserError
from granite_scu.config.settings import LoraConfig
from granite_scu.control.diagnostics.ceiling import Matrix, growth
from granite_scu.model import adapters, saved_adapter
from granite_scu.storage.checkpoint import save_adapter

TARGETS = ["in_proj", "q_proj", "input_linear"]


@pytest.fixture
def adapter(make_module, small_granite, tmp_path):
    """The folder of an adapter on some layers, with factors as training leaves them."""
    module = make_module(lora={"rank": 3, "alpha": 7.0, "targets": TARGETS})
    trained_factors(module)
    save_adapter(module.model, tmp_path / "adapter", small_granite)
    return tmp_path / "adapter"


@pytest.fixture
def from_adapter(adapter, small_granite, make_module):
    """Builds modules that start from it."""

    def make(**arguments):
        start = saved_adapter.open_initial_adapter(str(adapter), small_granite)
        lora = saved_adapter.lora_of(LoraConfig(adapter=str(adapter)), start)
        return make_module(lora={"rank": lora.rank, "alpha": lora.alpha}, start=start, **arguments)

    return make


def test_the_model_is_the_saved_one_and_costs_nothing_yet(from_adapter, adapter, fit, make_batches):
    module = from_adapter()
    stored = load_file(adapter / saved_adapter.WEIGHTS)
    assert len(module.factors) == len(stored)
    for name, u in module.updates.items():
        assert torch.equal(u.a, stored[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(u.b, stored[f"base_model.model.{name}.lora_B.weight"])
        assert u.scale == 7 / 3
        assert not any(factor.requires_grad for factor in u.origin)
    assert module.layer_bpt() == (0.0,) * len(module.updates)
    fit(module, make_batches(3))
    assert all(bpt > 0 for bpt in module.layer_bpt())
    explicit = sum(
        (u.scale * (u.b.double() @ u.a.double() - u.origin[1].double() @ u.origin[0].double())).square().sum()
        for u in module.updates.values()
    )
    in_bits = explicit.detach() / (2 * module.prior_sigma**2 * module.n_tokens) / torch.tensor(2.0).log()
    assert sum(module.layer_bpt()) == pytest.approx(float(in_bits), rel=1e-4)


def test_lambda_pulls_back_to_the_adapter_and_by_exactly_its_gradient(from_adapter):
    """Not towards zero: at the adapter itself there is no pull."""
    module = from_adapter(n_tokens=1)
    assert not any(gradient.any() for gradient in module._penalty())
    with torch.no_grad():
        for factor in module.factors:
            factor.add_(0.01 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(2)))
    module.lam = 0.5
    explicit = sum(
        (u.scale * (u.b @ u.a - u.origin[1] @ u.origin[0])).square().sum() for u in module.updates.values()
    ) / (2 * module.prior_sigma**2)
    expected = torch.autograd.grad(explicit, module.factors)
    for found, wanted in zip(module._penalty(), expected, strict=True):
        torch.testing.assert_close(found, 0.5 * wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    before = sum(module.layer_bpt())
    with torch.no_grad():
        for factor, gradient in zip(module.factors, module._penalty(), strict=True):
            factor.sub_(1e-6 * gradient)
    assert sum(module.layer_bpt()) < before


def test_only_the_factors_of_now_are_trained_and_saved(from_adapter, small_granite, fit, make_batches, tmp_path):
    module = from_adapter()
    origins = [p.clone() for u in module.updates.values() for p in u.origin]
    trainer = fit(module, make_batches(2))
    assert {p for group in trainer.optimizers[0].param_groups for p in group["params"]} == set(module.factors)
    now = [p for u in module.updates.values() for p in u.origin]
    assert all(torch.equal(one, other) for one, other in zip(origins, now, strict=True))
    save_adapter(module.model, tmp_path / "again", small_granite)
    names = load_file(tmp_path / "again" / saved_adapter.WEIGHTS)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert (
        saved_adapter.open_initial_adapter(str(tmp_path / "again"), small_granite).adapter.config.r == 3
    )  # and so on from there


def test_a_resumed_run_measures_from_the_same_adapter(from_adapter, make_module, fit, make_batches, tmp_path):
    batches = make_batches(4)
    whole = from_adapter()
    fit(whole, Endless(batches), max_steps=4)
    half = from_adapter()
    fit(half, Endless(batches), max_steps=2).save_checkpoint(tmp_path / "state.ckpt")
    resumed = from_adapter()
    with torch.no_grad():  # whatever is in the folder by now: the checkpoint has the factors of the start
        for u in resumed.updates.values():
            u.origin[0].zero_()
    fit(resumed, Endless(batches[2:]), max_steps=4, ckpt_path=tmp_path / "state.ckpt")
    assert all(torch.equal(one, other) for one, other in zip(resumed.factors, whole.factors, strict=True))
    assert resumed.layer_bpt() == whole.layer_bpt()
    without = make_module(lora={"rank": 3, "alpha": 7.0, "targets": TARGETS})
    with pytest.raises(UserError, match="--adapter"):
        fit(without, Endless(batches[2:]), max_steps=4, ckpt_path=tmp_path / "state.ckpt")
    other = from_adapter()
    other.start = replace(other.start, sha256="0123")
    with pytest.raises(UserError, match=r"--adapter \(SHA-256\) was [0-9a-f]{64} and is now 0123"):
        fit(other, Endless(batches[2:]), max_steps=4, ckpt_path=tmp_path / "state.ckpt")


def test_the_adapter_of_the_start_can_be_looked_at_again(from_adapter, fit, make_batches):
    module, (batch,) = from_adapter(), make_batches(1, seed=7)
    nats = lambda: float(module(batch["input_ids"], batch["labels"]).detach())  # noqa: E731
    at_start = nats()
    fit(module, make_batches(3))
    trained, values = nats(), [factor.clone() for factor in module.factors]
    assert trained != at_start
    with module.at_start():
        assert nats() == at_start
        assert module.layer_bpt() == (0.0,) * len(module.updates)
    assert all(torch.equal(one, other) for one, other in zip(module.factors, values, strict=True))


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_on_a_base_in_4_bits_it_is_the_same_adapter(from_adapter, adapter, fit, make_batches):
    module, (batch,) = from_adapter(base={"quantize_4bit": True}), make_batches(1, seed=7)
    stored = load_file(adapter / saved_adapter.WEIGHTS)
    for name, u in module.updates.items():
        assert torch.equal(u.a, stored[f"base_model.model.{name}.lora_A.weight"])
        assert type(module.language_model.get_submodule(name).base_layer).__name__ == "Linear4bit"
    assert module.layer_bpt() == (0.0,) * len(module.updates)
    at_start = float(module(batch["input_ids"], batch["labels"]).detach())
    assert at_start != float(from_adapter()(batch["input_ids"], batch["labels"]).detach())
    fit(module, make_batches(2))
    assert all(bpt > 0 for bpt in module.layer_bpt())
    assert all(torch.isfinite(factor).all() for factor in module.factors)
    with module.at_start():
        assert float(module(batch["input_ids"], batch["labels"]).detach()) == at_start


def test_the_ceiling_on_what_it_takes_lies_above_it_and_not_out_of_sight(from_adapter, fit, make_batches):
    module = from_adapter(optimizer={"learning_rate": 1e-3})
    prior, matrices = (module.prior_sigma, module.n_tokens), module.start.matrices
    most = growth(matrices, *prior)
    assert most > growth([Matrix.new(m.out, m.inner, m.rank, 7 / 3) for m in matrices], *prior)  # both factors move
    fit(module, make_batches(8))
    taken = sum(module.layer_bpt())
    assert 0.05 * most * 0.008**2 < taken < most * 0.008**2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rank": 8}, "--lora-r 8: the adapter to start from"),
        ({"alpha": 16.0}, "--lora-alpha 16: "),
        ({"targets": ["q_proj"]}, "--lora-targets q_proj: "),
        ({"experts": True}, "--lora-experts: "),
        ({"rslora": True}, "--rslora: "),
    ],
)
def test_a_setting_that_the_adapter_has_otherwise_is_refused_with_both_values(adapter, small_granite, asked, words):
    start = saved_adapter.open_initial_adapter(str(adapter), small_granite)
    has = {"rank": "has 3", "alpha": "has 7", "targets": "has in_proj, input_linear, q_proj"}
    has |= {"experts": "has none", "rslora": "has none"}
    message = refusal(saved_adapter.lora_of, LoraConfig(**asked), start)
    assert words in message and has[next(iter(asked))] in message


def test_what_is_not_asked_for_is_the_adapters(adapter, small_granite):
    start = saved_adapter.open_initial_adapter(str(adapter), small_granite)
    found = saved_adapter.lora_of(LoraConfig(rank=3, dropout=0.1), start)
    assert (found.rank, found.alpha, found.targets, found.dropout) == (3, 7.0, sorted(TARGETS), 0.1)
    assert LoraConfig().resolved() == LoraConfig(rank=16, alpha=32.0)
    start.adapter.config.target_modules = None  # as PEFT has it for experts alone
    assert saved_adapter.lora_of(LoraConfig(), start).targets is None


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (True, False, "was held in 4 bits, which this run's is not, so .*; --4bit-quantization holds"),
        (False, True, "was held whole, .*; --no-4bit-quantization holds"),
        (True, True, None),
        (None, True, None),  # an adapter from elsewhere says nothing of it
    ],
)
def test_a_base_that_was_held_otherwise_is_said(adapter, small_granite, then, now, words):
    if then is not None:
        (adapter / saved_adapter.TRAINING_CONFIG).write_text(
            json.dumps({"base": {"name": small_granite, "quantize_4bit": then}})
        )
    found = saved_adapter.open_initial_adapter(str(adapter), small_granite).mismatch(now)
    assert re.search(words, found) if words else found is None


def test_dropout_is_the_runs_own(from_adapter, adapter):
    def rates(model) -> set[float]:
        return {m.p for name, m in model.named_modules() if name.endswith("lora_dropout.default") and hasattr(m, "p")}

    module = from_adapter()
    assert rates(module.model) == set()
    saved_one = module.start.adapter
    again = adapters.attach_saved(module.model.unload(), saved_one.folder, saved_one.config, dropout=0.25)
    assert rates(again) == {0.25}


def test_adapters_that_cannot_be_gone_on_with(adapter, small_granite, tmp_path):
    def refused() -> str:
        begins = f"--adapter {adapter}: "
        return refusal(saved_adapter.open_initial_adapter, str(adapter), small_granite, begins=begins)

    weights, config = (
        load_file(adapter / saved_adapter.WEIGHTS),
        json.loads((adapter / saved_adapter.ADAPTER_CONFIG).read_text()),
    )
    name = next(iter(weights))
    save_file(weights | {name: weights[name] * float("nan")}, adapter / saved_adapter.WEIGHTS)
    assert "not finite" in refused()
    for unusual in (torch.int32, torch.float8_e4m3fn):
        save_file(weights | {name: weights[name].to(unusual)}, adapter / saved_adapter.WEIGHTS)
        assert f"holds {unusual}, no floating point of 16 bits" in refused()
    save_file({key: value for key, value in weights.items() if key != name}, adapter / saved_adapter.WEIGHTS)
    assert "is absent" in refused()
    (adapter / saved_adapter.WEIGHTS).write_bytes(b"torn")
    assert "is damaged" in refused()
    save_file(weights, adapter / saved_adapter.WEIGHTS)
    (adapter / saved_adapter.ADAPTER_CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    assert "use_dora = True" in refused()
    (adapter / saved_adapter.ADAPTER_CONFIG).write_text(json.dumps(config | {"target_modules": ["gate_proj"]}))
    assert "does not fit" in refused()
    (adapter / saved_adapter.ADAPTER_CONFIG).write_text("{")
    assert "damaged" in refused()
    (adapter / saved_adapter.ADAPTER_CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "a/b"}))
    with pytest.raises(UserError, match="was trained on a/b, and not on --model c/d"):
        saved_adapter.open_initial_adapter(str(adapter), "c/d")
