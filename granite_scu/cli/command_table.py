"""The commands of ``granite-scu``: where each is, and what it does."""

from typing import NamedTuple

from granite_scu.cli.exit_codes import HOW_TO_CONTINUE, NOTHING_WRITTEN
from granite_scu.export.publish import AGAIN


class Command(NamedTuple):
    """A command.

    Attributes:
        module: has ``add_arguments(parser)`` and ``run(options) -> exit code``, and perhaps ``EXAMPLES``; or, where it
            reads its arguments itself, ``run(name, arguments) -> exit code`` and ``build_parser(name)``. Importing it
            takes no second, so that ``--help`` does not either.
        meaning: what it does, in one line.
        how_to_continue: how to continue after Ctrl-C.
    """

    module: str
    meaning: str
    how_to_continue: str = NOTHING_WRITTEN


_CLI = "granite_scu.cli"
_RUN = f"{_CLI}.run_commands"

COMMANDS = {
    "before a run": {
        "check": Command(_RUN, "report what a run needs and what this machine lacks"),
        "hardware": Command(f"{_CLI}.hardware", "show what this machine is, and which settings suit it"),
        "plan": Command(_RUN, "show what a run would do, its time and its memory"),
        "data": Command(f"{_CLI}.inspect_data", "show what a run would train on: counts, lengths, samples"),
    },
    "training": {
        "train": Command(_RUN, "fine-tune a model on your text", HOW_TO_CONTINUE),
        "fit": Command(_RUN, "the same from YAML files and dotted keys (LightningCLI)", HOW_TO_CONTINUE),
    },
    "after a run": {
        "runs": Command(f"{_CLI}.list_runs", "list the runs in a folder, and compare them"),
        "report": Command(f"{_CLI}.report", "write a run's report, one page to look at in a browser"),
        "plot": Command(f"{_CLI}.plot", "draw one run, or several side by side"),
        "eval": Command(f"{_CLI}.eval_bpt", "score base model and adapters on held-out text"),
        "generate": Command(f"{_CLI}.generate", "let base model and adapter continue a text, side by side"),
        "merge": Command(f"{_CLI}.merge", "write base model and adapter as one plain model"),
        "publish": Command(f"{_CLI}.push_to_hf", "publish the adapter on the Hugging Face hub", AGAIN),
        "validate": Command(_RUN, "score the saved adapter on the validation split"),
        "test": Command(_RUN, "score the saved adapter on the test split"),
    },
}
"""By group, in the order of the overview."""

BY_NAME = {name: command for group in COMMANDS.values() for name, command in group.items()}
