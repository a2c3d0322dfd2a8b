"""Attention, head by head in plain two-dimensional NumPy as a first implementation would be, with one mistake each.

Mistakes of the forward pass whose gradient belongs to it are autograd's gradients of that forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from planted.registry import autograd, plant, plant_change

Array = np.ndarray
LAYER = "attention"


def may_see(n: int, n_keys: int, causal: bool) -> Array:
    return np.array([[not causal or j - i <= n_keys - n for j in range(n_keys)] for i in range(n)])


def row_softmax(scores: Array, seen: Array) -> Array:
    out = np.zeros_like(scores)
    for i, row in enumerate(scores):
        if seen[i].any():
            e = np.exp(row[seen[i]] - row[seen[i]].max())
            out[i, seen[i]] = e / e.sum()
    return out


def jacobian_rule(da: Array, a: Array) -> Array:
    """The gradient of the scores, by the Jacobian of every row."""
    return np.stack([(np.diag(r) - np.outer(r, r)) @ d for d, r in zip(da, a, strict=True)])


def head(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    causal: bool,
    rule: Callable[[Array, Array], Array] = jacobian_rule,
    weights: Callable[..., Array] = row_softmax,
    see: Callable[..., Array] = may_see,
    forward_scale: float = -0.5,
    backward_scale: float = -0.5,
    dq: Callable[..., Array] = lambda ds, q, k: np.einsum("ij,jd->id", ds, k),
    dk: Callable[..., Array] = lambda ds, q, k: np.einsum("ij,id->jd", ds, q),
    dv: Callable[..., Array] = lambda a, do: np.einsum("ij,id->jd", a, do),
) -> tuple[Array, Array, Array]:
    """One head; the scales are powers of d_k."""
    d = q.shape[1]
    a = weights(np.einsum("id,jd->ij", q, k) * d**forward_scale, see(len(q), len(k), causal))
    ds = rule(np.einsum("id,jd->ij", do, v), a) * d**backward_scale
    return dq(ds, q, k), dk(ds, q, k), dv(a, do)


def all_heads(q: Array, k: Array, v: Array, dout: Array, causal: bool = True, **changes: Any) -> tuple[Array, ...]:
    """Runs all heads one by one and stacks the results."""
    with np.errstate(all="ignore"):
        found = [
            [head(q[b, h], k[b, h], v[b, h], dout[b, h], causal, **changes) for h in range(q.shape[1])]
            for b in range(q.shape[0])
        ]
    return tuple(np.stack([np.stack([one[g] for one in row]) for row in found]) for g in range(3))


def with_one(name: str, /, **changes: Any) -> None:
    """Plants a mistake that is one change of a head."""

    plant_change(LAYER, name, all_heads, **changes)


with_one("1/√d_k missing from the backward pass", backward_scale=0)
with_one("1/√d_k missing from the forward pass", forward_scale=0)
with_one("1/√d_k twice in the backward pass", backward_scale=-1)
with_one("row sums broadcast along the wrong axis", rule=lambda da, a: (da - (da * a).sum(axis=1)) * a)
with_one("the sum in the softmax gradient over queries", rule=lambda da, a: (da - (da * a).sum(axis=0)) * a)
with_one("an elementwise product in place of the row sum", rule=lambda da, a: a * da - a * a * da)
with_one("the mean in place of the weighted sum", rule=lambda da, a: a * da - np.mean(a * da, axis=1)[:, np.newaxis])
with_one("matrix products in the gradient of softmax", rule=lambda da, a: da * a - a @ (da.T @ a))
with_one(
    "softmax's Jacobian without its outer product",
    rule=lambda da, a: np.stack([d @ (r * (np.eye(len(r)) - r.T)) for d, r in zip(da, a, strict=True)]),
)
with_one("the sum missing from the gradient of softmax", rule=lambda da, a: a * da)
with_one("ρ multiplied into the gradient of ρ", rule=lambda da, a: a * (a * da - (a * a * da).sum(1)[:, None]))
with_one("ρ and its gradient exchanged in the gradient of softmax", rule=lambda d, a: d * (a - (d * a).sum(1)[:, None]))
with_one("softmax left out of the backward pass", rule=lambda da, a: da)
with_one("softmax and scale left out of the backward pass", rule=lambda da, a: da, backward_scale=0)
with_one("dk transposed", dk=lambda ds, q, k: np.dot(q.T, ds))
with_one("dk = dS qᵗ", dk=lambda ds, q, k: np.dot(ds, q.T))
with_one("dk without the transpose of dS", dk=lambda ds, q, k: np.dot(ds, q))
with_one("dq with dS transposed", dq=lambda ds, q, k: np.dot(ds.T, k))
with_one("dq from q in place of k", dq=lambda ds, q, k: np.dot(ds, q))
with_one("dk from k in place of q", dk=lambda ds, q, k: np.dot(ds.T, k))
with_one("dv without the transpose of ρ", dv=lambda a, do: np.dot(a, do))
with_one("softmax over queries", weights=lambda s, seen: row_softmax(s.T, seen.T).T)
with_one(
    "softmax without subtracting the maximum",
    weights=lambda s, seen: (
        (seen * np.exp(np.where(seen, s, -np.inf))) / np.exp(np.where(seen, s, -np.inf)).sum(1)[:, None]
    ),
)

# the mask

with_one("the mask multiplied into the scores", weights=lambda s, seen: row_softmax(s * seen, np.ones_like(seen)))
with_one(
    "the mask after softmax, and masked weights in the softmax gradient",
    weights=lambda s, seen: row_softmax(s, np.ones_like(seen)) * seen,
    rule=lambda da, a: np.stack([r * (d - d @ r) for d, r in zip(da, a, strict=True)]),
)
with_one("no mask", see=lambda n, m, causal: np.full((n, m), True))
with_one("a mask that lets the next token through", see=lambda n, m, causal: np.tril(np.full((n, m), True), m - n + 1))
with_one(
    "the diagonal masked in the gradient of the scores",
    rule=lambda da, a: np.tril((da - (da * a).sum(1)[:, None]) * a, a.shape[1] - a.shape[0] - 1),
)
with_one("the mask transposed", see=lambda n, m, causal: np.triu(np.full((n, m), True), m - n))
with_one("the mask aligned with the first key", see=lambda n, m, causal: np.tril(np.full((n, m), True)))
with_one(
    "nan in fully masked rows",
    weights=lambda s, seen: np.stack(
        [np.exp(r - r.max()) / np.exp(r - r.max()).sum() for r in np.where(seen, s, float("-inf"))]
    ),
    rule=lambda da, a: (da - (da * a).sum(1)[:, None]) * a,
)
with_one("equal weights in fully masked rows", weights=lambda s, seen: row_softmax(s - 1e9 * ~seen, np.ones_like(seen)))


# gradients of a wrong forward pass


def seen_by(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    return torch.from_numpy(may_see(q.shape[-2], k.shape[-2], causal))


@plant(LAYER, "1/√d_k missing from both passes")
def unscaled(q, k, v, dout, causal=True):
    def forward(q, k, v):
        return (q @ k.mT).masked_fill(~seen_by(q, k, causal), -1e300).softmax(-1) @ v

    return autograd(forward, [q, k, v], dout)


@plant(LAYER, "d_k in place of √d_k")
def by_width(q, k, v, dout, causal=True):
    def forward(q, k, v):
        return (q @ k.mT / q.shape[-1]).masked_fill(~seen_by(q, k, causal), -1e300).softmax(-1) @ v

    return autograd(forward, [q, k, v], dout)


@plant(LAYER, "the mask multiplied into the scores, in both passes")
def product_mask(q, k, v, dout, causal=True):
    def forward(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5 * seen_by(q, k, causal)).softmax(-1) @ v

    return autograd(forward, [q, k, v], dout)


@plant(LAYER, "the mask after softmax")
def late_mask(q, k, v, dout, causal=True):
    def forward(q, k, v):
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) * seen_by(q, k, causal)) @ v

    return autograd(forward, [q, k, v], dout)
