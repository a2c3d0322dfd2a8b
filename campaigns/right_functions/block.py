"""Heads with their projections, multi-head attention and GPT-2's block, out of the other authors' parts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from campaigns.right_functions.attention import attention_core, hidden, softmax
from campaigns.right_functions.author import Author, Function, Maker, t
from campaigns.right_functions.dense import dense_core
from campaigns.right_functions.norms import moments, norm_core
from campaigns.right_functions.pointwise import CUBIC, ROOT, gelu_tanh, rope


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


def block(author: Author) -> Function:
    core, dense, slope, weights = (make(author) for make in (attention_core, dense_core, gelu_tanh, softmax))
    norm, measured = norm_core(author), moments(author)
    xp, dot, packed = author.xp, author.dot, author.yes("packed q, k, v")

    def normed(x: Any, weight: Any, bias: Any) -> Any:
        centred, square = measured(x, True)
        return centred / xp.sqrt(square + 1e-5) * weight + bias

    def norm_backward(x: Any, weight: Any, d: Any) -> tuple[Any, ...]:
        z, dx = norm(x, weight, d, 1e-5, True)
        return dx, author.over_tokens(d * z), author.over_tokens(d)

    def backward(
        x: Any, g1: Any, b1: Any, w_qkv: Any, b_qkv: Any, w_proj: Any, b_proj: Any, g2: Any, b2: Any, w_fc: Any,
        b_fc: Any, w_out: Any, b_out: Any, dout: Any, n_head: int = 2, causal: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        width, n = x.shape[-1], x.shape[1]
        a = normed(x, g1, b1)
        parts = [slice(i * width, (i + 1) * width) for i in range(3)]
        if packed:
            both = dot(a, w_qkv) + b_qkv
            q, k, v = (split(both[..., part], n_head) for part in parts)
        else:
            q, k, v = (split(dot(a, w_qkv[:, part]) + b_qkv[part], n_head) for part in parts)
        s = dot(q, t(k)) / math.sqrt(q.shape[-1])
        unseen = author.like(hidden(n, n, causal), s)
        mixed = merged(dot(weights(xp.where(unseen, author.like(np.array(-math.inf), s), s)), v))
        h = x + dot(mixed, w_proj) + b_proj
        m = normed(h, g2, b2)
        z = dot(m, w_fc) + b_fc
        active = 0.5 * z * (1 + xp.tanh(ROOT * (z + CUBIC * z**3)))
        dactive, *dout_ = dense(active, w_out, dout)
        dm, *dfc = dense(m, w_fc, slope(z, dactive))
        dh, *dnorm2 = norm_backward(h, g2, dm)
        dh = dh + dout
        dmixed, *dproj = dense(mixed, w_proj, dh)
        dqkv = xp.concatenate([merged(d) for d in core(q, k, v, split(dmixed, n_head), causal=causal)], -1)
        da, *dattn = dense(a, w_qkv, dqkv)
        dx, *dnorm1 = norm_backward(x, g1, da)
        return (dx + dh, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_)

    return backward


BLOCK: dict[str, Maker] = {"head": head, "head_dropout": head_dropout, "multi_head": multi_head, "block": block}
