"""The control loop under Lightning and under transformers: one suite, in real runs of the same small model."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.plugins import MixedPrecision
from rounding import OF_SMALL, turned
from test_module import Endless
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from granite_scu import control
from granite_scu.config.errors import Diverged
from granite_scu.config.settings import ControlConfig, holding_drift
from granite_scu.control import Measurement
from granite_scu.control.loop import SKIPPED_IN_A_ROW, ControlLoop
from granite_scu.data.blocks.packing import padding_of
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.transformers import ShannonCallback
from granite_scu.model.drift import GeneralPart, anchor_tokens, steering_tokens
from granite_scu.model.plant import AdapterPlant
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch

SIGMA, N = 0.02, 1000  # with which S comes within reach of the setpoint in a few steps
PI = {"target_s": 0.02, "kp": 1.0, "ki": 0.2, "lambda_init": 0.1}
FIXED = {"controller": "fixed", "target_s": 0.02}
SAME = ("data_bpt", "param_bpt", "s", "lambda", "grad_norm", "data_grad_norm", "penalty_grad_norm")


class Ran(NamedTuple):
    """A run that has ended.

    Attributes:
        ticks: its records.
        loop, plant: as they are at its end.
        begin: the factors that it began with.
        acted: of every optimizer step, lambda that it was taken under, and its learning rate.
    """

    ticks: list[dict]
    loop: ControlLoop
    plant: AdapterPlant
    begin: list[Tensor]
    acted: list[tuple[float, float]]


class Texts(L.LightningDataModule):
    """Micro-batches to train on, again and again."""

    def __init__(self, batches: list[dict]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Endless(self.batches), batch_size=None)


class Watch(L.Callback):
    """Notes what acts, and saves a checkpoint or stops after a step."""

    def __init__(self, save: int | None, path: Path, stop: int | None) -> None:
        self.save, self.path, self.stop = save, path, stop
        self.acted: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.acted.append((module.lam, optimizer.param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer, module, *_) -> None:
        if trainer.global_step == self.save and not self.path.exists():
            trainer.save_checkpoint(self.path)
        trainer.should_stop = trainer.global_step == self.stop


class Noted(TrainerCallback):
    """The same in the other trainer, which saves by itself."""

    def __init__(self, callback: ShannonCallback, stop: int | None) -> None:
        self.callback, self.stop = callback, stop
        self.acted: list[tuple[float, float]] = []

    def on_pre_optimizer_step(self, args, state, control, *, optimizer, **kwargs) -> None:
        self.acted.append((self.callback._running.lam, optimizer.param_groups[0]["lr"]))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop |= state.global_step == self.stop


class InFp16(Trainer):
    """A Trainer with the loss scaler that it has on a GPU; accelerate builds none for a CPU."""

    def __init__(self, *args, scaler, **kwargs) -> None:
        self.own_scaler = scaler
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp, self.accelerator.scaler = True, self.own_scaler


def law_of(settings: dict, max_drift: float | None = None) -> control.Controller:
    config = ControlConfig(**(settings if max_drift or "controller" in settings else PI | settings))
    config = holding_drift(config, max_drift, settings) if max_drift else config
    return config.law()


@pytest.fixture
def in_lightning(make_module, make_batches, fit, poison, text, tokenizer, tmp_path):
    """As ``run``, by the application's own callback."""

    def run(
        steps, every=2, accumulate=1, skip=(), save=None, resume=None, stop=None, scaler=None, first=0,
        schedule="constant", clip=0.0, actuator="loss", begin=None, max_drift=None, sigma=SIGMA, **law,
    ):  # fmt: skip
        controller, records, meters = law_of(law, max_drift), [], []
        if max_drift:
            sizes = anchor_tokens(24 * accumulate), steering_tokens(24 * accumulate * every)
            meters = [DriftMeter(lambda *_: text, max_drift, (1e-3, 1e3), *sizes, padding_of(tokenizer))]
        drift = meters[0].plant if meters else None
        loop = ShannonControl(controller, every, Stopwatch(), records.append, drift=drift)
        watch = Watch(save, tmp_path / "at.ckpt", stop)
        module = make_module(
            optimizer={"learning_rate": 1e-2, "schedule": schedule, "gradient_clip": clip},
            **{"sigma": sigma, "n_tokens": N, "total_steps": steps, "actuator": actuator},
            dtype=torch.float16 if scaler else torch.float32,
        )
        give(module.factors, begin)
        start = [factor.detach().clone() for factor in module.factors]
        batches = make_batches((first + steps) * accumulate)
        batches = [poison(module, b) if i // accumulate in skip else b for i, b in enumerate(batches)]
        data = Texts(batches[(first + (resume or 0)) * accumulate :])
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaler else None
        trainer = L.Trainer(
            **{"accelerator": "cpu", "max_steps": steps, "accumulate_grad_batches": accumulate, "plugins": plugins},
            **{"callbacks": [*meters, loop.stopwatch, loop, watch], "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False},
        )
        trainer.fit(module, datamodule=data, ckpt_path=resume and watch.path, weights_only=True)
        return Ran(records, loop.loop, module, start, watch.acted)

    return run


@pytest.fixture
def in_transformers(examples, adapted, trainer, ticks, text, tokenizer, monkeypatch, tmp_path):
    """As ``run``, by ``ShannonCallback``."""

    def run(
        steps, every=2, accumulate=1, skip=(), save=None, resume=None, stop=None, scaler=None, first=0,
        schedule="constant", clip=0.0, begin=None, max_drift=None, sigma=SIGMA, **law,
    ):  # fmt: skip
        model = adapted()
        give(Adapter(model).factors, begin)
        start = [factor.detach().clone() for factor in Adapter(model).factors]
        settings = law if "controller" in law else PI | law
        if max_drift:
            text.write(tmp_path / "text.jsonl", tokenizer)
            settings = {"max_drift": max_drift, "general_data": [str(tmp_path / "text.jsonl")], **law}
        own = {"prior_sigma": sigma, "n_tokens": N, "gradient_clip": clip}
        callback = ShannonCallback(control_every=every, **own, **settings)
        watch = Noted(callback, stop)
        for layer in model.modules() if scaler else ():  # transformers' limit of inf is none that fp16 has there
            if hasattr(layer, "time_step_limit"):
                layer.time_step_limit = (0.0, 100.0)
        scaled = {"cls": partial(InFp16, scaler=scaler), "fp16": True} if scaler else {}
        saved = {"save_strategy": "steps", "save_steps": save or resume} if save or resume else {}
        more = {"gradient_accumulation_steps": accumulate, "lr_scheduler_type": schedule, **scaled, **saved}
        more["tokenizer"] = tokenizer if max_drift else None
        made = trainer(model, examples((first + steps) * accumulate)[2 * first * accumulate :], callback, **more)
        made.add_callback(watch)
        with monkeypatch.context() as patch:
            patch.setattr(AcceleratedOptimizer, "step", overflowing(skip)) if skip else None
            made.train(resume_from_checkpoint=resume and str(tmp_path / "out" / f"checkpoint-{resume}"))
        return Ran(ticks(made), callback._loop, callback._running, start, watch.acted)

    return run


@pytest.fixture(params=["lightning", "transformers"])
def run(request):
    """Trains the small model under a law for a number of optimizer steps.

    Arguments are ``ShannonCallback``'s, ``actuator`` and ``max_drift`` among them, and ``skip``: steps that are left
    out, counted from 0; ``save``, ``resume`` and ``stop``: after which step; ``scaler``: of the loss, in fp16;
    ``first``: steps whose text is passed over; ``begin``: the factors to begin with; ``sigma``: of the prior.
    """
    return request.getfixturevalue(f"in_{request.param}")


@torch.no_grad()
def give(factors, values) -> None:
    for factor, value in zip(factors, values or factors, strict=True):
        factor.copy_(value)


def overflowing(skip):
    """As accelerate leaves a step out whose gradient overflows: it does not step, and says so."""
    taken, step = [], AcceleratedOptimizer.step

    def perhaps(optimizer, closure=None):
        taken.append(len(taken) not in skip)
        optimizer._is_overflow = not taken[-1]
        return step(optimizer, closure) if taken[-1] else None

    return perhaps


# When it ticks, and what it counts


@pytest.mark.parametrize(
    ("steps", "accumulate", "stop", "at"),
    [(6, 1, None, [2, 4, 6]), (7, 3, None, [2, 4, 6, 7]), (1, 1, None, [1]), (9, 1, 5, [2, 4, 5])],
)
def test_it_ticks_every_so_many_optimizer_steps_and_once_more_at_the_end(
    run, make_batches, steps, accumulate, stop, at
):
    ran = run(steps, accumulate=accumulate, stop=stop, schedule="linear")
    counts = [int((batch["labels"] != -100).sum()) for batch in make_batches(steps * accumulate)]
    assert [tick["step"] for tick in ran.ticks] == at
    assert [tick["tokens"] for tick in ran.ticks] == [sum(counts[: accumulate * step]) for step in at]
    # The rate of the step itself, and not of the next.
    assert [tick["lr"] for tick in ran.ticks] == pytest.approx([1e-2 * (1 - (step - 1) / steps) for step in at])


# What it does


def test_lambda_is_that_of_the_law_alone_and_stays_until_the_next_tick(run):
    ran = run(10, schedule="linear")
    law, rates = law_of({}), [rate for _, rate in ran.acted]
    state, lams = law.init(), [law.lambda_start]
    for tick in ran.ticks:
        measured = {name: tick[name] for name in ("s", "data_bpt", "param_bpt")}
        state, output = law.update(state, Measurement(**measured, lr_sum=sum(rates[: tick["step"]])))
        lams.append(output.lam)
        assert tick["lambda"] == pytest.approx(output.lam)
        assert (tick["p_term"], tick["i_term"]) == pytest.approx((output.p_term, output.i_term))
    assert len(set(lams)) > 3
    assert [acted for acted, _ in ran.acted] == pytest.approx([x for x in lams[:-1] for _ in range(2)])
    assert ran.plant.lam == ran.loop.action.lam == pytest.approx(lams[-1])


def test_lambda_is_that_of_the_law_alone_when_it_is_fed_drift(run):
    ran = run(12, max_drift=0.002)
    law, rates = law_of({}, 0.002), [rate for _, rate in ran.acted]
    state, base_bpt = law.init(), ran.ticks[0]["drift_bpt"] / ran.ticks[0]["drift"]
    for tick in ran.ticks:
        f = tick["drift_bpt"]
        assert tick["drift"] == pytest.approx(f / base_bpt)
        measured = Measurement(f / (f + base_bpt), base_bpt, f, lr_sum=sum(rates[: tick["step"]]))
        state, output = law.update(state, measured)
        assert tick["lambda"] == pytest.approx(output.lam)
    assert len({tick["lambda"] for tick in ran.ticks}) > 3 and ran.ticks[-1]["penalty_grad_norm"] > 0
    assert all(tick.get("s_target") is None and 0 < tick["s"] < 1 for tick in ran.ticks)


def test_at_its_lower_bound_lambda_anchors_nothing_and_drift_is_still_measured(run, monkeypatch):
    seen, real = [], GeneralPart.gradient
    monkeypatch.setattr(GeneralPart, "gradient", lambda part, step: seen.append(step) or real(part, step))
    ran = run(24, max_drift=0.9, lambda_min=1e-3, lambda_init=1.1e-3)
    rested = next(tick["step"] for tick in ran.ticks if tick["saturated"])
    assert ran.ticks[0]["lambda"] == 1.1e-3 and ran.ticks[-1]["lambda"] == pytest.approx(1e-3)
    assert seen == list(range(rested)) and ran.plant.lam == 0
    assert ran.ticks[-1]["drift_bpt"] > ran.ticks[0]["drift_bpt"]


def test_a_lower_bound_above_that_is_what_acts(run):
    ran = run(24, max_drift=0.9, lambda_min=0.9, lambda_init=1.0)
    assert ran.ticks[-1]["lambda"] == 0.9 == ran.plant.lam


def test_the_penalty_in_a_record_is_of_the_lambda_that_the_last_step_ran_under(run):
    low, high = (run(2, **FIXED, lambda_init=x).ticks[-1] for x in (1e-6, 3e-6))  # too small to change the weights
    assert high["penalty_grad_norm"] == pytest.approx(3 * low["penalty_grad_norm"], rel=1e-3) and low["lambda"] == 1e-6


@pytest.mark.slow
def test_the_loop_brings_s_to_the_setpoint(run):
    target = 0.3 * run(160, controller="none").ticks[-1]["s"]
    late = [tick["s"] for tick in run(160, target_s=target, kp=2.0, ki=0.4, lambda_init=0.02).ticks[-20:]]
    assert sum(late) / len(late) == pytest.approx(target, rel=0.25)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.05},
        {"max_drift": 0.002},
        pytest.param({"controller": "research.laws.projection:Projection", "target_s": 0.02}, marks=pytest.mark.slow),
        pytest.param(
            {"controller": "research.laws.cpr:CPR", "controller_args": ["cpr_warmup=1"]}, marks=pytest.mark.slow
        ),
        pytest.param(FIXED | {"lambda_init": 500.0, "actuator": "decoupled"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_both_steer_alike(settings, in_lightning, in_transformers):
    """Same model, data and order: S, lambda and the norms of the gradients at every tick."""
    expected = in_lightning(12, every=3, accumulate=2, **settings)
    found = in_transformers(12, every=3, accumulate=2, begin=expected.begin, **settings)
    agree(found.ticks, expected.ticks)


def agree(found: list[dict], expected: list[dict], steps: int = 12) -> None:
    """Two histories are of the same loop."""
    for name in ("step", "tokens", "held", "saturated"):
        assert [tick[name] for tick in found] == [tick[name] for tick in expected], name
    close = turned(steps, OF_SMALL)  # means and norms over numbers of which so many may differ
    for name in SAME:
        assert [tick[name] for tick in found] == pytest.approx([tick[name] for tick in expected], rel=close), name
    for name in ("drift", "drift_bpt", "drift_target") if "drift" in expected[0] else ():
        assert [tick[name] for tick in found] == pytest.approx([tick[name] for tick in expected], rel=close), name


# What survives a checkpoint


@pytest.mark.parametrize("held", [{}, {"max_drift": 0.002}])
def test_a_resumed_run_goes_on_to_the_same_lambda(run, held):
    """From a checkpoint between two ticks, after which every number of every tick is equal."""
    whole = run(12, every=3, accumulate=2, save=7, **held)
    rest = run(12, every=3, accumulate=2, resume=7, **held)
    assert [tick["step"] for tick in whole.ticks] == [3, 6, 9, 12]
    clocks = ("tokens_per_s",)
    alike = [[{k: v for k, v in tick.items() if k not in clocks} for tick in ran.ticks[-2:]] for ran in (whole, rest)]
    assert alike[0] == alike[1]
    assert all(map(torch.equal, whole.plant.factors, rest.plant.factors))


# Steps that are left out


def test_a_tick_counts_applied_steps_and_makes_up_for_skipped_ones(run, make_batches):
    ran = run(8, skip=(4, 5), schedule="linear")
    counts = [int((batch["labels"] != -100).sum()) for batch in make_batches(8)]
    assert [(tick["step"], tick["skipped"]) for tick in ran.ticks] == [(2, 0), (4, 0), (8, 2)]
    assert ran.ticks[-1]["tokens"] == sum(counts) - counts[4] - counts[5] and not ran.ticks[-1]["held"]
    rates = [rate for _, rate in ran.acted]
    assert ran.loop.lr_sum == pytest.approx(sum(rates) - rates[4] - rates[5])


def test_an_end_without_an_applied_step_holds_lambda(run):
    ran = run(6, skip=(4, 5))
    held, before = ran.loop.latest, next(tick for tick in ran.ticks if tick["step"] == 4)
    assert held["held"] and not before["held"]
    assert held["lambda"] == before["lambda"] == ran.plant.lam > 0
    assert (held["step"], held["tokens"]) == (6, before["tokens"])
    assert math.isnan(held["data_bpt"]) and math.isnan(held["s"])


def test_steps_that_overflow_in_fp16_are_skipped_counted_and_leave_no_trace(run):
    """Real fp16 products and a real GradScaler, both on the CPU: its scale is too large for two steps."""
    usual, options = 2.0**16, FIXED | {"lambda_init": 2.0}
    scaler = torch.amp.GradScaler("cpu", init_scale=usual * 2**32, backoff_factor=2.0**-16)
    ran = run(6, scaler=scaler, **options)
    without = run(4, scaler=torch.amp.GradScaler("cpu", init_scale=usual), first=2, **options)
    assert scaler.get_scale() == usual
    assert [(tick["step"], tick["skipped"]) for tick in ran.ticks] == [(4, 2), (6, 2)]
    alike = [{k: v for k, v in tick.items() if k in (*SAME, "tokens")} for tick in ran.ticks]
    assert alike == [{k: v for k, v in tick.items() if k in (*SAME, "tokens")} for tick in without.ticks]
    assert all(map(torch.equal, ran.plant.factors, without.plant.factors))
    assert any(factor.any() for factor in ran.plant.factors[1::2]) and ran.ticks[-1]["penalty_grad_norm"] > 0


@pytest.mark.parametrize("fp16", [True, False])
def test_a_penalty_that_overflows_alone_is_skipped_and_ends_the_run_in_time(run, fp16):
    """The largest lambda that there is, on a prior so narrow that fp32 has no number for the gradient."""
    overflows = {**FIXED, "lambda_init": 1e30, "lambda_max": 1e30, "sigma": 1e-8}
    scaler = torch.amp.GradScaler("cpu") if fp16 else None
    first, ran = (run(steps, scaler=scaler, **overflows) for steps in (1, 3))  # no penalty where nothing has moved
    last = ran.ticks[-1]
    assert last["skipped"] == 2 and 0 < last["data_grad_norm"] < math.inf
    assert all(map(torch.equal, ran.plant.factors, first.plant.factors)), "they left no trace"
    assert scaler is None or scaler.get_scale() == 2.0**16, "nor on the scale"
    with pytest.raises(Diverged, match="finite in no optimizer step"):
        run(2, begin=[torch.full_like(factor, math.nan) for factor in first.begin], scaler=scaler, **FIXED)
    with pytest.raises(Diverged, match=f"step {1 + SKIPPED_IN_A_ROW}: .*not finite in {SKIPPED_IN_A_ROW}.*lower"):
        run(SKIPPED_IN_A_ROW + 2, every=40, scaler=scaler, **overflows)
