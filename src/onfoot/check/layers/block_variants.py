"""Two more blocks, in steps: a pre-norm block with ReLU, and the original post-norm block, also with ReLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces
from onfoot.check.layers import attention, block, layer_norm, linear, multi_head
from onfoot.check.layers.activations import RELU_PIECES
from onfoot.ops import (
    attention_backward,
    attention_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
    relu_backward,
    relu_forward,
)
from onfoot.ops.multi_head import merge_heads, split_heads

EPS = 1e-5
PARAMETERS = block.PARAMETERS
CANDIDATES = 12  # biases tried per hidden unit

PIECES = Pieces(
    **vars(attention.PIECES),
    **vars(layer_norm.PIECES),
    **vars(RELU_PIECES),
    **vars(linear.PIECES),
    **vars(multi_head.HEAD_PIECES),
    affine=block.PIECES.affine,
    scaled=block.PIECES.scaled,
    relu=lambda x: np.maximum(x, 0),
    skip_forward=block.PIECES.skip_forward,
    side_by_side=block.PIECES.side_by_side,
    skip_mlp=block.PIECES.skip_mlp,
    skip_attention=block.PIECES.skip_attention,
)
POST_PIECES = PIECES.with_changes(
    {
        "skip_mlp": lambda dsum, branch, dout: dsum + branch,
        "skip_attention": lambda dsum, branch, dh: dsum + branch,
    }
)


class _Passes:
    """The parts that both blocks have, through the pieces; norm and relu keep nothing."""

    def __init__(self, p: Pieces, values: Any, n_head: int, causal: bool) -> None:
        self.p, self.n_head, self.causal = p, n_head, causal
        self.w: dict[str, Array] = dict(zip(PARAMETERS, values, strict=True))
        self.grads: dict[str, Array] = {}

    def norm(self, x: Array, name: str) -> Array:
        p = self.p
        centred = p.centred(x, p.mean(x))
        normed = p.normed(centred, p.rstd(p.variance(centred), EPS))
        found: Array = p.scaled(normed, self.w[f"{name}_weight"], self.w[f"{name}_bias"])
        return found

    def norm_backward(self, dy: Array, x: Array, name: str) -> Array:
        weight, bias = self.w[f"{name}_weight"], self.w[f"{name}_bias"]
        dx, *of_parameters = layer_norm.steps(self.p, x, weight, bias, dy, EPS)
        self.keep(name, *of_parameters)
        return dx

    def linear(self, x: Array, name: str) -> Array:
        found: Array = self.p.affine(x, self.w[f"{name}_weight"], self.w[f"{name}_bias"])
        return found

    def linear_backward(self, dy: Array, x: Array, name: str) -> Array:
        found: Array = self.p.through(dy, self.w[f"{name}_weight"], x)
        self.keep(name, self.p.dweight(x, dy), self.p.dbias(dy))
        return found

    def keep(self, name: str, dweight: Array, dbias: Array) -> None:
        self.grads[f"{name}_weight"], self.grads[f"{name}_bias"] = dweight, dbias

    def heads(self, x: Array) -> tuple[list[Array], Array]:
        """q, k, v of all heads, and the heads' outputs side by side (B, T, C)."""
        p = self.p
        q, k, v = (p.split(part, self.n_head) for part in np.split(self.linear(x, "attn"), 3, axis=-1))
        mask = p.mask(q.shape[-2], k.shape[-2], self.causal)
        return [q, k, v], p.merge(p.weights(p.scores(q, k), mask) @ v)

    def heads_backward(self, dy: Array, qkv: list[Array], x: Array) -> Array:
        p = self.p
        q, k, v = qkv
        grads = attention.steps(p, q, k, v, p.split_dout(dy, self.n_head), causal=self.causal)
        return self.linear_backward(p.side_by_side(*(p.merge(d) for d in grads)), x, "attn")

    def relu_backward(self, dy: Array, x: Array) -> Array:
        found: Array = self.p.relu_dx(dy, self.p.relu_slope(x), x)
        return found

    def all(self, dx: Array) -> Gradients:
        return dx, *(self.grads[name] for name in PARAMETERS)


