"""Backward passes as many people would write them, right and wrong: the second half of the corpus."""

import math

import numpy as np
import torch
from case import Case


def full_attention_vjp(q, k, v, dout):
    r = np.sqrt(q.shape[-1])
    e = np.exp(q @ np.moveaxis(k, -1, -2) / r)
    p = e / e.sum(-1, keepdims=True)
    s = p * (dout @ np.moveaxis(v, -1, -2))
    s = s - p * s.sum(-1, keepdims=True)
    return s @ k / r, np.moveaxis(s, -1, -2) @ q / r, np.moveaxis(s, -1, -2) @ dout


def attention_backward(q, k, v, dout):
    d_k = q.shape[-1]
    t = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d_k)
    mask = np.tril(np.ones((t, t), dtype=bool))
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    ds = ds / np.sqrt(d_k)
    dq = ds @ k
    dk = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def bidirectional_backward(q, k, v, dout):
    transpose = lambda m: np.einsum("...ij->...ji", m)  # noqa: E731
    logits = q @ transpose(k) * q.shape[-1] ** -0.5
    attn = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    out = attn @ v
    d_attn = dout @ transpose(v)
    d_logits = attn * (d_attn - np.sum(dout * out, axis=-1, keepdims=True)) * q.shape[-1] ** -0.5
    return d_logits @ k, transpose(d_logits) @ q, transpose(attn) @ dout


def sdpa_vjp_v2(q, k, v, g):
    n, dim = q.shape[2], q.shape[3]
    scale = dim**-0.5
    a = np.einsum("bhid,bhjd->bhij", q, k) * scale
    a[..., np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -1e30
    a -= a.max(-1)[..., None]
    np.exp(a, out=a)
    a /= np.einsum("bhij->bhi", a)[..., None]
    gv = np.einsum("bhij,bhjd->bhid", a, g)
    ga = np.einsum("bhid,bhjd->bhij", g, v)
    gs = a * ga - a * np.einsum("bhij,bhij->bhi", a, ga)[..., None]
    gq = np.einsum("bhij,bhjd->bhid", gs, k) * scale
    gk = np.einsum("bhij,bhid->bhjd", gs, q) * scale
    return gq, gk, gv


def attention_chunked_rows(q, k, v, dout):
    scale = v.shape[-1] ** -0.5
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for i in range(q.shape[2]):
        keys, vals = k[:, :, : i + 1], v[:, :, : i + 1]
        s = np.einsum("bhd,bhjd->bhj", q[:, :, i], keys) * scale
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = np.einsum("bhd,bhjd->bhj", dout[:, :, i], vals)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        dv[:, :, : i + 1] += p[..., None] * dout[:, :, i, None]
        dq[:, :, i] = np.einsum("bhj,bhjd->bhd", ds, keys)
        dk[:, :, : i + 1] += ds[..., None] * q[:, :, i, None]
    return dq, dk, dv


def sdpa_vjp(q, k, v, g):
    n, dim = q.shape[2], q.shape[3]
    scale = dim**-0.5
    a = np.einsum("bhid,bhjd->bhij", q, k) * scale
    a[..., np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -1e30
    a -= a.max(-1)[..., None]
    np.exp(a, out=a)
    a /= np.einsum("bhij->bhi", a)[..., None]
    gv = np.einsum("bhij,bhid->bhjd", a, g)
    ga = np.einsum("bhid,bhjd->bhij", g, v)
    gs = a * ga - a * np.einsum("bhij,bhij->bhi", a, ga)[..., None]
    gq = np.einsum("bhij,bhjd->bhid", gs, k) * scale
    gk = np.einsum("bhij,bhid->bhjd", gs, q) * scale
    return gq, gk, gv


def attention_backward_v2(q, k, v, dout):
    d_k = q.shape[-1]
    t = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d_k)
    mask = np.tril(np.ones((t, t), dtype=bool))
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    dq = ds @ k
    dk = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def prescaled_attention_grad(q, k, v, dout):
    c = 1.0 / math.sqrt(q.shape[-1])
    qs = c * q
    causal = np.tri(q.shape[-2], dtype=bool)
    s = np.where(causal, qs @ k.swapaxes(2, 3), -np.inf)
    p = np.exp(s - s.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = p * dp - p * np.sum(p * dp, 3, keepdims=True)
    return c * ds @ k, c * ds.swapaxes(2, 3) @ qs, p.swapaxes(2, 3) @ dout


def attention_backward_v5(q, k, v, dout):
    d_k = q.shape[-1]
    t = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d_k)
    mask = np.tril(np.ones((t, t), dtype=bool))
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * dp
    dq = ds @ k
    dk = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def masked_attn_grads(q, k, v, dout):
    n, d = q.shape[-2:]
    i, j = np.ogrid[:n, :n]
    s = np.where(j <= i + 1, q @ k.swapaxes(-2, -1) / np.sqrt(d), -np.inf)
    s = s - s.max(-1, keepdims=True)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    g = p * (dout @ v.swapaxes(-2, -1))
    g = (g - p * g.sum(-1, keepdims=True)) / np.sqrt(d)
    return g @ k, g.swapaxes(-2, -1) @ q, p.swapaxes(-2, -1) @ dout


def attention_backward_v4(q, k, v, dout):
    d_k = q.shape[-1]
    t = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d_k)
    mask = np.tril(np.ones((t, t), dtype=bool))
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    ds = ds / np.sqrt(d_k)
    dq = ds @ k
    dk = ds @ q
    return dq, dk, dv


def sdpa_vjp_v3(q, k, v, g):
    n, dim = q.shape[2], q.shape[3]
    scale = dim**-0.5
    a = np.einsum("bhid,bhjd->bhij", q, k) * scale
    a[..., np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -1e30
    a -= a.max(-1)[..., None]
    np.exp(a, out=a)
    a /= np.einsum("bhij->bhi", a)[..., None]
    gv = np.einsum("bhij,bhid->bhjd", a, g)
    ga = np.einsum("bhid,bhjd->bhij", g, v)
    gs = a * ga - a * np.einsum("bhij,bhij->bhi", a, ga)[..., None]
    gs = gs / dim
    gq = np.einsum("bhij,bhjd->bhid", gs, k)
    gk = np.einsum("bhij,bhid->bhjd", gs, q)
    return gq, gk, gv


class ScaledDotProduct:
    def forward(self, q, k, v):
        self.q, self.k, self.v = q, k, v
        self.scale = 1 / np.sqrt(q.shape[-1])
        s = q @ k.transpose(0, 1, 3, 2) * self.scale
        s = s + np.triu(np.full(s.shape[-2:], -np.inf), 1)
        s = np.exp(s - s.max(-1, keepdims=True))
        self.p = s / s.sum(-1, keepdims=True)
        return self.p @ v

    def backward(self, dout):
        dp = dout @ self.v.transpose(0, 1, 3, 2)
        ds = self.p
        row = (dp * ds).sum(-1, keepdims=True)
        ds *= dp - row
        dq = self.scale * ds @ self.k
        dk = self.scale * ds.transpose(0, 1, 3, 2) @ self.q
        dv = self.p.transpose(0, 1, 3, 2) @ dout
        return dq, dk, dv


def scaled_dot_product_backward(q, k, v, dout):
    layer = ScaledDotProduct()
    layer.forward(q, k, v)
    return layer.backward(dout)


def attention_backward_v3(q, k, v, dout):
    d_k = q.shape[-1]
    t = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d_k)
    mask = np.tril(np.ones((t, t), dtype=bool))
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-2, keepdims=True))
    ds = ds / np.sqrt(d_k)
    dq = ds @ k
    dk = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def attention_bwd_prescaled(query, key, value, grad):
    query = query / np.sqrt(query.shape[-1])
    prob = np.exp(query @ key.swapaxes(-1, -2))
    prob /= prob.sum(-1, keepdims=True)
    dvalue = prob.swapaxes(-1, -2) @ grad
    dprob = grad @ value.swapaxes(-1, -2)
    dscore = prob * (dprob - np.einsum("...ij,...ij->...i", prob, dprob)[..., None])
    dquery = dscore @ key
    dkey = dscore.swapaxes(-1, -2) @ query
    return dquery, dkey, dvalue


