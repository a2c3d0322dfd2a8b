"""Right implementations by the hundred: every choice of an author is drawn at random, the gradients stay the same.

NumPy or PyTorch, float32 or float64 inside, the order of sums and products, where a scale stands, which of several
equal formulas is used, loops or none, features or keys taken in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]


def t(x: Any) -> Any:
    return x.swapaxes(-1, -2)


class Author:
    """An author of a backward pass, with random choices."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.habit = rng, int(rng.integers(2**31))
        self.xp: Any = self.one_of(np, torch)
        self.inside = self.one_of(None, None, None, "float32", "float64")
        self.dot = self.one_of(lambda a, b: a @ b, self._by_einsum, self._in_two_parts)
        self.over_tokens = self.one_of(
            lambda x: x.sum(axis=(0, 1)),
            lambda x: x.reshape(-1, x.shape[-1]).sum(axis=0),
            lambda x: self.xp.einsum("btc->c", x),
            lambda x: sum(x[b, i] for b in range(x.shape[0]) for i in range(x.shape[1])),
        )

    def one_of(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def _by_einsum(self, a: Any, b: Any) -> Any:
        return self.xp.einsum("...ij,...jk->...ik", a, b)

    def _in_two_parts(self, a: Any, b: Any) -> Any:
        half = a.shape[-1] // 2
        return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]

    def array(self, x: Any) -> Any:
        """An argument in this author's kind of array."""
        if not hasattr(x, "shape"):
            return x
        x = np.asarray(x)
        if x.dtype.kind == "f" and self.inside:
            x = x.astype(self.inside)
        return x if self.xp is np else torch.from_numpy(x.copy())

    def order(self, n: int) -> tuple[Any, Any]:
        """A permutation, the same in every call, and its inverse."""
        there = np.random.default_rng([self.habit, n]).permutation(n)
        return there, np.argsort(there)


def softmax(author: Author) -> Function:
    xp = author.xp

    def plain(s):
        e = xp.exp(s - xp.amax(s, -1)[..., None])
        return e / e.sum(axis=-1, keepdims=True)

    def by_logarithm(s):
        top = xp.amax(s, -1)[..., None]
        return xp.exp(s - top - xp.log(xp.exp(s - top).sum(axis=-1, keepdims=True)))

    return author.one_of(plain, by_logarithm)


def attention_core(author: Author) -> Function:
    xp, dot, weights = author.xp, author.dot, softmax(author)
    on_q, on_k = author.one_of((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.25, 0.25), (0.25, 0.0))  # powers of d_k
    hide = author.one_of(-math.inf, -1e30)
    from_output, factored, shuffled = (author.one_of(True, False) for _ in range(3))

    def core(q, k, v, do, causal=True, keep=None):
        n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
        there, back = author.order(m) if shuffled else (np.arange(m), np.arange(m))
        k, v = k[..., there, :], v[..., there, :]
        s = dot(q / d**on_q, t(k / d**on_k)) / d ** (0.5 - on_q - on_k)
        if causal:
            s = xp.where(author.array(there[None, :] > np.arange(n)[:, None]), hide, s)
        rho, drho = weights(s), dot(do, t(v))
        drho, kept = (drho, rho) if keep is None else (drho * keep[..., there], rho * keep[..., there])
        dots = ((do * dot(kept, v)) if from_output else rho * drho).sum(axis=-1, keepdims=True)
        ds = rho * (drho - dots) if factored else rho * drho - rho * dots
        dk, dv = dot(t(ds), q) / math.sqrt(d), dot(t(kept), do)
        return dot(ds, k) / math.sqrt(d), dk[..., back, :], dv[..., back, :]

    return core


def attention(author: Author) -> Function:
    core = attention_core(author)

    def by_head(*arrays):
        found = [[core(*(x[b, h] for x in arrays)) for h in range(arrays[0].shape[1])] for b in range(len(arrays[0]))]
        return [author.xp.stack([author.xp.stack([one[g] for one in row]) for row in found]) for g in range(3)]

    return author.one_of(core, core, by_head)


def heads(x: Any, n: int = 2) -> Any:
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)


