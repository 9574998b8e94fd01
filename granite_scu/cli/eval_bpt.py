"""``granite-scu eval``, also ``scripts/eval_bpt.py``: bits per token of base model and adapters on the same text."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from granite_scu.cli import script_flags, validate
from granite_scu.cli.argument_parser import path
from granite_scu.cli.console import make_console, quiet
from granite_scu.config.errors import UserError
from granite_scu.config.flags import FLAGS, PRECISIONS
from granite_scu.config.settings import DataConfig, RunConfig
from granite_scu.evaluation.bpt.subjects import identify
from granite_scu.storage.run_folder import EVALUATION, RunFolder, as_json, require_writable_file

if TYPE_CHECKING:
    from granite_scu.evaluation.bpt.subjects import Subject

EXAMPLES = (
    "runs/mine",
    "runs/mine runs/other --data-dir held_out.jsonl",
    "runs/mine --forgetting general.txt --csv scores.csv",
)


COMMONEST = (
    "--model", "--data-dir", "--forgetting", "--max-length", "--batch-size", "--accelerator", "--json", "--csv",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="run folder, checkpoint, PEFT adapter, or whole "
                        "(merged) model: a folder or hub id")  # fmt: skip
    what = parser.add_argument_group("what is scored")
    what.add_argument("--model", metavar="BASE", help="base model: hub id, local folder or tiny-granite-h (default: "
                      "that of the adapters)")  # fmt: skip
    what.add_argument("--data-dir", metavar="PATH", help="text to score: file or folder, or an embedded corpus "
                      "(default: what the first run held out for testing)")  # fmt: skip
    what.add_argument("--forgetting", metavar="PATH", help="a second text, to see what an adapter has unlearned")
    _add_of_training(what, "--text-column", "--record-format", "--encoding")
    script_flags.add_template(what)
    what.add_argument("--samples", type=int, default=RunConfig.samples, metavar="N", help="questions of the text's "
                      "chats that the models answer, and as many general ones; 0 asks none (default: "
                      "%(default)s)")  # fmt: skip
    how = parser.add_argument_group("how it is scored")
    how.add_argument("--max-length", type=int, metavar="INT", help="tokens that a model sees at once (default: the "
                     "runs' --block-size; without a run 1024)")  # fmt: skip
    how.add_argument("--stride", type=int, metavar="INT", help="tokens by which a window moves on in a longer text; "
                     "fewer give each token more context and take longer (default: half of --max-length)")  # fmt: skip
    how.add_argument("--batch-size", type=int, default=8, metavar="INT", help="windows at a time (default: 8)")
    how.add_argument("--precision", choices=PRECISIONS, default="auto",
                     help="of the products (default: auto, what the device does best)")  # fmt: skip
    _add_of_training(how, "--attn", "--kernels")
    how.add_argument("--4bit-quantization", dest="quantize_4bit", action=argparse.BooleanOptionalAction,
                     help="hold the frozen layers in 4 bits (default: the base as the runs did, whole models "
                     "not)")  # fmt: skip
    how.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto",
                     help="device (default: auto, a GPU where there is one)")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of the table")
    output.add_argument("--output", type=path, metavar="FILE", help="write the JSON there, too (default: eval_bpt.json "
                        "in the run folder, when that alone is named and --data-dir is not)")  # fmt: skip
    output.add_argument("--csv", type=path, metavar="FILE", help="write the scores of each document there")


def _add_of_training(group: argparse._ArgumentGroup, *names: str) -> None:
    """Flags that mean what they do in training."""
    for name in names:
        group.add_argument(name, default=FLAGS[name].default, **script_flags.argument(FLAGS[name]))


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    _check(options)
    script_flags.check_template(options)
    subjects = identify(options.models)
    if not subjects and options.model is None:
        raise UserError("nothing to score: name run folders, adapters or models, or a base with --model; see --help")
    # Late: numpy, and then torch, which takes seconds.
    from granite_scu.data.sources.read import named_by

    for flag, text in (("--data-dir", options.data_dir), ("--forgetting", options.forgetting)):
        if text is not None:
            with named_by(flag):
                validate.check_data(
                    DataConfig(
                        path=text,
                        text_column=options.text_column,
                        encoding=options.encoding,
                        record_format=options.record_format,
                    )
                )
    from granite_scu.evaluation.bpt import report, results
    from granite_scu.evaluation.bpt.evaluate import evaluate

    aside = make_console(stderr=True)
    quiet(aside)
    output = options.output or (None if options.data_dir else _in_the_run(subjects))
    to_json = require_writable_file("--output", output) if output else None
    to_csv = require_writable_file("--csv", options.csv) if options.csv else None
    if to_csv and to_csv == to_json:
        raise UserError(f"--csv {options.csv}: is where the JSON goes (--output); name another file")
    with _named_as_given(options):
        found, corpora = evaluate(subjects, options, aside)
    console = aside if options.json else make_console()
    if options.json:
        print(as_json(found), end="")
    else:
        report.show(found, console)
    if to_json:
        RunFolder(to_json.parent).write_json(to_json.name, found)
    if to_csv:
        report.write_csv([row for corpus in corpora for row in results.by_document(corpus)], to_csv)
    for file in filter(None, (output, options.csv)):
        console.print(f"written to {file}", highlight=False, markup=False, soft_wrap=True)
    return 0


@contextmanager
def _named_as_given(options: argparse.Namespace) -> Iterator[None]:
    """Have the refusal of a whole model name it as the user did: without ``--model``, and perhaps as a folder."""
    try:
        yield
    except UserError as error:
        for given in options.models:
            if given != options.model and (message := str(error)).startswith(prefix := f"--model {given}: "):
                hub = "" if Path(given).expanduser().exists() else "there is no such folder, and as a hub id it "
                error.args = (f"{given}: {hub}{message.removeprefix(prefix)}",)
        raise


def _check(options: argparse.Namespace) -> None:
    for flag, least in (("max_length", 2), ("stride", 1), ("batch_size", 1), ("samples", 0)):
        value = getattr(options, flag)
        if value is not None and value < least:
            raise UserError(f"--{flag.replace('_', '-')} {value}: must be at least {least}")


def _in_the_run(subjects: "list[Subject]") -> Path | None:
    """Where the report of a single run on its own held-out text goes: into its folder, for the model card to quote."""
    if len(subjects) == 1 and subjects[0].run is not None and subjects[0].run.resolve() == subjects[0].path.resolve():
        return subjects[0].path / EVALUATION
    return None
