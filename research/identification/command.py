"""``python -m research.identification``: the keys of ``granite-scu fit``, and those of the step test."""

from dataclasses import fields

from granite_scu.cli import exit_codes, script_flags
from granite_scu.cli.argument_parser import Parser
from granite_scu.cli.console import make_console, quiet
from granite_scu.cli.robust_stdout import robust_stdout
from granite_scu.training.output_folder import logged_from_here
from research.identification import step_test
from research.identification.settings import StepTest

EXAMPLES = (
    "python -m research.identification --config demo --control.target_s 0.02 --run.output_dir runs/tune",
    "python -m research.identification --config runs/mine/config.yaml --control.target_s 0.1 --json",
)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m research.identification",
        usage="%(prog)s --config YAML [--group.key value] [--step_test.key value]",
        description="Step lambda in a real run, fit what S does, propose gains for the controller, and try them. Takes "
        "the keys of granite-scu fit. Exit code 1 where no gains can be proposed. A closed loop that is not as "
        'predicted is warned of, with exit code 0 and "as_predicted": false in the JSON.',
        examples=EXAMPLES,
    )
    kinds = {"ticks": int, "settle": int, "dwell": int, "verify": _switch}
    for field in fields(StepTest):
        parser.add_argument(f"--step_test.{field.name}", dest=field.name, type=kinds.get(field.name, float),
                            default=field.default, help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_debug()
    return parser


def _switch(word: str) -> bool:
    return {"true": True, "false": False}[word]


def main(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    return exit_codes.exit_code_of(lambda: _run(arguments), "--debug" in arguments)


def _run(arguments: list[str]) -> int:
    options, rest = build_parser().parse_known_args(arguments)
    asked = StepTest(**{field.name: getattr(options, field.name) for field in fields(StepTest)})
    layers, _ = script_flags.translate(rest, dotted=True)
    with layers.named():
        request, console = layers.request(), make_console(stderr=options.json)
        quiet(console)
        with robust_stdout(), logged_from_here():
            return step_test.identify(request, asked, console, options.json)
