"""The hardware preset among the other layers, and where each value of a configuration comes from."""

import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import devices
import pytest
import untried
import yaml
from devices import A100, CPU, RTX_4090, T4
from outcomes import refusal

from granite_scu.cli import run_commands, script_flags
from granite_scu.cli.main import main
from granite_scu.config.errors import UserError
from granite_scu.config.settings import TrainerConfig
from granite_scu.hardware import detection, peaks, presets
from granite_scu.model import step_time
from granite_scu.training import memory_budget, plan
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.recipe import prepare

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TINY = CONFIGS / "tiny.yaml"


def script(*argv: str):
    return script_flags.translate(list(argv))[0].request()


def module(*arguments: str):
    parser = run_commands.build_parser("fit")
    return script_flags.translate(list(arguments), parser, dotted=True)[0].request()


@pytest.fixture
def layer(tmp_path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {batch_size: 5}\nlora: {rank: 4}\n")
    return str(path)


def test_a_preset_lies_over_defaults_and_under_files_and_flags(layer):
    request = script("--hardware", "gpu_low_mem")
    assert (request.data.batch_size, request.lora.rank, request.base.quantize_4bit) == (2, 8, True)
    assert request.hardware == "gpu_low_mem"
    request = script("--hardware", "gpu_low_mem", "--config", layer)
    assert (request.data.batch_size, request.lora.rank, request.base.quantize_4bit) == (5, 4, True)
    request = script("--hardware", "gpu_low_mem", "--config", layer, "--batch-size", "7", "--no-4bit-quantization")
    assert (request.data.batch_size, request.lora.rank, request.base.quantize_4bit) == (7, 4, False)


def test_the_order_on_the_command_line_does_not_matter(layer):
    expected = script("--hardware", "gpu_4090", "--config", layer)
    assert script("--config", layer, "--hardware", "gpu_4090") == expected
    assert module("--hardware", "gpu_4090", "--config", layer) == expected
    assert module("--config", layer, "--hardware=gpu_4090") == expected


@pytest.mark.parametrize("device", [T4, A100], ids=lambda device: device.name)
def test_auto_takes_the_preset_of_the_machine(machine, device):
    machine(device)
    assert script("--hardware", "auto") == script("--hardware", presets.choose(device))


def test_auto_takes_the_preset_of_the_least_of_gpus_that_train_together(machine, monkeypatch):
    machine(replace(A100, count=2))
    monkeypatch.setattr(detection, "detect_all", lambda: [A100, T4])
    assert script("--hardware", "auto", "--multi-gpu").hardware == presets.choose(T4)
    assert script("--hardware", "auto").hardware == presets.choose(A100)


def test_auto_takes_the_cpu_where_it_is_meant_and_says_why_where_there_is_no_gpu(machine, caplog):
    machine(CPU, driver=None)
    assert script("--hardware", "auto", "--accelerator", "cpu").hardware == "cpu"
    assert script("--hardware", "auto", "--test-run").hardware == "cpu"
    assert not caplog.records
    assert script("--hardware", "auto").trainer.accelerator == "cpu"
    assert "no CUDA device (no NVIDIA driver), so the settings are those for the CPU" in caplog.text
    with pytest.raises(UserError, match="no CUDA device: no NVIDIA driver"):
        script("--hardware", "auto", "--accelerator", "cuda")


def test_what_a_preset_of_another_card_asks_for_is_refused_with_the_preset_that_fits(machine):
    machine(T4)
    request = script("--hardware", "gpu_4090", "--model", "tiny-granite-h", "--data-dir", "stdlib-docs")
    with pytest.raises(UserError, match=r"--precision bf16: Tesla T4 has .*; --hardware gpu_4090: made for.*gpu_t4 is"):
        prepare(request)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "seed: 3"], "--seed: there is no such setting; did you mean --seed_everything?"),
        (["--hardware", "gpu_4900"], "--hardware gpu_4900: no such preset; did you mean gpu_4090? choose auto, gpu_t4"),
        (["--hardware", "a100"], "--hardware a100: there are gpu_a100_40 and gpu_a100_80; choose one of them"),
        (["--hardware", "cpu", "--hardware", "cpu"], "given 2 times"),
        (["--hardware"], "--hardware: expected one argument"),
    ],
)
def test_what_names_no_preset_is_refused(arguments, words):
    assert words in refusal(module, *arguments)


