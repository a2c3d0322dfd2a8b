"""Loads the model that a page or a walk shows, in float64 on the NumPy engine, which is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onfoot.explore.default_model import default_model
from onfoot.explore.study import check_model
from onfoot.models.model import load

if TYPE_CHECKING:
    from onfoot.models.model import Model


def load_model(folder: Path | None) -> Model:
    """The model of a folder, a run, a GGUF file or an adapter, which is merged into its base; None: the included one."""
    model = default_model() if folder is None else load(folder, "float64", "numpy")
    if model.active_adapter is not None:
        model.merge_adapter()
    check_model(model)
    return model
