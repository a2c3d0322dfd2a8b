"""What goes wrong in an embedding table, and where the table is tied to the logits."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import scatter_add
from onfoot.check.layer import Array, Mistake


def table_gradient_by_assignment(ids: Array, dy: Array, n_rows: int) -> Array:
    """dW[ids] += Δ: of a token's several occurrences only the last is kept."""
    dweight = np.zeros((n_rows, dy.shape[-1]))
    dweight[ids] += dy
    return dweight


def _averaged(ids: Array, dy: Array, n_rows: int) -> Array:
    counts = np.bincount(ids.reshape(-1), minlength=n_rows)
    return scatter_add(n_rows, ids, dy) / np.maximum(counts, 1)[:, None]


MISTAKES = (
    Mistake(
        "repeated ids lost",
        "embedding",
        "dweight[ids] += dout (or =) keeps one of a token's several occurrences, the last.",
        "3",
        "np.add.at(dweight, ids, dout), or index_add_ in PyTorch",
        lambda p: {"scatter": table_gradient_by_assignment},
        "E24",
    ),
    Mistake(
        "repeated ids averaged",
        "embedding",
        "An id's rows are averaged; they must be summed.",
        "3",
        "np.add.at(dweight, ids, dout), and no division",
        lambda p: {"scatter": _averaged},
    ),
    Mistake(
        "the last sequence alone",
        "embedding",
        "Only one sequence of the batch reaches the table; all of them share it.",
        "3",
        "scatter over batch and tokens",
        lambda p: {"scatter": lambda ids, dy, n_rows: scatter_add(n_rows, ids[-1], dy[-1])},
        "E26",
    ),
    Mistake(
        "one table a sequence",
        "embedding",
        "dweight has the batch as an axis too many: the sequences are not summed.",
        "3",
        "scatter over batch and tokens",
        lambda p: {
            "scatter": lambda ids, dy, n_rows: np.stack(
                [scatter_add(n_rows, i, d) for i, d in zip(ids, dy, strict=True)]
            )
        },
        "E26",
    ),
    Mistake(
        "ids counted from 1",
        "embedding",
        "The gradient of an id goes to the row before it.",
        "2",
        "ids count from 0: row = id",
        lambda p: {"table_ids": lambda ids: ids - 1},
        "E22",
    ),
    Mistake(
        "the embedding's path alone",
        "tied_embedding",
        "oheᵗ Δ_1: the table also makes the logits, and the gradient of that use is lost.",
        "TIE.1",
        "dweight = oheᵗ Δ_1 + doutᵗ features, the sum of both uses",
        lambda p: {"both_paths": lambda embedding, logits: embedding},
        "E27",
    ),
    Mistake(
        "the logits' path alone",
        "tied_embedding",
        "doutᵗ features: the table also embeds the tokens, and the gradient of that use is lost.",
        "TIE.1",
        "dweight = oheᵗ Δ_1 + doutᵗ features, the sum of both uses",
        lambda p: {"both_paths": lambda embedding, logits: logits},
        "E27",
    ),
)
