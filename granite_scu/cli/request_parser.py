"""``python -m granite_scu fit|validate|test|identify --config FILE.yaml``: one configuration for every way in.

LightningCLI parses it (defaults < hardware preset < YAML files, layered < flags); ``run`` carries it out. The flags of
``scripts/train_granite_cuda.py`` arrive here too, translated by ``flags``.
"""

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

import jsonargparse
import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from granite_scu.cli import config_layers as layers
from granite_scu.cli import guard, requirements
from granite_scu.cli import main as commands
from granite_scu.config import flags
from granite_scu.config import settings as config
from granite_scu.config.request import Request
from granite_scu.control import CONTROLLERS
from granite_scu.errors import UserError
from granite_scu.evaluation.split_score import score_split
from granite_scu.experiments.identification import step_test as identify
from granite_scu.export.present import presented
from granite_scu.hardware import presets
from granite_scu.hardware.machine import resolve_request
from granite_scu.model.loading import load_tokenizer
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training import preflight as planning
from granite_scu.training import recipe
from granite_scu.training.callbacks.progress import LIVE

COMMANDS = ("fit", "validate", "test", "identify")
SCORED = {"validate": "validation", "test": "test"}
"""Commands that print a score, and the split that they score."""

ABOUT = {
    "prog": "granite-scu",
    "description": "Fine-tune a Granite model while a controller holds S at its target.",
    "epilog": commands.in_words(),
}

PIPE_WIDTH = 120
"""Columns where the output is no terminal, which has no width of its own."""


class Commands(L.Trainer):
    """Lightning's Trainer, with a method for each of our commands that Lightning has none for.

    LightningCLI makes a subcommand of a method of its trainer class: the docstring becomes the help, the signature the
    arguments. Declaring a method is the whole of its public interface for that; adding a parser by hand would need its
    private ones. Nothing here is ever called or built: ``run`` carries commands out.
    """

    def identify(self, step_test: config.IdentifyConfig = config.IdentifyConfig()) -> None:  # noqa: B008 (frozen)
        """Step lambda, fit a model of the plant to what S does, propose gains for the law, and try them.

        Exit code 1 where no gains can be proposed. A closed loop that is not as predicted is warned of, with exit code
        0 and "as_predicted": false in the JSON.
        """


class GraniteCLI(LightningCLI):
    """Parses a command into ``request``; builds nothing."""

    def __init__(self, arguments: list[str]) -> None:
        arguments, self.preset = layers.take_preset(arguments)
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            trainer_class=Commands,
            save_config_callback=None,
            seed_everything_default=config.SEED,
            parser_kwargs={**strict, **ABOUT, **{name: dict(strict) for name in COMMANDS}},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=arguments,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What there is to do. Lightning's own arguments of these are all ours to set."""
        ours = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
        return {name: ours | {"ckpt_path", "verbose", "weights_only"} for name in COMMANDS}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The Trainer and the dataclasses of ``config``."""
        parser.add_lightning_class_args(L.Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in config.TRAINER_DEFAULTS.items()})
        for group, kind in flags.GROUPS.items():
            parser.add_class_arguments(kind, group)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Lightning's, and a check of the seed, which it would use at once."""
        super().parse_arguments(parser, args)
        seed = self.config[self.config["subcommand"]]["seed_everything"]
        if seed is None or (seed is not True and not 0 <= seed < 2**32):  # true draws one
            raise UserError(f"--seed {seed}: must be a whole number from 0 to {2**32 - 1}")

    def instantiate_classes(self) -> None:
        """Only the dataclasses: the model and the trainer depend on the data, which is read later."""
        parser, given = self._parser(self.subcommand), self.config[self.subcommand]
        _check_values(given)
        if given["lora"]["adapter"] is None:  # what nulls stand for; an adapter has its own
            lora = config.LoraConfig(**given["lora"].as_dict()).resolved()
            given["lora"]["rank"], given["lora"]["alpha"] = lora.rank, lora.alpha
        built = parser.instantiate_classes(given)
        self.request = Request(
            **{group: built[group] for group in flags.GROUPS},
            trainer=_with_whole_counts(built["trainer"].as_dict()),
            seed=given["seed_everything"],
            yaml=parser.dump(given, skip_none=False),
            hardware=self.preset,
        )
        self.step_test: config.IdentifyConfig | None = built.get("step_test")

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing: the caller runs the request."""


def _check_values(given: jsonargparse.Namespace) -> None:
    """Refuse what jsonargparse lets through: a group that is no mapping, and null for a setting that has no such value.

    Raises:
        UserError: either of them.
    """
    kinds: dict[str, type] = {"trainer": object, "step_test": config.IdentifyConfig, **flags.GROUPS}
    for group in (group for group in kinds if group in given):
        if not isinstance(given[group], Mapping | jsonargparse.Namespace):
            raise UserError(f"{group}: must be a mapping of settings, and is {given[group]!r}")
        for name, hint in get_type_hints(kinds[group]).items():
            if given[group][name] is None and NoneType not in get_args(hint):
                default = kinds[group].__dataclass_fields__[name].default
                raise UserError(f"{group}.{name} null: must have a value; leave it out for the default, {default}")


def parse(arguments: list[str]) -> GraniteCLI:
    """Parse a command line of the CLI.

    Raises:
        UserError: anything wrong with it, in one line.
    """
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns when both are there
    try:
        layers.check_files(arguments)
        return GraniteCLI(arguments)
    except jsonargparse.ArgumentError as error:
        raise UserError(_in_one_line(str(error))) from error
    except (TypeError, UnicodeDecodeError) as error:  # what jsonargparse lets through of a group's own file
        raise UserError(
            f"a file given for a group, as --data FILE, is no YAML in UTF-8, or no mapping ({error})"
        ) from error
    finally:
        sys.argv = argv


def _with_whole_counts(trainer: dict[str, Any]) -> dict[str, Any]:
    """Trainer settings with 10 for 10.0, which Lightning would take for a fraction.

    Which of the two jsonargparse makes of "10" hangs on the order of imports: typing caches ``int | float`` and
    ``float | int`` as one. Only the limit on validation is never a fraction, so that 1.0 means 1 there alone.
    """

    def whole(name: str, value: Any) -> bool:
        return isinstance(value, float) and value.is_integer() and (value > 1 or name == "limit_val_batches")

    return {name: int(value) if whole(name, value) else value for name, value in trainer.items()}


def _in_one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if hint := _dotted(message):
        return f"{' '.join(lines)[:400]}; {hint}"
    known = f"; there are {', '.join(CONTROLLERS)}" if '"control.controller"' in message else ""
    return f"{' '.join(lines)[:400]}{known}; see --help for every key" if lines else "wrong arguments; see --help"


def _dotted(message: str) -> str:
    """What the script's flags in a refusal are called here; empty where there are none."""
    if not message.startswith("unrecognized arguments"):
        return ""
    keys = {flag.name: flag.key for section in flags.SECTIONS.values() for flag in section}
    given = [word.partition("=")[0].replace("_", "-") for word in message.split()]
    return ", ".join(f"{word} is --{keys[word]} here" for word in given if word in keys)


