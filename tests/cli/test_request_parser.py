"""One configuration for every way in: YAML, dotted keys and the script's flags."""

from pathlib import Path

import pytest
import yaml

from granite_scu.cli import script_flags
from granite_scu.cli import train as cli
from granite_scu.cli.main import main
from granite_scu.config.errors import WRONG_REQUEST
from granite_scu.training.resume import AS_BEFORE

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.yaml"


def module_request(*arguments: str):
    """What LightningCLI makes of it."""
    return cli.parse(script_flags.translate(list(arguments), dotted=True)[0]).request


def script_request(*argv: str):
    return script_flags.translate(list(argv))[0].request()


def refusal(capsys, *arguments: str) -> str:
    """The one line that a wrong command gets."""
    assert main(list(arguments)) == WRONG_REQUEST
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
    return printed.err


@pytest.fixture
def layers(tmp_path):
    """Two YAML files that agree about some things."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("lora: {rank: 4, alpha: 8}\ncontrol: {kp: 0.5, ki: 0.1, target_s: 12.5%}\n")
    second.write_text("lora: {rank: 6}\ncontrol: {kp: 0.6}\n")
    return str(first), str(second)


def test_defaults_give_way_to_files_in_order_and_files_to_flags(layers):
    first, second = layers
    request = module_request("--config", first, "--config", second, "--control.kp=0.7")
    assert (request.lora.rank, request.lora.alpha, request.lora.dropout) == (6, 8.0, 0.0)
    assert (request.control.kp, request.control.ki, request.control.every) == (0.7, 0.1, None)
    assert request.control.target_s == 0.125
    assert module_request("--config", second, "--config", first).lora.rank == 4


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ([], []),
        (["--test-run"], ["--config", str(TINY)]),
        (
            ["--model", "tiny-granite-h", "--precision", "bf16", "--max_length", "64", "--overwrite", "--seed", "3"],
            [
                *("--base.name=tiny-granite-h", "--trainer.precision=bf16-mixed", "--data.block_size=64"),
                *("--run.overwrite=true", "--seed_everything=3"),
            ],
        ),
        (
            ["--test-run", "--num-epochs", "2", "--lora.targets", "[in_proj]", "--early-stopping"],
            [
                *("--config", str(TINY), "--data.num_epochs=2", "--trainer.max_steps=-1"),
                *("--lora.targets=[in_proj]", "--run.early_stopping=3"),
            ],
        ),
        (["--test-run", "--num-epochs", "2"], ["--config", str(TINY), "--data.num_epochs=2"]),
    ],
)
def test_the_script_and_the_module_make_the_same_request(script, module):
    assert script_request(*script) == module_request(*module)


def test_the_resolved_configuration_feeds_back(tmp_path):
    request = module_request("--config", str(TINY), "--control.target_s=0.03", "--data.num_epochs=1.5")
    saved = tmp_path / "config.yaml"
    saved.write_text(request.yaml)
    assert module_request("--config", str(saved)) == request


def test_the_printed_configuration_feeds_back_and_the_scripts_is_the_modules(tmp_path, capsys):
    assert main(["fit", "--config", str(TINY), "--control.kp=0.7", "--print_config"]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert main(["train", "--test-run", "--kp", "0.7", "--print-config"]) == 0
    assert capsys.readouterr().out == printed.out
    saved = tmp_path / "printed.yaml"
    system = "You are Ada.\nAnswer briefly.\n"
    assert main(["train", "--test-run", "--system", system, "--print-config"]) == 0
    saved.write_text(capsys.readouterr().out)
    assert module_request("--config", str(saved)).data.system == system
    saved.write_text(printed.out)
    again, before = module_request("--config", str(saved)), module_request("--config", str(TINY), "--control.kp=0.7")
    assert again.control.kp == 0.7
    fitted = [{key for key in run.given if key in AS_BEFORE or "control." in key} for run in (again, before)]
    assert fitted[0] == fitted[1], "a default counts as given"
    assert main(["fit", "--config", str(saved), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed.out)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("control: {target_s: 2}", "--control.target_s (in {file}:1) 2.0: must lie"),
        ("data: {encoding: utf-7}", "--data.encoding (in {file}:1) utf-7: no such encoding"),
        ("data: {weights: [1e6], path: a}", "--data.weights (in {file}:1) [1000000.0]: must be passes from 0 to 1000"),
        (
            "control: {controller: null}",
            "control.controller (in {file}:1) null: must have a value; leave it out",
        ),
        ("base: {name: null}", "base.name (in {file}:1) null: must have a value"),
        ("control: 3", "control (in {file}:1): must be a mapping of settings, and is 3"),
        ("seed_everything: null", "--seed_everything (in {file}:1) None: must be a whole number"),
        (
            "data: {chat_template_args: {a: 1}}",
            "(in {file}:1) {'a': 1}: must be a list of texts",
        ),
        ("control: {controller: 3}", "--control.controller (in {file}:1) 3: must be a text"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text, words, tmp_path, capsys):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    assert words.replace("{file}", str(wrong)) in refusal(capsys, "fit", "--config", str(wrong))


def test_of_several_files_the_one_that_counts_is_named_and_none_where_a_flag_counts(layers, capsys):
    first, second = layers
    Path(second).write_text("control: {kp: -1}\n")
    files = ("--config", first, "--config", second)
    assert f"--control.kp (in {second}:1) -1.0: must" in refusal(capsys, "fit", *files)
    assert "--control.kp -2.0: must" in refusal(capsys, "fit", *files, "--control.kp=-2")


def test_json_of_a_run_is_refused_and_not_ignored(capsys):
    assert "--json: a run prints no JSON" in refusal(capsys, "train", "--test-run", "--json")
