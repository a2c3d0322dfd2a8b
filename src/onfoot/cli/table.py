"""`onfoot table`: the paper's Tables 1, 2 and 3 for any configuration, with shapes and parameter counts."""

from __future__ import annotations

import math
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onfoot.cli import options
from onfoot.config import GPT2Config, preset

if TYPE_CHECKING:
    from onfoot.tables import Row


class TableFormat(str, Enum):
    """Output format."""

    rich = "rich"
    markdown = "markdown"
    json = "json"


class Which(str, Enum):
    """Which table to show."""

    one = "1"
    two = "2"
    three = "3"
    all = "all"


def table(
    preset_name: Annotated[
        str,
        typer.Option(
            "--preset", help="Configuration: gpt2, gpt2-medium, gpt2-large, gpt2-xl, paper (one block) or paper-12."
        ),
    ] = "gpt2",
    which: Annotated[Which, typer.Option("--table", help="Number of the table in the paper, or all.")] = Which.all,
    lora_r: Annotated[int, typer.Option("--lora-r", help="LoRA rank for the parameter counts.")] = 16,
    output: Annotated[TableFormat, typer.Option("--format", help="Output format.")] = TableFormat.rich,
    n_layer: options.NLayer = None,
    n_embd: options.NEmbd = None,
    n_head: options.NHead = None,
    vocab_size: options.VocabSize = None,
    n_positions: options.NPositions = None,
    n_inner: options.NInner = None,
    head_dim: options.HeadDim = None,
    qk_head_dim: options.QkHeadDim = None,
    tied: options.Tied = None,
    lm_head_bias: options.LmHeadBias = None,
    causal: options.Causal = None,
    activation: options.Activation = None,
) -> None:
    """Show every operation, shape, gradient and parameter count of a network.

    Tables 1 to 3 of the paper for any configuration: one attention head, the network, the gradient of every parameter.
    """
    config = options.configure(
        preset(preset_name),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        vocab_size=vocab_size,
        n_positions=n_positions,
        n_inner=n_inner,
        head_dim=head_dim,
        qk_head_dim=qk_head_dim,
        tie_word_embeddings=tied,
        lm_head_bias=lm_head_bias,
        causal=causal,
        activation_function=activation,
    )
    from onfoot.cli import console
    from onfoot.cli.table_sheets import sheets

    if output is TableFormat.json:
        console.show_json(as_json(config, which, lora_r))
        return
    by_table = sheets(config, lora_r)
    for sheet in (sheet for name in _names(which) for sheet in by_table[name]):
        if output is TableFormat.markdown:
            print(console.markdown(sheet))
        else:
            console.show_sheet(sheet)


def _names(which: Which) -> list[str]:
    return ["1", "2", "3"] if which is Which.all else [which.value]


def as_json(config: GPT2Config, which: Which, lora_r: int) -> dict[str, Any]:
    """The tables as a JSON object."""
    from onfoot import tables

    lora = tables.lora_rows(config, lora_r)
    c = tables.counts(config)
    out: dict[str, Any] = {"config": config.to_dict()}

    def row_json(row: Row) -> dict[str, Any]:
        return {**asdict(row), "forward": row.forward._asdict(), "backward": row.backward._asdict()}

    if "1" in _names(which):
        out["table_1"] = [row_json(row) for row in tables.table_1(config)]
    if "2" in _names(which):
        out["table_2"] = [row_json(row) for row in tables.table_2(config)]
        out["counts"] = {**asdict(c), "dead": c.dead, "saved_by_tying": c.saved_by_tying}
    if "3" in _names(which):
        out["table_3"] = [
            {**asdict(row), "count": row.count, "each": math.prod(row.shape), "gradient": row.gradient._asdict()}
            for row in tables.table_3(config)
        ]
        block, total = tables.lora_total(lora)
        out["lora"] = {
            "rows": [{**asdict(row), "down": row.down, "up": row.up, "count": row.count} for row in lora],
            "block": block,
            "total": total,
            "fewer": 1 - total / c.total,
        }
    return out
