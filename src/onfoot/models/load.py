"""Where a model comes from: `load` reads one from a folder or a file, or by name; `create` draws a new one."""

from __future__ import annotations

import os
from pathlib import Path

from onfoot.config import Config
from onfoot.engine import Engine, check_dtype
from onfoot.models.model import Model
from onfoot.models.params import Drawn
from onfoot.own_engine import EngineLike, as_engine, is_own


def load(
    path: str | Path,
    dtype: str = "float32",
    engine: EngineLike = "auto",
    *,
    quantized: bool = False,
    download: bool = False,
) -> Model:
    """Loads a model from a Hugging Face folder, a GGUF file, a run's best checkpoint, or by name.

    A name is "smollm2", or that of a model on the Hugging Face Hub ("org/name"), which is looked up in the local cache;
    with `download`, it is fetched first if it is not a local folder. For an adapter's folder, the base is loaded too.

    With dtype="auto", bfloat16 and float16 weights of linear layers and token tables stay in 16 bits and frozen, and
    everything is computed in float32: the results of a float32 model, in half the memory. With `quantized`, weights
    stay quantized and frozen: those of a GGUF file unchanged, those of a folder rounded to 8 bits. Generation is then
    several times as fast, and a base for adapters needs a fraction of the memory.

    `engine` is "auto", "numpy", "torch", "numba", or your own forward/backward pairs: a module, a file (my_ops.py), a
    dict, or a list of these.
    """
    from onfoot.formats.files import shown
    from onfoot.formats.gguf_model import PACKAGES, find_file, load_gguf
    from onfoot.formats.hub import fetch, is_hub_name, local_folder
    from onfoot.formats.huggingface import is_model_folder, load_folder
    from onfoot.formats.peft import base_of, is_adapter_folder
    from onfoot.formats.run_folder import model_folder

    if is_own(engine):
        engine = as_engine(engine)
    half = dtype == "auto" and engine != "torch" and not isinstance(engine, Engine)  # tensors of PyTorch are float32
    computed = check_dtype("float32" if dtype == "auto" else dtype)
    file = find_file(path)
    if file is not None:
        model = load_gguf(file, computed, engine, quantized, half)
        model.source = str(path) if str(path) in PACKAGES else str(file.resolve())
        return model
    folder = model_folder(fetch(path) if download else local_folder(path))
    if not is_adapter_folder(folder) or is_model_folder(folder):  # an adapter may be in its base's folder
        return load_folder(folder, computed, engine, quantized, half)
    base = base_of(folder)
    if not isinstance(base, str) or not (os.path.isdir(base) or find_file(base) or is_hub_name(base)):
        raise ValueError(
            f"{folder} is an adapter of {shown(base)}, which was not found; load the base, then the adapter "
            f"(onfoot generate BASE --adapter {folder})"
        )
    if is_adapter_folder(base) and not is_model_folder(base):
        raise ValueError(f"{folder} is an adapter of {shown(base)}, which is an adapter itself")
    model = load(base, dtype, engine, quantized=quantized, download=download)
    model.load_adapter(folder)
    return model


def create(config: Config, seed: int = 0, dtype: str = "float32", engine: EngineLike = "auto") -> Model:
    """A new model with its family's initial values, which depend only on the seed; for `engine`, see `load`."""
    return Model(config, Drawn(config, seed, check_dtype(dtype)), dtype, engine)
