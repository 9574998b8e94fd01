"""What is typed after a command that takes settings: flags, dotted keys, files; read once, into layers.

A flag of ``config.flags`` is another name of a dotted key, and each of these commands takes both. What is given wins
over files, and a key over its flag.
"""

import argparse
import difflib
import itertools
import logging
import re
from collections import ChainMap
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, get_args

from granite_scu.cli import config_layers
from granite_scu.cli.argument_parser import Parser, hyphenated
from granite_scu.cli.config_layers import SEED, Layers
from granite_scu.cli.continued_run import settings_of_the_run
from granite_scu.cli.yaml_files import OF_A_RUN, parse
from granite_scu.config import other_tools, settings, shipped
from granite_scu.config.errors import UserError
from granite_scu.config.flags import (
    COMMONEST,
    HINTS,
    MEANINGS,
    NAMES,
    NUMBER_OF_ITS_OWN,
    PRECISIONS,
    SECTIONS,
    SWITCH_OR_AUTO,
    Flag,
    switches,
)
from granite_scu.config.request import asks_for_control
from granite_scu.hardware import presets

log = logging.getLogger(__name__)

_ALIKE = 0.75
"""Of two names, difflib's ratio above which one may be a slip for the other; 0.6 takes --resume for --stream."""


LAYERS = ("test_run", "hardware", "config", "max_length", "bf16", "fp16")
"""What stands for more than one setting, or is another flag's short form."""

ALWAYS_SHOWN = ("--test-run", "--hardware", "--config", "--dry-run", "--check-requirements", "--json",
                "--print-config", "--debug")  # fmt: skip
"""What every help shows of what is no setting."""


