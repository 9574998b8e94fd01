"""Every controller trains, goes on after a stop, and leaves a history that can be replayed."""

import json
import math
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch
from outcomes import refused_line
from peft import PeftModel
from rounding import OF_EMBEDDED, rounding
from transformers import AutoModelForCausalLM

from granite_scu.config.settings import DataConfig
from granite_scu.control import CONTROLLERS
from granite_scu.data.datamodule import TextDataModule
from granite_scu.model.loading import load_tokenizer, resolve
from research.laws import AUTO, LAWS, place_of
from research.laws.cascade import PROBED_SCALE

CASCADE, CPR, KL = map(place_of, ("cascade", "cpr", "kl"))
CONFIGS = Path(__file__).parents[2] / "configs" / "controller"
SHORT = ("--batch-size", 1, "--block-size", 32, "--eval-steps", 100, "--eval-iters", 1, "--save-steps", 2)
MORE = {
    "fixed": ("--lambda-init", 0.25),
    "cpr": ("--controller-args", "cpr_warmup=1"),
    "linear": ("--lambda-end", 0.01),
    # Twelve validations, and checkpoints at steps without one: a validation that is due is not in the checkpoint.
    "cascade": ("--max-steps", 24, "--eval-steps", 2, "--learning-rate", 0.02, "--eval-batch-size", 2),
}


def adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "scu_history.json").read_text(encoding="utf-8"))


def repeat(recorded: Path) -> tuple[str, ...]:
    """The lambda of a finished run, as a replay takes it."""
    records, start = history(recorded), json.loads((recorded / "scu_config.json").read_text(encoding="utf-8"))
    found = {"steps": [record["step"] for record in records], "lams": [record["lambda"] for record in records]}
    return (
        "--controller-args",
        *(f"{name}={value}" for name, value in found.items()),
        f"initial={start['lambda_start']}",
    )


@pytest.fixture(scope="module")
def recorded(trained) -> Path:
    """A finished run whose lambda moves."""
    return trained(*SHORT, "--lambda-init", 100)


@pytest.fixture(scope="module")
def flags_of(recorded):
    """The flags that choose a controller; a replay needs a run to repeat."""

    def flags(name: str) -> tuple:
        return (*SHORT, "--controller", place_of(name), *(repeat(recorded) if name == "replay" else MORE.get(name, ())))

    return flags


