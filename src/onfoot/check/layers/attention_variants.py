"""Attention with dropout, with rotary positions and with grouped queries, in steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, even, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, head, rope
from onfoot.ops import (
    attention_backward,
    attention_forward,
    grouped_query_backward,
    grouped_query_forward,
    rope_backward,
    rope_forward,
)
from onfoot.ops.rope import angles, frequencies

CAUSAL = head.CAUSAL


def _draw(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Array]:
    return [rng.standard_normal(shape) for shape in shapes]


# dropout

DROPOUT_PIECES = Pieces(
    **vars(attention.PIECES),
    dropped=head.DROPOUT_PIECES.dropped,
    through_dropout=head.DROPOUT_PIECES.through_dropout,
    rho_for_softmax=head.DROPOUT_PIECES.rho_for_softmax,
    dscores_kept=head.DROPOUT_PIECES.dscores_kept,
)


def dropout_steps(p: Pieces, q: Array, k: Array, v: Array, keep: Array, dout: Array, causal: bool = True) -> Gradients:
    mask, scores = p.mask(q.shape[-2], k.shape[-2], causal), p.scores(q, k)
    rho = p.weights(scores, mask)  # (B, H, Tq, Tk)
    drho = p.through_dropout(p.drho(dout, v), keep)
    for_softmax = p.rho_for_softmax(rho, keep)
    dscores = p.dscores(drho, for_softmax, p.row_dots(drho, for_softmax), scores, mask)
    draw = p.draw(p.dscores_kept(dscores, keep), q)
    return p.dq(draw, k, q), p.dk(draw, q, k), p.dv(p.dropped(rho, keep), dout)


def dropout_reference(q: Array, k: Array, v: Array, keep: Array, dout: Array, causal: bool = True) -> Gradients:
    return attention_backward(dout, attention_forward(q, k, v, causal, keep=keep)[1])


def _sensitivity(*inputs: Array) -> float:
    q, k, v = inputs[:3]
    return attention.sensitivity(q, k, v, inputs[-1])


def dropout_cases(rng: np.random.Generator, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, drawn: Sequence[int], p: float = 0.3, exact: bool = False) -> Case | None:
        b, h, n, d = drawn
        fitted = sizes.fit(name, exact, batch=b, heads=h, tokens=n, head_dim=d)
        if fitted is None:
            return None
        b, h, n, d = fitted
        q, k, v, dout = _draw(rng, *[(b, h, n, d)] * 4)
        keep = (rng.random((b, h, n, n)) >= p) / (1 - p)
        return Case(name, (q, k, v, keep, dout), {"n": n, "d_k": d, "B": b, "H": h, "1/(1 − p)": 1 / (1 - p)})

    b, h, n, d = distinct(rng, 4, 2, 8)
    square = int(rng.integers(4, 8))
    found = [
        case("odd sizes", (b, h, n + 2, d)),
        case("other sizes", distinct(rng, 4, 3, 9), p=0.5),
        case("nothing dropped", (b, h, n + 1, d), p=0.0),
        case("one token", (b, h, 1, d), exact=True),
        case("as many tokens as features", (2, 3, square, square), exact=True),
    ]
    return kept(found)


ATTENTION_DROPOUT = Layer(
    name="attention_dropout",
    arguments=("q", "k", "v", "keep", "dout"),
    gradients=("dq", "dk", "dv"),
    contract=(
        "out = (keep ∘ softmax(mask(q kᵗ/√d_k))) v",
        "q, k, v, dout (batch, heads, tokens, d_k); keep (batch, heads, tokens, tokens), 0 or 1/(1 − p): the given "
        "attention dropout mask",
        CAUSAL,
    ),
    cases=dropout_cases,
    reference=dropout_reference,
    steps=dropout_steps,
    pieces=DROPOUT_PIECES,
    options={"causal": True},
    sizes=("batch", "heads", "tokens", "head_dim"),
    sensitivity=_sensitivity,
    parts=("attention",),
)


# rotary positions

ROPE_PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(rope.PIECES),
    rotated=rope.rotate,
    rotated_v=lambda v, angle: v,
    for_products=lambda rotated, before: rotated,
    dq_below=lambda dq, rotated_back: rotated_back,
    dk_below=lambda dk, rotated_back: rotated_back,
    dv_below=lambda dv, angle: dv,
)


def rope_steps(
    p: Pieces,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    dout: Array,
    causal: bool = True,
    theta: float = 10000.0,
) -> Gradients:
    angle = p.angles(positions, p.frequencies(q.shape[-1], theta))  # (T, D/2)
    turned_q, turned_k, turned_v = p.rotated(q, angle), p.rotated(k, angle), p.rotated_v(v, angle)
    mask, scores = p.mask(q.shape[-2], k.shape[-2], causal), p.scores(turned_q, turned_k)
    rho = p.weights(scores, mask)
    drho = p.drho(dout, turned_v)
    draw = p.draw(p.dscores(drho, rho, p.row_dots(drho, rho), scores, mask), turned_q)
    with_q, with_k = p.for_products(turned_q, q), p.for_products(turned_k, k)
    dq, dk = p.dq(draw, with_k, with_q), p.dk(draw, with_q, with_k)
    return (
        p.dq_below(dq, p.rotate_back(dq, angle)),
        p.dk_below(dk, p.rotate_back(dk, angle)),
        p.dv_below(p.dv(rho, dout), angle),
    )


def rope_reference(
    q: Array, k: Array, v: Array, positions: Array, dout: Array, causal: bool = True, theta: float = 10000.0
) -> Gradients:
    cos, sin = angles(positions, frequencies(theta, q.shape[-1]))
    (turned_q, saved_q), (turned_k, saved_k) = rope_forward(q, cos, sin), rope_forward(k, cos, sin)
    dq, dk, dv = attention_backward(dout, attention_forward(turned_q, turned_k, v, causal)[1])
    return rope_backward(dq, saved_q), rope_backward(dk, saved_k), dv


def rope_cases(rng: np.random.Generator, causal: bool = True, theta: float = 10000.0, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, h: int, n: int, half: int, start: int = 0, **changes: Any) -> Case | None:
        exact = changes.get("exact", False)
        fitted = even(sizes).fit(name, exact, batch=b, heads=h, tokens=n, head_dim=2 * half)
        if fitted is None:
            return None
        b, h, n, d = fitted
        positions = start + np.arange(n) * changes.get("stride", 1)
        q, k, v, dout = _draw(rng, *[(b, h, n, d)] * 4)
        return Case(name, (q, k, v, positions, dout), {"n": n, "d_k": d, "B": b, "H": h})

    b, h, n, half = distinct(rng, 4, 2, 7)
    found = [
        case("odd sizes", b, h, n + 2, half),
        case("other sizes", h, b, half + 4, n),
        case("one token at position 0", b, h, 1, half, exact=True),
        case("positions that start later", 2, h, n, half, start=40),
        case("positions with gaps", 2, h, n + 1, half, stride=3),
        case("as many tokens as features", 2, 3, 4, 2, exact=True),
    ]
    return kept(found)


ROPE_ATTENTION = Layer(
    name="rope_attention",
    arguments=("q", "k", "v", "positions", "dout"),
    gradients=("dq", "dk", "dv"),
    contract=(
        "out = softmax(mask(q̃ k̃ᵗ/√d_k)) v, with q̃ and k̃ rotated by their positions as in the layer rope; theta = 10000",
        "q, k, v, dout (batch, heads, tokens, d_k), q and k before rotation; positions (tokens), integers from 0",
        CAUSAL,
    ),
    cases=rope_cases,
    reference=rope_reference,
    steps=rope_steps,
    pieces=ROPE_PIECES,
    options={"causal": True, "theta": 10000.0},
    sizes=("batch", "heads", "tokens", "head_dim"),
    sensitivity=_sensitivity,
    parts=("attention", "rope"),
    places=dict.fromkeys(("rotated", "rotate_back", "for_products"), ("queries", "keys")),
)


# grouped queries

GROUPED_PIECES = Pieces(
    **vars(attention.PIECES),
    repeated=lambda x, n_head: np.repeat(x, n_head // x.shape[1], axis=1),
    dk_of_group=lambda d, n_kv: by_group(d, n_kv).sum(axis=2),
    dv_of_group=lambda d, n_kv: by_group(d, n_kv).sum(axis=2),
)


def by_group(d: Array, n_kv: int) -> Array:
    """(B, H, T, D) -> (B, Hkv, G, T, D)."""
    return d.reshape(d.shape[0], n_kv, -1, *d.shape[2:])


def grouped_steps(p: Pieces, q: Array, k: Array, v: Array, dout: Array, causal: bool = True) -> Gradients:
    n_head, n_kv = q.shape[1], k.shape[1]
    dq, dk, dv = attention.steps(p, q, p.repeated(k, n_head), p.repeated(v, n_head), dout, causal)
    return dq, p.dk_of_group(dk, n_kv), p.dv_of_group(dv, n_kv)


def grouped_reference(q: Array, k: Array, v: Array, dout: Array, causal: bool = True) -> Gradients:
    return grouped_query_backward(dout, grouped_query_forward(q, k, v, causal)[1])


def _grouped_sensitivity(q: Array, k: Array, v: Array, dout: Array) -> float:
    return attention.sensitivity(q, np.repeat(k, q.shape[1] // k.shape[1], axis=1), v, dout)


def grouped_cases(rng: np.random.Generator, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, n_kv: int, group: int, n: int, d: int, exact: bool = False) -> Case | None:
        fitted = sizes.fit(name, exact, batch=b, heads=n_kv, tokens=n, head_dim=d)
        if fitted is None:
            return None
        group = group if fitted[1] == n_kv else 2  # few heads where their number was chosen
        b, n_kv, n, d = fitted
        h = n_kv * group
        q, dout, k, v = _draw(rng, *[(b, h, n, d)] * 2, *[(b, n_kv, n, d)] * 2)
        found = {"n": n, "d_k": d, "B": b, "H": h, "H_kv": n_kv, "G": group}
        return Case(name, (q, k, v, dout), found)

    b, n_kv, group, n, d = distinct(rng, 5, 2, 7)
    found = [
        case("odd sizes", b, n_kv, group, n + 2, d),
        case("other sizes", 2, 3, 2, b + 3, d + 1),
        case("one key head", b, 1, 4, n, d, exact=True),
        case("as many key heads as query heads", 2, n_kv, 1, n, d),
        case("one token", b, n_kv, group, 1, d, exact=True),
        case("as many tokens as features", 2, 2, 3, 5, 5, exact=True),
    ]
    return kept(found)


GROUPED_QUERY_ATTENTION = Layer(
    name="grouped_query_attention",
    arguments=("q", "k", "v", "dout"),
    gradients=("dq", "dk", "dv"),
    contract=(
        "out = softmax(mask(q kᵗ/√d_k)) v; query head h reads the keys and values of head h // G, with G = H/H_kv",
        "q, dout (batch, H, tokens, d_k); k, v (batch, H_kv, tokens, d_k); the size heads is H_kv",
        CAUSAL,
    ),
    cases=grouped_cases,
    reference=grouped_reference,
    steps=grouped_steps,
    pieces=GROUPED_PIECES,
    options={"causal": True},
    sizes=("batch", "heads", "tokens", "head_dim"),
    sensitivity=_grouped_sensitivity,
    parts=("attention",),
)
