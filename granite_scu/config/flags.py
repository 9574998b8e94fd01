"""The table of the flags of ``granite-scu train``: each stands for one dotted key of the configuration.

Type, choices, default and meaning of a flag are those of the configuration's field and of its line in the docstring;
the table says what differs. ``cli.script_flags`` makes the parser of the table, and translates.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser

from granite_scu.config import settings as config
from granite_scu.control import CONTROLLERS

PRECISIONS = {"auto": None, **config.PRECISIONS}
GROUPS = {
    "base": config.BaseConfig,
    "lora": config.LoraConfig,
    "optimizer": config.OptimizerConfig,
    "prior": config.PriorConfig,
    "data": config.DataConfig,
    "control": config.ControlConfig,
    "drift": config.DriftConfig,
    "run": config.RunConfig,
}
"""The groups of settings that are ours, and the dataclass of each."""

SETTINGS = {"trainer": config.TrainerConfig, **GROUPS}
"""All groups of the configuration."""


@dataclass(frozen=True)
class Flag:
    """A flag of ``granite-scu train``.

    Attributes:
        name: the flag, with hyphens; the same with underscores is accepted.
        key: the dotted key of the configuration that it sets.
        kind: type of its value, or a function that makes it of the text; ``bool`` makes a switch with a ``--no-`` form.
        help: meaning, and unit where there is one.
        default: as the help shows it.
        choices: the values it may take.
        many: whether several values may follow the flag.
    """

    name: str
    key: str
    kind: Callable[[str], Any]
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    many: bool = False


def share(text: str) -> str:
    """The kind of flags such as ``--memory-fraction``: a share, which the settings make a number of."""
    return text


SWITCH_OR_AUTO = {"auto": None, "on": True, "off": False}
"""What a switch may be set to that is decided by the machine where nothing is asked for. Alone it means on."""

NUMBER_OF_ITS_OWN = {"--early-stopping": 3, "--stop-at-equilibrium": 30}
"""Flags that may stand without their number, and the one that they then mean."""


FEWER = "fewer where there are few data"
"""How a default is shown that is for data which fill it."""

WORKED_OUT = {
    "kp": "scheduled by how fast the adapter gets to S*",
    "ki": "Kp / min(tau, 10), tau the ticks that the adapter takes to S*",
    "lambda_init": "worked out from S*",
}
"""Settings that the default law works out where they are not given, and how."""


def _of_law(setting: str) -> str | None:
    """The default of a setting that controllers have their own of: the default law's, or the first's that knows it."""
    usual = config.ControlConfig.controller
    names = [name for name in (usual, *CONTROLLERS) if setting in CONTROLLERS[name].__dataclass_fields__]
    if not names:
        return None
    name = names[0]
    default = CONTROLLERS[name].__dataclass_fields__[setting].default
    return f"the controller's own; {name}'s: {WORKED_OUT[setting] if default is None else default}"


def _flag(
    name: str,
    key: str,
    kind: Callable[[str], Any] | None = None,
    help: str = "",
    default: Any = None,
    choices: tuple[str, ...] = (),
) -> Flag:
    """A flag; what is not given is the configuration's."""
    group, _, setting = key.partition(".")
    hint = HINTS.get(key)
    options = [option for option in (get_args(hint) or (hint,)) if option is not NoneType]
    many = any(get_origin(option) is list for option in options)
    if get_origin(hint) is Literal:
        kind, choices = str, get_args(hint)
    elif hint == (bool | None):
        kind, choices, default = str, tuple(SWITCH_OR_AUTO), "auto"
        help = MEANINGS[key].replace("null", "auto")
    elif many:
        kind = get_args(options[0])[0]
    if default is None:
        default = DEFAULTS.get(key)
    if default is None and group == "control":
        default = _of_law(setting)
    help = help or MEANINGS[key].partition("; null ")[0].rstrip(".").replace("``", "")
    if name in NUMBER_OF_ITS_OWN:
        help += f" ({NUMBER_OF_ITS_OWN[name]} when no number is given)"
    return Flag(name, key, kind or options[0], help, default, choices, many)