def test_each_value_says_where_it_is_from(layer, capsys):
    argv = ["--test-run", "--hardware", "gpu_4090", "--config", layer, "--lora-r", "3", "--print-config"]
    assert main(["train", *argv]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.strip().split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert lines["learning_rate"] == f"0.001  # {TINY}"
    assert lines["expected_mfu"] == "0.2  # --hardware gpu_4090"
    assert lines["batch_size"] == f"5  # {layer}"
    assert lines["rank"] == "3  # a flag"
    assert lines["dropout"] == "0.0"
    whole = printed.replace("\n  # ", "\n  ").replace("\n# ", "\n")  # with what the data may change
    assert yaml.safe_load(whole) == yaml.safe_load(script(*argv[:-1]).yaml)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"data: {batch_size: 4}\n---\nlora: {rank: 4}\n", "is not valid YAML at line 2, column 1: expected a single"),
        (b"data: {batch_size: 4}\nlora: {rank: 4}\ndata: {block_size: 64}\n", "data comes twice at line 3, column 1,"),
        (b"lora:\n  rank: 4\n  rank: 8\n", "rank comes twice at line 3, column 3, and"),
        (b"data: {path: \xff}\n", "is not valid YAML in UTF-8: 'utf-8' codec can't decode byte 0xff in position 13"),
        (b"data: " + b"[" * 5000, "is not valid YAML at line 1, column 1006: "),
        (
            b"a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + b"".join(b"%c: &%c [%s]\n" % (n + 1, n + 1, b", ".join([b"*%c" % n] * 10)) for n in b"abcd"),
            "has more than 10,000 entries",
        ),
        (b"base: " + b"{a: " * 30 + b"1" + b"}" * 30, "is nested deeper than 20 levels"),
        (b"run: {overwrite: !!python/object:os.system x}\n", "!!python/object:os.system at line 1, column 18: is no"),
        (b"run: {overwrite: !!int [1]}\n", "has an invalid value: expected a scalar node"),
        (b"run: {overwrite: !!bool maybe}\n", "has an invalid value: 'maybe'"),
        (b"lora: {alpha: 1" + b":59" * 5000 + b".5}\n", "has colons in a number at line 1, column 15"),
        (b"trainer: {max_time: 1:00:00:00}\n", "has colons in a number at line 1, column 21, which YAML then reads in"),
        (b"seed_everything: 010\n", "010 at line 1, column 18 is 8 to YAML, which reads what begins with 0 as octal"),
        (b"# nothing yet\n", "is empty; it must hold groups of settings, as data: {batch_size: 4}"),
        (b"- data\n- lora\n", "holds no mapping; it must hold groups of settings"),
    ],
)
def test_a_malformed_file_is_named_with_the_place_in_it(tmp_path, content, words):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert words in refusal(script, "--config", str(path), begins=f"--config {path}: ")


@pytest.mark.parametrize(
    "content",
    [
        '{\n\t"data": {"batch_size": 3}\n}',
        "data: &it {<<: {batch_size: 2}, batch_size: 3}\n",
        "data: {<<: {block_size: 64}, <<: {batch_size: 3}}\n",
        "data: {batch_size: 3, path: 2026-02-30}\n",
    ],
    ids=["JSON with tabs", "overridden", "merged twice", "like a date"],
)
def test_whatever_jsonargparse_reads_is_read(tmp_path, content):
    path = tmp_path / "mine"
    path.write_text(content)
    assert script("--test-run", "--config", str(path)).data.batch_size == 3


def test_a_seed_drawn_at_random_would_be_another_in_each_process_of_a_launchers(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert "each process of a launcher's would draw another" in refusal(script, "--test-run", "--seed_everything=true")


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["data: {batch_size: 3}"])
    writer.start()
    assert script("--test-run", "--config", str(pipe)).data.batch_size == 3
    writer.join()


