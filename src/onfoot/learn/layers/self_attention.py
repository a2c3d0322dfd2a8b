"""Causal self-attention of several heads, with one projection for queries, keys and values, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept, width_of
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, linear, multi_head
from onfoot.learn.layers.own import mistake
from onfoot.ops import attention_backward, attention_forward, linear_backward, linear_forward
from onfoot.ops.multi_head import merge_heads, split_heads

PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(linear.PIECES),
    **vars(multi_head.HEAD_PIECES),
    affine=lambda x, weight, bias: x @ weight + bias,
    side_by_side=lambda dq, dk, dv: np.concatenate([dq, dk, dv], axis=-1),
)


def steps(p: Pieces, x: Array, weight: Array, bias: Array, dout: Array, n_head: int = 2) -> Gradients:
    q, k, v = (p.split(part, n_head) for part in np.split(p.affine(x, weight, bias), 3, axis=-1))
    grads = attention.steps(p, q, k, v, p.split_dout(dout, n_head), causal=True)
    dqkv = p.side_by_side(*(p.merge(d) for d in grads))
    return p.through(dqkv, weight, x), p.dweight(x, dqkv), p.dbias(dqkv)


def forward(x: Array, weight: Array, bias: Array, n_head: int = 2) -> Array:
    """The output, (batch, tokens, features)."""
    q, k, v = (split_heads(part, n_head) for part in np.split(linear_forward(x, weight, bias)[0], 3, axis=-1))
    return merge_heads(attention_forward(q, k, v)[0])


def reference(x: Array, weight: Array, bias: Array, dout: Array, n_head: int = 2) -> Gradients:
    qkv, saved = linear_forward(x, weight, bias)
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))
    grads = attention_backward(split_heads(dout, n_head), attention_forward(q, k, v)[1])
    dx, dweight, dbias = linear_backward(np.concatenate([merge_heads(d) for d in grads], axis=-1), saved)
    assert dbias is not None
    return dx, dweight, dbias


def cases(rng: np.random.Generator, n_head: int = 2, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, n: int, d_k: int, exact: bool = False) -> Case | None:
        width = width_of(sizes, n_head, d_k)
        fitted = sizes.fit(name, exact, batch=b, tokens=n)
        if fitted is None or (exact and width != n_head * d_k):
            return None
        b, n = fitted
        draw = rng.standard_normal
        x, weight, bias = draw((b, n, width)), draw((width, 3 * width)) / np.sqrt(width), draw(3 * width)
        found = {"n": n, "d_k": width // n_head, "d": width, "B": b, "B·n": b * n, "H": n_head}
        return Case(name, (x, weight, bias, draw((b, n, width))), found)

    b, n = distinct(rng, 2, 3, 8)
    found = [
        case("odd sizes", b, n, 3),
        case("other sizes", n, b + 4, 5),
        case("one token", b, 1, 4, exact=True),
        case("as many tokens as features per head", 2, 4, 4, exact=True),
        case("one sequence", 1, n + 2, 3, exact=True),
    ]
    return kept(found)


MISTAKES = (
    mistake(
        "learn_self_attention",
        "33",
        "only the gradient through the queries",
        "x is the input of queries, keys and values, but only the gradient of the queries is passed back.",
        "put dq, dk and dv side by side",
        side_by_side=lambda dq, dk, dv: np.concatenate([dq, 0 * dk, 0 * dv], axis=-1),
    ),
    mistake(
        "learn_self_attention",
        "33",
        "only the gradient through the values",
        "x is the input of queries, keys and values, but only the gradient of the values is passed back.",
        "put dq, dk and dv side by side",
        side_by_side=lambda dq, dk, dv: np.concatenate([0 * dq, 0 * dk, dv], axis=-1),
    ),
    *(
        mistake(
            "learn_self_attention",
            "33",
            "dq, dk, dv side by side in the wrong order",
            f"The columns of the projection are q | k | v, but the gradients are concatenated as {' | '.join(names)}.",
            "concatenate them in the order of the forward pass",
            side_by_side=lambda dq, dk, dv, o=order: np.concatenate([(dq, dk, dv)[i] for i in o], axis=-1),
        )
        for order, names in (
            ((1, 0, 2), ("dk", "dq", "dv")),
            ((0, 2, 1), ("dq", "dv", "dk")),
            ((2, 1, 0), ("dv", "dk", "dq")),
            ((1, 2, 0), ("dk", "dv", "dq")),
            ((2, 0, 1), ("dv", "dq", "dk")),
        )
    ),
)

SELF_ATTENTION = Layer(
    name="learn_self_attention",
    arguments=("x", "weight", "bias", "dout"),
    gradients=("dx", "dweight", "dbias"),
    contract=(
        "out = softmax(mask(q kᵗ/√d_k)) v of all heads, side by side, with q | k | v = x weight + bias",
        "x, dout (batch, tokens, features); weight (features, 3 features); bias (3 features); causal; n_head = 2",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"n_head": 2},
    sizes=("batch", "tokens", "width", "heads", "head_dim"),
    assumes={"causal": True},
    parts=("multi_head", "attention", "linear"),
    mistakes=MISTAKES,
)
