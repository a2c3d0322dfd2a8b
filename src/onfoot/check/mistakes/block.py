"""Known mistakes between the layers of a block."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Mistake

MISTAKES = (
    Mistake(
        "the skip connection around the MLP missing",
        "block",
        "Δ_5 is only the branch's gradient; the sum h + … passes dout to both terms.",
        "NET.1",
        "add dout to the gradient from ln_2",
        lambda p: {"skip_mlp": lambda d10, branch: branch},
    ),
    Mistake(
        "the skip connection around attention missing",
        "block",
        "dx is only the branch's gradient; the sum x + … passes Δ_5 to both terms.",
        "NET.2",
        "add Δ_5 to the gradient from ln_1",
        lambda p: {"skip_attention": lambda d5, branch: branch},
    ),
    Mistake(
        "the MLP branch missing",
        "block",
        "Δ_5 = dout: the gradient from ln_2 is not added.",
        "NET.1",
        "Δ_5 = dout + the gradient from ln_2",
        lambda p: {"skip_mlp": lambda d10, branch: d10},
    ),
    Mistake(
        "the attention branch missing",
        "block",
        "dx = Δ_5: the gradient from ln_1 is not added.",
        "NET.2",
        "dx = Δ_5 + the gradient from ln_1",
        lambda p: {"skip_attention": lambda d5, branch: d5},
    ),
    Mistake(
        "only the gradient through the queries",
        "block",
        "The tokens are the input of queries, keys and values, but only the gradient of the queries is passed back.",
        "33",
        "sum the gradients through q, k and v",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dq, 0 * dk, 0 * dv], axis=-1)},
        "E40",
    ),
    Mistake(
        "dq, dk, dv concatenated in the wrong order",
        "block",
        "The columns of attn_weight are q | k | v, but dk comes first, then dq.",
        "33",
        "concatenate dq, dk, dv in the order of the forward pass",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dk, dq, dv], axis=-1)},
    ),
)
