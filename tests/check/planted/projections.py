"""Attention with an output projection: packed, separate, or across two sequences; the core by autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planted.network import N_HEAD, merge, split
from planted.registry import autograd, plant

PACKED, SEPARATE, CROSS = "self_attention", "self_attention_separate", "cross_attention"
Tensors = list[torch.Tensor]


def product(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bti,bto->io", x, d)


def heads(inputs: Tensors, pairs: list[Any], w_o, dout, causal: bool, **changes: Any) -> tuple[Tensors, Tensors]:
    """dq, dk, dv side by side, and dw_o with db_o."""
    qkv = [split(x @ w + b) for x, (w, b) in zip(inputs, pairs, strict=True)]

    def core(q, k, v):
        mask = changes.get("mask")
        return F.scaled_dot_product_attention(q, k, v, mask and mask(q.shape[-2], k.shape[-2]), is_causal=causal)

    mixed = merge(core(*qkv))
    dmixed = dout if changes.get("unprojected") else dout @ w_o.T
    grads = [merge(g) for g in autograd(core, qkv, split(dmixed))]
    return grads, [product(inputs[0] if changes.get("from_x") else mixed, dout), dout.sum((0, 1))]


def separate(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal=True, **changes: Any):
    pairs = [(w_q, b_q), (w_k, b_k), (w_v, b_v)]
    grads, of_output = heads([x] * 3, pairs, w_o, dout, causal, **changes)
    if changes.get("swap"):
        grads = [grads[0], grads[2], grads[1]]
    paths = [d @ w.T for d, (w, _) in zip(grads, pairs, strict=True)]
    if changes.get("at_inputs"):
        grads = paths
    dx = changes.get("paths", lambda q, k, v: q + k + v)(*paths)
    return dx, *(g for d in grads for g in (product(x, d), d.sum((0, 1)))), *of_output


def cross(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, **changes: Any):
    inputs, pairs = [query, key, value], [(w_q, b_q), (w_k, b_k), (w_v, b_v)]
    grads, of_output = heads(inputs, pairs, w_o, dout, False, **changes)
    if changes.get("swap"):
        grads = [grads[0], grads[2], grads[1]]
    dquery, dkey, dvalue = (d @ w.T for d, (w, _) in zip(grads, pairs, strict=True))
    if changes.get("at_inputs"):
        grads = [dquery, dkey, dvalue]
    if changes.get("memory"):
        dkey, dvalue = changes["memory"](dkey, dvalue)
    of_pairs = (g for x, d in zip(inputs, grads, strict=True) for g in (product(x, d), d.sum((0, 1))))
    return dquery, dkey, dvalue, *of_pairs, *of_output


def packed(x, w_qkv, b_qkv, w_o, b_o, dout, causal=True, **changes: Any):
    to_columns = changes.get("columns", lambda parts: torch.cat(parts, -1))
    if changes.get("by_head"):  # the columns of every head are q | k | v
        width = x.shape[-1] // N_HEAD
        places = torch.arange(3 * x.shape[-1]).reshape(N_HEAD, 3, width).transpose(0, 1).reshape(-1)
        w_qkv, b_qkv = w_qkv[:, places], b_qkv[places]
    pairs = list(zip(w_qkv.chunk(3, 1), b_qkv.chunk(3), strict=True))
    grads, of_output = heads([x] * 3, pairs, w_o, dout, causal, **changes)
    dqkv = to_columns(grads)
    dw_qkv, db_qkv = product(x, dqkv), dqkv.sum((0, 1))
    if changes.get("by_head"):
        back = torch.argsort(places)
        dw_qkv, db_qkv = dw_qkv[:, back], db_qkv[back]
    return dqkv @ w_qkv.T, dw_qkv, db_qkv, *of_output


def per_head(parts: Tensors) -> torch.Tensor:
    """dq | dk | dv of the first head, then of the second."""
    width = parts[0].shape[-1] // N_HEAD
    return torch.cat([d[..., h * width : (h + 1) * width] for h in range(N_HEAD) for d in parts], -1)


def packed_with(name: str, /, **changes: Any) -> None:
    @plant(PACKED, name)
    def backward(x, w_qkv, b_qkv, w_o, b_o, dout, causal=True):
        return packed(x, w_qkv, b_qkv, w_o, b_o, dout, causal, **changes)


def separate_with(name: str, /, **changes: Any) -> None:
    @plant(SEPARATE, name)
    def backward(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal=True):
        return separate(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal, **changes)


def cross_with(name: str, /, **changes: Any) -> None:
    @plant(CROSS, name)
    def backward(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
        return cross(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, **changes)


def zeros_but(i: int) -> Any:
    return lambda parts: torch.cat([d * (j == i) for j, d in enumerate(parts)], -1)


packed_with("only the gradient through the queries", columns=zeros_but(0))
packed_with("only the gradient through the values", columns=zeros_but(2))
packed_with("dq, dk, dv concatenated in the wrong order", columns=lambda d: torch.cat([d[1], d[0], d[2]], -1))
packed_with("dv, dk, dq concatenated in reverse order", columns=lambda d: torch.cat(d[::-1], -1))
packed_with("the columns of w_qkv taken head by head", by_head=True)
packed_with("dq, dk, dv concatenated head by head", columns=per_head)
separate_with("only the gradient through the queries", paths=lambda q, k, v: q)
separate_with("only the gradient through the values", paths=lambda q, k, v: v)
separate_with("the three paths averaged", paths=lambda q, k, v: torch.stack([q, k, v]).mean(0))
separate_with("the path through the values missing from dx", paths=lambda q, k, v: q + k)
separate_with("the gradients of x used for the parameters", at_inputs=True)
separate_with("dk and dv exchanged before their projections", swap=True)
cross_with("dkey and dvalue summed", memory=lambda k, v: (k + v, k + v))
cross_with("dvalue added to dkey", memory=lambda k, v: (k + v, v))
cross_with("the gradients of query, key and value used for the parameters", at_inputs=True)
cross_with("dk and dv exchanged before their projections", swap=True)
cross_with("a causal mask that begins with the first key", mask=lambda n, m: torch.ones(n, m, dtype=torch.bool).tril())
for planted_with, x in ((packed_with, "x"), (separate_with, "x"), (cross_with, "query")):
    planted_with("the output projection left out of the backward pass", unprojected=True)
    planted_with(f"dw_o from {x} in place of the heads' outputs", from_x=True)


@plant(CROSS, "a causal mask")
def aligned_at_the_end(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    """The last query sees the last key; a query that sees nothing has weights 0."""

    def forward(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o):
        q, k, v = split(query @ w_q + b_q), split(key @ w_k + b_k), split(value @ w_v + b_v)
        n, m = q.shape[-2], k.shape[-2]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -1e300)
        return merge((s.softmax(-1) * seen) @ v) @ w_o + b_o

    return autograd(forward, [query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o], dout)