def merged(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def head(author: Author) -> Function:
    core, dense = attention_core(author), linear(author)

    def backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout, keep=None):
        pairs = ((w_q, b_q), (w_k, b_k), (w_v, b_v))
        grads = core(*(author.dot(a, w) + b for w, b in pairs), dout, keep=keep)
        found = [dense(a, w, b, d) for d, (w, b) in zip(grads, pairs, strict=True)]
        return (found[2][0] + found[0][0] + found[1][0], *(g for one in found for g in one[1:]))

    return backward


def head_dropout(author: Author) -> Function:
    one = head(author)
    return lambda *arguments: one(*arguments[:7], arguments[8], arguments[7])


def multi_head(author: Author) -> Function:
    core, dense = attention_core(author), linear(author)

    def backward(query, key, value, w_q, w_k, w_v, dout):
        inputs, weights = (query, key, value), (w_q, w_k, w_v)
        q, k, v = (heads(author.dot(x, w)) for x, w in zip(inputs, weights, strict=True))
        grads = [merged(d) for d in core(q, k, v, heads(dout))]
        found = [dense(x, w, None, d) for x, w, d in zip(inputs, weights, grads, strict=True)]
        return (*(f[0] for f in found), *(f[1] for f in found))

    return backward


def weight_gradient(author: Author) -> Function:
    xp, dot = author.xp, author.dot
    return author.one_of(
        lambda x, d: xp.einsum("bti,bto->io", x, d),
        lambda x, d: dot(x.reshape(-1, x.shape[-1]).T, d.reshape(-1, d.shape[-1])),
        lambda x, d: sum(dot(x[b].T, d[b]) for b in range(len(x))),
    )


def linear(author: Author) -> Function:
    dot, dweight = author.dot, weight_gradient(author)
    return lambda x, weight, bias, d: (dot(d, weight.T), dweight(x, d), author.over_tokens(d))


def norm_core(author: Author) -> Function:
    xp = author.xp
    form = author.one_of("means", "sums", "steps", "jacobian")
    root = author.one_of(lambda v: 1 / v**0.5, lambda v: v**-0.5, lambda v: 1 / xp.sqrt(v))

    def core(x, weight, g, eps, centre):
        """ā and dx, from g = dout ∘ weight."""
        d = x.shape[-1]
        mean = x.mean(axis=-1, keepdims=True) if centre else 0 * x[..., :1]
        c = x - mean
        r = root((c * c).mean(axis=-1, keepdims=True) + eps)
        z = c * r
        total = g.sum(axis=-1, keepdims=True) if centre else 0
        if form == "means":
            dx = (g - total / d - z * (g * z).mean(axis=-1, keepdims=True)) * r
        elif form == "sums":
            dx = (d * g - total - z * (g * z).sum(axis=-1, keepdims=True)) * (r / d)
        elif form == "steps":
            dvariance = -0.5 * (g * c).sum(axis=-1, keepdims=True) * r**3
            dx = g * r + 2 * dvariance * c / d - total * r / d
        else:
            jacobian = (
                author.array(np.eye(d, dtype=_dtype(x)))
                - z[..., :, None] * z[..., None, :] / d
                - (1 / d if centre else 0)
            )
            dx = xp.einsum("...jk,...j->...k", jacobian * r[..., None], g)
        return z, dx

    return core


def layer_norm(author: Author) -> Function:
    core = norm_core(author)

    def backward(x, weight, bias, dout):
        z, dx = core(x, weight, dout * weight, 1e-5, True)
        return dx, author.over_tokens(dout * z), author.over_tokens(dout)

    return backward


def rms_norm(author: Author) -> Function:
    core = norm_core(author)

    def backward(x, weight, dout):
        z, dx = core(x, weight, dout * weight, 1e-6, False)
        return dx, author.over_tokens(dout * z)

    return backward


