"""`onfoot merge`: merges a LoRA adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.console import show_text
from onfoot.cli.export import TypeOption, check_target, write_model
from onfoot.cli.options import Download


def merge(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Base model, or an adapter, which names its base model.")
    ],
    out: Annotated[Path, typer.Option(help="Output folder of the merged model, or a GGUF file.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder or run folder.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Data type: float32 or float64.")] = "float32",
    type_: TypeOption = None,
    download: Download = False,
) -> None:
    """Merge a LoRA adapter into its base model: w + scale d u. The result is a model folder or a GGUF file."""
    from onfoot import load

    to_gguf = out.suffix == ".gguf"
    if to_gguf:
        check_target(out)
    elif type_ is not None:
        raise ValueError(f"--type is for GGUF files, and --out {out} is a folder; choose a name that ends in .gguf")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder with --out")
    loaded = load(model, dtype, download=download)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if loaded.active_adapter is None:
        raise ValueError(f"{model} is not an adapter; give one with --adapter")
    loaded.merge_adapter()
    if to_gguf:
        write_model(loaded, out, type_)
        return
    loaded.save(out)
    show_text(f"merged {adapter or model} into {out}: {load(out).n_params:,} parameters")
