"""Options that several commands share: the sizes and choices of a model, and its tokens."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from onfoot.config import GPT2Config

SIZES = "Sizes and choices"


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SIZES, show_default=False)


NLayer = Annotated[int | None, _option("--n-layer", text="Number of blocks.")]
NEmbd = Annotated[int | None, _option("--n-embd", text="Width d of the network.")]
NHead = Annotated[int | None, _option("--n-head", text="Number of attention heads.")]
VocabSize = Annotated[int | None, _option("--vocab-size", text="Number of different tokens.")]
NPositions = Annotated[int | None, _option("--n-positions", text="Longest sequence.")]
NInner = Annotated[int | None, _option("--n-inner", text="Width between expand and contract; 4 d by default.")]
HeadDim = Annotated[int | None, _option("--head-dim", text="Width d_h of a head's values; d / n_head by default.")]
QkHeadDim = Annotated[
    int | None, _option("--qk-head-dim", text="Width d_ρ of a head's queries and keys; d_h by default.")
]
Tied = Annotated[bool | None, _option("--tied/--untied", text="Logits from the token table, or with their own weight.")]
LmHeadBias = Annotated[bool | None, _option("--lm-head-bias/--no-lm-head-bias", text="A bias on the logits.")]
Causal = Annotated[bool | None, _option("--causal/--no-causal", text="Tokens see only what came before, or all.")]
Activation = Annotated[str | None, _option("--activation", text="gelu_new, gelu or relu.")]


def _set_threads(n: int | None) -> int | None:
    if n is not None:
        from onfoot.threads import set_threads

        set_threads(n)
    return n


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Threads to compute with; by default one per core. Fewer on a machine that others use too.",
        show_default=False,
        callback=_set_threads,
    ),
]


class Format(str, Enum):
    """How a result is written."""

    rich = "rich"
    json = "json"


def configure(base: GPT2Config, **changes: Any) -> GPT2Config:
    """`base` with the changes that were asked for; None means not asked. Tying drops a logits bias of the base."""
    from dataclasses import replace

    asked = {name: value for name, value in changes.items() if value is not None}
    if asked.get("tie_word_embeddings"):
        asked.setdefault("lm_head_bias", False)
    return replace(base, **asked)


def parse_tokens(text: str) -> list[int]:
    """Token ids from text such as "3 1 4" or "3,1,4"."""
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError('no tokens; give their ids, as in --tokens "3 1 4 1 5"')
    for word in words:
        if not word.removeprefix("-").isdecimal():
            raise ValueError(f'token {word!r} is not a whole number; give ids, as in --tokens "3 1 4 1 5"')
    if any(len(word) > 18 for word in words):
        raise ValueError(f"token {max(words, key=len)} is far too large for a token id")
    return [int(word) for word in words]
