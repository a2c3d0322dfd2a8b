"""NumPy code in the forms in which people hold it, right and wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

# Names and orders of arguments


def linear_dout_first(dout, x, weight, bias):
    return dout @ weight.T, np.tensordot(x, dout, ([0, 1], [0, 1])), dout.sum((0, 1))


def linear_dout_first_wrong(dout, x, weight, bias):
    return dout @ weight.T, np.tensordot(x, dout, ([0, 1], [0, 1])), dout.mean((0, 1))


def linear_no_bias(grad_output, inp, W):  # noqa: N803
    return grad_output @ W.T, np.tensordot(inp, grad_output, ([0, 1], [0, 1])), grad_output.sum((0, 1))


def linear_no_bias_wrong(grad_output, inp, W):  # noqa: N803
    return -(grad_output @ W.T), np.tensordot(inp, grad_output, ([0, 1], [0, 1])), grad_output.sum((0, 1))


def linear_meaningless(a, b, c, d):
    return d @ b.T, np.tensordot(a, d, ([0, 1], [0, 1])), d.sum((0, 1))


def linear_other_order(x, weight, bias, dout):
    return np.tensordot(x, dout, ([0, 1], [0, 1])), dout.sum((0, 1)), dout @ weight.T


def linear_other_order_wrong(x, weight, bias, dout):
    return np.tensordot(x, dout, ([0, 1], [0, 1])), dout.mean((0, 1)), dout @ weight.T


def linear_dict(x, weight, bias, dout):
    dx, dw, db = linear_dout_first(dout, x, weight, bias)
    return {"grad_W": dw, "dB": db, "d_x": dx}


def linear_dict_wrong(x, weight, bias, dout):
    dx, dw, db = linear_dout_first(dout, x, weight, bias)
    return {"grad_W": 2 * dw, "dB": db, "d_x": dx}


class Grads(NamedTuple):
    dw: np.ndarray
    db: np.ndarray
    dx: np.ndarray


def linear_named_tuple(dY, W, b, X):  # noqa: N803
    return Grads(np.tensordot(X, dY, ([0, 1], [0, 1])), dY.sum((0, 1)), dY @ W.T)


def linear_named_tuple_wrong(dY, W, b, X):  # noqa: N803
    return Grads(np.tensordot(X, dY, ([0, 1], [0, 1])), dY.mean((0, 1)), dY @ W.T)


def linear_dx_and_dict(x, w, b, dy):
    return dy @ w.T, {"w": np.tensordot(x, dy, ([0, 1], [0, 1])), "b": dy.sum((0, 1))}


def linear_namespace(x, w, b, dy):
    return SimpleNamespace(dx=dy @ w.T, dw=np.tensordot(x, dy, ([0, 1], [0, 1])), db=dy.sum((0, 1)))


# A pair


def norm_forward(x, gamma, beta, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
    normed = (x - mean) * rstd
    return normed * gamma + beta, (normed, rstd, gamma)


def norm_backward(dy, saved):
    normed, rstd, gamma = saved
    g = dy * gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True))
    axes = tuple(range(dy.ndim - 1))
    return dx, (dy * normed).sum(axes), dy.sum(axes)


def bad_norm_forward(x, gamma, beta, eps=1e-5):
    return norm_forward(x, gamma, beta, eps)


def bad_norm_backward(dy, saved):
    normed, rstd, gamma = saved
    g = dy * gamma
    axes = tuple(range(dy.ndim - 1))
    return rstd * (g - normed * (g * normed).mean(-1, keepdims=True)), (dy * normed).sum(axes), dy.sum(axes)


norm_pair = (norm_forward, norm_backward)
bad_norm_pair = (norm_forward, bad_norm_backward)


def norm_with_vjp(x, weight, bias):
    y, saved = norm_forward(x, weight, bias)
    return y, lambda dy: norm_backward(dy, saved)


def bad_norm_with_vjp(x, weight, bias):
    y, saved = norm_forward(x, weight, bias)
    return y, lambda dy: bad_norm_backward(dy, saved)


def flash_forward(q, k, v, causal=True):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    return np.exp(scores - lse) @ v, lse


def flash_backward(do, q, k, v, o, lse, causal=True):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    p = np.exp(scores - lse)
    ds = p * (do @ np.swapaxes(v, -1, -2) - (do * o).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ do


flash = (flash_forward, flash_backward)
bad_flash = (flash_forward, lambda do, q, k, v, o, lse: flash_backward(do, q, k, v, 0 * o, lse))


# Classes


class LinearWithWeights:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        self.x = x
        return x @ self.weight + self.bias

    def backward(self, dout):
        self.dweight = np.tensordot(self.x, dout, ([0, 1], [0, 1]))
        self.dbias = dout.sum((0, 1))
        return dout @ self.weight.T


class LinearWithWeightsWrong(LinearWithWeights):
    def backward(self, dout):
        dx = super().backward(dout)
        self.dbias = dout.mean((0, 1))
        return dx


class LinearWithSizes:
    def __init__(self, n_in, n_out):
        rng = np.random.default_rng(0)
        self.params = {"W": rng.standard_normal((n_in, n_out)), "b": np.zeros(n_out)}
        self.grads = {}

    def __call__(self, inputs):
        self.inputs = inputs
        return inputs @ self.params["W"] + self.params["b"]

    def backward(self, grad):
        self.grads["W"] = np.tensordot(self.inputs, grad, ([0, 1], [0, 1]))
        self.grads["b"] = grad.sum((0, 1))
        return grad @ self.params["W"].T


class LinearWithSizesWrong(LinearWithSizes):
    def backward(self, grad):
        super().backward(grad)
        return grad @ self.params["W"].T * 2


class LinearOfTheBook:
    """Parameters and gradients in lists side by side."""

    def __init__(self, W, b):  # noqa: N803
        self.params = [W, b]
        self.grads = [np.zeros_like(W), np.zeros_like(b)]
        self.x = None

    def forward(self, x):
        W, b = self.params  # noqa: N806
        self.x = x
        return x @ W + b

    def backward(self, dout):
        W, _b = self.params  # noqa: N806
        self.grads[0][...] = np.tensordot(self.x, dout, ([0, 1], [0, 1]))
        self.grads[1][...] = dout.sum((0, 1))
        return dout @ W.T


class LinearOfTheBookWrong(LinearOfTheBook):
    def backward(self, dout):
        dx = super().backward(dout)
        self.grads[1][...] = dout.mean((0, 1))
        return dx


class Parameter:
    def __init__(self, data):
        self.data, self.grad = data, np.zeros_like(data)


class NormWithParameters:
    def __init__(self, dim, eps=1e-5):
        self.gamma, self.beta, self.eps = Parameter(np.ones(dim)), Parameter(np.zeros(dim)), eps

    def forward(self, x):
        y, self.cache = norm_forward(x, self.gamma.data, self.beta.data, self.eps)
        return y

    def backward(self, grad_output):
        dx, self.gamma.grad, self.beta.grad = norm_backward(grad_output, self.cache)
        return dx


class NormWithParametersWrong(NormWithParameters):
    def backward(self, grad_output):
        dx, self.gamma.grad, self.beta.grad = bad_norm_backward(grad_output, self.cache)
        return dx


class StaticLinear:
    """In the style of autograd.Function, without PyTorch."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx, grad_output):
        x, w = ctx.saved_tensors
        return grad_output @ w.T, np.tensordot(x, grad_output, ([0, 1], [0, 1])), grad_output.sum((0, 1))


