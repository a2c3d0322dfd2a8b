"""Figures as PNG bytes, drawn without pyplot, so that a notebook's own plots stay as they are."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure  # takes longer to import than most commands run

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, dpi=120, format="png")
    return out.getvalue()
