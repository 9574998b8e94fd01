"""The commands ``fit``, ``validate`` and ``test``, and what is asked instead of them."""

import json
import logging
import shlex
import sys
from dataclasses import replace

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from granite_scu.cli import config_layers, requirements
from granite_scu.cli.config_layers import Layers
from granite_scu.cli.console import make_console, print_facts, quiet
from granite_scu.cli.robust_stdout import robust_stdout
from granite_scu.cli.summary import print_summary
from granite_scu.config import settings as config
from granite_scu.config.errors import UserError
from granite_scu.config.launcher import launched_processes
from granite_scu.config.progress import say
from granite_scu.config.request import Request, add_settings, nested
from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.data.tokens import templates
from granite_scu.evaluation.bpt.texts import documents_of
from granite_scu.evaluation.score import score_split
from granite_scu.export.present import write_report_on_exit
from granite_scu.hardware import presets
from granite_scu.hardware.machine import resolve_request
from granite_scu.model.loading import load_tokenizer
from granite_scu.model.mamba2 import kernels
from granite_scu.storage.run_folder import WEIGHTS, RunFolder
from granite_scu.training import plan, recipe
from granite_scu.training.callbacks.samples import Samples
from granite_scu.training.output_folder import is_main, logged_from_here
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.resume import AS_BEFORE

log = logging.getLogger(__name__)

SCORED = {"validate": "validation", "test": "test"}
"""Commands that print a score, and the split that they score."""

RESUME = "--resume-from-checkpoint last"
"""What has a command continue a run."""


class GraniteCLI(LightningCLI):
    """Makes ``request`` of what ``fit``, ``validate`` or ``test`` asks for; builds nothing.

    Args:
        layers: what is asked for, its preset among the layers.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        super().__init__(
            run=False,  # the caller runs the request
            save_config_callback=None,
            seed_everything_default=config.SEED,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=nested(layers.values),
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The dataclasses of ``config``, that of the Trainer's settings among them."""
        add_settings(parser)

    def instantiate_classes(self) -> None:
        """Only the dataclasses: the model and the trainer depend on the data, which is read later."""
        self.config.pop("config")  # LightningCLI's own; the files are among the layers
        self.request = Request.from_parsed(self.config, self.layers.preset, self.layers.given)


def parse(layers: Layers) -> GraniteCLI:
    """What LightningCLI makes of a command line, which ``layers.request`` has been made of already."""
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns when both are there
    try:
        return GraniteCLI(layers)
    finally:
        sys.argv = argv


def run(layers: Layers, command: str = "fit", prints: bool = False) -> int:
    """Carry out a command; returns the exit code.

    Args:
        layers: what is asked for.
        command: fit, validate or test.
        prints: whether the configuration is printed, and nothing done.
    """
    layers = layers.with_preset()
    request = parse(layers).request if layers.dotted else layers.request()
    if prints:  # it feeds straight back, with what each value is from
        print(config_layers.annotated(request.yaml, layers.origins, AS_BEFORE), end="")
        return 0
    console = make_console()
    # Of the commands that score, JSON goes to stdout, and nothing else.
    quiet(make_console(stderr=True) if command in SCORED else console)
    if command == "fit":
        with robust_stdout(), logged_from_here():
            return fit(request, console)
    found = _score(request, SCORED[command])
    if not console.quiet:  # of several processes one speaks
        print(json.dumps(found, indent=2))
    return 0


def fit(request: Request, console: Console) -> int:
    """Train, and leave everything to look at in the run folder."""
    run = recipe.prepare(request, console)
    if summary := carry_out(run, RESUME, to_continue(run)):
        print_summary(summary, run.folder.path, console, bool(run.data.chats))
    return 0


def to_continue(run: PreparedRun) -> str:
    """The command that continues a run of this process; a launcher's own words are not known.

    What it does not name is the run's, but for code of one's own.
    """
    if launched_processes() is not None:
        return f"the same command and {RESUME}"
    own = "".join(f" --{flag} {value}" for flag, value in own_code(run.request).items())
    return f"granite-scu train --output-dir {shlex.quote(str(run.folder.path))} {RESUME}{own}"


