"""``granite-scu report``: a run on one page. Loads nothing heavy."""

import argparse

from granite_scu.cli.argument_parser import path
from granite_scu.viz import report

EXAMPLES = ("runs/mine", "runs/stopped", "runs/mine --out page.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("run", metavar="RUN", type=path, help="run folder, finished or not")
    parser.add_argument("--out", metavar="FILE", type=path, help=f"the page (default: RUN/{report.NAME})")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    print(report.report_on(options.run, options.out))
    return 0
