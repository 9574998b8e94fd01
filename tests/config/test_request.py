import pytest
import yaml

from granite_scu.cli.script_flags import translate
from granite_scu.cli.train import parse
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request

SETTINGS = {
    "base.name": "tiny-granite-h",
    "data.isolate_documents": False,
    "lora.targets": ["in_proj", "q_proj"],
    "optimizer.learning_rate": 4e-3,
    "control.target_s": 0.1,
    "run.early_stopping": None,
    "trainer.limit_val_batches": 8192,
    "trainer.max_steps": 7,
    "seed_everything": 3,
}


def test_a_request_from_dotted_settings_is_the_command_lines():
    said = {True: "true", False: "false", None: "null"}
    arguments = [
        f"--{key}={value if isinstance(value, list) else said.get(value, value)}" for key, value in SETTINGS.items()
    ]
    assert Request.from_dotted(SETTINGS) == parse(translate(arguments)[0]).request


@pytest.mark.parametrize("settings", [{"lora.rnk": 3}, {"lora.rank": "x"}, {"data.block_size": None}])
def test_what_no_setting_takes_is_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        Request.from_dotted(settings)


def test_it_knows_what_differs_from_the_defaults():
    usual = {"run.early_stopping"}
    asked_for = {"control.controller"}  # by a setting of one
    assert set(Request.from_dotted(SETTINGS).changed) == SETTINGS.keys() - usual | asked_for
    assert Request.from_dotted({"control.every": 3}).changed == ["control.every"]


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        ({}, "none"),
        ({"control.every": 3}, "none"),
        ({"control.kp": "null", "drift.max_drift": None}, "none"),
        ({"control.kp": 3, "control.target_s": 0.1}, "pi"),
        ({"control": {"target_s": 0.1}}, "pi"),
        ({"drift.max_drift": "2%"}, "pi"),
        ({"control.target_s": 0.1, "run.stop_at_equilibrium": 30, "control.deadband": 0}, "pi"),
        ({"control.controller": "none", "control.kp": 3}, "none"),
    ],
    ids=str,
)
def test_a_run_has_a_controller_where_a_setting_asks_for_one(settings, law):
    assert Request.from_dotted(settings).control.controller == law
    arguments = ["--base.name=tiny-granite-h", "--lora.rank=16"]
    assert translate(arguments)[0].request().changed == ["base.name"], "a rank of 16 is the default's"


STREAM = {"data.stream": True}
OFF = {"data.held_out_share": 0}
CASCADE = {"control.controller": "research.laws.cascade:Cascade"}
SHARED = {"run.multi_gpu": True, "run.fsdp": True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (STREAM | {"data.num_epochs": 1}, "--num-epochs 1.0: not with --stream: .* give --max-steps"),
        (STREAM | {"data.path": ["a"], "data.weights": [1.0]}, "--data-weights .*: not with --stream: .* in turn"),
        (STREAM | {"data.train_tokens": 2048}, "--data.train_tokens 2048: not with --stream"),
        ({"data.path": ["a", "./b/../a"]}, "--data-dir a: named twice; .* and --data-weights 2 to read it twice"),
        ({"data.test_data": ["b", "./b"]}, "--test-data b: named twice; name it once$"),
        (SHARED | {"base.quantize_4bit": True}, "leave out --4bit-quantization or --fsdp"),
        (SHARED | {"base.compile": True}, "leave out --torch-compile"),
        (SHARED | {"base.gradient_checkpointing": "selective"}, "give --gradient-checkpointing on"),
        ({"base.kernels": "cuda", "trainer.deterministic": True}, "^--kernels cuda: .*--deterministic"),
        ({"base.attention": "flash_attention_2"}, "^--attn flash_attention_2: .*--no-isolate-documents"),
        (
            {"lora.adapter": "a", "control": {"actuator": "decoupled", "lambda_init": 1, "target_s": 0.1}},
            "--actuator decoupled: cannot go together with --adapter: it ",
        ),
        (OFF | {"run.early_stopping": 1}, "--early-stopping 1: .* or give --validation-data"),
        (OFF | CASCADE, "research.laws.cascade:Cascade: cannot go together with --held-out-share 0"),
        (STREAM | CASCADE, "research.laws.cascade:Cascade: cannot go together with --stream"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Request.from_dotted(settings)


def test_what_is_found_later_is_held_to_the_same_rules():
    """As a controller of the checkpoint, which the command line did not name."""
    request = Request.from_dotted({"run.stop_at_equilibrium": 30, "control.target_s": 0.1, "control.deadband": 0})
    with pytest.raises(UserError, match="--controller none follows no setpoint"):
        request.with_values({"control.controller": "none"})
    with pytest.raises(UserError, match="--gradient-accumulation-steps 0: must be at least 1"):
        request.with_values({"trainer.accumulate_grad_batches": 0})


def test_what_is_stored_has_no_key_of_a_logger():
    given = {"api_key": "hidden", "tokenizer": "mine", "more": [{"token": "x"}]}
    request = Request.from_dotted({"trainer.logger": [{"class_path": "mine.Logger", "init_args": given}]})
    (stored,) = yaml.safe_load(request.stored)["trainer"]["logger"]
    assert stored["init_args"] == {"api_key": "***", "tokenizer": "mine", "more": [{"token": "***"}]}