def relu_steps(p: Pieces, x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, dout = rest
    a = _Passes(p, values, n_head, causal)
    a2 = a.norm(x, "ln_1")
    qkv, a3 = a.heads(a2)
    a5 = p.skip_forward(x, a.linear(a3, "proj"))
    a6 = a.norm(a5, "ln_2")
    a7 = a.linear(a6, "fc")
    d8 = a.linear_backward(dout, p.relu(a7), "out")
    d6 = a.linear_backward(a.relu_backward(d8, a7), a6, "fc")
    d5 = p.skip_mlp(dout, a.norm_backward(d6, a5, "ln_2"))
    d2 = a.heads_backward(a.linear_backward(d5, a3, "proj"), qkv, a2)
    return a.all(p.skip_attention(d5, a.norm_backward(d2, x, "ln_1")))


def post_steps(p: Pieces, x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, dout = rest
    a = _Passes(p, values, n_head, causal)
    qkv, a3 = a.heads(x)
    sum_1 = p.skip_forward(x, a.linear(a3, "proj"))
    h = a.norm(sum_1, "ln_1")
    a7 = a.linear(h, "fc")
    a8 = p.relu(a7)
    sum_2 = p.skip_forward(h, a.linear(a8, "out"))
    dsum_2 = a.norm_backward(dout, sum_2, "ln_2")
    d7 = a.relu_backward(a.linear_backward(dsum_2, a8, "out"), a7)
    dh = p.skip_mlp(dsum_2, a.linear_backward(d7, h, "fc"), dout)  # eq NET.3
    dsum_1 = a.norm_backward(dh, sum_1, "ln_1")
    branch = a.heads_backward(a.linear_backward(dsum_1, a3, "proj"), qkv, x)
    return a.all(p.skip_attention(dsum_1, branch, dh))  # eq NET.4


class _Forward:
    """The forward pass of either block by the ops, and what their backward passes need."""

    def __init__(self, x: Array, values: Any, n_head: int, causal: bool, post: bool) -> None:
        names = ("ln_1", "attn", "proj", "ln_2", "fc", "out")
        pairs: Any = {name: values[2 * i : 2 * i + 2] for i, name in enumerate(names)}
        self.n_head, self.post = n_head, post
        self.ln_1: Any
        self.ln_2: Any
        before, self.ln_1 = (x, None) if post else layer_norm_forward(x, *pairs["ln_1"])
        qkv, self.attn = linear_forward(before, *pairs["attn"])
        q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))
        mixed, self.attention = attention_forward(q, k, v, causal)
        branch, self.proj = linear_forward(merge_heads(mixed), *pairs["proj"])
        h = x + branch
        if post:
            h, self.ln_1 = layer_norm_forward(h, *pairs["ln_1"])
        before, self.ln_2 = (h, None) if post else layer_norm_forward(h, *pairs["ln_2"])
        self.hidden, self.fc = linear_forward(before, *pairs["fc"])  # (B, T, hidden)
        active, self.relu = relu_forward(self.hidden)
        branch, self.out = linear_forward(active, *pairs["out"])
        if post:
            self.ln_2 = layer_norm_forward(h + branch, *pairs["ln_2"])[1]

    def backward(self, dout: Array) -> Gradients:
        dsum, *dln_2 = layer_norm_backward(dout, self.ln_2) if self.post else (dout,)
        d8, *dout_ = linear_backward(dsum, self.out)
        branch, *dfc = linear_backward(relu_backward(d8, self.relu), self.fc)
        if not self.post:
            branch, *dln_2 = layer_norm_backward(branch, self.ln_2)
        dh = dsum + branch
        dsum, *dln_1 = layer_norm_backward(dh, self.ln_1) if self.post else (dh,)
        d3, *dproj = linear_backward(dsum, self.proj)
        dqkv = attention_backward(split_heads(d3, self.n_head), self.attention)
        branch, *dattn = linear_backward(np.concatenate([merge_heads(d) for d in dqkv], axis=-1), self.attn)
        if not self.post:
            branch, *dln_1 = layer_norm_backward(branch, self.ln_1)
        return dsum + branch, *dln_1, *dattn, *dproj, *dln_2, *dfc, *dout_


