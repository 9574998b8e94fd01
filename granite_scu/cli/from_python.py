"""The way in from Python, for notebooks and scripts: ``prepare`` and ``train`` as the command has them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from granite_scu.cli import exit_codes, script_flags, validate
from granite_scu.cli.console import make_console, quiet
from granite_scu.cli.train import carry_out, own_code
from granite_scu.config.errors import UserError
from granite_scu.config.flags import KEYS, in_python, plain
from granite_scu.config.request import Request
from granite_scu.storage.run_folder import ANSWERS, METRICS, TRAINING_CONFIG, read_if_there, read_json
from granite_scu.training import recipe
from granite_scu.training.output_folder import is_main, logged_from_here
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.viz.run_folder import read_validations
from granite_scu.viz.what_now import lower_rate, verdict

RESUME = 'resume_from_checkpoint="last"'
"""The argument of ``prepare`` that continues a run."""

_QUESTIONS = ("dry_run", "check_requirements", "print_config", "json")
"""Flags that ask something in place of a run."""


@dataclass(frozen=True)
class Result:
    """What a run left. Figures are bits per token, None where nothing was held out.

    Attributes:
        adapter: the run folder, with the adapter that validated best; plain PEFT loads it.
        report: the page about the run.
        verdict: what was learned, what was lost, and what to do about it.
        steps: optimizer steps.
        base_bpt: of the base model on the held-out data.
        test_bpt: of the adapter on the same.
        validation_bpt: the best of the run.
        answers: for chats, a dictionary for each held-out question, with the answers of base and adapter.
        right: how many of these the adapter answered as expected; None where none was asked.
        lost: how many general answers were right before the run and are wrong after it; None where none was asked.
        summary: everything that ``scu_metrics.json`` holds.
    """

    adapter: Path
    report: Path
    verdict: str
    steps: int
    base_bpt: float | None
    test_bpt: float | None
    validation_bpt: float | None
    right: int | None
    lost: int | None
    answers: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, folder: Path) -> "Result":
        """The result that a finished run's folder holds."""
        summary = read_json(folder / METRICS)
        validations = read_validations(folder, summary)
        answers = read_if_there(folder / ANSWERS).get("answers", [])
        return cls(
            adapter=folder,
            report=folder / "report.html",
            verdict=str(verdict(summary, lower_rate(read_json(folder / TRAINING_CONFIG)), validations=validations)),
            steps=summary["steps"],
            base_bpt=summary["base_test_bpt"],
            test_bpt=summary["adapter_test_bpt"],
            validation_bpt=summary["best_val_bpt"],
            right=summary.get("answers", {}).get("right"),
            lost=summary.get("elsewhere", {}).get("became_wrong"),
            answers=answers,
            summary=summary,
        )


def prepare(request: Request | None = None, console: Console | None = None, **flags: Any) -> PreparedRun:
    """Refuse what can be refused without loading a model; returns the run, for ``train``.

    Args:
        request: what is asked for, in place of flags.
        console: where progress goes; by default to the notebook or to standard output.
        flags: those of ``granite-scu train``, with underscores: ``prepare(data_dir="chats.jsonl", num_epochs=3)``. True
            and False stand for a switch and its ``--no-`` form, a list for several values, None for a flag left out.

    Raises:
        UserError: the request cannot be met on this machine, or its data is wrong.
    """
    if request is None:
        request = _request(flags)
    elif flags:
        raise UserError(f"{', '.join(flags)}: give flags or a request, not both")
    elif not isinstance(request, Request):
        raise UserError('prepare(...): takes its settings by name, such as prepare(data_dir="chats.jsonl")')
    else:
        validate.check_what_is_there(request, writes=is_main())
    console = console or make_console()
    quiet(console)
    exit_codes.silence_rename_warnings()
    return recipe.prepare(request, console)


def train(run: PreparedRun) -> Result | None:
    """Train, score, and leave in the run folder what the command leaves there.

    Args:
        run: the run, as ``prepare`` returns it.

    Returns:
        What came of it; None in all but the first of several processes.

    Raises:
        UserError: it is no prepared run.
        RunFailed: the run ended before its end.
        Stopped: it was interrupted; everything up to the last step is saved.
    """
    if not isinstance(run, PreparedRun):
        raise UserError('train(...): takes what prepare returns, as train(prepare(data_dir="chats.jsonl"))')
    with logged_from_here():
        own = "".join(f', {flag}="{value}"' for flag, value in own_code(run.request).items())
        folder = json.dumps(str(run.folder.path), ensure_ascii=False)  # on Windows it has backslashes
        carry_out(run, RESUME, f"prepare(output_dir={folder}, {RESUME}{own})")
    return Result.of(run.folder.path) if is_main() else None


def _request(flags: dict[str, Any]) -> Request:
    asked = {_place(name): plain(name, value) for name, value in flags.items() if value is not None}
    layers = script_flags.layers_of(asked)
    with layers.named():
        validate.refuse(layers)
        return layers.request()


def _place(name: str) -> str:
    """Where ``script_flags.layers_of`` looks for an argument."""
    flag = f"--{name.replace('_', '-')}"
    if name in _QUESTIONS:
        raise UserError(f"{name}: is a question to the command, granite-scu; leave it out")
    if "." in name:
        return f"--{name}"
    if flag not in KEYS and name not in script_flags.LAYERS:
        known = [*KEYS, *(f"--{each.replace('_', '-')}" for each in script_flags.LAYERS)]
        instead = script_flags.instead_of(flag, known).replace("--help-all", "granite-scu train --help-all")
        raise UserError(f"prepare({name}=...): no such argument: {in_python(instead)}")
    return KEYS.get(flag, name)
