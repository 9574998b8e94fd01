"""Every flag of the script exists, says its default, and lands on its key of the configuration."""

import re

import pytest

from granite_scu.cli import script_flags
from granite_scu.cli.argument_parser import without_local_rank
from granite_scu.cli.script_flags import translate
from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.control import PI, Linear

# Flag, its key, a value to give and what the configuration then holds. None as a value: a switch.
FLAGS = [
    ("--model", "base.name", "someone/model", "someone/model"),
    ("--data-dir", "data.path", "my texts", "my texts"),
    ("--validation-data", "data.validation_data", "more texts", "more texts"),
    ("--test-data", "data.test_data", "other texts", "other texts"),
    ("--held-out-share", "data.held_out_share", "0%", 0.0),
    ("--text-column", "data.text_column", "body", "body"),
    ("--record-format", "data.record_format", "text", "text"),
    ("--data-weights", "data.weights", "1", [1.0]),
    ("--split-seed", "data.split_seed", "3", 3),
    ("--cache-dir", "data.cache_dir", "some/cache", "some/cache"),
    ("--chat-template", "data.chat_template", "rag", "rag"),
    ("--chat-template-args", "data.chat_template_args", "enable_thinking=false", ["enable_thinking=false"]),
    ("--system", "data.system", "be kind", "be kind"),
    ("--control-tokens", "data.control_tokens", "refuse", "refuse"),
    ("--loss-on", "data.loss_on", "all", "all"),
    ("--packing", "data.packing", "best-fit", "best-fit"),
    ("--on-long", "data.on_long", "drop", "drop"),
    ("--encoding", "data.encoding", "latin-1", "latin-1"),
    ("--output-dir", "run.output_dir", "some/where", "some/where"),
    ("--overwrite", "run.overwrite", None, True),
    ("--adapter", "lora.adapter", "runs/other", "runs/other"),
    ("--seed", "seed_everything", "7", 7),
    ("--max-steps", "trainer.max_steps", "123", 123),
    ("--num-epochs", "data.num_epochs", "1.5", 1.5),
    ("--max-time", "trainer.max_time", "00:01:30:00", "00:01:30:00"),
    ("--batch-size", "data.batch_size", "3", 3),
    ("--eval-batch-size", "data.eval_batch_size", "5", 5),
    ("--gradient-accumulation-steps", "trainer.accumulate_grad_batches", "6", 6),
    ("--block-size", "data.block_size", "256", 256),
    ("--isolate-documents", "data.isolate_documents", None, True),
    ("--stream", "data.stream", None, True),
    ("--learning-rate", "optimizer.learning_rate", "3e-4", 3e-4),
    ("--lr-scheduler", "optimizer.schedule", "linear", "linear"),
    ("--warmup-steps", "optimizer.warmup_steps", "9", 9),
    ("--gradient-clip", "optimizer.gradient_clip", "0.5", 0.5),
    ("--adam-beta2", "optimizer.beta2", "0.95", 0.95),
    ("--lora-r", "lora.rank", "4", 4),
    ("--lora-alpha", "lora.alpha", "12", 12.0),
    ("--rslora", "lora.rslora", None, True),
    ("--lora-dropout", "lora.dropout", "0.1", 0.1),
    ("--lora-experts", "lora.experts", None, True),
    ("--lora-targets", "lora.targets", "q_proj,v_proj", ["q_proj", "v_proj"]),
    ("--precision", "trainer.precision", "bf16", "bf16-mixed"),
    ("--4bit-quantization", "base.quantize_4bit", None, True),
    ("--torch-compile", "base.compile", None, True),
    ("--compile-mode", "base.compile_mode", "max-autotune", "max-autotune"),
    ("--gradient-checkpointing", "base.gradient_checkpointing", None, True),
    ("--attn", "base.attention", "eager", "eager"),
    ("--kernels", "base.kernels", "torch", "torch"),
    ("--memory-fraction", "run.memory_fraction", "0.5", 0.5),
    ("--tf32", "run.tf32", None, True),
    ("--num-workers", "data.num_workers", "2", 2),
    ("--prefetch-factor", "data.prefetch_factor", "4", 4),
    ("--deterministic", "trainer.deterministic", None, True),
    ("--accelerator", "trainer.accelerator", "cpu", "cpu"),
    ("--multi-gpu", "run.multi_gpu", None, True),
    ("--gpus", "run.gpus", "2", 2),
    ("--auto-batch-size", "run.auto_batch_size", None, True),
    ("--fsdp", "run.fsdp", None, True),
    ("--controller", "control.controller", "fixed", "fixed"),
    ("--target-s", "control.target_s", "0.05", 0.05),
    ("--kp", "control.kp", "0.3", 0.3),
    ("--ki", "control.ki", "0.07", 0.07),
    ("--control-every", "control.every", "11", 11),
    ("--ema-alpha", "control.ema_alpha", "0.25", 0.25),
    ("--deadband", "control.deadband", "0.02", 0.02),
    ("--lambda-init", "control.lambda_init", "0.125", 0.125),
    ("--lambda-min", "control.lambda_min", "1e-5", 1e-5),
    ("--lambda-max", "control.lambda_max", "1e5", 1e5),
    ("--lambda-end", "control.lambda_end", "0.25", 0.25),
    ("--replay", "control.replay", "runs/other", "runs/other"),
    ("--controller-args", "control.controller_args", "ema_alpha=0.3", ["ema_alpha=0.3"]),
    ("--measure", "control.measure", "factors", "factors"),
    ("--actuator", "control.actuator", "decoupled", "decoupled"),
    ("--prior-sigma", "prior.sigma", "0.01", 0.01),
    ("--n-tokens", "prior.n_tokens", "5000", 5000),
    ("--max-drift", "drift.max_drift", "2%", 0.02),
    ("--general-data", "drift.general_data", "mine.txt", "mine.txt"),
    ("--general-tokens", "drift.general_tokens", "4096", 4096),
    ("--save-steps", "run.save_steps", "77", 77),
    ("--keep", "run.keep", "4", 4),
    ("--samples", "run.samples", "0", 0),
    ("--resume-from-checkpoint", "run.resume", "last", "last"),
    ("--eval-steps", "run.eval_steps", "33", 33),
    ("--eval-iters", "trainer.limit_val_batches", "21", 21),
    ("--logging-steps", "trainer.log_every_n_steps", "3", 3),
    ("--logger", "run.logger", "wandb", "wandb"),
    ("--early-stopping", "run.early_stopping", "5", 5),
    ("--stop-at-equilibrium", "run.stop_at_equilibrium", "12", 12),
]
ASKING = ["--test-run", "--check-requirements", "--dry-run", "--json", "--debug", "--print-config", "--config"]