def lora(author: Author) -> Function:
    dot = author.dot
    merge, scale_late = author.one_of(True, False), author.one_of(True, False)

    def flat(x):
        return x.reshape(-1, x.shape[-1])

    def backward(x, weight, down, up, alpha, dout):
        s = alpha / down.shape[1]
        dx = (
            dot(dout, (weight + s * dot(down, up)).T)
            if merge
            else dot(dout, weight.T) + dot(dot(dout, up.T), down.T) * s
        )
        if scale_late:
            return dx, s * dot(flat(x).T, flat(dot(dout, up.T))), s * dot(flat(dot(x, down)).T, flat(dout))
        inner = dot(flat(x).T, flat(dout)) * s
        return dx, dot(inner, up.T), dot(down.T, inner)

    return backward


def scatter(author: Author) -> Function:
    xp = author.xp

    def by_loop(ids, rows, n):
        out = [0 * rows[0, 0] for _ in range(n)]
        for b, i in np.ndindex(*ids.shape):
            out[int(ids[b, i])] = out[int(ids[b, i])] + rows[b, i]
        return xp.stack(out)

    def by_one_hot(ids, rows, n):
        hot = author.array(np.eye(n))[ids]
        return xp.einsum("btv,btc->vc", hot, rows.astype(hot.dtype) if xp is np else rows.to(hot.dtype))

    def backwards(ids, rows, n):
        return by_loop(xp.flip(ids, (0, 1)), xp.flip(rows, (0, 1)), n)

    return author.one_of(by_loop, by_one_hot, backwards)


def embedding(author: Author) -> Function:
    add = scatter(author)
    return lambda ids, weight, dout: add(ids, dout, len(weight))


def tied_embedding(author: Author) -> Function:
    add, dweight = scatter(author), weight_gradient(author)
    return lambda ids, w, dout: add(ids, author.dot(dout, w), len(w)) + dweight(dout, w[ids])


def softmax_cross_entropy(author: Author) -> Function:
    weights, divide_first = softmax(author), author.one_of(True, False)

    def backward(logits, targets, dout):
        n = targets.shape[0] * targets.shape[1]
        delta = weights(logits) - author.array(np.eye(logits.shape[-1]))[targets]
        return delta * (dout / n) if divide_first else dout * delta / n

    return backward


def next_token_loss(author: Author) -> Function:
    loss, pad = softmax_cross_entropy(author), author.one_of(True, False)

    def backward(logits, ids, dout):
        if pad:
            out = 0 * logits
            out[:, :-1] = loss(logits[:, :-1], ids[:, 1:], dout)
            return out
        return author.xp.concatenate([loss(logits[:, :-1], ids[:, 1:], dout), 0 * logits[:, -1:]], 1)

    return backward


def gelu(author: Author) -> Function:
    xp, c = author.xp, math.sqrt(2 / math.pi)

    def by_tanh(x, dout):
        u = c * (x + 0.044715 * x**3)
        slope = c * (1 + 3 * 0.044715 * x**2)
        return dout * (0.5 * (1 + xp.tanh(u)) + 0.5 * x * (1 - xp.tanh(u) ** 2) * slope)

    def by_exponential(x, dout):
        s = 1 / (1 + xp.exp(-2 * c * x * (1 + 0.044715 * x * x)))
        return dout * s + dout * x * s * (1 - s) * (2 * c + 6 * c * 0.044715 * x * x)

    return author.one_of(by_tanh, by_exponential)


def swiglu(author: Author) -> Function:
    xp = author.xp
    sigmoid = author.one_of(lambda x: 1 / (1 + xp.exp(-x)), lambda x: 0.5 + 0.5 * xp.tanh(0.5 * x))
    slope = author.one_of(
        lambda x, s: s + x * s * (1 - s), lambda x, s: s * (1 + x - x * s), lambda x, s: x * s + s * (1 - x * s)
    )
    return lambda gate, up, d: (d * up * slope(gate, sigmoid(gate)), d * (gate * sigmoid(gate)))


