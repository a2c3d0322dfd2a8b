"""`onfoot merge`: a base model and an adapter become one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.console import show_text


def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The base model, or the adapter (its base is known).")],
    out: Annotated[Path, typer.Option(help="Folder of the merged model.")],
    adapter: Annotated[
        Path | None, typer.Option(help="The adapter: a folder, or the folder of a run.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
) -> None:
    """Merge an adapter into its base: w + scale d u. The result is an ordinary model folder."""
    from onfoot import load

    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another --out")
    loaded = load(model, dtype)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if loaded.active_adapter is None:
        raise ValueError(f"{model} is no adapter; give one with --adapter")
    loaded.merge_adapter()
    loaded.save(out)
    show_text(f"merged {adapter or model} into {out}: {load(out).n_params:,} parameters")
