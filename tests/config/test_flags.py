"""Every flag of the script exists, says its default, and lands on its key of the configuration."""

import re

import pytest
from outcomes import refusal

from granite_scu.cli import script_flags
from granite_scu.cli.argument_parser import without_local_rank
from granite_scu.cli.script_flags import translate
from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig, RunConfig

NAMES = """
--model --data-dir --validation-data --test-data --held-out-share --text-column --record-format --data-weights
--split-seed --cache-dir --chat-template --chat-template-args --system --control-tokens --loss-on --packing
--on-long --encoding --output-dir --overwrite --adapter --seed --max-steps --num-epochs --max-time --batch-size
--eval-batch-size --gradient-accumulation-steps --block-size --isolate-documents --stream --learning-rate
--lr-scheduler --warmup-steps --gradient-clip --adam-beta2 --lora-r --lora-alpha --rslora --lora-dropout
--lora-experts --lora-targets --precision --4bit-quantization --torch-compile --compile-mode
--gradient-checkpointing --attn --kernels --memory-fraction --tf32 --num-workers --deterministic
--accelerator --multi-gpu --gpus --auto-batch-size --fsdp --controller --target-s --kp --ki --control-every
--ema-alpha --deadband --lambda-init --lambda-min --lambda-max --lambda-end --controller-args --measure
--actuator --prior-sigma --n-tokens --max-drift --general-data --general-tokens --save-steps --keep --samples
--resume-from-checkpoint --eval-steps --eval-iters --logging-steps --logger --early-stopping --stop-at-equilibrium
"""
"""The flags that users have, of which none is renamed, or lost."""

# A value to give and what the configuration then holds, where the kind of the flag does not say. None: it stands alone.
SAMPLES = {
    "--held-out-share": ("0%", 0.0),
    "--data-weights": ("1", [1.0]),
    "--record-format": ("text", "text"),
    "--encoding": ("latin-1", "latin-1"),
    "--max-time": ("00:01:30:00", "00:01:30:00"),
    "--chat-template": ("rag", "rag"),
    "--chat-template-args": ("enable_thinking=false", ["enable_thinking=false"]),
    "--lora-targets": ("q_proj,v_proj", ["q_proj", "v_proj"]),
    "--precision": ("bf16", "bf16-mixed"),
    "--torch-compile": (None, True),
    "--gradient-checkpointing": (None, True),
    "--attn": ("eager", "eager"),
    "--kernels": ("torch", "torch"),
    "--accelerator": ("cpu", "cpu"),
    "--controller": ("fixed", "fixed"),
    "--controller-args": ("ema_alpha=0.3", ["ema_alpha=0.3"]),
    "--general-tokens": ("4096", 4096),
    "--resume-from-checkpoint": ("last", "last"),
}


def sample(flag: flags.Flag) -> tuple[str | None, object]:
    some = f"some/{flag.name[2:]}"
    of_kind = {int: ("12", 12), float: ("0.5", 0.5), flags.share: ("5%", 0.05), str: (some, some), bool: (None, True)}
    return SAMPLES.get(flag.name) or (2 * flag.choices[-1:] if flag.choices else of_kind[flag.kind])


FLAGS = [(flag.name, flag.key, *sample(flag)) for flag in flags.FLAGS.values()]
"""Of each flag its name, its key, a value to give and what the configuration then holds."""

ASKING = ["--test-run", "--check-requirements", "--dry-run", "--json", "--debug", "--print-config", "--config"]


def arguments(*argv: str) -> list[str]:
    return translate(list(argv))[0].values


def given(name: str, value: str | None) -> list[str]:
    return [name] if value is None else [name, value]


def resolved(*argv: str):
    return translate(list(argv))[0].request()


def test_a_texts_name_is_no_yaml():
    for name in ("#general.jsonl", "[draft]", "- notes.txt", "null", "a: b"):
        assert resolved("--data-dir", name).data.sources == [name]
    with pytest.raises(UserError, match="names no text"):
        DataConfig(validation_data=[])


def value_of(request, key: str):
    group, _, name = key.partition(".")
    if group == "seed_everything":
        return request.seed
    return getattr(getattr(request, group), name)


