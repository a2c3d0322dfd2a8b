"""`onfoot export`: writes a model or a LoRA adapter as a GGUF file for llama.cpp and Ollama."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.console import show_text

TypeOption = Annotated[
    str | None,
    typer.Option(
        "--type",
        help="Type of the weights in a GGUF file: f32, f16, bf16, q8_0, q4_0 or q4_1; by default that of the model's "
        "own files.",
        show_default=False,
    ),
]


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, GGUF file, run folder or model name.")],
    gguf: Annotated[Path, typer.Option("--gguf", metavar="FILE", help="GGUF file to write.")],
    type_: TypeOption = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Write this adapter (folder or run folder) alone.", show_default=False)
    ] = None,
    ollama: Annotated[bool, typer.Option("--ollama", help="Also write a Modelfile beside FILE.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a model, with its tokenizer and chat template, as a GGUF file; or, with --adapter, a LoRA adapter."""
    from onfoot import load
    from onfoot.formats.gguf_export import check_type, export_adapter
    from onfoot.formats.gguf_model import find_file
    from onfoot.formats.ollama import modelfile
    from onfoot.formats.write import write_text

    check_type(type_)
    check_target(gguf, force)
    description = gguf.parent / "Modelfile"
    if ollama and description.exists() and not force:
        raise ValueError(f"{description} exists; overwrite it with --force")
    if adapter is not None and type_ is not None:
        raise ValueError("--type has no effect with --adapter: adapters are stored as f32")
    loaded = load(model, engine="numpy", quantized=find_file(model) is not None)
    if adapter is None:
        if loaded.active_adapter is not None:
            raise ValueError(
                f"{model} is an adapter; export it with --adapter {model} and its base as MODEL, "
                f"or merge it: onfoot merge {model} --out {gguf}"
            )
        write_model(loaded, gguf, type_)
    else:
        loaded.load_adapter(adapter)
        n = export_adapter(loaded, gguf)
        show_text(f"wrote {gguf}: {n} LoRA layers, {gguf.stat().st_size:,} bytes")
    if ollama:
        base = gguf if adapter is None else find_file(model) or Path(model)
        own = None if adapter is None else gguf
        write_text(description, modelfile(gguf.parent, base, own, loaded.tokenizer))
        show_text(f"wrote {description}")


def check_target(path: Path, force: bool = False) -> None:
    """Raises ValueError unless a GGUF file can be written there."""
    if path.suffix != ".gguf":
        raise ValueError(f"{path} must end in .gguf")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; choose the name of a file")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; overwrite it with --force, or choose another name")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")


def write_model(model: Any, path: Path, type_: str | None) -> None:
    """Writes a model and prints what was written."""
    from onfoot.formats.gguf_export import export_model

    counts = export_model(model, path, type_)
    types = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    show_text(f"wrote {path}: {sum(counts.values())} tensors ({types}), {path.stat().st_size:,} bytes")
    if model.tokenizer is None:
        show_text("the model has no tokenizer: llama.cpp will accept only token ids")
