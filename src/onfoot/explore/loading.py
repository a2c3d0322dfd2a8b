"""Loads the model that a page or a walk shows, in float64 on the NumPy engine, which is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onfoot.explore.default_model import default_model
from onfoot.explore.study import LARGE, check_model
from onfoot.explore.wide import widen
from onfoot.formats.gguf_model import find_file
from onfoot.formats.hub import is_hub_name
from onfoot.models.load import load

if TYPE_CHECKING:
    from onfoot.models.model import Model


def load_model(folder: Path | None) -> Model:
    """The model of a folder, a run, a GGUF file or an adapter, which is merged into its base; None: the included one.

    A model of more than `LARGE` parameters keeps its weights as the file has them, and computes in float64.
    """
    if folder is None:
        return default_model()
    if not folder.exists() and not is_hub_name(folder) and find_file(folder) is None:
        raise ValueError(
            f"{folder} not found; give a model's folder, a GGUF file or smollm2, or nothing for the small model that "
            f"is included"
        )
    model = load(folder, "auto", "numpy", quantized=folder.suffix == ".gguf" or not folder.exists())
    check_model(model)
    is_wide = model.n_params <= LARGE
    if model.active_adapter is not None or is_wide:
        del model
        model = load(folder, "float64" if is_wide else "float32", "numpy")
        if model.active_adapter is not None:
            model.merge_adapter()
    return model if is_wide else widen(model)
