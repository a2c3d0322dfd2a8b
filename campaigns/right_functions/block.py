"""Heads with their projections, multi-head attention and blocks, out of the other authors' parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from campaigns.right_functions.attention import attention_core
from campaigns.right_functions.author import Author, Function, Maker
from campaigns.right_functions.dense import dense_core
from campaigns.right_functions.mixing import mixing
from campaigns.right_functions.norms import moments, norm_core
from campaigns.right_functions.pointwise import CUBIC, ROOT, gelu_tanh, relu_slope, rope


def split(x: Any, n: int) -> Any:
    """(B, T, n D) → (B, n, T, D)."""
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)


def merged(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def head_core(author: Author) -> Function:
    core, dense, turn = attention_core(author), dense_core(author), rope(author)
    xp, fused, order = author.xp, author.yes("fused projections"), author.draw((0, 1, 2), (2, 0, 1), (1, 2, 0))

    def projected(a: Any, pairs: Any) -> list[Any]:
        if not fused:
            return [author.dot(a, w) + b for w, b in pairs]
        both = author.dot(a, xp.concatenate([w for w, _ in pairs], 1)) + xp.concatenate([b for _, b in pairs], 0)
        ends = np.cumsum([0, *(w.shape[1] for w, _ in pairs)])
        return [both[..., i:j] for i, j in pairwise(ends)]

    def backward(
        a: Any, w_q: Any, b_q: Any, w_k: Any, b_k: Any, w_v: Any, b_v: Any, dout: Any, keep: Any, causal: bool,
        rotary: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        pairs = ((w_q, b_q), (w_k, b_k), (w_v, b_v))
        q, k, v = projected(a, pairs)
        positions = np.arange(a.shape[1])

        def turned(x: Any, where: np.ndarray) -> Any:
            return turn(x[:, None], where, x[:, None])[0][:, 0] if rotary else x

        q, k = turned(q, -positions), turned(k, -positions)
        grads = list(core(q, k, v, dout, causal=causal, keep=keep))
        grads[:2] = [turned(g, positions) for g in grads[:2]]
        if fused:
            da, dweight, dbias = dense(a, xp.concatenate([w for w, _ in pairs], 1), xp.concatenate(grads, -1))
            ends = np.cumsum([0, *(w.shape[1] for w, _ in pairs)])
            cuts = list(pairwise(ends))
            return (da, *(g for i, j in cuts for g in (dweight[:, i:j], dbias[i:j])))
        found = [dense(a, w, d) for d, (w, _) in zip(grads, pairs, strict=True)]
        return (sum(found[i][0] for i in order), *(g for one in found for g in one[1:]))

    return backward


def head(author: Author) -> Function:
    core = head_core(author)
    return lambda *inputs, causal=True, rotary=False: core(*inputs, None, causal, rotary)


def head_dropout(author: Author) -> Function:
    core = head_core(author)
    return lambda *inputs, causal=True: core(*inputs[:7], inputs[8], inputs[7], causal)


def multi_head(author: Author) -> Function:
    core, dense, by_head = attention_core(author), dense_core(author), author.yes("projections of each head", 0.3)
    xp = author.xp

    def project(x: Any, w: Any, n_head: int) -> Any:
        if not by_head:
            return split(author.dot(x, w), n_head)
        d = w.shape[1] // n_head
        return xp.stack([author.dot(x, w[:, h * d : (h + 1) * d]) for h in range(n_head)], 1)

    def backward(
        query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, dout: Any, causal: bool = True, n_head: int = 2
    ) -> tuple[Any, ...]:
        inputs, weights = (query, key, value), (w_q, w_k, w_v)
        q, k, v = (project(x, w, n_head) for x, w in zip(inputs, weights, strict=True))
        grads = [merged(d) for d in core(q, k, v, split(dout, n_head), causal=causal)]
        found = [dense(x, w, d) for x, w, d in zip(inputs, weights, grads, strict=True)]
        return (*(f[0] for f in found), *(f[1] for f in found))

    return backward


def _norms(author: Author) -> tuple[Function, Function]:
    """A layer norm forward, and backward: (x, weight, d) → dx, dweight, dbias."""
    norm, measured, xp = norm_core(author), moments(author), author.xp

    def normed(x: Any, weight: Any, bias: Any) -> Any:
        centred, square = measured(x, True)
        return centred / xp.sqrt(square + 1e-5) * weight + bias

    def backward(x: Any, weight: Any, d: Any) -> tuple[Any, ...]:
        z, dx = norm(x, weight, d, 1e-5, True)
        return dx, author.over_tokens(d * z), author.over_tokens(d)

    return normed, backward


def _attention(author: Author) -> Function:
    """(a, w_qkv, b_qkv, n_head, causal) → all heads' outputs side by side, and their backward pass."""
    core, dense, mixed, xp = attention_core(author), dense_core(author), mixing(author), author.xp
    packed = author.yes("packed q, k, v")

    def forward(a: Any, w_qkv: Any, b_qkv: Any, n_head: int, causal: bool) -> tuple[Any, Function]:
        width = a.shape[-1]
        parts = [slice(i * width, (i + 1) * width) for i in range(3)]
        if packed:
            both = author.dot(a, w_qkv) + b_qkv
            q, k, v = (split(both[..., part], n_head) for part in parts)
        else:
            q, k, v = (split(author.dot(a, w_qkv[:, part]) + b_qkv[part], n_head) for part in parts)

        def backward(d: Any) -> tuple[Any, ...]:
            dqkv = xp.concatenate([merged(g) for g in core(q, k, v, split(d, n_head), causal=causal)], -1)
            return dense(a, w_qkv, dqkv)

        return merged(mixed(q, k, v, causal)), backward

    return forward


