"""Embedding: one row of a table per id."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, scatter_add


class EmbeddingSaved(NamedTuple):
    ids: Array
    n_rows: int


def embedding_forward(ids: Array, weight: Array) -> tuple[Array, EmbeddingSaved]:
    """y = ohe(ids) w: the row of `weight` for each id."""
    y = weight[ids]  # eq 2  (..., C); the product with the one-hot matrix picks rows
    return y, EmbeddingSaved(ids, weight.shape[0])


def embedding_backward(dy: Array, saved: EmbeddingSaved) -> Array:
    """The gradient of weight. If an id occurs twice, both rows are added."""
    return scatter_add(saved.n_rows, saved.ids, dy)  # eq 3  oheᵗ dy, (V, C)


def embedding_input_gradient(dy: Array, weight: Array) -> Array:
    """The gradient of ohe(ids), (..., V): the first-order effect on the loss of each token of the vocabulary."""
    return dy @ weight.T  # eq EMB.1  Δ_0 = Δ_1 w_embᵗ
