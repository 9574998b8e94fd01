#!/usr/bin/env python3
"""Draw the pictures of the documents that no run makes: python tools/draw_docs.py [--output-dir docs/images]

``loop.png`` is the controller's loop. ``peer.png`` is speed and memory of a training step against Hugging Face's
Trainer with PEFT, from ``evidence/performance/train_step.json``.
"""

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from granite_scu.viz import style

ROOT = Path(__file__).resolve().parents[1]

BOXES = {
    "measure": (1.5, 2.6, "training step\nloss and adapter size"),
    "ratio": (5.0, 2.6, "S = ParamBPT /\n(DataBPT + ParamBPT)"),
    "controller": (8.5, 2.6, "PI controller\ncompares S with S*"),
    "validation": (8.5, 4.6, "validation data\nwould a larger adapter help?"),
    "penalty": (5.0, 0.7, "penalty\nλ · size of the update"),
}
"""Centre of each box, and its words."""

ARROWS = (
    ("measure", "ratio", "bits per token"),
    ("ratio", "controller", "S"),
    ("validation", "controller", "S*"),
    ("controller", "penalty", "λ"),
    ("penalty", "measure", "gradient"),
)

CASES = {
    "embedded fp32 8 x 128": "embedded, fp32",
    "embedded bf16 8 x 128": "embedded, bf16",
    "cut fp32 2 x 512": "Granite 1B, ten blocks, fp32",
    "cut bf16 2 x 512": "Granite 1B, ten blocks, bf16",
}


def loop() -> Figure:
    """The loop: what is measured, compared and set."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(-0.2, 10.2), ylim=(-0.1, 5.4), aspect="equal")
    axes.axis("off")
    patches = {}
    for name, (x, y, words) in BOXES.items():
        colour = style.VERMILION if name == "controller" else style.BLUE
        box = FancyBboxPatch(
            (x - 1.45, y - 0.55),
            2.9,
            1.1,
            boxstyle="round,pad=0.06",
            edgecolor=colour,
            facecolor="white",
            linewidth=1.6,
        )
        patches[name] = axes.add_patch(box)
        axes.text(x, y, words, ha="center", va="center", fontsize=style.TICKS - 2, color=style.INK)
    for start, end, label in ARROWS:
        (x0, y0, _), (x1, y1, _) = BOXES[start], BOXES[end]
        bend = {"controller": -0.25, "penalty": -0.25}.get(start, 0)
        arrow = FancyArrowPatch(
            (x0, y0), (x1, y1), patchA=patches[start], patchB=patches[end], arrowstyle="-|>", mutation_scale=16,
            connectionstyle=f"arc3,rad={bend}", color=style.INK, linewidth=1.3,
        )  # fmt: skip
        axes.add_patch(arrow)
        side = {"controller": (0.7, -0.6), "penalty": (-0.75, -0.6), "validation": (0.28, 0.02)}.get(start, (0, 0.75))
        axes.text((x0 + x1) / 2 + side[0], (y0 + y1) / 2 + side[1], label, ha="center", fontsize=style.TICKS - 2,
                  color=style.INK)  # fmt: skip
    return figure


def peer(measured: list[dict]) -> Figure:
    """Two panels: how many times as fast, and which share of the memory."""
    found = {case["case"]: case for case in measured}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = list(CASES)[::-1]
    for axes, values, title, even in (
        (speed, [found[name]["speedup"] for name in names], "times as fast", 1),
        (memory, [100 * found[name]["memory_ratio"] for name in names], "memory, % of Trainer + PEFT", 100),
    ):
        bars = axes.barh([CASES[name] for name in names], values, color=style.BLUE, height=0.6)
        axes.bar_label(bars, fmt="%.1f" if even == 1 else "%.0f", padding=3, fontsize=style.TICKS - 1, color=style.INK)
        axes.axvline(even, color=style.VERMILION, linewidth=1.5)
        axes.set_xlim(0, 1.15 * max(*values, even))
        axes.set_xlabel(title, fontsize=style.TICKS, color=style.INK)
        style.tidy(axes, style.TICKS - 1)
    return figure


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    folder = parser.parse_args().output_dir
    measured = json.loads((ROOT / "evidence" / "performance" / "train_step.json").read_text(encoding="utf-8"))
    for name, figure in (("loop", loop()), ("peer", peer(measured))):
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
        print(folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