def shown_defaults() -> dict[str, str]:
    """What --help says is the default of each flag."""
    entries = re.split(r"\n  (?=--)|\n\n", script_flags.build_parser().format_help())
    lines = (re.sub(r"(\w)- ", r"\1-", " ".join(entry.split())) for entry in entries)  # broken after a hyphen
    found = (re.fullmatch(r"(--[\w-]+).* \(default: (.*)\)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def test_the_table_has_every_flag_once():
    offered = [(flag.name, flag.key) for section in flags.SECTIONS.values() for flag in section]
    assert {*NAMES.split()} <= {name for name, _ in offered}
    assert sorted(key for _, key in offered) == sorted({*flags.CALLED, "seed_everything"})


def test_hyphens_and_underscores_mean_the_same():
    for name, key, value, _ in FLAGS:
        underscored = "--" + name[2:].replace("-", "_")
        found = arguments(*given(name, value))
        assert key in found
        assert arguments(*given(underscored, value)) == found


OF_DRIFT = ("--max-drift", "--general-data", "--general-tokens")
APART = ("--stream", "--adapter", "--lora-experts", "--auto-batch-size", "--fsdp", "--stop-at-equilibrium")
TOGETHER = [flag for flag in FLAGS if flag[0] not in (*OF_DRIFT, *APART)]


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        ([flag[0] for flag in TOGETHER], ()),
        (OF_DRIFT, ()),
        (APART, ("--target-s", "10%")),
    ],
)
def test_every_flag_lands_on_its_key(names, beside):
    """Of flags that may be given at once."""
    flags = [flag for flag in FLAGS if flag[0] in names]
    request = resolved(*beside, *(word for name, _, value, _ in flags for word in given(name, value)))
    found = {name: value_of(request, key) for name, key, _, _ in flags}
    assert found == {name: expected for name, _, _, expected in flags}


def test_switches_can_be_switched_off(tmp_path):
    layer = tmp_path / "layer.yaml"
    layer.write_text("base: {gradient_checkpointing: true}\n")
    assert resolved("--config", str(layer)).base.gradient_checkpointing
    assert resolved("--config", str(layer), "--no-gradient-checkpointing").base.gradient_checkpointing is False


@pytest.mark.parametrize(
    ("flags", "value"),
    [((), None), (("auto",), None), (("on",), True), (("off",), False), (("--no-torch-compile",), False)],
)
def test_what_the_machine_decides_can_be_switched_on_and_off_and_left_to_it_again(tmp_path, flags, value):
    layer = tmp_path / "layer.yaml"
    layer.write_text("base: {compile: true}\n")
    flags = flags if flags[:1] == ("--no-torch-compile",) else ("--torch-compile", *flags)
    given = resolved("--config", str(layer), *flags).base.compile
    assert given is (True if flags == ("--torch-compile",) else value)
    with pytest.raises(UserError, match=r"--torch-compile sometimes: must be one of .*auto.*on.*off"):
        resolved("--torch-compile", "sometimes")


def test_help_shows_every_flag_and_its_default():
    """In words where the data, the device or the law decide; else that of the setting, and what a run then has."""
    request, shown = resolved(), shown_defaults()
    assert shown.keys() == flags.FLAGS.keys()
    for name, flag in flags.FLAGS.items():
        said = flag.default if flag.default != flags.DEFAULTS.get(flag.key) else value_of(request, flag.key)
        usual = "on" if said is True else "off" if said is None or said is False else str(said)
        assert shown[name] == usual, name


@pytest.mark.parametrize("asked", ["--help", "--help-all"])
def test_help_names_what_most_runs_set_and_help_all_the_rest(capsys, asked):
    with pytest.raises(SystemExit) as stop:
        translate([asked])
    assert stop.value.code == 0
    shown = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    first = {"--test-run", "--hardware", "--config", "--debug", "--help-all", *ASKING, *flags.COMMONEST}
    rest = {"--bf16", "--fp16", "--max-length", *flags.FLAGS}
    assert shown | {"--help-all"} == (first if asked == "--help" else first | rest)


@pytest.mark.parametrize("name", ASKING[:-1])
def test_what_is_asked_can_be_written_with_underscores(name):
    assert vars(translate([name.replace("-", "_").replace("__", "--", 1)])[1]) == {name[2:].replace("-", "_"): True}