HINTS = {f"{group}.{name}": hint for group, kind in SETTINGS.items() for name, hint in get_type_hints(kind).items()}
"""The type of every dotted key of the groups."""

MEANINGS = {
    f"{group}.{line.arg_name}": " ".join((line.description or "").split())
    for group, kind in SETTINGS.items()
    for line in docstring_parser.parse(kind.__doc__ or "").params
}
"""What the docstrings say of them."""

DEFAULTS: dict[str, Any] = {
    f"{group}.{field.name}": field.default for group, kind in SETTINGS.items() for field in fields(kind)
}
"""The default of every dotted key."""

SECTIONS: dict[str, tuple[Flag, ...]] = {
    "model, data and run folder": (
        _flag("--model", "base.name"),
        _flag("--data-dir", "data.path", default="wikitext-2 from the hub"),
        _flag("--validation-data", "data.validation_data", default="held out of --data-dir"),
        _flag("--test-data", "data.test_data", default="held out of --data-dir, or --validation-data"),
        _flag("--held-out-share", "data.held_out_share", share, default="20% of text, 10% of conversations"),
        _flag("--data-weights", "data.weights", default="1 each"),
        _flag("--text-column", "data.text_column"),
        _flag("--record-format", "data.record_format"),
        _flag("--encoding", "data.encoding"),
        _flag("--split-seed", "data.split_seed"),
        _flag("--cache-dir", "data.cache_dir", default="~/.cache/granite-scu"),
        _flag("--stream", "data.stream"),
        _flag("--output-dir", "run.output_dir"),
        _flag("--overwrite", "run.overwrite"),
        _flag("--adapter", "lora.adapter", default="none: a new one"),
        _flag("--seed", "seed_everything", int, "seed of everything random", config.SEED),
    ),
    "length of the run": (
        _flag("--max-steps", "trainer.max_steps", help="optimizer steps; with --num-epochs, whichever is reached first",
              default=f"as the data fill, {config.DEFAULT_STEPS} at most; off when --num-epochs is given alone"),
        _flag("--num-epochs", "data.num_epochs"),
        _flag("--max-time", "trainer.max_time"),
    ),
    "batch, learning rate and adapter": (
        _flag("--batch-size", "data.batch_size", default=f"{config.DataConfig.batch_size}, {FEWER}"),
        _flag("--eval-batch-size", "data.eval_batch_size", default="--batch-size"),
        _flag("--gradient-accumulation-steps", "trainer.accumulate_grad_batches",
              default=f"{config.TrainerConfig.accumulate_grad_batches}, {FEWER}"),
        _flag("--block-size", "data.block_size", help="tokens in a block; also --max-length",
              default=f"{config.DataConfig.block_size}, {FEWER}"),
        _flag("--loss-on", "data.loss_on"),
        _flag("--chat-template", "data.chat_template", default="the model's"),
        _flag("--chat-template-args", "data.chat_template_args", default="none"),
        _flag("--system", "data.system", default="none: the template's own"),
        _flag("--control-tokens", "data.control_tokens"),
        _flag("--packing", "data.packing"),
        _flag("--on-long", "data.on_long"),
        _flag("--isolate-documents", "data.isolate_documents"),
        _flag("--learning-rate", "optimizer.learning_rate", default="by the model's width"),
        _flag("--lr-scheduler", "optimizer.schedule"),
        _flag("--warmup-steps", "optimizer.warmup_steps", default="a twentieth of the run, 50 at most"),
        _flag("--gradient-clip", "optimizer.gradient_clip"),
        _flag("--adam-beta2", "optimizer.beta2"),
        _flag("--lora-r", "lora.rank", default=config.DEFAULT_RANK),
        _flag("--lora-alpha", "lora.alpha", default=config.DEFAULT_ALPHA),
        _flag("--rslora", "lora.rslora"),
        _flag("--lora-dropout", "lora.dropout", share),
        _flag("--lora-targets", "lora.targets", default="all"),
        _flag("--lora-experts", "lora.experts"),
    ),
    "precision and speed": (
        _flag("--precision", "trainer.precision", str, "of the products; auto chooses the best of the device", "auto",
              tuple(PRECISIONS)),
        _flag("--4bit-quantization", "base.quantize_4bit"),
        _flag("--torch-compile", "base.compile"),
        _flag("--compile-mode", "base.compile_mode"),
        _flag("--gradient-checkpointing", "base.gradient_checkpointing"),
        _flag("--attn", "base.attention"),
        _flag("--kernels", "base.kernels"),
        _flag("--memory-fraction", "run.memory_fraction", share, default="what is needed"),
        _flag("--tf32", "run.tf32"),
        _flag("--num-workers", "data.num_workers"),
        _flag("--prefetch-factor", "data.prefetch_factor"),
        _flag("--deterministic", "trainer.deterministic", bool),
    ),
    "devices": (
        _flag("--accelerator", "trainer.accelerator", choices=("auto", "cpu", "cuda")),
        _flag("--multi-gpu", "run.multi_gpu"),
        _flag("--gpus", "run.gpus", default="one, or all with --multi-gpu"),
        _flag("--auto-batch-size", "run.auto_batch_size"),
        _flag("--fsdp", "run.fsdp"),
    ),
    "controller": (
        _flag("--controller", "control.controller", help="the law that sets lambda: "
              f"{', '.join(CONTROLLERS)}; or a class, package.module:Class"),
        _flag("--target-s", "control.target_s", share, "setpoint S* as a share, such as 0.1 or 10%; "
              "auto finds it during the run, from the slope of the held-out loss"),
        _flag("--kp", "control.kp"),
        _flag("--ki", "control.ki"),
        _flag("--control-every", "control.every", default="10, fewer in a short run"),
        _flag("--lambda-init", "control.lambda_init"),
        _flag("--lambda-min", "control.lambda_min"),
        _flag("--lambda-max", "control.lambda_max"),
        _flag("--prior-sigma", "prior.sigma"),
    ),
    "what the model keeps": (
        _flag("--max-drift", "drift.max_drift", share),
        _flag("--general-data", "drift.general_data"),
        _flag("--general-tokens", "drift.general_tokens"),
    ),
    "checkpoints, validation and stopping": (
        _flag("--save-steps", "run.save_steps", default="half of the run, 500 at most"),
        _flag("--keep", "run.keep"),
        _flag("--resume-from-checkpoint", "run.resume", help="checkpoint folder; last: the newest intact one in "
              "--output-dir; auto: the same, or from the beginning where there is none. Settings not given are those "
              "of the run that is continued, and without --output-dir it continues in its own folder"),
        _flag("--eval-steps", "run.eval_steps", default="a fifth to a tenth of the run, 200 at most"),
        _flag("--eval-iters", "trainer.limit_val_batches"),
        _flag("--samples", "run.samples"),
        _flag("--logging-steps", "trainer.log_every_n_steps"),
        _flag("--logger", "run.logger", choices=config.LOGGERS),
        _flag("--early-stopping", "run.early_stopping"),
        _flag("--stop-at-equilibrium", "run.stop_at_equilibrium"),
    ),
    "research: other controllers, and what they measure": (
        _flag("--ema-alpha", "control.ema_alpha", share),
        _flag("--deadband", "control.deadband"),
        _flag("--lambda-end", "control.lambda_end"),
        _flag("--replay", "control.replay"),
        _flag("--controller-args", "control.controller_args", default="none"),
        _flag("--measure", "control.measure"),
        _flag("--actuator", "control.actuator"),
        _flag("--n-tokens", "prior.n_tokens", default="supervised tokens of the training set"),
    ),
}  # fmt: skip

NAMES = {flag.key: flag.name for section in SECTIONS.values() for flag in section}
"""The flag of each dotted key that has one."""

KEYS = {name: key for key, name in NAMES.items()}
"""The dotted key that each flag is another name of."""

COMMONEST = (
    "--model", "--data-dir", "--validation-data", "--test-data", "--system", "--output-dir", "--max-steps",
    "--num-epochs", "--batch-size", "--block-size", "--learning-rate", "--lora-r", "--max-drift", "--4bit-quantization",
    "--accelerator", "--controller", "--target-s", "--save-steps", "--resume-from-checkpoint",
)  # fmt: skip
"""What most runs set: shown by ``--help``, the others by ``--help-all``."""
