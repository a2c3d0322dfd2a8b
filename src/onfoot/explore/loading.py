"""Loads the model that a page or a walk shows, in float64 on the NumPy engine, which is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onfoot.explore.default_model import default_model
from onfoot.explore.study import check_model
from onfoot.explore.wide import widen
from onfoot.models.model import load

if TYPE_CHECKING:
    from onfoot.models.model import Model

MAX_WIDE = 30_000_000  # parameters that are held in float64 with all gradients; weights of larger models stay frozen


def load_model(folder: Path | None) -> Model:
    """The model of a folder, a run, a GGUF file or an adapter, which is merged into its base; None: the included one.

    A model of more than `MAX_WIDE` parameters keeps its weights as the file has them, and computes in float64.
    """
    if folder is None:
        return default_model()
    model = load(folder, "auto", "numpy", quantized=folder.suffix == ".gguf" or not folder.exists())
    check_model(model)
    is_wide = model.n_params <= MAX_WIDE
    if model.active_adapter is not None or is_wide:
        del model
        model = load(folder, "float64" if is_wide else "float32", "numpy")
        if model.active_adapter is not None:
            model.merge_adapter()
    return model if is_wide else widen(model)
