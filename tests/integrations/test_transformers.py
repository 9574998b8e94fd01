"""The callback in real trainers: the same loop as the application's own, on the same steps."""

import math

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from rounding import OF_SMALL, turned
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.transformers import ORIGIN, ShannonCallback, _check_loss
from granite_scu.model.description_length import squared_norms

CPR, KL = "research.laws.cpr:CPR", "research.laws.kl:KL"
SIGMA, N = 0.02, 1000
STEPS, EVERY = 12, 3
SETTINGS = {"target_s": 0.02, "control_every": EVERY, "n_tokens": N}


def begin_from(model, factors) -> None:
    with torch.no_grad():
        for factor, value in zip(Adapter(model).factors, factors, strict=True):
            factor.copy_(value)


def test_the_newest_tick_is_among_what_is_logged_with_the_loss(examples, adapted, trainer, ticks):
    seen = []

    class Shown(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(logs)

    run = trainer(adapted(), examples(2), ShannonCallback(0.02, control_every=2, n_tokens=N), logging_steps=1)
    run.add_callback(Shown())
    run.train()
    (tick,) = ticks(run)
    run.train()
    (again,) = ticks(run)
    assert [logs.get("scu/s") for logs in seen if "loss" in logs] == [None, tick["s"], None, again["s"]]
    assert not any("scu/s" in logs for logs in seen if "loss" not in logs)


@pytest.mark.slow
def test_a_compiled_model_is_measured_alike(examples, trainer, ticks):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(LlamaForCausalLM(small_llama()), LoraConfig(target_modules="all-linear"))
        run = trainer(model, examples(6), ShannonCallback(**SETTINGS), torch_compile=compiled)
        run.train()
        runs.append(ticks(run))
    for name in ("data_bpt", "s", "lambda", "data_grad_norm"):
        plain, compiled = ([tick[name] for tick in run] for run in runs)
        assert compiled == pytest.approx(plain, rel=turned(STEPS, OF_SMALL)), name


# Going on


def test_a_resumed_run_measures_on_from_the_adapter_that_it_began_with(examples, adapted, trainer, ticks, tmp_path):
    rows = examples(STEPS)

    def model():
        made = adapted()
        begin_from(made, [0.1 * torch.ones_like(factor) for factor in Adapter(made).factors])
        return made

    saving = {"save_strategy": "steps", "save_steps": 7}
    whole = trainer(model(), rows, ShannonCallback(**SETTINGS), **saving)
    whole.train()
    rest = trainer(model(), rows, ShannonCallback(**SETTINGS), **saving)
    rest.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-7"))
    assert [tick["step"] for tick in ticks(whole)] == [3, 6, 9, 12]
    assert ticks(rest) == ticks(whole)
    assert (tmp_path / "out" / ORIGIN).is_file()


@pytest.mark.slow
def test_what_the_trainer_makes_again_goes_on_too(examples, adapted, trainer, ticks, tmp_path):
    """Its own way to restore callbacks builds a new one from what the checkpoint says."""
    rows, saving = examples(STEPS), {"save_strategy": "steps", "save_steps": 7}
    whole = trainer(adapted(), rows, ShannonCallback(**SETTINGS), **saving)
    whole.train()
    rest = trainer(adapted(), rows, ShannonCallback(0.5), restore_callback_states_from_checkpoint=True, **saving)
    rest.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-7"))
    assert ticks(rest) == ticks(whole)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (SETTINGS, SETTINGS | {"prior_sigma": 0.1}, "prior_sigma was 0.02 and is now 0.1"),
        (SETTINGS, SETTINGS | {"n_tokens": 7}, "n_tokens was 1000 and is now 7"),
        (None, SETTINGS, "step 2 was written without it"),
    ],
)
def test_a_run_that_would_measure_otherwise_is_not_resumed(before, after, reason, examples, adapted, trainer, tmp_path):
    rows, saving = examples(3), {"save_strategy": "steps", "save_steps": 2}
    trainer(adapted(), rows, before and ShannonCallback(**before), **saving).train()
    resumed = trainer(adapted(), rows, ShannonCallback(**after), **saving)
    with pytest.raises(ValueError, match=reason):
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


# What is measured


