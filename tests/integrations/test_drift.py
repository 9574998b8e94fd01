"""The callback holds drift: as the application does on the same weights and text, and on to the same after a stop."""

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from granite_scu.data.sources.documents import Conversation
from granite_scu.data.tokens.encoding import encode
from granite_scu.evaluation.answers import questions_of
from granite_scu.evaluation.general_writing import BATCH
from granite_scu.integrations.drift import questions
from granite_scu.integrations.transformers import ShannonCallback
from granite_scu.model.drift import MARGIN

STEPS, EVERY, WIDTH, ROWS, BUDGET = 12, 2, 12, 2, 0.002
RATE, N = 1e-2, 1000


class Shown(TrainerCallback):
    """Keeps what a trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> str:
    """Folder of a small dense model with random weights, which both programs compute by transformers' own layers."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("dense"))
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def held(base, text, tokenizer, examples, trainer, ticks, tmp_path):
    """Trains the dense model under the callback; returns the trainer, and its ticks."""
    text.write(tmp_path / "text.jsonl", tokenizer)

    def run(resume=None, max_drift=BUDGET, steps=STEPS, every=None, targets="all-linear", **settings):
        torch.manual_seed(0)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, target_modules=targets)
        )
        own = {
            "control_every": EVERY,
            "n_tokens": N,
            "gradient_clip": 0.0,
            "general_data": [str(tmp_path / "text.jsonl")],
        }
        callback = ShannonCallback(max_drift=max_drift, **(own | settings))
        saving = {"save_strategy": "steps", "save_steps": 5}
        if every:
            choosing = {"metric_for_best_model": "loss_in_budget", "load_best_model_at_end": True}
            saving |= {"eval_strategy": "steps", "eval_steps": every, "save_steps": every, "greater_is_better": False}
            saving |= choosing | {"cls": partial(Trainer, eval_dataset=examples(2))}
        made = trainer(model, examples(steps), callback, tokenizer=tokenizer, learning_rate=RATE, **saving)
        made.train(resume_from_checkpoint=resume)
        return made, ticks(made)

    return run


