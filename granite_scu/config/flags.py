"""The flags of ``scripts/train_granite_cuda.py``: a thin translation into the configuration of ``cli``.

Each flag stands for one dotted key; its default is the configuration's own. What is given goes to the CLI
as ``--key value`` after the YAML files, so flags win. Dotted flags (``--lora.targets [in_proj]``) pass through.
"""

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from granite_scu.cli.argument_parser import Parser
from granite_scu.config import settings as config
from granite_scu.control import CONTROLLERS
from granite_scu.control.diagnostics.setpoint import FRACTION
from granite_scu.control.laws.pi import MARGINAL_SAVING
from granite_scu.errors import UserError

PRECISIONS = {"auto": "null", **config.PRECISIONS}
GROUPS = {
    "base": config.BaseConfig,
    "lora": config.LoraConfig,
    "optimizer": config.OptimizerConfig,
    "prior": config.PriorConfig,
    "data": config.DataConfig,
    "control": config.ControlConfig,
    "run": config.RunConfig,
}
"""The configuration's groups and the dataclass of each."""


@dataclass(frozen=True)
class Flag:
    """A flag of the script.

    Attributes:
        name: the flag, with hyphens; the same with underscores is accepted.
        key: the dotted key of the configuration that it sets.
        kind: type of its value, or a function that makes it of the text; ``bool`` makes a switch with a ``--no-`` form.
        help: meaning, and unit where there is one.
        choices: the values it may take.
        default: shown in the help where the configuration's own default is written another way.
        many: whether several values may follow the flag.
    """

    name: str
    key: str
    kind: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    default: Any = None
    many: bool = False


NUMBER_OF_ITS_OWN = {"--early-stopping": 3, "--stop-at-equilibrium": 30}
"""Flags that may stand without their number, and the one that they then mean."""


WORKED_OUT = {
    "kp": "scheduled by how fast the adapter gets to S*",
    "ki": "Kp / min(tau, 10), tau the ticks that the adapter takes to S*",
    "lambda_init": f"{MARGINAL_SAVING:g} (S*/(1 - S*))^(-2/3)",
}
"""Settings that the default law works out where they are not given, and how."""


def _of_law(setting: str) -> str:
    """The default of a setting that each controller has its own of: the default law's, or the first's that knows it."""
    usual = config.ControlConfig.controller
    name = next(name for name in (usual, *CONTROLLERS) if setting in CONTROLLERS[name].__dataclass_fields__)
    default = CONTROLLERS[name].__dataclass_fields__[setting].default
    return f"the controller's own; {name}'s: {WORKED_OUT[setting] if default is None else default}"


def ratio_or_auto(text: str) -> str:
    """The value of ``--target-s``, whose range the configuration checks."""
    try:
        understood = text == "auto" or math.isfinite(float(text))
    except ValueError:
        understood = False
    if not understood:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio between 0 and 1 nor auto")
    return text


