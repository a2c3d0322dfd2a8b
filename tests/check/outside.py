"""Mistakes that are not in the catalogue, a few per layer: plausible wrong formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from planted.head import head
from planted.network import block as gpt2_block
from planted.registry import autograd

Function = Callable[..., Any]
OUTSIDE: dict[tuple[str, str], Function] = {}


def outside(layer: str, what: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        OUTSIDE[layer, what] = function
        return function

    return register


# attention: other forward passes, differentiated rightly


def hidden(s: torch.Tensor) -> torch.Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


def attend(q, k, v, scores=None, weights=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if scores is None else scores(s, q, k, v)
    a = s.masked_fill(hidden(s), -torch.inf).softmax(-1)
    return (a if weights is None else weights(a, s)) @ v


def of_attention(what: str, **changes: Any) -> None:
    @outside("attention", what)
    def backward(q, k, v, dout):
        return autograd(lambda *qkv: attend(*qkv, **changes), [q, k, v], dout)


def distance(s: torch.Tensor) -> torch.Tensor:
    i = torch.arange(s.shape[-1], dtype=s.dtype)
    return i - i[: s.shape[-2], None]


@outside("attention", "the width of the values in the scale")
def values_in_the_scale(q, k, v, dout):
    """Right in every case but those with another width, which go beyond the contract."""

    def attend_last(q, k, v):
        s = q @ k.mT / math.sqrt(v.shape[-1])
        future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        return (s.masked_fill(future, -1e30).softmax(-1) * ~future) @ v

    return autograd(attend_last, [q, k, v], dout)


of_attention("a temperature", scores=lambda s, q, k, v: s / 0.9)
of_attention("a bias by distance", scores=lambda s, q, k, v: s + 0.1 * distance(s))
of_attention("queries normalised", scores=lambda s, q, k, v: s / q.norm(dim=-1, keepdim=True))
of_attention("powers of 2", scores=lambda s, q, k, v: s * math.log(2))
of_attention("soft capping", scores=lambda s, q, k, v: 5 * torch.tanh(s / 5))
of_attention("sigmoids", weights=lambda a, s: torch.sigmoid(s) * ~hidden(s))
of_attention("a window of three tokens", scores=lambda s, q, k, v: s.masked_fill(distance(s) < -2, -torch.inf))
of_attention(
    "an extra 1 below",
    weights=lambda a, s: a * torch.sigmoid(s.masked_fill(hidden(s), -torch.inf).logsumexp(-1, True)),
)
of_attention("itself left out", weights=lambda a, s: a * (1 - 0.5 * torch.eye(*s.shape[-2:], dtype=s.dtype)))


def wrong_attention(what: str, change: Function) -> None:
    @outside("attention", what)
    def backward(q, k, v, dout):
        return change(q, k, v, dout, *autograd(attend, [q, k, v], dout))


wrong_attention("the next head's dv", lambda q, k, v, do, dq, dk, dv: (dq, dk, dv.roll(1, 1)))
wrong_attention("dq with a residual", lambda q, k, v, do, dq, dk, dv: (dq + torch.as_tensor(q), dk, dv))
wrong_attention("dk accumulated over tokens", lambda q, k, v, do, dq, dk, dv: (dq, dk.cumsum(-2), dv))
wrong_attention("dv without the weights", lambda q, k, v, do, dq, dk, dv: (dq, dk, do))


# multi-head attention


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def of_heads(what: str, change: Function) -> None:
    @outside("multi_head", what)
    def backward(query, key, value, w_q, w_k, w_v, dout):
        def forward(query, key, value, w_q, w_k, w_v):
            return change(query, key, value, w_q, w_k, w_v)

        return autograd(forward, [query, key, value, w_q, w_k, w_v], dout)


def joined(q, k, v):
    return attend(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)


of_heads(
    "heads interleaved",
    lambda x, y, z, a, b, c: joined(
        *((i @ w).reshape(*i.shape[:2], -1, 2).mT.flatten(2) for i, w in ((x, a), (y, b), (z, c)))
    ),
)
of_heads("weights transposed", lambda x, y, z, a, b, c: joined(x @ a.T, y @ b.T, z @ c.T))
of_heads("keys added to the values", lambda x, y, z, a, b, c: joined(x @ a, y @ b, (y + z) @ c))


# one head


def of_head(what: str, change: Function) -> None:
    @outside("head", what)
    def backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
        return change(a, *head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout))


of_head("da with a residual", lambda a, da, *rest: (da + a.mean(-1, keepdim=True), *rest))
of_head("db_q of the first token alone", lambda a, da, dw_q, db_q, *rest: (da, dw_q, db_q * dw_q[0], *rest))


@outside("head_dropout", "dropout with the pattern of the next token")
def shifted_pattern(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    return head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, keep=0.5 + 0.5 * keep.roll(1, -1))


# norms


def of_norm(layer: str, what: str, forward: Function) -> None:
    if layer == "layer_norm":

        @outside(layer, what)
        def backward(x, weight, bias, dout):
            return autograd(lambda x, w, b: forward(x) * w + b, [x, weight, bias], dout)

    else:

        @outside(layer, what)
        def backward_of_rms(x, weight, dout):
            return autograd(lambda x, w: forward(x) * w, [x, weight], dout)


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def root(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


of_norm("layer_norm", "another eps", lambda x: centred(x) / root(centred(x), 1e-3))
of_norm(
    "layer_norm", "the mean of absolute values", lambda x: centred(x) / (centred(x).abs().mean(-1, keepdim=True) + 1e-5)
)
of_norm("layer_norm", "not centred above", lambda x: x / root(centred(x), 1e-5))
of_norm(
    "layer_norm",
    "the first feature left out of the mean",
    lambda x: (x - x[..., 1:].sum(-1, True) / x.shape[-1]) / root(centred(x), 1e-5),
)
of_norm("rms_norm", "another eps", lambda x: x / root(x, 1e-3))
of_norm("rms_norm", "the largest in place of the root", lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-6))


@outside("layer_norm", "the second term twice")
def twice(x, weight, bias, dout):
    sigma, g = root(centred(x), 1e-5), dout * weight
    z = centred(x) / sigma
    dx = (g - g.mean(-1, keepdim=True) - 2 * z * (g * z).mean(-1, keepdim=True)) / sigma
    return dx, (dout * z).sum((0, 1)), dout.sum((0, 1))


@outside("rms_norm", "γ + 1")
def one_more(x, weight, dout):
    return autograd(lambda x, w: x / root(x, 1e-6) * (1 + w), [x, weight], dout)


# linear layers


def of_linear(what: str, change: Function) -> None:
    @outside("linear", what)
    def backward(x, weight, bias, dout):
        return change(x, weight, dout, dout @ weight.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1)))


of_linear("dx through absolute weights", lambda x, w, do, dx, dw, db: (do @ np.abs(w).T, dw, db))
of_linear(
    "tokens shifted by one", lambda x, w, do, dx, dw, db: (dx, np.einsum("bti,bto->io", np.roll(x, 1, 1), do), db)
)
of_linear("decay added to dweight", lambda x, w, do, dx, dw, db: (dx, dw + 0.01 * w, db))
of_linear("the first token left out of dbias", lambda x, w, do, dx, dw, db: (dx, dw, do[:, 1:].sum((0, 1))))
of_linear("an activation in between", lambda x, w, do, dx, dw, db: (dx * (x > 0), dw, db))


def of_lora(what: str, change: Function) -> None:
    @outside("lora", what)
    def backward(x, weight, down, up, alpha, dout):
        return autograd(lambda x, d, u: change(x, weight, d, u, alpha), [x, down, up], dout)


of_lora("α/(r + 1)", lambda x, w, d, u, a: x @ w + a / (d.shape[1] + 1) * (x @ d @ u))
of_lora("an activation inside", lambda x, w, d, u, a: x @ w + a / d.shape[1] * (torch.tanh(x @ d) @ u))
of_lora(
    "the columns of the sum normalised",
    lambda x, w, d, u, a: x @ ((w + a / d.shape[1] * d @ u) / (w + a / d.shape[1] * d @ u).norm(dim=0)),
)


# tables


@outside("embedding", "the first occurrence kept")
def first_wins(ids, weight, dout):
    out = np.zeros_like(weight)
    for i, row in reversed(list(zip(ids.ravel(), dout.reshape(-1, weight.shape[1]), strict=True))):
        out[i] = row
    return out


@outside("embedding", "an id for padding")
def padding(ids, weight, dout):
    return (
        autograd(lambda w: F.embedding(ids, w, padding_idx=3), [weight], dout)[0]
        + 0.5 * (torch.arange(len(weight)) == ids[0, 0])[:, None]
    )


@outside("tied_embedding", "features of unit length")
def unit(ids, weight, dout):
    return autograd(lambda w: F.normalize(w[ids], dim=-1) @ w.T, [weight], dout)[0]


# losses


@outside("softmax_cross_entropy", "smoothed labels")
def smoothed(logits, targets, dout):
    return autograd(lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten(), label_smoothing=0.1), [logits], dout)[
        0
    ]


@outside("softmax_cross_entropy", "a temperature")
def warm(logits, targets, dout):
    return autograd(lambda x: F.cross_entropy(x.flatten(0, 1) / 2, targets.flatten()), [logits], dout)[0]


@outside("softmax_cross_entropy", "squared errors")
def squared(logits, targets, dout):
    hot = F.one_hot(targets.clamp(min=0), logits.shape[-1])
    return autograd(lambda x: (x.softmax(-1) - hot).square().sum() / targets.numel(), [logits], dout)[0]


@outside("next_token_loss", "the token after the next")
def two_ahead(logits, ids, dout):
    n = max(ids.shape[1] - 2, 1)
    return autograd(lambda x: F.cross_entropy(x[:, :n].flatten(0, 1), ids[:, -n:].flatten()), [logits], dout)[0]


# pointwise


def of_gelu(what: str, forward: Function) -> None:
    OUTSIDE["gelu", what] = lambda x, dout: autograd(forward, [torch.as_tensor(x)], torch.as_tensor(dout))[0]


of_gelu("SiLU", F.silu)
of_gelu("0.044 for 0.044715", lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044 * x**3))))
of_gelu("2/π without its root", lambda x: x / 2 * (1 + torch.tanh(2 / math.pi * (x + 0.044715 * x**3))))


@outside("swiglu", "GELU as the gate")
def geglu(gate, up, dout):
    return autograd(lambda g, u: F.gelu(g) * u, [gate, up], dout)


@outside("swiglu", "both halves gated")
def both_gated(gate, up, dout):
    return autograd(lambda g, u: F.silu(g) * F.silu(u), [gate, up], dout)


def of_rope(what: str, theta: float = 10000.0, angle: float = 1.0, swap: bool = False) -> None:
    @outside("rope", what)
    def backward(x, positions, dout):
        half = x.shape[-1] // 2
        a = angle * np.outer(positions, theta ** (-np.arange(half) / half))
        z = (dout[..., :half] + 1j * dout[..., half:]) * np.exp(-1j * (a[:, ::-1] if swap else a))
        return np.concatenate([z.real, z.imag], -1)


of_rope("degrees", angle=180 / math.pi)
of_rope("the slow pairs first", swap=True)
of_rope("positions halved", angle=0.5)


# the block, and AdamW


@outside("block", "another activation")
def block_with_relu(x, *arguments):
    return gpt2_block(x, *arguments, activation=torch.relu)


@outside("block", "one gradient shifted")
def shifted(x, *arguments):
    dx, *rest = gpt2_block(x, *arguments)
    return dx.roll(1, 1) + 0.1 * dx, *rest


def of_adamw(what: str, change: Function) -> None:
    @outside("adamw", what)
    def update(param, grad, m, v, step):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        return change(param, grad, m, v, 1 - 0.9**step, 1 - 0.95**step), m, v


of_adamw("half the decay", lambda p, g, m, v, a, b: p * (1 - 5e-4) - 0.01 * (m / a) / (np.sqrt(v / b) + 1e-8))
of_adamw(
    "Nesterov's moment",
    lambda p, g, m, v, a, b: p * (1 - 1e-3) - 0.01 * ((0.9 * m + 0.1 * g) / a) / (np.sqrt(v / b) + 1e-8),
)
of_adamw("signs alone", lambda p, g, m, v, a, b: p * (1 - 1e-3) - 0.01 * np.sign(m))


import outside_of_parts  # noqa: E402, F401  (the layers made of several parts, in the same table)

# what the generic probes and the fitted constants say about some of them; the others get no name
NAMED = {
    ("attention", "the width of the values in the scale"): "√d_v in place of √d_k",
    ("attention", "a window of three tokens"): "the mask is a window: a token attends to itself and the 2 before it",
    ("attention", "a temperature"): "temperature.*constant = 1.11111",
    ("attention", "powers of 2"): "temperature.*constant = 0.693147",
    ("attention", "the next head's dv"): "dv is shifted cyclically by one head",
    ("attention", "dq with a residual"): "dq has q added to it",
    ("attention", "dk accumulated over tokens"): "dk is accumulated over its tokens",
    ("attention", "dv without the weights"): "dout in place of dv",
    ("multi_head", "heads interleaved"): "a head takes every H-th column",
    ("layer_norm", "another eps"): "eps = 0.001",
    ("rms_norm", "another eps"): "eps = 0.001",
    ("layer_norm", "the second term twice"): r"mean\(g ∘ ā\) is counted twice",
    ("rms_norm", "γ + 1"): r"1 \+ weight in place of weight",
    ("linear", "dx through absolute weights"): "the absolute value of weight",
    ("linear", "tokens shifted by one"): "x is shifted cyclically by one token",
    ("linear", "decay added to dweight"): "dweight has 0.01 · weight added to it",
    ("linear", "the first token left out of dbias"): "the first token of dout (in dbias )?is left out",
    ("linear", "an activation in between"): "dx is set to 0 except where x > 0",
    ("lora", "α/(r + 1)"): r"1 \+ rank in place of rank in the scale",
    ("embedding", "the first occurrence kept"): "only their first occurrence counts",
    ("softmax_cross_entropy", "squared errors"): "squared error",
    ("softmax_cross_entropy", "smoothed labels"): "label smoothing = 0.1",
    ("softmax_cross_entropy", "a temperature"): "temperature.*number = 0.5",
    ("gelu", "SiLU"): "the derivative of SiLU",
    ("gelu", "0.044 for 0.044715"): "constant = 0.044",
    ("gelu", "2/π without its root"): "constant = 0.63662",
    ("swiglu", "GELU as the gate"): "GELU",
    ("rope", "degrees"): "angle times = 57.2958",
    ("rope", "the slow pairs first"): "frequencies.*reverse order",
    ("rope", "positions halved"): "angle times = 0.5",
    ("adamw", "half the decay"): "weight_decay = 0.05",
    ("adamw", "Nesterov's moment"): "Nesterov",
}
