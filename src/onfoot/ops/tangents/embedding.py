"""The tangents of an embedding: it is linear in its table."""

from __future__ import annotations

from onfoot.arrays import Array, scatter_add
from onfoot.ops.embedding import EmbeddingSaved


def embedding_tangent(weight_dot: Array, saved: EmbeddingSaved) -> tuple[Array, None]:
    """ẏ = ohe(ids) ẇ: the rows of the direction."""
    return weight_dot[saved.ids], None  # eq EMB.2


def embedding_backward_tangent(dy: Array, dy_dot: Array, saved: EmbeddingSaved, saved_dot: None) -> Array:
    """The tangent of the gradient of weight."""
    return scatter_add(saved.n_rows, saved.ids, dy_dot)  # eq EMB.3
