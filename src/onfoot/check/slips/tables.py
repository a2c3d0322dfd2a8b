"""Slips in the gradient of a table of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import named


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "scatter" in layer.pieces.names():
        yield from _tables(layer)


def _tables(layer: Layer) -> Iterator[Mistake]:
    for row, words in ((0, "id 0"), (-1, "the last id")):

        def without(p: Pieces, case: Case, row: int = row) -> dict[str, Piece]:
            def scatter(ids: Array, dy: Array, n_rows: int) -> Array:
                found: Array = p.scatter(ids, dy, n_rows)
                found[row] = 0
                return found

            return {"scatter": scatter}

        says = f"{words} is taken for padding and gets no gradient"
        yield named(layer, says, "every id gets the rows of dout at its tokens", without, "scatter")
    yield named(
        layer,
        "repeated ids lost: only their first occurrence counts",
        "np.add.at(dweight, ids, dout), or index_add_ in PyTorch",
        lambda p, case: {"scatter": _first_only},
        "scatter",
    )
    yield named(
        layer,
        "the rows are added in an integer array, which cuts off the fractions",
        "np.zeros_like(weight) or zeros of dout's dtype, not of the ids'",
        lambda p, case: {"scatter": _in_integers},
        "scatter",
    )
    for dtype, words in ((np.trunc, "cut off"), (np.floor, "rounded down"), (np.round, "rounded")):
        yield named(
            layer,
            f"the rows added to the table are {words} to integers",
            "np.zeros_like(weight) or zeros of dout's dtype, not of the ids'",
            lambda p, case, f=dtype: {"scatter": lambda ids, dy, n_rows: f(p.scatter(ids, dy, n_rows))},
            "scatter",
        )
    if "both_paths" in layer.pieces.names():
        yield from _tied(layer)
        yield named(
            layer,
            "the gradient through the embedding overwrites that through the logits, in the rows of the ids",
            "add both: np.add.at(dweight, ids, …), not dweight[ids] = …",
            lambda p, case: {"scatter": _overwriting, "both_paths": _where_given},
            "scatter",
            "both_paths",
        )
        yield named(
            layer,
            "the gradient through the logits overwrites that through the embedding",
            "add both gradients",
            lambda p, case: {"both_paths": lambda embedding, logits: logits + 0 * embedding},
            "both_paths",
        )


def _tied(layer: Layer) -> Iterator[Mistake]:
    """Slips in which a table's two uses disturb each other."""
    at = layer.arguments.index("ids")

    def own_entry(p: Pieces, case: Case) -> dict[str, Piece]:
        ids = case.inputs[at]

        def without(dy: Array) -> Array:
            return dy * (1 - np.eye(dy.shape[-1])[ids])

        return {
            "through_logits": lambda dy, weight: p.through_logits(without(dy), weight),
            "logits_path": lambda dy, features: p.logits_path(without(dy), features),
        }

    yield named(
        layer,
        "the logit of a token's own id is left out, in both paths",
        "the logit weight[id] · weight[id] has a gradient through both of its factors",
        own_entry,
        "through_logits",
        "logits_path",
    )
    if layer.name == "tied_embedding":
        for whole, says in ((False, "after each token"), (True, "between the two paths")):

            def stale(p: Pieces, case: Case, whole: bool = whole) -> dict[str, Piece]:
                ids, weight, _ = case.inputs
                return {
                    "through_logits": lambda dy, weight: _updated_too_early(ids, weight, dy, whole)[0],
                    "logits_path": lambda dy, _: p.logits_path(dy, _updated_too_early(ids, weight, dy, whole)[1][ids]),
                }

            yield named(
                layer,
                f"the gradient is added to the table itself {says}, so later products use a changed table",
                "add to an array of zeros; the table stays as it is until the gradient is complete",
                stale,
                "through_logits",
                "logits_path",
            )


def _updated_too_early(ids: Array, weight: Array, dout: Array, whole: bool) -> tuple[Array, Array]:
    """(gradient of each token's features, table); the first is added to the table token by token, or as a whole."""
    table, back = weight.copy(), np.zeros((*ids.shape, weight.shape[-1]))
    for place in np.ndindex(ids.shape):
        back[place] = dout[place] @ (weight if whole else table)
        table[ids[place]] += back[place]
    return back, table


def _in_integers(ids: Array, dy: Array, n_rows: int) -> Array:
    """Every sum is cut off as soon as a row is added."""
    out = np.zeros((n_rows, dy.shape[-1]))
    for place in np.ndindex(ids.shape):
        out[ids[place]] = np.trunc(out[ids[place]] + dy[place])
    return out


def _first_only(ids: Array, dy: Array, n_rows: int) -> Array:
    out = np.zeros((n_rows, dy.shape[-1]))
    out[ids.ravel()[::-1]] = dy.reshape(-1, dy.shape[-1])[::-1]
    return out


def _overwriting(ids: Array, dy: Array, n_rows: int) -> Array:
    """The last occurrence of each id; nan in the rows of other ids."""
    out = np.full((n_rows, dy.shape[-1]), np.nan)
    out[ids] = dy
    return out


def _where_given(embedding: Array, logits: Array) -> Array:
    return np.where(np.isnan(embedding), logits, embedding)
