"""Loss curves beside each other: as a sketch in the terminal, and as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onfoot.formats.write import atomic_write
from onfoot.plots import new_figure, png

MARKS = "ox+*"


def columns(losses: Sequence[float], width: int) -> list[float]:
    """The losses averaged to at most `width` values."""
    n = min(width, len(losses))
    parts = [losses[i * len(losses) // n : (i + 1) * len(losses) // n] for i in range(n)]
    return [sum(part) / len(part) for part in parts]


def sketch(curves: Mapping[str, Sequence[float]], width: int = 60, height: int = 12) -> str:
    """The curves in characters, each with a mark of its own; # where they meet."""
    drawn = {name: columns(losses, width) for name, losses in curves.items()}
    low, high = (f(x for curve in drawn.values() for x in curve) for f in (min, max))
    span = (high - low) or 1.0
    rows = [[" "] * width for _ in range(height)]
    for mark, curve in zip(MARKS, drawn.values(), strict=False):
        for column, value in enumerate(curve):
            row = rows[round((high - value) / span * (height - 1))]
            row[column] = mark if row[column] == " " else "#"
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(i, ''):>6} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    steps = max(len(losses) for losses in curves.values())
    key = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=False))
    return "\n".join(
        [*lines, f"{'':>6} +{'-' * width} step {steps}", f"{'':>8}{key}   (training loss, nats per token)"]
    )


def draw_curves(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plots the training losses of several runs as a PNG file."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for colour, (name, losses) in zip(("#4b5563", "#c2410c", "#2563eb"), curves.items(), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=0.9, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with atomic_write(path) as file:
        file.write(png(figure))
