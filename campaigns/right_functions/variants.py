"""Attention with a given dropout pattern, with rotated or grouped queries, and with all its projections."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from campaigns.right_functions.attention import attention_core
from campaigns.right_functions.author import Author, Function, Maker
from campaigns.right_functions.block import merged, split
from campaigns.right_functions.dense import dense_core
from campaigns.right_functions.mixing import mixing
from campaigns.right_functions.pointwise import rope


def attention_dropout(author: Author) -> Function:
    core = attention_core(author)
    return lambda q, k, v, keep, dout, causal=True: core(q, k, v, dout, causal=causal, keep=keep)


def rope_attention(author: Author) -> Function:
    core, turn = attention_core(author), rope(author)

    def backward(
        q: Any, k: Any, v: Any, positions: Any, dout: Any, causal: bool = True, theta: float = 10000.0
    ) -> list[Any]:
        where = np.asarray(positions)
        turned = [turn(x, -where, x, theta)[0] for x in (q, k)]
        dq, dk, dv = core(*turned, v, dout, causal=causal)
        return [turn(dq, where, dq, theta)[0], turn(dk, where, dk, theta)[0], dv]

    return backward


def grouped_query_attention(author: Author) -> Function:
    """Keys and values repeated for every head of their group, or one axis more for the groups."""
    core, xp = attention_core(author), author.xp
    way = author.one_of("groups", "repeated", "stacked", "by key head", "one long sequence of queries")

    def summed(grad: Any, groups: int) -> Any:
        b, h, n, d = grad.shape
        return author.total(grad.reshape(b, h // groups, groups, n, d), 2)[:, :, 0]

    def backward(q: Any, k: Any, v: Any, dout: Any, causal: bool = True) -> list[Any]:
        groups, n = q.shape[1] // k.shape[1], q.shape[2]
        if way == "by key head":
            found = []
            for h in range(k.shape[1]):
                own = slice(h * groups, (h + 1) * groups)
                wide = [xp.concatenate([x[:, h : h + 1]] * groups, 1) for x in (k, v)]
                dq, dk, dv = core(q[:, own], *wide, dout[:, own], causal=causal)
                found.append([dq, summed(dk, groups), summed(dv, groups)])
            return [xp.concatenate(parts, 1) for parts in zip(*found, strict=True)]
        if way == "one long sequence of queries" and not causal:
            long = [x.reshape(len(x), k.shape[1], groups * n, -1) for x in (q, dout)]
            dq, dk, dv = core(long[0], k, v, long[1], causal=False)
            return [dq.reshape(q.shape), dk, dv]
        if way == "stacked":
            wide = [xp.stack([x] * groups, 2).reshape(len(x), -1, *x.shape[2:]) for x in (k, v)]
        else:
            places = np.repeat(np.arange(k.shape[1]), groups)
            wide = [x[:, places] for x in (k, v)]
        dq, dk, dv = core(q, *wide, dout, causal=causal)
        return [dq, summed(dk, groups), summed(dv, groups)]

    return backward


def _projected(author: Author) -> Function:
    """Attention of all heads between its projections: three inputs, their weights and biases, the output's."""
    core, dense, mixed = attention_core(author), dense_core(author), mixing(author)

    def backward(
        inputs: Any, pairs: Any, w_o: Any, dout: Any, causal: bool, n_head: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        q, k, v = (split(author.dot(x, w) + b, n_head) for x, (w, b) in zip(inputs, pairs, strict=True))
        joined = merged(mixed(q, k, v, causal))
        djoined, *of_output = dense(joined, w_o, dout)
        grads = [merged(d) for d in core(q, k, v, split(djoined, n_head), causal=causal)]
        found = [dense(x, w, d) for x, (w, _), d in zip(inputs, pairs, grads, strict=True)]
        return [one[0] for one in found], [g for one in found for g in one[1:]], of_output

    return backward


def self_attention_separate(author: Author) -> Function:
    core, order = _projected(author), author.draw((0, 1, 2), (2, 1, 0), (1, 0, 2))

    def backward(x: Any, *given: Any, causal: bool = True, n_head: int = 2) -> tuple[Any, ...]:
        w_q, b_q, w_k, b_k, w_v, b_v, w_o, _, dout = given
        dx, of_inputs, of_output = core([x] * 3, ((w_q, b_q), (w_k, b_k), (w_v, b_v)), w_o, dout, causal, n_head)
        return (sum(dx[i] for i in order), *of_inputs, *of_output)

    return backward


def self_attention(author: Author) -> Function:
    core, dense, mixed = attention_core(author), dense_core(author), mixing(author)
    separate, xp = self_attention_separate(author), author.xp
    packed = author.yes("packed q, k, v")

    def backward(
        x: Any, w_qkv: Any, b_qkv: Any, w_o: Any, b_o: Any, dout: Any, causal: bool = True, n_head: int = 2
    ) -> tuple[Any, ...]:
        cuts = list(pairwise(x.shape[-1] * i for i in range(4)))
        if not packed:
            parts = [part for i, j in cuts for part in (w_qkv[:, i:j], b_qkv[i:j])]
            dx, *grads, dw_o, db_o = separate(x, *parts, w_o, b_o, dout, causal=causal, n_head=n_head)
            return dx, xp.concatenate(grads[::2], 1), xp.concatenate(grads[1::2], 0), dw_o, db_o
        both = author.dot(x, w_qkv) + b_qkv
        q, k, v = (split(both[..., i:j], n_head) for i, j in cuts)
        djoined, dw_o, db_o = dense(merged(mixed(q, k, v, causal)), w_o, dout)
        grads = xp.concatenate([merged(d) for d in core(q, k, v, split(djoined, n_head), causal=causal)], -1)
        return (*dense(x, w_qkv, grads), dw_o, db_o)

    return backward


def cross_attention(author: Author) -> Function:
    core = _projected(author)

    def backward(query: Any, key: Any, value: Any, *given: Any, n_head: int = 2) -> tuple[Any, ...]:
        w_q, b_q, w_k, b_k, w_v, b_v, w_o, _, dout = given
        pairs = ((w_q, b_q), (w_k, b_k), (w_v, b_v))
        of_inputs, of_weights, of_output = core((query, key, value), pairs, w_o, dout, False, n_head)
        return (*of_inputs, *of_weights, *of_output)

    return backward


VARIANTS: dict[str, Maker] = {
    "attention_dropout": attention_dropout,
    "rope_attention": rope_attention,
    "grouped_query_attention": grouped_query_attention,
    "self_attention": self_attention,
    "self_attention_separate": self_attention_separate,
    "cross_attention": cross_attention,
}