# The defaults that the documentation promises, as --help writes them.
PROMISED = {
    "--model": "ibm-granite/granite-4.0-h-1b",
    "--data-dir": "wikitext-2 from the hub",
    "--text-column": "text",
    "--isolate-documents": "on",
    "--encoding": "utf-8",
    "--lora-targets": "all",
    "--validation-data": "held out of --data-dir",
    "--test-data": "held out of --data-dir, or --validation-data",
    "--held-out-share": "20% of text, 10% of conversations",
    "--data-weights": "1 each",
    "--split-seed": "0",
    "--cache-dir": "~/.cache/granite-scu",
    "--chat-template": "the model's",
    "--system": "none: the template's own",
    "--gpus": "one, or all with --multi-gpu",
    "--chat-template-args": "none",
    "--controller-args": "none",
    "--control-tokens": "text",
    "--loss-on": "completion",
    "--packing": "auto",
    "--on-long": "auto",
    "--output-dir": "./granite_cuda_output",
    "--seed": "42",
    "--max-steps": "as the data fill, 1000 at most; off when --num-epochs is given alone",
    "--batch-size": "8, fewer where there are few data",
    "--eval-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "4, fewer where there are few data",
    "--block-size": "1024, fewer where there are few data",
    "--learning-rate": "by the model's width",
    "--lr-scheduler": "cosine",
    "--warmup-steps": "a twentieth of the run, 50 at most",
    "--gradient-clip": "1.0",
    "--adam-beta2": "0.999",
    "--lora-r": "16",
    "--lora-alpha": "32.0",
    "--lora-dropout": "0.0",
    "--adapter": "none: a new one",
    "--precision": "auto",
    "--torch-compile": "auto",
    "--gradient-checkpointing": "auto",
    "--attn": "auto",
    "--kernels": "auto",
    "--memory-fraction": "what is needed",
    "--accelerator": "auto",
    "--controller": "pi",
    "--control-every": "10, fewer in a short run",
    "--lambda-min": "1e-06",
    "--lambda-max": "1000000.0",
    "--measure": "delta",
    "--actuator": "loss",
    "--n-tokens": "supervised tokens of the training set",
    "--save-steps": "half of the run, 500 at most",
    "--keep": "2",
    "--eval-steps": "a fifth to a tenth of the run, 200 at most",
    "--eval-iters": "50",
    "--logging-steps": "10",
}

# What is shown of settings that each law has its own default of: pi's, or the first one's that has the setting.
OF_A_LAW = {
    "--kp": "pi's: scheduled by how fast the adapter gets to S*",
    "--ki": "pi's: Kp / min(tau, 10), tau the ticks that the adapter takes to S*",
    "--ema-alpha": f"pi's: {PI.ema_alpha}",
    "--deadband": f"pi's: {PI.deadband}",
    "--lambda-init": "pi's: worked out from S*",
    "--lambda-end": f"linear's: {Linear.lambda_end}",
}


def arguments(*argv: str) -> list[str]:
    return translate(list(argv))[0].values


def given(name: str, value: str | None) -> list[str]:
    return [name] if value is None else [name, value]


def resolved(*argv: str):
    return translate(list(argv))[0].request()


def value_of(request, key: str):
    group, _, name = key.partition(".")
    if group == "seed_everything":
        return request.seed
    return getattr(getattr(request, group), name)


