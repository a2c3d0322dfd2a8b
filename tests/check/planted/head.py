"""One head of self-attention by autograd, with changed gradients."""

from __future__ import annotations

from typing import Any

import torch

from planted.registry import autograd, plant


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings, by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]).double(), 10000.0 ** (-torch.arange(half).double() / half))
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, causal=True, rotary=False, keep=None, **changes: Any):
    """The gradients of a and of the six parameters; a path whose entry in `paths` is 0 is left out."""
    given = (w_q, b_q, w_k, b_k, w_v, b_v)

    def forward(a, w_q, b_q, w_k, b_k, w_v, b_v):
        through = [a if path else a.detach() for path in changes.get("paths", (1, 1, 1))]
        q, k = (x @ w + b for x, w, b in zip(through, (w_q, w_k), (b_q, b_k), strict=False))
        if rotary:
            q, k = turned(q), turned(k)
        s = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        rho = s.softmax(-1)
        return (rho if keep is None else rho * keep) @ (through[2] @ w_v + b_v)

    return autograd(forward, [a, *given], dout)


def head_with(name: str, /, **changes: Any) -> None:
    @plant("head", name)
    def backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, causal=True, rotary=False):
        return head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, causal, rotary, **changes)


head_with("only the gradient through the queries", paths=(1, 0, 0))
head_with("only the gradient through the values", paths=(0, 0, 1))


@plant("head", "db_k = 0 with rotary embeddings", rotary=True)
def dead_bias(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    *before, _, dw_v, db_v = head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, rotary=True)
    return *before, torch.zeros_like(b_k), dw_v, db_v


@plant("head", "the gradients of a used for the parameters")
def behind_the_weights(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    da, *_ = head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout)
    found = [da]
    for path in torch.eye(3).tolist():
        one = head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, paths=path)[0]  # Δ_q, then Δ_k, then Δ_v
        found += [torch.einsum("bti,btj->ij", a, one), one.sum((0, 1))]
    return tuple(found)


@plant("head_dropout", "db_v without dropout")
def bias_free_of_weights(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    return *head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, keep=keep)[:-1], dout.sum((0, 1))


@plant("head_dropout", "dropout left out of the backward pass")
def without_pattern(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    return head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout)


@plant("head_dropout", "weights after dropout in the softmax gradient")
def overwritten(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(a.shape[1], a.shape[1]).triu(1) > 0, -torch.inf)
    rho = s.softmax(-1) * keep
    drho = dout @ v.mT
    ds = rho * (drho - (rho * drho).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dq, dk, dv = ds @ k, ds.mT @ q, rho.mT @ dout
    grads = [g for d in (dq, dk, dv) for g in (torch.einsum("bti,btj->ij", a, d), d.sum((0, 1)))]
    return dq @ w_q.T + dk @ w_k.T + dv @ w_v.T, *grads
