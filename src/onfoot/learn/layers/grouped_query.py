"""Grouped-query attention, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention
from onfoot.learn.layers.own import mistake
from onfoot.ops import grouped_query_backward, grouped_query_forward
from onfoot.ops.grouped_query import grouped, joined

PIECES = Pieces(
    **vars(attention.PIECES),
    grouped=grouped,
    grouped_dout=grouped,
    joined=joined,
    over_group=lambda d: d.sum(axis=-3),
)


def steps(p: Pieces, q: Array, k: Array, v: Array, dout: Array) -> Gradients:
    n_kv = k.shape[-3]
    shared = k[..., None, :, :], v[..., None, :, :]
    dq, dk, dv = attention.steps(p, p.grouped(q, n_kv), *shared, p.grouped_dout(dout, n_kv), causal=True)
    return p.joined(dq), p.over_group(dk), p.over_group(dv)


def reference(q: Array, k: Array, v: Array, dout: Array) -> Gradients:
    return grouped_query_backward(dout, grouped_query_forward(q, k, v)[1])


def cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, b: int, n_kv: int, group: int, n: int, d: int) -> Case:
        draw, heads = rng.standard_normal, n_kv * group
        q, k, v, dout = draw((b, heads, n, d)), draw((b, n_kv, n, d)), draw((b, n_kv, n, d)), draw((b, heads, n, d))
        return Case(name, (q, k, v, dout), {"n": n, "d_k": d, "B": b, "H": heads, "H_kv": n_kv, "G": group})

    b, n, d = distinct(rng, 3, 4, 8)
    return [
        case("odd sizes", b, 2, 3, n, d),
        case("other sizes", 2, 3, 2, d, n),
        case("one key/value head", 2, 1, 4, n, d),
        case("as many key/value heads as query heads", 2, 3, 1, n, d),
        case("one token", b, 2, 2, 1, d),
    ]


def over_interleaved(d: Array) -> Array:
    """The sum over the query heads h with the same h mod Hkv."""
    n_kv, group = d.shape[-4:-2]
    by_head = joined(d).reshape(*d.shape[:-4], group, n_kv, *d.shape[-2:])  # (B, G, Hkv, T, D)
    return np.asarray(by_head.sum(axis=-4))


def interleaved(x: Array, n_kv: int) -> Array:
    """The query heads in groups as if head h read the keys of head h mod Hkv."""
    return x.reshape(*x.shape[:-3], x.shape[-3] // n_kv, n_kv, *x.shape[-2:]).swapaxes(-4, -3)


MISTAKES = (
    mistake(
        "grouped_query",
        "ATT.3",
        "the mean over the group",
        "dk and dv are averaged over the query heads that share them; what is used G times gets the sum.",
        "sum over the group",
        over_group=lambda d: d.mean(axis=-3),
    ),
    mistake(
        "grouped_query",
        "ATT.3",
        "one query head of each group only",
        "dk and dv are those of the first query head of the group; all of them read these keys and values.",
        "sum over the group",
        over_group=lambda d: d[..., 0, :, :],
    ),
    mistake(
        "grouped_query",
        "ATT.3",
        "the last query head of each group only",
        "dk and dv are those of the last query head of the group; all of them read these keys and values.",
        "sum over the group",
        over_group=lambda d: d[..., -1, :, :],
    ),
    mistake(
        "grouped_query",
        "34",
        "dout grouped in another order",
        "Query head h belongs to group h // G, but dout is grouped as if it belonged to group h mod Hkv.",
        "group dout as q was grouped",
        grouped_dout=interleaved,
    ),
    mistake(
        "grouped_query",
        "ATT.3",
        "the sum over the key heads in place of the group",
        "dk and dv are summed over the heads of keys and values, not over the query heads that share them.",
        "sum over the group",
        over_group=lambda d: d.sum(axis=-4),
    ),
    mistake(
        "grouped_query",
        "34",
        "key head h mod Hkv in place of h // G",
        "Query head h reads key head h // G, but dk and dv are summed as if it read key head h mod Hkv.",
        "sum over the axis of the group, before the heads are joined",
        over_group=over_interleaved,
    ),
    mistake(
        "grouped_query",
        "ATT.3",
        "not summed over the group",
        "dk and dv have one part per query head; those of a group belong to the same keys and values.",
        "sum over the group",
        over_group=joined,
    ),
    mistake(
        "grouped_query",
        "34",
        "the heads of dq in another order",
        "Group and head are swapped before they are joined, so query head h gets the gradient of another.",
        "join the heads as they were grouped",
        joined=lambda x: joined(x.swapaxes(-4, -3)),
    ),
)

GROUPED_QUERY = Layer(
    name="grouped_query",
    arguments=("q", "k", "v", "dout"),
    gradients=("dq", "dk", "dv"),
    contract=(
        "out = causal attention in which query head h reads the keys and values of head h // (H/Hkv)",
        "q, dout (batch, H, tokens, features); k, v (batch, Hkv, tokens, features)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    assumes={"causal": True},
    parts=("attention",),
    mistakes=MISTAKES,
)