def shown_defaults() -> dict[str, str]:
    """What --help says is the default of each flag."""
    entries = re.split(r"\n  (?=--)|\n\n", script_flags.build_parser(everything=True).format_help())
    lines = (re.sub(r"(\w)- ", r"\1-", " ".join(entry.split())) for entry in entries)  # broken after a hyphen
    found = (re.fullmatch(r"(--[\w-]+).* \(default: (.*)\)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def test_the_table_has_every_flag_once():
    offered = [(flag.name, flag.key) for section in flags.SECTIONS.values() for flag in section]
    assert {(name, key) for name, key, _, _ in FLAGS} <= {*offered}, "no flag is renamed, or lost"
    assert sorted(key for _, key in offered) == sorted({*flags.CALLED, "seed_everything"})


def test_hyphens_and_underscores_mean_the_same():
    for name, key, value, _ in FLAGS:
        underscored = "--" + name[2:].replace("-", "_")
        found = arguments(*given(name, value))
        assert key in found
        assert arguments(*given(underscored, value)) == found


OF_DRIFT = ("--max-drift", "--general-data", "--general-tokens")
REPLAYED = ("--replay",)
APART = ("--stream", "--adapter", "--lora-experts", "--auto-batch-size", "--fsdp", "--stop-at-equilibrium")
TOGETHER = [flag for flag in FLAGS if flag[0] not in (*OF_DRIFT, *REPLAYED, *APART)]


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        ([flag[0] for flag in TOGETHER], ()),
        (OF_DRIFT, ()),
        (REPLAYED, ("--controller", "replay")),
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
    request = resolved()
    shown = shown_defaults()
    assert shown.keys() == flags.FLAGS.keys()
    for name in shown:
        value = value_of(request, flags.KEYS[name])
        usual = "on" if value is True else "off" if value is None or value is False else str(value)
        shown_as = PROMISED.get(name, usual)
        if name in OF_A_LAW:
            shown_as = f"the controller's own; {OF_A_LAW[name]}"
        assert shown[name] == shown_as, name


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
    with pytest.raises(UserError) as refusal:
        arguments(*argv)
    assert all(word in str(refusal.value) for word in words)


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
    assert resolved("--resume-from-checkpoint", "last").run.output_dir == PROMISED["--output-dir"]


def test_a_test_run_only_changes_defaults():
    request = resolved("--test-run")
    assert request.base.name == "tiny-granite-h"
    assert request.data.path == "stdlib-docs"
    assert request.trainer.accelerator == "cpu"
    argv = [word for name, _, value, _ in TOGETHER for word in given(name, value)]
    request = resolved("--test-run", *argv)
    assert all(value_of(request, key) == expected for _, key, _, expected in TOGETHER)


def test_in_a_test_run_a_budget_of_drift_takes_the_place_of_its_setpoint():
    request = resolved("--test-run", "--max-drift", "2%")
    assert (request.drift.max_drift, request.control.target_s) == (0.02, "auto")
    with pytest.raises(UserError, match="leave out --target-s"):
        resolved("--test-run", "--max-drift", "2%", "--target-s", "10%")


def test_a_test_run_ticks_at_least_forty_times():
    request = resolved("--test-run")
    assert request.trainer.max_steps // request.control.every >= 40


def test_the_setpoint_is_a_share_or_auto():
    assert resolved("--target-s", "auto").control.target_s == "auto"
    assert resolved("--target-s", "7%").control.target_s == 0.07
    assert resolved("--control.target_s=7%").control.target_s == 0.07
    with pytest.raises(UserError, match="--target-s ten: is no share, such as 10%"):
        resolved("--target-s", "ten")
    assert resolved("--target-s", "5e-3").control.target_s == 0.005
    for wrong in ("0", "1", "-0.1"):
        with pytest.raises(UserError, match=f"--target-s {wrong}.*: must lie between 0 and 1, or be auto"):
            resolved(f"--target-s={wrong}")


SHARES = {
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
        file.write_text(f"{group}: {{{name}: 7%}}")
        wrong.write_text(f"{group}: {{{name}: ten}}")
        for given in ([flag, "7%"], [flag, "0.07"], ["--config", str(file)]):
            assert value_of(resolved(*given), key) == 0.07, given
        with pytest.raises(UserError, match=f"{flag} ten: is no share, such as 10% or 0.1$"):
            resolved(flag, "ten")
        with pytest.raises(UserError, match=f"{flag} ten.*: is no share"):
            resolved("--config", str(wrong))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max-drift", "0"], "--max-drift 0: must be more than 0%"),
        (["--max-drift", "-1%"], "--max-drift -1%: must be more than 0%"),
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


def test_dotted_flags_pass_through():
    request = resolved("--lora.targets", "[in_proj, out_proj]", "--trainer.log_every_n_steps=7", "--lora-r", "2")
    assert request.lora.targets == ["in_proj", "out_proj"]
    assert request.lora.rank == 2
    assert request.trainer.log_every_n_steps == 7


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
    with pytest.raises(UserError) as refusal:
        arguments(*argv)
    assert words in str(refusal.value)
