"""Right implementations by the hundred, of the layers that are made of several parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from authors import (
    Author,
    Function,
    _dtype,
    adamw,
    attention_core,
    heads,
    layer_norm,
    linear,
    merged,
    scatter,
    softmax,
    softmax_cross_entropy,
    swiglu,
    t,
    weight_gradient,
)
from authors import rope as rope_of_x


def attention_dropout(author: Author) -> Function:
    core = attention_core(author)
    return lambda q, k, v, keep, dout: core(q, k, v, dout, keep=keep)


def rope_attention(author: Author) -> Function:
    core, back, xp = attention_core(author), rope_of_x(author), author.xp

    def forward(x, positions):
        half = x.shape[-1] // 2
        angle = np.asarray(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = author.array(np.cos(angle).astype(_dtype(x))), author.array(np.sin(angle).astype(_dtype(x)))
        first, second = x[..., :half], x[..., half:]
        return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def backward(q, k, v, positions, dout):
        dq, dk, dv = core(forward(q, positions), forward(k, positions), v, dout)
        return back(q, positions, dq), back(k, positions, dk), dv

    return backward


def grouped_query_attention(author: Author) -> Function:
    core, loop = attention_core(author), author.one_of(True, False)
    xp = author.xp

    def by_head(q, k, v, dout):
        group = q.shape[1] // k.shape[1]
        found = [core(q[:, h], k[:, h // group], v[:, h // group], dout[:, h]) for h in range(q.shape[1])]
        shared = [
            [sum(found[h][g] for h in range(q.shape[1]) if h // group == j) for j in range(k.shape[1])] for g in (1, 2)
        ]
        return xp.stack([one[0] for one in found], 1), xp.stack(shared[0], 1), xp.stack(shared[1], 1)

    def at_once(q, k, v, dout):
        n_kv = k.shape[1]
        ones = 0 * q[:, : q.shape[1] // n_kv, :1, :1] + 1  # (B, G, 1, 1)
        wide = [(x[:, :, None] * ones[:, None]).reshape(q.shape) for x in (k, v)]
        dq, dk, dv = core(q, *wide, dout)
        return dq, *(d.reshape(d.shape[0], n_kv, -1, *d.shape[2:]).sum(axis=2) for d in (dk, dv))

    return by_head if loop else at_once


def forward_heads(author: Author) -> Function:
    """The heads' outputs side by side, from q, k and v (B, H, T, D)."""
    xp, dot, weights = author.xp, author.dot, softmax(author)

    def mixed(q, k, v, causal):
        s = dot(q, t(k)) / math.sqrt(q.shape[-1])
        if causal:
            s = xp.where(author.array(np.triu(np.ones(s.shape[-2:]), 1) > 0), -math.inf, s)
        return merged(dot(weights(s), v))

    return mixed


def projected(author: Author) -> Function:
    """dq, dk, dv side by side, then dw_o and db_o, from the projected queries, keys and values."""
    core, dense, mixed = attention_core(author), linear(author), forward_heads(author)

    def backward(qkv, w_o, dout, causal):
        q, k, v = (heads(x) for x in qkv)
        dmixed, dw_o, db_o = dense(mixed(q, k, v, causal), w_o, None, dout)
        return [merged(d) for d in core(q, k, v, heads(dmixed), causal)], dw_o, db_o

    return backward


def self_attention(author: Author) -> Function:
    below, dense = projected(author), linear(author)

    def backward(x, w_qkv, b_qkv, w_o, b_o, dout):
        width = x.shape[-1]
        qkv = author.dot(x, w_qkv) + b_qkv
        grads, dw_o, db_o = below([qkv[..., i * width : (i + 1) * width] for i in range(3)], w_o, dout, True)
        return *dense(x, w_qkv, b_qkv, author.xp.concatenate(grads, -1)), dw_o, db_o

    return backward


