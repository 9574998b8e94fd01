"""The figures of one run, of several side by side, or of a comparison.

    granite-scu plot RUN [RUN ...] --out DIR
    granite-scu plot comparison.json --out DIR

writes each as PNG and SVG into DIR. Runs that differ in their seed alone share a line with a band.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from granite_scu.viz import style
from granite_scu.viz.comparison_plot import plot_comparison, plot_operating_points, read_comparison
from granite_scu.viz.figures import draw_figures
from granite_scu.viz.files import command_parser, make_folder, report_outcome
from granite_scu.viz.groups import group
from granite_scu.viz.run_folder import read_measured_run


def draw(sources: Sequence[Path]) -> dict[str, Figure]:
    """The figures by name: of run folders, or of the one JSON of a comparison.

    Raises:
        ValueError: a source is neither, is named twice, or has nothing to draw.
    """
    files = [source for source in sources if source.suffix == ".json"]
    if files and len(sources) > 1:
        raise ValueError(f"{files[0]}: a comparison is drawn by itself; name it alone, or run folders only")
    if files:
        results = read_comparison(files[0])
        return plot_comparison(results) | {"operating_points": plot_operating_points(results)}
    seen: dict[Path, Path] = {}
    for source in sources:
        if source.resolve() in seen:
            raise ValueError(f"{source}: is named twice (also as {seen[source.resolve()]})")
        seen[source.resolve()] = source
    return draw_figures(group([read_measured_run(source) for source in sources]))


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    examples = (f"{name} {sources} --out plots" for sources in ("runs/mine", "runs/seed-*", "comparison.json"))
    parser = command_parser(name, "Draw one run, or several side by side.", examples)
    parser.add_argument(
        "sources", metavar="RUN", type=Path, nargs="+", help="run folders, finished or not; or one comparison.json"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the pictures")
    return parser


def main(arguments: Sequence[str] | None = None, name: str = "granite-scu plot") -> int:
    """The command; returns its exit code."""
    options = build_parser(name).parse_args(arguments)

    def write() -> list[Path]:
        figures = draw(options.sources)
        folder = make_folder(options.out)
        console = Console(stderr=True)
        progress = track(figures.items(), "drawing", console=console, transient=True, disable=not console.is_terminal)
        return [path for name, figure in progress for path in style.save(figure, folder / name)]

    return report_outcome(write)
