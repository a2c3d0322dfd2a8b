"""Known mistakes in attention with dropout, with rotary positions and with grouped queries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.check.layers.attention_variants import by_group
from onfoot.check.layers.rope import rotate
from onfoot.check.mistakes.rope import rotate_adjacent

Apply = Callable[..., dict[str, Piece]]


# dropout


def _dropout(name: str, explains: str, fix: str, apply: Apply, equation: str = "DO.2") -> Mistake:
    return Mistake(name, "attention_dropout", explains, equation, fix, apply)


BOTH = "use keep ∘ ρ in dv, and keep ∘ dρ before the gradient of softmax"

DROPOUT = (
    _dropout(
        "dropout left out of the backward pass",
        "The gradient is not multiplied by keep: dropped weights get a gradient, and kept ones too small a gradient.",
        BOTH,
        lambda p: {"dropped": lambda rho, keep: rho, "through_dropout": lambda drho, keep: drho},
    ),
    _dropout(
        "keep missing from dρ",
        "dv uses the dropped weights, but the gradient of the weights is not multiplied by keep.",
        BOTH,
        lambda p: {"through_dropout": lambda drho, keep: drho},
    ),
    _dropout(
        "keep missing from dv",
        "dv = ρᵗ dout with the weights before dropout; the values were averaged with keep ∘ ρ.",
        BOTH,
        lambda p: {"dropped": lambda rho, keep: rho},
    ),
    _dropout(
        "weights after dropout in the softmax gradient",
        "keep ∘ ρ is used instead of ρ, but softmax comes before dropout.",
        "ds = (keep ∘ dρ − Σ keep ∘ dρ ∘ ρ) ∘ ρ, with ρ the output of softmax",
        lambda p: {"rho_for_softmax": lambda rho, keep: rho * keep, "through_dropout": lambda drho, keep: drho},
        "25",
    ),
    _dropout(
        "weights after dropout in the softmax gradient, and keep once more",
        "keep ∘ ρ is used instead of ρ, and dρ is multiplied by keep as well.",
        "ds = (keep ∘ dρ − Σ keep ∘ dρ ∘ ρ) ∘ ρ, with ρ the output of softmax",
        lambda p: {"rho_for_softmax": lambda rho, keep: rho * keep},
        "25",
    ),
    _dropout(
        "keep after the gradient of softmax",
        "The gradient of the scores is multiplied by keep; dropout comes after softmax, so its gradient comes before.",
        BOTH,
        lambda p: {
            "through_dropout": lambda drho, keep: drho,
            "dscores_kept": lambda dscores, keep: dscores * keep,
        },
    ),
    _dropout(
        "1/(1 − p) missing from the backward pass",
        "Dropped entries are set to 0, but the kept ones are not multiplied by 1/(1 − p).",
        "multiply by keep itself, which is 0 or 1/(1 − p)",
        lambda p: {
            "dropped": lambda rho, keep: rho * (keep > 0),
            "through_dropout": lambda drho, keep: drho * (keep > 0),
        },
    ),
)


# rotary positions


def _rope(name: str, explains: str, fix: str, apply: Apply, equation: str = "ROPE.5") -> Mistake:
    return Mistake(name, "rope_attention", explains, equation, fix, apply)


BACK = "rotate dq and dk back by the angles of their positions"

ROTARY = (
    _rope(
        "dk not rotated back",
        "dk is the gradient of the rotated keys; that of q is rotated back.",
        BACK,
        lambda p: {"dk_below": lambda dk, rotated_back: dk},
    ),
    _rope(
        "dq not rotated back",
        "dq is the gradient of the rotated queries; that of k is rotated back.",
        BACK,
        lambda p: {"dq_below": lambda dq, rotated_back: dq},
    ),
    _rope(
        "q and k before rotation in dq and dk",
        "dq = dS k and dk = dSᵗ q with the given q and k; the scores are products of the rotated ones.",
        "dq = dS k̃ and dk = dSᵗ q̃, then rotate both back",
        lambda p: {"for_products": lambda rotated, before: before},
        "ATT.2",
    ),
    _rope(
        "q and k not rotated in the forward pass",
        "The weights are recomputed from the given q and k, without their positions.",
        "rotate q and k before the scores",
        lambda p: {"rotated": lambda x, angle: x},
        "ROPE.4",
    ),
    _rope(
        "no rotation at all",
        "Neither q and k nor their gradients are rotated: this is attention without positions.",
        "rotate q and k before the scores, and dq and dk back",
        lambda p: {"rotated": lambda x, angle: x, "rotate_back": lambda dy, angles: 1.0 * dy},
        "ROPE.4",
    ),
    _rope(
        "v rotated as well",
        "The values are rotated and dv is rotated back; only queries and keys have positions.",
        "rotate q and k only",
        lambda p: {"rotated_v": rotate, "dv_below": lambda dv, angle: rotate(dv, -angle)},
        "ROPE.4",
    ),
    _rope(
        "dv rotated back",
        "dv is rotated back like dq and dk, but v was not rotated.",
        "return dv = ρᵗ dout as it is",
        lambda p: {"dv_below": lambda dv, angle: rotate(dv, -angle)},
    ),
    _rope(
        "adjacent features as pairs, in both passes",
        "Features 2i and 2i + 1 are rotated together; this layer pairs features i and i + D/2.",
        "pair feature i with feature i + D/2; or permute the weights if the interleaved layout is intended",
        lambda p: {"rotated": rotate_adjacent, "rotate_back": lambda dy, angles: rotate_adjacent(dy, -angles)},
        "ROPE.4",
    ),
)


# grouped queries


def _grouped(name: str, explains: str, fix: str, apply: Apply, equation: str = "GQA.2") -> Mistake:
    return Mistake(name, "grouped_query_attention", explains, equation, fix, apply)


def _tiled(x: Array, n_head: int) -> Array:
    """Query head h reads key head h % Hkv."""
    return np.tile(x, (1, n_head // x.shape[1], 1, 1))


def _summed_as_tiles(d: Array, n_kv: int) -> Array:
    return d.reshape(d.shape[0], -1, n_kv, *d.shape[2:]).sum(axis=1)


def _both(function: Callable[[Array, int], Array]) -> Apply:
    return lambda p: {"dk_of_group": function, "dv_of_group": function}


ADD = "dk and dv: the sum over the G query heads that share a key head"

GROUPED = (
    _grouped(
        "dk and dv of the last query head of a group",
        "Each query head overwrites the gradient of the one before; all heads of a group share the keys and values.",
        ADD,
        _both(lambda d, n_kv: by_group(d, n_kv)[:, :, -1]),
    ),
    _grouped(
        "dk and dv of the first query head of a group",
        "Only one query head contributes; all heads of a group share the keys and values.",
        ADD,
        _both(lambda d, n_kv: by_group(d, n_kv)[:, :, 0]),
    ),
    _grouped(
        "dk and dv averaged over the group",
        "The gradients of the query heads of a group are averaged; they must be summed.",
        ADD,
        _both(lambda d, n_kv: by_group(d, n_kv).mean(axis=2)),
    ),
    _grouped(
        "dk and dv not summed over the group",
        "dk and dv have one entry per query head: the repeated keys and values were not summed again.",
        ADD,
        _both(lambda d, n_kv: 1.0 * d),
    ),
    _grouped(
        "dk summed over the group, dv not",
        "dv has one entry per query head: it needs the same sum as dk.",
        ADD,
        lambda p: {"dv_of_group": lambda d, n_kv: 1.0 * d},
        "GQA.3",
    ),
    _grouped(
        "key head h mod H_kv in place of h // G",
        "The keys and values are tiled, 0 1 0 1, in both passes; query heads of a group are neighbours, 0 0 1 1.",
        "np.repeat along the head axis (repeat_interleave in PyTorch), not np.tile",
        lambda p: {"repeated": _tiled, "dk_of_group": _summed_as_tiles, "dv_of_group": _summed_as_tiles},
        "GQA.1",
    ),
    _grouped(
        "the wrong query heads summed",
        "dk and dv are summed as if the keys were tiled, 0 1 0 1; in the forward pass they are repeated, 0 0 1 1.",
        "reshape the heads to (H_kv, G) and sum over G",
        _both(_summed_as_tiles),
    ),
    _grouped(
        "keys and values tiled in the forward pass",
        "Query head h reads key head h mod H_kv, but the gradients are summed over neighbours.",
        "np.repeat along the head axis (repeat_interleave in PyTorch), not np.tile",
        lambda p: {"repeated": _tiled},
        "GQA.1",
    ),
)

MISTAKES = (*DROPOUT, *ROTARY, *GROUPED)