SECTIONS: dict[str, tuple[Flag, ...]] = {
    "what": (
        Flag("--model", "base.name", str, "hub id, local folder, or tiny-granite-h for the embedded model"),
        Flag("--data-dir", "data.path", str, "file, folder or pattern of txt, md, jsonl, csv, tsv or parquet, also "
             "as .gz or .zst; stdlib-docs, stdlib-source or package-docs for an embedded corpus; hf:owner/name or "
             "hf:owner/name:config for a data set of the hub; several are read one after the other",
             default="wikitext-2 from the hub", many=True),
        Flag("--data-weights", "data.weights", float, "how often each --data-dir is read in an epoch of training; "
             "fractions read a part", default="1 each", many=True),
        Flag("--text-column", "data.text_column", str, "field of a record (jsonl, csv, parquet) that holds the text"),
        Flag("--encoding", "data.encoding", str, "of text files, such as latin-1"),
        Flag("--split-seed", "data.split_seed", int, "of the division into training, validation and test documents"),
        Flag("--cache-dir", "data.cache_dir", str, "where tokens are kept", default="~/.cache/granite-scu"),
        Flag("--stream", "data.stream", bool, "read and tokenise the text while training goes on and keep nothing: for "
             "text larger than the disk"),
        Flag("--output-dir", "run.output_dir", str, "run folder"),
        Flag("--overwrite", "run.overwrite", bool, "replace a run folder that is not empty"),
        Flag("--adapter", "lora.adapter", str, "folder of a LoRA adapter to start from: rank, alpha and layers are its "
             "own, S measures how far training moves it", default="none: a new one"),
        Flag("--seed", "seed_everything", int, "seed of everything random", default=config.SEED),
    ),
    "length": (
        Flag("--max-steps", "trainer.max_steps", int, "optimizer steps; with --num-epochs, whichever is reached first",
             default=f"{config.DEFAULT_STEPS}, off when --num-epochs is given alone"),
        Flag("--num-epochs", "data.num_epochs", float, "passes over the training text"),
        Flag("--max-time", "trainer.max_time", str, "longest training time, DD:HH:MM:SS; covers the probe of "
             "--target-s auto too"),
    ),
    "step": (
        Flag("--batch-size", "data.batch_size", int, "blocks in a micro-batch on each device"),
        Flag("--eval-batch-size", "data.eval_batch_size", int, "blocks in an evaluation batch", default="--batch-size"),
        Flag("--gradient-accumulation-steps", "trainer.accumulate_grad_batches", int, "micro-batches in a step"),
        Flag("--block-size", "data.block_size", int, "tokens in a block; also --max-length"),
        Flag("--loss-on", "data.loss_on", str, "of messages and of prompt and completion: what the assistant says, or "
             "all", ("completion", "all")),
        Flag("--packing", "data.packing", str, "blocks cuts documents in a row; best-fit keeps each in one piece; auto "
             "takes that for conversations", ("auto", "blocks", "best-fit")),
        Flag("--on-long", "data.on_long", str, "what becomes of a document longer than a block",
             ("split", "truncate", "drop", "error")),
        Flag("--isolate-documents", "data.isolate_documents", bool, "documents in a block do not see one another, in "
             "attention, convolution and scan"),
        Flag("--learning-rate", "optimizer.learning_rate", float, "peak learning rate"),
        Flag("--lr-scheduler", "optimizer.schedule", str, "course of the rate", ("cosine", "linear", "constant")),
        Flag("--warmup-steps", "optimizer.warmup_steps", int, "optimizer steps of warm-up"),
        Flag("--gradient-clip", "optimizer.gradient_clip", float, "largest gradient norm; 0 does not clip"),
        Flag("--adam-beta2", "optimizer.beta2", float, "decay of Adam's second moment"),
        Flag("--lora-r", "lora.rank", int, "rank of the adapters", default=config.DEFAULT_RANK),
        Flag("--lora-alpha", "lora.alpha", float, "scale of the adapters, times the rank",
             default=config.DEFAULT_ALPHA),
        Flag("--lora-dropout", "lora.dropout", float, "probability of dropping an adapter's input"),
    ),
    "precision and speed": (
        Flag("--precision", "trainer.precision", str, "of the products; auto takes what the device does best",
             tuple(PRECISIONS), default="auto"),
        Flag("--4bit-quantization", "base.quantize_4bit", bool, "hold the frozen layers in 4 bits (QLoRA)"),
        Flag("--torch-compile", "base.compile", bool, "compile the model"),
        Flag("--compile-mode", "base.compile_mode", str, "mode of torch.compile",
             ("default", "reduce-overhead", "max-autotune")),
        Flag("--gradient-checkpointing", "base.gradient_checkpointing", bool,
             "recompute activations in the backward pass: less memory, slower"),
        Flag("--attn", "base.attention", str, "attention kernel", ("sdpa", "eager", "flash_attention_2", "auto")),
        Flag("--kernels", "base.kernels", str, "of the Mamba-2 layers; auto takes compiled ones where installed and "
             "proven right on the GPU, cuda insists on them", ("auto", "torch", "cuda")),
        Flag("--memory-fraction", "run.memory_fraction", float, "largest share of the GPU's memory to take, 0 to 1",
             default="what is needed"),
        Flag("--tf32", "run.tf32", bool, "fp32 products of the model in TF32 where the GPU has it"),
        Flag("--num-workers", "data.num_workers", int, "loader processes"),
        Flag("--prefetch-factor", "data.prefetch_factor", int, "batches that each loader process holds ready"),
        Flag("--deterministic", "trainer.deterministic", bool, "deterministic kernels, slower on a GPU", default=False),
    ),
    "machine": (
        Flag("--accelerator", "trainer.accelerator", str, "device; without a GPU, cpu must be asked for",
             ("auto", "cpu", "cuda")),
        Flag("--multi-gpu", "run.multi_gpu", bool, "every visible GPU, or what torchrun or SLURM started"),
        Flag("--auto-batch-size", "run.auto_batch_size", bool, "the largest micro-batch that fits, found by training "
             "on it; --batch-size times --gradient-accumulation-steps, the blocks of a step, stays"),
        Flag("--fsdp", "run.fsdp", bool, "share the frozen layers out over the processes; adapters stay whole"),
    ),
    "control": (
        Flag("--controller", "control.controller", str, f"the law that sets lambda: {', '.join(CONTROLLERS)}"),
        Flag("--target-s", "control.target_s", ratio_or_auto, "setpoint S*, a ratio between 0 and 1, or auto: a "
             f"probe without lambda comes first, a tenth of the run; S* is {FRACTION} of what S would come to alone"),
        Flag("--kp", "control.kp", float, "proportional gain, in ln lambda per logit of S; of p per ln S, of "
             "original per S and tick, of kl per KL/KL* and tick", default=_of_law("kp")),
        Flag("--ki", "control.ki", float, "integral gain, the same per tick; of i per ln S and tick",
             default=_of_law("ki")),
        Flag("--control-every", "control.every", int, "optimizer steps between ticks"),
        Flag("--ema-alpha", "control.ema_alpha", float, "weight of the newest measurement in the smoothed S; of pi "
             "for the log, the deadband and the stops alone", default=_of_law("ema_alpha")),
        Flag("--deadband", "control.deadband", float, "errors |ln(S/S*)| below this leave the integral "
             "alone; of original, |S - S*| up to this leaves lambda alone", default=_of_law("deadband")),
        Flag("--lambda-init", "control.lambda_init", float, "lambda at the start", default=_of_law("lambda_init")),
        Flag("--lambda-min", "control.lambda_min", float, "lower bound of lambda"),
        Flag("--lambda-max", "control.lambda_max", float, "upper bound of lambda"),
        Flag("--lambda-end", "control.lambda_end", float, "lambda at the end, of linear and cosine",
             default=_of_law("lambda_end")),
        Flag("--target-kl", "control.target_kl", float, "setpoint of kl, in bits per token",
             default=_of_law("target_kl")),
        Flag("--cpr-bound", "control.cpr_bound", float, "of cpr: the most bits per token that one matrix may take",
             default="what it takes after --cpr-warmup ticks"),
        Flag("--cpr-warmup", "control.cpr_warmup", int, "of cpr: ticks before a bound not given is taken",
             default=_of_law("cpr_warmup")),
        Flag("--replay", "control.replay", str, "of replay: run folder or scu_history.json whose lambda is repeated"),
        Flag("--measure", "control.measure", str, "what ParamBPT counts: the update, or its factors",
             ("delta", "factors")),
        Flag("--actuator", "control.actuator", str, "how lambda acts: in the loss, or decoupled after the step",
             ("loss", "decoupled")),
        Flag("--prior-sigma", "prior.sigma", float, "standard deviation of the prior on the entries of delta W"),
        Flag("--n-tokens", "prior.n_tokens", int, "tokens N that the adapter's description is spread over",
             default="supervised tokens of the training set"),
    ),
    "keeping": (
        Flag("--save-steps", "run.save_steps", int, "optimizer steps between checkpoints"),
        Flag("--keep", "run.keep", int, "checkpoints kept"),
        Flag("--resume-from-checkpoint", "run.resume", str, "checkpoint folder; last: the newest whole one in "
             "--output-dir; auto: the same, or from the beginning where there is none. Settings not given are those of "
             "the run that is gone on with, and without --output-dir it goes on in its own folder"),
        Flag("--eval-steps", "run.eval_steps", int, "optimizer steps between validations"),
        Flag("--eval-iters", "trainer.limit_val_batches", int, "batches in a validation"),
        Flag("--logging-steps", "trainer.log_every_n_steps", int, "optimizer steps between log lines"),
        Flag("--early-stopping", "run.early_stopping", int, "stop after so many validations without improvement "
             "(3 when no number is given)"),
        Flag("--stop-at-equilibrium", "run.stop_at_equilibrium", int, "stop when S has been held by a closed loop, and "
             "the data's bits have not fallen, for so many ticks (30 when no number is given)"),
    ),
}  # fmt: skip