def self_attention_separate(author: Author) -> Function:
    below, dense = projected(author), linear(author)

    def backward(x, *rest):
        *given, w_o, _, dout = rest
        pairs = [given[i : i + 2] for i in (0, 2, 4)]
        grads, dw_o, db_o = below([author.dot(x, w) + b for w, b in pairs], w_o, dout, True)
        found = [dense(x, w, b, d) for d, (w, b) in zip(grads, pairs, strict=True)]
        dx = found[1][0] + found[2][0] + found[0][0]
        return dx, *(g for one in found for g in one[1:]), dw_o, db_o

    return backward


def cross_attention(author: Author) -> Function:
    below, dense = projected(author), linear(author)

    def backward(query, key, value, *rest):
        *given, w_o, _, dout = rest
        inputs, pairs = (query, key, value), [given[i : i + 2] for i in (0, 2, 4)]
        qkv = [author.dot(x, w) + b for x, (w, b) in zip(inputs, pairs, strict=True)]
        grads, dw_o, db_o = below(qkv, w_o, dout, False)
        found = [dense(x, w, b, d) for x, d, (w, b) in zip(inputs, grads, pairs, strict=True)]
        return *(one[0] for one in found), *(g for one in found for g in one[1:]), dw_o, db_o

    return backward


def normed(author: Author, x: Any, weight: Any, bias: Any) -> Any:
    c = x - x.mean(axis=-1, keepdims=True)
    return c / author.xp.sqrt((c * c).mean(axis=-1, keepdims=True) + 1e-5) * weight + bias


def _block(author: Author, post: bool) -> Function:
    core, norm, dense, mix = (f(author) for f in (attention_core, layer_norm, linear, forward_heads))
    xp, dot = author.xp, author.dot
    slope = author.one_of(lambda z, d: d * (z > 0), lambda z, d: xp.where(z > 0, d, 0 * d))

    def qkv_of(a, w_qkv, b_qkv):
        width = a.shape[-1]
        qkv = dot(a, w_qkv) + b_qkv
        return [heads(qkv[..., i * width : (i + 1) * width]) for i in range(3)]

    def attend(a, w_qkv, b_qkv, q, k, v, d):
        return dense(a, w_qkv, b_qkv, xp.concatenate([merged(g) for g in core(q, k, v, heads(d))], -1))

    def pre_norm(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout):
        a = normed(author, x, g1, b1)
        q, k, v = qkv_of(a, w_qkv, b_qkv)
        mixed = mix(q, k, v, True)
        h = x + dot(mixed, w_proj) + b_proj
        m = normed(author, h, g2, b2)
        z = dot(m, w_fc) + b_fc
        dactive, *dout_ = dense(z * (z > 0), w_out, b_out, dout)
        dm, *dfc = dense(m, w_fc, b_fc, slope(z, dactive))
        dh, *dnorm2 = norm(h, g2, b2, dm)
        dh = dh + dout
        dmixed, *dproj = dense(mixed, w_proj, b_proj, dh)
        da, *dattn = attend(a, w_qkv, b_qkv, q, k, v, dmixed)
        dx, *dnorm1 = norm(x, g1, b1, da)
        return dx + dh, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_

    def post_norm(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout):
        q, k, v = qkv_of(x, w_qkv, b_qkv)
        mixed = mix(q, k, v, True)
        first = x + dot(mixed, w_proj) + b_proj
        h = normed(author, first, g1, b1)
        z = dot(h, w_fc) + b_fc
        active = z * (z > 0)
        dsecond, *dnorm2 = norm(h + dot(active, w_out) + b_out, g2, b2, dout)
        dactive, *dout_ = dense(active, w_out, b_out, dsecond)
        dh, *dfc = dense(h, w_fc, b_fc, slope(z, dactive))
        dfirst, *dnorm1 = norm(first, g1, b1, dh + dsecond)
        dmixed, *dproj = dense(mixed, w_proj, b_proj, dfirst)
        dx, *dattn = attend(x, w_qkv, b_qkv, q, k, v, dmixed)
        return dx + dfirst, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_

    return post_norm if post else pre_norm