class StaticLinearWrong(StaticLinear):
    @staticmethod
    def backward(ctx, grad_output):
        x, w = ctx.saved_tensors
        return grad_output @ w.T, np.tensordot(x, grad_output, ([0, 1], [0, 1])), grad_output.mean((0, 1))


instance = LinearWithSizes(4, 3)
wrong_instance = LinearWithSizesWrong(4, 3)


# Layouts


def attention_bthd(q, k, v, dout, causal=True, factor=1.0):
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1]) * factor
    return (
        np.einsum("bhij,bjhd->bihd", ds, k),
        np.einsum("bhij,bihd->bjhd", ds, q),
        np.einsum("bhij,bihd->bjhd", p, dout),
    )


def attention_bthd_wrong(q, k, v, dout, causal=True):
    return attention_bthd(q, k, v, dout, causal, np.sqrt(q.shape[-1]))


def attention_bthd_without_mask(q, k, v, dout):
    return attention_bthd(q, k, v, dout, False)


def attention_sequence(q, k, v, dout):
    _heads, _tokens, _d = q.shape
    return tuple(g[0].swapaxes(0, 1) for g in attention_bthd(*(x.swapaxes(0, 1)[None] for x in (q, k, v, dout))))


def attention_sequence_wrong(q, k, v, dout):
    _heads, _tokens, _d = q.shape
    return tuple(g[0].swapaxes(0, 1) for g in attention_bthd_wrong(*(x.swapaxes(0, 1)[None] for x in (q, k, v, dout))))


