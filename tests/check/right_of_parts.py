"""Correct implementations of the layers that are made of several parts, at least two styles each."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from planted.losses_of_heads import dpo, loss_of, step_by_hand, step_of, tied
from planted.network import block as pre_norm
from planted.network import merge, split
from planted.post_norm import block as post_norm
from planted.projections import cross, packed, separate
from planted.registry import autograd
from planted.variants import dropout, grouped, rope, turn, weights
from right import RIGHT, right

# attention with dropout, positions or groups


@right("attention_dropout")
def dropout_by_hand(q, k, v, keep, dout, causal=True):
    return dropout(q, k, v, keep, dout, causal)


@right("attention_dropout")
def dropped_by_autograd(q, k, v, keep, dout, causal=True):
    return autograd(lambda q, k, v: (weights(q, k, causal) * keep) @ v, [q, k, v], dout)


@right("attention_dropout")
def dropout_with_row_sums_of_the_output(q, k, v, keep, dout):
    n, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
    s = np.where(np.tri(n, dtype=bool), np.einsum("bhid,bhjd->bhij", q, k) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = (p * keep) @ v
    ds = p * (keep * (dout @ v.swapaxes(-1, -2)) - (dout * out).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, (p * keep).swapaxes(-1, -2) @ dout


@right("rope_attention")
def rope_by_hand(q, k, v, positions, dout, causal=True):
    return rope(q, k, v, positions, dout, causal)


@right("rope_attention")
def rope_through_autograd(q, k, v, positions, dout, causal=True):
    def forward(q, k, v):
        return F.scaled_dot_product_attention(turn(q, positions), turn(k, positions), v, is_causal=causal)

    return autograd(forward, [q, k, v], dout)


@right("rope_attention")
def rope_by_matrices(q, k, v, positions, dout):
    """A rotation matrix per position: q̃ = q Rᵗ, and back dq = dq̃ R."""
    n, d = q.shape[-2:]
    half = d // 2
    turned = np.zeros((n, d, d), dtype=q.dtype)
    for t, p in enumerate(positions):
        for i in range(half):
            a = p * 10000.0 ** (-2 * i / d)
            turned[t, [i, i, i + half, i + half], [i, i + half, i, i + half]] = (
                math.cos(a),
                -math.sin(a),
                math.sin(a),
                math.cos(a),
            )
    q_, k_ = (np.einsum("tij,bhtj->bhti", turned, x) for x in (q, k))
    s = np.where(np.tri(n, dtype=bool), q_ @ k_.swapaxes(-1, -2) / math.sqrt(d), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = (p * dp - p * (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    dq, dk = ds @ k_, ds.swapaxes(-1, -2) @ q_
    return *(np.einsum("tij,bhti->bhtj", turned, x) for x in (dq, dk)), p.swapaxes(-1, -2) @ dout


@right("grouped_query_attention")
def grouped_head_by_head(q, k, v, dout, causal=True):
    return grouped(*map(torch.as_tensor, (q, k, v, dout)), causal)


@right("grouped_query_attention")
def grouped_by_repeating(q, k, v, dout, causal=True):
    def forward(q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return autograd(forward, [q, k, v], dout)


@right("grouped_query_attention")
def grouped_by_einsum(q, k, v, dout):
    b, h, n, d = q.shape
    q, dout = (x.reshape(b, k.shape[1], -1, n, d) for x in (q, dout))
    s = np.einsum("bjgtd,bjsd->bjgts", q, k) / math.sqrt(d)
    s = np.where(np.tri(n, dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp = np.einsum("bjgtd,bjsd->bjgts", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    dq = np.einsum("bjgts,bjsd->bjgtd", ds, k).reshape(b, h, n, d)
    return dq, np.einsum("bjgts,bjgtd->bjsd", ds, q), np.einsum("bjgts,bjgtd->bjsd", p, dout)


# attention with an output projection


@right("self_attention")
def packed_by_hand(x, w_qkv, b_qkv, w_o, b_o, dout, causal=True):
    return packed(x, w_qkv, b_qkv, w_o, b_o, dout, causal)


@right("self_attention")
def packed_by_autograd(x, w_qkv, b_qkv, w_o, b_o, dout, causal=True):
    def forward(x, w_qkv, b_qkv, w_o, b_o):
        q, k, v = (split(z) for z in (x @ w_qkv + b_qkv).chunk(3, -1))
        return merge(weights(q, k, causal) @ v) @ w_o + b_o

    return autograd(forward, [x, w_qkv, b_qkv, w_o, b_o], dout)


@right("self_attention_separate")
def separate_by_hand(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal=True):
    return separate(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal)


@right("self_attention_separate")
def separate_by_the_module(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout, causal=True):
    """torch.nn.functional.multi_head_attention_forward, whose weights are (out, in)."""
    given = [x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o]

    def forward(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
        return by_the_module(x, x, x, (w_q, w_k, w_v), (b_q, b_k, b_v), w_o, b_o, hidden)

    return autograd(forward, given, dout)


def by_the_module(query, key, value, matrices, biases, w_o, b_o, hidden=None):
    out, _ = F.multi_head_attention_forward(
        *(x.transpose(0, 1) for x in (query, key, value)),
        query.shape[-1],
        2,
        torch.cat([w.T for w in matrices]),
        torch.cat(biases),
        None,
        None,
        False,
        0.0,
        w_o.T,
        b_o,
        attn_mask=hidden,
        need_weights=False,
    )
    return out.transpose(0, 1)


@right("cross_attention")
def cross_by_hand(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    return cross(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout)


@right("cross_attention")
def cross_by_the_module(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    def forward(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o):
        return by_the_module(query, key, value, (w_q, w_k, w_v), (b_q, b_k, b_v), w_o, b_o)

    return autograd(forward, [query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o], dout)


# blocks


@right("relu_block")
def relu_block_by_autograd(x, *arguments):
    return pre_norm(x, *arguments, activation=torch.relu)


@right("relu_block")
def relu_block_by_the_module(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout):
    given = (g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out)
    return encoder_layer(x, *given, dout, norm_first=True)


@right("post_norm_block")
def post_norm_by_autograd(x, *arguments):
    return post_norm(x, *arguments)


@right("post_norm_block")
def post_norm_by_the_module(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout):
    given = (g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out)
    return encoder_layer(x, *given, dout, norm_first=False)


def encoder_layer(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout, norm_first):
    """torch.nn.TransformerEncoderLayer, whose weights are (out, in)."""
    width, hidden = w_fc.shape
    layer = torch.nn.TransformerEncoderLayer(
        width, 2, hidden, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=x.dtype
    )
    given = (w_qkv.T, b_qkv, w_proj.T, b_proj, w_fc.T, b_fc, w_out.T, b_out, g1, b1, g2, b2)
    for parameter, value in zip(layer.parameters(), given, strict=True):
        parameter.data = value.clone()
    x = x.clone().requires_grad_()
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    layer(x, src_mask=future).backward(dout)
    dqkv, dbqkv, dproj, dbproj, dfc, dbfc, dout_, dbout, dg1, db1, dg2, db2 = (p.grad for p in layer.parameters())
    return x.grad, dg1, db1, dqkv.T, dbqkv, dproj.T, dbproj, dg2, db2, dfc.T, dbfc, dout_.T, dbout


# pointwise and softmax


@right("softmax")
def softmax_by_autograd(x, dout):
    return autograd(lambda x: x.softmax(-1), [x], dout)[0]


@right("softmax")
def softmax_by_jacobian(x, dout):
    e = np.exp(x - x.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    jacobian = y[..., :, None] * (np.eye(x.shape[-1], dtype=x.dtype) - y[..., None, :])
    return np.einsum("...ij,...i->...j", jacobian, dout)


@right("relu")
def relu_by_autograd(x, dout):
    return autograd(torch.relu, [x], dout)[0]


@right("relu")
def relu_by_assignment(x, dout):
    dx = dout.copy()
    dx[x <= 0] = 0
    return dx


@right("silu")
def silu_by_autograd(x, dout):
    return autograd(F.silu, [x], dout)[0]


@right("silu")
def silu_by_fractions(x, dout):
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-x))
    return dout * s * (1 + x * (1 - s))


# heads with a loss


@right("loss_head")
def loss_head_by_autograd(x, weight, bias, targets, dout):
    return autograd(lambda x, w, b: loss_of(x @ w + b, targets), [x, weight, bias], dout)


@right("loss_head")
def loss_head_by_hand(x, weight, bias, targets):
    logits = x @ weight + bias
    y = np.exp(logits - logits.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    rows = y.reshape(-1, y.shape[-1])
    rows[np.arange(len(rows)), targets.ravel()] -= 1
    rows /= len(rows)
    return (rows @ weight.T).reshape(x.shape), x.reshape(len(rows), -1).T @ rows, rows.sum(0)


@right("tied_head")
def tied_with_one_table(ids, weight, ln_weight, ln_bias, targets, dout):
    def forward(table, w, b):
        return loss_of(F.layer_norm(F.embedding(ids, table), table.shape[-1:], w, b) @ table.T, targets)

    return autograd(forward, [weight, ln_weight, ln_bias], dout)


@right("tied_head")
def tied_with_two_tables(ids, weight, ln_weight, ln_bias, targets, dout):
    return tied(ids, weight, ln_weight, ln_bias, targets, dout)


# DPO and a whole step


@right("dpo")
def dpo_by_autograd(chosen, rejected, ref_chosen, ref_rejected, dout):
    given = [torch.as_tensor(x) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    return dpo(*given, dout)


@right("dpo")
def dpo_by_hand(chosen, rejected, ref_chosen, ref_rejected):
    m = 0.1 * (chosen - rejected - ref_chosen + ref_rejected)
    w = 0.1 / len(m) / (1 + np.exp(m))
    return -w, w


@right("adamw_step")
def step_by_torch(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    return step_of(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step)


RIGHT["adamw_step"].append(step_by_hand)
