"""What goes wrong between the layers of a block."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Mistake

MISTAKES = (
    Mistake(
        "the skip beside the feed-forward missing",
        "block",
        "Δ_5 is the branch's gradient alone; the sum h + … sends dout to both its terms.",
        "NET.1",
        "add dout to the gradient that comes back through ln_2",
        lambda p: {"skip_mlp": lambda d10, branch: branch},
    ),
    Mistake(
        "the skip beside attention missing",
        "block",
        "dx is the branch's gradient alone; the sum x + … sends Δ_5 to both its terms.",
        "NET.2",
        "add Δ_5 to the gradient that comes back through ln_1",
        lambda p: {"skip_attention": lambda d5, branch: branch},
    ),
    Mistake(
        "the feed-forward branch missing",
        "block",
        "Δ_5 = dout: what comes back through ln_2 is not added.",
        "NET.1",
        "Δ_5 = dout + the gradient that comes back through ln_2",
        lambda p: {"skip_mlp": lambda d10, branch: d10},
    ),
    Mistake(
        "the attention branch missing",
        "block",
        "dx = Δ_5: what comes back through ln_1 is not added.",
        "NET.2",
        "dx = Δ_5 + the gradient that comes back through ln_1",
        lambda p: {"skip_attention": lambda d5, branch: d5},
    ),
    Mistake(
        "the queries' path alone",
        "block",
        "The tokens are query, key and value at once, but only the gradient of the queries goes back.",
        "33",
        "sum the gradients through q, k and v",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dq, 0 * dk, 0 * dv], axis=-1)},
        "E40",
    ),
    Mistake(
        "dq, dk, dv side by side in another order",
        "block",
        "The columns of attn_weight are q | k | v; here dk stands first, then dq.",
        "33",
        "concatenate dq, dk, dv in the order of the forward pass",
        lambda p: {"side_by_side": lambda dq, dk, dv: np.concatenate([dk, dq, dv], axis=-1)},
    ),
)
