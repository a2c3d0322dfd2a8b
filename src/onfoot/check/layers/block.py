"""GPT-2's block, in steps: layer norm, attention, skip connection, layer norm, MLP with GELU, skip connection."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept, width_of
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, gelu, layer_norm, linear, multi_head
from onfoot.ops import (
    attention_backward,
    attention_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
)
from onfoot.ops.multi_head import merge_heads, split_heads

PARAMETERS = (
    *("ln_1_weight", "ln_1_bias", "attn_weight", "attn_bias", "proj_weight", "proj_bias"),
    *("ln_2_weight", "ln_2_bias", "fc_weight", "fc_bias", "out_weight", "out_bias"),
)

PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(layer_norm.PIECES),
    **vars(gelu.PIECES),
    **vars(linear.PIECES),
    **vars(multi_head.HEAD_PIECES),
    affine=lambda x, weight, bias: x @ weight + bias,
    scaled=lambda normed, weight, bias: normed * weight + bias,
    activated=lambda x: gelu_tanh_forward(x)[0],
    skip_forward=lambda before, branch: before + branch,
    side_by_side=lambda dq, dk, dv: np.concatenate([dq, dk, dv], axis=-1),
    skip_mlp=lambda d10, branch: d10 + branch,
    skip_attention=lambda d5, branch: d5 + branch,
)


def _linear(p: Pieces, dy: Array, x: Array, weight: Array) -> Gradients:
    return p.through(dy, weight, x), p.dweight(x, dy), p.dbias(dy)


def steps(p: Pieces, x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, d10 = rest
    w = dict(zip(PARAMETERS, values, strict=True))
    eps, heads = 1e-5, n_head

    def normed(a: Array) -> Array:
        centred = p.centred(a, p.mean(a))
        return p.normed(centred, p.rstd(p.variance(centred), eps))

    a2 = p.scaled(normed(x), w["ln_1_weight"], w["ln_1_bias"])
    thirds = np.split(p.affine(a2, w["attn_weight"], w["attn_bias"]), 3, axis=-1)
    q, k, v = (p.split(part, heads) for part in thirds)
    mask = p.mask(q.shape[-2], k.shape[-2], causal)
    a3 = p.merge(p.weights(p.scores(q, k), mask) @ v)
    a5 = p.skip_forward(x, p.affine(a3, w["proj_weight"], w["proj_bias"]))
    a6 = p.scaled(normed(a5), w["ln_2_weight"], w["ln_2_bias"])
    a7 = p.affine(a6, w["fc_weight"], w["fc_bias"])
    a8 = p.activated(a7)

    d8, dout_weight, dout_bias = _linear(p, d10, a8, w["out_weight"])
    (d7,) = gelu.steps(p, a7, d8)
    d6, dfc_weight, dfc_bias = _linear(p, d7, a6, w["fc_weight"])
    dnorm2 = layer_norm.steps(p, a5, w["ln_2_weight"], w["ln_2_bias"], d6, eps)
    d5 = p.skip_mlp(d10, dnorm2[0])
    d3, dproj_weight, dproj_bias = _linear(p, d5, a3, w["proj_weight"])
    dqkv = attention.steps(p, q, k, v, p.split_dout(d3, heads), causal=causal)
    dthirds = p.side_by_side(*(p.merge(d) for d in dqkv))
    d2, dattn_weight, dattn_bias = _linear(p, dthirds, a2, w["attn_weight"])
    dnorm1 = layer_norm.steps(p, x, w["ln_1_weight"], w["ln_1_bias"], d2, eps)
    return (
        p.skip_attention(d5, dnorm1[0]),
        *dnorm1[1:],
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        *dnorm2[1:],
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


def reference(x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, d10 = rest
    pairs: Any = (values[i : i + 2] for i in range(0, 12, 2))
    ln_1, attn, proj, ln_2, fc, out = pairs
    a2, s_ln_1 = layer_norm_forward(x, *ln_1)
    qkv, s_attn = linear_forward(a2, *attn)
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))
    a3, s_attention = attention_forward(q, k, v, causal)
    a4, s_proj = linear_forward(merge_heads(a3), *proj)
    a6, s_ln_2 = layer_norm_forward(x + a4, *ln_2)
    a7, s_fc = linear_forward(a6, *fc)
    a8, s_gelu = gelu_tanh_forward(a7)
    s_out = linear_forward(a8, *out)[1]

    d8, *dout = linear_backward(d10, s_out)
    d6, *dfc = linear_backward(gelu_tanh_backward(d8, s_gelu), s_fc)
    dbranch, *dln_2 = layer_norm_backward(d6, s_ln_2)
    d5 = d10 + dbranch
    d3, *dproj = linear_backward(d5, s_proj)
    dqkv = attention_backward(split_heads(d3, n_head), s_attention)
    d2, *dattn = linear_backward(np.concatenate([merge_heads(d) for d in dqkv], axis=-1), s_attn)
    dbranch, *dln_1 = layer_norm_backward(d2, s_ln_1)
    return (d5 + dbranch, *dln_1, *dattn, *dproj, *dln_2, *dfc, *dout)


def cases(rng: np.random.Generator, n_head: int = 2, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    def case(
        name: str, b: int, n: int, d_k: int, inner: int, x_spread: float = 1.0, exact: bool = False
    ) -> Case | None:
        width = width_of(sizes, n_head, d_k)
        fitted = sizes.fit(name, exact, batch=b, tokens=n)
        if fitted is None or (exact and width != n_head * d_k):
            return None
        b, n = fitted
        inner = sizes.mlp * width or inner

        def draw(*shape: int, offset: float = 0.0, spread: float = 0.5) -> Any:
            return offset + spread * rng.standard_normal(shape)

        def norm() -> tuple[Array, Array]:
            return draw(width, offset=1.0), draw(width)

        def dense(n_in: int, n_out: int) -> tuple[Array, Array]:
            return draw(n_in, n_out), draw(n_out)

        inputs = (
            draw(b, n, width, spread=x_spread),
            *(*norm(), *dense(width, 3 * width), *dense(width, width)),
            *(*norm(), *dense(width, inner), *dense(inner, width)),
            draw(b, n, width, spread=1.0),
        )
        found = {"n": n, "d_k": width // n_head, "B": b, "B·n": b * n, "H": n_head, "d": width}
        return Case(name, inputs, found)

    b, n, half = distinct(rng, 3, 3, 7)
    found = [
        case("odd sizes", b, n + 1, half, half * n_head + 3),
        case("one token", b, 1, 3, 4 * n_head, exact=True),
        case("as many tokens as features per head", 2, 3, 3, 3 * n_head, exact=True),
        case("a variance as small as eps", 1, n, 4, 3 * n_head, x_spread=3e-3),
    ]
    return kept(found)


BLOCK = Layer(
    name="block",
    arguments=("x", *PARAMETERS, "dout"),
    gradients=("dx", *(f"d{name}" for name in PARAMETERS)),
    contract=(
        "h = x + proj(attention(ln_1(x))); out = h + mlp_out(gelu(mlp_fc(ln_2(h)))): GPT-2's block, causal, tanh GELU",
        "x, dout (batch, tokens, d); attn_weight (d, 3 d), columns q | k | v; weights (in, out); eps 1e-5; n_head = 2",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"n_head": 2, "causal": True},
    sizes=("batch", "tokens", "width", "heads", "head_dim"),
    assumes={"form": "tanh"},
    places={
        "scaled": ("ln_1", "ln_2"),
        "affine": ("the q, k, v projection", "the output projection", "the first MLP layer"),
        "merge": ("forward pass", "queries", "keys", "values"),
    },
    parts=("attention", "multi_head", "layer_norm", "gelu", "linear"),
)