@pytest.mark.parametrize("text", ["none.yaml", "runs/10:30/mine.yaml", "", "~nobody-of-this-name/x.yaml", "."])
def test_what_is_no_file_is_refused_in_one_line(text):
    assert text in refusal(script, "--config", text)


def test_settings_may_stand_on_the_command_line_in_place_of_a_file():
    path = "a" * 300  # longer than the name of a file can be
    data = script("--test-run", "--config", f"data: {{batch_size: 3, path: {path}}}").data
    assert (data.batch_size, data.path) == (3, path)


# Every configuration of the repository, planned.


@pytest.fixture(scope="module")
def full_size(tmp_path_factory) -> str:
    """A folder with the configuration of Granite-4.0-H-1B and the embedded tokenizer, no weights: enough to plan."""
    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.model.loading import default_config, load_tokenizer

    folder = tmp_path_factory.mktemp("granite-4.0-h-1b")
    default_config().save_pretrained(folder)
    load_tokenizer(TINY_MODEL).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} says that {n} times {n} is {n * n}." for n in range(40_000)))
    return path


@pytest.fixture
def prepared(machine, text, tmp_path, monkeypatch):
    """The run of a configuration, on a simulated device."""
    monkeypatch.setattr(step_time, "on_cpu", untried.pace)

    def prepare_on(path: Path, device, model: str) -> PreparedRun:
        machine(device)
        ours = [f"--base.name={model}", f"--data.path={text}", f"--run.output_dir={tmp_path / 'out'}"]
        # No loader processes for the one batch: they take longer than all the rest.
        return prepare(module(f"--config={path}", *ours, "--data.num_workers=0"))

    return prepare_on


def cards_of(preset: str) -> list:
    """The simulated devices that take a preset."""
    found = [device for device in vars(devices).values() if isinstance(device, detection.Device)]
    return [device for device in found if presets.choose(device) == preset]


