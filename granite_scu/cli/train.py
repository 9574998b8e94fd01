"""The commands ``fit``, ``validate``, ``test`` and ``identify``, and what is asked instead of them."""

import json
import sys

from granite_scu.cli import config_layers as layers
from granite_scu.cli import guard, requirements
from granite_scu.cli.console import make_console, print_facts, print_summary, quiet
from granite_scu.cli.request_parser import parse
from granite_scu.errors import UserError
from granite_scu.evaluation.split_score import score_split
from granite_scu.experiments.identification import step_test as identify
from granite_scu.hardware import presets
from granite_scu.training import preflight as planning
from granite_scu.training.recipe import Run

SCORED = {"validate": "validation", "test": "test"}
"""Commands that print a score, and the split that they score."""


def main(argv: list[str] | None = None) -> int:
    """The commands that train and score; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    return guard.guarded(lambda: run(layers.put_first(arguments)), debug)


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
    job = Run(cli.request, console)
    if cli.subcommand == "fit":
        summary = job.fit()
        if summary:
            print_summary(summary, job.folder.path, console)
        return 0
    console.print_json(data=score_split(job, SCORED[cli.subcommand]))
    return 0


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
        job = Run(cli.request, console)
        job.check_folder()
        job.folder.unlock()
        facts = planning.describe(job)
    print(json.dumps(facts, indent=2)) if as_json else print_facts("plan (nothing is trained)", facts, console)
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
    checks = requirements.with_the_run(checks, request)
    requirements.print_requirements(checks, as_json)
    return 0 if requirements.can_start(checks) else 1
