"""The plan of a run in words, and settings that do not go with its length."""

from typing import Any

import pytest
from rich.console import Console

from granite_scu.config.request import Request
from granite_scu.config.settings import intervals_of
from granite_scu.hardware.presets import card_of
from granite_scu.training import plan
from granite_scu.training.plan import describe, details, opening
from granite_scu.training.preflight import out_of_proportion
from granite_scu.training.recipe import prepare

SPLIT = {"documents": 5, "supervised_tokens": 90_000}
FACTS = {
    "model": "ibm-granite/granite-4.0-h-1b",
    "parameters": "1 frozen",
    "data": {
        **{"path": "my_texts/", "block_size": 1024, "kind": "document", "conversations": 0},
        **dict.fromkeys(("train", "validation", "test"), SPLIT),
        "test_is_validation": False,
    },
    **{"device": "NVIDIA GeForce RTX 4090", "device_is_here": False, "accelerator": "cuda", "processes": 1},
    "hardware_preset": "gpu_4090",
    **{"precision": "bf16-mixed", "compiled": True, "quantize_4bit": False, "gradient_checkpointing": False},
    **{
        "first_step": 0,
        "steps": 1000,
        "tokens_per_step": 32768,
        "tokens": 32_768_000,
        "passes": 364.1,
        "learned_tokens": 90_000 * 364,
    },
    **{"controller": "pi", "control_every": 10, "target_s": 0.08, "advice": ["--warmup-steps 5: too long"]},
    "chosen": ["learning rate 0.0001: for much text"],
    **{"batch_size": 4, "gradient_accumulation_steps": 8, "auto_batch_size": False},
    **{"memory_gib_estimate": 8.41, "memory_gib_allowed": 21.15, "memory_fits": True, "time_s_estimate": 21638},
    "questions_s_at_most": 240,
    "output_dir": "runs/mine",
}


def test_a_run_begins_with_what_a_person_wants_to_know_in_twelve_lines():
    lines = opening(FACTS)
    assert len([line for line in lines if not line.startswith(("note: ", "chosen: "))]) <= 12
    assert lines[-1] == "note: --warmup-steps 5: too long"
    words = " | ".join(lines)
    for said in (
        "my_texts/: 5 documents, 90,000 tokens to train on",
        "RTX 4090; not in this machine: the plan is for such a card",
        "bf16, compiled layers",
        "4 blocks of 1,024 tokens x 8 times, accumulated = 32,768 tokens a step",
        "1,000 steps: 32,768,000 tokens, 32,760,000 of them learned, 364 passes",
        "chosen: learning rate 0.0001: for much text",
        "8.4 of 21.1 GiB, fits",
        "some minutes of compiling, then about 6 hours of training and validation, a rough estimate from the vendor's "
        "figures; then questions, at most 4 minutes",
        "pi sets lambda (how hard the adapter is held back) every 10 steps, so that S",
        "reaches S* = 8 %",
        "runs/mine",
        "saves, and the same command with --resume-from-checkpoint last continues",
    ):
        assert said in words


def test_what_is_not_known_or_does_not_fit_is_said():
    more = {"memory_fits": False, "memory_advice": "try --batch-size 2", "time_s_estimate": None}
    rows = describe(FACTS | more | {"first_step": 20})
    assert rows["memory"].endswith("does not fit (predicted); try --batch-size 2")
    assert rows["time"].startswith("not predicted")
    assert describe(FACTS | {"memory_gib_estimate": None})["memory"].startswith("not predicted for this model; there")
    assert rows["length"].startswith("1,000 steps, of which 20 are done")


@pytest.mark.parametrize(("files", "text"), [([], "what the base model writes"), (["a.jsonl", "b"], "a.jsonl, b")])
def test_where_drift_is_held_the_plan_says_on_what(files, text):
    rows = describe(FACTS | {"target_s": None, "max_drift": 0.02, "general_data": files})
    assert "drifts from its base by at most 2 %" in rows["controller"] and rows["controller"].endswith(text)
    assert ("the base model writes general text" in rows["time"]) == (not files)


def test_a_time_that_ends_before_the_steps_is_said():
    request = Request.from_dotted({"trainer.max_time": "00:00:10:00", "optimizer.warmup_steps": 0})
    [line] = out_of_proportion(request, 100, 2.0, seconds=1200.0)
    assert line.startswith("--max-time 00:00:10:00: ends the run after about 50 % of its steps")
    assert not out_of_proportion(request, 100, 2.0, seconds=500.0)


def test_of_plain_lora_a_plan_speaks_of_no_controller():
    plain = {"controller": "none", "target_s": None, "n_tokens": 9, "s_ceiling_estimate": 0.5, "first_batch": "4 x 8"}
    facts = FACTS | plain | {"memory_parts": "GiB: weights 1"}
    rows = describe(facts) | details(facts)
    assert rows["controller"] == "none: plain LoRA" and not rows.keys() & {"N", "largest S"}
    assert {"N", "largest S"} <= details(facts | {"controller": "pi"}).keys()


def test_of_chats_that_no_budget_holds_a_plan_says_so():
    facts = FACTS | {"n_tokens": 9, "s_ceiling_estimate": 0.5, "first_batch": "4 x 8", "memory_parts": "GiB: weights 1"}
    chats = facts | {"data": FACTS["data"] | {"conversations": True}}
    assert "--max-drift" in details(chats)["forgetting"]
    assert "forgetting" not in details(facts).keys() | details(chats | {"max_drift": 0.02}).keys()


