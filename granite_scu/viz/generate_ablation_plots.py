"""The figures of one run, of several side by side, or of a comparison.

Runs that differ in their seed alone share a line with a band.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from granite_scu.viz.comparison_plot import plot_comparison, plot_operating_points, read_comparison
from granite_scu.viz.figures import draw_figures
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
