"""The default model of the page: small, trained and part of the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onfoot.models.model import Model

FOLDER = Path(__file__).parent / "default"
TEXT = "the value of the value"


def default_model() -> Model:
    """A character-level GPT-2 with two blocks of width 32, in float64; trained by `make_default.py`."""
    from onfoot.models.load import load

    return load(FOLDER, "float64", "numpy")