def test_a_plan_for_the_cpu_says_that_it_is_not_for_the_card_of_the_preset():
    here = {"device": "a CPU", "accelerator": "cpu", "device_is_here": True}
    on_cpu = describe(FACTS | here)["device"]
    assert on_cpu == "a CPU (CPU); on the CPU, and not on the card that --hardware gpu_4090 is for"
    assert describe(FACTS | here | {"hardware_preset": "cpu"})["device"] == "a CPU (CPU)"


def test_the_time_counts_each_validation_and_its_batches_and_the_scores_at_the_end():
    settings = {
        "base.name": "tiny-granite-h", "data.path": "stdlib-docs", "data.block_size": 64, "data.batch_size": 2,
        "trainer.max_steps": 100, "trainer.accumulate_grad_batches": 1, "optimizer.warmup_steps": 1,
    }  # fmt: skip

    def seconds(every: int, batches: int, **more: Any) -> tuple[float, float]:
        asked = more | {"run.eval_steps": every, "trainer.limit_val_batches": batches, "trainer.accelerator": "cuda"}
        run = prepare(Request.from_dotted(settings | asked), Console(quiet=True), card=card_of("gpu_4090"))
        # In steps of two blocks, of which a forward pass is half: base and adapter read each test block.
        return plan._seconds(run, here=False), len(run.data.test) / 2

    once, test = seconds(every=1000, batches=4)
    # Of each step of 128 tokens 64 of general text, and at each 10th tick 256 that are read.
    drift, _ = seconds(every=1000, batches=4, **{"drift.max_drift": "2%", "control.every": 10})
    plain = 100 + 4 / 2 + test
    assert drift / once == pytest.approx((plain + 100 * 64 / 128 + 10 * 256 / 128 / 2) / plain)
    assert seconds(every=10, batches=4)[0] / once == pytest.approx((100 + 10 * 4 / 2 + test) / (100 + 4 / 2 + test))
    assert seconds(every=10, batches=8)[0] / once == pytest.approx((100 + 10 * 8 / 2 + test) / (100 + 4 / 2 + test))
    assert [plan.validations(105, done, 20) for done in (0, 60, 105)] == [6, 3, 0]


TWO = {"data.path": ["stdlib-docs", "stdlib-source"]}


@pytest.mark.parametrize(
    ("settings", "steps", "passes", "words"),
    [
        ({"optimizer.warmup_steps": 50}, 20, 1, ["the run has 20 steps, so", "--warmup-steps 2 takes a tenth"]),
        ({"optimizer.warmup_steps": 50}, 200, 1, ["takes 25 % of the 200 steps; --warmup-steps 20"]),
        (
            {"data.num_epochs": 3, "trainer.max_steps": -1},
            20,
            3,
            ["--num-epochs 3: makes 20 steps", "--gradient-accumulation-steps 1 makes about 80 of the same text"],
        ),
        (
            {"data.num_epochs": 3, "trainer.max_steps": -1, "trainer.accumulate_grad_batches": 1},
            20,
            3,
            ["--num-epochs 15 makes 100 or more"],
        ),
        ({"data.block_size": 200_000}, 100, 1, []),  # the default model has no positions
        ({"run.eval_steps": 200}, 100, 1, ["only the last adapter is validated; --eval-steps 20"]),
        ({"data.num_epochs": 3, "trainer.max_steps": 20}, 20, 99, []),
        (
            {},
            8,
            80.0,
            ["--max-steps 8: reads the data 80 times; a step alone reads it 10 times; give a smaller --batch"],
        ),
        ({}, 8000, 76.2, ["--max-steps 8000: reads the data 76 times; --max-steps 315 reads it three times"]),
        ({}, 8000, None, []),
        ({}, 1000, 30, []),
    ],
)
def test_a_setting_out_of_proportion_is_said_with_the_number_that_would_do(settings, steps, passes, words):
    fitting = {"optimizer.warmup_steps": 0, "run.eval_steps": 1}
    said = out_of_proportion(Request.from_dotted(fitting | settings), steps, passes)
    assert len(said) == bool(words)
    assert all(word in said[0] for word in words)


def test_a_block_longer_than_the_models_positions_is_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    settings = {"base.name": str(tmp_path), "optimizer.warmup_steps": 0, "run.eval_steps": 1}
    said = {n: out_of_proportion(Request.from_dotted(settings | {"data.block_size": n}), 100, 1) for n in (64, 65)}
    assert said[64] == [] and len(said[65]) == 1 and said[65][0].startswith("--block-size 65: ")


@pytest.mark.parametrize(
    ("asked", "steps", "intervals"),
    [
        ({"run.eval_steps": 200}, 5000, (200, 500)),
        ({"run.eval_steps": 7}, 36, (7, 18)),
        ({"run.eval_steps": 1}, 1, (1, 1)),
        ({"run.eval_steps": 50, "run.save_steps": 9}, 36, (50, 9)),
    ],
)
def test_a_run_saves_as_suits_its_length(asked, steps, intervals):
    assert intervals_of(Request.from_dotted(asked).run, steps) == intervals