def own_code(request: Request) -> dict[str, str]:
    """What a run is continued with besides, by flag: a run folder may name no code, be it controller or callbacks."""
    law, given = request.control.controller, (request.trainer.callbacks, request.trainer.logger)
    of_a_file = any(isinstance(each, list | dict) for each in given)
    return ({"controller": law} if ":" in law else {}) | ({"config": "FILE"} if of_a_file else {})


def carry_out(run: PreparedRun, resume: str, resume_command: str) -> dict:
    """Say what is planned, train, and write what people look at; returns the summary, empty but in the first process.

    Args:
        run: the run.
        resume: what is to be added to the command for it to continue.
        resume_command: the whole command that continues the run.
    """
    for line in plan.opening(plan.facts(run), resume) if is_main() else []:
        say(line, run.console)
    with write_report_on_exit(run.folder):
        return recipe.train(run, questions=Samples, resume_command=resume_command)


def _score(request: Request, split: str) -> dict:
    """Bits per token of a split under the base model and under the run folder's adapter."""
    folder = RunFolder(request.run.output_dir).path
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"--run.output_dir {folder}: holds no {WEIGHTS}; run fit first")
    machine = resolve_request(request)
    kernels.check(machine.kernels, machine.accelerator)
    data = recipe.build_data(request)
    if not data.holds_out(split):
        raise UserError(f"--held-out-share 0: nothing is held out for {split}; name a file by --{split}-data")
    data.prepare(templates.of_data(load_tokenizer(request.base.name), request.data))
    if split not in request.data.files and documents_of(folder) != json.loads("".join(data.record())):
        raise UserError(f"{folder}: its text has changed since, and what it held out is not known; score it with eval")
    machine.claim(request.run.memory_fraction)
    batches = data.val_dataloader() if split == "validation" else data.test_dataloader()
    return score_split(folder, request.base, machine, batches, split)


def dry_run(layers: Layers, as_json: bool) -> int:
    """Resolve everything, load the tokenizer and one batch, print the plan: of this machine, or of a preset's card."""
    console = make_console(stderr=as_json)
    request = layers.request()
    quiet(console)
    card = presets.absent(request.hardware, request.trainer.accelerator, request.run.gpus)
    if card and request.run.multi_gpu and request.run.gpus is None:
        log.warning("--multi-gpu: of a card that is not here it is not known how many; --gpus says it")
    tokenizer = _tokenizer_to_plan_with(request.base.name)
    facts = plan.look(recipe.prepare(request, console, card=card, tokenizer=tokenizer), here=card is None)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        rows = plan.describe(facts) | plan.details(facts)
        print_facts("plan (nothing is trained)", rows, console)
    return 0


def _tokenizer_to_plan_with(model: str) -> PreTrainedTokenizerBase:
    """The model's own; where that of the default model, of which all else is known, cannot be had, the embedded one."""
    try:
        return load_tokenizer(model)
    except UserError as error:
        if model != BaseConfig.name:
            raise
        log.warning(
            "%s; the plan counts tokens by the tokenizer of %s, which makes more of the same text",
            str(error).partition(";")[0],
            TINY_MODEL,
        )
        return load_tokenizer(TINY_MODEL)


def check_requirements(layers: Layers, as_json: bool) -> int:
    """Say what the described run needs and lacks; 0 when it can start, 1 when not."""
    try:
        layers = layers.with_preset()
        chosen = layers.preset
    except UserError:  # a lack like any other: the checks name it
        chosen = None if layers.asked_preset == presets.AUTO else layers.asked_preset
        layers = replace(layers, asked_preset=None)
    request = layers.request()
    checks = requirements.check_requirements(request, chosen)
    checks = requirements.with_the_run(checks, request)
    requirements.print_requirements(checks, as_json)
    return 0 if requirements.can_start(checks) else 1
