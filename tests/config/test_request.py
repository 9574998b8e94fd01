import pytest

from granite_scu.cli.request_parser import parse
from granite_scu.cli.script_flags import translate
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
    assert set(Request.from_dotted(SETTINGS).changed) == SETTINGS.keys() - usual
    arguments = ["--base.name=tiny-granite-h", "--lora.rank=16"]
    assert translate(arguments)[0].request().changed == ["base.name"], "a rank of 16 is the default's"
