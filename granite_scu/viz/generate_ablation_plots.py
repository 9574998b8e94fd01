"""The figures of one run, or of several side by side.

Runs that differ in their seed alone share a line with a band.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from granite_scu.config.errors import UserError
from granite_scu.viz.figures import draw_figures
from granite_scu.viz.groups import group
from granite_scu.viz.run_folder import read_measured_run


def draw(sources: Sequence[Path]) -> dict[str, Figure]:
    """The figures by name: of run folders.

    Raises:
        UserError: a source is none, is named twice, or has nothing to draw.
    """
    seen: dict[Path, Path] = {}
    for source in sources:
        if source.resolve() in seen:
            raise UserError(f"{source}: is named twice (also as {seen[source.resolve()]})")
        seen[source.resolve()] = source
    return draw_figures(group([read_measured_run(source) for source in sources]))
