"""Attention over q, k, v, in steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct, transposed
from onfoot.ops import attention_backward, attention_forward
from onfoot.ops.attention import softmax, visible

PIECES = Pieces(
    mask=lambda n_q, n_k, causal: visible(n_q, n_k, causal, None, np.empty(0)),
    scores=lambda q, k: q @ transposed(k) / math.sqrt(q.shape[-1]),
    weights=softmax,
    drho=lambda dout, v: dout @ transposed(v),
    row_dots=lambda drho, rho: (drho * rho).sum(axis=-1, keepdims=True),
    dscores=lambda drho, rho, dots, scores, mask: (drho - dots) * rho,
    draw=lambda dscores, q: dscores / math.sqrt(q.shape[-1]),
    dq=lambda draw, k, q: draw @ k,
    dk=lambda draw, q, k: transposed(draw) @ q,
    dv=lambda rho, dout: transposed(rho) @ dout,
)


def steps(p: Pieces, q: Array, k: Array, v: Array, dout: Array, causal: bool = True) -> Gradients:
    mask = p.mask(q.shape[-2], k.shape[-2], causal)
    scores = p.scores(q, k)  # (B, H, Tq, Tk)
    rho = p.weights(scores, mask)
    drho = p.drho(dout, v)
    dots = p.row_dots(drho, rho)
    draw = p.draw(p.dscores(drho, rho, dots, scores, mask), q)
    return p.dq(draw, k, q), p.dk(draw, q, k), p.dv(rho, dout)


def reference(q: Array, k: Array, v: Array, dout: Array, causal: bool = True) -> Gradients:
    return attention_backward(dout, attention_forward(q, k, v, causal)[1])


def sensitivity(q: Array, k: Array, v: Array, dout: Array) -> float:
    """exp(score − lse), as fused kernels compute ρ, loses as many digits as the largest score has before the point."""
    return 4 * float(np.abs(PIECES.scores(q, k)).max())


OVERFLOW = "exp overflows above 709 (float64) or 88 (float32) unless the largest entry is subtracted before it"
WIDTHS = "v and dout are d_v wide, q and k d_k wide"
LAST_KEY = "the last query is aligned with the last key"


def cases(rng: np.random.Generator, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, h: int, n: int, d_k: int, **changes: Any) -> Case | None:
        fitted = sizes.fit(name, changes.get("exact", False), batch=b, heads=h, tokens=n, head_dim=d_k)
        if fitted is None:
            return None
        b, h, n, d_k = fitted
        n_k, d_v = changes.get("n_k", n), changes.get("d_v", d_k)
        draw = rng.standard_normal
        q, k, v, dout = draw((b, h, n, d_k)), draw((b, h, n_k, d_k)), draw((b, h, n_k, d_v)), draw((b, h, n, d_v))
        if changes.get("constant"):
            q, k, v = (np.repeat(x[..., :1, :], x.shape[-2], axis=-2) for x in (q, k, v))
        scale = changes.get("scale", 1.0)
        found = {"n": n, "d_k": d_k, "d_v": d_v, "B": b, "H": h}
        beyond = changes.get("beyond", "")
        return Case(name, (scale * q, scale * k, v, dout), found, beyond, if_accepted=beyond == WIDTHS)

    b, h, d_k, d_v, n = distinct(rng, 5, 2, 8)
    other = distinct(rng, 5, 3, 9)
    square = int(rng.integers(4, 8))
    found = [
        case("odd sizes", b, h, n + 2, d_k),
        case("other sizes", *other[:4]),
        case("one sequence, one head", 1, 1, n + 3, d_k + 1, exact=True),
        case("one token", b, h, 1, d_k, exact=True),
        case("as many tokens as features", 2, 3, square, square, exact=True),
        case("identical tokens", 2, h, n + 1, d_k, constant=True),
        case("large scores", 2, h, n + 1, d_k, scale=40.0, beyond=OVERFLOW),
        case("values of another width", b, h, n + 1, d_k, d_v=d_v, beyond=WIDTHS),
        case("more keys than queries", 2, 2, 3, d_k, n_k=5, exact=True, beyond=LAST_KEY),
    ]
    if causal:
        masked = "a query that attends to nothing has gradient 0"
        found.append(case("fully masked queries", 2, 2, 6, d_k, n_k=4, exact=True, beyond=masked))
    return kept(found)


ATTENTION = Layer(
    name="attention",
    arguments=("q", "k", "v", "dout"),
    gradients=("dq", "dk", "dv"),
    contract=(
        "out = softmax(mask(q kᵗ/√d_k)) v",
        "q, k (batch, heads, tokens, d_k); v, dout (batch, heads, tokens, d_v)",
        "causal: a token attends to itself and earlier tokens; with causal=False, to all tokens",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"causal": True},
    sizes=("batch", "heads", "tokens", "head_dim"),
    sensitivity=sensitivity,
    all_nan="a mask computed as scores + (1 − mask) · (−inf): 0 · inf is nan; use np.where(mask, scores, -inf)",
)