def build_parser(
    name: str = "granite-scu train",
    about: str = "",
    examples: Sequence[str] = (),
    commonest: Collection[str] = COMMONEST,
    dotted: bool = False,
) -> Parser:
    """The parser of a command that takes settings; nothing is set unless it was given.

    Args:
        name: of the command.
        about: what it does.
        examples: of its use, shown first.
        commonest: the flags that the help shows, besides those that stand for several settings or ask something.
        dotted: whether the help shows dotted keys, or flags.
    """
    keys = [f"--{key}" for key, flag in NAMES.items() if flag in commonest]
    parser = Parser(
        prog=name,
        usage="%(prog)s --config YAML [--group.key value]" if dotted else "%(prog)s [flags] [--dotted.key value]",
        description=about,
        examples=examples,
        commonest=(*(keys if dotted else commonest), *ALWAYS_SHOWN),
        argument_default=argparse.SUPPRESS,
    )
    _add_first(parser, dotted)
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title)
        for flag in section:
            shown = {"help": argparse.SUPPRESS} if dotted else {}
            group.add_argument(flag.name, dest=flag.key, **argument(flag) | shown)
            if switches(flag.key):
                off = f"--no-{flag.name.removeprefix('--')}"
                group.add_argument(off, dest=flag.key, action="store_const", const="off", help=argparse.SUPPRESS)
    _add_dotted(parser, dotted)
    _add_special(parser, dotted)
    return parser


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the chat template to a command that scores or generates."""
    parser.add_argument("--chat-template", metavar="FILE|NAME", help="file that holds a chat template, or the name of "
                        "one of the model's own (default: that of the run)")  # fmt: skip
    parser.add_argument("--chat-template-args", nargs="+", metavar="NAME=VALUE", help="arguments of the chat template, "
                        "such as enable_thinking=false (default: those of the run)")  # fmt: skip


def check_template(options: argparse.Namespace) -> None:
    """Refuse what is wrong with these flags whatever the model. Raises UserError."""
    settings.check_template_args(options.chat_template_args)
    if options.chat_template is not None:
        settings.check_template(options.chat_template)


def argument(flag: Flag) -> dict[str, Any]:
    """What argparse is to know of a flag."""
    shown = "on" if flag.default is True else "off" if flag.default is None or flag.default is False else flag.default
    meaning = {"help": f"{flag.help} (default: {shown})".replace("%", "%%")}
    if flag.kind is bool:
        return {**meaning, "action": argparse.BooleanOptionalAction}
    metavar = "|".join(flag.choices) or flag.kind.__name__.upper()
    options = {**meaning, "type": flag.kind, "choices": flag.choices or None, "metavar": metavar}
    if flag.name in NUMBER_OF_ITS_OWN:
        return {**options, "nargs": "?", "const": NUMBER_OF_ITS_OWN[flag.name]}
    if switches(flag.key):
        return {**options, "nargs": "?", "const": "on"}
    return {**options, "nargs": "+", "action": "extend"} if flag.many else options


def _add_first(parser: Parser, dotted: bool) -> None:
    """What stands for more than one key: layers of settings, each over the last."""
    layers = parser.add_argument_group("where settings come from; of defaults, preset, files and flags the last wins")
    if not dotted:
        layers.add_argument("--test-run", action="store_true", help="try it: a complete small run on the model and "
                            "text that come along, on the CPU, in two minutes; all flags still count")  # fmt: skip
    layers.add_argument("--hardware", metavar="CARD", action="append", help="preset for a card, such as gpu_4090; auto "
                        "takes the one for this machine")  # fmt: skip
    layers.add_argument("--config", action="append", metavar="YAML", help="configuration file, or the name of one that "
                        "comes along, such as qlora; several are layered")  # fmt: skip


def _add_dotted(parser: Parser, shown: bool) -> None:
    """Every setting by its dotted key."""
    for group, keys in itertools.groupby([SEED, *HINTS], lambda key: key.partition(".")[0]):
        section = parser.add_argument_group(group)
        for key in keys:
            meaning = MEANINGS.get(key, "seed of everything random").replace("%", "%%") if shown else argparse.SUPPRESS
            name = f"--{key.replace(SEED, SEED.replace('_', '-'))}"
            section.add_argument(name, dest=f"--{key}", help=meaning, metavar="VALUE")


def _add_special(parser: Parser, dotted: bool) -> None:
    """Short forms, and what is asked instead of a run."""
    short = parser.add_argument_group("short forms")
    asking = parser.add_argument_group("questions instead of a run")
    if not dotted:
        short.add_argument("--max-length", type=int, metavar="INT", help="the same as --block-size")
        short.add_argument("--bf16", action="store_true", help="the same as --precision bf16")
        short.add_argument("--fp16", action="store_true", help="the same as --precision fp16")
        asking.add_argument("--dry-run", action="store_true", help="the same as granite-scu plan")
        asking.add_argument("--check-requirements", action="store_true", help="the same as granite-scu check: exit 0 "
                            "when the run can start, 1 when not")  # fmt: skip
        asking.add_argument("--json", action="store_true", help="print the answer as JSON")
    asking.add_argument("--print-config", action="store_true", help="print the resolved configuration as YAML, "
                        "and where each value is from")  # fmt: skip
    parser.add_debug(asking)


def translate(argv: list[str], parser: Parser | None = None, dotted: bool = False) -> tuple[Layers, argparse.Namespace]:
    """What is asked for, and what was asked besides.

    Args:
        argv: the arguments of the command.
        parser: of the command, as ``build_parser`` makes it; null takes that of ``train``.
        dotted: whether messages name settings by dotted keys.

    Raises:
        UserError: an unknown flag, a value of the wrong type, or flags that contradict each other.
    """
    parser = parser or build_parser()
    known, rest = parser.parse_known_args([hyphenated(argument) for argument in argv])
    _refuse_unknown(parser, rest)
    return layers_of(vars(known), dotted), known


def layers_of(asked: dict[str, Any], dotted: bool = False) -> Layers:
    """The layers of what was given.

    Args:
        asked: by dotted key what flags say, by ``--`` and dotted key what keys say, and what ``LAYERS`` names.
        dotted: as of ``translate``.

    Raises:
        UserError: a key that there is not, or flags that contradict each other.
    """
    keys = {name.removeprefix("--"): value for name, value in asked.items() if name.startswith("--")}
    for key, value in keys.items():
        config_layers.check_key(key, config_layers.A_FLAG, value=value)
    _resolve_short_forms(asked)
    given = {key: _value(key, asked[key]) for key in NAMES if key in asked}
    # --test-run changes defaults only, so its file lies below the preset; so does a continued run's.
    below = [config_layers.of_file(str(shipped.TEST_RUN))] if asked.get("test_run") else []
    if below and config_layers.has_value((given | keys).get("drift.max_drift")):
        given.setdefault("control.target_s", None)  # it holds an S, which makes way for what is asked for
    files = [config_layers.of_file(name) for name in settings.listed(asked.get("config"))]
    given |= keys
    if config_layers.has_value(given.get("data.num_epochs")):  # alone: no limit on steps, not one of a file either
        given.setdefault("trainer.max_steps", -1)
    asked_of = ChainMap(given, *(file.values for file in reversed(files)))
    if continues := config_layers.has_value(asked_of.get("run.resume")):
        below += settings_of_the_run(given, files, below)
    flags = config_layers.Layer(config_layers.A_FLAG, given)
    if continues:
        _refuse_another_loop(below, flags)
        below = [_without_another_budgets_bounds(run, flags) for run in below]
    else:
        files = [_without_another_budgets_bounds(_without_another_loop(file, flags), flags) for file in files]
    return Layers(below, [*files, flags], _preset(settings.listed(asked.get("hardware"))), dotted=dotted)


def _refuse_another_loop(continued: list[config_layers.Layer], flags: config_layers.Layer) -> None:
    """Refuse a controller for a run of plain LoRA that continues: what asks for one would be without use."""
    plain = any(run.values.get("control.controller") == "none" for run in continued)
    values = {key: value for key, value in flags.values.items() if config_layers.has_value(value)}
    for key in values if plain and values.get("control.controller") != "none" else ():
        if asks_for_control([key]):
            flag = NAMES.get(key, f"--{key}")
            why = "the run that continues is plain LoRA, and stays so; leave it out, or start another run"
            raise UserError(f"{flag}: {why}")


def _without_another_loop(file: config_layers.Layer, flags: config_layers.Layer) -> config_layers.Layer:
    """The file of a run less what controlled it, where flags ask for another controller: its bounds and ticks were made
    for something else. A file that somebody wrote keeps what it has."""
    asked = {key for key, value in flags.values.items() if config_layers.has_value(value)}
    controller = file.values.get("control.controller")
    budget = "drift.max_drift" in asked and file.values.get("drift.max_drift") is None
    one = controller == "none" and asks_for_control(asked) and flags.values.get("control.controller") != "none"
    if not (budget or one) or not file.values.keys() >= OF_A_RUN:
        return file
    log.warning("%s: what controlled that run is left out, for the flags ask for another controller", file.origin)
    return replace(file, values={
        key: value for key, value in file.values.items()
        if not key.startswith("control.") and key != "run.stop_at_equilibrium"
    })  # fmt: skip


def _without_another_budgets_bounds(file: config_layers.Layer, flags: config_layers.Layer) -> config_layers.Layer:
    """The file of a run less the bounds of lambda, where flags ask for another budget: they follow from that."""
    given = [layer.values.get("drift.max_drift") for layer in (file, flags)]
    if not all(map(config_layers.has_value, given)) or not file.values.keys() >= OF_A_RUN:
        return file
    if len({settings.DriftConfig(max_drift=each).max_drift for each in given}) == 1:
        return file
    bounds = ("control.lambda_init", "control.lambda_min", "control.lambda_max")
    log.warning("%s: its bounds of lambda are left out, for the flags ask for another --max-drift", file.origin)
    return replace(file, values={key: value for key, value in file.values.items() if key not in bounds})


def _preset(named: list[str]) -> str | None:
    if len(named) > 1:
        raise UserError(f"--hardware: given {len(named)} times; one preset fills a layer")
    if named == [""]:
        raise UserError(f"--hardware: expected a name; choose {presets.AUTO}, {', '.join(presets.PRESETS)}")
    return named[0] if named else None


def _value(key: str, value: Any) -> Any:
    """What a flag says, as its setting has it."""
    if key == "data.system":
        settings.check_system(value)  # by default it is empty, and that is not given
    if key == "trainer.precision":
        return PRECISIONS.get(value, value)
    if switches(key):
        return SWITCH_OR_AUTO.get(value, value)
    if value is True and (number := NUMBER_OF_ITS_OWN.get(NAMES[key])):
        return number
    takes_one = isinstance(value, list) and len(value) == 1 and str in get_args(HINTS[key])
    if key in _NAMES_OF_TEXTS and not _is_itself(value[0] if takes_one else value):
        return settings.listed(value)
    return value[0] if takes_one else value


_NAMES_OF_TEXTS = (*(f"data.{name}" for name in settings.TEXTS), "drift.general_data")


def _is_itself(value: Any) -> bool:
    """Whether a name says the same in YAML, in which #general is a comment and [draft] a list."""
    try:
        return not isinstance(value, str) or parse(value) == value
    except ValueError:
        return False


