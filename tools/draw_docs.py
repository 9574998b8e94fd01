#!/usr/bin/env python3
"""Draw the pictures of the documents that no run makes: python tools/draw_docs.py [--output-dir docs/images]

``loop.png`` is the controller's loop. ``peer.png`` is speed and memory of a training step against Hugging Face's
Trainer with PEFT, from ``research/evidence/performance/train_step.json``.
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
    "measure": (1.5, 4.6, "training step\nloss and adapter size"),
    "ratio": (1.5, 2.6, "S = ParamBPT /\n(DataBPT + ParamBPT)"),
    "controller": (5.4, 2.6, "PI controller\ncompares S with S*"),
    "you": (5.4, 0.6, "you: --target-s,\na share such as 10 %"),
    "penalty": (5.4, 4.6, "penalty\nλ · size of the update"),
}
"""Centre of each box, and its words. Two columns, so that the words can be read on a phone."""

ARROWS = (
    ("measure", "ratio", "bits per token", (-0.85, -0.08)),
    ("ratio", "controller", "S", (0, 0.15)),
    ("you", "controller", "S*", (0.25, -0.08)),
    ("controller", "penalty", "λ", (0.25, -0.08)),
    ("penalty", "measure", "gradient", (0, 0.65)),
)
"""From, to, what passes, and how far from the arrow's middle it is written."""

CASES = {
    "embedded fp32 8 x 128": "embedded, fp32",
    "embedded bf16 8 x 128": "embedded, bf16",
    "cut fp32 2 x 512": "Granite 1B, ten blocks, fp32",
    "cut bf16 2 x 512": "Granite 1B, ten blocks, bf16",
}


def loop() -> Figure:
    """The loop: what is measured, compared and set."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(-0.1, 7.0), ylim=(-0.1, 5.5), aspect="equal")
    axes.axis("off")
    patches = {}
    for name, (x, y, words) in BOXES.items():
        colour = style.VERMILION if name == "controller" else style.BLUE
        frame = {"boxstyle": "round,pad=0.06", "edgecolor": colour, "facecolor": "white", "linewidth": 1.6}
        patches[name] = axes.add_patch(FancyBboxPatch((x - 1.4, y - 0.5), 2.8, 1.0, **frame))
        axes.text(x, y, words, ha="center", va="center", fontsize=style.TICKS - 2, color=style.INK)
    for start, end, label, (right, up) in ARROWS:
        (x0, y0, _), (x1, y1, _) = BOXES[start], BOXES[end]
        arrow = FancyArrowPatch(
            (x0, y0), (x1, y1), patchA=patches[start], patchB=patches[end], arrowstyle="-|>", mutation_scale=16,
            color=style.INK, linewidth=1.3,
        )  # fmt: skip
        axes.add_patch(arrow)
        axes.text((x0 + x1) / 2 + right, (y0 + y1) / 2 + up, label, ha="center", fontsize=style.TICKS - 2,
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
        (speed, [speedup(found[name]) for name in names], "times as fast", 1),
        (memory, [100 * found[name]["memory_ratio"] for name in names], "memory, % of Trainer + PEFT", 100),
    ):
        bars = axes.barh([CASES[name] for name in names], values, color=style.BLUE, height=0.6)
        axes.bar_label(bars, fmt="%.1f" if even == 1 else "%.0f", padding=3, fontsize=style.TICKS - 1, color=style.INK)
        axes.axvline(even, color=style.VERMILION, linewidth=1.5)
        axes.set_xlim(0, 1.15 * max(*values, even))
        axes.set_xlabel(title, fontsize=style.TICKS, color=style.INK)
        style.tidy(axes, style.TICKS - 1)
    return figure


def speedup(case: dict) -> float:
    """Of processor time where it was taken: beside other programs the clock tells little."""
    computed = [case.get(f"{side}_computed_s") for side in ("theirs", "ours")]
    return computed[0] / computed[1] if all(computed) else case["speedup"]


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    folder = parser.parse_args().output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-dir {folder}: {error.strerror}; name a folder")
    evidence = ROOT / "research" / "evidence" / "performance"
    measured = json.loads((evidence / "train_step.json").read_text(encoding="utf-8"))
    for name, figure in (("loop", loop()), ("peer", peer(measured))):
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
        print(folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
