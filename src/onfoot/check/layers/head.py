"""One head of self-attention with its six parameters (Table 1 of the paper), with and without dropout, in steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, even
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, linear
from onfoot.check.layers.rope import rotate
from onfoot.ops import (
    attention_backward,
    attention_forward,
    linear_backward,
    linear_forward,
    rope_backward,
    rope_forward,
)
from onfoot.ops.rope import angles, frequencies

PARAMETERS = ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v")
THETA = 10000.0

PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(linear.PIECES),
    projected=lambda a, weight, bias: a @ weight + bias,
    rotated=rotate,
    rotated_back=lambda dy, angle: rotate(dy, -angle),
    at_projection=lambda dy, weight: dy,
    db_k=lambda dbias: dbias,
    db_v=lambda dbias, dout: dbias,
    three_paths=lambda d_q, d_k, d_v: d_q + d_k + d_v,
)
DROPOUT_PIECES = Pieces(
    **vars(PIECES),
    dropped=lambda rho, keep: rho * keep,
    through_dropout=lambda drho, keep: drho * keep,
    rho_for_softmax=lambda rho, keep: rho,
    dscores_kept=lambda dscores, keep: dscores,
)


def _steps(
    p: Pieces, a: Array, given: Sequence[Array], keep: Array | None, dout: Array, causal: bool, rotary: bool = False
) -> Gradients:
    pairs = [given[:2], given[2:4], given[4:]]
    q, k, v = (p.projected(a, w, b) for w, b in pairs)
    angle = np.arange(a.shape[-2])[:, None] * frequencies(THETA, q.shape[-1]) if rotary else np.empty(0)
    if rotary:
        q, k = p.rotated(q, angle), p.rotated(k, angle)
    mask, scores = p.mask(q.shape[-2], k.shape[-2], causal), p.scores(q, k)
    rho, drho = p.weights(scores, mask), p.drho(dout, v)
    kept = rho if keep is None else p.dropped(rho, keep)
    if keep is not None:
        drho, rho = p.through_dropout(drho, keep), p.rho_for_softmax(rho, keep)
    dscores = p.dscores(drho, rho, p.row_dots(drho, rho), scores, mask)
    draw = p.draw(dscores if keep is None else p.dscores_kept(dscores, keep), q)
    grads = [p.dq(draw, k, q), p.dk(draw, q, k), p.dv(kept, dout)]
    if rotary:
        grads = [p.rotated_back(grads[0], angle), p.rotated_back(grads[1], angle), grads[2]]
    da = p.three_paths(*(p.through(g, w, a) for g, (w, _) in zip(grads, pairs, strict=True)))
    at_parameters = [p.at_projection(g, w) for g, (w, _) in zip(grads, pairs, strict=True)]
    (dw_q, db_q), (dw_k, db_k), (dw_v, db_v) = ((p.dweight(a, g), p.dbias(g)) for g in at_parameters)
    return da, dw_q, db_q, dw_k, p.db_k(db_k), dw_v, p.db_v(db_v, dout)


def steps(p: Pieces, a: Array, *rest: Array, causal: bool = True, rotary: bool = False) -> Gradients:
    *given, dout = rest
    return _steps(p, a, given, None, dout, causal, rotary)


def dropout_steps(p: Pieces, a: Array, *rest: Array, causal: bool = True) -> Gradients:
    *given, keep, dout = rest
    return _steps(p, a, given, keep, dout, causal)


def _reference(
    a: Array, given: Sequence[Array], keep: Array | None, dout: Array, causal: bool, rotary: bool = False
) -> Gradients:
    projections = [linear_forward(a, given[i], given[i + 1]) for i in (0, 2, 4)]
    q, k, v = (y for y, _ in projections)
    rope_saved: list[Any] = []
    if rotary:
        cos, sin = angles(np.arange(a.shape[-2]), frequencies(THETA, q.shape[-1]))
        (q, s_q), (k, s_k) = rope_forward(q, cos, sin), rope_forward(k, cos, sin)
        rope_saved = [s_q, s_k]
    grads = list(attention_backward(dout, attention_forward(q, k, v, causal, keep=keep)[1]))
    for i, saved in enumerate(rope_saved):
        grads[i] = rope_backward(grads[i], saved)
    found = [linear_backward(g, s) for g, (_, s) in zip(grads, projections, strict=True)]
    flat: list[Any] = [g for one in found for g in one[1:]]
    return (sum(one[0] for one in found), *flat)


def reference(a: Array, *rest: Array, causal: bool = True, rotary: bool = False) -> Gradients:
    *given, dout = rest
    return _reference(a, given, None, dout, causal, rotary)


def dropout_reference(a: Array, *rest: Array, causal: bool = True) -> Gradients:
    *given, keep, dout = rest
    return _reference(a, given, keep, dout, causal)


Inputs = tuple[str, list[Array], Array, dict[str, float], str]


def _inputs(rng: np.random.Generator, rotary: bool, sizes: Sizes) -> list[Inputs]:
    """(name, a with the parameters, dout, sizes, beyond); d_k is even if `rotary`."""
    allowed = even(sizes) if rotary else sizes

    def one(name: str, *drawn: int, d_v: int = 0, exact: bool = False) -> Inputs | None:
        b, n, d, d_k = drawn
        draw = rng.standard_normal
        d_k += d_k % 2 if rotary else 0
        fitted = allowed.fit(name, exact, batch=b, tokens=n, width=d, head_dim=d_k)
        if fitted is None:
            return None
        b, n, d, d_k = fitted
        beyond = WIDTHS if d_v else ""
        d_v = d_v or d_k
        given: list[Array] = [draw((b, n, d))]
        for width in (d_k, d_k, d_v):
            given += [draw((d, width)) / np.sqrt(d), draw(width)]
        found: dict[str, float] = {"n": n, "d_k": d_k, "d_v": d_v, "B": b, "B·n": b * n, "d": d}
        return name, given, draw((b, n, d_v)), found, beyond

    same = 2 * int(rng.integers(2, 5))
    *first, other = distinct(rng, 5, 2, 9)
    found = [
        one("odd sizes", *first),
        one("other sizes", *distinct(rng, 4, 3, 10)),
        one("one sequence", 1, *distinct(rng, 3, 3, 10), exact=True),
        one("head as wide as its input", 2, 5, same, same, exact=True),
        one("as many tokens as features", 2, same, same + 1, same, exact=True),
        one("values of another width", *first, d_v=other),
    ]
    return [one for one in found if one is not None]


WIDTHS = "w_v, b_v and dout are d_v wide, the queries and keys d_k wide"


def cases(rng: np.random.Generator, causal: bool = True, rotary: bool = False, sizes: Sizes = ANY) -> list[Case]:
    drawn = _inputs(rng, rotary, sizes)
    return [
        Case(name, (*given, dout), found, beyond, if_accepted=bool(beyond))
        for name, given, dout, found, beyond in drawn
    ]


def dropout_cases(rng: np.random.Generator, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    found = []
    for name, given, dout, measures, beyond in _inputs(rng, False, sizes):
        b, n = dout.shape[:2]
        keep = (rng.random((b, n, n)) > 0.3) / 0.7
        found.append(Case(name, (*given, keep, dout), measures, beyond, if_accepted=bool(beyond)))
    return found


GRADIENTS = ("da", *(f"d{name}" for name in PARAMETERS))
SHAPES = "a (batch, tokens, d); w_q, w_k (d, d_k); b_q, b_k (d_k); w_v (d, d_v); b_v (d_v); dout (batch, tokens, d_v)"
CAUSAL = "causal: a token attends to itself and earlier tokens; with causal=False, to all tokens"

HEAD = Layer(
    name="head",
    arguments=("a", *PARAMETERS, "dout"),
    gradients=GRADIENTS,
    contract=(
        "out = softmax(mask(q kᵗ/√d_k)) v with q = a w_q + b_q, k = a w_k + b_k, v = a w_v + b_v",
        SHAPES,
        CAUSAL,
        "rotary=True: q and k are first rotated by their positions 0, 1, …, as in the layer rope",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"causal": True, "rotary": False},
    sizes=("batch", "tokens", "width", "head_dim"),
    parts=("attention", "linear"),
)

HEAD_DROPOUT = Layer(
    name="head_dropout",
    arguments=("a", *PARAMETERS, "keep", "dout"),
    gradients=GRADIENTS,
    contract=(
        "out = (keep ∘ softmax(mask(q kᵗ/√d_k))) v with q = a w_q + b_q, k = a w_k + b_k, v = a w_v + b_v",
        f"{SHAPES}; keep (batch, tokens, tokens), 0 or 1/(1 − p): the given attention dropout mask",
        CAUSAL,
    ),
    cases=dropout_cases,
    reference=dropout_reference,
    steps=dropout_steps,
    pieces=DROPOUT_PIECES,
    options={"causal": True},
    sizes=("batch", "tokens", "width", "head_dim"),
    parts=("attention", "attention_dropout", "linear"),
)
