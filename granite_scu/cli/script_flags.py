"""The command line of ``scripts/train_granite_cuda.py``: the flags of ``config.flags``, translated into dotted keys.

What is given goes to the CLI as ``--key value`` after the YAML files, so flags win. Dotted flags
(``--lora.targets [in_proj]``) pass through.
"""

import argparse
import difflib
import json
import math
import sys
from pathlib import Path
from typing import Any

from granite_scu.cli import guard
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.config.flags import NUMBER_OF_ITS_OWN, PRECISIONS, SECTIONS, SWITCH_OR_AUTO, Flag
from granite_scu.config.settings import RunConfig


def build_parser() -> Parser:
    """The script's argument parser; nothing is set unless it was given."""
    parser = Parser(
        prog="train_granite_cuda.py",
        usage="%(prog)s [--test-run | --dry-run | --check-requirements] [flags] [--dotted.key value]",
        description="Fine-tune IBM Granite with LoRA while a controller holds S = ParamBPT / (DataBPT + ParamBPT).",
        argument_default=argparse.SUPPRESS,
    )
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title)
        for flag in section:
            group.add_argument(flag.name, dest=flag.key, **argument(flag))
            if flag.choices == tuple(SWITCH_OR_AUTO):
                off = f"--no-{flag.name.removeprefix('--')}"
                group.add_argument(off, dest=flag.key, action="store_const", const="off", help=argparse.SUPPRESS)
    _add_special(parser)
    return parser


def argument(flag: Flag) -> dict[str, Any]:
    """What argparse is to know of a flag."""
    shown = "off" if flag.default is None or flag.default is False else flag.default
    meaning = {"help": f"{flag.help} (default: {shown})".replace("%", "%%")}
    if flag.kind is bool:
        return {**meaning, "action": argparse.BooleanOptionalAction}
    metavar = "|".join(flag.choices) or flag.kind.__name__.upper()
    options = {**meaning, "type": flag.kind, "choices": flag.choices or None, "metavar": metavar}
    if flag.name in NUMBER_OF_ITS_OWN:
        return {**options, "nargs": "?", "const": NUMBER_OF_ITS_OWN[flag.name]}
    if flag.choices == tuple(SWITCH_OR_AUTO):
        return {**options, "nargs": "?", "const": "on"}
    return {**options, "nargs": "+"} if flag.many else options


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
    if "data.num_epochs" in given:
        given.setdefault(
            "trainer.max_steps", -1
        )  # epochs given alone: no limit on steps, not one of a YAML file either
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
        folder = Path(given.get("run.output_dir", RunConfig.output_dir)).expanduser()
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
    if flag.choices == tuple(SWITCH_OR_AUTO):
        return json.dumps(SWITCH_OR_AUTO[value])
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


def without_local_rank(argv: list[str]) -> list[str]:
    """Without the ``--local-rank=N`` that ``python -m torch.distributed.launch`` adds: LOCAL_RANK says it as well."""
    return [argument for argument in argv if not argument.startswith(("--local-rank=", "--local_rank="))]


def main(test_run_config: Path, argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    argv = without_local_rank(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        arguments, asked = translate(argv, test_run_config)
        from granite_scu.cli import train  # late: a wrong flag is refused before torch is imported

        if getattr(asked, "check_requirements", False):
            return train.check_requirements(arguments, as_json=getattr(asked, "json", False))
        if getattr(asked, "dry_run", False):
            return train.dry_run(arguments, as_json=getattr(asked, "json", False))
        return train.run(arguments)

    return guard.guarded(run, debug="--debug" in argv)
