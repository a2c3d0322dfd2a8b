"""Known mistakes in multi-head attention with an output projection, packed, separate or across two sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.ops.attention import visible

SUM = "dx = dq w_qᵗ + dk w_kᵗ + dv w_vᵗ: x is the input of queries, keys and values"
Apply = Callable[..., dict[str, Piece]]


def thirds_by_head(qkv: Array, n_head: int) -> tuple[Array, ...]:
    """q, k and v from columns that hold q | k | v of one head after the other."""
    by_head = qkv.reshape(*qkv.shape[:-1], n_head, 3, -1)  # (B, T, H, 3, D)
    width = qkv.shape[-1] // 3
    return tuple(by_head[..., i, :].reshape(*qkv.shape[:-1], width) for i in range(3))


def columns_by_head(dq: Array, dk: Array, dv: Array, n_head: int) -> Array:
    """dq | dk | dv of one head after the other."""
    parts = [d.reshape(*d.shape[:-1], n_head, 1, -1) for d in (dq, dk, dv)]
    return np.concatenate(parts, axis=-2).reshape(*dq.shape[:-1], 3 * dq.shape[-1])


def _of_output(layer: str, x: str) -> tuple[Mistake, ...]:
    """Mistakes of the output projection, which all three layers have."""
    return (
        Mistake(
            "the output projection left out of the backward pass",
            layer,
            "dout itself is passed to the heads; they are followed by the output projection.",
            "FC.2",
            "the gradient of the heads' outputs is dout w_oᵗ",
            lambda p: {"to_heads": lambda dmixed, dout: dout},
            "E17",
        ),
        Mistake(
            f"dw_o from {x} in place of the heads' outputs",
            layer,
            f"dw_o = {x}ᵗ dout: the input of the output projection is the heads' outputs, concatenated.",
            "FC.3",
            "dw_o = (the heads' outputs)ᵗ dout",
            lambda p: {"to_projection": lambda mixed, x: x},
        ),
    )


def _of_projections(layer: str, inputs: str) -> tuple[Mistake, ...]:
    """Mistakes of separate projections."""
    return (
        Mistake(
            f"the gradients of {inputs} used for the parameters",
            layer,
            "dq w_qᵗ, dk w_kᵗ and dv w_vᵗ are gradients of the inputs; the parameters need dq, dk and dv.",
            "31.a",
            "dw_q = (its input)ᵗ dq, before the product with w_qᵗ; the same for k and v",
            lambda p: {"at_projection": lambda dy, weight: dy @ weight.T},
            "E17",
        ),
        Mistake(
            "dk and dv exchanged before their projections",
            layer,
            "The gradient of the keys goes through w_v, and that of the values through w_k.",
            "33",
            "dk belongs to w_k and b_k, dv to w_v and b_v",
            lambda p: {"to_projections": lambda dq, dk, dv: (dq, dv, dk)},
        ),
    )


def _paths(layer: str, piece: str, *applied: Callable[..., object]) -> tuple[Mistake, ...]:
    """Paths through queries, keys and values that are missing."""
    only_q, only_v = applied
    return (
        Mistake(
            "only the gradient through the queries",
            layer,
            "x is the input of queries, keys and values, but only the gradient of the queries is passed back.",
            "33",
            SUM,
            lambda p: {piece: only_q},
            "E40",
        ),
        Mistake(
            "only the gradient through the values",
            layer,
            "The attention weights are held constant: the gradient through queries and keys is missing.",
            "33",
            SUM,
            lambda p: {piece: only_v},
            "E40",
        ),
    )


PACKED = (
    *_paths(
        "self_attention",
        "side_by_side",
        lambda dq, dk, dv, n_head: np.concatenate([dq, 0 * dk, 0 * dv], axis=-1),
        lambda dq, dk, dv, n_head: np.concatenate([0 * dq, 0 * dk, dv], axis=-1),
    ),
    Mistake(
        "dq, dk, dv concatenated in the wrong order",
        "self_attention",
        "The columns of w_qkv are q | k | v, but dk comes first, then dq.",
        "33",
        "concatenate dq, dk, dv in the order of the forward pass",
        lambda p: {"side_by_side": lambda dq, dk, dv, n_head: np.concatenate([dk, dq, dv], axis=-1)},
    ),
    Mistake(
        "dv, dk, dq concatenated in reverse order",
        "self_attention",
        "The columns of w_qkv are q | k | v, but dv comes first.",
        "33",
        "concatenate dq, dk, dv in the order of the forward pass",
        lambda p: {"side_by_side": lambda dq, dk, dv, n_head: np.concatenate([dv, dk, dq], axis=-1)},
    ),
    Mistake(
        "the columns of w_qkv taken head by head",
        "self_attention",
        "Both passes read w_qkv as q | k | v of the first head, then of the second; here all queries come first.",
        "34",
        "split the columns into three parts first, then each part into heads; or permute the columns of w_qkv",
        lambda p: {"thirds": thirds_by_head, "side_by_side": columns_by_head},
    ),
    Mistake(
        "dq, dk, dv concatenated head by head",
        "self_attention",
        "The forward pass splits w_qkv into q | k | v first, but the gradients are put together head by head.",
        "34",
        "merge the heads of dq, dk and dv first, then concatenate the three",
        lambda p: {"side_by_side": columns_by_head},
    ),
    *_of_output("self_attention", "x"),
)

SEPARATE = (
    *_paths("self_attention_separate", "three_paths", lambda d_q, d_k, d_v: d_q, lambda d_q, d_k, d_v: d_v),
    Mistake(
        "the three paths averaged",
        "self_attention_separate",
        "dx is the mean of the gradients through queries, keys and values; they must be added.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: (d_q + d_k + d_v) / 3},
    ),
    Mistake(
        "the path through the values missing from dx",
        "self_attention_separate",
        "Only the gradients through queries and keys are added.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: d_q + d_k},
    ),
    *_of_projections("self_attention_separate", "x"),
    *_of_output("self_attention_separate", "x"),
)

CROSS = (
    Mistake(
        "dkey and dvalue summed",
        "cross_attention",
        "Both hold the gradient of one common input; key and value are separate inputs here.",
        "33",
        "return dkey = dk w_kᵗ and dvalue = dv w_vᵗ; add them outside, if both are the same array",
        lambda p: {"dkey": lambda dkey, dvalue: dkey + dvalue, "dvalue": lambda dkey, dvalue: dkey + dvalue},
    ),
    Mistake(
        "dvalue added to dkey",
        "cross_attention",
        "dkey holds the gradient of one common input; key and value are separate inputs here.",
        "33",
        "return dkey = dk w_kᵗ; add dvalue outside, if both are the same array",
        lambda p: {"dkey": lambda dkey, dvalue: dkey + dvalue},
    ),
    Mistake(
        "a causal mask",
        "cross_attention",
        "Later keys are masked, as in self-attention; here every query attends to all keys.",
        "13",
        "no mask: the keys are another sequence",
        lambda p: {"mask": lambda n_q, n_k, causal: visible(n_q, n_k, True, None, np.empty(0))},
    ),
    Mistake(
        "a causal mask that begins with the first key",
        "cross_attention",
        "Query i attends to keys up to i, as in self-attention; here every query attends to all keys.",
        "13",
        "no mask: the keys are another sequence",
        lambda p: {"mask": lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None]},
    ),
    *_of_projections("cross_attention", "query, key and value"),
    *_of_output("cross_attention", "query"),
)

MISTAKES = (*PACKED, *SEPARATE, *CROSS)