def _refuse_unknown(parser: Parser, rest: list[str]) -> None:
    """Refuse what argparse did not know."""
    flags = [name for action in parser._actions for name in action.option_strings if "." not in name]
    for argument, following in itertools.zip_longest(rest, rest[1:]):
        name, _, value = argument.partition("=")
        if not name.startswith("--"):
            raise UserError(f"{argument!r} belongs to no flag; {_as_a_flag(argument, flags)}")
        if "." not in name:
            raise UserError(f"unknown flag {name}: {instead_of(name, flags)}")
        config_layers.check_key(name.removeprefix("--"), config_layers.A_FLAG, value=value or following or "")


def instead_of(name: str, flags: Sequence[str]) -> str:
    """What to give in place of a flag that is none of ``flags``: as another tool's, or by what it looks like."""
    close = difflib.get_close_matches(name, flags, 1, _ALIKE)
    meant = f"did you mean {close[0]}? see --help-all" if close else "see --help-all"
    return other_tools.answer(name) or f"{meant} for all of them"


def _as_a_flag(argument: str, flags: list[str]) -> str:
    """A hint for ``hardware=gpu_4090`` and ``training.batch_size=20``, as other tools have it."""
    setting, equals, value = argument.partition("=")
    name = "--" + re.split(r"[./]", setting)[-1].replace("_", "-")
    if not equals:
        return "see --help"
    return f"did you mean {name} {value}? see --help" if name in flags else instead_of(name, flags)


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
