"""`onfoot merge`: merges a LoRA adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.console import show_text
from onfoot.cli.export import TypeOption, check_target, write_model
from onfoot.cli.options import Download
from onfoot.formats.files import shown


def merge(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Base model, or an adapter, which names its base model.")
    ],
    out: Annotated[Path, typer.Option(help="Output folder of the merged model, or a GGUF file.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder or run folder.", show_default=False)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type to write: float32, float64, float16 or bfloat16; by default the base model's.",
            show_default=False,
        ),
    ] = None,
    type_: TypeOption = None,
    download: Download = False,
) -> None:
    """Merge a LoRA adapter into its base model: w + scale d u. The result is a model folder or a GGUF file."""
    from onfoot import load
    from onfoot.formats.huggingface import DTYPE_NAMES

    to_gguf = out.suffix == ".gguf"
    if to_gguf:
        check_target(out)
        if dtype is not None:
            raise ValueError(f"--dtype is for model folders, and --out {out} is a GGUF file; choose its --type")
    elif type_ is not None:
        raise ValueError(f"--type is for GGUF files, and --out {out} is a folder; choose a name that ends in .gguf")
    elif dtype is not None and dtype not in DTYPE_NAMES:
        raise ValueError(f"unknown dtype {shown(dtype)}; choose from {', '.join(DTYPE_NAMES)}")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder with --out")
    loaded = load(model, "float64" if dtype == "float64" else "auto", download=download)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if loaded.active_adapter is None:
        raise ValueError(f"{model} is not an adapter; give one with --adapter")
    loaded.merge_adapter()
    if to_gguf:
        write_model(loaded, out, type_)
        return
    loaded.save(out, dtype)
    show_text(f"merged {adapter or model} into {out}: {load(out, 'auto').n_params:,} parameters")