def rope(author: Author) -> Function:
    xp, by_pairs = author.xp, author.one_of(True, False)

    def backward(x, positions, dout):
        half = x.shape[-1] // 2
        angle = np.asarray(positions)[:, None] * np.exp(-np.log(10000.0) * np.arange(half) / half)
        cos, sin = author.array(np.cos(angle).astype(_dtype(x))), author.array(np.sin(angle).astype(_dtype(x)))
        first, second = dout[..., :half], dout[..., half:]
        if by_pairs:
            return xp.concatenate([first * cos + second * sin, second * cos - first * sin], -1)
        turned = xp.concatenate([second, -first], -1)
        return dout * xp.concatenate([cos, cos], -1) + turned * xp.concatenate([sin, sin], -1)

    return backward


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def block(author: Author) -> Function:
    core, norm, dense, slope, weights = (f(author) for f in (attention_core, layer_norm, linear, gelu, softmax))
    xp, dot = author.xp, author.dot

    def normed(x, weight, bias):
        c = x - x.mean(axis=-1, keepdims=True)
        return c / xp.sqrt((c * c).mean(axis=-1, keepdims=True) + 1e-5) * weight + bias

    def backward(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out, dout):
        width, n = x.shape[-1], x.shape[1]
        a = normed(x, g1, b1)
        parts = [slice(i * width, (i + 1) * width) for i in range(3)]
        q, k, v = (heads(dot(a, w_qkv[:, part]) + b_qkv[part]) for part in parts)
        hidden = author.array(np.triu(np.ones((n, n)), 1) > 0)
        mixed = merged(dot(weights(xp.where(hidden, -math.inf, dot(q, t(k)) / math.sqrt(q.shape[-1]))), v))
        h = x + dot(mixed, w_proj) + b_proj
        m = normed(h, g2, b2)
        z = dot(m, w_fc) + b_fc
        active = 0.5 * z * (1 + xp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        dactive, *dout_ = dense(active, w_out, b_out, dout)
        dm, *dfc = dense(m, w_fc, b_fc, slope(z, dactive))
        dh, *dnorm2 = norm(h, g2, b2, dm)
        dh = dh + dout
        dmixed, *dproj = dense(mixed, w_proj, b_proj, dh)
        dqkv = xp.concatenate([merged(d) for d in core(q, k, v, heads(dmixed))], -1)
        da, *dattn = dense(a, w_qkv, b_qkv, dqkv)
        dx, *dnorm1 = norm(x, g1, b1, da)
        return (dx + dh, *dnorm1, *dattn, *dproj, *dnorm2, *dfc, *dout_)

    return backward


def adamw(author: Author) -> Function:
    xp, running = (
        author.xp,
        author.one_of(lambda a, b, beta: beta * a + (1 - beta) * b, lambda a, b, beta: a + (1 - beta) * (b - a)),
    )
    decay_last = author.one_of(True, False)

    def update(param, grad, m, v, step):
        m, v = running(m, grad, 0.9), running(v, grad * grad, 0.95)
        move = 1e-2 * (m / (1 - 0.9**step)) / (xp.sqrt(v / (1 - 0.95**step)) + 1e-8)
        return (param - move - 1e-3 * param) if decay_last else param * (1 - 1e-2 * 0.1) - move, m, v

    return update


MAKERS: dict[str, Callable[[Author], Function]] = {
    f.__name__: f
    for f in (
        *(attention, head, head_dropout, multi_head, layer_norm, rms_norm, linear, lora, embedding, tied_embedding),
        *(softmax_cross_entropy, next_token_loss, gelu, swiglu, rope, block, adamw),
    )
}


from authors_of_parts import MAKERS_OF_PARTS  # noqa: E402  (it needs the classes above)

MAKERS.update(MAKERS_OF_PARTS)


def random_right(layer: str, rng: np.random.Generator) -> Function:
    """A random correct implementation of a layer."""
    author = Author(rng)
    function = MAKERS[layer](author)
    kind, wrap = author.one_of("numpy", "torch"), author.one_of(tuple, list)

    def backward(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            found = function(*(author.array(x) for x in arguments))
        grads = found if isinstance(found, (tuple, list)) else [found]
        arrays = [np.asarray(g) for g in grads]
        return wrap(torch.from_numpy(g.copy()) if kind == "torch" else g for g in arrays)

    backward.__name__ = f"{layer}, {author.xp.__name__}, {author.inside or 'as given'} inside"
    return backward
