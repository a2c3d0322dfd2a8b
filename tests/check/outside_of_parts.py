"""Mistakes that are not in the catalogue, of the layers that are made of several parts."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from outside import outside
from planted.losses_of_heads import dpo, loss_head, step_of, tied
from planted.network import block as pre_norm
from planted.network import merge, split
from planted.post_norm import block as post_norm
from planted.projections import cross, packed, separate
from planted.registry import autograd
from planted.variants import dropout, grouped, rope, weights


@outside("attention_dropout", "another pattern in the backward pass")
def drawn_again(q, k, v, keep, dout):
    return dropout(q, k, v, 0.3 + 0.7 * keep.roll(1, -1), dout)


@outside("rope_attention", "attention that fades with the distance")
def fading(q, k, v, positions, dout):
    dq, dk, dv = rope(q, k, v, positions, dout)
    return dq * torch.exp(-0.01 * positions.to(q.dtype))[:, None] + 0.01 * dq.abs(), dk, dv


@outside("grouped_query_attention", "groups weighted by their order")
def weighted_groups(q, k, v, dout):
    order = torch.linspace(0.5, 1.5, q.shape[1], dtype=torch.float64)[:, None, None]
    return grouped(*(torch.as_tensor(x) for x in (q, k, v)), torch.as_tensor(dout) * order.to(q.dtype))


@outside("self_attention", "a gate behind the heads")
def gated(x, w_qkv, b_qkv, w_o, b_o, dout):
    def forward(x, w_qkv, b_qkv, w_o, b_o):
        q, k, v = (split(z) for z in (x @ w_qkv + b_qkv).chunk(3, -1))
        return (torch.sigmoid(x) * merge(weights(q, k, True) @ v)) @ w_o + b_o

    return autograd(forward, [x, w_qkv, b_qkv, w_o, b_o], dout)


@outside("self_attention", "one gradient bent")
def bent(x, w_qkv, b_qkv, w_o, b_o, dout):
    dx, *rest = packed(x, w_qkv, b_qkv, w_o, b_o, dout)
    return torch.tanh(dx) + 0.01 * dx**2, *rest


@outside("self_attention_separate", "one gradient bent")
def bent_bias(x, *rest):
    *before, db_o = separate(x, *rest)
    return *before, torch.tanh(db_o) + 0.01 * db_o**2


@outside("cross_attention", "one gradient bent")
def bent_key(query, *rest):
    dquery, dkey, *others = cross(query, *rest)
    return dquery, torch.tanh(dkey) + 0.01 * dkey**2, *others


@outside("relu_block", "one gradient shifted")
def shifted(x, *arguments):
    dx, *rest = pre_norm(x, *arguments, activation=torch.relu)
    return dx.roll(1, 1) + 0.1 * dx, *rest


@outside("post_norm_block", "one gradient shifted")
def shifted_too(x, *arguments):
    dx, *rest = post_norm(x, *arguments)
    return dx.roll(1, 1) + 0.1 * dx, *rest


@outside("softmax", "softmax with an extra 1 below")
def softmax_one(x, dout):
    return autograd(lambda x: x.softmax(-1) * torch.sigmoid(x.logsumexp(-1, True)), [x], dout)[0]


@outside("relu", "a bend in place of the kink")
def smooth(x, dout):
    return autograd(F.softplus, [x], dout)[0]


@outside("silu", "mish")
def mish(x, dout):
    return autograd(F.mish, [x], dout)[0]


@outside("loss_head", "a penalty on large logits")
def z_loss(x, weight, bias, targets, dout):
    dx, dweight, dbias = loss_head(x, weight, bias, targets, dout)

    def penalty(x, w, b):
        return 0.01 * (x @ w + b).logsumexp(-1).square().mean()

    more = autograd(penalty, [x, weight, bias], dout)
    return dx + more[0], dweight + more[1], dbias + more[2]


@outside("tied_head", "logits that are capped")
def capped(ids, weight, ln_weight, ln_bias, targets, dout):
    def features(normed, embedded):
        return 3 * torch.tanh(normed / 3)

    return tied(ids, weight, ln_weight, ln_bias, targets, dout, features=features)


@outside("dpo", "IPO's squared loss")
def ipo(chosen, rejected, ref_chosen, ref_rejected, dout):
    given = [torch.as_tensor(x) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    return dpo(*given, dout, loss=lambda c, r, a, b: (a - b - 1 / 0.2).square())


@outside("adamw_step", "gradients clipped softly")
def softly(weight, bias, x, dout, *state):
    def clip(w, b):
        norm = math.sqrt(float(w.grad.square().sum() + b.grad.square().sum()))
        factor = float(np.tanh(norm) / norm)
        w.grad, b.grad = w.grad * factor, b.grad * factor

    return step_of(weight, bias, x, dout, *state, clip=clip)