def attention_single_head(q, k, v, dout):
    _tokens, _d = q.shape
    return tuple(g[0, :, 0] for g in attention_bthd(*(x[None, :, None] for x in (q, k, v, dout))))


def attention_single_head_wrong(q, k, v, dout):
    _tokens, _d = q.shape
    return tuple(g[0, :, 0] for g in attention_bthd_wrong(*(x[None, :, None] for x in (q, k, v, dout))))


def norm_rows(x, weight, bias, dout):
    _n, _d = x.shape
    return norm_backward(dout, norm_forward(x, weight, bias)[1])


def norm_rows_wrong(x, weight, bias, dout):
    _n, _d = x.shape
    return bad_norm_backward(dout, norm_forward(x, weight, bias)[1])


def affine_backward(dout, x, w):
    """In rows, with x.T, which reverses all axes of anything else."""
    return dout @ w.T, x.T @ dout, dout.sum(axis=0)


def affine_backward_wrong(dout, x, w):
    return dout @ w.T, x.T @ dout, dout.mean(axis=0)


def linear_out_in(x, weight, bias, dout):
    return dout @ weight, np.einsum("bti,bto->oi", x, dout), dout.sum((0, 1))


def linear_out_in_wrong(x, weight, bias, dout):
    return dout @ weight, np.einsum("bti,bto->oi", x, dout), dout.mean((0, 1))


def loss_rows(logits, targets):
    n, _v = logits.shape
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(n), targets] -= 1
    return p / n


def loss_rows_wrong(logits, targets):
    n, _v = logits.shape
    return loss_rows(logits, targets) * n


# What must not pass


def bias_summed_over_the_batch_only(x, weight, bias, dout):
    """Right on rows, which is not what it was called with."""
    rows = x.reshape(-1, x.shape[-1])
    return dout @ weight.T, rows.T @ dout.reshape(-1, dout.shape[-1]), dout.sum(axis=0)


def norm_over_the_wrong_axis(x, weight, bias, dout):
    """Means over axis 1: right on rows only."""
    mean = x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    normed = (x - mean) * rstd
    g = dout * weight
    dx = rstd * (g - g.mean(1, keepdims=True) - normed * (g * normed).mean(1, keepdims=True))
    return dx, (dout * normed).reshape(-1, x.shape[-1]).sum(0), dout.reshape(-1, x.shape[-1]).sum(0)


def swapped(q, k, v, dout):
    """dk and dq in each other's place; both have the same shape."""
    dq, dk, dv = (np.swapaxes(g, 1, 2) for g in attention_bthd(*(np.swapaxes(x, 1, 2) for x in (q, k, v, dout))))
    return dk, dq, dv


# What cannot be checked


def forward_only(x, weight, bias):
    return x @ weight + bias


class Nothing:
    def forward(self, x):
        return x


class NeedsMore:
    def __init__(self, weight, bias, schedule):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        return x @ self.weight + self.bias

    def backward(self, dout):
        return dout @ self.weight.T


class Silent:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        return x @ self.weight + self.bias

    def backward(self, dout):
        return None


def lonely_backward(dy, cache):
    return dy


def other_sizes(x, weight, bias, dout):
    raise ValueError("width must be 64")


class Crash(LinearWithWeights):
    def backward(self, dout):
        import ctypes

        return ctypes.string_at(0)


class Hang(LinearWithWeights):
    def backward(self, dout):
        while True:
            pass


class Exit(LinearWithWeights):
    def backward(self, dout):
        import os

        os._exit(0)


class Loud(LinearWithWeights):
    def backward(self, dout):
        print("a line of its own")
        return super().backward(dout)


class Raises(LinearWithWeights):
    def backward(self, dout):
        raise RuntimeError("not today")


def head_without_biases(a, w_q, w_k, w_v, dout, scale=True):
    q, k, v = a @ w_q, a @ w_k, a @ w_v
    root = np.sqrt(q.shape[-1])
    s = np.where(np.tri(a.shape[1]) > 0, q @ k.swapaxes(1, 2) / root, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / (root if scale else 1)
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout
    dw_q, dw_k, dw_v = (np.einsum("bti,bto->io", a, g) for g in (dq, dk, dv))
    return {"da": dq @ w_q.T + dk @ w_k.T + dv @ w_v.T, "dw_q": dw_q, "dw_k": dw_k, "dw_v": dw_v}


def head_without_biases_wrong(a, w_q, w_k, w_v, dout):
    return head_without_biases(a, w_q, w_k, w_v, dout, scale=False)


def head_that_ignores_its_biases(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    return head_without_biases(a, w_q, w_k, w_v, dout)