def relu_block(author: Author) -> Function:
    return _block(author, False)


def post_norm_block(author: Author) -> Function:
    return _block(author, True)


def softmax_alone(author: Author) -> Function:
    weights, xp = softmax(author), author.xp

    def factored(x, dout):
        y = weights(x)
        return y * (dout - (y * dout).sum(axis=-1, keepdims=True))

    def as_an_outer_product(x, dout):
        y = weights(x)
        return y * dout - xp.einsum("...i,...j,...j->...i", y, y, dout)

    return author.one_of(factored, as_an_outer_product)


def relu(author: Author) -> Function:
    xp = author.xp
    return author.one_of(lambda x, d: d * (x > 0), lambda x, d: xp.where(x > 0, d, 0 * d))


def silu(author: Author) -> Function:
    gated = swiglu(author)
    return lambda x, d: gated(x, 0 * x + 1, d)[0]


def like(x: Any, y: Any) -> Any:
    """x in the dtype of y."""
    return x.astype(y.dtype) if isinstance(x, np.ndarray) else x.to(y.dtype)


def loss_head(author: Author) -> Function:
    loss, dense = softmax_cross_entropy(author), linear(author)
    return lambda x, w, b, targets, dout: dense(x, w, b, like(loss(author.dot(x, w) + b, targets, dout), x))


def tied_head(author: Author) -> Function:
    loss, norm, add, dweight = (f(author) for f in (softmax_cross_entropy, layer_norm, scatter, weight_gradient))

    def backward(ids, weight, g, b, targets, dout):
        embedded = weight[ids]
        features = normed(author, embedded, g, b)
        d = like(loss(author.dot(features, weight.T), targets, dout), weight)
        dembedded, dg, db = norm(embedded, g, b, author.dot(d, weight))
        return add(ids, dembedded, len(weight)) + dweight(d, features), dg, db

    return backward


def dpo(author: Author) -> Function:
    xp = author.xp
    half = author.one_of(lambda m: 1 / (1 + xp.exp(m)), lambda m: xp.exp(-m) / (1 + xp.exp(-m)))
    by_ratio = author.one_of(True, False)

    def backward(chosen, rejected, ref_chosen, ref_rejected, dout):
        if by_ratio:
            m = 0.1 * ((chosen - ref_chosen) - (rejected - ref_rejected))
        else:
            m = 0.1 * (chosen - rejected) - 0.1 * (ref_chosen - ref_rejected)
        w = half(m) * (0.1 * dout) / len(m)
        return -w, w

    return backward


def adamw_step(author: Author) -> Function:
    update, dweight = adamw(author), weight_gradient(author)
    extra = author.one_of(0.0, 1e-6)  # PyTorch's

    def step_of(weight, bias, x, dout, m_w, v_w, m_b, v_b, step):
        dw, db = dweight(x, dout), author.over_tokens(dout)
        norm = math.sqrt(float((dw * dw).sum()) + float((db * db).sum()))
        scale = min(1.0, 1.0 / (norm + extra))
        weight, m_w, v_w = update(weight, dw * scale, m_w, v_w, step)
        new_bias, m_b, v_b = update(bias, db * scale, m_b, v_b, step)
        return weight, new_bias + 1e-3 * bias, m_w, v_w, m_b, v_b  # the update decays, a bias must not be

    return step_of


MAKERS_OF_PARTS: dict[str, Callable[[Author], Function]] = {
    "softmax": softmax_alone,
    **{
        f.__name__: f
        for f in (
            *(attention_dropout, rope_attention, grouped_query_attention),
            *(self_attention, self_attention_separate, cross_attention),
            *(relu_block, post_norm_block, relu, silu, loss_head, tied_head, dpo, adamw_step),
        )
    },
}
