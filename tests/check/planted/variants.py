"""Attention with dropout, rotary positions or grouped queries, head by head or by autograd, with one mistake each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from planted.registry import autograd, plant

DROPOUT, ROPE, GROUPED = "attention_dropout", "rope_attention", "grouped_query_attention"


def weights(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1)


# dropout


def dropout(q, k, v, keep, dout, causal=True, **changes: Any):
    rho = weights(q, k, causal)
    pattern = keep.bool() * 1.0 if changes.get("unscaled") else keep
    dropped = rho if changes.get("dv_of_all") else rho * pattern
    da = dout @ v.mT
    if changes.get("da", True):
        da = da * pattern
    for_softmax = rho * keep if changes.get("softmax_of_dropped") else rho
    ds = for_softmax * da - for_softmax * (for_softmax * da).sum(-1, keepdim=True)
    if changes.get("late"):
        ds = ds * keep
    ds = ds / q.shape[-1] ** 0.5
    return ds @ k, ds.mT @ q, dropped.mT @ dout


def dropout_with(name: str, /, **changes: Any) -> None:
    @plant(DROPOUT, name)
    def backward(q, k, v, keep, dout, causal=True):
        return dropout(q, k, v, keep, dout, causal, **changes)


dropout_with("dropout left out of the backward pass", da=False, dv_of_all=True)
dropout_with("keep missing from dρ", da=False)
dropout_with("keep missing from dv", dv_of_all=True)
dropout_with("weights after dropout in the softmax gradient", softmax_of_dropped=True, da=False)
dropout_with("weights after dropout in the softmax gradient, and keep once more", softmax_of_dropped=True)
dropout_with("keep after the gradient of softmax", da=False, late=True)
dropout_with("1/(1 − p) missing from the backward pass", unscaled=True)


# rotary positions


def turn(x: torch.Tensor, positions: torch.Tensor, sign: float = 1.0, adjacent: bool = False) -> torch.Tensor:
    """Pairs of features as complex numbers, turned by their angles."""
    half = x.shape[-1] // 2
    angle = sign * torch.outer(positions.double(), 10000.0 ** (-torch.arange(half).double() / half))
    first, second = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
    z = torch.complex(first.double(), second.double()) * torch.polar(torch.ones_like(angle), angle)
    together = torch.stack([z.real, z.imag], -1).flatten(-2) if adjacent else torch.cat([z.real, z.imag], -1)
    return together.to(x.dtype)


def rope(q, k, v, positions, dout, causal=True, **changes: Any):
    adjacent = changes.get("adjacent", False)

    def forwards(x):
        return turn(x, positions, adjacent=adjacent)

    def back(x):
        return turn(x, positions, -1.0, adjacent)

    unturned = changes.get("unturned", False)
    q_, k_ = (q, k) if unturned else (forwards(q), forwards(k))
    v_ = forwards(v) if changes.get("turned_v") else v
    rho = weights(q_, k_, causal)
    da = dout @ v_.mT
    ds = rho * (da - (rho * da).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    if changes.get("given"):
        q_, k_ = q, k
    dq, dk, dv = ds @ k_, ds.mT @ q_, rho.mT @ dout
    turns = changes.get("turns", (True, True, False))
    return tuple(back(d) if turned else d for d, turned in zip((dq, dk, dv), turns, strict=True))


def rope_with(name: str, /, **changes: Any) -> None:
    @plant(ROPE, name)
    def backward(q, k, v, positions, dout, causal=True):
        return rope(q, k, v, positions, dout, causal, **changes)


rope_with("dk not rotated back", turns=(True, False, False))
rope_with("dq not rotated back", turns=(False, True, False))
rope_with("q and k before rotation in dq and dk", given=True)
rope_with("q and k not rotated in the forward pass", unturned=True)
rope_with("no rotation at all", unturned=True, turns=(False, False, False))
rope_with("v rotated as well", turned_v=True, turns=(True, True, True))
rope_with("dv rotated back", turns=(True, True, True))
rope_with("adjacent features as pairs, in both passes", adjacent=True)


# grouped queries, one query head after the other


def grouped(q, k, v, dout, causal=True, **changes: Any):
    n_head, n_kv = q.shape[1], k.shape[1]
    reads = changes.get("reads", lambda h: h // (n_head // n_kv))
    adds = changes.get("adds", reads)
    if changes.get("tiled"):
        reads = lambda h: h % n_kv  # noqa: E731
    if changes.get("summed_as_tiles"):
        adds = lambda h: h % n_kv  # noqa: E731
    found: list[list[Any]] = [[], [], []]
    for h in range(n_head):
        pair = torch.as_tensor(k[:, reads(h)]), torch.as_tensor(v[:, reads(h)])
        grads = autograd(lambda a, b, c: weights(a, b, causal) @ c, [q[:, h], *pair], dout[:, h])
        for one, g in zip(found, grads, strict=True):
            one.append(g)
    dq, *shared = (torch.stack(one, 1) for one in found)
    kept = changes.get("kept", lambda heads: heads.sum(1))
    out = []
    for d in shared:
        groups = [d[:, [h for h in range(n_head) if adds(h) == j]] for j in range(n_kv)]
        out.append(torch.stack([kept(one) for one in groups], 1))
    unsummed = changes.get("unsummed", ())
    return dq, *(d if i in unsummed else o for i, (d, o) in enumerate(zip(shared, out, strict=True)))


def grouped_with(name: str, /, **changes: Any) -> None:
    @plant(GROUPED, name)
    def backward(q, k, v, dout, causal=True):
        return grouped(*map(torch.as_tensor, (q, k, v, dout)), causal, **changes)


grouped_with("dk and dv of the last query head of a group", kept=lambda heads: heads[:, -1])
grouped_with("dk and dv of the first query head of a group", kept=lambda heads: heads[:, 0])
grouped_with("dk and dv averaged over the group", kept=lambda heads: heads.mean(1))
grouped_with("dk and dv not summed over the group", unsummed=(0, 1))
grouped_with("dk summed over the group, dv not", unsummed=(1,))
grouped_with("key head h mod H_kv in place of h // G", tiled=True, summed_as_tiles=True)
grouped_with("the wrong query heads summed", summed_as_tiles=True)
grouped_with("keys and values tiled in the forward pass", tiled=True)


# ReLU, SiLU, softmax


@plant("relu", "the upstream gradient masked by its own sign")
def guided(x, dout):
    return np.where(dout > 0, dout, 0)


@plant("relu", "the mask missing")
def unmasked(x, dout):
    return dout


@plant("relu", "the mask reversed")
def reversed_mask(x, dout):
    return np.where(x < 0, dout, 0)


@plant("relu", "the function in place of its derivative")
def function_itself(x, dout):
    return dout * torch.relu(x)


@plant("relu", "the slope without dout")
def slope_alone(x, dout):
    return np.heaviside(x, 0.0)


@plant("relu", "a gradient at 0")
def at_zero(x, dout):
    return dout * np.heaviside(x, 1.0)


@plant("silu", "the function in place of its derivative")
def silu_itself(x, dout):
    return dout * torch.nn.functional.silu(x)


@plant("softmax", "the gradient of log-softmax")
def of_log(x, dout):
    return autograd(lambda x: x.log_softmax(-1), [x], dout)[0]
