"""Multi-head attention with its q, k and v projections, in steps; query, key and value may be different inputs."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept, width_of
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, linear
from onfoot.ops import multi_head_backward, multi_head_forward
from onfoot.ops.multi_head import merge_heads, split_heads

HEAD_PIECES = Pieces(split=split_heads, split_dout=split_heads, merge=merge_heads)
PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(HEAD_PIECES),
    through=linear.PIECES.through,
    dweight=linear.PIECES.dweight,
    project=lambda x, weight: x @ weight,
)


def steps(
    p: Pieces,
    query: Array,
    key: Array,
    value: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    dout: Array,
    causal: bool = True,
    n_head: int = 2,
) -> Gradients:
    inputs, weights = (query, key, value), (w_q, w_k, w_v)
    q, k, v = (p.split(p.project(x, w), n_head) for x, w in zip(inputs, weights, strict=True))
    grads = [p.merge(d) for d in attention.steps(p, q, k, v, p.split_dout(dout, n_head), causal)]
    dinputs = [p.through(d, w, x) for d, w, x in zip(grads, weights, inputs, strict=True)]
    return (*dinputs, *(p.dweight(x, d) for d, x in zip(grads, inputs, strict=True)))


def reference(*inputs: Array, causal: bool = True, n_head: int = 2) -> Gradients:
    query, key, value, w_q, w_k, w_v, dout = inputs
    _, saved = multi_head_forward(query, key, value, w_q, None, w_k, None, w_v, None, n_head, causal)
    return tuple(d for d in multi_head_backward(dout, saved) if d is not None)


def cases(rng: np.random.Generator, causal: bool = True, n_head: int = 2, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, n: int, d_k: int, exact: bool = False) -> Case | None:
        width = width_of(sizes, n_head, d_k)
        fitted = sizes.fit(name, exact, batch=b, tokens=n)
        if fitted is None or (exact and width != n_head * d_k):
            return None
        (b, n), d_k = fitted, width // n_head
        draw = rng.standard_normal
        tokens = [draw((b, n, width)) for _ in range(3)]
        weights = [draw((width, width)) / np.sqrt(width) for _ in range(3)]
        found = {"n": n, "d_k": d_k, "d_model": width, "B": b, "B·n": b * n, "H": n_head}
        return Case(name, (*tokens, *weights, draw((b, n, width))), found)

    b, n = distinct(rng, 2, 3, 8)
    found = [
        case("odd sizes", b, n, 3),
        case("other sizes", n, b + 4, 5),
        case("one token", b, 1, 4, exact=True),
        case("as many tokens as features per head", 2, 4, 4, exact=True),
        case("one sequence", 1, n + 2, 3, exact=True),
    ]
    return kept(found)


MULTI_HEAD = Layer(
    name="multi_head",
    arguments=("query", "key", "value", "w_q", "w_k", "w_v", "dout"),
    gradients=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
    contract=(
        "out = softmax(mask(q kᵗ/√d_k)) v of all heads, concatenated, with q = query w_q, k = key w_k, v = value w_v",
        "query, key, value, dout (batch, tokens, features); w_q, w_k, w_v (features, features); n_head = 2",
        "causal: a token attends to itself and earlier tokens; with causal=False, to all tokens",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"causal": True, "n_head": 2},
    sizes=("batch", "tokens", "width", "heads", "head_dim"),
    parts=("attention", "linear"),
)
