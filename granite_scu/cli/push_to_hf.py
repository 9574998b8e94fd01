"""``granite-scu publish``, also ``tools/push_to_hf.py``: from flags to a published run."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from rich.console import Console
from rich.table import Table

from granite_scu.cli.argument_parser import path
from granite_scu.config.errors import UserError
from granite_scu.export.publish import hub, selection
from granite_scu.storage.run_folder import TRAINING_CONFIG, read_json
from granite_scu.storage.working_folder import found_from_here

HEAD_ENDS = "## Control"
"""The heading at which a dry run stops showing the card: metadata and results are above it."""

ABOUT = (
    "It goes there in one commit, with a model card of what was measured. The token is that of HF_TOKEN or of "
    "`hf auth login`; it is never asked for, printed or stored. Only adapter, adapter_config.json, tokenizer, card, "
    "control.png and .svg and the scu_*.json are uploaded; --dry-run lists them."
)

EXAMPLES = (
    "runs/mine --repo-id me/my-adapter --dry-run",
    "runs/mine --repo-id me/my-adapter --private",
    "runs/mine --repo-id me/my-adapter --revision v2 --yes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add = parser.add_argument
    add("run", metavar="RUN", type=path, help="folder of a finished run")
    add("--repo-id", required=True, metavar="OWNER/NAME", help="repository on the hub; made when it is missing")
    add("--private", action="store_true", help="a new repository that only its owner sees; refuses a public one")
    add("--revision", metavar="BRANCH", help="branch to commit to, made when it is missing (default: main)")
    add("--base-model-id", metavar="OWNER/NAME", help="the base model on the hub, where a local folder was trained")
    add(
        "--license",
        metavar="ID",
        help="of the adapter, as the hub names it (default: that of a Granite base, apache-2.0)",
    )
    add("--dry-run", action="store_true", help="check, list what would be uploaded, show the card's head; no network")
    add("--yes", action="store_true", help="publish for everybody without asking")
    add("--token", "--hf-token", "--api-key", nargs="*", action=_NoToken, help=argparse.SUPPRESS)


class _NoToken(argparse.Action):
    """Refuses a token on the command line."""

    def __call__(self, *_: Any) -> None:
        raise UserError(
            "--token: there is none, since others see a command line and the shell keeps it; "
            "log in with `hf auth login`, or set HF_TOKEN"
        )


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code: 1 for what a second run may complete."""
    _check(options)
    console = Console()
    publication = selection.prepare(
        options.run, options.repo_id, options.revision, options.base_model_id, options.license
    )
    _print_plan(options, publication, console)
    _compare_base(options.run)
    if options.dry_run:
        _print_head(publication.card, console)
        return 0
    if not (options.yes or options.private or sys.stdin.isatty()):
        raise UserError("--yes: needed to publish for everybody where nobody can be asked; or make it --private")
    url, private = hub.publish(
        publication.files,
        options.repo_id,
        options.revision,
        options.private,
        publication.base,
        hub.find_token(),
        lambda question: options.yes or _agrees(question),
        console,
    )
    console.print(f"{'private' if private else 'public'}: {url}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _agrees(question: str) -> bool:
    """Whether the answer is yes; an end of input is none."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _compare_base(run: Path) -> None:
    """Warn where the base model, as it is on this machine, has other weights than in training."""
    from granite_scu.model import base_digest  # late: transformers

    training = read_json(run / TRAINING_CONFIG)
    base_digest.check(training, str(run), found_from_here(training["base"]["name"], run), refuse=False)


def _check(options: argparse.Namespace) -> None:
    """Refuse names that the hub does not know. Raises UserError."""
    for flag, value in (("--repo-id", options.repo_id), ("--base-model-id", options.base_model_id)):
        if value is not None:
            _check_id(flag, value)
    if options.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", options.license):
        raise UserError(f"--license {options.license}: not a licence of the hub; they are written as apache-2.0 or mit")
    if options.revision is not None and not re.fullmatch(r"[\w][\w./-]*", options.revision):
        raise UserError(f"--revision {options.revision}: not the name of a branch")


def _check_id(flag: str, value: str) -> None:
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise UserError(f"{flag} {value}: not a name on the hub ({error})") from error
    if value.count("/") != 1:
        raise UserError(f"{flag} {value}: not owner/name")


def _print_plan(options: argparse.Namespace, publication: selection.Publication, console: Console) -> None:
    counts = publication.counts
    size = sum(map(len, publication.files.values()))
    console.print(f"{options.run} → {options.repo_id}", highlight=False, markup=False, soft_wrap=True)
    table = Table()
    table.add_column("file")
    table.add_column("bytes", justify="right")
    for name, content in publication.files.items():
        table.add_row(name, f"{len(content):,}")
    table.add_row("together", f"{size:,}", style="bold")
    console.print(table)
    lines = [
        f"adapter: {counts['layers']} layers, {counts['parameters']:,} parameters, all finite",
        f"base model: {publication.base}",
        f"stays here: {', '.join(publication.left_out) or 'nothing'}",
        *(f"note: {note}" for note in publication.notes),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_head(card: str, console: Console) -> None:
    head, _, rest = card.partition(HEAD_ENDS)
    text = f"\nREADME.md\n\n{head}[{rest.count(chr(10)) + 1} more lines]"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