def make_console(stderr: bool = False) -> Console:
    """Where a run speaks; of several processes only the first does."""
    console = Console(stderr=stderr, quiet=rank_zero_only.rank != 0)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def quiet(console: Console) -> None:
    """Our own log lines on the console; of the libraries only warnings, and not those that do not apply here."""
    handler = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None
    )
    handler.addFilter(lambda record: not (console.is_terminal and getattr(record, LIVE, False)))
    ours = logging.getLogger("granite_scu")
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [handler]
    ours.propagate = False
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def run(arguments: list[str]) -> int:
    """Carry out a command of the CLI; returns the exit code."""
    with layers.naming_files(arguments):
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    if "--print_config" in arguments:
        return print_config([argument for argument in arguments if argument != "--print_config"])
    as_json = arguments[:1] == ["identify"] and "--json" in arguments
    cli = parse([argument for argument in arguments if not (as_json and argument == "--json")])
    console = make_console(stderr=as_json)
    answers = as_json or cli.subcommand in SCORED
    quiet(make_console(stderr=True) if answers else console)  # what goes to stdout is JSON then, and nothing else
    if cli.step_test is not None:
        return identify.identify(cli.request, cli.step_test, console, as_json)
    if cli.subcommand == "fit":
        return fit(cli.request, console)
    console.print_json(data=_score(cli.request, SCORED[cli.subcommand]))
    return 0


def fit(request: Request, console: Console) -> int:
    """Train, and leave everything to look at in the run folder."""
    run = recipe.prepare(request, console)
    with presented(run.folder):
        summary = recipe.train(run)
    if summary:
        print_summary(summary, run.folder.path, console)
    return 0


def _score(request: Request, split: str) -> dict:
    """Bits per token of a split under the base model and under the run folder's adapter."""
    machine = resolve_request(request)
    data = recipe.build_data(request)
    data.prepare(load_tokenizer(request.base.name))
    machine.claim(request.run.memory_fraction)
    loader = {"validation": data.val_dataloader, "test": data.test_dataloader}[split]()
    return score_split(RunFolder(request.run.output_dir).path, request.base, machine, loader, split)


def print_config(arguments: list[str]) -> int:
    """Print the resolved configuration, which feeds straight back, with what each value is from."""
    request = parse(arguments).request
    print(layers.annotated(request.yaml, layers.take_preset(arguments)[0]), end="")
    return 0


def dry_run(arguments: list[str], as_json: bool) -> int:
    """Resolve everything, load the tokenizer and one batch, print the plan."""
    console = make_console()
    with layers.naming_files(arguments):
        cli = parse(arguments)
        quiet(make_console(stderr=True) if as_json else console)
        facts = planning.describe(recipe.prepare(cli.request, console))
    print(json.dumps(facts, indent=2)) if as_json else _print_facts("plan (nothing is trained)", facts, console)
    return 0


