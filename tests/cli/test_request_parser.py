"""One configuration for every way in: YAML, dotted keys and the script's flags."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from granite_scu.cli import exit_codes, run_commands, script_flags
from granite_scu.cli import request_parser as cli
from granite_scu.cli.main import main
from granite_scu.config.errors import WRONG_REQUEST, RunFailed, Stopped, UserError
from granite_scu.training.resume import AS_BEFORE

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
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


def test_the_scripts_files_and_flags_have_the_same_order(layers):
    first, second = layers
    # Flags win wherever they stand, and over the test run's own defaults too.
    argv = ["--kp", "0.7", "--config", first, "--test-run", "--config", second]
    request = script_request(*argv)
    assert (request.lora.rank, request.lora.alpha) == (6, 8.0)
    assert (request.control.kp, request.control.ki, request.control.every) == (0.7, 0.1, 4)
    assert script_request("--test-run", "--control-every", "9").control.every == 9


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
    ],
)
def test_the_script_and_the_module_make_the_same_request(script, module):
    assert script_request(*script) == module_request(*module)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_of_the_repository_is_valid(path):
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    resolved = yaml.safe_load(module_request("--config", str(path)).yaml)
    for group, settings in given.items():
        for name, value in settings.items():
            assert resolved[group][name] == value


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_the_commands(command):
    parsed = cli.parse(script_flags.translate(["--config", str(TINY)])[0], command)
    assert parsed.subcommand == command
    assert parsed.request == module_request("--config", str(TINY))


def test_the_resolved_configuration_feeds_back(tmp_path):
    request = module_request("--config", str(TINY), "--control.target_s=0.03", "--data.num_epochs=1.5")
    saved = tmp_path / "config.yaml"
    saved.write_text(request.yaml)
    assert module_request("--config", str(saved)) == request


def test_the_printed_configuration_feeds_back_and_the_scripts_is_the_modules(tmp_path, capsys):
    assert main(["fit", "--config", str(TINY), "--control.kp=0.7", "--print_config"]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert run_commands.main(["--test-run", "--kp", "0.7", "--print-config"]) == 0
    assert capsys.readouterr().out == printed.out
    saved = tmp_path / "printed.yaml"
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
        ("control: {target: 0.02}", "control.target"),
        ("contrl: {target_s: 0.02}", "contrl.target_s"),
        ("control: {target_s: high}", "--control.target_s high (in {file}): is no share, such as 10% or 0.1, and not"),
        ("lora: {rank: 2.5}", "lora.rank"),
        ("data: {block_size: [a, b]}", "data.block_size"),
        ("optimizer: {schedule: step}", "optimizer.schedule"),
        ("control: {target_s: 2}", "--control.target_s 2"),
        ("data: {encoding: utf-7}", "--data.encoding utf-7 (in {file}): no such encoding"),
        ('data: {encoding: "utf-8\\0"}', "no such encoding"),
        ("data: {weights: [1e6], path: a}", "--data.weights [1000000.0] (in {file}): must be passes from 0 to 1000"),
        ("trainer: {max_step: 3}", "trainer.max_step"),
        ("seed_everything: -1", "--seed_everything -1"),
        ("control: [", "config"),
        ("just words", ""),
        ("control: {controller: null}", "control.controller null (in {file}): must have a value; leave it out for the"),
        ("control: {target_s: null}", "control.target_s null (in {file}): must have a value"),
        ("base: {name: null}", "base.name null (in {file}): must have a value"),
        ("control: 3", "control (in {file}): must be a mapping of settings, and is 3"),
        ("trainer: null", "trainer (in {file}): must be a mapping of settings, and is None"),
        ("seed_everything: null", "--seed_everything None (in {file}): must be a whole number"),
        ("control: {controller: 3}", "--control.controller 3 (in {file}): must be a text"),
        ("control: {kp: -1}", "--control.kp -1.0 (in {file}): must be positive and finite"),
        ("lora: {rank: 2.5}", "--lora.rank 2.5 (in {file}): must be a whole number"),
        ("control: {target: 0.02}", "{file}:1: there is no setting control.target; did you mean control.target_s?"),
        ("control: {controller: pid}", "--control.controller pid (in {file}): no controller is called 'pid'"),
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
    assert f"--control.kp -1.0 (in {second}): must" in refusal(capsys, "fit", *files)
    assert "--control.kp -2.0: must" in refusal(capsys, "fit", *files, "--control.kp=-2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--config", "no/such.yaml"], "no/such.yaml"),
        (["fit", "--control.kd=1"], "control.kd"),
        (["fit", "--trainer.max_stepz", "3"], "did you mean --trainer.max_steps?"),
        (["fit", "--control.controller", "nosuch"], "there are none, fixed, linear, cosine, pi, replay"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(arguments, words, capsys):
    assert words in refusal(capsys, *arguments)


def test_debug_shows_where_an_error_came_from(capsys):
    assert main(["fit", "--control.kd=1", "--debug"]) == WRONG_REQUEST
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.splitlines()[-1].startswith("error: ")


def _because_of(cause: OSError) -> UserError:
    refused = UserError("--cache-dir a: cannot be read; name another folder")
    refused.__cause__ = cause
    return refused


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("--seed -1: too small"), 2, "--seed -1: too small"),
        (UserError(f"--seed {'9' * 5000}: too large"), 2, f"--seed {'9' * 100}...{'9' * 49}: too large"),
        (RunFailed("step 3: not finite"), 1, "step 3: not finite"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C; steps since the last checkpoint are lost; where there is one,"),
        (Stopped("stopped by SIGTERM after step 3", 143), 143, "stopped by SIGTERM after step 3"),
        (FileNotFoundError(2, "No such file", b"run/h.jsonl"), 1, "run/h.jsonl: No such file; it was deleted or moved"),
        (_because_of(OSError(28, "No space left on device", "a")), 1, "--cache-dir a: cannot be read; name another"),
        (_because_of(OSError(24, "Too many open files", "a")), 1, "Too many open files: 'a'; allow more open files"),
        (RuntimeError("two\n  lines"), 1, "RuntimeError: two lines; --debug shows where"),
        (RuntimeError("very " * 1000 + "long"), 1, "very ...; --debug shows where"),
        (ZeroDivisionError(), 1, "ZeroDivisionError: no message"),
    ],
)
def test_an_exception_becomes_an_exit_code_and_one_line(error, code, words, capsys):
    def run():
        raise error

    assert exit_codes.guarded(run, debug=False) == code
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.startswith("error: ") != (code > 128)  # what somebody asked for is none
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("home", "words"), [(None, "no home folder of this user is known"), ("/", "begins with ~ and no")]
)
def test_a_home_that_is_not_known_is_told_from_a_user_that_is_not(monkeypatch, home, words, capsys):
    monkeypatch.delenv("HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where nobody's home is known
    assert exit_codes.guarded(lambda: Path.home() and 0, debug=False) == 2
    assert words in capsys.readouterr().err


def test_an_import_that_swallows_exceptions_does_not_keep_an_interrupt_from_ending_the_program():
    code = """
import os, signal
from granite_scu.cli import exit_codes
signal.signal(signal.SIGINT, signal.default_int_handler)  # this test may run where it is ignored
with exit_codes.importing():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C; nothing was written\n")


def test_no_garbage_is_collected_while_libraries_are_imported_and_what_they_made_is_left_alone():
    with exit_codes.importing():
        collects = gc.isenabled()
    kept = gc.get_freeze_count()
    gc.unfreeze()
    assert not collects and gc.isenabled() and kept > 0


def test_a_thread_that_cannot_write_prints_no_traceback(capsys, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    def run():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        return 0

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own
    for debug, lines in ((False, 0), (True, 1)):
        assert exit_codes.guarded(run, debug) == 0
        assert capsys.readouterr().err.count("Traceback") == lines