def relu_reference(x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, dout = rest
    return _Forward(x, values, n_head, causal, False).backward(dout)


def post_reference(x: Array, *rest: Array, n_head: int = 2, causal: bool = True) -> Gradients:
    *values, dout = rest
    return _Forward(x, values, n_head, causal, True).backward(dout)


def _away_from_kinks(case: Case, rng: np.random.Generator, n_head: int, causal: bool, post: bool) -> Case:
    """The case with biases of fc that keep every input of ReLU away from 0, where rounding would decide the slope."""
    inputs = list(case.inputs)
    place = 1 + PARAMETERS.index("fc_bias")
    hidden = _Forward(inputs[0], inputs[1:-1], n_head, causal, post).hidden
    rows = hidden.reshape(-1, hidden.shape[-1]) - inputs[place]
    drawn = np.concatenate([inputs[place][None], 0.5 * rng.standard_normal((CANDIDATES, rows.shape[1]))])
    nearest = np.stack([np.abs(rows + bias).min(axis=0) for bias in drawn])  # (candidates, hidden)
    inputs[place] = np.take_along_axis(drawn, nearest.argmax(axis=0)[None], axis=0)[0]
    return Case(case.name, tuple(inputs), case.sizes)


def relu_cases(rng: np.random.Generator, n_head: int = 2, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    drawn = block.cases(rng, n_head, causal, sizes)
    return [_away_from_kinks(case, rng, n_head, causal, False) for case in drawn]


def post_cases(rng: np.random.Generator, n_head: int = 2, causal: bool = True, sizes: Sizes = ANY) -> list[Case]:
    drawn = block.cases(rng, n_head, causal, sizes)
    return [_away_from_kinks(case, rng, n_head, causal, True) for case in drawn]


SHAPES = "x, dout (batch, tokens, d); attn_weight (d, 3 d), columns q | k | v; weights (in, out); eps 1e-5; n_head = 2"
TWICE = ("forward pass", "backward pass")
PLACES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("through", "dweight", "dbias"),
        ("the second MLP layer", "the first MLP layer", "the output projection", "the q, k, v projection"),
    ),
    **dict.fromkeys(("mask", "scores", "weights"), TWICE),
    **dict.fromkeys(("mean_term", "along_term", "bracket", "dnormed"), ("ln_2", "ln_1")),
    **dict.fromkeys(("norm_dx", "norm_dweight", "norm_dbias"), ("ln_2", "ln_1")),
    **dict.fromkeys(
        ("mean", "centred", "variance", "rstd", "normed"), ("ln_1, forward pass", "ln_2, forward pass", "ln_2", "ln_1")
    ),
    "scaled": ("ln_1", "ln_2"),
    "skip_forward": ("around attention", "around the MLP"),
    "merge": ("forward pass", "queries", "keys", "values"),
    "split": ("queries", "keys", "values"),
}

RELU_BLOCK = Layer(
    name="relu_block",
    arguments=("x", *PARAMETERS, "dout"),
    gradients=("dx", *(f"d{name}" for name in PARAMETERS)),
    contract=(
        "h = x + proj(attention(ln_1(x))); out = h + mlp_out(relu(mlp_fc(ln_2(h)))): pre-norm, causal, with ReLU",
        SHAPES,
    ),
    cases=relu_cases,
    reference=relu_reference,
    steps=relu_steps,
    pieces=PIECES,
    options={"n_head": 2, "causal": True},
    sizes=("batch", "tokens", "width", "heads", "head_dim"),
    parts=("block", "attention", "multi_head", "layer_norm", "relu", "linear"),
    places=PLACES,
)

POST_NORM_BLOCK = Layer(
    name="post_norm_block",
    arguments=("x", *PARAMETERS, "dout"),
    gradients=("dx", *(f"d{name}" for name in PARAMETERS)),
    contract=(
        "h = ln_1(x + proj(attention(x))); out = ln_2(h + mlp_out(relu(mlp_fc(h)))): the original transformer's block, "
        "causal, with ReLU",
        SHAPES,
    ),
    cases=post_cases,
    reference=post_reference,
    steps=post_steps,
    pieces=POST_PIECES,
    options={"n_head": 2, "causal": True},
    sizes=("batch", "tokens", "width", "heads", "head_dim"),
    parts=("attention", "multi_head", "layer_norm", "relu", "linear"),
    places=PLACES,
)