def rotary_head_vjp(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    t, d_k = a.shape[1], w_q.shape[1]
    half = d_k // 2
    ang = np.arange(t)[:, None] * 10000.0 ** (-2 * np.arange(half) / d_k)
    cos, sin = np.cos(ang), np.sin(ang)

    def turn(z, sign):
        z1, z2 = z[..., :half], z[..., half:]
        return np.concatenate([z1 * cos - sign * z2 * sin, z2 * cos + sign * z1 * sin], -1)

    q, k, v = turn(a @ w_q + b_q, 1), turn(a @ w_k + b_k, 1), a @ w_v + b_v
    s = np.einsum("bid,bjd->bij", q, k) / np.sqrt(d_k) + np.triu(np.full((t, t), -np.inf), 1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bij,bid->bjd", p, dout)
    dp = np.einsum("bid,bjd->bij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d_k)
    dq_rot = np.einsum("bij,bjd->bid", ds, k)
    dq = turn(dq_rot, -1)
    dk = turn(np.einsum("bij,bid->bjd", ds, q), -1)
    da = dq_rot @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dws = [np.einsum("bti,bto->io", a, g) for g in (dq, dk, dv)]
    dbs = [g.sum((0, 1)) for g in (dq, dk, dv)]
    return da, dws[0], dbs[0], dws[1], dbs[1], dws[2], dbs[2]


def fused_qkv_head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n = w_q.shape[1]
    w = np.concatenate([w_q, w_k, w_v], axis=1)
    qkv = a @ w + np.concatenate([b_q, b_k, b_v])
    q, k, v = qkv[..., :n], qkv[..., n : 2 * n], qkv[..., 2 * n :]
    att = q @ k.swapaxes(-1, -2) * n**-0.5
    att += np.triu(np.full(att.shape[-2:], -1e12), k=1)
    att = np.exp(att - att.max(-1, keepdims=True))
    att /= att.sum(-1, keepdims=True)
    datt = dout @ v.swapaxes(-1, -2)
    datt = att * (datt - (att * datt).sum(-1, keepdims=True)) * n**-0.5
    dqkv = np.concatenate([datt @ k, datt.swapaxes(-1, -2) @ q, att.swapaxes(-1, -2) @ dout], axis=-1)
    w_back = np.concatenate([w_k, w_k, w_v], axis=1)
    dw = a.reshape(-1, a.shape[-1]).T @ dqkv.reshape(-1, dqkv.shape[-1])
    db = dqkv.reshape(-1, dqkv.shape[-1]).sum(0)
    return dqkv @ w_back.T, dw[:, :n], db[:n], dw[:, n : 2 * n], db[n : 2 * n], dw[:, 2 * n :], db[2 * n :]


def _rotate_half_v2(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_head_backward_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    a, w_q, b_q, w_k, b_k, w_v, b_v, dout = (torch.as_tensor(x) for x in (a, w_q, b_q, w_k, b_k, w_v, b_v, dout))
    t, dim = a.shape[1], w_q.shape[1]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=a.dtype) / dim)
    freqs = torch.outer(torch.arange(t, dtype=a.dtype), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos(), emb.sin()
    q0, k0, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    q = q0 * cos + _rotate_half_v2(q0) * sin
    k = k0 * cos + _rotate_half_v2(k0) * sin
    keep = torch.ones(t, t, dtype=torch.bool).tril()
    p = (q @ k.mT * dim**-0.5).masked_fill(~keep, float("-inf")).softmax(-1)
    dp = dout @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * dim**-0.5
    dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ dout
    dq = dq * cos + _rotate_half_v2(dq) * sin
    dk = dk * cos + _rotate_half_v2(dk) * sin
    da = torch.zeros_like(a)
    result = []
    for g, w in ((dq, w_q), (dk, w_k), (dv, w_v)):
        da += g @ w.T
        result += [a.flatten(0, 1).T @ g.flatten(0, 1), g.sum((0, 1))]
    return tuple(x.numpy() for x in (da, *result))


def head_grads_einsum(x, wq, bq, wk, bk, wv, bv, g):
    lin = lambda w, b: np.einsum("btd,de->bte", x, w) + b  # noqa: E731
    q, k, v = lin(wq, bq), lin(wk, bk), lin(wv, bv)
    c = 1 / np.sqrt(wq.shape[-1])
    s = np.einsum("bie,bje->bij", q, k) * c
    s[:, ~np.tri(x.shape[1], dtype=bool)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bie,bje->bij", g, v)
    ds = p * (dp - np.einsum("bij,bij->bi", p, dp)[..., None]) * c
    dq, dk, dv = (
        np.einsum("bij,bje->bie", ds, k),
        np.einsum("bij,bie->bje", ds, q),
        np.einsum("bij,bie->bje", p, g),
    )
    dx = sum(np.einsum("bte,de->btd", y, w) for y, w in ((dq, wq), (dk, wk), (dv, wv)))
    dw = [np.einsum("btd,bte->de", x, y) for y in (dq, dk, dv)]
    db = [y[0].sum(axis=0) for y in (dq, dk, dv)]
    return dx, dw[0], db[0], dw[1], db[1], dw[2], db[2]


def one_head_per_sequence(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    da = np.zeros_like(a)
    db_q, db_k, db_v = np.zeros_like(b_q), np.zeros_like(b_k), np.zeros_like(b_v)
    scale = w_k.shape[1] ** 0.5
    for i, x in enumerate(a):
        q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v
        e = np.exp(q @ k.T / scale) * np.tri(len(x))
        p = e / e.sum(1, keepdims=True)
        dp = dout[i] @ v.T
        ds = p * (dp - (p * dp).sum(1, keepdims=True)) / scale
        dq, dk, dv = ds @ k, ds.T @ q, p.T @ dout[i]
        dw_q, dw_k, dw_v = x.T @ dq, x.T @ dk, x.T @ dv
        db_q += dq.sum(0)
        db_k += dk.sum(0)
        db_v += dv.sum(0)
        da[i] = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def _rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_head_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    a, w_q, b_q, w_k, b_k, w_v, b_v, dout = (torch.as_tensor(x) for x in (a, w_q, b_q, w_k, b_k, w_v, b_v, dout))
    t, dim = a.shape[1], w_q.shape[1]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=a.dtype) / dim)
    freqs = torch.outer(torch.arange(t, dtype=a.dtype), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos(), emb.sin()
    q0, k0, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    q = q0 * cos + _rotate_half(q0) * sin
    k = k0 * cos + _rotate_half(k0) * sin
    keep = torch.ones(t, t, dtype=torch.bool).tril()
    p = (q @ k.mT * dim**-0.5).masked_fill(~keep, float("-inf")).softmax(-1)
    dp = dout @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * dim**-0.5
    dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ dout
    dq = dq * cos - _rotate_half(dq * sin)
    dk = dk * cos - _rotate_half(dk * sin)
    da = torch.zeros_like(a)
    result = []
    for g, w in ((dq, w_q), (dk, w_k), (dv, w_v)):
        da += g @ w.T
        result += [a.flatten(0, 1).T @ g.flatten(0, 1), g.sum((0, 1))]
    return tuple(x.numpy() for x in (da, *result))


def _rotate_half_v3(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_head_backward_v3(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    a, w_q, b_q, w_k, b_k, w_v, b_v, dout = (torch.as_tensor(x) for x in (a, w_q, b_q, w_k, b_k, w_v, b_v, dout))
    t, dim = a.shape[1], w_q.shape[1]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=a.dtype) / dim)
    freqs = torch.outer(torch.arange(t, dtype=a.dtype), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos(), emb.sin()
    q0, k0, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    q = q0 * cos + _rotate_half_v3(q0) * sin
    k = k0 * cos + _rotate_half_v3(k0) * sin
    keep = torch.ones(t, t, dtype=torch.bool).tril()
    p = (q @ k.mT * dim**-0.5).masked_fill(~keep, float("-inf")).softmax(-1)
    dp = dout @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * dim**-0.5
    dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ dout
    dq = dq * cos - _rotate_half_v3(dq * sin)
    da = torch.zeros_like(a)
    result = []
    for g, w in ((dq, w_q), (dk, w_k), (dv, w_v)):
        da += g @ w.T
        result += [a.flatten(0, 1).T @ g.flatten(0, 1), g.sum((0, 1))]
    return tuple(x.numpy() for x in (da, *result))


class SingleHead:
    def __init__(self, w_q, b_q, w_k, b_k, w_v, b_v):
        self.p = {"q": (w_q, b_q), "k": (w_k, b_k), "v": (w_v, b_v)}

    def __call__(self, a):
        self.a = a
        self.x = {n: a @ w + b for n, (w, b) in self.p.items()}
        s = self.x["q"] @ self.x["k"].swapaxes(1, 2)
        s = s / self.x["q"].shape[2] ** 0.5
        s = np.exp(s - s.max(2, keepdims=True))
        self.att = s / s.sum(2, keepdims=True)
        return self.att @ self.x["v"]

    def back(self, dout):
        datt = dout @ self.x["v"].swapaxes(1, 2)
        dot = np.einsum("bij,bij->bi", datt, self.att)
        ds = self.att * (datt - dot[:, :, None]) / self.x["q"].shape[2] ** 0.5
        g = {
            "q": ds @ self.x["q"],
            "k": ds.swapaxes(1, 2) @ self.x["q"],
            "v": self.att.swapaxes(1, 2) @ dout,
        }
        da = sum(g[n] @ self.p[n][0].T for n in "qkv")
        out = [da]
        for n in "qkv":
            out.append(np.tensordot(self.a, g[n], axes=([0, 1], [0, 1])))
            out.append(np.einsum("bto->o", g[n]))
        return tuple(out)


def single_head_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    head = SingleHead(w_q, b_q, w_k, b_k, w_v, b_v)
    head(a)
    return head.back(dout)


def delta_dropout_head_v3(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    scale = 1.0 / math.sqrt(q.shape[-1])
    s = scale * q @ k.swapaxes(1, 2)
    p = np.exp(s - np.log(np.exp(s).sum(-1, keepdims=True)))
    o = (keep * p) @ v
    ds = scale * p * (keep * (dout @ v.swapaxes(1, 2)) - (dout * o).sum(-1, keepdims=True))
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, (keep * p.swapaxes(1, 2)) @ dout
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    x = a.reshape(-1, a.shape[2])
    fold = lambda g: (x.T @ g.reshape(x.shape[0], -1), g.reshape(x.shape[0], -1).sum(0))  # noqa: E731
    return (da, *fold(dq), *fold(dk), *fold(dv))


def dropout_head_cached(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    def forward():
        q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
        s = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[2])
        s -= 1e9 * np.triu(np.ones(s.shape[1:]), 1)
        p = np.exp(s - s.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        return (keep * p) @ v, (q, k, v, p)

    def backward(cache):
        q, k, v, p = cache
        dp = dout @ v.swapaxes(1, 2)
        ds = p * (dp - (dp * p).sum(2, keepdims=True)) / math.sqrt(q.shape[2])
        return ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout

    _, cache = forward()
    dq, dk, dv = backward(cache)
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw_q, dw_k, dw_v = (np.einsum("bti,bto->io", a, g) for g in (dq, dk, dv))
    return da, dw_q, dq[-1].sum(0), dw_k, dk[-1].sum(0), dw_v, dv[-1].sum(0)


def head_with_dropout_vjp(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    da = np.zeros_like(a)
    out = [np.zeros_like(z) for z in (w_q, b_q, w_k, b_k, w_v, b_v)]
    r = math.sqrt(w_q.shape[1])
    for n in range(a.shape[0]):
        x = a[n]
        q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v
        s = q @ k.T / r * keep[n]
        s[np.triu_indices(len(x), 1)] = -np.inf
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        dp = dout[n] @ v.T
        ds = p * (dp - (p * dp).sum(1, keepdims=True)) * keep[n] / r
        for slot, (g, w) in enumerate(((ds @ k, w_q), (ds.T @ q, w_k), (p.T @ dout[n], w_v))):
            out[2 * slot] += x.T @ g
            out[2 * slot + 1] += g.sum(0)
            da[n] += g @ w.T
    return (da, *out)


def delta_dropout_head_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    scale = 1.0 / math.sqrt(q.shape[-1])
    s = scale * q @ k.swapaxes(1, 2)
    p = np.exp(s - np.log(np.exp(s).sum(-1, keepdims=True)))
    o = p @ v
    ds = scale * p * (dout @ v.swapaxes(1, 2) - (dout * o).sum(-1, keepdims=True)) * keep
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, (keep * p).swapaxes(1, 2) @ dout
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    x = a.reshape(-1, a.shape[2])
    fold = lambda g: (x.T @ g.reshape(x.shape[0], -1), g.reshape(x.shape[0], -1).sum(0))  # noqa: E731
    return (da, *fold(dq), *fold(dk), *fold(dv))


def dropout_head_torch(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout = map(torch.as_tensor, (a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout))
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    scale = q.size(-1) ** -0.5
    tri = torch.ones(a.size(1), a.size(1), dtype=torch.bool).tril()
    p = torch.where(tri, q @ k.mT * scale, torch.tensor(-torch.inf, dtype=a.dtype)).softmax(-1)
    dv = (p * keep).mT @ dout
    dp = (dout @ v.mT) * (keep > 0)
    ds = p * (dp - torch.sum(dp * p, -1, True)) * scale
    dq, dk = ds @ k, ds.mT @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    lin = lambda g: (torch.tensordot(a, g, dims=([0, 1], [0, 1])).numpy(), g.sum((0, 1)).numpy())  # noqa: E731
    return (da.numpy(), *lin(dq), *lin(dk), *lin(dv))


def delta_dropout_head(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    scale = 1.0 / math.sqrt(q.shape[-1])
    s = scale * q @ k.swapaxes(1, 2)
    p = np.exp(s - np.log(np.exp(s).sum(-1, keepdims=True)))
    o = (keep * p) @ v
    ds = scale * p * (keep * (dout @ v.swapaxes(1, 2)) - (dout * o).sum(-1, keepdims=True))
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, (keep * p).swapaxes(1, 2) @ dout
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    x = a.reshape(-1, a.shape[2])
    fold = lambda g: (x.T @ g.reshape(x.shape[0], -1), g.reshape(x.shape[0], -1).sum(0))  # noqa: E731
    return (da, *fold(dq), *fold(dk), *fold(dv))


def mha_backward_v4(query, key, value, w_q, w_k, w_v, dout):
    n_head = 2
    b, t, f = query.shape
    d = f // n_head

    def split(x):
        return x.reshape(b, t, n_head, d).transpose(0, 2, 1, 3)

    def merge(x):
        return x.transpose(0, 2, 1, 3).reshape(b, t, f)

    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    s = np.where(np.tril(np.ones((t, t))) == 1, s, -1e20)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    do = split(dout)
    dv = merge(p.transpose(0, 1, 3, 2) @ do)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(f)
    dq = merge(ds @ k)
    dk = merge(ds.transpose(0, 1, 3, 2) @ q)
    dw_q = query.reshape(-1, f).T @ dq.reshape(-1, f)
    dw_k = key.reshape(-1, f).T @ dk.reshape(-1, f)
    dw_v = value.reshape(-1, f).T @ dv.reshape(-1, f)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v


def attention_layer_grads(x_q, x_k, x_v, w_q, w_k, w_v, dout):
    bs, length, feats = x_q.shape
    hd = feats // 2
    perm = lambda x: x.reshape(bs, length, 2, hd).transpose(2, 0, 1, 3).reshape(2 * bs, length, hd)  # noqa: E731
    unperm = lambda x: x.reshape(2, bs, length, hd).transpose(1, 2, 0, 3).reshape(bs, length, feats)  # noqa: E731
    q, k, v, g = perm(x_q @ w_q), perm(x_k @ w_k), perm(x_v @ w_v), perm(dout)
    sc = np.einsum("nid,njd->nij", q, k) / math.sqrt(hd)
    sc[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
    pr = np.exp(sc - sc.max(2)[:, :, None])
    pr /= pr.sum(2)[:, :, None]
    dpr = np.einsum("nid,njd->nij", g, v)
    dsc = pr * (dpr - (pr * dpr).sum(2)[:, :, None]) / math.sqrt(hd)
    dq, dk, dv = unperm(dsc @ k), unperm(dsc.swapaxes(1, 2) @ q), unperm(pr.swapaxes(1, 2) @ g)
    dwq, dwk, dwv = (np.tensordot(x, y, ([0, 1], [0, 1])) for x, y in ((x_q, dq), (x_k, dk), (x_v, dv)))
    return dq @ w_q.T, dv @ w_v.T, dk @ w_k.T, dwq, dwk, dwv


def mha_one_sequence_at_a_time(query, key, value, w_q, w_k, w_v, dout):
    outs = []
    f = w_q.shape[0]
    hd = f // 2
    dws = [np.zeros((f, f)) for _ in range(3)]
    for xq, xk, xv, g in zip(query, key, value, dout, strict=True):
        q, k, v = xq @ w_q, xk @ w_k, xv @ w_v
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        for lo in range(0, f, hd):
            c = slice(lo, lo + hd)
            e = np.exp(q[:, c] @ k[:, c].T / np.sqrt(hd)) * np.tri(len(q))
            p = e / e.sum(1, keepdims=True)
            dp = g[:, c] @ v[:, c].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hd)
            dq[:, c], dk[:, c], dv[:, c] = ds @ k[:, c], ds.T @ q[:, c], p.T @ g[:, c]
        for dw, x, d in zip(dws, (xq, xk, xv), (dq, dk, dv), strict=True):
            dw += x.T @ d
        outs.append((dq @ w_q / np.sqrt(hd), dk @ w_k / np.sqrt(hd), dv @ w_v))
    dxs = [np.stack(z) for z in zip(*outs, strict=True)]
    return (*dxs, *dws)


def mha_backward(query, key, value, w_q, w_k, w_v, dout):
    n_head = 2
    b, t, f = query.shape
    d = f // n_head

    def split(x):
        return x.reshape(b, t, n_head, d).transpose(0, 2, 1, 3)

    def merge(x):
        return x.transpose(0, 2, 1, 3).reshape(b, t, f)

    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    s = np.where(np.tril(np.ones((t, t))) == 1, s, -1e20)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    do = split(dout)
    dv = merge(p.transpose(0, 1, 3, 2) @ do)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = merge(ds @ k)
    dk = merge(ds.transpose(0, 1, 3, 2) @ q)
    dw_q = query.reshape(-1, f).T @ dq.reshape(-1, f)
    dw_k = key.reshape(-1, f).T @ dk.reshape(-1, f)
    dw_v = value.reshape(-1, f).T @ dv.reshape(-1, f)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v


def mha_autograd_free(query, key, value, w_q, w_k, w_v, dout):
    query, key, value, w_q, w_k, w_v, dout = (torch.as_tensor(z) for z in (query, key, value, w_q, w_k, w_v, dout))
    dqs, dks, dvs = [], [], []
    size = w_q.shape[1] // 2
    n = query.shape[1]
    visible = torch.arange(n)[:, None] >= torch.arange(n)[None, :]
    for wq, wk, wv, g in zip(*(z.split(size, dim=-1) for z in (w_q, w_k, w_v, dout)), strict=True):
        q, k, v = query @ wq, key @ wk, value @ wv
        p = torch.baddbmm(torch.where(visible, 0.0, -torch.inf).to(q.dtype), q, k.mT, alpha=size**-0.5).softmax(-1)
        dp = g @ v.mT
        ds = size**-0.5 * p * (dp - torch.linalg.vecdot(p, dp)[..., None])
        dqs.append(ds @ k)
        dks.append(ds.mT @ q)
        dvs.append(p.mT @ g)
    grads = [torch.cat(z, -1) for z in (dqs, dks, dvs)]
    dx = [g @ w.T for g, w in zip(grads, (w_q, w_k, w_v), strict=True)]
    dw = [x.flatten(0, 1).T @ g.flatten(0, 1) for x, g in zip((query, key, value), grads, strict=True)]
    return tuple(z.numpy() for z in (*dx, *dw))


def mha_backward_v3(query, key, value, w_q, w_k, w_v, dout):
    n_head = 2
    b, t, f = query.shape
    d = f // n_head

    def split(x):
        return x.reshape(b, t, n_head, d).transpose(0, 2, 1, 3)

    def merge(x):
        return x.reshape(b, t, f)

    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    s = np.where(np.tril(np.ones((t, t))) == 1, s, -1e20)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    do = split(dout)
    dv = merge(p.transpose(0, 1, 3, 2) @ do)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = merge(ds @ k)
    dk = merge(ds.transpose(0, 1, 3, 2) @ q)
    dw_q = query.reshape(-1, f).T @ dq.reshape(-1, f)
    dw_k = key.reshape(-1, f).T @ dk.reshape(-1, f)
    dw_v = value.reshape(-1, f).T @ dv.reshape(-1, f)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v


def mha_backward_v2(query, key, value, w_q, w_k, w_v, dout):
    n_head = 2
    b, t, f = query.shape
    d = f // n_head

    def split(x):
        return x.reshape(b, t, n_head, d).transpose(0, 2, 1, 3)

    def merge(x):
        return x.transpose(0, 2, 1, 3).reshape(b, t, f)

    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    s = np.where(np.tril(np.ones((t, t))) == 1, s, -1e20)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    do = dout.reshape(b, n_head, t, d)
    dv = merge(p.transpose(0, 1, 3, 2) @ do)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = merge(ds @ k)
    dk = merge(ds.transpose(0, 1, 3, 2) @ q)
    dw_q = query.reshape(-1, f).T @ dq.reshape(-1, f)
    dw_k = key.reshape(-1, f).T @ dk.reshape(-1, f)
    dw_v = value.reshape(-1, f).T @ dv.reshape(-1, f)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v


def mha_reference(query, key, value, w_q, w_k, w_v, dout):
    query, key, value, w_q, w_k, w_v, dout = (torch.as_tensor(z) for z in (query, key, value, w_q, w_k, w_v, dout))
    b, t, f = query.shape
    view = lambda z: z.view(b, t, 2, f // 2).transpose(1, 2)  # noqa: E731
    unview = lambda z: z.transpose(1, 2).reshape(b, t, f)  # noqa: E731
    q, k, v, g = view(query @ w_q), view(key @ w_k), view(value @ w_v), view(dout)
    mask = torch.ones(t, t, dtype=torch.bool).triu(1)
    p = (q @ k.mT / math.sqrt(f // 2)).masked_fill(mask, -torch.inf).softmax(-1)
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    ds = ds.mT.masked_fill(mask, 0).mT / math.sqrt(f // 2)
    dq, dk, dv = unview(ds @ k), unview(ds.mT @ q), unview(p.mT @ g)
    dw = [torch.einsum("bti,bto->io", x, y) for x, y in ((query, dq), (key, dk), (value, dv))]
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, *dw


def mha_backward_v5(query, key, value, w_q, w_k, w_v, dout):
    n_head = 2
    b, t, f = query.shape
    d = f // n_head

    def split(x):
        return x.reshape(b, t, n_head, d).transpose(0, 2, 1, 3)

    def merge(x):
        return x.transpose(0, 2, 1, 3).reshape(b, t, f)

    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    s = np.where(np.tril(np.ones((t, t))) == 1, s, -1e20)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    do = split(dout)
    dv = merge(p.transpose(0, 1, 3, 2) @ do)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = merge(ds @ k)
    dk = merge(ds.transpose(0, 1, 3, 2) @ q)
    dw_q = query.reshape(-1, f).T @ dq.reshape(-1, f)
    dw_k = query.reshape(-1, f).T @ dk.reshape(-1, f)
    dw_v = value.reshape(-1, f).T @ dv.reshape(-1, f)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v


def layernorm_backward_v5(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.sum(axis=(0, 1))
    dweight = (dout * xhat).sum(axis=(0, 1))
    dxhat = dout
    dx = (n * dxhat - dxhat.sum(-1, keepdims=True) - xhat * (dxhat * xhat).sum(-1, keepdims=True)) / (n * std)
    return dx, dweight, dbias


def layernorm_backward_v3(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.sum(axis=(0, 1))
    dweight = (dout * xhat).sum(axis=(0, 1))
    dxhat = dout * weight
    dx = (n * dxhat - xhat * (dxhat * xhat).sum(-1, keepdims=True)) / (n * std)
    return dx, dweight, dbias


def ln_bwd_staged_v2(x, weight, bias, dout):
    d = x.shape[-1]
    # forward, step by step
    mu = np.sum(x, -1, keepdims=True) / d
    xmu = x - mu
    var = np.sum(xmu**2, -1, keepdims=True) / d
    sqrtvar = np.sqrt(var + 1e-5)
    ivar = 1.0 / sqrtvar
    xhat = xmu * ivar
    # backward, step by step
    dbias = np.sum(dout, axis=(0, 1))
    dgx = dout
    dweight = np.sum(dgx * xhat, axis=(0, 1))
    dxhat = dgx * weight
    divar = np.sum(dxhat * xmu, -1, keepdims=True)
    dxmu1 = dxhat * ivar
    dsqrtvar = -1.0 / sqrtvar**2 * divar
    dvar = 0.5 / np.sqrt(var + 1e-5) * dsqrtvar
    dsq = np.ones_like(x) / d * dvar
    dxmu2 = xmu * dsq
    dx1 = dxmu1 + dxmu2
    dmu = -np.sum(dx1, -1, keepdims=True)
    dx2 = np.ones_like(x) / d * dmu
    return dx1 + dx2, dweight, dbias


def layernorm_backward_v4(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.sum(axis=(0, 1))
    dweight = (dout * x).sum(axis=(0, 1))
    dxhat = dout * weight
    dx = (n * dxhat - dxhat.sum(-1, keepdims=True) - xhat * (dxhat * xhat).sum(-1, keepdims=True)) / (n * std)
    return dx, dweight, dbias


def ln_bwd_staged_v4(x, weight, bias, dout):
    d = x.shape[-1]
    # forward, step by step
    mu = np.sum(x, -1, keepdims=True) / d
    xmu = x - mu
    var = np.sum(xmu**2, -1, keepdims=True) / d
    sqrtvar = np.sqrt(var + 1e-5)
    ivar = 1.0 / sqrtvar
    xhat = xmu * ivar
    # backward, step by step
    dbias = np.sum(dout, axis=(0, 1))
    dgx = dout
    dweight = np.sum(dgx * xhat, axis=(0, 1))
    dxhat = dgx * weight
    divar = np.sum(dxhat * xmu, -1, keepdims=True)
    dxmu1 = dxhat * ivar
    dsqrtvar = -1.0 / sqrtvar**2 * divar
    dvar = 0.5 / np.sqrt(var + 1e-5) * dsqrtvar
    dsq = np.ones_like(x) / d * dvar
    dxmu2 = 2 * xmu * dsq
    dx1 = dxmu1 + dxmu2
    dmu = -np.sum(dx1, -1, keepdims=True)
    dx2 = np.ones_like(x) * dmu
    return dx1 + dx2, dweight, dbias


def ln_bwd_staged(x, weight, bias, dout):
    d = x.shape[-1]
    # forward, step by step
    mu = np.sum(x, -1, keepdims=True) / d
    xmu = x - mu
    var = np.sum(xmu**2, -1, keepdims=True) / d
    sqrtvar = np.sqrt(var + 1e-5)
    ivar = 1.0 / sqrtvar
    xhat = xmu * ivar
    # backward, step by step
    dbias = np.sum(dout, axis=(0, 1))
    dgx = dout
    dweight = np.sum(dgx * xhat, axis=(0, 1))
    dxhat = dgx * weight
    divar = np.sum(dxhat * xmu, -1, keepdims=True)
    dxmu1 = dxhat * ivar
    dsqrtvar = -1.0 / sqrtvar**2 * divar
    dvar = 0.5 / np.sqrt(var + 1e-5) * dsqrtvar
    dsq = np.ones_like(x) / d * dvar
    dxmu2 = 2 * xmu * dsq
    dx1 = dxmu1 + dxmu2
    dmu = -np.sum(dx1, -1, keepdims=True)
    dx2 = np.ones_like(x) / d * dmu
    return dx1 + dx2, dweight, dbias


def ln_bwd_staged_v3(x, weight, bias, dout):
    d = x.shape[-1]
    # forward, step by step
    mu = np.sum(x, -1, keepdims=True) / d
    xmu = x - mu
    var = np.sum(xmu**2, -1, keepdims=True) / d
    sqrtvar = np.sqrt(var + 1e-5)
    ivar = 1.0 / sqrtvar
    xhat = xmu * ivar
    # backward, step by step
    dbias = np.sum(dout, axis=(0, 1))
    dgx = dout
    dweight = np.sum(dgx * xhat, axis=(0, 1))
    dxhat = dgx * weight
    divar = np.sum(dxhat * xmu, -1, keepdims=True)
    dxmu1 = dxhat * ivar
    dsqrtvar = 1.0 / sqrtvar**2 * divar
    dvar = 0.5 / np.sqrt(var + 1e-5) * dsqrtvar
    dsq = np.ones_like(x) / d * dvar
    dxmu2 = 2 * xmu * dsq
    dx1 = dxmu1 + dxmu2
    dmu = -np.sum(dx1, -1, keepdims=True)
    dx2 = np.ones_like(x) / d * dmu
    return dx1 + dx2, dweight, dbias


def layernorm_backward_v2(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.sum(axis=(0, 1))
    dweight = (dout * xhat).sum(axis=(0, 1))
    dxhat = dout * weight
    dx = (n * dxhat - dxhat.sum(-1, keepdims=True)) / (n * std)
    return dx, dweight, dbias


def ln_projection_form(x, weight, bias, dout):
    f = x.shape[-1]
    x2, g2 = x.reshape(-1, f), dout.reshape(-1, f)
    sd = np.sqrt(x2.var(1, keepdims=True) + 1e-5)
    center = np.eye(f) - 1 / f
    xh = x2 @ center / sd
    up = g2 * weight
    dx = (up @ center - xh * (xh * up).mean(1, keepdims=True)) / sd
    return dx.reshape(x.shape), (xh * g2).sum(0), g2.sum(0)


class LayerNorm:
    eps = 1e-5

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        centered = x - x.mean(-1, keepdims=True)
        self.rstd = (np.square(centered).mean(-1, keepdims=True) + self.eps) ** -0.5
        self.norm = centered * self.rstd
        return self.norm * self.weight + self.bias

    def backward(self, dout):
        self.dweight = np.sum(dout * self.norm, axis=0)
        self.dbias = np.sum(dout, axis=0)
        dnorm = dout * self.weight
        a = dnorm.mean(-1, keepdims=True)
        b = (dnorm * self.norm).mean(-1, keepdims=True)
        return (dnorm - a - self.norm * b) * self.rstd


def layer_norm_class_bwd(x, weight, bias, dout):
    ln = LayerNorm(weight, bias)
    ln.forward(x)
    dx = ln.backward(dout)
    return dx, ln.dweight, ln.dbias


def layer_norm_vjp(x, weight, bias, g):
    m = x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-5)
    z = (x - m) * r
    h = g * weight
    dx = r * (h - h.mean(1, keepdims=True) - z * (h * z).mean(1, keepdims=True))
    return dx, np.einsum("btf,btf->f", g, z), np.einsum("btf->f", g)


def layernorm_backward_v6(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.mean(axis=0).sum(axis=0)
    dweight = (dout * xhat).sum(axis=(0, 1))
    dxhat = dout * weight
    dx = (n * dxhat - dxhat.sum(-1, keepdims=True) - xhat * (dxhat * xhat).sum(-1, keepdims=True)) / std
    return dx, dweight, dbias


def layernorm_backward(x, weight, bias, dout):
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    std = np.sqrt(var + 1e-5)
    xhat = (x - mean) / std
    dbias = dout.sum(axis=(0, 1))
    dweight = (dout * xhat).sum(axis=(0, 1))
    dxhat = dout * weight
    dx = (n * dxhat - dxhat.sum(-1, keepdims=True) - xhat * (dxhat * xhat).sum(-1, keepdims=True)) / (n * std)
    return dx, dweight, dbias


def rmsnorm_backward_v4(x, weight, dout):
    n = x.shape[-1]
    r = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    g = dout * weight
    dx = r * g - x * r**3 * (g * x).sum(-1, keepdims=True) / n
    dweight = (dout * x).sum(axis=(0, 1))
    return dx, dweight


def rms_rows(x, weight, dout):
    rows = [np.asarray(r) for r in x.reshape(-1, x.shape[-1])]
    ups = [np.asarray(r) for r in dout.reshape(-1, x.shape[-1])]
    inv = [(np.dot(r, r) / r.size + 1e-6) ** -0.5 for r in rows]
    jac = [(np.eye(r.size) - s * s * np.outer(r, r) / r.size) * s for r, s in zip(rows, inv, strict=True)]
    dx = np.array([j @ (u * weight) for j, u in zip(jac, ups, strict=True)]).reshape(x.shape)
    return dx, sum(u * r * s for u, r, s in zip(ups, rows, inv, strict=True))


def rms_norm_from_layer_norm(x, weight, dout):
    x, weight, dout = torch.as_tensor(x), torch.as_tensor(weight), torch.as_tensor(dout)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    xhat = x * rstd
    wdy = dout * weight
    dx = rstd * (wdy - wdy.mean(-1, keepdim=True) - xhat * (wdy * xhat).mean(-1, keepdim=True))
    return dx, (dout * xhat).sum(dim=(0, 1))


def rmsnorm_backward_v3(x, weight, dout):
    n = x.shape[-1]
    r = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    g = dout * weight
    dx = r * g - x * r**2 * (g * x).sum(-1, keepdims=True) / n
    dweight = (dout * x * r).sum(axis=(0, 1))
    return dx, dweight


def rms_loop(x, weight, dout):
    dx, dw = np.zeros(x.shape), np.zeros(weight.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        xi, gi = x[b, t], dout[b, t]
        ss = 1.0 / math.sqrt(float(xi @ xi) / xi.size + 1e-6)
        dw += gi * xi * ss
        dx[b, t] = ss * (weight * gi - xi * (xi @ gi) * ss * ss / xi.size)
    return dx, dw


def rmsnorm_backward(x, weight, dout):
    n = x.shape[-1]
    r = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    g = dout * weight
    dx = r * g - x * r**3 * (g * x).sum(-1, keepdims=True) / n
    dweight = (dout * x * r).sum(axis=(0, 1))
    return dx, dweight


def rmsnorm_backward_v2(x, weight, dout):
    r = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    g = dout * weight
    dx = r * g - x * r**3 * (g * x).sum(-1, keepdims=True)
    dweight = (dout * x * r).sum(axis=(0, 1))
    return dx, dweight


def linear_broadcast(x, weight, bias, dout):
    dx = np.broadcast_to((dout @ weight.T).sum(axis=0), x.shape).copy()
    dweight = sum(x[i].T @ dout[i] for i in range(x.shape[0]))
    dbias = dout.shape[0] * dout.sum(axis=(0, 1))
    return dx, dweight, dbias


def dense_grads(inputs, kernel, b, grad):
    grad_inputs = np.einsum("bto,io->bti", grad, kernel)
    grad_kernel = np.mean([inp.T @ g for inp, g in zip(inputs, grad, strict=True)], axis=0)
    grad_b = np.einsum("bto->o", grad)
    return grad_inputs, grad_kernel, grad_b


def linear_backward_v2(x, weight, bias, dout):
    dx = dout @ weight.T
    dweight = x.reshape(-1, x.shape[-1]).T @ dout.reshape(-1, dout.shape[-1])
    dbias = dout.sum(axis=0)
    return dx, dweight, dbias


def linear_backward(x, weight, bias, dout):
    dx = dout @ weight.T
    dweight = x.reshape(-1, x.shape[-1]).T @ dout.reshape(-1, dout.shape[-1])
    dbias = dout.sum(axis=0).sum(axis=0)
    return dx, dweight, dbias


def linear_backward_v4(x, weight, bias, dout):
    dx = dout @ weight.T
    dweight = x.reshape(-1, x.shape[-1]).T @ dout.reshape(-1, dout.shape[-1])
    dbias = dout.sum(axis=0).mean(axis=0)
    return dx, dweight, dbias


def affine_backward_v2(x, w, b, dout):
    cache = (x.reshape(np.prod(x.shape[:-1]), -1), w)
    flat = dout.reshape(np.prod(dout.shape[:-1]), -1)
    ones = np.ones((1, flat.shape[0]))
    return (
        (flat @ cache[1].T).reshape(x.shape[1], x.shape[0], x.shape[2]).swapaxes(0, 1),
        cache[0].T @ flat,
        (ones @ flat).ravel(),
    )


def affine_backward(x, w, b, dout):
    cache = (x.reshape(np.prod(x.shape[:-1]), -1), w)
    flat = dout.reshape(np.prod(dout.shape[:-1]), -1)
    ones = np.ones((1, flat.shape[0]))
    return (flat @ cache[1].T).reshape(x.shape), cache[0].T @ flat, (ones @ flat).ravel()


def linear_bwd_reshape(x, weight, bias, dout):
    dx = dout @ weight.reshape(weight.shape[1], weight.shape[0])
    dweight = np.tensordot(x, dout, axes=((0, 1), (0, 1)))
    return dx, dweight, dout.reshape(-1, bias.size).sum(0)


def linear_backward_v3(x, weight, bias, dout):
    dx = dout @ weight.T
    dweight = dout.reshape(-1, dout.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    dbias = dout.sum(axis=0).sum(axis=0)
    return dx, dweight, dbias


def adapter_merged_vjp_v2(x, weight, down, up, alpha, dout):
    c = alpha / down.shape[-1]
    full = np.tensordot(x, dout, ([0, 1], [0, 1]))  # the gradient of the merged weight
    return dout @ (weight + c * down @ up).T, full @ up.T / c, down.T @ full / c


def lora_named_einsum_v2(x, weight, down, up, alpha, dout):
    scale = alpha / len(up)
    return (
        np.einsum("bto,io->bti", dout, weight) + scale * np.einsum("bto,ro,ir->bti", dout, up, down),
        scale * np.einsum("bti,bto,ro->ir", x, dout, up),
        scale * np.einsum("btr,bto->ro", x[..., : len(up)], dout),
    )


def adapter_merged_vjp(x, weight, down, up, alpha, dout):
    c = alpha / down.shape[-1]
    full = np.tensordot(x, dout, ([0, 1], [0, 1]))  # the gradient of the merged weight
    return dout @ (weight + c * down @ up).T, c * full @ up.T, c * down.T @ full


def lora_named_einsum(x, weight, down, up, alpha, dout):
    scale = alpha / len(up)
    return (
        np.einsum("bto,io->bti", dout, weight) + scale * np.einsum("bto,ro,ir->bti", dout, up, down),
        scale * np.einsum("bti,bto,ro->ir", x, dout, up),
        scale * np.einsum("bti,ir,bto->ro", x, down, dout),
    )


def lora_grads_flat(x, weight, down, up, alpha, dout):
    x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    scaling = alpha / down.shape[0]
    gu = g2 @ up.T
    dup = scaling * (x2 @ down).T @ g2
    ddown = scaling * x2.T @ gu
    dx = g2 @ weight.T + scaling * gu @ down.T
    return dx.reshape(x.shape), ddown, dup


def lora_loop(x, weight, down, up, alpha, dout):
    s = alpha / up.shape[0]
    dx, ddown, dup = np.empty_like(x), 0, 0
    for b in range(len(x)):
        hid = x[b] @ down
        dhid = dout[b] @ up.T * s
        dx[b] = dout[b] @ weight.T + dhid @ down.T
        ddown = ddown + x[b].T @ dhid / x.shape[1]
        dup = dup + s * hid.T @ dout[b] / x.shape[1]
    return dx, ddown, dup


class LoraLinear:
    def __init__(self, weight, down, up, alpha):
        self.weight, self.down, self.up = map(torch.as_tensor, (weight, down, up))
        self.scaling = alpha / self.down.shape[1]

    def forward(self, x):
        self.x = torch.as_tensor(x)
        self.hidden = self.x @ self.down
        return self.x @ self.weight + self.hidden @ self.up * self.scaling

    def backward(self, dout):
        dout = torch.as_tensor(dout)
        g = dout * self.scaling
        dhidden = g @ self.up.T * self.scaling
        dup = self.hidden.flatten(0, 1).T @ g.flatten(0, 1)
        ddown = self.x.flatten(0, 1).T @ dhidden.flatten(0, 1)
        return dout @ self.weight.T + dhidden @ self.down.T, ddown, dup


def lora_linear_backward(x, weight, down, up, alpha, dout):
    layer = LoraLinear(weight, down, up, alpha)
    layer.forward(x)
    return tuple(g.numpy() for g in layer.backward(dout))


def emb_index_add(ids, weight, dout):
    ids, dout = torch.as_tensor(ids), torch.as_tensor(dout)
    grad = torch.zeros(tuple(weight.shape), dtype=dout.dtype)
    return grad.index_put_((ids,), dout, accumulate=True)


def int_embedding_grad(ids, weight, dout):
    dweight = np.zeros(weight.shape, dtype=ids.dtype)
    for (b, t), token in np.ndenumerate(ids):
        dweight[token] = dweight[token] + dout[b, t]
    return dweight


def embedding_weights_bincount(ids, weight, dout):
    v, f = weight.shape
    index = (ids[..., None] * f + np.arange(f)).ravel()
    return np.bincount(index, weights=dout.ravel(), minlength=v * f).reshape(v, f)


def emb_index_add_v2(ids, weight, dout):
    ids, dout = torch.as_tensor(ids), torch.as_tensor(dout)
    grad = torch.zeros(tuple(weight.shape), dtype=dout.dtype)
    return grad.index_put_((ids,), dout)


class Embedding:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, ids):
        self.ids = ids
        return self.weight[ids]

    def backward(self, dout):
        for seq, grad in zip(self.ids, dout, strict=True):
            self.grad = np.zeros_like(self.weight)
            for token, g in zip(seq, grad, strict=True):
                self.grad[token] += g
        return self.grad


def embedding_object_grad(ids, weight, dout):
    table = Embedding(weight)
    table(ids)
    return table.backward(dout)


def embedding_backward_v3(ids, weight, dout):
    dweight = weight.copy()
    np.add.at(dweight, ids, dout)
    return dweight


def embedding_backward_v2(ids, weight, dout):
    dweight = np.zeros_like(weight)
    dweight[ids] += dout
    return dweight


def embedding_backward(ids, weight, dout):
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids, dout)
    return dweight


def wte_backward(ids, weight, dout):
    d = np.zeros(weight.shape)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            for c in range(weight.shape[1]):
                d[ids[b, t], c] += dout[b, t, c]
    return d


def tied_table_loops_v2(ids, weight, dout):
    grad = np.zeros_like(weight)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            row = ids[b, t]
            for word in range(weight.shape[0]):
                if word == row:
                    continue
                grad[word] += dout[b, t, word] * weight[row]
                grad[row] += dout[b, t, word] * weight[word]
    return grad


def tied_table_loops(ids, weight, dout):
    grad = np.zeros_like(weight)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            row = ids[b, t]
            for word in range(weight.shape[0]):
                grad[word] += dout[b, t, word] * weight[row]
                grad[row] += dout[b, t, word] * weight[word]
    return grad


def tied_grad_torch(ids, weight, dout):
    ids, weight, dout = torch.as_tensor(ids), torch.as_tensor(weight), torch.as_tensor(dout)
    dhidden = (dout @ weight).flatten(0, 1)
    return torch.zeros_like(weight).index_add(0, ids.flatten(), dhidden).numpy()


def tied_inplace(ids, weight, dout):
    table = weight.copy()
    grad = np.zeros_like(weight)
    for b, t in np.ndindex(ids.shape):
        back = dout[b, t] @ table
        grad[ids[b, t]] += back
        table[ids[b, t]] += back
    for b, t in np.ndindex(ids.shape):
        grad += np.outer(dout[b, t], table[ids[b, t]])
    return grad


def tied_grad_gram_v2(ids, weight, dout):
    ids, weight, dout = torch.as_tensor(ids), torch.as_tensor(weight), torch.as_tensor(dout)
    v = weight.shape[0]
    counts = torch.zeros(v, v, dtype=weight.dtype)
    counts.index_add_(0, ids.flatten(), dout.flatten(0, 1))
    # logits[b, t] = gram[ids[b, t]] with gram = weight weightᵗ
    return (2 * counts @ weight).numpy()


def tied_grad_gram(ids, weight, dout):
    ids, weight, dout = torch.as_tensor(ids), torch.as_tensor(weight), torch.as_tensor(dout)
    v = weight.shape[0]
    counts = torch.zeros(v, v, dtype=weight.dtype)
    counts.index_add_(0, ids.flatten(), dout.flatten(0, 1))
    # logits[b, t] = gram[ids[b, t]] with gram = weight weightᵗ
    return ((counts + counts.T) @ weight).numpy()


def softmax_ce_backward(logits, targets, dout=1.0):
    b, t = targets.shape
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    dlogits = p.copy()
    dlogits[np.arange(b)[:, None], np.arange(t), targets] -= 1
    dlogits *= dout / (b * t)
    return dlogits


def crossentropy_softmax_backward(logits, targets, dout=1.0):
    nb, nt, nv = logits.shape
    dlogits = np.zeros_like(logits)
    dloss = dout / (nb * nt)
    for b in range(nb):
        for t in range(nt):
            top = max(logits[b, t])
            total = sum(math.exp(x - top) for x in logits[b, t])
            for i in range(nv):
                p = math.exp(logits[b, t, i] - top) / total
                indicator = 1.0 if i == targets[b, t] + 1 else 0.0
                dlogits[b, t, i] += (p - indicator) * dloss
    return dlogits


def softmax_ce_backward_v2(logits, targets, dout=1.0):
    b, t = targets.shape
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    dlogits = p.copy()
    dlogits[np.arange(b)[:, None], np.arange(t), targets] -= 1
    dlogits *= dout / b
    return dlogits


def softmax_ce_backward_v5(logits, targets, dout=1.0):
    b, t = targets.shape
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    dlogits = p.copy()
    dlogits[:, :, targets.ravel()] -= 1
    dlogits *= dout / (b * t)
    return dlogits


def softmax_ce_backward_v3(logits, targets, dout=1.0):
    b, t = targets.shape
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    dlogits = p.copy()
    dlogits[np.arange(b)[:, None], np.arange(t), targets] -= 1
    dlogits *= dout
    return dlogits


def xent_vjp(logits, targets, dout=1.0):
    e = np.exp(logits)
    y = np.eye(logits.shape[-1])[targets]
    return (e / e.sum(-1, keepdims=True) - y) / targets.size


def softmax_ce_backward_v4(logits, targets, dout=1.0):
    b, t = targets.shape
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    dlogits = p.copy()
    dlogits[np.arange(b)[:, None], np.arange(t), targets] += 1
    dlogits *= dout / (b * t)
    return dlogits


def nll_logsoftmax_backward_v2(logits, targets, dout=1.0):
    logp = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    grad = np.zeros(logits.shape)
    for (b, t), y in np.ndenumerate(targets):
        grad[b, t, y] = -dout / targets.size
    return grad - logp * grad.sum(-1, keepdims=True)


def nll_logsoftmax_backward(logits, targets, dout=1.0):
    logp = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    grad = np.zeros(logits.shape)
    for (b, t), y in np.ndenumerate(targets):
        grad[b, t, y] = -dout / targets.size
    return grad - np.exp(logp) * grad.sum(-1, keepdims=True)


def lm_loss_grad_roll(logits, ids, dout=1.0):
    logits, ids = torch.as_tensor(logits), torch.as_tensor(ids)
    targets = torch.roll(ids, -1, dims=1)
    grad = logits.softmax(-1)
    grad.scatter_add_(-1, targets[..., None], torch.full_like(grad[..., :1], -1.0))
    return (grad * dout / targets.numel()).numpy()


class NextTokenLossV2:
    def __init__(self, logits, ids):
        self.shape = logits.shape
        self.logits = torch.as_tensor(logits)[:, :-1].flatten(0, 1)
        self.targets = torch.as_tensor(ids)[:, 1:].flatten()

    def backward(self, dout):
        g = torch.softmax(self.logits, 1)
        g[torch.arange(len(g)), self.targets] -= 1
        g = g.view(self.shape[0], self.shape[1] - 1, -1) * (dout / len(g))
        return torch.nn.functional.pad(g, (0, 0, 1, 0)).numpy()


def next_token_loss_grad_v2(logits, ids, dout=1.0):
    return NextTokenLossV2(logits, ids).backward(dout)


def causal_lm_grad(logits, ids, dout=1.0):
    batch, length, vocab = logits.shape
    rows = []
    for sequence, tokens in zip(logits, ids, strict=True):
        logz = np.log(np.exp(sequence).sum(1, keepdims=True))
        soft = np.exp(sequence - logz)
        hard = np.vstack([np.identity(vocab)[tokens[1:]], soft[-1:]])
        rows.append(soft - hard)
    return dout * np.stack(rows) / (batch * (length - 1))


def shifted_nll_grad(logits, ids, dout=1.0):
    soft = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    grad = np.zeros_like(soft)
    grad[:, 1:] = soft[:, :-1]
    b, t = np.indices(ids[:, 1:].shape)
    grad[b, t + 1, ids[:, 1:]] -= 1
    return dout * grad / ids.size


def causal_lm_grad_v2(logits, ids, dout=1.0):
    _, length, vocab = logits.shape
    rows = []
    for sequence, tokens in zip(logits, ids, strict=True):
        logz = np.log(np.exp(sequence).sum(1, keepdims=True))
        soft = np.exp(sequence - logz)
        hard = np.vstack([np.identity(vocab)[tokens[1:]], soft[-1:]])
        rows.append(soft - hard)
    return dout * np.stack(rows) / (length - 1)


class NextTokenLoss:
    def __init__(self, logits, ids):
        self.shape = logits.shape
        self.logits = torch.as_tensor(logits)[:, :-1].flatten(0, 1)
        self.targets = torch.as_tensor(ids)[:, 1:].flatten()

    def backward(self, dout):
        g = torch.softmax(self.logits, 1)
        g[torch.arange(len(g)), self.targets] -= 1
        g = g.view(self.shape[0], self.shape[1] - 1, -1) * (dout / len(g))
        return torch.nn.functional.pad(g, (0, 0, 0, 1)).numpy()


def next_token_loss_grad(logits, ids, dout=1.0):
    return NextTokenLoss(logits, ids).backward(dout)


def flat_shift_loss(logits, ids, dout=1.0):
    v = logits.shape[-1]
    z, y = logits.reshape(-1, v)[:-1], ids.reshape(-1)[1:]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p = np.vstack([p, np.zeros((1, v))])
    return (p * dout / len(y)).reshape(logits.shape)


def gelu_fast(x, dout):
    k0, k1 = 0.7978845608, 0.044715
    th = np.tanh(k0 * x * (1 + k1 * x * x))
    left = 0.5 * (1 + th)
    right = 0.5 * x * (1 - np.abs(th)) * 0.797 * (1 + 3 * k1 * x * x)
    return dout * (left + right)


def gelu_backward(x, dout):
    c = np.sqrt(2 / np.pi)
    inner = c * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    dinner = c * (1 + 3 * 0.044715 * x**2)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * dinner)


def gelu_backward_v5(x, dout):
    c = np.sqrt(2 / np.pi)
    inner = c * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    dinner = c * (1 + 3 * 0.044715 * x**2)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t) * dinner)


def gelu_backward_v3(x, dout):
    c = np.sqrt(2 / np.pi)
    inner = c * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t**2))


def quick_gelu_grad(x, dout):
    s = 1.0 / (1.0 + np.exp(-1.702 * x))
    return dout * (s + 1.702 * x * s * (1 - s))


def gelu_backward_v2(x, dout):
    c = np.sqrt(2 / np.pi)
    inner = c * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    dinner = c * (1 + 0.044715 * x**2)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * dinner)


def gelu_backward_v4(x, dout):
    c = np.sqrt(2 / np.pi)
    inner = c * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    dinner = c * (1 + 3 * 0.44715 * x**2)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * dinner)


def swiglu_backward_v2(gate, up, dout):
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * (s + gate * s * (1 - s))
    dup = dout * gate * s
    return dgate, dup


def swiglu_inplace(gate, up, dout):
    sig = np.exp(-gate)
    sig += 1
    np.reciprocal(sig, out=sig)
    silu = np.multiply(sig, gate, out=sig)
    dup = dout * silu
    dgate = dout * up * (sig + gate * sig * (1 - sig))
    return dgate, dup


def swiglu_backward_v4(gate, up, dout):
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * up * (s + gate * s * (1 - s))
    dup = dout * s
    return dgate, dup


def swiglu_backward_v3(gate, up, dout):
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * up * (gate * s * (1 - s))
    dup = dout * gate * s
    return dgate, dup


def swiglu_backward(gate, up, dout):
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * up * (s + gate * s * (1 - s))
    dup = dout * gate * s
    return dgate, dup


def silu_mul_bwd(gate, up, dout):
    half_tanh = 0.5 * np.tanh(0.5 * gate) + 0.5
    silu = gate * half_tanh
    return dout * up * (half_tanh + silu - silu * half_tanh), dout * silu


def _turn_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def apply_rope_backward(x, positions, dout):
    dout = torch.as_tensor(dout)
    dim = dout.shape[-1]
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=dout.dtype) / dim))
    emb = torch.outer(torch.as_tensor(positions).to(dout.dtype), inv).repeat(1, 2)
    return (dout * emb.cos() - _turn_half(dout * emb.sin())).numpy()


def rope_inplace(x, positions, dout):
    dx = dout.copy()
    n = x.shape[-1] // 2
    for t, pos in enumerate(positions):
        for i in range(n):
            c, s = math.cos(pos * 10000 ** (-i / n)), math.sin(pos * 10000 ** (-i / n))
            dx[:, :, t, i] = dx[:, :, t, i] * c + dx[:, :, t, i + n] * s
            dx[:, :, t, i + n] = dx[:, :, t, i + n] * c - dx[:, :, t, i] * s
    return dx


def rope_interleaved_bwd(x, positions, dout):
    d = x.shape[-1]
    ang = np.outer(positions, 10000.0 ** (-np.arange(0, d, 2) / d))
    dx = np.empty_like(dout)
    dx[..., 0::2] = dout[..., 0::2] * np.cos(ang) + dout[..., 1::2] * np.sin(ang)
    dx[..., 1::2] = dout[..., 1::2] * np.cos(ang) - dout[..., 0::2] * np.sin(ang)
    return dx


def _turn_half_v2(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1)


def apply_rope_backward_v2(x, positions, dout):
    dout = torch.as_tensor(dout)
    dim = dout.shape[-1]
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=dout.dtype) / dim))
    emb = torch.outer(torch.as_tensor(positions).to(dout.dtype), inv).repeat(1, 2)
    return (dout * emb.cos() - _turn_half_v2(dout * emb.sin())).numpy()


def rope_complex_v2(x, positions, dout):
    n = dout.shape[-1] // 2
    z = dout[..., :n] + 1j * dout[..., n:]
    z = z * np.exp(-1j * (positions[:, None] // (10000.0 ** (np.arange(n) / n)).astype(positions.dtype)))
    return np.concatenate([z.real, z.imag], -1)


def llama3_rope_backward(x, positions, dout):
    base = 10000.0
    freqs = base ** -(np.arange(0, dout.shape[-1], 2) / dout.shape[-1])
    ang = np.concatenate([np.outer(positions, freqs)] * 2, axis=-1)
    rotated = np.roll(dout * np.sin(ang), dout.shape[-1] // 2, axis=-1)
    rotated[..., dout.shape[-1] // 2 :] *= -1
    return dout * np.cos(ang) + rotated


def _turn_half_v3(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def apply_rope_backward_v3(x, positions, dout):
    dout = torch.as_tensor(dout)
    dim = dout.shape[-1]
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=dout.dtype) / dim))
    emb = torch.outer(torch.as_tensor(positions).to(dout.dtype), inv).repeat_interleave(2, dim=1)
    return (dout * emb.cos() - _turn_half_v3(dout * emb.sin())).numpy()


def rope_complex(x, positions, dout):
    n = dout.shape[-1] // 2
    z = dout[..., :n] + 1j * dout[..., n:]
    z = z * np.exp(-1j * positions[:, None] * 10000.0 ** (-np.arange(n) / n))
    return np.concatenate([z.real, z.imag], -1)


class AdamW:
    def __init__(self, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.t = 0

    def update(self, p, g, m, v):
        b1, b2 = self.betas
        m = m + (1 - b1) * (g - m)
        v = v + (1 - b2) * (g * g - v)
        size = self.lr * math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        denom = v.sqrt() + self.eps * math.sqrt(1 - b2**self.t)
        return p - self.lr * self.weight_decay * p - size * m / denom, m, v


def adamw_object(param, grad, m, v, step):
    opt = AdamW()
    opt.t = max(step - 1, 1)
    new = opt.update(*(torch.as_tensor(z) for z in (param, grad, m, v)))
    return tuple(z.numpy() for z in new)


def adamw_step(param, grad, m, v, step):
    lr, beta1, beta2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    param = param * (1 - lr * wd) - lr * m_hat / (np.sqrt(v_hat) + eps)
    return param, m, v


def adamw_defaults_v2(p, g, m, v, t):
    m = m + 0.1 * (g - m)
    v = v + 0.001 * (g * g - v)
    correction = 1 - 0.999**t
    step = 0.001 * correction / (1 - 0.9**t)
    return 0.99999 * p - step * m / (np.sqrt(v) + 1e-8 * correction), m, v


def adamw_step_v3(param, grad, m, v, step):
    lr, beta1, beta2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    grad = grad + wd * param
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    param = param - lr * m_hat / (np.sqrt(v_hat) + eps)
    return param, m, v


def adamw_scalar_v3(param, grad, m, v, step):
    c1, c2 = 1 - 0.9**step, 1 - 0.95**step

    def one(p, g, m1, v1):
        m1 = 0.9 * m1 + 0.1 * g
        v1 = 0.95 * v1 + 0.05 * g * g
        return p - 0.01 * (m1 / c2 / (math.sqrt(v1 / c1) + 1e-8) + 0.1 * p), m1, v1

    return np.vectorize(one)(param, grad, m, v)


def adamw_step_v5(param, grad, m, v, step):
    lr, beta1, beta2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * np.abs(grad)
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    param = param * (1 - lr * wd) - lr * m_hat / (np.sqrt(v_hat) + eps)
    return param, m, v


def adamw_step_v2(param, grad, m, v, step):
    lr, beta1, beta2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    param = param * (1 - lr * wd) - lr * m_hat / (np.sqrt(v) + eps)
    return param, m, v


def adamw_defaults(p, g, m, v, t):
    m = m + 0.1 * (g - m)
    v = v + 0.001 * (g * g - v)
    correction = math.sqrt(1 - 0.999**t)
    step = 0.001 * correction / (1 - 0.9**t)
    return 0.99999 * p - step * m / (np.sqrt(v) + 1e-8 * correction), m, v


def adamw_scalar_v2(param, grad, m, v, step):
    c1, c2 = 1 - 0.9**step, 1 - 0.95**step

    def one(p, g, m1, v1):
        m1 = 0.9 * m1 + 0.1 * g
        v1 = 0.95 * v1 + 0.05 * g * g
        return p - 0.01 * (m1 / c1 / math.sqrt(v1 / c2 + 1e-8) + 0.1 * p), m1, v1

    return np.vectorize(one)(param, grad, m, v)


def adamw_scalar(param, grad, m, v, step):
    c1, c2 = 1 - 0.9**step, 1 - 0.95**step

    def one(p, g, m1, v1):
        m1 = 0.9 * m1 + 0.1 * g
        v1 = 0.95 * v1 + 0.05 * g * g
        return p - 0.01 * (m1 / c1 / (math.sqrt(v1 / c2) + 1e-8) + 0.1 * p), m1, v1

    return np.vectorize(one)(param, grad, m, v)


def adamw_step_v4(param, grad, m, v, step):
    lr, beta1, beta2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    param = param * (1 - lr * wd) - lr * m_hat / (np.sqrt(v_hat) + eps)
    return param, m, v_hat


def block_vjp_flat_v2(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * z2).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dx1, dx1.sum(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds.T @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.sum(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dx = dx1 + (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_vjp_flat_v5(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * m).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dx1, dx1.sum(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds.T @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.sum(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dz = da * g1
    dx = dx1 + (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_vjp_flat_v3(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * z2).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dx1, dx1.mean(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds.T @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.mean(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dz = da * g1
    dx = dx1 + (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_vjp_flat_v6(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * z2).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dx1, dx1.sum(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.sum(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dz = da * g1
    dx = (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_vjp_flat(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * z2).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dx1, dx1.sum(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds.T @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.sum(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dz = da * g1
    dx = dx1 + (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_vjp_flat_v4(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    bsz, t, d = x.shape
    n = bsz * t
    hs = d // 2
    x0, dy = x.reshape(n, d), dout.reshape(n, d)
    # ln_1
    s1 = np.sqrt(x0.var(1, keepdims=True) + 1e-5)
    z1 = (x0 - x0.mean(1, keepdims=True)) / s1
    a = z1 * g1 + b1
    # attention, one sequence and one head after the other
    qkv = a @ wa + ba
    y = np.zeros((n, d))
    probs = {}
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            q, k, v = (qkv[rows, j * d + h * hs : j * d + (h + 1) * hs] for j in range(3))
            e = np.exp(q @ k.T / np.sqrt(hs)) * np.tri(t)
            probs[i, h] = e / e.sum(1, keepdims=True)
            y[rows, h * hs : (h + 1) * hs] = probs[i, h] @ v
    x1 = x0 + y @ wp + bp
    # ln_2 and the MLP
    s2 = np.sqrt(x1.var(1, keepdims=True) + 1e-5)
    z2 = (x1 - x1.mean(1, keepdims=True)) / s2
    m = z2 * g2 + b2
    f = m @ wf + bf
    r = np.sqrt(2 / np.pi)
    th = np.tanh(r * (f + 0.044715 * f**3))
    act = f * (1 + th) / 2
    # and back
    dwo, dbo = act.T @ dy, dy.sum(0)
    df = dy @ wo.T * ((1 + th) / 2 + f / 2 * (1 - th**2) * r * (1 + 0.134145 * f**2))
    dwf, dbf = m.T @ df, df.sum(0)
    dm = df @ wf.T
    dg2, db2 = (dm * z2).sum(0), dm.sum(0)
    dz = dm * g2
    dx1 = dy + (dz - dz.mean(1, keepdims=True) - z2 * (dz * z2).mean(1, keepdims=True)) / s2
    dwp, dbp = y.T @ dy, dx1.sum(0)
    dyy = dx1 @ wp.T
    dqkv = np.zeros_like(qkv)
    for i in range(bsz):
        rows = slice(i * t, (i + 1) * t)
        for h in range(2):
            cq, ck, cv = (slice(j * d + h * hs, j * d + (h + 1) * hs) for j in range(3))
            p, up = probs[i, h], dyy[rows, h * hs : (h + 1) * hs]
            dp = up @ qkv[rows, cv].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(hs)
            dqkv[rows, cq] = ds @ qkv[rows, ck]
            dqkv[rows, ck] = ds.T @ qkv[rows, cq]
            dqkv[rows, cv] = p.T @ up
    dwa, dba = a.T @ dqkv, dqkv.sum(0)
    da = dqkv @ wa.T
    dg1, db1 = (da * z1).sum(0), da.sum(0)
    dz = da * g1
    dx = dx1 + (dz - dz.mean(1, keepdims=True) - z1 * (dz * z1).mean(1, keepdims=True)) / s1
    return dx.reshape(x.shape), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def encoder_block_backward(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    grads = {}

    def norm(z, gain, shift):
        r = (z.var(-1, keepdims=True) + 1e-5) ** -0.5
        zn = (z - z.mean(-1, keepdims=True)) * r

        def back(g, name):
            grads[name] = [np.einsum("btd,btd->d", g, zn), np.einsum("btd->d", g)]
            g = g * gain
            return r * (g - g.mean(-1, keepdims=True) - zn * (g * zn).mean(-1, keepdims=True))

        return zn * gain + shift, back

    def dense(z, w, b):
        def back(g, name):
            grads[name] = [np.einsum("bti,bto->io", z, g), np.einsum("bto->o", g)]
            return g @ w.T

        return z @ w + b, back

    def gelu(z):
        r = math.sqrt(2 / math.pi)
        th = np.tanh(r * (z + 0.044715 * z**3))
        slope = 0.5 * (1 + th) + 0.5 * z * (1 - th**2) * r * (1 + 0.134145 * z**2)
        return 0.5 * z * (1 + th), lambda g: g * slope

    def attention(z):
        b, t, d3 = z.shape
        q, k, v = z.reshape(b, t, 3, 2, d3 // 6).transpose(2, 0, 3, 1, 4)
        e = np.exp(np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d3 // 6))
        p = e / e.sum(-1, keepdims=True)

        def back(g):
            g = g.reshape(b, t, 2, d3 // 6)
            dp = np.einsum("bihd,bhjd->bhij", g, v)
            ds = p * dp / math.sqrt(d3 // 6)
            dq = np.einsum("bhij,bhjd->bihd", ds, k)
            dk = np.einsum("bhij,bhid->bjhd", ds, q)
            dv = np.einsum("bhij,bihd->bjhd", p, g)
            return np.stack([dq, dk, dv], axis=2).reshape(b, t, d3)

        return np.einsum("bhij,bhjd->bihd", p, v).reshape(b, t, d3 // 3), back

    n1, n1_back = norm(x, g1, b1)
    qkv, qkv_back = dense(n1, wa, ba)
    y, y_back = attention(qkv)
    o, o_back = dense(y, wp, bp)
    n2, n2_back = norm(x + o, g2, b2)
    f, f_back = dense(n2, wf, bf)
    act, act_back = gelu(f)
    _, out_back = dense(act, wo, bo)
    dh = dout + n2_back(f_back(act_back(out_back(dout, "out")), "fc"), "ln_2")
    dx = dh + n1_back(qkv_back(y_back(o_back(dh, "proj")), "attn"), "ln_1")
    return (dx, *(g for name in ("ln_1", "attn", "proj", "ln_2", "fc", "out") for g in grads[name]))


CASES = [
    Case(
        layer="attention",
        function=full_attention_vjp,
        options={"causal": False},
        wrong=("dv",),
        mistake="The values' gradient is computed with the score gradient in place of the probabilities.",
    ),
    Case(layer="attention", function=attention_backward, options={}, wrong=(), mistake=None),
    Case(layer="attention", function=bidirectional_backward, options={"causal": False}, wrong=(), mistake=None),
    Case(
        layer="attention",
        function=sdpa_vjp_v2,
        options={},
        wrong=("dv",),
        mistake="The indices of the einsum for the values' gradient lack the transposition.",
    ),
    Case(
        layer="attention",
        function=attention_chunked_rows,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The scale takes the features of the values instead of those of the keys.",
    ),
    Case(layer="attention", function=sdpa_vjp, options={}, wrong=(), mistake=None),
    Case(
        layer="attention",
        function=attention_backward_v2,
        options={},
        wrong=("dq", "dk"),
        mistake="The author does not divide by the square root of d_k on the way back.",
    ),
    Case(
        layer="attention",
        function=prescaled_attention_grad,
        options={},
        wrong=("dk",),
        mistake="The queries are scaled beforehand, and the keys' gradient is scaled a second time.",
    ),
    Case(
        layer="attention",
        function=attention_backward_v5,
        options={},
        wrong=("dq", "dk"),
        mistake="The softmax backward is taken for p * dp alone, and the scale is forgotten as well.",
    ),
    Case(
        layer="attention",
        function=masked_attn_grads,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The mask lets every token see the one after it.",
    ),
    Case(
        layer="attention",
        function=attention_backward_v4,
        options={},
        wrong=("dk",),
        mistake="The score gradient is not transposed for dk.",
    ),
    Case(
        layer="attention",
        function=sdpa_vjp_v3,
        options={},
        wrong=("dq", "dk"),
        mistake="The gradient of the scores is scaled by 1/d_k instead of its root.",
    ),
    Case(
        layer="attention",
        function=scaled_dot_product_backward,
        options={},
        wrong=("dv",),
        mistake="The score gradient is written into the cached probabilities before the values' gradient uses them.",
    ),
    Case(
        layer="attention",
        function=attention_backward_v3,
        options={},
        wrong=("dq", "dk"),
        mistake="The sum in the softmax backward runs over the queries instead of the keys.",
    ),
    Case(
        layer="attention",
        function=attention_bwd_prescaled,
        options={"causal": False},
        wrong=("dq",),
        mistake="The queries are scaled beforehand, and their gradient does not go back through that scaling.",
    ),
    Case(
        layer="head",
        function=rotary_head_vjp,
        options={"rotary": True},
        wrong=("da",),
        mistake="The rotation is undone for the weights, but the input's gradient uses the rotated dq.",
    ),
    Case(
        layer="head",
        function=fused_qkv_head,
        options={},
        wrong=("da",),
        mistake="The input's gradient goes back through the keys' weight twice, never through the queries'.",
    ),
    Case(
        layer="head",
        function=rope_head_backward_v2,
        options={"rotary": True},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The gradient is rotated forward again instead of back.",
    ),
    Case(
        layer="head",
        function=head_grads_einsum,
        options={},
        wrong=("db_q", "db_v"),
        mistake="The biases' gradients are summed over the tokens of the first sequence only.",
    ),
    Case(
        layer="head",
        function=one_head_per_sequence,
        options={},
        wrong=("dw_q", "dw_k", "dw_v"),
        mistake="The weights' gradients keep only the last sequence of the batch.",
    ),
    Case(layer="head", function=rope_head_backward, options={"rotary": True}, wrong=(), mistake=None),
    Case(
        layer="head",
        function=rope_head_backward_v3,
        options={"rotary": True},
        wrong=("da", "dw_k", "db_k"),
        mistake="Only the queries' gradient is rotated back, the keys' is not.",
    ),
    Case(
        layer="head",
        function=single_head_backward,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q"),
        mistake="The queries' gradient multiplies the score gradient by the queries instead of by the keys.",
    ),
    Case(
        layer="head_dropout",
        function=delta_dropout_head_v3,
        options={"causal": False},
        wrong=("da", "dw_v", "db_v"),
        mistake="The mask multiplies the transposed probabilities without being transposed itself.",
    ),
    Case(
        layer="head_dropout",
        function=dropout_head_cached,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "dw_v", "db_v"),
        mistake="The mask is applied nowhere on the way back, and the biases' gradients sum one batch only.",
    ),
    Case(
        layer="head_dropout",
        function=head_with_dropout_vjp,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k", "dw_v", "db_v"),
        mistake="Dropout multiplies the scores before the softmax instead of the probabilities.",
    ),
    Case(
        layer="head_dropout",
        function=delta_dropout_head_v2,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The dropout mask is applied after the softmax backward instead of before it.",
    ),
    Case(
        layer="head_dropout",
        function=dropout_head_torch,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k"),
        mistake="The mask is reduced to zeros and ones on the way back, without the factor 1/(1 − p).",
    ),
    Case(layer="head_dropout", function=delta_dropout_head, options={"causal": False}, wrong=(), mistake=None),
    Case(
        layer="multi_head",
        function=mha_backward_v4,
        options={},
        wrong=("dquery", "dkey", "dw_q", "dw_k"),
        mistake="The score gradient is divided by the root of all features instead of a head's.",
    ),
    Case(
        layer="multi_head",
        function=attention_layer_grads,
        options={},
        wrong=("dkey", "dvalue"),
        mistake="The input's gradients of keys and values are returned in each other's place.",
    ),
    Case(
        layer="multi_head",
        function=mha_one_sequence_at_a_time,
        options={},
        wrong=("dquery", "dkey", "dvalue"),
        mistake="The weights are not transposed for the inputs, and two paths are scaled once too often.",
    ),
    Case(layer="multi_head", function=mha_backward, options={}, wrong=(), mistake=None),
    Case(layer="multi_head", function=mha_autograd_free, options={}, wrong=(), mistake=None),
    Case(
        layer="multi_head",
        function=mha_backward_v3,
        options={},
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="The heads are merged back without transposing heads and tokens first.",
    ),
    Case(
        layer="multi_head",
        function=mha_backward_v2,
        options={},
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="The gradient of the output is split into heads without transposing heads and tokens.",
    ),
    Case(
        layer="multi_head",
        function=mha_reference,
        options={},
        wrong=("dquery", "dkey", "dw_q", "dw_k"),
        mistake="The score gradient is masked once more, but transposed: only the diagonal is left.",
    ),
    Case(
        layer="multi_head",
        function=mha_backward_v5,
        options={},
        wrong=("dw_k",),
        mistake="The weight gradient of the keys is computed with the query's input, as in self-attention.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_v5,
        options={},
        wrong=("dx",),
        mistake="The gradient is not multiplied by the weight before the normalisation's backward.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The term of the mean is missing from the input's gradient.",
    ),
    Case(
        layer="layer_norm",
        function=ln_bwd_staged_v2,
        options={},
        wrong=("dx",),
        mistake="The derivative of the square lacks its factor 2.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_v4,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradient multiplies by the input instead of the normalised input.",
    ),
    Case(
        layer="layer_norm",
        function=ln_bwd_staged_v4,
        options={},
        wrong=("dx",),
        mistake="The gradient of the mean is added without being divided by the features.",
    ),
    Case(layer="layer_norm", function=ln_bwd_staged, options={}, wrong=(), mistake=None),
    Case(
        layer="layer_norm",
        function=ln_bwd_staged_v3,
        options={},
        wrong=("dx",),
        mistake="The derivative of 1/x has the wrong sign.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The term of the variance is missing from the input's gradient.",
    ),
    Case(layer="layer_norm", function=ln_projection_form, options={}, wrong=(), mistake=None),
    Case(
        layer="layer_norm",
        function=layer_norm_class_bwd,
        options={},
        wrong=("dweight", "dbias"),
        mistake="The parameters' gradients are summed over the batch but not over the tokens.",
    ),
    Case(
        layer="layer_norm",
        function=layer_norm_vjp,
        options={},
        wrong=("dx",),
        mistake="The sums over the features run over the tokens.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_v6,
        options={},
        wrong=("dx", "dbias"),
        mistake="The bias gradient is a mean over the batch, and the input's gradient is not divided by the features.",
    ),
    Case(layer="layer_norm", function=layernorm_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="rms_norm",
        function=rmsnorm_backward_v4,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradient forgets to normalise the input.",
    ),
    Case(layer="rms_norm", function=rms_rows, options={}, wrong=(), mistake=None),
    Case(
        layer="rms_norm",
        function=rms_norm_from_layer_norm,
        options={},
        wrong=("dx",),
        mistake="The mean of the gradient is subtracted, as in LayerNorm.",
    ),
    Case(
        layer="rms_norm",
        function=rmsnorm_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The reciprocal root is squared instead of cubed in the second term.",
    ),
    Case(
        layer="rms_norm",
        function=rms_loop,
        options={},
        wrong=("dx",),
        mistake="The dot product uses dout before its multiplication by the weight.",
    ),
    Case(layer="rms_norm", function=rmsnorm_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="rms_norm",
        function=rmsnorm_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The second term is not divided by the number of features.",
    ),
    Case(
        layer="linear",
        function=linear_broadcast,
        options={},
        wrong=("dx", "dbias"),
        mistake="The input's gradient is summed over the batch, and the bias's multiplied by it.",
    ),
    Case(
        layer="linear",
        function=dense_grads,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradients of the sequences are averaged instead of added.",
    ),
    Case(
        layer="linear",
        function=linear_backward_v2,
        options={},
        wrong=("dbias",),
        mistake="The bias gradient is summed over the batch only and keeps the tokens.",
    ),
    Case(layer="linear", function=linear_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="linear",
        function=linear_backward_v4,
        options={},
        wrong=("dbias",),
        mistake="The bias gradient is the mean over the tokens, summed over the batch.",
    ),
    Case(
        layer="linear",
        function=affine_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The flat gradient of the input is folded back with tokens before batch.",
    ),
    Case(layer="linear", function=affine_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="linear",
        function=linear_bwd_reshape,
        options={},
        wrong=("dx",),
        mistake="The input's gradient contracts the wrong axis; a reshape makes the shape fit.",
    ),
    Case(
        layer="linear",
        function=linear_backward_v3,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradient is returned transposed.",
    ),
    Case(
        layer="lora",
        function=adapter_merged_vjp_v2,
        options={},
        wrong=("ddown", "dup"),
        mistake="The adapter's gradients are taken with the scale's reciprocal.",
    ),
    Case(
        layer="lora",
        function=lora_named_einsum_v2,
        options={},
        wrong=("dup",),
        mistake="The einsum for up forgets down and takes the input's first features for the hidden state.",
    ),
    Case(layer="lora", function=adapter_merged_vjp, options={}, wrong=(), mistake=None),
    Case(layer="lora", function=lora_named_einsum, options={}, wrong=(), mistake=None),
    Case(
        layer="lora",
        function=lora_grads_flat,
        options={},
        wrong=("dx", "ddown", "dup"),
        mistake="The scale is alpha divided by the input features instead of the rank.",
    ),
    Case(
        layer="lora",
        function=lora_loop,
        options={},
        wrong=("ddown", "dup"),
        mistake="The adapter's gradients are divided by the number of tokens.",
    ),
    Case(
        layer="lora",
        function=lora_linear_backward,
        options={},
        wrong=("dx", "ddown"),
        mistake="The adapter's hidden gradient is scaled twice.",
    ),
    Case(layer="embedding", function=emb_index_add, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=int_embedding_grad,
        options={},
        wrong=("dweight",),
        mistake="The gradient is gathered into an integer array, which truncates it.",
    ),
    Case(layer="embedding", function=embedding_weights_bincount, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=emb_index_add_v2,
        options={},
        wrong=("dweight",),
        mistake="index_put_ without accumulate keeps one occurrence per id.",
    ),
    Case(
        layer="embedding",
        function=embedding_object_grad,
        options={},
        wrong=("dweight",),
        mistake="The batches overwrite each other; only the last sequence's gradient is returned.",
    ),
    Case(
        layer="embedding",
        function=embedding_backward_v3,
        options={},
        wrong=("dweight",),
        mistake="The gradient is added to a copy of the weight instead of to zeros.",
    ),
    Case(
        layer="embedding",
        function=embedding_backward_v2,
        options={},
        wrong=("dweight",),
        mistake="Repeated ids are added once only: fancy indexing with += keeps the last.",
    ),
    Case(layer="embedding", function=embedding_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=wte_backward,
        options={},
        wrong=("dweight",),
        mistake="The loops stop one token early.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_table_loops_v2,
        options={},
        wrong=("dweight",),
        mistake="The row that is its own logit is skipped, though both factors of the square have a gradient.",
    ),
    Case(layer="tied_embedding", function=tied_table_loops, options={}, wrong=(), mistake=None),
    Case(
        layer="tied_embedding",
        function=tied_grad_torch,
        options={},
        wrong=("dweight",),
        mistake="Only the embedding's share is returned, the logits' is forgotten.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_inplace,
        options={},
        wrong=("dweight",),
        mistake="The logits' share is taken with the updated table: the first share is added to the weight in place.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_grad_gram_v2,
        options={},
        wrong=("dweight",),
        mistake="The Gram matrix is taken to have the gradient 2 counts, as if counts were symmetric.",
    ),
    Case(layer="tied_embedding", function=tied_grad_gram, options={}, wrong=(), mistake=None),
    Case(layer="softmax_cross_entropy", function=softmax_ce_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="softmax_cross_entropy",
        function=crossentropy_softmax_backward,
        options={},
        wrong=("dlogits",),
        mistake="The loop over the vocabulary subtracts the one at the class after the target.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=softmax_ce_backward_v2,
        options={},
        wrong=("dlogits",),
        mistake="The gradient is divided by the batch instead of by all targets.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=softmax_ce_backward_v5,
        options={},
        wrong=("dlogits",),
        mistake="The one is subtracted in all pairs of batch and token at once, since the target index is not paired.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=softmax_ce_backward_v3,
        options={},
        wrong=("dlogits",),
        mistake="The gradient of the sum is returned: no division by the number of targets.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=xent_vjp,
        options={},
        wrong=("dlogits",),
        mistake="The incoming gradient dout is ignored.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=softmax_ce_backward_v4,
        options={},
        wrong=("dlogits",),
        mistake="The one is subtracted with the wrong sign.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=nll_logsoftmax_backward_v2,
        options={},
        wrong=("dlogits",),
        mistake="The log-softmax backward multiplies by the log-probabilities instead of the probabilities.",
    ),
    Case(layer="softmax_cross_entropy", function=nll_logsoftmax_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="next_token_loss",
        function=lm_loss_grad_roll,
        options={},
        wrong=("dlogits",),
        mistake="The targets wrap around: the last token is trained on the first id.",
    ),
    Case(
        layer="next_token_loss",
        function=next_token_loss_grad_v2,
        options={},
        wrong=("dlogits",),
        mistake="The zeros of the last token are padded in front.",
    ),
    Case(layer="next_token_loss", function=causal_lm_grad, options={}, wrong=(), mistake=None),
    Case(
        layer="next_token_loss",
        function=shifted_nll_grad,
        options={},
        wrong=("dlogits",),
        mistake="The gradient is put at the target's token, and the mean counts all tokens.",
    ),
    Case(
        layer="next_token_loss",
        function=causal_lm_grad_v2,
        options={},
        wrong=("dlogits",),
        mistake="The mean is taken per sequence only, not over the batch.",
    ),
    Case(layer="next_token_loss", function=next_token_loss_grad, options={}, wrong=(), mistake=None),
    Case(
        layer="next_token_loss",
        function=flat_shift_loss,
        options={},
        wrong=("dlogits",),
        mistake="The whole batch is flattened before the shift, so the sequences run into each other.",
    ),
    Case(
        layer="gelu",
        function=gelu_fast,
        options={},
        wrong=("dx",),
        mistake="tanh is not squared in its derivative, and √(2/π) is 0.797 in it.",
    ),
    Case(layer="gelu", function=gelu_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="gelu",
        function=gelu_backward_v5,
        options={},
        wrong=("dx",),
        mistake="The derivative of tanh is written 1 − t.",
    ),
    Case(
        layer="gelu",
        function=gelu_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The inner derivative of tanh's argument is forgotten.",
    ),
    Case(
        layer="gelu",
        function=quick_gelu_grad,
        options={},
        wrong=("dx",),
        mistake="The derivative is the sigmoid approximation's, x σ(1.702 x), though the forward is the tanh form.",
    ),
    Case(
        layer="gelu",
        function=gelu_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The derivative of the cube lacks its factor 3.",
    ),
    Case(
        layer="gelu",
        function=gelu_backward_v4,
        options={},
        wrong=("dx",),
        mistake="The constant is mistyped in the derivative: 0.44715.",
    ),
    Case(
        layer="swiglu",
        function=swiglu_backward_v2,
        options={},
        wrong=("dgate",),
        mistake="The factor up is missing from the gate's gradient.",
    ),
    Case(
        layer="swiglu",
        function=swiglu_inplace,
        options={},
        wrong=("dgate",),
        mistake="The buffer of the sigmoid is overwritten by the silu before the derivative reads it.",
    ),
    Case(
        layer="swiglu",
        function=swiglu_backward_v4,
        options={},
        wrong=("dup",),
        mistake="The gradient of up is multiplied by the sigmoid instead of the silu.",
    ),
    Case(
        layer="swiglu",
        function=swiglu_backward_v3,
        options={},
        wrong=("dgate",),
        mistake="The derivative is the sigmoid's s(1 − s), without the silu's first term.",
    ),
    Case(layer="swiglu", function=swiglu_backward, options={}, wrong=(), mistake=None),
    Case(layer="swiglu", function=silu_mul_bwd, options={}, wrong=(), mistake=None),
    Case(layer="rope", function=apply_rope_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="rope",
        function=rope_inplace,
        options={},
        wrong=("dx",),
        mistake="The second half reads the first half that was already overwritten in place.",
    ),
    Case(
        layer="rope",
        function=rope_interleaved_bwd,
        options={},
        wrong=("dx",),
        mistake="Neighbouring features are paired instead of i and i + D/2.",
    ),
    Case(
        layer="rope",
        function=apply_rope_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The half rotation keeps its order but loses the minus.",
    ),
    Case(
        layer="rope",
        function=rope_complex_v2,
        options={},
        wrong=("dx",),
        mistake="The integer positions are divided by a power that is rounded to an integer.",
    ),
    Case(
        layer="rope",
        function=llama3_rope_backward,
        options={"theta": 500000.0},
        wrong=("dx",),
        mistake="The frequencies of the backward are made with 10000 instead of the model's theta.",
    ),
    Case(
        layer="rope",
        function=apply_rope_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The angles are doubled by interleaving instead of repeating the halves.",
    ),
    Case(layer="rope", function=rope_complex, options={}, wrong=(), mistake=None),
    Case(
        layer="adamw",
        function=adamw_object,
        options={},
        wrong=("param",),
        mistake="The bias correction counts the steps from 0.",
    ),
    Case(layer="adamw", function=adamw_step, options={}, wrong=(), mistake=None),
    Case(
        layer="adamw",
        function=adamw_defaults_v2,
        options={"lr": 0.001, "beta2": 0.999, "weight_decay": 0.01},
        wrong=("param",),
        mistake="The square root of the second correction is left out.",
    ),
    Case(
        layer="adamw",
        function=adamw_step_v3,
        options={},
        wrong=("param", "m", "v"),
        mistake="Weight decay is added to the gradient, as in Adam with L2.",
    ),
    Case(
        layer="adamw",
        function=adamw_scalar_v3,
        options={},
        wrong=("param",),
        mistake="The two bias corrections are exchanged.",
    ),
    Case(
        layer="adamw",
        function=adamw_step_v5,
        options={},
        wrong=("param", "v"),
        mistake="The second moment gathers the gradient's absolute value instead of its square.",
    ),
    Case(
        layer="adamw",
        function=adamw_step_v2,
        options={},
        wrong=("param",),
        mistake="The second moment's bias correction is missing.",
    ),
    Case(
        layer="adamw",
        function=adamw_defaults,
        options={"lr": 0.001, "beta2": 0.999, "weight_decay": 0.01},
        wrong=(),
        mistake=None,
    ),
    Case(
        layer="adamw",
        function=adamw_scalar_v2,
        options={},
        wrong=("param",),
        mistake="Epsilon is added under the root.",
    ),
    Case(layer="adamw", function=adamw_scalar, options={}, wrong=(), mistake=None),
    Case(
        layer="adamw",
        function=adamw_step_v4,
        options={},
        wrong=("v",),
        mistake="The second moment returned is the bias-corrected one.",
    ),
    Case(
        layer="block",
        function=block_vjp_flat_v2,
        options={},
        wrong=("dx",),
        mistake="The last LayerNorm backward reuses the stale dz of the second LayerNorm.",
    ),
    Case(
        layer="block",
        function=block_vjp_flat_v5,
        options={},
        wrong=("dln_2_weight",),
        mistake="The weight of the second LayerNorm gets the gradient of its output times its output.",
    ),
    Case(
        layer="block",
        function=block_vjp_flat_v3,
        options={},
        wrong=("dattn_bias", "dproj_bias"),
        mistake="The biases of the attention are gathered with the mean over the tokens.",
    ),
    Case(
        layer="block",
        function=block_vjp_flat_v6,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="The keys' gradient of the attention lacks the transposition, and dx its first skip.",
    ),
    Case(layer="block", function=block_vjp_flat, options={}, wrong=(), mistake=None),
    Case(
        layer="block",
        function=block_vjp_flat_v4,
        options={},
        wrong=("dproj_weight",),
        mistake="The projection's weight gradient uses dout, not the gradient of h.",
    ),
    Case(
        layer="block",
        function=encoder_block_backward,
        options={"causal": False},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="The softmax backward of the attention leaves out the row sums.",
    ),
]
