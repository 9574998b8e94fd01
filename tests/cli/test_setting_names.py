"""Messages name settings as the way in has them: of fit by their dotted keys."""

import logging

import pytest
from rich.console import Console

from granite_scu.cli import console
from granite_scu.cli.main import main
from granite_scu.cli.setting_names import as_dotted_keys


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--warmup-steps 30: too long; --num-epochs 3", "--optimizer.warmup_steps 30: too long; --data.num_epochs 3"),
        ("--multi-gpu: no GPU; add --no-fsdp", "--run.multi_gpu: no GPU; add --run.fsdp false"),
        ("leave out --4bit-quantization or", "leave out --base.quantize_4bit true or"),
        ("use --torch-compile off, --precision auto", "use --base.compile false, --trainer.precision null"),
        ("granite-scu check, --device and --max-steps-of", "granite-scu check, --device and --max-steps-of"),
    ],
)
def test_flags_as_dotted_keys(flags, keys):
    assert as_dotted_keys(flags) == keys


def test_a_refusal_has_the_keys_of_fit_and_the_flags_of_train(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("control: {kp: 0.1, ki: 0.1, measure: factors}\n")
    assert main(["fit", "--config", str(file)]) == 2
    assert "--control.target_s auto works with delta alone" in capsys.readouterr().err
    assert main(["train", "--config", str(file)]) == 2
    assert "--target-s auto works with delta alone" in capsys.readouterr().err


def test_warnings_too(monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "handlers", [])
    shown = Console(width=200, record=True)
    console.quiet(shown, as_dotted_keys)
    logging.getLogger("granite_scu.training").warning("--eval-steps %d: too many", 9)
    assert shown.export_text().strip() == "--run.eval_steps 9: too many"
