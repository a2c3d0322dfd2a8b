"""Options shared by several commands: model configuration, threads, output format and token ids."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.config import GPT2Config
from onfoot.engine import ENGINES

MODEL_OPTIONS = "Model configuration"


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=MODEL_OPTIONS, show_default=False)


NLayer = Annotated[int | None, _option("--n-layer", text="Number of transformer blocks.")]
NEmbd = Annotated[int | None, _option("--n-embd", text="Hidden size d.")]
NHead = Annotated[int | None, _option("--n-head", text="Number of attention heads.")]
VocabSize = Annotated[int | None, _option("--vocab-size", text="Vocabulary size.")]
NPositions = Annotated[int | None, _option("--n-positions", text="Maximum sequence length.")]
NInner = Annotated[int | None, _option("--n-inner", text="MLP hidden size; 4 d by default.")]
HeadDim = Annotated[int | None, _option("--head-dim", text="Head dimension d_h of the values; d / n_head by default.")]
QkHeadDim = Annotated[
    int | None, _option("--qk-head-dim", text="Head dimension d_ρ of queries and keys; d_h by default.")
]
Tied = Annotated[bool | None, _option("--tied/--untied", text="Share the token embedding with the LM head, or not.")]
LmHeadBias = Annotated[bool | None, _option("--lm-head-bias/--no-lm-head-bias", text="Add a bias to the logits.")]
Causal = Annotated[bool | None, _option("--causal/--no-causal", text="Causal attention, or attention to all tokens.")]
Activation = Annotated[str | None, _option("--activation", text="Activation function: gelu_new, gelu or relu.")]


def _set_threads(n: int | None) -> int | None:
    if n is not None:
        from onfoot.threads import set_threads

        set_threads(n)
    return n


Dtype = Annotated[
    str, typer.Option(help="Data type: float32, float64, or auto: float32, with 16-bit weights as in the files.")
]
Engine = Annotated[
    str, typer.Option("--engine", help=f"Engine: auto, {', '.join(ENGINES)}, or a file of your own pairs (my_ops.py).")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Number of threads; by default one per core. Use fewer on a shared machine.",
        show_default=False,
        callback=_set_threads,
    ),
]


class Format(str, Enum):
    """Output format."""

    rich = "rich"
    json = "json"


Download = Annotated[
    bool, typer.Option("--download", help="Fetch MODEL (org/name) from the Hugging Face Hub, where it is not cached.")
]


def download_model(name: str | Path) -> None:
    """Fetches a model from the Hub into its cache, unless it is a local one."""
    from onfoot.formats.gguf_model import find_file
    from onfoot.formats.hub import fetch

    if find_file(name) is None:
        fetch(name)


def check_writable(path: Path | None, option: str) -> None:
    """Raises ValueError for an output file that could not be written after the work is done."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; choose the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option}: the folder {path.parent} is not writable; choose another")


def configure(base: GPT2Config, **changes: Any) -> GPT2Config:
    """`base` with every change that is not None. Tying the embeddings also drops a logits bias of the base."""
    from dataclasses import replace

    overrides = {name: value for name, value in changes.items() if value is not None}
    if overrides.get("tie_word_embeddings"):
        overrides.setdefault("lm_head_bias", False)
    return replace(base, **overrides)


def parse_tokens(text: str) -> list[int]:
    """Token ids from text such as "3 1 4" or "3,1,4"."""
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError('no tokens; give token ids, as in --tokens "3 1 4 1 5"')
    for word in words:
        if not word.removeprefix("-").isdecimal():
            raise ValueError(f'token {word!r} is not an integer; give token ids, as in --tokens "3 1 4 1 5"')
    if any(len(word) > 18 for word in words):
        raise ValueError(f"token {max(words, key=len)} is too large for a token id")
    return [int(word) for word in words]
