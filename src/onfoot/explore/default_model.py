"""The model that the page opens where none is named: small, trained, and inside the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onfoot.models.model import Model

FOLDER = Path(__file__).parent / "default"
TEXT = "the value of the value"


def default_model() -> Model:
    """Two blocks of width 32 over characters, in float64; `make_default.py` made it."""
    from onfoot.models.model import load

    return load(FOLDER, "float64", "numpy")