def check_requirements(arguments: list[str], as_json: bool) -> int:
    """Say what the described run needs and lacks; 0 when it can start, 1 when not."""
    asked = layers.asked_preset(arguments)
    try:
        arguments, chosen = layers.take_preset(arguments)
    except UserError:  # a lack like any other: the checks name it
        arguments, chosen = layers.without_preset(arguments), None if asked == presets.AUTO else asked
    with layers.naming_files(arguments):
        request = parse(arguments).request
    apart = request.data.isolate_documents and request.base.attention == "auto"  # as the run itself takes it
    attention = "sdpa" if apart else request.base.attention
    checks = requirements.check_requirements(
        requirements.Wanted(
            accelerator=request.trainer["accelerator"],
            cpu_is_meant=request.trainer["accelerator"] == "cpu",
            quantize_4bit=request.base.quantize_4bit,
            attention=attention,
            kernels=request.base.kernels,
            deterministic=bool(request.trainer["deterministic"]),
            precision=request.trainer["precision"],
            tf32=request.run.tf32,
            model=request.base.name,
            data_path=request.data.path,
            output_dir=request.run.output_dir,
            multi_gpu=request.run.multi_gpu,
            hardware=chosen,
        )
    )
    checks = planning.with_the_run(checks, request)
    requirements.print_requirements(checks, as_json)
    return 0 if requirements.can_start(checks) else 1


def print_summary(summary: dict, folder: Any, console: Console) -> None:
    """The short table at the end of a run."""
    gain = summary["base_test_bpt"] - summary["final_test_bpt"]
    best = f"{summary['best_val_bpt']:.4f} at step {summary['best_val_step']}"
    facts = {
        "held-out documents, base": f"{summary['base_test_bpt']:.4f} bits/token",
        **_about_start(summary),
        "held-out documents, adapter": f"{summary['final_test_bpt']:.4f} bits/token ({gain:+.4f} saved)",
        "validation, final": f"{summary['final_val_bpt']:.4f} bits/token (best {best})",
        "better adapter": better_in_words(summary),
        "S": "not measured" if summary["s_ema"] is None else f"{summary['s_ema']:.3%}",
        **_about_setpoint(summary),
        "lambda": f"{summary['lambda']:.4g}",
        **_about_held_ticks(summary["control"]["held_ticks"]),
        "training": f"{summary['steps']} steps, {summary['tokens']:,} tokens, {summary['train_time_s']:.0f} s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s{_share_of_peak(summary)}",
        "stopped by": f"{summary['stopped']['reason']} at step {summary['stopped']['step']}",
        "files": str(folder),
    }
    _print_facts("done", facts, console)


def better_in_words(summary: dict) -> str:
    """Which adapter of a run validated better, and by how much."""
    if summary["better"]["adapter"] == "final":
        return "the final one, at the top of the folder; none validated better"
    return f"best/, by {summary['better']['by_bpt']:.4f} bits/token on validation"


def _share_of_peak(summary: dict) -> str:
    return f", mfu {summary['mfu']:.1%} of {summary['peak_tflops']:.3g} TFLOP/s" if summary.get("mfu") else ""


def _about_start(summary: dict) -> dict[str, str]:
    start = summary.get("start_test_bpt")
    return {} if start is None else {"held-out documents, adapter at the start": f"{start:.4f} bits/token"}


def _about_setpoint(summary: dict) -> dict[str, str]:
    if summary["s_target"] is None:
        return {}
    return {"S*": f"{summary['s_target']:.3%}", "S* can be reached": _reachability(summary)}


def _about_held_ticks(count: int) -> dict[str, str]:
    return {"held ticks": f"{count}, without a usable measurement"} if count else {}


def _reachability(summary: dict) -> str:
    found = summary["reachability"]
    if found is None:
        return "not judged: lambda is not asked to hold S at one setpoint throughout"
    if found["verdict"] == "reached":
        first = f"yes: at step {found['reached_at_step']} S was within {found['band']:.0%} of it"
        share = summary["control"]["in_band"]
        return first if share is None else f"{first}, and so at {share:.0%} of the ticks from there on"
    if found["verdict"] == "not shown":
        ended = "could not be measured" if summary["s_ema"] is None else f"ended at {summary['s_ema']:.3%}"
        never = f"at no usable tick was S within {found['band']:.0%} of it, and it {ended}"
        return f"not shown: {never}; nothing shows that it cannot"
    no = "no" if found["reached_at_step"] is None else f"no more, though S was there at step {found['reached_at_step']}"
    return f"{no}, {found['verdict']} since step {found['since_step']}: {found['advice']}"


def _print_facts(title: str, facts: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text("none" if value is None else str(value)))  # a path is no markup
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """The commands that train and score; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    return guard.guarded(lambda: run(layers.put_first(arguments)), debug)
