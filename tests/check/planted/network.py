"""Multi-head attention and GPT-2's block, with their own mistakes.

A mistake between layers is planted by detaching: what autograd does not see is a path that is missing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planted.registry import autograd, plant

N_HEAD = 2


def split(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (N_HEAD, -1)).permute(0, 2, 1, 3)


def merge(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1, 3).flatten(2)


def split_wrongly(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], N_HEAD, x.shape[1], -1)


def merge_wrongly(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def multi_head(query, key, value, w_q, w_k, w_v, dout, causal, into=split, dout_into=split, back=merge):
    """The core by autograd, the projections by hand."""
    query, key, value, w_q, w_k, w_v, dout = map(torch.as_tensor, (query, key, value, w_q, w_k, w_v, dout))
    heads = [into(x @ w) for x, w in ((query, w_q), (key, w_k), (value, w_v))]

    def core(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    grads = [back(g) for g in autograd(core, heads, dout_into(dout))]
    inputs = [g @ w.T for g, w in zip(grads, (w_q, w_k, w_v), strict=True)]
    return (*inputs, *(torch.einsum("bti,btj->ij", x, g) for x, g in zip((query, key, value), grads, strict=True)))


def multi_head_with(name: str, /, **changes: Any) -> None:
    @plant("multi_head", name)
    def backward(query, key, value, w_q, w_k, w_v, dout, causal=True):
        return multi_head(query, key, value, w_q, w_k, w_v, dout, causal, **changes)


multi_head_with(
    "heads split and merged without a transpose", into=split_wrongly, dout_into=split_wrongly, back=merge_wrongly
)
multi_head_with("heads split without a transpose", into=split_wrongly, dout_into=split_wrongly)
multi_head_with("dout split into heads without a transpose", dout_into=split_wrongly)
multi_head_with("heads merged without a transpose", back=merge_wrongly)


# the block


def attend(qkv: torch.Tensor) -> torch.Tensor:
    return merge(F.scaled_dot_product_attention(*(split(z) for z in qkv.chunk(3, -1)), is_causal=True))


class Reordered(torch.autograd.Function):
    """The identity, with the q, k and v parts of its gradient reordered or removed."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.order = order
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        thirds = dy.chunk(3, -1)
        return torch.cat([thirds[i] if i >= 0 else torch.zeros_like(thirds[0]) for i in ctx.order], -1), None


class Spoilt(torch.autograd.Function):
    """The identity, with its gradient changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def block(x, *arguments, skip_1=True, skip_2=True, branch_1=True, branch_2=True, order=(0, 1, 2), activation=None):
    *parameters, dout = arguments

    def forward(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out):
        d = x.shape[-1:]
        before = x if branch_1 else Spoilt.apply(x, torch.zeros_like)
        qkv = Reordered.apply(F.layer_norm(before, d, g1, b1) @ w_qkv + b_qkv, order)
        h = (x if skip_1 else x.detach()) + attend(qkv) @ w_proj + b_proj
        before = h if branch_2 else Spoilt.apply(h, torch.zeros_like)
        gelu = activation or (lambda z: F.gelu(z, approximate="tanh"))
        return (h if skip_2 else h.detach()) + gelu(F.layer_norm(before, d, g2, b2) @ w_fc + b_fc) @ w_out + b_out

    return autograd(forward, [x, *parameters], dout)


def block_with(name: str, /, **changes: Any) -> None:
    @plant("block", name)
    def backward(x, *arguments):
        return block(x, *arguments, **changes)


block_with("the skip connection around the MLP missing", skip_2=False)
block_with("the skip connection around attention missing", skip_1=False)
block_with("the MLP branch missing", branch_2=False)
block_with("the attention branch missing", branch_1=False)
block_with("only the gradient through the queries", order=(0, -1, -1))
block_with("dq, dk, dv concatenated in the wrong order", order=(1, 0, 2))
