"""Known mistakes in an embedding, and in an embedding tied to the output projection."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows, scatter_add
from onfoot.check.layer import Array, Mistake


def table_gradient_by_assignment(ids: Array, dy: Array, n_rows: int) -> Array:
    """dW[ids] += Δ: only the last occurrence of a repeated id is kept."""
    dweight = np.zeros((n_rows, dy.shape[-1]))
    dweight[ids] += dy
    return dweight


def _averaged(ids: Array, dy: Array, n_rows: int) -> Array:
    counts = np.bincount(ids.reshape(-1), minlength=n_rows)
    return scatter_add(n_rows, ids, dy) / np.maximum(counts, 1)[:, None]


def _overwritten(embedding: Array, logits: Array) -> Array:
    return np.where((embedding != 0).any(axis=-1, keepdims=True), embedding, logits)


MISTAKES = (
    Mistake(
        "repeated ids lost",
        "embedding",
        "dweight[ids] += dout (or =) keeps only the last occurrence of a repeated id.",
        "3",
        "np.add.at(dweight, ids, dout), or index_add_ in PyTorch",
        lambda p: {"scatter": table_gradient_by_assignment},
        "E24",
    ),
    Mistake(
        "repeated ids averaged",
        "embedding",
        "The rows of a repeated id are averaged; they must be summed.",
        "3",
        "np.add.at(dweight, ids, dout), without a division",
        lambda p: {"scatter": _averaged},
    ),
    Mistake(
        "only the last sequence",
        "embedding",
        "Only one sequence of the batch contributes; all of them share the table.",
        "3",
        "scatter over batch and tokens",
        lambda p: {"scatter": lambda ids, dy, n_rows: scatter_add(n_rows, ids[-1], dy[-1])},
        "E26",
    ),
    Mistake(
        "one table per sequence",
        "embedding",
        "dweight has an extra batch axis: the sequences are not summed.",
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
        "The gradient of an id is added to the row before it.",
        "2",
        "ids count from 0: row = id",
        lambda p: {"table_ids": lambda ids: ids - 1},
        "E22",
    ),
    Mistake(
        "only the gradient through the embedding",
        "tied_embedding",
        "oheᵗ Δ_1: the table also computes the logits, and the gradient of that use is missing.",
        "TIE.1",
        "dweight = oheᵗ Δ_1 + doutᵗ features, the sum of both uses",
        lambda p: {"both_paths": lambda embedding, logits: embedding},
        "E27",
    ),
    Mistake(
        "only the gradient through the logits",
        "tied_embedding",
        "doutᵗ features: the table also embeds the tokens, and the gradient of that use is missing.",
        "TIE.1",
        "dweight = oheᵗ Δ_1 + doutᵗ features, the sum of both uses",
        lambda p: {"both_paths": lambda embedding, logits: logits},
        "E27",
    ),
    Mistake(
        "the embedding's rows overwrite those of the logits",
        "tied_embedding",
        "In the rows of the tokens that occur, oheᵗ Δ_1 replaces doutᵗ features instead of being added to it.",
        "TIE.1",
        "dweight = oheᵗ Δ_1 + doutᵗ features, the sum of both uses",
        lambda p: {"both_paths": _overwritten},
    ),
    Mistake(
        "the logits' gradient reshaped in place of transposed",
        "tied_embedding",
        "featuresᵗ dout, (features, vocabulary), is reshaped to (vocabulary, features): its entries are mixed up.",
        "TIE.1",
        "transpose it: doutᵗ features",
        lambda p: {"logits_path": lambda dy, features: (rows(features).T @ rows(dy)).reshape(dy.shape[-1], -1)},
    ),
)