QUICK = ("none", "fixed", "pi", "kl", "replay")
"""Each has a state, or none, of another kind."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in LAWS
        if name not in ("cascade", "projection")  # their tests are below
    ],
)
def test_a_controller_trains_and_goes_on_as_if_it_had_not_stopped(train, trained, flags_of, name):
    flags = flags_of(name)
    whole = trained(*flags)
    records = history(whole)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["lambda"] is not None for record in records)
    assert ("kl_bpt" in records[-1]) == (name == "kl")
    if name in ("none", "fixed"):
        assert {record["lambda"] for record in records} == {0.0 if name == "none" else 0.25}
        assert all(record["s"] > 0 for record in records[1:])
    rest = train(*flags, "--resume-from-checkpoint", whole / "checkpoint-2")
    assert adapter(rest) == adapter(whole)
    assert [record["lambda"] for record in history(rest)] == [record["lambda"] for record in records]


@pytest.mark.slow
def test_the_cascade_goes_on_as_if_it_had_not_stopped(train, flags_of):
    # Checkpoint 15 holds what was measured at 14, which the tick at 16 will see.
    flags = (*flags_of("cascade"), "--save-steps", 15, "--control-every", 2)
    whole = train(*flags)
    records = history(whole)
    setpoints = [record["s_target"] for record in records]
    assert len(set(setpoints)) > 5  # it has moved its setpoint
    assert ["saved_held_out" in record for record in records] == [False] + [True] * 11
    rest = train(*flags, "--resume-from-checkpoint", whole / "checkpoint-15")
    assert [record["s_target"] for record in history(rest)] == setpoints
    assert adapter(rest) == adapter(whole)


@pytest.mark.slow
def test_the_setpoint_that_slopes_move_goes_on_as_if_it_had_not_stopped(train, flags_of):
    """Checkpoint 33 lies between two ticks."""
    flags = (*flags_of("none"), "--controller", AUTO, "--max-steps", 60, "--save-steps", 33, "--control-every", 2)
    whole = train(*flags)
    seen = [[record[name] for name in ("s_target", "savings_held_out_slope")] for record in history(whole)]
    assert len({setpoint for setpoint, _ in seen}) > 5 and all(math.isfinite(slope) for _, slope in seen)
    rest = train(*flags, "--resume-from-checkpoint", whole / "checkpoint-33")
    assert [[record[name] for name in ("s_target", "savings_held_out_slope")] for record in history(rest)] == seen
    assert adapter(rest) == adapter(whole)


@torch.no_grad()
def bits_per_token(model, batch: dict[str, torch.Tensor]) -> float:
    logits = model.eval()(batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item() / math.log(2)


@contextmanager
def rescale_b(model, scale: float):
    matrices = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    there = [matrix.data.clone() for matrix in matrices]
    for matrix in matrices:
        matrix.data *= scale
    yield
    for matrix, values in zip(matrices, there, strict=True):
        matrix.data = values


@pytest.mark.slow
def test_the_savings_are_those_of_the_adapter_and_of_the_adapter_scaled_down(train, flags_of):
    """Against transformers' own loss: the base model, and the checkpoint's adapter with its B scaled."""
    folder = train(*flags_of("cascade"), "--save-steps", 22, "--control-every", 1)
    record = next(record for record in history(folder) if record["step"] == 23)
    config = json.loads((folder / "training_config.json").read_text(encoding="utf-8"))
    data = TextDataModule(DataConfig(**config["data"]), config["seed"])
    data.prepare(load_tokenizer("tiny-granite-h"))
    data.start_batch = 22
    upcoming = list(islice(data.train_dataloader(), 2))
    training = {name: torch.cat([batch[name] for batch in upcoming]) for name in upcoming[0]}
    texts = {"held_out": next(iter(data.val_dataloader())), "training": training}
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-granite-h"), dtype=torch.float32)
    scores = {name: bits_per_token(base, text) for name, text in texts.items()}
    adapted = PeftModel.from_pretrained(base, folder / "checkpoint-22")
    for scale, suffix in ((1.0, ""), (PROBED_SCALE, "_scaled")):
        for name, text in texts.items():
            with rescale_b(adapted, scale):
                saved = scores[name] - bits_per_token(adapted, text)
            assert record[f"saved_{name}{suffix}"] == pytest.approx(saved, abs=6 * rounding(OF_EMBEDDED)), (name, scale)
    assert abs(record["saved_training"]) > 0.01  # an adapter that does something


def test_what_a_law_sets_acts(train, trained, flags_of):
    """The laws that act from the first tick on, against none: other weights, though nothing else was changed."""
    plain = adapter(trained(*flags_of("none")))
    # Small enough to bind within a few steps.
    bound = (*SHORT, "--controller", "research.laws.projection:Projection", "--target-s", 1e-6)
    for flags in (flags_of("fixed"), bound):
        assert adapter(trained(*flags)) != plain
    assert adapter(train(*flags_of("fixed"), "--actuator", "decoupled", "--lambda-init", 1e3)) != plain


@pytest.mark.parametrize("name", ["none", "fixed"])
def test_a_law_that_heeds_no_setpoint_has_none(launch, trained, corpus, flags_of, name):
    folder = trained(*flags_of(name))
    assert {record["s_target"] for record in history(folder)} == {None}
    metrics = json.loads((folder / "scu_metrics.json").read_text(encoding="utf-8"))
    judged = ("rise_time", "settling_time", "overshoot", "iae", "in_band", "in_band_second_half")
    assert metrics["s_target"] is None
    assert {metrics["control"][figure] for figure in judged} == {None}
    assert json.loads((folder / "scu_config.json").read_text(encoding="utf-8"))["target_s"] is None
    asked = ("--target-s", "10%", "--dry-run", "--json")
    code, out, _ = launch("--test-run", *flags_of(name), "--data-dir", corpus, *asked)
    assert (code, json.loads(out)["target_s"]) == (0, None)


def test_a_replay_of_a_runs_own_history_is_the_same_run(trained, flags_of, recorded):
    lams = [record["lambda"] for record in history(recorded)]
    assert len(set(lams)) > 1
    replayed = trained(*flags_of("replay"))
    assert [record["lambda"] for record in history(replayed)] == lams
    assert adapter(replayed) == adapter(recorded) != adapter(trained(*flags_of("none")))


def test_there_is_a_configuration_for_each_controller():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(CONTROLLERS)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_configuration_says_what_it_is_and_is_the_law_of_its_name_alone(name):
    from granite_scu.cli.script_flags import translate

    path = CONFIGS / f"{name}.yaml"
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert f"--config configs/controller/{name}.yaml" in "".join(header)
    configured = translate([f"--config={path}"])[0].request().control
    assert configured.controller == name
    setpoint = ["--control.target_s=0.1"] if name == "pi" else []
    assert configured.law() == translate([f"--control.controller={name}", *setpoint])[0].request().control.law()


# What is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--controller", "p"), "pi, and others as package.module:Class; did you mean pi?"),
        (("--controller", KL, "--controller-args", "target_kl=-1"), "laws.kl:KL: target_kl -1: must be positive and"),
        (("--controller", KL, "--controller-args", "target_kl=much"), "laws.kl:KL: target_kl much: must be a number"),
        (("--controller", "linear", "--lambda-end", "0"), "--lambda-end 0.0: must lie in"),
        (("--controller", CASCADE, "--max-steps", "30", "--eval-steps", "10"), "laws.cascade:Cascade: moves its"),
        (("--controller", CPR, "--max-steps", "6", "--control-every", "1"), "laws.cpr:CPR: takes its bounds after 10"),
        (("--controller", CPR, "--actuator", "decoupled"), f"{CPR}: cannot go together with --actuator decoupled: its"),
        *(
            (("--controller", law, "--actuator", "decoupled"), f"decoupled: {law}'s first lambda is one for the loss")
            for law in ("fixed", KL)
        ),
    ],
)
def test_a_wrong_controller_is_refused_in_one_line(launch, tmp_path, argv, words):
    assert words in refused_line(launch, "--test-run", "--output-dir", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()