def pre_norm(author: Author, active: Function, slope: Function) -> Function:
    """The norms before attention and MLP."""
    attend, dense, dot = _attention(author), dense_core(author), author.dot
    normed, norm_backward = _norms(author)

    def backward(
        x: Any, g1: Any, b1: Any, w_qkv: Any, b_qkv: Any, w_proj: Any, b_proj: Any, g2: Any, b2: Any, w_fc: Any,
        b_fc: Any, w_out: Any, b_out: Any, dout: Any, n_head: int = 2, causal: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        mixed, attention_backward = attend(normed(x, g1, b1), w_qkv, b_qkv, n_head, causal)
        h = x + dot(mixed, w_proj) + b_proj
        m = normed(h, g2, b2)
        z = dot(m, w_fc) + b_fc
        dactive, *dout_ = dense(active(z), w_out, dout)
        dm, *dfc = dense(m, w_fc, slope(z, dactive))
        dh, *dnorm2 = norm_backward(h, g2, dm)
        dh = dh + dout
        dmixed, *dproj = dense(mixed, w_proj, dh)
        da, *dattn = attention_backward(dmixed)
        dx, *dnorm1 = norm_backward(x, g1, da)
        return (dx + dh, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_)

    return backward


def post_norm(author: Author, active: Function, slope: Function) -> Function:
    """The norms after the skip connections."""
    attend, dense, dot = _attention(author), dense_core(author), author.dot
    normed, norm_backward = _norms(author)

    def backward(
        x: Any, g1: Any, b1: Any, w_qkv: Any, b_qkv: Any, w_proj: Any, b_proj: Any, g2: Any, b2: Any, w_fc: Any,
        b_fc: Any, w_out: Any, b_out: Any, dout: Any, n_head: int = 2, causal: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        mixed, attention_backward = attend(x, w_qkv, b_qkv, n_head, causal)
        first = x + dot(mixed, w_proj) + b_proj
        h = normed(first, g1, b1)
        z = dot(h, w_fc) + b_fc
        hidden_ = active(z)
        dsecond, *dnorm2 = norm_backward(h + dot(hidden_, w_out) + b_out, g2, dout)
        dactive, *dout_ = dense(hidden_, w_out, dsecond)
        dh, *dfc = dense(h, w_fc, slope(z, dactive))
        dfirst, *dnorm1 = norm_backward(first, g1, dh + dsecond)
        dmixed, *dproj = dense(mixed, w_proj, dfirst)
        dx, *dattn = attention_backward(dmixed)
        return (dfirst + dx, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_)

    return backward


def block(author: Author) -> Function:
    xp, slope = author.xp, gelu_tanh(author)
    return pre_norm(author, lambda z: 0.5 * z * (1 + xp.tanh(ROOT * (z + CUBIC * z**3))), slope)


def relu_block(author: Author) -> Function:
    return pre_norm(author, lambda z: z * (z > 0), relu_slope(author))


def post_norm_block(author: Author) -> Function:
    return post_norm(author, lambda z: z * (z > 0), relu_slope(author))


BLOCK: dict[str, Maker] = {
    "head": head,
    "head_dropout": head_dropout,
    "multi_head": multi_head,
    "block": block,
    "relu_block": relu_block,
    "post_norm_block": post_norm_block,
}
