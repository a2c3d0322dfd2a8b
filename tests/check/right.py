"""Correct implementations, each in its own way: loops, einsum, autograd, chunks, other orders, float32 inside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from planted.attention import all_heads
from planted.dense import linear as linear_by_einsum
from planted.dense import lora as lora_by_einsum
from planted.dense import scatter
from planted.head import head
from planted.network import block, multi_head
from planted.norms import layer_norm as layer_norm_by_jacobian
from planted.norms import rms_norm as rms_norm_by_hand
from planted.registry import autograd

Function = Callable[..., Any]
RIGHT: dict[str, list[Function]] = {}


def right(layer: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        RIGHT.setdefault(layer, []).append(function)
        return function

    return register


def in_float32(function: Function) -> Function:
    """The same, computed in float32 and returned in the input dtype."""

    @functools.wraps(function)
    def single(*arguments: Any, **options: Any) -> Any:
        arguments = tuple(x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments)
        if not any(isinstance(x, torch.Tensor) for x in arguments):
            raise TypeError("tensors are needed")
        found = function(*arguments, **options)
        return tuple(g.double() for g in found) if isinstance(found, tuple) else found.double()

    single.__name__ = f"{function.__name__}_in_float32"
    return single


# attention


@right("attention")
def by_heads(q, k, v, dout, causal=True):
    return all_heads(q, k, v, dout, causal)


@right("attention")
def by_autograd(q, k, v, dout, causal=True):
    return autograd(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=causal), [q, k, v], dout)


@right("attention")
def with_queries_scaled_first(q, k, v, dout, causal=True):
    q = q * q.shape[-1] ** -0.5
    s = torch.einsum("bhid,bhjd->bhij", q, k)
    if causal:
        s = s + torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(1)
    p = s.softmax(-1)
    o = p @ v
    dp = torch.einsum("bhid,bhjd->bhij", dout, v)
    ds = p * (dp - (dout * o).sum(-1, keepdim=True))  # the row sums from the output, as in flash attention
    return (
        ds @ k * q.shape[-1] ** -0.5,
        torch.einsum("bhij,bhid->bhjd", ds, q),
        torch.einsum("bhij,bhid->bhjd", p, dout),
    )


@right("attention")
def in_chunks_of_queries(q, k, v, dout, causal=True):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    root = math.sqrt(q.shape[-1])
    for i in range(q.shape[-2]):
        last = i + 1 if causal else k.shape[-2]
        s = np.einsum("bhd,bhjd->bhj", q[..., i, :], k[..., :last, :]) / root
        lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)) + s.max(-1, keepdims=True)
        p = np.exp(s - lse)
        dp = np.einsum("bhd,bhjd->bhj", dout[..., i, :], v[..., :last, :])
        ds = p * dp - p * np.einsum("bhj,bhj->bh", p, dp)[..., None]
        dq[..., i, :] = np.einsum("bhj,bhjd->bhd", ds, k[..., :last, :]) / root
        dk[..., :last, :] += ds[..., None] * q[..., i, None, :] / root
        dv[..., :last, :] += p[..., None] * dout[..., i, None, :]
    return dq, dk, dv


@right("attention")
def with_a_large_number_as_mask(q, k, v, dout, causal=True):
    n = q.shape[-2]
    s = q @ k.mT / math.sqrt(q.shape[-1]) - 1e9 * causal * torch.ones(n, n, dtype=q.dtype).triu(1)
    p = s.softmax(-1)
    dp = dout @ v.mT
    ds = p * dp - p * (p * dp).sum(-1, keepdim=True)
    return [ds @ k / math.sqrt(q.shape[-1]), ds.mT @ q / math.sqrt(q.shape[-1]), p.mT @ dout]


RIGHT["attention"].append(in_float32(by_autograd))


# multi-head attention and the block


@right("multi_head")
def heads_by_hand(query, key, value, w_q, w_k, w_v, dout, causal=True):
    return multi_head(query, key, value, w_q, w_k, w_v, dout, causal)


@right("multi_head")
def heads_by_autograd(query, key, value, w_q, w_k, w_v, dout, causal=True, n_head=2):
    def forward(*arguments):
        q, k, v = (
            (x @ w).unflatten(-1, (n_head, -1)).transpose(1, 2)
            for x, w in zip(arguments[:3], arguments[3:], strict=True)
        )
        s = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return autograd(forward, [query, key, value, w_q, w_k, w_v], dout)


@right("head")
def head_by_autograd(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, causal=True, rotary=False):
    return head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, causal, rotary)


@right("head")
def head_with_a_dead_bias(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    """With the exact gradient of b_k: 0."""
    *before, _, dw_v, db_v = head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout)
    return *before, torch.zeros_like(b_k), dw_v, db_v


@right("head_dropout")
def dropout_by_autograd(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    return head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, keep=keep)


@right("block")
def block_by_autograd(x, *arguments):
    return block(x, *arguments)


RIGHT["block"].append(in_float32(block_by_autograd))


# norms


@right("layer_norm")
def norm_by_jacobian(x, weight, bias, dout):
    return layer_norm_by_jacobian(x, weight, bias, dout)


@right("layer_norm")
def norm_by_autograd(x, weight, bias, dout, eps=1e-5):
    return autograd(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), [x, weight, bias], dout)


@right("layer_norm")
def norm_by_mean_of_squares(x, weight, bias, dout):
    d = x.shape[-1]
    mean = x.sum(-1, keepdims=True) / d
    variance = (x * x).sum(-1, keepdims=True) / d - mean * mean
    sigma = (np.maximum(variance, 0) + x.dtype.type(1e-5)) ** x.dtype.type(0.5)
    z, g = (x - mean) / sigma, dout * weight
    dx = (d * g - g.sum(-1, keepdims=True) - z * (g * z).sum(-1, keepdims=True)) / (d * sigma)
    return dx, np.einsum("btc,btc->c", dout, z), dout.sum(0).sum(0)


@right("layer_norm")
def norm_step_by_step(x, weight, bias, dout):
    d = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    rstd = (variance + 1e-5).rsqrt()
    dz = dout * weight
    dvariance = (dz * centred).sum(-1, keepdim=True) * -0.5 * rstd**3
    dmean = -(dz * rstd).sum(-1, keepdim=True) + dvariance * -2 * centred.sum(-1, keepdim=True) / d
    dx = dz * rstd + dvariance * 2 * centred / d + dmean / d
    return dx, (dout * centred * rstd).flatten(0, 1).sum(0), dout.flatten(0, 1).sum(0)


RIGHT["layer_norm"].append(in_float32(norm_by_autograd))


@right("rms_norm")
def rms_by_hand(x, weight, dout):
    return rms_norm_by_hand(x, weight, dout)


@right("rms_norm")
def rms_by_autograd(x, weight, dout, eps=1e-6):
    return autograd(lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps), [x, weight], dout)


@right("rms_norm")
def rms_by_cube(x, weight, dout):
    r = (np.mean(x**2, axis=-1, keepdims=True) + x.dtype.type(1e-6)) ** x.dtype.type(-0.5)
    g = dout * weight
    dx = r * g - x * r**3 * np.sum(x * g, axis=-1, keepdims=True) / x.shape[-1]
    return dx, np.einsum("btc,btc->c", dout, x * r)


# linear layers and tables


@right("linear")
def by_einsum(x, weight, bias, dout):
    return linear_by_einsum(x, weight, dout)


@right("linear")
def linear_by_autograd(x, weight, bias, dout):
    return autograd(lambda x, w, b: F.linear(x, w.T, b), [x, weight, bias], dout)


@right("linear")
def token_by_token(x, weight, bias, dout):
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            dx[b, t] = weight @ dout[b, t]
            dweight += np.outer(x[b, t], dout[b, t])
            dbias += dout[b, t]
    return [dx, dweight, dbias]


RIGHT["linear"].append(in_float32(linear_by_autograd))


@right("lora")
def adapters_by_einsum(x, weight, down, up, alpha, dout):
    return lora_by_einsum(x, weight, down, up, alpha, dout)


@right("lora")
def adapters_by_autograd(x, weight, down, up, alpha, dout):
    return autograd(lambda x, d, u: x @ weight + alpha / d.shape[1] * (x @ d) @ u, [x, down, up], dout)


@right("lora")
def adapters_merged(x, weight, down, up, alpha, dout):
    scale = alpha / down.shape[1]
    inner = np.tensordot(x, dout, axes=([0, 1], [0, 1]))  # xᵗ dout, (in, out)
    return dout @ (weight + scale * down @ up).T, scale * inner @ up.T, scale * down.T @ inner


@right("embedding")
def rows_by_loop(ids, weight, dout):
    return scatter(ids, dout, len(weight)).astype(dout.dtype)


@right("embedding")
def rows_by_one_hot(ids, weight, dout):
    return F.one_hot(ids.flatten(), len(weight)).to(dout.dtype).T @ dout.flatten(0, 1)


@right("embedding")
def rows_by_autograd(ids, weight, dout):
    return autograd(lambda w: F.embedding(ids, w), [weight], dout)[0]


@right("embedding")
def rows_by_sorting(ids, weight, dout):
    order = np.argsort(ids, axis=None)
    found, starts = np.unique(ids.ravel()[order], return_index=True)
    dweight = np.zeros_like(weight)
    dweight[found] = np.add.reduceat(dout.reshape(-1, weight.shape[1])[order], starts, axis=0)
    return (dweight,)


@right("tied_embedding")
def both_by_autograd(ids, weight, dout):
    return autograd(lambda w: F.embedding(ids, w) @ w.T, [weight], dout)[0]


@right("tied_embedding")
def both_by_hand(ids, weight, dout):
    return scatter(ids, dout @ weight, len(weight)) + np.tensordot(dout, weight[ids], axes=([0, 1], [0, 1]))


# losses


@right("softmax_cross_entropy")
def loss_by_autograd(logits, targets, dout):
    return autograd(lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten()), [logits], dout)[0]


@right("softmax_cross_entropy")
def loss_without_upstream(logits, targets):
    y = np.exp(logits - logits.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    np.put_along_axis(y, targets[..., None], np.take_along_axis(y, targets[..., None], -1) - 1, -1)
    return y / targets.size


@right("softmax_cross_entropy")
def loss_by_log_softmax(logits, targets, dout):
    keep = targets != -100
    y = logits.log_softmax(-1).exp() - F.one_hot(targets.clamp(min=0), logits.shape[-1])
    return y * keep[..., None] * (dout / keep.sum())


@right("next_token_loss")
def next_by_autograd(logits, ids, dout):
    return autograd(lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), [logits], dout)[0]


@right("next_token_loss")
def next_by_hand(logits, ids):
    out = np.zeros_like(logits)
    for b in range(len(ids)):
        for t in range(ids.shape[1] - 1):
            e = np.exp(logits[b, t] - logits[b, t].max())
            out[b, t] = e / e.sum()
            out[b, t, ids[b, t + 1]] -= 1
    return out / (len(ids) * (ids.shape[1] - 1))


# pointwise


@right("gelu")
def gelu_by_autograd(x, dout):
    return autograd(lambda x: F.gelu(x, approximate="tanh"), [x], dout)[0]


@right("gelu")
def gelu_by_sigmoid(x, dout):
    """(1 + tanh u)/2 = σ(2u)."""
    two_u = math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    s = torch.sigmoid(two_u)
    return dout * (s + x * s * (1 - s) * math.sqrt(8 / math.pi) * (1 + 0.134145 * x * x))


@right("swiglu")
def swiglu_by_autograd(gate, up, dout):
    return autograd(lambda g, u: F.silu(g) * u, [gate, up], dout)


@right("swiglu")
def swiglu_by_fractions(gate, up, dout):
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-gate))
    return dout * up * s * (1 + gate * (1 - s)), dout * gate * s


@right("rope")
def rope_by_autograd(x, positions, dout, theta=10000.0):
    half = x.shape[-1] // 2
    angle = torch.outer(positions.double(), theta ** (-torch.arange(half).double() / half))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    return autograd(lambda x: x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin, [x], dout)[0]


@right("rope")
def rope_with_float32_angles(x, positions, dout):
    half = x.shape[-1] // 2
    angle = torch.outer(positions.float(), 1.0 / 10000.0 ** (torch.arange(half).float() / half)).to(x.dtype)
    first, second = dout.chunk(2, -1)
    return torch.cat([first * angle.cos() + second * angle.sin(), second * angle.cos() - first * angle.sin()], -1)


@right("adamw")
def adamw_by_torch(param, grad, m, v, step):
    p = torch.nn.Parameter(param.clone())
    p.grad = grad
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.state[p] = {"step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    state = optimizer.state[p]
    return p.detach(), state["exp_avg"], state["exp_avg_sq"]


@right("adamw")
def adamw_by_hand(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad**2 - v)
    rate = lr / (1 - beta1**step)
    return param - lr * weight_decay * param - rate * m / (np.sqrt(v / (1 - beta2**step)) + eps), m, v


import right_of_parts  # noqa: E402, F401  (the layers made of several parts, in the same table)