def test_n_is_the_supervised_tokens_of_the_training_set(examples, adapted, trainer, ticks):
    rows = examples(5)
    expected = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    callback = ShannonCallback(0.02, control_every=5)
    run = trainer(adapted(), rows, callback)
    run.train()
    assert callback.state()["attributes"]["saved"]["n_tokens"] == expected
    assert ticks(run)[-1]["tokens"] == expected


def test_s_measures_from_where_training_began(examples, adapted, trainer, ticks):
    """From an adapter that is not zero, |Delta W - Delta W_0|, with Delta W formed."""
    model = adapted(use_rslora=True, rank_pattern={"q_proj": 2}, target_modules=["q_proj", "in_proj", "embed_tokens"])
    begin_from(model, [0.1 * torch.ones_like(factor) for factor in Adapter(model).factors])
    before = [u.scale * (u.b @ u.a).detach() for u in Adapter(model).updates()]
    run = trainer(model, examples(3), ShannonCallback(0.02, n_tokens=N))
    run.train()
    after = [u.scale * (u.b @ u.a).detach() for u in Adapter(model).updates()]
    moved = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True))
    expected = moved / (2 * SIGMA**2 * N * math.log(2))
    assert ticks(run)[-1]["param_bpt"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_bf16_keeps_the_loop_in_fp32(examples, adapted, trainer, ticks):
    runs = {}
    for bf16 in (False, True):
        run = trainer(adapted(), examples(STEPS), ShannonCallback(**SETTINGS), bf16=bf16)
        run.train()
        runs[bf16] = ticks(run)
    assert [t["s"] for t in runs[True]] == pytest.approx([t["s"] for t in runs[False]], rel=0.05)
    assert runs[True] != runs[False]  # it did compute in bf16


@pytest.mark.slow
def test_a_model_in_4_bits_is_steered_too(small_granite, examples, trainer, ticks):
    pytest.importorskip("bitsandbytes")
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(small_granite, dtype=torch.float32, quantization_config=in_4_bits)
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    run = trainer(model, examples(STEPS), ShannonCallback(**SETTINGS))
    run.train()
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert {type(layer).__module__ for layer in layers} == {"peft.tuners.lora.bnb"}
    last = ticks(run)[-1]
    size = sum(layer.scaling["default"] ** 2 * _delta(layer).square().sum().item() for layer in layers)
    assert last["param_bpt"] == pytest.approx(size / (2 * SIGMA**2 * N * math.log(2)), rel=1e-4)
    assert last["penalty_grad_norm"] > 0


def _delta(layer) -> torch.Tensor:
    return layer.lora_B["default"].weight @ layer.lora_A["default"].weight


# Refusals


def two_active(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    return model


def plain(small_granite):
    return AutoModelForCausalLM.from_pretrained(small_granite)


def test_adapters_of_experts_are_measured_by_the_delta_w_that_peft_would_merge(small_mixture):
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    model = get_peft_model(plain(small_mixture), config)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert len(layers) == 5
    expected = [layer.get_delta_weight("default").square().sum() for layer in layers]
    torch.testing.assert_close(squared_norms(Adapter(model).updates()), torch.stack(expected))


def classifier():
    model = LlamaForSequenceClassification(small_llama(num_labels=2, pad_token_id=0))
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def small_llama(**settings) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=300, **sizes, **settings)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda adapted, base: adapted(use_dora=True), "the LoRA variant Dora"),
        (lambda adapted, base: adapted(lora_bias=True, bias="none"), "is trained beside the adapter"),
        (lambda adapted, base: adapted(modules_to_save=["lm_head"]), "lm_head.* is trained beside the adapter"),
        (lambda adapted, base: two_active(adapted()), "2 adapters are active .default, other."),
        (lambda adapted, base: adapted().requires_grad_(False), "the adapter is frozen; load it with .*is_trainable"),
        (lambda adapted, base: plain(base).requires_grad_(False), "has no LoRA layer"),
        (
            lambda adapted, base: get_peft_model(
                plain(base), IA3Config(target_modules=["q_proj"], feedforward_modules=[])
            ),
            "q_proj: an adapter of the kind ia3 Linear adds something else than Delta W = s B A",
        ),
        (lambda adapted, base: classifier(), "trained on another loss than a causal language model's"),
    ],
)
def test_an_adapter_that_s_cannot_be_measured_of_is_refused(make, reason, adapted, small_granite, examples, trainer):
    run = trainer(make(adapted, small_granite), examples(1), ShannonCallback(0.02))
    with pytest.raises(ValueError, match=reason) as caught:
        run.train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "arguments", "reason"),
    [
        ({}, {"max_grad_norm": 1.0}, "max_grad_norm=1.0: the trainer would clip before"),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({}, {"metric_for_best_model": "loss_in_budget"}, "worst adapter .*; set greater_is_better=False"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(settings, arguments, reason, adapted, examples, trainer):
    run = trainer(adapted(), examples(1), ShannonCallback(**({"target_s": 0.02} | settings)), **arguments)
    with pytest.raises(ValueError, match=reason):
        run.train()


def test_a_device_without_fp64_is_refused_with_the_remedy(adapted, examples, trainer, monkeypatch):
    run = trainer(adapted(), examples(1), callback := ShannonCallback(0.02))
    monkeypatch.setattr(type(run.args), "device", torch.device("mps"))
    with pytest.raises(ValueError, match=r"mps has no fp64.*use_cpu=True"):
        callback.on_train_begin(run.args, run.state, run.control, model=run.model, train_dataloader=None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "give target_s, a share such as 0.1; pi has none"),
        ({"target_s": 2}, r"^target_s 2\.0: must lie between 0 and 1"),
        ({"target_s": 0.1, "control_every": 0}, "^control_every 0: must be at least 1"),
        ({"target_s": 0.1, "prior_sigma": -1}, "^prior_sigma -1.0: must be positive"),
        ({"target_s": 0.1, "gradient_clip": -1}, "^gradient_clip -1"),
        ({"controller": "research.laws.cascade:Cascade"}, "Cascade: measures what a callback"),
        ({"controller": "pid", "target_s": 0.1}, "did you mean pi"),
        ({"controller": "research.laws.p:Proportional"}, "Proportional: give target_s, a share"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(settings, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        ShannonCallback(**settings)
    assert "\n" not in str(caught.value)


def test_two_callbacks_are_refused(adapted, examples, trainer):
    run = trainer(adapted(), examples(1), ShannonCallback(0.02))
    run.add_callback(ShannonCallback(0.02))
    with pytest.raises(ValueError, match="2 of them would each add a penalty"):
        run.train()


class Stream(IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        yield {"input_ids": torch.arange(4), "labels": torch.arange(4)}


def test_an_adapter_on_several_devices_is_refused(adapted):
    model = adapted()
    next(module for module in model.modules() if isinstance(module, LoraLayer)).to("meta")
    with pytest.raises(ValueError, match=r"lies on cpu, meta, .*device_map=\{\"\": 0\}"):
        Adapter(model)


def test_an_interrupted_trainer_leaves_the_model_usable(adapted, examples, trainer):
    class Interrupted(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    run = trainer(model := adapted(), rows := examples(1), ShannonCallback(**SETTINGS))
    run.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert model.train()(input_ids=rows[0]["input_ids"][None]).logits.requires_grad


def test_a_stream_wants_n(adapted, trainer):
    run = trainer(adapted(), Stream(), ShannonCallback(0.02), max_steps=1)
    with pytest.raises(ValueError, match="n_tokens: a stream's tokens cannot be counted"):
        run.train()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"actuator": "x"}, "actuator x: must be loss or decoupled"),
        ({"kp": "a"}, "^kp a: must be a number"),
        ({"control_every": 1.5}, "^control_every 1.5: must be a whole number"),
        ({"every": 1}, "^every 1: give control_every"),
        ({"wrong": 1}, "^wrong: there is no such setting"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(settings, words):
    counts = dict.fromkeys(("control_every", "n_tokens", "general_tokens"), np.int64(10_000))
    with pytest.raises(ValueError, match=words):
        ShannonCallback(**({"target_s": np.float64(0.1)} | counts | settings))


def test_a_model_that_names_no_loss_has_transformers_default():
    tiny = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, bos_token_id=0, eos_token_id=0)
    _check_loss(GPT2LMHeadModel(tiny))
    with pytest.raises(ValueError, match="another loss than a causal language model's"):
        _check_loss(GPT2ForSequenceClassification(tiny))


def test_layers_that_share_one_adapter_are_refused(small_granite):
    both = LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    with pytest.raises(ValueError, match="share one adapter, as PEFT's ensure_weight_tying makes it"):
        Adapter(get_peft_model(AutoModelForCausalLM.from_pretrained(small_granite), both))