def defaults() -> dict[str, Any]:
    """The default of every dotted key that a flag stands for."""
    found: dict[str, Any] = {f"trainer.{name}": value for name, value in config.TRAINER_DEFAULTS.items()}
    for group, kind in GROUPS.items():
        found |= {f"{group}.{field.name}": field.default for field in fields(kind)}
    return found


def build_parser() -> Parser:
    """The script's argument parser; nothing is set unless it was given."""
    parser = Parser(
        prog="train_granite_cuda.py",
        usage="%(prog)s [--test-run | --dry-run | --check-requirements] [flags] [--dotted.key value]",
        description="Fine-tune IBM Granite with LoRA while a controller holds S = ParamBPT / (DataBPT + ParamBPT).",
        argument_default=argparse.SUPPRESS,
    )
    known = defaults()
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title)
        for flag in section:
            default = flag.default if flag.default is not None else known.get(flag.key)
            shown = "off" if default is None or default is False else default
            options: dict[str, Any] = {"help": f"{flag.help} (default: {shown})".replace("%", "%%"), "dest": flag.key}
            if flag.kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options |= {"type": flag.kind, "choices": flag.choices or None}
                options["metavar"] = "|".join(flag.choices) or flag.kind.__name__.upper()
            if flag.many:
                options["nargs"] = "+"
            if flag.name in NUMBER_OF_ITS_OWN:
                options |= {"nargs": "?", "const": NUMBER_OF_ITS_OWN[flag.name]}
            group.add_argument(flag.name, **options)
    _add_special(parser)
    return parser


