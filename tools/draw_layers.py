#!/usr/bin/env python3
"""Draw the layers of the package from its imports: python tools/draw_layers.py [--output docs/images/layers.png]

A box is a package of ``granite_scu``, a row is a layer, and an arrow says that one package imports another. An arrow is
left out where a way over other packages leads there too. The rows are found from the imports alone: a package stands
one row above the highest package that it imports.
"""

import argparse
import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "granite_scu"


def imports() -> dict[str, set[str]]:
    """Each package, or module at the root, and those that it imports, wherever in a file."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if here.startswith("__"):
            continue
        found[here] |= set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "granite_scu":
                parts = node.module.split(".")
                found[here] |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return {name: {other for other in others if other in found and other != name} for name, others in found.items()}


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rows from the bottom up.

    Raises:
        ValueError: packages import one another in a circle.
    """
    rows: list[list[str]] = []
    left = dict(graph)
    while left:
        row = sorted(name for name, others in left.items() if not others & left.keys())
        if not row:
            raise ValueError(f"a circle of imports among {', '.join(sorted(left))}")
        rows.append(row)
        left = {name: others for name, others in left.items() if name not in row}
    return rows


def without_shortcuts(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that no chain of others implies: the transitive reduction of a graph without circles."""
    reached: dict[str, set[str]] = {}
    for row in layers(graph):
        for name in row:
            reached[name] = graph[name].union(*(reached[other] for other in graph[name]))
    return {name: others - set().union(*(reached[other] for other in others)) for name, others in graph.items()}


def draw(graph: dict[str, set[str]], output: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = layers(graph)
    places = {name: ((i + 0.5) * 10 / len(row), y) for y, row in enumerate(rows) for i, name in enumerate(row)}
    figure, axes = plt.subplots(figsize=(6, 0.8 * len(rows) + 0.3))
    for name, others in without_shortcuts(graph).items():
        for other in sorted(others):
            (x, y), (u, v) = places[name], places[other]
            axes.annotate(
                "", (u, v + 0.2), (x, y - 0.2), arrowprops={"arrowstyle": "-|>", "color": "#6b7785", "lw": 1.0}
            )
    for name, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#e8eef7", "edgecolor": "#3b5b8c"}
        axes.text(x, y, name, ha="center", va="center", fontsize=11, bbox=box)
    axes.set_xlim(0, 10)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_axis_off()
    figure.savefig(output, dpi=150, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "layers.png", metavar="FILE")
    draw(imports(), parser.parse_args().output)
