"""A learner's engine: every pair of a GPT-2 in plain NumPy, without the optional arguments.

The formulas are those of onfoot.ops, in the same order of operations, so that training with them gives the same bits.
"""

import math

import numpy as np


def linear_forward(x, weight, bias=None):
    y = (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])
    if bias is not None:
        y += bias
    return y, (x, weight, bias is not None)


def linear_backward(dy, saved):
    x, weight, has_bias = saved
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx = (drows @ weight.T).reshape(x.shape)
    dweight = rows.T @ drows
    dbias = drows.sum(axis=0) if has_bias else None
    return dx, dweight, dbias


C, CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu_tanh_forward(x):
    return 0.5 * x * (1 + np.tanh(C * (x + CUBIC * (x * x * x)))), x


def gelu_tanh_backward(dy, saved):
    x = saved
    x2 = x * x
    tanh = np.tanh(C * (x + CUBIC * (x2 * x)))
    du = C * (1 + 3 * CUBIC * x2)
    return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * du)


def cross_entropy_forward(logits, targets, divisor):
    flat, target = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    counts = target != -100
    top = flat.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(flat - top).sum(axis=-1)) + top[..., 0]
    picked = flat[np.arange(len(flat)), np.where(counts, target, 0)]
    return ((lse - picked) * counts).sum() / divisor, (logits, lse, target, divisor)


def cross_entropy_backward(dloss, saved):
    logits, lse, target, divisor = saved
    flat = logits.reshape(-1, logits.shape[-1])
    counts = target != -100
    dlogits = np.exp(flat - lse[:, None])
    dlogits[np.arange(len(flat)), np.where(counts, target, 0)] -= 1
    return np.where(counts[:, None], dlogits * (dloss / divisor), 0).reshape(logits.shape)


def embedding_forward(ids, weight):
    return weight[ids], (ids, weight.shape)


def embedding_backward(dy, saved):
    ids, shape = saved
    dweight = np.zeros(shape, dy.dtype)
    np.add.at(dweight, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
    return dweight


def layer_norm_forward(x, weight, bias, eps=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    normed = centred * rstd
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    normed, rstd, weight = saved
    dnormed = dy * weight
    mean = dnormed.mean(axis=-1, keepdims=True)
    along = (normed * dnormed).mean(axis=-1, keepdims=True)
    dx = (dnormed - mean - normed * along) * rstd
    dweight = (normed * dy).reshape(-1, dy.shape[-1]).sum(axis=0)
    dbias = dy.reshape(-1, dy.shape[-1]).sum(axis=0)
    return dx, dweight, dbias


def attention_forward(q, k, v):
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    n_q, n_k = scores.shape[-2:]
    seen = np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k - n_q)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rho = weights / weights.sum(axis=-1, keepdims=True)
    return rho @ v, (q, k, v, rho)


def attention_backward(dy, saved):
    q, k, v, rho = saved
    drho = dy @ np.swapaxes(v, -1, -2)
    dv = np.swapaxes(rho, -1, -2) @ dy
    dscores = (drho - (drho * rho).sum(axis=-1, keepdims=True)) * rho / math.sqrt(q.shape[-1])
    return dscores @ k, np.swapaxes(dscores, -1, -2) @ q, dv
