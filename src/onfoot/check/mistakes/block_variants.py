"""Known mistakes between the layers of a post-norm block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Mistake, Piece


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = ""
) -> Mistake:
    return Mistake(name, "post_norm_block", explains, equation, fix, apply, errata)


MLP = "dh = the gradient from ln_2 + the gradient from the MLP"
ATTENTION = "dx = the gradient from ln_1 + the gradient from attention"

MISTAKES = (
    _mistake(
        "the skip connection around the MLP missing",
        "dh is only the MLP's gradient; the sum h + … passes the gradient from ln_2 to both terms.",
        "NET.3",
        MLP,
        lambda p: {"skip_mlp": lambda dsum, branch, dout: branch},
    ),
    _mistake(
        "the skip connection around attention missing",
        "dx is only attention's gradient; the sum x + … passes the gradient from ln_1 to both terms.",
        "NET.4",
        ATTENTION,
        lambda p: {"skip_attention": lambda dsum, branch, dh: branch},
    ),
    _mistake(
        "the MLP branch missing",
        "dh is only the gradient from ln_2.",
        "NET.3",
        MLP,
        lambda p: {"skip_mlp": lambda dsum, branch, dout: dsum},
    ),
    _mistake(
        "the attention branch missing",
        "dx is only the gradient from ln_1.",
        "NET.4",
        ATTENTION,
        lambda p: {"skip_attention": lambda dsum, branch, dh: dsum},
    ),
    _mistake(
        "the skip gradient of the MLP taken past ln_2",
        "dout itself is added, as in a pre-norm block; here the sum is normalised, so dout passes through ln_2 first.",
        "NET.3",
        MLP,
        lambda p: {"skip_mlp": lambda dsum, branch, dout: dout + branch},
    ),
    _mistake(
        "the skip gradient of attention taken past ln_1",
        "dh itself is added, as in a pre-norm block; here the sum is normalised, so dh passes through ln_1 first.",
        "NET.4",
        ATTENTION,
        lambda p: {"skip_attention": lambda dsum, branch, dh: dh + branch},
    ),
    _mistake(
        "only the gradient through the queries",
        "The tokens are the input of queries, keys and values, but only the gradient of the queries is passed back.",
        "33",
        "sum the gradients through q, k and v",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dq, 0 * dk, 0 * dv], axis=-1)},
        "E40",
    ),
    _mistake(
        "dq, dk, dv concatenated in the wrong order",
        "The columns of attn_weight are q | k | v, but dk comes first, then dq.",
        "33",
        "concatenate dq, dk, dv in the order of the forward pass",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dk, dq, dv], axis=-1)},
    ),
)
