"""The post-norm block by autograd; a path that is missing is detached, one that is added has the value 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planted.network import Reordered, Spoilt, attend
from planted.registry import autograd, plant

LAYER = "post_norm_block"


def past(x: torch.Tensor) -> torch.Tensor:
    """0, with the gradient of x."""
    return x - x.detach()


def block(x, *arguments, order=(0, 1, 2), **changes: Any):
    *parameters, dout = arguments

    def forward(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out):
        d = x.shape[-1:]
        into = x if changes.get("branch_1", True) else Spoilt.apply(x, torch.zeros_like)
        branch = attend(Reordered.apply(into @ w_qkv + b_qkv, order)) @ w_proj + b_proj
        skip = x if changes.get("skip_1", True) else x.detach()
        h = F.layer_norm(skip + branch, d, g1, b1)
        if changes.get("past_1"):
            h = h + past(x)
        into = h if changes.get("branch_2", True) else Spoilt.apply(h, torch.zeros_like)
        branch = torch.relu(into @ w_fc + b_fc) @ w_out + b_out
        skip = h if changes.get("skip_2", True) else h.detach()
        out = F.layer_norm(skip + branch, d, g2, b2)
        return out + past(h) if changes.get("past_2") else out

    return autograd(forward, [x, *parameters], dout)


def block_with(name: str, /, **changes: Any) -> None:
    @plant(LAYER, name)
    def backward(x, *arguments):
        return block(x, *arguments, **changes)


block_with("the skip connection around the MLP missing", skip_2=False)
block_with("the skip connection around attention missing", skip_1=False)
block_with("the MLP branch missing", branch_2=False)
block_with("the attention branch missing", branch_1=False)
block_with("the skip gradient of the MLP taken past ln_2", skip_2=False, past_2=True)
block_with("the skip gradient of attention taken past ln_1", skip_1=False, past_1=True)
block_with("only the gradient through the queries", order=(0, -1, -1))
block_with("dq, dk, dv concatenated in the wrong order", order=(1, 0, 2))
