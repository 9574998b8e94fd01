"""The table of the flags of ``granite-scu train``: each stands for one dotted key of the configuration.

Name, type, choices, default and meaning of a flag are those of the configuration's field and of its line in the
docstring; ``_SHOWN`` says what differs. ``cli.script_flags`` makes the parser of the table, and translates.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from os import PathLike
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import docstring_parser

from granite_scu.config import settings as config
from granite_scu.config.errors import UserError
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


def switches(key: str) -> tuple[str, ...]:
    """What the flag of a key may be set to, where it is such a switch; else nothing."""
    words = {bool | None: tuple(SWITCH_OR_AUTO), config.Recomputed | None: (*SWITCH_OR_AUTO, "selective")}
    return words.get(HINTS.get(key), ())


NUMBER_OF_ITS_OWN = {"--early-stopping": 3, "--stop-at-equilibrium": 30}
"""Flags that may stand without their number, and the one that they then mean."""


FEWER = "fewer where there are few data"
"""How a default is shown that is for data which fill it."""

WORKED_OUT = {
    "kp": "scheduled by how fast the adapter gets to S*",
    "ki": "Kp / min(tau, 10), tau the ticks that the adapter takes to S*",
    "lambda_init": "worked out from S* or the budget",
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


def _flag(key: str) -> Flag:
    """The flag of a dotted key."""
    name, hint = CALLED[key], HINTS[key]
    options = [option for option in (get_args(hint) or (hint,)) if option is not NoneType]
    many = any(get_origin(option) is list for option in options)
    kind, choices, default = options[0], get_args(hint) if get_origin(hint) is Literal else (), DEFAULTS[key]
    help = MEANINGS[key].partition("; null ")[0].rstrip(".").replace("``", "")
    if choices:
        kind = str
    elif switches(key):
        kind, choices, default, help = str, switches(key), "auto", MEANINGS[key].replace("null", "auto")
    elif {float, str} <= {*options}:
        kind = share
    elif many:
        kind = get_args(options[0])[0]
    if default is None and key.startswith("control."):
        default = _of_law(key.partition(".")[2])
    flag = replace(Flag(name, key, kind, help, default, choices, many), **_SHOWN.get(key, {}))
    number = NUMBER_OF_ITS_OWN.get(name)
    return replace(flag, help=f"{flag.help} ({number} when no number is given)") if number else flag


_FIELDS = {f"{group}.{each.name}": each for group, kind in SETTINGS.items() for each in fields(kind)}

HINTS: dict[str, Any] = {key: each.type for key, each in _FIELDS.items()}
"""The type of every dotted key of the groups."""

MEANINGS = {
    f"{group}.{line.arg_name}": " ".join((line.description or "").split())
    for group, kind in SETTINGS.items()
    for line in docstring_parser.parse(kind.__doc__ or "").params
}
"""What the docstrings say of them."""

DEFAULTS: dict[str, Any] = {key: each.default for key, each in _FIELDS.items()}
"""The default of every dotted key."""

CALLED = {key: name for key, each in _FIELDS.items() if "." not in (name := config.name_of(each))}
"""The flag of every dotted key that has one."""

_SHOWN: dict[str, dict[str, Any]] = {
    "data.path": {"default": "wikitext-2 from the hub"},
    "data.validation_data": {"default": "held out of --data-dir"},
    "data.test_data": {"default": "held out of --data-dir, or --validation-data"},
    "data.held_out_share": {"default": "20% of text, 10% of conversations"},
    "data.weights": {"default": "1 each"},
    "data.cache_dir": {"default": "~/.cache/granite-scu"},
    "lora.adapter": {"default": "none: a new one"},
    "trainer.max_steps": {
        "default": f"as the data fill, {config.DEFAULT_STEPS} at most, chats 5000; off when --num-epochs is alone",
        "help": "optimizer steps; with --num-epochs, whichever is reached first",
    },
    "data.batch_size": {"default": f"{config.DataConfig.batch_size}, {FEWER}"},
    "data.eval_batch_size": {"default": "--batch-size"},
    "trainer.accumulate_grad_batches": {"default": f"{config.TrainerConfig.accumulate_grad_batches}, {FEWER}"},
    "data.block_size": {
        "default": f"{config.DataConfig.block_size}, {FEWER}, more where chats are longer",
        "help": "tokens in a block; also --max-length",
    },
    "data.chat_template": {"default": "the model's"},
    "data.chat_template_args": {"default": "none"},
    "data.system": {"default": "none: the template's own"},
    "optimizer.learning_rate": {"default": "by the model's width"},
    "optimizer.warmup_steps": {"default": "a twentieth of the run, 50 at most"},
    "lora.rank": {"default": config.DEFAULT_RANK},
    "lora.alpha": {"default": config.DEFAULT_ALPHA},
    "lora.targets": {"default": "all"},
    "trainer.precision": {
        "kind": str,
        "choices": tuple(PRECISIONS),
        "default": "auto",
        "help": "of the products; auto chooses the best of the device, on a CPU by a measured step",
    },
    "run.memory_fraction": {"default": "what is needed"},
    "trainer.deterministic": {"kind": bool},
    "run.gpus": {"default": "one, or all with --multi-gpu"},
    "control.controller": {
        "default": "none, or pi where a setting of a controller is given",
        "help": f"the law that sets lambda: {', '.join(CONTROLLERS)}; or a class, package.module:Class",
    },
    "control.target_s": {
        "default": "none",
        "help": "setpoint S* as a share, such as 0.1 or 10%",
    },
    "control.every": {"default": "10, fewer in a short run with a controller"},
    "control.controller_args": {"default": "none"},
    "control.lambda_min": {"default": "1e-06, 0.001 with --max-drift"},
    "control.lambda_max": {"default": "1e+06; with --max-drift what lambda begins with"},
    "prior.n_tokens": {"default": "supervised tokens of the training set"},
    "run.save_steps": {"default": "half of the run, 500 at most"},
    "run.resume": {
        "help": "checkpoint folder; last: the newest intact one in --output-dir; auto: the same, or from the beginning "
        "where there is none. Settings not given are those of the run that is continued, and without --output-dir it "
        "continues in its own folder"
    },
    "run.eval_steps": {"default": "a fifth to a tenth of the run, 500 at most"},
    "run.logger": {"choices": config.LOGGERS},
}
"""What the help shows of a flag otherwise than the docstring, the type and the default of its setting say."""

_ORDER: dict[str, tuple[str, ...]] = {
    "model, data and run folder": (
        *("base.name", "data.path", "data.validation_data", "data.test_data", "data.held_out_share", "data.weights"),
        *("data.text_column", "data.record_format", "data.encoding", "data.split_seed", "data.cache_dir"),
        *("data", "run.output_dir", "run.overwrite", "lora.adapter"),
    ),
    "length of the run": ("trainer.max_steps", "data.num_epochs", "trainer.max_time"),
    "batch, learning rate and adapter": (
        *("data.batch_size", "data.eval_batch_size", "trainer.accumulate_grad_batches", "data.block_size"),
        *("data.loss_on", "data.chat_template", "data.chat_template_args", "data.system", "data.control_tokens"),
        *("data.packing", "data.on_long", "data.isolate_documents", "optimizer", "lora"),
    ),
    "precision and speed": (
        *("trainer.precision", "base.quantize_4bit", "base.compile", "base.compile_mode"),
        *("base.gradient_checkpointing", "base", "run.memory_fraction", "run.tf32"),
        *("data.num_workers", "trainer"),
    ),
    "devices": ("trainer.accelerator", "run.multi_gpu", "run.gpus", "run.auto_batch_size", "run.fsdp"),
    "controller": (
        *("control.controller", "control.target_s", "control.kp", "control.ki", "control.every"),
        *("control.lambda_init", "control.lambda_min", "control.lambda_max", "prior.sigma"),
    ),
    "what the model keeps": ("drift",),
    "checkpoints, validation and stopping": (
        *("run.save_steps", "run.keep", "run.resume", "run.eval_steps", "trainer.limit_val_batches", "run.samples"),
        *("trainer.log_every_n_steps", "run"),
    ),
    "research: other controllers, and what they measure": ("control", "prior"),
}
"""The order of flags in the help, by sections; a group stands for those of its settings that are named nowhere."""


def _keys(named: tuple[str, ...]) -> list[str]:
    everywhere = {key for keys in _ORDER.values() for key in keys}
    rest = {name: [key for key in CALLED if key.startswith(f"{name}.") and key not in everywhere] for name in named}
    return [key for name in named for key in (rest[name] if name in SETTINGS else [name])]


_SEED = Flag("--seed", "seed_everything", int, "seed of everything random", config.SEED)
SECTIONS = {title: tuple(map(_flag, _keys(named))) for title, named in _ORDER.items()}
SECTIONS["model, data and run folder"] += (_SEED,)
"""The flags, by the sections of the help."""

FLAGS = {flag.name: flag for section in SECTIONS.values() for flag in section}
"""The flags by name."""

NAMES = {flag.key: flag.name for flag in FLAGS.values()}
"""The flag of each dotted key that has one."""

KEYS = {flag.name: flag.key for flag in FLAGS.values()}
"""The dotted key that each flag is another name of."""


def in_python(message: str) -> str:
    """A message about flags, as one about Python's arguments: these are called like the flags, with underscores."""
    return re.sub(r"(?<!train )--([a-z0-9-]+)", lambda flag: flag[1].replace("-", "_"), message)