def test_general_text_is_near_the_questions_that_train_would_draw(tokenizer):
    turns = [("What is it", "A ferry."), ("Who asks", "I do.")]
    chats = [
        Conversation(
            "chat", "", messages=({"role": "user", "content": f"{asked} {i}?"}, {"role": "assistant", "content": said})
        )
        for i in range(2 * BATCH)
        for asked, said in turns
    ]
    stream = encode(chats, tokenizer)
    examples = [
        {
            "input_ids": tokens,
            "labels": [token if counts else -100 for token, counts in zip(tokens, targets, strict=True)],
        }
        for start, stop in stream.bounds.tolist()
        for tokens, targets in [(stream.tokens[start:stop].tolist(), stream.targets[start:stop].tolist())]
    ]
    loader = DataLoader(examples, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    assert questions(loader, tokenizer, 3) == [q.text for q in questions_of(stream, tokenizer, count=BATCH, seed=3)]


def test_paths_of_general_text_may_be_pathlibs():
    given = ShannonCallback(max_drift=BUDGET, general_data=[Path("g.jsonl")])
    assert given.state()["args"]["general_data"] == ["g.jsonl"]


def test_the_trainer_can_keep_the_best_adapter_within_the_budget(held):
    """The loss falls all along, and drift grows: within a budget between the second and the third evaluation the second
    is the best, and below all of them the first is the nearest."""
    weak = {"every": 3, "lambda_init": 1e-3, "lambda_max": 1e-3}
    free, _ = held(max_drift="99%", **weak)
    told = [each["scu/drift_held_out"] for each in free.state.log_history if "scu/drift_held_out" in each]
    losses = [each["eval_loss"] for each in free.state.log_history if "eval_loss" in each]
    assert told[:4] == sorted(told[:4]) and losses == sorted(losses, reverse=True) and free.state.best_global_step == 12
    for budget, best in ((sum(told[1:3]) / 2 / MARGIN, 6), (told[0] / 2, 3)):
        run, _ = held(max_drift=budget, **weak)
        assert run.state.best_global_step == best
        # The adapter that is kept is measured last, from weights that have been through a file.
        assert run.state.log_history[-1]["scu/drift_held_out"] == pytest.approx(told[best // 3 - 1], rel=1e-4)


def test_a_resumed_run_holds_on_to_the_same_lambda(held, tmp_path):
    """From a checkpoint between two ticks, after which every number of every tick is equal."""
    _, whole = held()
    place = str(tmp_path / "out" / "checkpoint-5")
    (tmp_path / "text.jsonl").unlink()  # the run has its own
    _, rest = held(resume=place)
    assert rest == whole
    (tmp_path / "out" / "general.jsonl").write_text("other")
    with pytest.raises(ValueError, match=r"general.jsonl: is not the general text"):
        held(resume=place)
    with pytest.raises(ValueError, match="held was drift and is now S"):
        held(resume=place, max_drift=None, general_data="auto", target_s=0.1)


def test_an_adapter_of_the_head_drifts_too(held):
    made, _ = held(targets=["lm_head"])
    assert next(each["scu/drift_held_out"] for each in made.state.log_history if "scu/drift_held_out" in each) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_drift": 0.02, "target_s": 0.1}, "max_drift 2%: .* target_s 0.1"),
        ({"max_drift": 2}, "max_drift .* 2%"),
        ({"max_drift": [0.02]}, "max_drift .*: must be a number"),
        ({"max_drift": 0.02, "general_data": [3]}, "general_data .*: must be"),
        ({"max_drift": 0.02, "general_tokens": 3}, "general_tokens"),
        ({"general_data": ["chats.jsonl"]}, "general_data chats.jsonl: .*max_drift"),
    ],
)
def test_a_budget_that_cannot_be_held_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ShannonCallback(**settings)


def test_what_the_run_lacks_is_said_before_the_first_step(examples, adapted, trainer, tokenizer):
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    for given, more, words in (
        (None, {}, "processing_class"),
        (tokenizer, {}, "max_drift: .*control_every"),
        (tokenizer, reentrant, "max_drift: reentrant"),
        (tokenizer, {"neftune_noise_alpha": 5.0}, "max_drift: NEFTune"),
    ):
        run = trainer(adapted(), examples(4), ShannonCallback(max_drift=0.02, n_tokens=N), tokenizer=given, **more)
        with pytest.raises(ValueError, match=words):
            run.train()


@pytest.mark.parametrize("sets", [("",), ("a_", "b_")])
def test_a_trainer_stops_early_by_the_loss_in_budget(sets, base, examples, trainer, text, tokenizer, tmp_path):
    """Drift is beyond a small budget at the first evaluation, and further at the second; of each set it is logged."""
    text.write(tmp_path / "text.jsonl", tokenizer)
    rows, model = examples(STEPS), AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    evaluated = rows[:2] if sets == ("",) else {name[:-1]: rows[:2] for name in sets}
    best = {"metric_for_best_model": f"eval_{sets[-1]}loss_in_budget", "greater_is_better": False}
    often = dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | {"eval_steps": 3, "save_steps": 3}
    made = partial(Trainer, eval_dataset=evaluated)
    run = trainer(
        model, rows, EarlyStoppingCallback(1), cls=made, tokenizer=tokenizer, **best, **often,
        load_best_model_at_end=True,
    )  # fmt: skip
    weak = {"lambda_init": 1e-3, "lambda_max": 1e-3, "general_data": [str(tmp_path / "text.jsonl")]}
    run.add_callback(ShannonCallback(max_drift=1e-5, control_every=EVERY, n_tokens=N, **weak))
    run.add_callback(shown := Shown())
    run.train()
    assert (run.state.global_step, run.state.best_global_step) == (6, 3)
    for told in (run.state.log_history, shown.logs):
        evaluations = [each for each in told if any(f"eval_{name}loss" in each for name in sets)]
        assert len(evaluations) == 2 * len(sets)
        for each, name in zip(evaluations, sets * 2, strict=True):
            assert each[f"eval_{name}loss_in_budget"] > 1000 and each["eval_drift"] > 0