def _add_special(parser: Parser) -> None:
    """Flags that stand for more or less than one key."""
    short = parser.add_argument_group("short forms")
    short.add_argument("--max-length", type=int, metavar="INT", help="the same as --block-size")
    short.add_argument("--bf16", action="store_true", help="the same as --precision bf16")
    short.add_argument("--fp16", action="store_true", help="the same as --precision fp16")
    layers = parser.add_argument_group("layers, each over the last: defaults, the preset, YAML files, flags")
    layers.add_argument("--hardware", metavar="NAME", help="preset for a card (a file of configs/hardware), or auto "
                        "for the one that fits this machine")  # fmt: skip
    layers.add_argument("--config", action="append", metavar="YAML", help="configuration file; several are layered")
    asking = parser.add_argument_group("asking")
    asking.add_argument("--test-run", action="store_true", help="a complete miniature run on the embedded model and "
                        "text, on the CPU, in under two minutes; every flag given still counts")  # fmt: skip
    asking.add_argument("--check-requirements", action="store_true", help="say what is there and what is missing for "
                        "the run that the other flags describe; exit 0 when it can start, 1 when not")  # fmt: skip
    asking.add_argument("--dry-run", action="store_true", help="resolve everything, print the plan, train nothing")
    asking.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_debug(asking)
    asking.add_argument("--print-config", action="store_true", help="print the resolved configuration as YAML, "
                        "and where each value is from")  # fmt: skip


def translate(argv: list[str], test_run_config: Path) -> tuple[list[str], argparse.Namespace]:
    """The CLI's arguments for the script's, and what was asked besides.

    Args:
        argv: the script's arguments.
        test_run_config: the YAML whose values are the defaults under ``--test-run``.

    Raises:
        UserError: an unknown flag, a value of the wrong type, or flags that contradict each other.
    """
    parser = build_parser()
    known, dotted = parser.parse_known_args([hyphenated(argument) for argument in argv])
    given = vars(known)
    _refuse_unknown(parser, dotted)
    _resolve_short_forms(given)
    _resolve_length(given)
    # --test-run changes defaults only, so its file lies below the preset; so does what a run that goes on began with.
    files = [str(test_run_config)] if "test_run" in given else []
    if "run.resume" in given:
        files += _settings_of_the_run(given)
    arguments = ["fit", *(f"--config={name}" for name in files)]
    arguments += [f"--hardware={given['hardware']}"] if "hardware" in given else []
    arguments += [f"--config={name}" for name in given.get("config", [])]
    for section in SECTIONS.values():
        for flag in section:
            if flag.key in given:
                arguments.append(f"--{flag.key}={_as_yaml(flag, given[flag.key])}")
    if "print_config" in given:
        arguments.append("--print_config")
    return arguments + dotted, known