# A second or two each.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cpu" else pytest.mark.slow) for name in presets.PRESETS]
)
def test_every_preset_can_be_planned_and_fits_its_cards(prepared, full_size, monkeypatch, name):
    monkeypatch.setattr(peaks, "matmul_tflops", lambda device, dtype, tf32: 1.0)
    fitting = [card for card in cards_of(name) if presets.PRESETS[name].fits(card)]
    least = min(fitting, key=lambda card: card.memory_gb)
    facts = plan.look(prepared(presets.path(name), least, full_size))
    assert facts["device"] == least.name and facts["steps"] > 0
    # Estimated: what a process of CUDA takes before the model, and what fragments, are to fit into the rest.
    assert facts["memory_fits"], facts.get("memory_advice")


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.CARDS)
def test_a_preset_uses_most_of_its_card_and_computes_nothing_twice(prepared, full_size, name):
    card, filled = presets.card_of(name), presets.settings(name)["data"]
    run = prepared(presets.path(name), card, full_size)
    assert not run.request.base.gradient_checkpointing
    # The text here is little, and its batches are smaller.
    request = run.request.with_values({f"data.{size}": filled[size] for size in ("batch_size", "block_size")})
    share = memory_budget.predict(request, run.machine).total / detection.GIB / card.memory_gb
    assert 0.7 <= share <= 0.9


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "hardware"],
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_every_other_configuration_can_be_run(prepared, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepared(path, RTX_4090, "tiny-granite-h").length.steps > 0


def test_an_error_names_the_users_file_and_not_that_of_the_test_runs_defaults(layer):
    def named(line: str, *argv: str) -> str:
        with pytest.raises(UserError) as refused, script_flags.translate(["--test-run", *argv])[0].named():
            raise UserError(line)
        return str(refused.value)

    line = "--batch-size 5: too large; --output-dir x: taken"
    assert named("--output-dir x: taken") == "--output-dir x: taken"
    assert named(line, "--config", layer).startswith(f"--batch-size (in {layer}:1) 5: too large")
    assert named(line, "--config", layer, "--data.batch_size=5") == line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {callbacks: [{class_path: this.X}]}\n", "trainer.callbacks names code"),
        ("trainer: {logger: lightning.pytorch.loggers.CSVLogger}\n", "trainer.logger names code"),
        ("control: {controller: 'this:X'}\n", "control.controller names code"),
    ],
)
def test_a_run_folder_names_no_code(tmp_path, text, words):
    """A run that is continued takes its settings from there, and the folder may come from anybody."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.yaml'}:1: {words}")):
        script_flags.translate(["--output-dir", str(tmp_path), "--resume-from-checkpoint", "last"])


def test_a_run_with_callbacks_continues_with_those_of_a_file_that_is_given(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {callbacks: [{class_path: a.strangers}]}\ndata: {batch_size: 2}\n")
    mine = [{"class_path": "lightning.pytorch.callbacks.DeviceStatsMonitor"}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": mine}}))
    given = ["--config", str(tmp_path / "mine.yaml"), "--output-dir", str(tmp_path)]
    values = script_flags.translate([*given, *CONTINUES])[0].values
    assert (values["trainer.callbacks"], values["data.batch_size"]) == (mine, 2)


CONTINUES = ("--resume-from-checkpoint", "last")


@pytest.mark.parametrize("resume", [CONTINUES, ("--run.resume", "last"), ("--run.resume=last", "--run.keep=2")])
def test_a_run_is_continued_with_its_own_settings_by_flag_and_by_key(tmp_path, resume):
    (tmp_path / "config.yaml").write_text(script("--test-run", "--batch-size", "2").yaml)
    found = script("--run.output_dir", str(tmp_path), *resume)
    assert (found.data.batch_size, found.run.resume) == (2, "last")
    (tmp_path / "mine.yaml").write_text(f"run: {{output_dir: {tmp_path}}}\ndata: {{block_size: 64}}\n")
    found = module("--config", str(tmp_path / "mine.yaml"), *resume)
    assert (found.data.batch_size, found.data.block_size, found.run.output_dir) == (2, 64, str(tmp_path))
    (tmp_path / "mine.yaml").write_text(f"run: {{output_dir: {tmp_path}, resume: last}}\n")
    found = script("--config", str(tmp_path / "mine.yaml"))
    assert (found.data.batch_size, found.run.resume) == (2, "last")


def test_where_a_run_continues_and_on_what_files_that_are_given_say_before_its_own(tmp_path, monkeypatch):
    run, elsewhere = tmp_path / "a", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (tmp_path / "text.txt").touch()
    (run / "config.yaml").write_text("data: {path: text.txt}\nrun: {output_dir: a, overwrite: true}\n")
    (run / "training_config.json").write_text('{"working_folder": ".."}')
    (elsewhere / "mine.yaml").write_text("data: {path: mine.txt}\nrun: {output_dir: b}\n")
    monkeypatch.chdir(elsewhere)
    again = "--resume-from-checkpoint", "../a/checkpoint-6"
    mine, own = script("--config", "mine.yaml", *again), script(*again)
    assert (mine.data.path, mine.run.output_dir, mine.run.overwrite) == ("mine.txt", "b", False)
    assert (own.data.path, own.run.output_dir) == ([str(tmp_path / "text.txt")], "../a")


def test_last_of_a_test_run_is_that_of_the_test_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, batch in (("runs/test", 2), (script().run.output_dir, 3)):
        (folder := tmp_path / name).mkdir(parents=True)
        (folder / "config.yaml").write_text(f"data: {{batch_size: {batch}}}")
    assert script("--test-run", *CONTINUES).data.batch_size == 2


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_by_what_is_given(tmp_path, caplog):
    (tmp_path / "config.yaml").write_text("optimizer: {learning_rate: 0.05}")
    again = "--output-dir", str(tmp_path), "--resume-from-checkpoint", "auto"
    assert script(*again).optimizer.learning_rate is None
    assert f"add --config {tmp_path}/config.yaml" in caplog.text
    (tmp_path / "checkpoint-3").mkdir()
    assert script(*again).optimizer.learning_rate == 0.05


OTHER = "--target-s", "10%", "--lambda-max", "10"


@pytest.fixture
def run_file(tmp_path):
    """The file of a run with these flags, as ``--config`` takes it; its ticks were settled by its data."""

    def write(*flags: str) -> tuple[str, str]:
        request = script(*flags).with_values({"control.every": 7})
        (tmp_path / "run.yaml").write_text(request.yaml)
        return "--config", str(tmp_path / "run.yaml")

    return write


@pytest.mark.parametrize("held", [(), OTHER, (*OTHER, "--stop-at-equilibrium", "30", "--deadband", "0")])
@pytest.mark.parametrize("more", [(), ("--controller", "pi")])
def test_what_controlled_a_run_makes_way_for_a_budget_of_drift(run_file, held, more, caplog):
    asked = "--max-drift", "2%"
    found = script(*run_file(*held), *asked, *more)
    assert found.control == script(*asked).control and found.run.stop_at_equilibrium is None
    assert "run.yaml: what controlled that run is left out" in caplog.text


@pytest.mark.parametrize("asked", [("--target-s", "10%"), ("--kp", "3", "--target-s", "10%")])
def test_over_the_file_of_a_plain_run_a_setting_asks_for_a_controller(run_file, asked):
    assert script(*run_file(), *asked).control == script(*asked).control
    assert script(*run_file(), *asked, "--controller", "none").control.controller == "none"


@pytest.mark.parametrize("asked", [("--target-s", "10%"), ("--max-drift", "2%"), ("--control.kp", "3")])
def test_a_run_of_plain_lora_that_continues_gets_no_controller(tmp_path, asked):
    (tmp_path / "config.yaml").write_text(script().yaml)
    again = "--output-dir", str(tmp_path), *CONTINUES
    with pytest.raises(UserError, match=r"the run that continues is plain LoRA") as refused:
        script(*again, *asked)
    assert str(refused.value).startswith(asked[0].replace("--control.kp", "--kp"))
    assert script(*again, *asked, "--controller", "none", "--max-drift", "null").control.controller == "none"


def test_what_controls_a_run_is_kept_where_nothing_else_is_asked_for(run_file, tmp_path, caplog):
    of_s, of_drift = script(*run_file(*OTHER)), script(*run_file("--max-drift", "2%", "--kp", "3"))
    assert of_s.control.lambda_max == 10 and of_s.control.every == 7
    assert script(*run_file(*OTHER), "--max-drift", "null").control == of_s.control
    assert script(*run_file("--max-drift", "2%", "--kp", "3"), "--max-drift", "1%").control == of_drift.control
    bounded = run_file("--max-drift", "2%", "--lambda-max", "9")
    assert script(*bounded, "--max-drift", "0.02").control.lambda_max == 9
    assert script(*bounded, "--max-drift", "1%").control.lambda_max == script().control.lambda_max
    (tmp_path / "mine.yaml").write_text("control: {kp: 3, every: 4}")  # what somebody wrote
    mine = script(*run_file(), "--config", str(tmp_path / "mine.yaml"), "--max-drift", "2%")
    assert (mine.control.kp, mine.control.every) == (3, 4)
    caplog.clear()
    (tmp_path / "mine.yaml").write_text("control: {controller: none, every: 4}")
    with pytest.raises(UserError, match="leave out --controller none"):
        script("--config", str(tmp_path / "mine.yaml"), "--max-drift", "2%")
    assert not caplog.text


def test_the_configuration_that_a_run_writes_is_plain(tmp_path):
    request = script("--test-run", "--max-time", "00:01:00:00", "--bf16")
    (tmp_path / "config.yaml").write_text(request.yaml)
    # But for how much is validated, which the checkpoint says.
    as_it_was = replace(request.trainer, limit_val_batches=TrainerConfig.limit_val_batches)
    assert script("--output-dir", str(tmp_path), *CONTINUES).trainer == as_it_was


@pytest.mark.parametrize("name", ["qlora", "configs/qlora.yaml"])
def test_what_a_layer_for_little_memory_sets_nobody_has_given(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert script_flags.translate(["--config", name, "--lora.rank=3"])[0].given == ["lora.rank"]