@pytest.mark.parametrize(
    ("argv", "precision"),
    [
        (["--precision", "auto"], None),
        (["--precision", "fp32"], "32-true"),
        (["--bf16"], "bf16-mixed"),
        (["--fp16"], "16-mixed"),
        (["--bf16", "--precision", "bf16"], "bf16-mixed"),
    ],
)
def test_precision_and_its_short_forms(argv, precision):
    assert arguments(*argv)["trainer.precision"] == precision


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--fp16", "--bf16"], ["bf16 and fp16 exclude each other"]),
        (["--fp16", "--precision", "bf16"], ["bf16 and fp16 exclude each other"]),
        (["--bf16", "--precision", "fp32"], ["bf16 and fp32 exclude each other"]),
        (["--block-size", "128", "--max-length", "256"], ["--block-size 128", "--max-length 256"]),
    ],
)
def test_flags_that_contradict_each_other_are_refused(argv, words):
    message = refusal(arguments, *argv)
    assert all(word in message for word in words)


def test_max_length_is_block_size():
    assert arguments("--max-length", "256") == arguments("--block-size", "256")
    assert arguments("--max_length=256", "--block-size=256") == arguments("--block-size", "256")


def test_early_stopping_has_a_number_of_its_own():
    assert arguments("--early-stopping") == {"run.early_stopping": 3}
    assert arguments("--early-stopping", "--overwrite")["run.early_stopping"] == 3
    assert arguments("--stop-at-equilibrium", "--overwrite")["run.stop_at_equilibrium"] == 30


def test_epochs_alone_switch_the_limit_on_steps_off():
    assert resolved("--num-epochs", "2").trainer.max_steps == -1
    assert resolved("--test-run", "--num-epochs", "2").trainer.max_steps == -1
    assert resolved("--num-epochs", "2", "--max-steps", "30").trainer.max_steps == 30
    assert resolved("--num-epochs", "2", "--trainer.max_steps", "30").trainer.max_steps == 30


def test_resuming_goes_on_in_the_checkpoints_own_folder():
    assert resolved("--resume-from-checkpoint", "some/run/checkpoint-20").run.output_dir == "some/run"
    assert resolved("--resume-from-checkpoint", "some/run/checkpoint-20/").run.output_dir == "some/run"
    assert resolved("--resume-from-checkpoint", "some/run/checkpoint-20", "--output-dir", "x").run.output_dir == "x"
    assert resolved("--resume-from-checkpoint", "last", "--output-dir", "x").run.output_dir == "x"
    assert resolved("--resume-from-checkpoint", "last").run.output_dir == RunConfig.output_dir


def test_what_a_null_or_an_empty_text_stands_for_is_no_part_of_the_help():
    assert flags.FLAGS["--gpus"].help.endswith("a plan takes any number")
    assert flags.FLAGS["--system"].help.endswith("later questions get it too")


def test_a_test_run_only_changes_defaults():
    request = resolved("--test-run")
    assert request.base.name == "tiny-granite-h"
    assert request.data.path == "stdlib-docs"
    assert request.trainer.accelerator == "cpu"
    argv = [word for name, _, value, _ in TOGETHER for word in given(name, value)]
    request = resolved("--test-run", *argv)
    assert all(value_of(request, key) == expected for _, key, _, expected in TOGETHER)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ([], {"data.block_size", "optimizer.learning_rate", "run.eval_steps", "control.every"}),
        (["--max-steps", "3"], {"data.block_size", "optimizer.learning_rate"}),
        (["--data-dir", "stdlib-source"], {"optimizer.learning_rate"}),
        (["--data-dir", "stdlib-source", "--block-size", "64"], {"data.block_size", "optimizer.learning_rate"}),
    ],
)
def test_what_a_test_run_has_fitted_to_its_text_and_length_is_given_to_no_other(other, own):
    asked = {"data.block_size", "optimizer.learning_rate", "run.eval_steps", "control.every"}
    assert asked.intersection(translate(["--test-run", *other])[0].given) == own


