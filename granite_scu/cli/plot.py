"""``granite-scu plot``: the figures of one run, or of several side by side, each as PNG and SVG."""

import argparse
from pathlib import Path

from granite_scu.cli.argument_parser import path
from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import require_writable

EXAMPLES = ("runs/mine --out plots", "runs/plain runs/held --out plots", "runs/seed-* --out plots")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("sources", metavar="RUN", type=path, nargs="+", help="run folders, finished or not")
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="folder for the pictures")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    from rich.console import Console
    from rich.progress import track

    from granite_scu.viz import style  # late: matplotlib takes a second
    from granite_scu.viz.figures import draw_figures
    from granite_scu.viz.groups import group
    from granite_scu.viz.run_folder import read_measured_run

    with style.as_designed():
        _check_apart(options.sources)
        figures, folder = draw_figures(group([read_measured_run(source) for source in options.sources])), options.out
        require_writable("--out", folder)
        console = Console(stderr=True)
        progress = track(figures.items(), "drawing", console=console, transient=True, disable=not console.is_terminal)
        written = [path for name, figure in progress for path in style.save(figure, folder / name)]
    print(*written, sep="\n")
    return 0


def _check_apart(sources: list[Path]) -> None:
    """Refuse a run folder that is named twice. Raises UserError."""
    seen: dict[Path, Path] = {}
    for source in sources:
        if source.resolve() in seen:
            raise UserError(f"{source}: is named twice (also as {seen[source.resolve()]})")
        seen[source.resolve()] = source