def plain(name: str, value: Any) -> Any:
    """A value of Python's as settings have it: of a path its name, of a number of NumPy's Python's.

    Raises:
        UserError: it is another object; ``name`` is that of the argument.
    """
    if isinstance(value, list | tuple):
        return [plain(name, each) for each in value]
    if isinstance(value, PathLike):
        return str(value)
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(value, bool | int | float | str | dict | None):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UserError(
            f"{name}: an object of {kind} cannot be kept with the run; give data and models by the path of a file, a "
            f'callback or logger by its class, as [{{"class_path": "{kind}", "init_args": {{...}}}}], and anything '
            "else as text or a number"
        )
    return value


COMMONEST = (
    "--model", "--data-dir", "--validation-data", "--test-data", "--system", "--output-dir", "--max-steps",
    "--num-epochs", "--batch-size", "--block-size", "--learning-rate", "--lora-r", "--max-drift", "--4bit-quantization",
    "--accelerator", "--controller", "--target-s", "--save-steps", "--resume-from-checkpoint",
)  # fmt: skip
"""What most runs set: shown by ``--help``, the others by ``--help-all``."""

OF_SCORING = ("--model", "--data-dir", "--output-dir", "--batch-size", "--block-size", "--4bit-quantization")
"""Those that say something to the commands which only score."""