def test_in_a_test_run_a_budget_of_drift_takes_the_place_of_its_setpoint():
    request = resolved("--test-run", "--max-drift", "2%")
    assert (request.drift.max_drift, request.control.target_s) == (0.02, None)
    with pytest.raises(UserError, match="leave out --target-s"):
        resolved("--test-run", "--max-drift", "2%", "--target-s", "10%")


def test_a_test_run_ticks_at_least_forty_times():
    request = resolved("--test-run")
    assert request.trainer.max_steps // request.control.every >= 40


def test_the_setpoint_is_a_share():
    for wrong in ("0", "1", "-0.1"):
        with pytest.raises(UserError, match=f"--target-s {wrong}.*: must lie between 0 and 1"):
            resolved(f"--target-s={wrong}")


SHARES = {
    "--target-s": "control.target_s",
    "--lora-dropout": "lora.dropout",
    "--memory-fraction": "run.memory_fraction",
    "--ema-alpha": "control.ema_alpha",
    "--run.expected_mfu": "run.expected_mfu",
    "--max-drift": "drift.max_drift",
}


def test_a_share_is_a_number_or_per_cent_by_flag_and_in_yaml(tmp_path):
    file, wrong = tmp_path / "mine.yaml", tmp_path / "wrong.yaml"
    for flag, key in SHARES.items():
        group, _, name = key.partition(".")
        more = ["--controller", "fixed"] if flag == "--ema-alpha" else []  # pi would need a setpoint beside
        file.write_text(f"{group}: {{{name}: 7%}}")
        wrong.write_text(f"{group}: {{{name}: ten}}")
        for given in ([flag, "7%"], [flag, "0.07"], ["--config", str(file)]):
            assert value_of(resolved(*given, *more), key) == 0.07, given
        with pytest.raises(UserError, match=f"{flag} ten: is no share, such as 10% or 0.1"):
            resolved(flag, "ten")
        with pytest.raises(UserError, match=f"{flag} ten.*: is no share"):
            resolved("--config", str(wrong))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max-drift", "0"], "--max-drift 0: must be at least 0.001%"),
        (["--max-drift", "-1%"], "--max-drift -1%: must be at least 0.001%"),
        (["--max-drift", "200%"], "--max-drift 200%: .*less than 100%"),
        (["--max-drift", "2"], "--max-drift 2: give the unit, as 2%"),
        (["--max-drift", "nan"], "--max-drift .*nan: is no share"),
        (["--general-data", ""], "--general-data '': is empty"),
        (["--general-data", "auto", "mine.txt"], "--general-data auto mine.txt: auto stands alone"),
        (["--general-tokens", "100"], "--general-tokens 100: must be at least 1024 tokens"),
    ],
)
def test_a_budget_of_drift_has_a_unit_and_its_text_a_source(given, words):
    with pytest.raises(UserError, match=words):
        resolved(*given)


def test_what_the_older_launcher_adds_is_passed_over():
    assert without_local_rank(["--local-rank=1", "--max-steps", "3"]) == ["--max-steps", "3"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-step", "3"], "unknown flag --max-step: did you mean --max-steps?"),
        (["--learning_rat=1e-3"], "unknown flag --learning-rat: did you mean --learning-rate?"),
        (["--xyzzy"], "unknown flag --xyzzy: see --help"),
        (["--max"], "unknown flag --max"),  # no abbreviations: a later flag would change what they mean
        (["stray"], "'stray' belongs to no flag"),
        (["hardware=gpu_4090"], "belongs to no flag; did you mean --hardware gpu_4090? see --help"),
        (["training.batch_size=20"], "did you mean --batch-size 20?"),
        (["batchsize=20"], "did you mean --batch-size?"),
        (["--trainer.log_every_n_steps", "3", "stray"], "'stray' belongs to no flag"),
        (["--max-steps"], "--max-steps: expected one argument"),
        (["--max-steps", "many"], "--max-steps many: must be a whole number"),
        (["--actuator", "adam"], "--actuator adam: must be one of loss, decoupled"),
        (["--lr-scheduler", "step"], "--lr-scheduler step: must be one of cosine"),
    ],
)
def test_what_is_not_understood_is_named(argv, words):
    assert words in refusal(arguments, *argv)