def _settings_of_the_run(given: dict[str, Any]) -> list[str]:
    """The configuration file of the run that is gone on with, where it is there; it comes before what is given."""
    if given["run.resume"] in ("last", "auto"):
        folder = Path(given.get("run.output_dir", config.RunConfig.output_dir)).expanduser()
    else:
        folder = Path(given["run.resume"]).expanduser().parent
        given.setdefault("run.output_dir", str(folder))
    file = folder / "config.yaml"
    if not file.is_file():
        return []
    given.setdefault("run.overwrite", False)  # that it replaced another run once does not mean that it may again
    given.setdefault("run.output_dir", str(folder))
    return [str(file)]


def _as_yaml(flag: Flag, value: Any) -> str:
    if flag.key == "trainer.precision":
        return PRECISIONS[value]
    if flag.many:
        return json.dumps(value, ensure_ascii=False) if len(value) > 1 or flag.kind is float else value[0]
    if isinstance(value, float) and not math.isfinite(value):  # so that the configuration refuses it, by its flag
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return str(value).lower() if isinstance(value, bool) else str(value)


def hyphenated(argument: str) -> str:
    """``--batch_size`` as ``--batch-size``; values and dotted flags stay as they are."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and "." not in name else argument


def _refuse_unknown(parser: Parser, rest: list[str]) -> None:
    """What argparse did not know must be dotted flags, each with its value."""
    flags = [name for action in parser._actions for name in action.option_strings]
    previous_takes_value = False
    for argument in rest:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            if "." not in name:
                close = difflib.get_close_matches(name, flags, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UserError(f"unknown flag {name}: {hint}see --help for all of them")
            previous_takes_value = "=" not in argument
        elif previous_takes_value:
            previous_takes_value = False
        else:
            raise UserError(f"{argument!r} belongs to no flag; see --help")


def _resolve_short_forms(given: dict[str, Any]) -> None:
    named = [name for name in ("bf16", "fp16") if given.get(name)]
    if "trainer.precision" in given:
        named.append(given["trainer.precision"])
    if len(set(named)) > 1:
        raise UserError(f"--precision: {' and '.join(sorted(set(named)))} exclude each other; choose one")
    if named:
        given["trainer.precision"] = named[0]
    length, block = given.get("max_length"), given.get("data.block_size")
    if length is not None and block is not None and length != block:
        raise UserError(f"--block-size {block} and --max-length {length} are the same setting; give one of them")
    if length is not None:
        given["data.block_size"] = length


def _resolve_length(given: dict[str, Any]) -> None:
    """Epochs given alone switch the limit on steps off, also one that a YAML file sets."""
    if "data.num_epochs" in given and "trainer.max_steps" not in given:
        given["trainer.max_steps"] = -1


def without_local_rank(argv: list[str]) -> list[str]:
    """Without the ``--local-rank=N`` that ``python -m torch.distributed.launch`` adds: LOCAL_RANK says it as well."""
    return [argument for argument in argv if not argument.startswith(("--local-rank=", "--local_rank="))]


def main(test_run_config: Path, argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    from granite_scu.cli import guard

    argv = without_local_rank(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        arguments, asked = translate(argv, test_run_config)
        from granite_scu.cli import request_parser as cli  # late: a wrong flag is refused before torch is imported

        if getattr(asked, "check_requirements", False):
            return cli.check_requirements(arguments, as_json=getattr(asked, "json", False))
        if getattr(asked, "dry_run", False):
            return cli.dry_run(arguments, as_json=getattr(asked, "json", False))
        return cli.run(arguments)

    return guard.guarded(run, debug="--debug" in argv)
