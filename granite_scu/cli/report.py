"""``granite-scu report``: a run on one page. Loads nothing heavy."""

import argparse

from granite_scu.cli.argument_parser import path
from granite_scu.storage.run_folder import require_writable_file
from granite_scu.viz import report
from granite_scu.viz.run_folder import read_measured_run

EXAMPLES = ("runs/mine", "runs/stopped", "runs/mine --out page.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("run", metavar="RUN", type=path, help="run folder, finished or not")
    parser.add_argument("--out", metavar="FILE", type=path, help=f"the page (default: RUN/{report.NAME})")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    run, page = read_measured_run(options.run), options.out or options.run / report.NAME
    report.write_report(run, require_writable_file("--out", page))
    print(page)
    return 0
