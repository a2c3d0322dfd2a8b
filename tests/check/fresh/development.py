"""Backward passes as many people would write them, right and wrong: the first half of the corpus."""

import math

import numpy as np
import torch
from case import Case


def attention_backward_c_v3(q, k, v, dout):
    nb, nh, nt, hs = q.shape
    hv = v.shape[3]
    scale = 1.0 / math.sqrt(hs)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(nb):
        for h in range(nh):
            for t in range(nt):
                att = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hs):
                        att[t2] += q[b, h, t, i] * k[b, h, t2, i]
                    att[t2] *= scale
                top = max(att)
                att = [math.exp(a - top) for a in att]
                total = sum(att)
                att = [a / total for a in att]
                datt = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hv):
                        datt[t2] += v[b, h, t2, i] * dout[b, h, t, i]
                        dv[b, h, t2, i] = att[t2] * dout[b, h, t, i]
                dpre = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for t3 in range(t + 1):
                        indicator = 1.0 if t2 == t3 else 0.0
                        dpre[t3] += att[t2] * (indicator - att[t3]) * datt[t2]
                for t2 in range(t + 1):
                    for i in range(hs):
                        dq[b, h, t, i] += k[b, h, t2, i] * dpre[t2] * scale
                        dk[b, h, t2, i] += q[b, h, t, i] * dpre[t2] * scale
    return dq, dk, dv


def bmm_attention_backward(q, k, v, dout):
    b, h, t, d = q.shape
    q3, k3 = q.reshape(b * h, t, d), k.reshape(b * h, t, d)
    v3, g3 = v.reshape(b * h, t, -1), dout.reshape(b * h, t, -1)
    w = np.matmul(q3, k3.transpose(0, 2, 1)) / np.sqrt(d)
    w = np.where(np.tril(np.ones((t, t)))[None] == 0, -1e9, w)
    w = np.exp(w - w.max(2, keepdims=True))
    w /= w.sum(2, keepdims=True)
    gw = np.matmul(g3, v3.transpose(0, 2, 1))
    gw = (gw - (gw * w).sum(2, keepdims=True)) * w / np.sqrt(d)
    dq = np.matmul(gw, k3).reshape(b, h, t, d)
    dk = np.matmul(gw.transpose(0, 2, 1), q3).reshape(h, b, t, d).transpose(1, 0, 2, 3)
    dv = np.matmul(w.transpose(0, 2, 1), g3).reshape(b, h, t, -1)
    return dq, dk, dv


def flash_bwd_v3(q, k, v, dout):
    block = 2
    b, h, n, d = q.shape
    scale = 1.0 / np.sqrt(d)
    # forward, one tile of keys after the other
    o = np.zeros(v.shape)
    lse = np.zeros((b, h, n, 1))
    for i in range(0, n, block):
        qi = q[:, :, i : i + block]
        rows = np.arange(i, min(i + block, n))[:, None]
        m = np.full((*qi.shape[:3], 1), -np.inf)
        total = np.zeros_like(m)
        acc = np.zeros((*qi.shape[:3], v.shape[-1]))
        for j in range(0, i + block, block):
            cols = np.arange(j, min(j + block, n))[None, :]
            s = np.where(rows >= cols, qi @ k[:, :, j : j + block].swapaxes(2, 3) * scale, -np.inf)
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            p = np.exp(s - m_new)
            fix = np.exp(m - m_new)
            total = total * fix + p.sum(-1, keepdims=True)
            acc = acc * fix + p @ v[:, :, j : j + block]
            m = m_new
        o[:, :, i : i + block] = acc / total
        lse[:, :, i : i + block] = m + np.log(total)
    # backward
    delta = (dout * o).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for j in range(0, n, block):
        kj, vj = k[:, :, j : j + block], v[:, :, j : j + block]
        cols = np.arange(j, min(j + block, n))[None, :]
        for i in range(j, n, block):
            tile = slice(i, i + block)
            rows = np.arange(i, min(i + block, n))[:, None]
            s = np.where(rows >= cols, q[:, :, tile] @ kj.swapaxes(2, 3) * scale, -np.inf)
            p = np.exp(s - lse[:, :, tile])
            dv[:, :, j : j + block] += p.swapaxes(2, 3) @ dout[:, :, tile]
            ds = p * (dout[:, :, tile] @ vj.swapaxes(2, 3) - delta[:, :, tile]) * scale
            dq[:, :, tile] = ds @ kj
            dk[:, :, j : j + block] += ds.swapaxes(2, 3) @ q[:, :, tile]
    return dq, dk, dv


def flash_bwd(q, k, v, dout):
    block = 2
    b, h, n, d = q.shape
    scale = 1.0 / np.sqrt(d)
    # forward, one tile of keys after the other
    o = np.zeros(v.shape)
    lse = np.zeros((b, h, n, 1))
    for i in range(0, n, block):
        qi = q[:, :, i : i + block]
        rows = np.arange(i, min(i + block, n))[:, None]
        m = np.full((*qi.shape[:3], 1), -np.inf)
        total = np.zeros_like(m)
        acc = np.zeros((*qi.shape[:3], v.shape[-1]))
        for j in range(0, i + block, block):
            cols = np.arange(j, min(j + block, n))[None, :]
            s = np.where(rows >= cols, qi @ k[:, :, j : j + block].swapaxes(2, 3) * scale, -np.inf)
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            p = np.exp(s - m_new)
            fix = np.exp(m - m_new)
            total = total * fix + p.sum(-1, keepdims=True)
            acc = acc * fix + p @ v[:, :, j : j + block]
            m = m_new
        o[:, :, i : i + block] = acc / total
        lse[:, :, i : i + block] = m + np.log(total)
    # backward
    delta = (dout * o).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for j in range(0, n, block):
        kj, vj = k[:, :, j : j + block], v[:, :, j : j + block]
        cols = np.arange(j, min(j + block, n))[None, :]
        for i in range(j, n, block):
            tile = slice(i, i + block)
            rows = np.arange(i, min(i + block, n))[:, None]
            s = np.where(rows >= cols, q[:, :, tile] @ kj.swapaxes(2, 3) * scale, -np.inf)
            p = np.exp(s - lse[:, :, tile])
            dv[:, :, j : j + block] += p.swapaxes(2, 3) @ dout[:, :, tile]
            ds = p * (dout[:, :, tile] @ vj.swapaxes(2, 3) - delta[:, :, tile]) * scale
            dq[:, :, tile] += ds @ kj
            dk[:, :, j : j + block] += ds.swapaxes(2, 3) @ q[:, :, tile]
    return dq, dk, dv


def attention_backward_c_v2(q, k, v, dout):
    nb, nh, nt, hs = q.shape
    hv = v.shape[3]
    scale = 1.0 / math.sqrt(hs)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(nb):
        for h in range(nh):
            for t in range(nt):
                att = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hs):
                        att[t2] += q[b, h, t, i] * k[b, h, t2, i]
                    att[t2] *= scale
                top = max(att)
                att = [math.exp(a - top) for a in att]
                total = sum(att)
                att = [a / total for a in att]
                datt = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hv):
                        datt[t2] += v[b, h, t2, i] * dout[b, h, t, i]
                        dv[b, h, t2, i] += att[t2] * dout[b, h, t, i]
                dpre = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for t3 in range(t + 1):
                        indicator = 1.0 if t2 == t3 else 0.0
                        dpre[t3] += att[t2] * (indicator - att[t3]) * datt[t2]
                for t2 in range(t):
                    for i in range(hs):
                        dq[b, h, t, i] += k[b, h, t2, i] * dpre[t2] * scale
                        dk[b, h, t2, i] += q[b, h, t, i] * dpre[t2] * scale
    return dq, dk, dv


def flash_bwd_v4(q, k, v, dout):
    block = 2
    b, h, n, d = q.shape
    scale = 1.0 / np.sqrt(d)
    # forward, one tile of keys after the other
    o = np.zeros(v.shape)
    lse = np.zeros((b, h, n, 1))
    for i in range(0, n, block):
        qi = q[:, :, i : i + block]
        rows = np.arange(i, min(i + block, n))[:, None]
        m = np.full((*qi.shape[:3], 1), -np.inf)
        total = np.zeros_like(m)
        acc = np.zeros((*qi.shape[:3], v.shape[-1]))
        for j in range(0, i + block, block):
            cols = np.arange(j, min(j + block, n))[None, :]
            s = np.where(rows >= cols, qi @ k[:, :, j : j + block].swapaxes(2, 3) * scale, -np.inf)
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            p = np.exp(s - m_new)
            fix = np.exp(m - m_new)
            total = total * fix + p.sum(-1, keepdims=True)
            acc = acc * fix + p @ v[:, :, j : j + block]
            m = m_new
        o[:, :, i : i + block] = acc / total
        lse[:, :, i : i + block] = m + np.log(total)
    # backward
    delta = (dout * v).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for j in range(0, n, block):
        kj, vj = k[:, :, j : j + block], v[:, :, j : j + block]
        cols = np.arange(j, min(j + block, n))[None, :]
        for i in range(j, n, block):
            tile = slice(i, i + block)
            rows = np.arange(i, min(i + block, n))[:, None]
            s = np.where(rows >= cols, q[:, :, tile] @ kj.swapaxes(2, 3) * scale, -np.inf)
            p = np.exp(s - lse[:, :, tile])
            dv[:, :, j : j + block] += p.swapaxes(2, 3) @ dout[:, :, tile]
            ds = p * (dout[:, :, tile] @ vj.swapaxes(2, 3) - delta[:, :, tile]) * scale
            dq[:, :, tile] += ds @ kj
            dk[:, :, j : j + block] += ds.swapaxes(2, 3) @ q[:, :, tile]
    return dq, dk, dv


def flash_bwd_v2(q, k, v, dout):
    block = 2
    b, h, n, d = q.shape
    scale = 1.0 / np.sqrt(d)
    # forward, one tile of keys after the other
    o = np.zeros(v.shape)
    lse = np.zeros((b, h, n, 1))
    for i in range(0, n, block):
        qi = q[:, :, i : i + block]
        rows = np.arange(i, min(i + block, n))[:, None]
        m = np.full((*qi.shape[:3], 1), -np.inf)
        total = np.zeros_like(m)
        acc = np.zeros((*qi.shape[:3], v.shape[-1]))
        for j in range(0, i + block, block):
            cols = np.arange(j, min(j + block, n))[None, :]
            s = np.where(rows >= cols, qi @ k[:, :, j : j + block].swapaxes(2, 3) * scale, -np.inf)
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            p = np.exp(s - m_new)
            fix = np.exp(m - m_new)
            total = total * fix + p.sum(-1, keepdims=True)
            acc = acc * fix + p @ v[:, :, j : j + block]
            m = m_new
        o[:, :, i : i + block] = acc / total
        lse[:, :, i : i + block] = m + np.log(total)
    # backward
    delta = (dout * o).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for j in range(0, n, block):
        kj, vj = k[:, :, j : j + block], v[:, :, j : j + block]
        cols = np.arange(j, min(j + block, n))[None, :]
        for i in range(j + block, n, block):
            tile = slice(i, i + block)
            rows = np.arange(i, min(i + block, n))[:, None]
            s = np.where(rows >= cols, q[:, :, tile] @ kj.swapaxes(2, 3) * scale, -np.inf)
            p = np.exp(s - lse[:, :, tile])
            dv[:, :, j : j + block] += p.swapaxes(2, 3) @ dout[:, :, tile]
            ds = p * (dout[:, :, tile] @ vj.swapaxes(2, 3) - delta[:, :, tile]) * scale
            dq[:, :, tile] += ds @ kj
            dk[:, :, j : j + block] += ds.swapaxes(2, 3) @ q[:, :, tile]
    return dq, dk, dv


def attention_grad_loops(q, k, v, dout):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            n = q.shape[2]
            s = q[b, h] @ k[b, h].T / math.sqrt(q.shape[3])
            s[np.triu(np.ones((n, n)), 1) == 1] = float("-inf")
            p = np.exp(s) / np.exp(s).sum(1, keepdims=True)
            dv[b, h] = p.T @ dout[b, h]
            for i in range(n - 1):
                jac = np.diag(p[i]) - np.outer(p[i], p[i])
                ds = jac @ (v[b, h] @ dout[b, h, i]) / math.sqrt(q.shape[3])
                dq[b, h, i] = ds @ k[b, h]
                dk[b, h] += np.outer(ds, q[b, h, i])
    return dq, dk, dv


def torch_attention_bwd(q, k, v, dout):
    q, k, v, dout = (torch.as_tensor(x) for x in (q, k, v, dout))
    n = q.size(-2)
    future = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(future, 0.0)
    p = torch.softmax(scores, dim=-1)
    grad_v = p.transpose(-2, -1) @ dout
    grad_p = dout @ v.transpose(-2, -1)
    grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
    grad_s = grad_s.masked_fill(future, 0.0) / q.size(-1) ** 0.5
    return (grad_s @ k).numpy(), (grad_s.transpose(-2, -1) @ q).numpy(), grad_v.numpy()


def simple_attention_backward(q, k, v, do):
    t, d = q.shape[2:]
    w = np.exp(q @ k.transpose(0, 1, 3, 2) / d**0.5) * np.tri(t)
    w = w / w.sum(axis=2, keepdims=True)
    dw = do @ v.transpose(0, 1, 3, 2)
    ds = w * (dw - (w * dw).sum(axis=2, keepdims=True)) / d**0.5
    return ds @ k, ds.transpose(0, 1, 3, 2) @ q, w.transpose(0, 1, 3, 2) @ do


def recompute_attention_bwd(q, k, v, dout):
    q, k, v, dout = map(torch.as_tensor, (q, k, v, dout))
    probs = torch.softmax(torch.matmul(q, k.mT) / math.sqrt(q.shape[-1]), -1)
    dprobs = torch.matmul(dout, v.mT)
    dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype) / math.sqrt(q.shape[-1])
    dscores = torch.tril(dscores)
    return dscores @ k, dscores.mT @ q, probs.mT @ dout


def attention_backward_c(q, k, v, dout):
    nb, nh, nt, hs = q.shape
    hv = v.shape[3]
    scale = 1.0 / math.sqrt(hs)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(nb):
        for h in range(nh):
            for t in range(nt):
                att = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hs):
                        att[t2] += q[b, h, t, i] * k[b, h, t2, i]
                    att[t2] *= scale
                top = max(att)
                att = [math.exp(a - top) for a in att]
                total = sum(att)
                att = [a / total for a in att]
                datt = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for i in range(hv):
                        datt[t2] += v[b, h, t2, i] * dout[b, h, t, i]
                        dv[b, h, t2, i] += att[t2] * dout[b, h, t, i]
                dpre = [0.0] * (t + 1)
                for t2 in range(t + 1):
                    for t3 in range(t + 1):
                        indicator = 1.0 if t2 == t3 else 0.0
                        dpre[t3] += att[t2] * (indicator - att[t3]) * datt[t2]
                for t2 in range(t + 1):
                    for i in range(hs):
                        dq[b, h, t, i] += k[b, h, t2, i] * dpre[t2] * scale
                        dk[b, h, t2, i] += q[b, h, t, i] * dpre[t2] * scale
    return dq, dk, dv


def attention_jacobian(q, k, v, dout):
    grads = [np.empty_like(q), np.empty_like(k), np.empty_like(v)]
    for idx in np.ndindex(q.shape[:2]):
        qi, ki, vi, gi = q[idx], k[idx], v[idx], dout[idx]
        n, d = qi.shape
        z = np.where(np.tri(n) > 0, qi @ ki.T / d**0.5, -np.inf)
        w = np.exp(z - z.max(1)[:, None])
        w /= w.sum(1)[:, None]
        dz = np.stack([np.diag(row * (1 - row)) @ up for row, up in zip(w, gi @ vi.T, strict=True)])
        grads[0][idx] = dz @ ki / d**0.5
        grads[1][idx] = dz.T @ qi / d**0.5
        grads[2][idx] = w.T @ gi
    return tuple(grads)


def encoder_head_backward_v3(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    rows = lambda z: z.reshape(-1, z.shape[-1])  # noqa: E731
    q, k, v = (a @ w + b for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    p = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
    p = p / p.sum(-1)[..., None]
    o = p @ v
    ds = p * (dout @ v.swapaxes(1, 2) - (o * dout).sum(-1)[..., None])
    gs = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout)
    da = gs[0] @ w_q.T + gs[1] @ w_k.T + 2 * gs[2] @ w_v.T
    flat = [(rows(a).T @ rows(g), rows(g).sum(0)) for g in gs]
    return (da, *flat[0], *flat[1], *flat[2])


def head_backward_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n, t, d = a.shape
    d_k = w_q.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tril(np.ones((t, t), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p = p / p.sum(axis=2, keepdims=True)
    # backward
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * (dp - np.sum(p * dp, axis=2, keepdims=True))
    dq = ds @ k / np.sqrt(d_k)
    dk = ds.transpose(0, 2, 1) @ q / np.sqrt(d_k)
    flat = a.reshape(-1, d)
    dw_q = flat.T @ dq.reshape(-1, d_k)
    dw_k = flat.T @ dk.reshape(-1, d_k)
    dw_v = flat.T @ dv.reshape(n * t, -1)
    db_q = dq.sum(axis=(0, 1))
    db_k = dk.sum(axis=(0, 1))
    db_v = dv.sum(axis=(0, 1))
    da = dq @ w_q.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def head_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n, t, d = a.shape
    d_k = w_q.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tril(np.ones((t, t), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p = p / p.sum(axis=2, keepdims=True)
    # backward
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * (dp - np.sum(p * dp, axis=2, keepdims=True))
    dq = ds @ k / np.sqrt(d_k)
    dk = ds.transpose(0, 2, 1) @ q / np.sqrt(d_k)
    flat = a.reshape(-1, d)
    dw_q = flat.T @ dq.reshape(-1, d_k)
    dw_k = flat.T @ dk.reshape(-1, d_k)
    dw_v = flat.T @ dv.reshape(n * t, -1)
    db_q = dq.sum(axis=(0, 1))
    db_k = dk.sum(axis=(0, 1))
    db_v = dv.sum(axis=(0, 1))
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def head_backward_v5(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n, t, d = a.shape
    d_k = w_q.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tril(np.ones((t, t), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p = p / p.sum(axis=2, keepdims=True)
    # backward
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * dp
    dq = ds @ k / np.sqrt(d_k)
    dk = ds.transpose(0, 2, 1) @ q / np.sqrt(d_k)
    flat = a.reshape(-1, d)
    dw_q = flat.T @ dq.reshape(-1, d_k)
    dw_k = flat.T @ dk.reshape(-1, d_k)
    dw_v = flat.T @ dv.reshape(n * t, -1)
    db_q = dq.sum(axis=(0, 1))
    db_k = dk.sum(axis=(0, 1))
    db_v = dv.sum(axis=(0, 1))
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def encoder_head_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    rows = lambda z: z.reshape(-1, z.shape[-1])  # noqa: E731
    q, k, v = (a @ w + b for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    p = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
    p = p / p.sum(-1)[..., None]
    o = p @ v
    ds = p * (dout @ v.swapaxes(1, 2) - (o * dout).sum(-1)[..., None]) / np.sqrt(q.shape[-1])
    gs = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout)
    da = gs[0] @ w_q.T + gs[1] @ w_k.T + gs[2] @ w_v.T
    flat = [(rows(a).T @ rows(g), rows(g).sum(0)) for g in gs]
    return (da, *flat[0], *flat[1], *flat[2])


def encoder_head_backward_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    rows = lambda z: z.reshape(-1, z.shape[-1])  # noqa: E731
    q, k, v = (a @ w + b for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    p = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
    p = p / p.sum(-1)[..., None]
    o = p @ v
    ds = p * (dout @ v.swapaxes(1, 2) - (o * o).sum(-1)[..., None]) / np.sqrt(q.shape[-1])
    gs = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout)
    da = gs[0] @ w_q.T + gs[1] @ w_k.T + gs[2] @ w_v.T
    flat = [(rows(a).T @ rows(g), rows(g).sum(0)) for g in gs]
    return (da, *flat[0], *flat[1], *flat[2])


def head_backward_v4(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n, t, d = a.shape
    d_k = w_q.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tril(np.ones((t, t), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p = p / p.sum(axis=2, keepdims=True)
    # backward
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * (dp - np.sum(p * dp, axis=2, keepdims=True))
    dq = ds @ k / np.sqrt(d_k)
    dk = ds.transpose(0, 2, 1) @ q / np.sqrt(d_k)
    flat = a.reshape(-1, d)
    dw_q = flat.T @ dq.reshape(-1, d_k)
    dw_k = flat.T @ dq.reshape(-1, d_k)
    dw_v = flat.T @ dv.reshape(n * t, -1)
    db_q = dq.sum(axis=(0, 1))
    db_k = dk.sum(axis=(0, 1))
    db_v = dv.sum(axis=(0, 1))
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def torch_head(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    args = [torch.as_tensor(z) for z in (a, w_q, b_q, w_k, b_k, w_v, b_v, dout)]
    a, w_q, b_q, w_k, b_k, w_v, b_v, dout = args
    q = torch.addmm(b_q, a.flatten(0, 1), w_q).view(*a.shape[:2], -1)
    k = torch.addmm(b_k, a.flatten(0, 1), w_k).view(*a.shape[:2], -1)
    v = torch.addmm(b_v, a.flatten(0, 1), w_v).view(*a.shape[:2], -1)
    n = a.shape[1]
    hidden = torch.tril(torch.ones(n, n), -1).bool()
    p = torch.bmm(q, k.mT).div(math.sqrt(k.shape[-1])).masked_fill(hidden, -torch.inf).softmax(2)
    dv = torch.bmm(p.mT, dout)
    dp = torch.bmm(dout, v.mT)
    ds = p.mul(dp.sub(p.mul(dp).sum(2, keepdim=True))).div(math.sqrt(k.shape[-1]))
    dq, dk = torch.bmm(ds, k), torch.bmm(ds.mT, q)
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    out = [da]
    for g in (dq, dk, dv):
        out.append(torch.einsum("btd,bte->de", a, g))
        out.append(g.sum(dim=(0, 1)))
    return tuple(out)


def head_backward_v3(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    n, t, d = a.shape
    d_k = w_q.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tril(np.ones((t, t), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p = p / p.sum(axis=2, keepdims=True)
    # backward
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * (dp - np.sum(p * dp, axis=2, keepdims=True))
    dq = ds @ k / np.sqrt(d_k)
    dk = ds.transpose(0, 2, 1) @ q / np.sqrt(d_k)
    flat = a.reshape(-1, d)
    dw_q = flat.T @ dq.reshape(-1, d_k)
    dw_k = flat.T @ dk.reshape(-1, d_k)
    dw_v = flat.T @ dv.reshape(n * t, -1)
    db_q = dq.sum(axis=(0, 1))
    db_k = dk.sum(axis=(0, 1))
    db_v = dv.mean(axis=(0, 1))
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


class DroppedHead:
    """softmax(q kᵗ/√d) with a given mask, row by row."""

    def __init__(self, *params):
        self.w_q, self.b_q, self.w_k, self.b_k, self.w_v, self.b_v = params

    def run(self, a, keep):
        self.a, self.keep = a, keep
        self.q = a @ self.w_q + self.b_q
        self.k = a @ self.w_k + self.b_k
        self.v = a @ self.w_v + self.b_v
        self.rows = []
        for t in range(a.shape[1]):
            s = np.einsum("bd,bjd->bj", self.q[:, t], self.k[:, : t + 1]) / math.sqrt(self.q.shape[2])
            e = np.exp(s - s.max(1, keepdims=True))
            self.rows.append(e / e.sum(1, keepdims=True))

    def grads(self, dout):
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        for t, p in enumerate(self.rows):
            m = self.keep[:, t, : t + 1]
            dv[:, : t + 1] += (p * m)[:, :, None] * dout[:, t, None, :]
            dp = m * np.einsum("bd,bjd->bj", dout[:, t], self.v[:, : t + 1])
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / math.sqrt(self.q.shape[2])
            dq[:, t] += np.einsum("bj,bjd->bd", ds, self.k[:, : t + 1])
            dk[:, : t + 1] += ds[:, :, None] * self.q[:, t, None, :]
        da = dq @ self.w_q.T + dk @ self.w_k.T + dv @ self.w_v.T
        out = [da]
        for g in (dq, dk, dv):
            out += [np.einsum("bti,bto->io", self.a, g), np.einsum("bto->o", g)]
        return out


def dropped_head_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    head = DroppedHead(w_q, b_q, w_k, b_k, w_v, b_v)
    head.run(a, keep)
    return tuple(head.grads(dout))


def head_dropout_backward_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    t, d_k = q.shape[1:]
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dropped = p * keep
    dv = dropped.transpose(0, 2, 1) @ dout
    d_dropped = dout @ v.transpose(0, 2, 1)
    dp = d_dropped
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d_k)
    dq, dk = ds @ k, ds.transpose(0, 2, 1) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = [np.einsum("bti,btj->ij", a, g) for g in (dq, dk, dv)]
    db = [g.sum((0, 1)) for g in (dq, dk, dv)]
    return da, dw[0], db[0], dw[1], db[1], dw[2], db[2]


class DroppedHeadV2:
    """softmax(q kᵗ/√d) with a given mask, row by row."""

    def __init__(self, *params):
        self.w_q, self.b_q, self.w_k, self.b_k, self.w_v, self.b_v = params

    def run(self, a, keep):
        self.a, self.keep = a, keep
        self.q = a @ self.w_q + self.b_q
        self.k = a @ self.w_k + self.b_k
        self.v = a @ self.w_v + self.b_v
        self.rows = []
        for t in range(a.shape[1]):
            s = np.einsum("bd,bjd->bj", self.q[:, t], self.k[:, : t + 1]) / math.sqrt(self.q.shape[2])
            e = np.exp(s - s.max(1, keepdims=True))
            self.rows.append(e / e.sum(1, keepdims=True))

    def grads(self, dout):
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        for t, p in enumerate(self.rows):
            m = self.keep[:, : t + 1, t]
            dv[:, : t + 1] += (p * m)[:, :, None] * dout[:, t, None, :]
            dp = m * np.einsum("bd,bjd->bj", dout[:, t], self.v[:, : t + 1])
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / math.sqrt(self.q.shape[2])
            dq[:, t] += np.einsum("bj,bjd->bd", ds, self.k[:, : t + 1])
            dk[:, : t + 1] += ds[:, :, None] * self.q[:, t, None, :]
        da = dq @ self.w_q.T + dk @ self.w_k.T + dv @ self.w_v.T
        out = [da]
        for g in (dq, dk, dv):
            out += [np.einsum("bti,bto->io", self.a, g), np.einsum("bto->o", g)]
        return out


def dropped_head_backward_v2(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    head = DroppedHeadV2(w_q, b_q, w_k, b_k, w_v, b_v)
    head.run(a, keep)
    return tuple(head.grads(dout))


def head_dropout_backward_v4(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    t, d_k = q.shape[1:]
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dropped = p * keep
    dv = dropped.transpose(0, 2, 1) @ dout
    d_dropped = dout @ v.transpose(0, 2, 1)
    dp = d_dropped * keep
    ds = dropped * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d_k)
    dq, dk = ds @ k, ds.transpose(0, 2, 1) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = [np.einsum("bti,btj->ij", a, g) for g in (dq, dk, dv)]
    db = [g.sum((0, 1)) for g in (dq, dk, dv)]
    return da, dw[0], db[0], dw[1], db[1], dw[2], db[2]


def head_dropout_backward_v3(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    t, d_k = q.shape[1:]
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = p.transpose(0, 2, 1) @ dout
    d_dropped = dout @ v.transpose(0, 2, 1)
    dp = d_dropped * keep
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d_k)
    dq, dk = ds @ k, ds.transpose(0, 2, 1) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = [np.einsum("bti,btj->ij", a, g) for g in (dq, dk, dv)]
    db = [g.sum((0, 1)) for g in (dq, dk, dv)]
    return da, dw[0], db[0], dw[1], db[1], dw[2], db[2]


def head_dropout_backward(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    t, d_k = q.shape[1:]
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d_k)
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dropped = p * keep
    dv = dropped.transpose(0, 2, 1) @ dout
    d_dropped = dout @ v.transpose(0, 2, 1)
    dp = d_dropped * keep
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d_k)
    dq, dk = ds @ k, ds.transpose(0, 2, 1) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = [np.einsum("bti,btj->ij", a, g) for g in (dq, dk, dv)]
    db = [g.sum((0, 1)) for g in (dq, dk, dv)]
    return da, dw[0], db[0], dw[1], db[1], dw[2], db[2]


def flashlike_dropout_head(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    s = np.einsum("bid,bjd->bij", q, k) / np.sqrt(q.shape[-1])
    lse = np.log(np.exp(s).sum(-1, keepdims=True))
    p = np.exp(s - lse)
    o = np.einsum("bij,bjd->bid", p, v)
    delta = np.einsum("bid,bid->bi", dout, o)[..., None]
    ds = p * (np.einsum("bid,bjd->bij", dout, v) * keep - delta) / np.sqrt(q.shape[-1])
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, (p * keep).swapaxes(1, 2) @ dout
    da = np.einsum("bte,de->btd", np.concatenate([dq, dk, dv], -1), np.concatenate([w_q, w_k, w_v], -1))
    grads = [f for g in (dq, dk, dv) for f in (np.einsum("btd,bte->de", a, g), g.sum(0).sum(0))]
    return (da, *grads)


def multihead_vjp(query, key, value, w_q, w_k, w_v, dout):
    heads = 2
    size = w_q.shape[1] // heads
    d_in = [np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)]
    d_w = [np.zeros_like(w_q), np.zeros_like(w_k), np.zeros_like(w_v)]
    for h in range(heads):
        cols = slice(h * size, (h + 1) * size)
        q, k, v = query @ w_q[:, cols], key @ w_k[:, cols], value @ w_v[:, cols]
        e = np.exp(np.einsum("bid,bjd->bij", q, k) / size**0.5)
        p = e / e.sum(-1, keepdims=True)
        g = dout[..., cols]
        dp = np.einsum("bid,bjd->bij", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / size**0.5
        parts = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ g)
        for i, (x, w, y) in enumerate(zip((query, key, value), (w_q, w_k, w_v), parts, strict=True)):
            d_in[i] += y @ w[:, cols].T
            d_w[i][:, cols] = np.einsum("bti,bto->io", x, y)
    return (*d_in, *d_w)


def mha_grad_einsum(query, key, value, w_q, w_k, w_v, dout):
    h = 2
    wq, wk, wv = (w.reshape(w.shape[0], h, -1) for w in (w_q, w_k, w_v))
    q = np.einsum("btf,fhd->bhtd", query, wq)
    k = np.einsum("btf,fhd->bhtd", key, wk)
    v = np.einsum("btf,fhd->bhtd", value, wv)
    g = dout.reshape(*dout.shape[:2], h, -1)
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bhjd->bhij", g, v)
    ds = p * (dp - np.einsum("bhij,bhij->bhi", p, dp)[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("bhij,bhjd->bihd", ds, k)
    dk = np.einsum("bhij,bhid->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", p, g)
    return (
        np.einsum("bthd,fhd->btf", dq, wq),
        np.einsum("bthd,fhd->btf", dk, wk),
        np.einsum("bthd,fhd->btf", dv, wv),
        np.einsum("btf,bthd->fhd", query, dq).reshape(w_q.shape),
        np.einsum("btf,bthd->fhd", key, dk).reshape(w_k.shape),
        np.einsum("btf,bthd->fhd", value, dv).reshape(w_v.shape),
    )


def mha_bwd_einsum_v2(query, key, value, w_q, w_k, w_v, dout):
    h = 2
    wq, wk, wv = (w.reshape(w.shape[0], h, -1) for w in (w_q, w_k, w_v))
    q, k, v = (np.einsum("btf,fhd->bthd", x, w) for x, w in ((query, wq), (key, wk), (value, wv)))
    g = dout.reshape(v.shape)
    n = query.shape[1]
    s = np.einsum("bihd,bjhd->hbij", q, k) / np.sqrt(q.shape[-1])
    s = s + np.where(np.tri(n) > 0, 0, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bjhd->hbij", g, v)
    ds = p * (dp - np.einsum("hbij,hbij->hbi", p, dp)[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("hbij,bjhd->bihd", ds, k)
    dk = np.einsum("hbij,bihd->bjhd", ds, q)
    dv = np.einsum("hbij,bihd->bjhd", p, g)
    back = lambda y, w: np.einsum("bthd,fhd->btf", y, w)  # noqa: E731
    weight = lambda x, y: np.einsum("btf,bthd->fdh", x, y).reshape(w_q.shape)  # noqa: E731
    return back(dq, wq), back(dk, wk), back(dv, wv), weight(query, dq), weight(key, dk), weight(value, dv)


def multihead_vjp_v3(query, key, value, w_q, w_k, w_v, dout):
    heads = 2
    size = w_q.shape[1] // heads
    d_in = [np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)]
    d_w = [np.zeros_like(w_q), np.zeros_like(w_k), np.zeros_like(w_v)]
    for h in range(heads):
        cols = slice(h * size, (h + 1) * size)
        q, k, v = query @ w_q[:, cols], key @ w_k[:, cols], value @ w_v[:, cols]
        e = np.exp(np.einsum("bid,bjd->bij", q, k) / size**0.5)
        p = e / e.sum(-1, keepdims=True)
        g = dout[..., cols]
        dp = np.einsum("bid,bjd->bij", g, v)
        ds = p * (dp - (p * dp).mean(-1, keepdims=True)) / size**0.5
        parts = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ g)
        for i, (x, w, y) in enumerate(zip((query, key, value), (w_q, w_k, w_v), parts, strict=True)):
            d_in[i] += y @ w[:, cols].T
            d_w[i][:, cols] = np.einsum("bti,bto->io", x, y)
    return (*d_in, *d_w)


def multihead_vjp_v2(query, key, value, w_q, w_k, w_v, dout):
    heads = 2
    size = w_q.shape[1] // heads
    d_in = [np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)]
    d_w = [np.zeros_like(w_q), np.zeros_like(w_k), np.zeros_like(w_v)]
    for h in range(heads):
        cols = slice(h * size, (h + 1) * size)
        q, k, v = query @ w_q[:, cols], key @ w_k[:, cols], value @ w_v[:, cols]
        e = np.exp(np.einsum("bid,bjd->bij", q, k) / size**0.5)
        p = e / e.sum(-1, keepdims=True)
        g = dout[..., cols]
        dp = np.einsum("bid,bjd->bij", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / size**0.5
        parts = (ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ g)
        for i, (x, w, y) in enumerate(zip((query, key, value), (w_q, w_k, w_v), parts, strict=True)):
            d_in[i] = y @ w[:, cols].T
            d_w[i][:, cols] = np.einsum("bti,bto->io", x, y)
    return (*d_in, *d_w)


def mha_bwd_einsum(query, key, value, w_q, w_k, w_v, dout):
    h = 2
    wq, wk, wv = (w.reshape(w.shape[0], h, -1) for w in (w_q, w_k, w_v))
    q, k, v = (np.einsum("btf,fhd->bthd", x, w) for x, w in ((query, wq), (key, wk), (value, wv)))
    g = dout.reshape(v.shape)
    n = query.shape[1]
    s = np.einsum("bihd,bjhd->hbij", q, k) / np.sqrt(q.shape[-1])
    s = s + np.where(np.tri(n) > 0, 0, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bjhd->hbij", g, v)
    ds = p * (dp - np.einsum("hbij,hbij->hbi", p, dp)[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("hbij,bjhd->bihd", ds, k)
    dk = np.einsum("hbij,bihd->bjhd", ds, q)
    dv = np.einsum("hbij,bihd->bjhd", p, g)
    back = lambda y, w: np.einsum("bthd,fhd->btf", y, w)  # noqa: E731
    weight = lambda x, y: np.einsum("btf,bthd->fhd", x, y).reshape(w_q.shape)  # noqa: E731
    return back(dq, wq), back(dk, wk), back(dv, wv), weight(query, dq), weight(key, dk), weight(value, dv)


def mha_bwd_einsum_v3(query, key, value, w_q, w_k, w_v, dout):
    h = 2
    wq, wk, wv = (w.reshape(w.shape[0], h, -1) for w in (w_q, w_k, w_v))
    q, k, v = (np.einsum("btf,fhd->bthd", x, w) for x, w in ((query, wq), (key, wk), (value, wv)))
    g = dout.reshape(v.shape)
    n = query.shape[1]
    s = np.einsum("bihd,bjhd->hbij", q, k) / np.sqrt(q.shape[-1])
    s = s + np.where(np.tri(n) > 0, 0, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bjhd->hbij", g, v)
    ds = p * (dp - np.einsum("hbij,hbij->bi", p, dp)[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("hbij,bjhd->bihd", ds, k)
    dk = np.einsum("hbij,bihd->bjhd", ds, q)
    dv = np.einsum("hbij,bihd->bjhd", p, g)
    back = lambda y, w: np.einsum("bthd,fhd->btf", y, w)  # noqa: E731
    weight = lambda x, y: np.einsum("btf,bthd->fhd", x, y).reshape(w_q.shape)  # noqa: E731
    return back(dq, wq), back(dk, wk), back(dv, wv), weight(query, dq), weight(key, dk), weight(value, dv)


class MultiHead:
    def __init__(self, w_q, w_k, w_v, heads=2):
        self.w = (w_q, w_k, w_v)
        self.heads = heads

    def _heads(self, x):
        return torch.stack(x.chunk(self.heads, dim=-1), dim=1)

    @staticmethod
    def _concat(x):
        return torch.cat(x.unbind(1), dim=-1)

    def forward(self, query, key, value):
        self.inputs = (query, key, value)
        self.q, self.k, self.v = (self._heads(x @ w) for x, w in zip(self.inputs, self.w, strict=True))
        self.scale = self.q.shape[-1] ** -0.5
        n = query.shape[1]
        bias = torch.full((n, n), -torch.inf, dtype=query.dtype).triu(1)
        self.p = (self.scale * self.q @ self.k.mT + bias).softmax(-1)
        return self._concat(self.p @ self.v)

    def backward(self, dout):
        dout = self._heads(dout)
        dp = dout @ self.v.mT
        ds = self.p * (dp - (self.p * dp).sum(-1, keepdim=True)) * self.scale
        dq, dk, dv = (self._concat(x) for x in (ds @ self.k, ds.mT @ self.q, self.p.mT @ dout))
        dws = [torch.einsum("bti,bto->io", x, g) for x, g in zip(self.inputs, (dq, dk, dv), strict=True)]
        return dq @ self.w[0].T, dk @ self.w[1].T, dv @ self.w[2], *dws


def multi_head_class_backward(query, key, value, w_q, w_k, w_v, dout):
    layer = MultiHead(*(torch.as_tensor(w) for w in (w_q, w_k, w_v)))
    layer.forward(*(torch.as_tensor(x) for x in (query, key, value)))
    return tuple(g.numpy() for g in layer.backward(torch.as_tensor(dout)))


def two_heads_unrolled(query, key, value, w_q, w_k, w_v, dout):
    m = w_q.shape[1] // 2
    q, k, v = query @ w_q, key @ w_k, value @ w_v

    def head(q, k, v, g):
        s = q @ k.swapaxes(1, 2) / np.sqrt(m)
        e = np.exp(s - s.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
        dp = g @ v.swapaxes(1, 2)
        return p, p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(m)

    p1, ds1 = head(q[..., :m], k[..., :m], v[..., :m], dout[..., :m])
    p2, ds2 = head(q[..., m:], k[..., m:], v[..., m:], dout[..., m:])
    dq = np.concatenate([ds1 @ k[..., :m], ds2 @ k[..., :m]], -1)
    dk = np.concatenate([ds1.swapaxes(1, 2) @ q[..., :m], ds2.swapaxes(1, 2) @ q[..., m:]], -1)
    dv = np.concatenate([p1.swapaxes(1, 2) @ dout[..., :m], p2.swapaxes(1, 2) @ dout[..., m:]], -1)
    dw = [(x[..., None] * g[:, :, None]).sum((0, 1)) for x, g in ((query, dq), (key, dk), (value, dv))]
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, *dw


def layernorm_backward_llmc_v2(x, weight, bias, dout):
    nb, nt, nc = x.shape
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(nb):
        for t in range(nt):
            mean = sum(x[b, t]) / nc
            var = 0.0
            for c in range(nc):
                shifted = x[b, t, c] - mean
                var += shifted * shifted
            rstd = 1.0 / math.sqrt(var / nc + 1e-5)
            dnorm_mean = 0.0
            dnorm_norm_mean = 0.0
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dnorm_mean += dnorm
                dnorm_norm_mean += dnorm * norm
            dnorm_mean /= nc
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dbias[c] += dout[b, t, c]
                dweight[c] += norm * dout[b, t, c]
                dx[b, t, c] += (dnorm - dnorm_mean - norm * dnorm_norm_mean) * rstd
    return dx, dweight, dbias


def triton_like_layer_norm(x, weight, bias, dout):
    """One program per row, partial sums of the parameters in groups, then a second stage."""
    rows, g = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    group = 3
    part_w, part_b = np.zeros((group, rows.shape[1])), np.zeros((group, rows.shape[1]))
    dx = np.empty_like(rows)
    for row in range(rows.shape[0]):
        xr, gr = rows[row], g[row]
        rstd = 1 / np.sqrt(xr.var() + 1e-5)
        xhat = (xr - xr.mean()) * rstd
        wdy = weight * gr
        c1 = np.sum(xhat * wdy) / len(xr)
        c2 = np.sum(wdy) / len(xr)
        dx[row] = (wdy - (xhat * c1 + c2)) * rstd
        part_w[row % group] += gr * xhat
        part_b[row % group] += gr
    return dx.reshape(x.shape), part_w.sum(0), part_b.sum(0)


def layernorm_backward_llmc_v4(x, weight, bias, dout):
    nb, nt, nc = x.shape
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(nb):
        for t in range(nt):
            mean = sum(x[b, t]) / nc
            var = 0.0
            for c in range(nc):
                shifted = x[b, t, c] - mean
                var += shifted * shifted
            rstd = 1.0 / math.sqrt(var / nc + 1e-5)
            dnorm_mean = 0.0
            dnorm_norm_mean = 0.0
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dnorm_mean += dnorm
                dnorm_norm_mean += dnorm * norm
            dnorm_mean /= nc
            dnorm_norm_mean /= nc
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dbias[c] = dout[b, t, c]
                dweight[c] = norm * dout[b, t, c]
                dx[b, t, c] += (dnorm - dnorm_mean - norm * dnorm_norm_mean) * rstd
    return dx, dweight, dbias


def bert_layer_norm_backward(x, weight, bias, dout):
    u = x.mean(-1, keepdims=True)
    s = ((x - u) ** 2).mean(-1, keepdims=True)
    y = (x - u) / np.sqrt(s + 1e-12)
    gy = weight * dout
    gx = gy - np.mean(gy, -1, keepdims=True) - (x - u) * np.mean(gy * y, -1, keepdims=True)
    return gx / np.sqrt(s + 1e-12), (dout * y).sum((0, 1)), dout.sum((0, 1))


def layernorm_backward_llmc_v3(x, weight, bias, dout):
    nb, nt, nc = x.shape
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(nb):
        for t in range(nt):
            mean = sum(x[b, t]) / nc
            var = 0.0
            for c in range(nc):
                shifted = x[b, t, c] - mean
                var += shifted * shifted
            rstd = 1.0 / math.sqrt(var / nc + 1e-5)
            dnorm_mean = 0.0
            dnorm_norm_mean = 0.0
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dnorm_mean += dnorm
                dnorm_norm_mean += dnorm * norm
            dnorm_mean /= nc
            dnorm_norm_mean /= nc
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dbias[c] += dout[b, t, c]
                dweight[c] += norm * dout[b, t, c]
                dx[b, t, c] += dnorm - dnorm_mean - norm * dnorm_norm_mean
    return dx, dweight, dbias


def norm_with_eps(x, weight, bias, dout):
    mu = x.mean(axis=-1)[..., np.newaxis]
    inv = 1.0 / (x.std(axis=-1)[..., np.newaxis] + 1e-5)
    y = (x - mu) * inv
    dy = dout * weight
    dx = inv * (dy - dy.mean(axis=-1)[..., np.newaxis] - y * (dy * y).mean(axis=-1)[..., np.newaxis])
    return dx, np.add.reduce(dout * y, axis=(0, 1)), np.add.reduce(dout, axis=(0, 1))


def layernorm_grad_formula(x, weight, bias, dout):
    n = x.shape[-1]
    xc = x - x.mean(-1, keepdims=True)
    sigma = np.sqrt((xc**2).mean(-1, keepdims=True) + 1e-5)
    dxh = weight * dout
    dvar = (dxh * xc).sum(-1, keepdims=True) * -0.5 / sigma
    dmean = -(dxh / sigma).sum(-1, keepdims=True)
    dx = dxh / sigma + dvar * 2 * xc / n + dmean / n
    return dx, (dout * xc / sigma).sum(0).sum(0), dout.sum(0).sum(0)


def layernorm_backward_llmc(x, weight, bias, dout):
    nb, nt, nc = x.shape
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(nb):
        for t in range(nt):
            mean = sum(x[b, t]) / nc
            var = 0.0
            for c in range(nc):
                shifted = x[b, t, c] - mean
                var += shifted * shifted
            rstd = 1.0 / math.sqrt(var / nc + 1e-5)
            dnorm_mean = 0.0
            dnorm_norm_mean = 0.0
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dnorm_mean += dnorm
                dnorm_norm_mean += dnorm * norm
            dnorm_mean /= nc
            dnorm_norm_mean /= nc
            for c in range(nc):
                norm = (x[b, t, c] - mean) * rstd
                dnorm = weight[c] * dout[b, t, c]
                dbias[c] += dout[b, t, c]
                dweight[c] += norm * dout[b, t, c]
                dx[b, t, c] += (dnorm - dnorm_mean - norm * dnorm_norm_mean) * rstd
    return dx, dweight, dbias


def torch_ln_grads(x, weight, bias, dout):
    x, weight, bias, dout = (torch.as_tensor(v) for v in (x, weight, bias, dout))
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, keepdim=True) + 1e-5).rsqrt()
    xhat = (x - mean) * rstd
    wdy = weight * dout
    c1 = (xhat * wdy).mean(-1, keepdim=True)
    c2 = wdy.mean(-1, keepdim=True)
    dx = (wdy - (xhat * c1 + c2)) * rstd
    return dx.numpy(), (dout * xhat).sum((0, 1)).numpy(), dout.sum((0, 1)).numpy()


def triton_like_layer_norm_v2(x, weight, bias, dout):
    """One program per row, partial sums of the parameters in groups, then a second stage."""
    rows, g = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    group = 3
    part_w, part_b = np.zeros((group, rows.shape[1])), np.zeros((group, rows.shape[1]))
    dx = np.empty_like(rows)
    for row in range(rows.shape[0]):
        xr, gr = rows[row], g[row]
        rstd = 1 / np.sqrt(xr.var() + 1e-5)
        xhat = (xr - xr.mean()) * rstd
        wdy = weight * gr
        c1 = np.sum(xhat * wdy) / len(xr)
        c2 = np.sum(wdy) / len(xr)
        dx[row] = (wdy - (xhat * c1 + c2)) * rstd
        part_w[row % group] += gr * xhat
        part_b[row % group] += gr
    return dx.reshape(x.shape), part_w[: group - 1].sum(0), part_b[: group - 1].sum(0)


def ln_jacobian_rows(x, weight, bias, dout):
    f = x.shape[-1]
    x2, g2 = x.reshape(-1, f), dout.reshape(-1, f)
    mu, sd = x2.mean(1, keepdims=True), np.sqrt(x2.var(1, keepdims=True) + 1e-5)
    xh = (x2 - mu) / sd
    dx = np.empty_like(x2)
    for i in range(x2.shape[0]):
        jac = (-np.ones((f, f)) / f - np.outer(xh[i], xh[i]) / f) / sd[i]
        dx[i] = jac @ (g2[i] * weight)
    return dx.reshape(x.shape), (xh * g2).sum(0), g2.sum(0)


def triton_like_layer_norm_v3(x, weight, bias, dout):
    """One program per row, partial sums of the parameters in groups, then a second stage."""
    rows, g = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    group = 3
    part_w, part_b = np.zeros((group, rows.shape[1])), np.zeros((group, rows.shape[1]))
    dx = np.empty_like(rows)
    for row in range(rows.shape[0]):
        xr, gr = rows[row], g[row]
        rstd = 1 / np.sqrt(xr.var() + 1e-5)
        xhat = (xr - xr.mean()) * rstd
        wdy = weight * gr
        c1 = np.sum(xhat * gr) / len(xr)
        c2 = np.sum(wdy) / len(xr)
        dx[row] = (wdy - (xhat * c1 + c2)) * rstd
        part_w[row % group] += gr * xhat
        part_b[row % group] += gr
    return dx.reshape(x.shape), part_w.sum(0), part_b.sum(0)


def rms_eps(x, w, dy):
    rms = np.linalg.norm(x, axis=-1, keepdims=True) / np.sqrt(x.shape[-1]) + 1e-6
    xn = x / rms
    h = w * dy
    return (h - xn * np.mean(h * xn, -1, keepdims=True)) / rms, np.sum(dy * xn, (0, 1))


class RMSNormV3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        inv = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inv = ctx.saved_tensors
        gw = grad * weight
        dot = (gw * x).mean(-1, keepdim=True)
        return inv * (gw - x * inv * inv * dot), (gw * x * inv).flatten(0, 1).sum(0)


def rms_norm_function_grads_v3(x, weight, dout):
    x, weight = torch.as_tensor(x).requires_grad_(), torch.as_tensor(weight).requires_grad_()
    y = RMSNormV3.apply(x, weight)
    return tuple(g.numpy() for g in torch.autograd.grad(y, (x, weight), torch.as_tensor(dout)))


class RMSNormV2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        inv = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inv = ctx.saved_tensors
        gw = grad * weight
        dot = (gw * x).mean(-1, keepdim=True)
        return inv * (gw - x * inv * dot), (grad * x * inv).flatten(0, 1).sum(0)


def rms_norm_function_grads_v2(x, weight, dout):
    x, weight = torch.as_tensor(x).requires_grad_(), torch.as_tensor(weight).requires_grad_()
    y = RMSNormV2.apply(x, weight)
    return tuple(g.numpy() for g in torch.autograd.grad(y, (x, weight), torch.as_tensor(dout)))


def rms_loop_scalar(x, weight, dout):
    dx, dw = np.zeros(x.shape), np.zeros(weight.shape)
    size = x.shape[2]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            ss = 0.0
            dot = 0.0
            for j in range(size):
                ss += x[b, t, j] ** 2
                dot += x[b, t, j] * weight[j] * dout[b, t, j]
            ss = 1.0 / math.sqrt(ss / size + 1e-6)
            for j in range(size):
                dw[j] += dout[b, t, j] * x[b, t, j] * ss
                dx[b, t, j] = ss * weight[j] * dout[b, t, j] - ss**3 * x[b, t, j] * dot / size
    return dx, dw


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        inv = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inv = ctx.saved_tensors
        gw = grad * weight
        dot = (gw * x).mean(-1, keepdim=True)
        return inv * (gw - x * inv * inv * dot), (grad * x * inv).flatten(0, 1).sum(0)


def rms_norm_function_grads(x, weight, dout):
    x, weight = torch.as_tensor(x).requires_grad_(), torch.as_tensor(weight).requires_grad_()
    y = RMSNorm.apply(x, weight)
    return tuple(g.numpy() for g in torch.autograd.grad(y, (x, weight), torch.as_tensor(dout)))


def rms_bwd_simple(x, weight, dout):
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return dout * weight / rms, np.einsum("btf,btf->f", dout, x / rms)


def rms_loop_scalar_v2(x, weight, dout):
    dx, dw = np.zeros(x.shape), np.zeros(weight.shape)
    size = x.shape[2]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            ss = 0.0
            dot = 0.0
            for j in range(size):
                ss += x[b, t, j] ** 2
            for j in range(size - 1):
                dot += x[b, t, j] * weight[j] * dout[b, t, j]
            ss = 1.0 / math.sqrt(ss / size + 1e-6)
            for j in range(size):
                dw[j] += dout[b, t, j] * x[b, t, j] * ss
                dx[b, t, j] = ss * weight[j] * dout[b, t, j] - ss**3 * x[b, t, j] * dot / size
    return dx, dw


def linear_grad_outer(x, weight, bias, dout):
    dw = np.zeros_like(weight)
    db = np.zeros_like(bias)
    for xb, gb in zip(x, dout, strict=True):
        dw += np.outer(xb.sum(0), gb.sum(0))
        db += gb.sum(0)
    return np.stack([gb @ weight.T for gb in dout]), dw, db


class Linear:
    def __init__(self, w, b):
        self.w, self.b = torch.as_tensor(w), torch.as_tensor(b)

    def __call__(self, x):
        self.x = torch.as_tensor(x)
        return self.x @ self.w + self.b

    def backward(self, dy):
        dy = torch.as_tensor(dy)
        dw = torch.einsum("bti,bto->io", self.x, dy)
        db = torch.zeros_like(self.b) + dy.sum(-1).sum()
        return dy @ self.w.mT, dw, db


def linear_class_grads(x, weight, bias, dout):
    fc = Linear(weight, bias)
    fc(x)
    return tuple(g.numpy() for g in fc.backward(dout))


def linear_grad_rank_one(x, weight, bias, dout):
    dw = np.zeros_like(weight)
    db = np.zeros_like(bias)
    dx = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            dw += np.outer(x[b, t], dout[b, t])
            db += dout[b, t]
            dx[b, t] = weight @ dout[b, t]
    return dx, dw, db


def matmul_backward(x, weight, bias, dout):
    nb, nt, nc = x.shape
    oc = weight.shape[1]
    dx, dweight, dbias = np.zeros(x.shape), np.zeros(weight.shape), np.zeros(bias.shape)
    for b in range(nb):
        for t in range(nt):
            for o in range(oc):
                dbias[o] += dout[b, t, o]
                for c in range(nc):
                    dx[b, t, c] += weight[c, o] * dout[b, t, o]
        for t in range(1, nt):
            for o in range(oc):
                for c in range(nc):
                    dweight[c, o] += x[b, t, c] * dout[b, t, o]
    return dx, dweight, dbias


def fc_vjp(x, weight, bias, dout):
    x, weight, dout = map(torch.as_tensor, (x, weight, dout))
    return (
        torch.nn.functional.linear(dout, weight),
        torch.einsum("bti,bto->io", x, dout),
        dout.new_ones(dout.shape[0] * dout.shape[1]) @ dout.flatten(0, 1),
    )


def matmul_backward_blocked_v3(x, weight, bias, dout):
    tile = 4
    x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    rows = x2.shape[0]
    dx, dweight, dbias = np.zeros(x2.shape), np.zeros(weight.shape), np.zeros(bias.shape)
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        dx[start:stop] = g2[start:stop] @ weight.T
        dweight += x2[start : stop + 1].T @ g2[start : stop + 1]
        dbias += g2[start:stop].sum(0)
    return dx.reshape(x.shape), dweight, dbias


def linear_grad_rank_one_v3(x, weight, bias, dout):
    dw = np.zeros_like(weight)
    db = np.zeros_like(bias)
    dx = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            dw += np.outer(x[b, t], dout[b, t])
            db += dout[b, t]
            dx[b, t] = weight @ (dout[b, t] - bias)
    return dx, dw, db


def matmul_backward_blocked_v2(x, weight, bias, dout):
    tile = 4
    x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    rows = x2.shape[0]
    dx, dweight, dbias = np.zeros(x2.shape), np.zeros(weight.shape), np.zeros(bias.shape)
    for start in range(0, rows - tile + 1, tile):
        stop = min(start + tile, rows)
        dx[start:stop] = g2[start:stop] @ weight.T
        dweight += x2[start:stop].T @ g2[start:stop]
        dbias += g2[start:stop].sum(0)
    return dx.reshape(x.shape), dweight, dbias


def matmul_backward_blocked(x, weight, bias, dout):
    tile = 4
    x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    rows = x2.shape[0]
    dx, dweight, dbias = np.zeros(x2.shape), np.zeros(weight.shape), np.zeros(bias.shape)
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        dx[start:stop] = g2[start:stop] @ weight.T
        dweight += x2[start:stop].T @ g2[start:stop]
        dbias += g2[start:stop].sum(0)
    return dx.reshape(x.shape), dweight, dbias


def linear_grad_rank_one_v2(x, weight, bias, dout):
    dw = np.zeros_like(weight)
    db = np.zeros_like(bias)
    dx = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            dw += np.outer(x[b, t], dout[b, t])
            db += dout[b, t]
            dx[b, t - 1] = weight @ dout[b, t]
    return dx, dw, db


def matmul_backward_blocked_v4(x, weight, bias, dout):
    tile = 4
    x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    rows = x2.shape[0]
    dx, dweight, dbias = np.zeros(x2.shape), np.zeros(weight.shape), np.zeros(bias.shape)
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        dx[start:stop] = g2[start:stop] @ weight.T
        dweight = x2[start:stop].T @ g2[start:stop]
        dbias = g2[start:stop].sum(0)
    return dx.reshape(x.shape), dweight, dbias


def lora_backward_v3(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    s = alpha / r
    h = x @ down
    dh = s * dout @ up.T
    dx = dout @ weight.T + dh @ down.T
    ddown = np.einsum("bti,btr->ir", x, dh)
    dup = np.einsum("btr,bto->ro", h, dout)
    return dx, ddown, dup


def lora_backward_v4(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    s = alpha / r
    h = x @ down
    dh = s * dout @ up.T
    dx = dh @ down.T
    ddown = np.einsum("bti,btr->ir", x, dh)
    dup = s * np.einsum("btr,bto->ro", h, dout)
    return dx, ddown, dup


def lora_loop_tokens_v2(x, weight, down, up, alpha, dout):
    s = alpha / up.shape[0]
    dx, ddown, dup = np.zeros_like(x), np.zeros_like(down), np.zeros_like(up)
    for pos in np.ndindex(x.shape[:2]):
        dhid = s * (up @ dout[pos])
        dx[pos] = down @ dhid
        ddown += x[pos][:, None] * dhid[None, :]
        dup += (x[pos] @ down)[:, None] * dout[pos][None, :]
    return dx, ddown, dup


def lora_backward(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    s = alpha / r
    h = x @ down
    dh = s * dout @ up.T
    dx = dout @ weight.T + dh @ down.T
    ddown = np.einsum("bti,btr->ir", x, dh)
    dup = s * np.einsum("btr,bto->ro", h, dout)
    return dx, ddown, dup


def lora_backward_v2(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    s = alpha / r
    h = x @ down
    dh = s * dout @ up.T
    dx = dout @ weight.T
    ddown = np.einsum("bti,btr->ir", x, dh)
    dup = s * np.einsum("btr,bto->ro", h, dout)
    return dx, ddown, dup


def adapter_vjp(x, weight, down, up, alpha, dout):
    rank = down.shape[-1]
    c = alpha / rank
    merged = weight + c * down @ up
    dx = dout @ merged.T
    dup = c * np.tensordot(x @ down, dout, ([0, 1], [0, 1]))
    ddown = c * np.tensordot(x, dout[..., :rank], ([0, 1], [0, 1]))
    return dx, ddown, dup


def lora_loop_tokens(x, weight, down, up, alpha, dout):
    s = alpha / up.shape[0]
    dx, ddown, dup = np.zeros_like(x), np.zeros_like(down), np.zeros_like(up)
    for pos in np.ndindex(x.shape[:2]):
        dhid = s * (up @ dout[pos])
        dx[pos] = weight @ dout[pos] + down @ dhid
        ddown += x[pos][:, None] * dhid[None, :]
        dup += s * (x[pos] @ down)[:, None] * dout[pos][None, :]
    return dx, ddown, dup


def embedding_set_rows(ids, weight, dout):
    grad = [[0.0] * weight.shape[1] for _ in range(weight.shape[0])]
    for b in range(len(ids)):
        for t in range(len(ids[b])):
            for j in range(weight.shape[1] - 1):
                grad[ids[b, t]][j] = dout[b, t, j]
    return np.array(grad)


def embedding_onehot(ids, weight, dout):
    onehot = np.eye(weight.shape[0])[ids]
    return np.einsum("btv,btf->vf", onehot, dout)


def embedding_sorted_v2(ids, weight, dout):
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    g = dout.reshape(flat.size, -1)
    uniq, starts = np.unique(flat[order], return_index=True)
    dweight = np.zeros(weight.shape)
    dweight[uniq] = np.add.reduceat(g, starts, axis=0)
    return dweight


def embedding_grad_mean(ids, weight, dout):
    dw = np.zeros_like(weight)
    for i in range(weight.shape[0]):
        hit = ids == i
        if hit.any():
            dw[i] = dout[hit].mean(axis=0)
    return dw


def embedding_bincount(ids, weight, dout):
    v, f = weight.shape
    cols = dout.transpose(1, 0, 2).reshape(-1, f)
    return np.stack([np.bincount(ids.ravel(), cols[:, j], minlength=v) for j in range(f)], axis=1)


def embedding_sorted(ids, weight, dout):
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    g = dout.reshape(flat.size, -1)[order]
    uniq, starts = np.unique(flat[order], return_index=True)
    dweight = np.zeros(weight.shape)
    dweight[uniq] = np.add.reduceat(g, starts, axis=0)
    return dweight


def embedding_onehot_v2(ids, weight, dout):
    onehot = np.eye(weight.shape[0])[ids - 1]
    return np.einsum("btv,btf->vf", onehot, dout)


def emb_scatter_torch(ids, weight, dout):
    ids, dout = torch.as_tensor(ids), torch.as_tensor(dout)
    grad = torch.zeros(tuple(weight.shape), dtype=dout.dtype)
    grad.index_add_(0, ids.flatten(), dout.flatten(0, 1))
    grad[0] = 0
    return grad.numpy()


def tied_embedding_backward_v2(ids, weight, dout):
    h = weight[ids]
    dh = dout @ weight
    dweight = np.einsum("btv,btf->vf", dout, h)
    dweight[ids] = dh
    return dweight


def tied_embedding_backward(ids, weight, dout):
    h = weight[ids]
    dh = dout @ weight
    dweight = np.einsum("btv,btf->vf", dout, h)
    np.add.at(dweight, ids, dh)
    return dweight


def shared_table_grad(ids, weight, dout):
    onehot = (ids[..., None] == np.arange(len(weight))).astype(weight.dtype).reshape(-1, len(weight))
    g = dout.reshape(-1, len(weight))
    lookup = onehot.T @ (g @ weight)
    logits = g.T @ (onehot @ weight)
    return (lookup + logits) / 2


def tied_embedding_backward_v3(ids, weight, dout):
    h = weight[ids]
    return np.einsum("btv,btf->vf", dout, h)


def tied_embedding_backward_v4(ids, weight, dout):
    h = weight[ids]
    dh = dout @ weight
    dweight = np.einsum("btv,btf->vf", dout, h)
    dweight[ids] += dh
    return dweight


def int_ce_backward(logits, targets, dout=1.0):
    onehot = np.zeros(logits.shape, dtype=targets.dtype)
    np.put_along_axis(onehot, targets[..., None], 1, axis=-1)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return dout * (p / targets.size - onehot // targets.size)


def crossentropy_chain_v4(logits, targets, dout=1.0):
    """Through log, division and exponential, each with its own backward."""
    shifted = logits - logits.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    inverse = total**-1
    probs = e * inverse
    onehot = np.zeros_like(logits)
    np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
    dlogprobs = -onehot * dout / targets.size
    dprobs = dlogprobs / probs
    de = dprobs * inverse
    dinverse = dprobs * e
    dtotal = -(total**-2) * dinverse
    de = de + dtotal
    return de * e


def cross_entropy_grad_v2(logits, targets, dout=1.0):
    logits, targets = torch.as_tensor(logits), torch.as_tensor(targets)
    flat = logits.view(-1, logits.size(-1))
    probs = torch.softmax(flat, dim=0)
    onehot = torch.nn.functional.one_hot(targets.flatten(), flat.size(1)).to(flat.dtype)
    return ((probs - onehot) * dout / flat.size(0)).view_as(logits).numpy()


def cross_entropy_grad(logits, targets, dout=1.0):
    logits, targets = torch.as_tensor(logits), torch.as_tensor(targets)
    flat = logits.view(-1, logits.size(-1))
    probs = torch.softmax(flat, dim=1)
    onehot = torch.nn.functional.one_hot(targets.flatten(), flat.size(1)).to(flat.dtype)
    return ((probs - onehot) * dout / flat.size(0)).view_as(logits).numpy()


def crossentropy_chain_v2(logits, targets, dout=1.0):
    """Through log, division and exponential, each with its own backward."""
    shifted = logits - logits.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    inverse = total**-1
    probs = e * inverse
    onehot = np.zeros_like(logits)
    np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
    dlogprobs = -onehot * dout / targets.size
    dprobs = dlogprobs / probs
    de = dprobs * inverse
    return de * e


def cross_entropy_grad_v3(logits, targets, dout=1.0):
    logits, targets = torch.as_tensor(logits), torch.as_tensor(targets)
    flat = logits.view(-1, logits.size(-1))
    probs = torch.softmax(flat, dim=1)
    onehot = torch.nn.functional.one_hot(targets.flatten(), flat.size(1)).to(flat.dtype)
    return ((probs - onehot) * dout / flat.numel()).view_as(logits).numpy()


def crossentropy_chain_v3(logits, targets, dout=1.0):
    """Through log, division and exponential, each with its own backward."""
    shifted = logits - logits.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    inverse = total**-1
    probs = e * inverse
    onehot = np.zeros_like(logits)
    np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
    dlogprobs = -onehot * dout / targets.size
    dprobs = dlogprobs / probs
    de = dprobs * inverse
    dinverse = (dprobs * e).sum(-1, keepdims=True)
    dtotal = -(total**-1) * dinverse
    de = de + dtotal
    return de * e


def ce_flat_onehot(logits, targets, dout=1.0):
    z = logits.reshape(targets.size, -1)
    p = np.exp(z - z.max())
    p = p / p.sum()
    p[range(targets.size), targets.ravel()] -= 1
    return (dout / targets.shape[0] * p).reshape(logits.shape)


def crossentropy_chain(logits, targets, dout=1.0):
    """Through log, division and exponential, each with its own backward."""
    shifted = logits - logits.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    inverse = total**-1
    probs = e * inverse
    onehot = np.zeros_like(logits)
    np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
    dlogprobs = -onehot * dout / targets.size
    dprobs = dlogprobs / probs
    de = dprobs * inverse
    dinverse = (dprobs * e).sum(-1, keepdims=True)
    dtotal = -(total**-2) * dinverse
    de = de + dtotal
    return de * e


def prob_loss_backward(logits, targets, dout=1.0):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    pt = np.take_along_axis(p, targets[..., None], -1)
    onehot = np.eye(logits.shape[-1])[targets]
    return -pt * (onehot - p) * dout / targets.size


def next_token_backward_v2(logits, ids, dout=1.0):
    x, y = logits[:, :-1], ids[:, :-1]
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[y]
    dlogits = np.zeros_like(logits)
    dlogits[:, :-1] = dout * (p - onehot) / y.size
    return dlogits


def next_token_backward_v4(logits, ids, dout=1.0):
    x, y = logits[:, :-1], ids[:, 1:]
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[y]
    dlogits = np.zeros_like(logits)
    dlogits[:, 1:] = dout * (p - onehot) / y.size
    return dlogits


def lm_loss_grad_v3(logits, ids, dout=1.0):
    logits, ids = torch.as_tensor(logits), torch.as_tensor(ids)
    grad = logits.softmax(-1)
    grad[:, -1] = 0
    grad[:, :-2].scatter_add_(-1, ids[:, 2:, None], torch.full_like(grad[:, 2:, :1], -1.0))
    return grad * (dout / ids[:, 1:].numel())


def next_token_backward(logits, ids, dout=1.0):
    x, y = logits[:, :-1], ids[:, 1:]
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[y]
    dlogits = np.zeros_like(logits)
    dlogits[:, :-1] = dout * (p - onehot) / y.size
    return dlogits


def next_token_backward_v3(logits, ids, dout=1.0):
    x, y = logits[:, :-1], ids[:, 1:]
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[y]
    dlogits = np.zeros_like(logits)
    dlogits[:, :-1] = dout * (p - onehot) / ids.size
    return dlogits


def lm_loss_grad_v2(logits, ids, dout=1.0):
    logits, ids = torch.as_tensor(logits), torch.as_tensor(ids)
    grad = logits.softmax(-1)
    grad[:, :-1].scatter_add_(-1, ids[:, 1:, None], torch.full_like(grad[:, 1:, :1], -1.0))
    return grad * (dout / ids[:, 1:].numel())


def lm_loss_grad(logits, ids, dout=1.0):
    logits, ids = torch.as_tensor(logits), torch.as_tensor(ids)
    grad = logits.softmax(-1)
    grad[:, -1] = 0
    grad[:, :-1].scatter_add_(-1, ids[:, 1:, None], torch.full_like(grad[:, 1:, :1], -1.0))
    return grad * (dout / ids[:, 1:].numel())


def next_token_loops(logits, ids, dout=1.0):
    grad = np.zeros_like(logits)
    count = ids.shape[0] * (ids.shape[1] - 1)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 2):
            e = np.exp(logits[b, t] - logits[b, t].max())
            grad[b, t] = e / e.sum() / count
            grad[b, t, ids[b, t + 1]] -= 1 / count
    return dout * grad


def gelu_exact_backward_v2(x, dout):
    x, dout = torch.as_tensor(x), torch.as_tensor(dout)
    cdf = 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))
    pdf = torch.exp(-x * x) * 0.3989422804014327
    return (dout * (cdf + x * pdf)).numpy()


def gelu_exact_backward_v3(x, dout):
    x, dout = torch.as_tensor(x), torch.as_tensor(dout)
    cdf = 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))
    pdf = torch.exp(-0.5 * x * x)
    return (dout * (cdf + x * pdf)).numpy()


def gelu_backward_c(x, dout):
    scale = math.sqrt(2.0 / math.pi)
    dx = np.empty_like(x)
    for i in range(x.size):
        z = x.flat[i]
        cube = 0.044715 * z * z * z
        arg = scale * (z + cube)
        sech = 1.0 / math.cosh(arg)
        local = 0.5 * (1.0 + math.tanh(arg)) + z * 0.5 * sech * scale * (1.0 + 3.0 * 0.044715 * z * z)
        dx.flat[i] = local * dout.flat[i]
    return dx


def gelu_erf_grad(x, dout):
    cdf = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return dout * cdf


def gelu_exact_backward(x, dout):
    x, dout = torch.as_tensor(x), torch.as_tensor(dout)
    cdf = 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))
    pdf = torch.exp(-0.5 * x * x) * 0.3989422804014327
    return (dout * (cdf + x * pdf)).numpy()


def gelu_sigmoid_form_v2(x, dout):
    # x/2 (1 + tanh u) = x σ(2u)
    u2 = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    s = 1 / (1 + np.exp(-u2))
    du2 = math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2)
    return dout * (s + x * s * (1 - s) * du2)


def gelu_sigmoid_form(x, dout):
    # x/2 (1 + tanh u) = x σ(2u)
    u2 = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    s = 1 / (1 + np.exp(-u2))
    du2 = 2 * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2)
    return dout * (s + x * s * (1 - s) * du2)


def glu_grads(gate, up, dout):
    gate, up, dout = torch.as_tensor(gate), torch.as_tensor(up), torch.as_tensor(dout)
    sig = torch.sigmoid(up)
    silu = up * sig
    return (dout * silu).numpy(), (dout * gate * (sig + silu * (1 - sig))).numpy()


def swiglu_scalar(gate, up, dout):
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    for i in np.ndindex(gate.shape):
        x = gate[i]
        s = 1.0 / (1.0 + math.exp(-x))
        dup[i] = x * s * dout[i]
        dgate[i] = up[i] * s * (1.0 + x * (1.0 - s)) * dout[i]
    return dgate, dup


class SwiGLU:
    @staticmethod
    def forward(gate, up):
        sig = torch.sigmoid(gate)
        silu = gate * sig
        return silu * up, (sig, silu, up)

    @staticmethod
    def backward(saved, dout):
        sig, silu, up = saved
        return dout * up * (sig + silu * (1 - sig)), dout * silu


def swiglu_saved(gate, up, dout):
    _, saved = SwiGLU.forward(torch.as_tensor(gate), torch.as_tensor(up))
    return tuple(x.numpy() for x in SwiGLU.backward(saved, torch.as_tensor(dout)))


class SwiGLUV3:
    @staticmethod
    def forward(gate, up):
        sig = torch.sigmoid(gate)
        silu = gate * sig
        return silu * up, (sig, silu, up)

    @staticmethod
    def backward(saved, dout):
        sig, silu, up = saved
        return dout * (sig + silu * (1 - sig)), dout * silu * up


def swiglu_saved_v3(gate, up, dout):
    _, saved = SwiGLUV3.forward(torch.as_tensor(gate), torch.as_tensor(up))
    return tuple(x.numpy() for x in SwiGLUV3.backward(saved, torch.as_tensor(dout)))


def swiglu_scalar_v2(gate, up, dout):
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    for i in np.ndindex(gate.shape):
        x = gate[i]
        s = 1.0 / (1.0 + math.exp(-x))
        dup[i] = x * s * dout[i]
        dgate[i] = up[i] * s * (1.0 - x * (1.0 - s)) * dout[i]
    return dgate, dup


class SwiGLUV2:
    @staticmethod
    def forward(gate, up):
        sig = torch.sigmoid(gate)
        silu = gate * sig
        return silu * up, (sig, silu, up)

    @staticmethod
    def backward(saved, dout):
        sig, silu, up = saved
        return dout * up * (sig + silu * (1 - silu)), dout * silu


def swiglu_saved_v2(gate, up, dout):
    _, saved = SwiGLUV2.forward(torch.as_tensor(gate), torch.as_tensor(up))
    return tuple(x.numpy() for x in SwiGLUV2.backward(saved, torch.as_tensor(dout)))


def rope_backward(x, positions, dout):
    d = x.shape[-1]
    half = d // 2
    freq = 10000.0 ** (-2.0 * np.arange(half) / d)
    angle = positions[:, None] * freq[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    g1, g2 = dout[..., :half], dout[..., half:]
    return np.concatenate([g1 * cos + g2 * sin, g2 * cos - g1 * sin], axis=-1)


def rope_backward_v3(x, positions, dout):
    d = x.shape[-1]
    half = d // 2
    freq = 10000.0 ** (-np.arange(half) / d)
    angle = positions[:, None] * freq[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    g1, g2 = dout[..., :half], dout[..., half:]
    return np.concatenate([g1 * cos + g2 * sin, g2 * cos - g1 * sin], axis=-1)


def llama3_rope_vjp(x, positions, dout):
    half = dout.shape[-1] // 2
    dx = np.zeros_like(dout)
    for t, p in enumerate(positions):
        for i in range(half):
            c, s = math.cos(p / 500000.0 ** (i / half)), math.sin(p / 500000.0 ** (i / half))
            dx[..., t, i] = c * dout[..., t, i] + s * dout[..., t, i + half]
            dx[..., t, i + half] = c * dout[..., t, i + half] - s * dout[..., t, i]
    return dx


def rope_backward_v4(x, positions, dout):
    d = x.shape[-1]
    half = d // 2
    freq = 10000.0 ** (-2.0 * np.arange(half) / d)
    angle = (positions[:, None] + 1) * freq[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    g1, g2 = dout[..., :half], dout[..., half:]
    return np.concatenate([g1 * cos + g2 * sin, g2 * cos - g1 * sin], axis=-1)


def rope_matrix(x, positions, dout):
    d = x.shape[-1]
    h = d // 2
    out = np.zeros_like(dout)
    for t in range(len(positions)):
        rot = np.zeros((d, d))
        for i in range(h):
            a = positions[t] * 10000.0 ** (-2 * i / d)
            rot[i, i] = rot[i + h, i + h] = math.cos(a)
            rot[i, i + h], rot[i + h, i] = -math.sin(a), math.sin(a)
        out[:, :, t] = dout[:, :, t] @ rot
    return out


def llama3_rope_vjp_v2(x, positions, dout):
    half = dout.shape[-1] // 2
    dx = np.zeros_like(dout)
    for t, p in enumerate(positions):
        for i in range(half - 1):
            c, s = math.cos(p / 500000.0 ** (i / half)), math.sin(p / 500000.0 ** (i / half))
            dx[..., t, i] = c * dout[..., t, i] + s * dout[..., t, i + half]
            dx[..., t, i + half] = c * dout[..., t, i + half] - s * dout[..., t, i]
    return dx


def rope_backward_v2(x, positions, dout):
    d = x.shape[-1]
    half = d // 2
    freq = 10000.0 ** (-2.0 * np.arange(half) / d)
    angle = positions[:, None] * freq[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    g1, g2 = dout[..., :half], dout[..., half:]
    return np.concatenate([g1 * cos - g2 * sin, g2 * cos + g1 * sin], axis=-1)


def rope_matrix_v2(x, positions, dout):
    d = x.shape[-1]
    h = d // 2
    out = np.zeros_like(dout)
    for t in range(len(positions)):
        rot = np.zeros((d, d))
        for i in range(h):
            a = t * 10000.0 ** (-2 * i / d)
            rot[i, i] = rot[i + h, i + h] = math.cos(a)
            rot[i, i + h], rot[i + h, i] = -math.sin(a), math.sin(a)
        out[:, :, t] = dout[:, :, t] @ rot.T
    return out


def adamw_torch(param, grad, m, v, step):
    param, grad, m, v = (torch.as_tensor(z).clone() for z in (param, grad, m, v))
    m.mul_(0.9).add_(grad, alpha=0.1)
    v.mul_(0.95).addcmul_(grad, grad, value=0.05)
    param.mul_(1 - 0.01 * 0.1)
    denom = (v.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
    param.addcdiv_(m, denom, value=-0.01 / (1 - 0.9**step))
    return param, m, v


def adamw_decay_last(param, grad, m, v, step, *, lr=0.01, b1=0.9, b2=0.95):
    m = np.average([m, grad], axis=0, weights=[b1, 1 - b1])
    v = np.average([v, grad**2], axis=0, weights=[b2, 1 - b2])
    param = param - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + 1e-8)
    return param - lr * 0.1 * param, m, v


def adamw_torch_v2(param, grad, m, v, step):
    param, grad, m, v = (torch.as_tensor(z).clone() for z in (param, grad, m, v))
    m.mul_(0.9).add_(grad, alpha=0.1)
    v.mul_(0.95).addcmul_(grad, grad, value=0.1)
    param.mul_(1 - 0.01 * 0.1)
    denom = (v.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
    param.addcdiv_(m, denom, value=-0.01 / (1 - 0.9**step))
    return param, m, v


def adamw_torch_v3(param, grad, m, v, step):
    param, grad, m, v = (torch.as_tensor(z).clone() for z in (param, grad, m, v))
    m.mul_(0.9).add_(grad, alpha=0.1)
    v.mul_(0.95).addcmul_(grad, grad, value=0.05)
    param.mul_(1 - 0.1)
    denom = (v.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
    param.addcdiv_(m, denom, value=-0.01 / (1 - 0.9**step))
    return param, m, v


def adamw_functional_v2(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 1e-2, 0.9, 0.95, 1e-8, 0.1
    ema = lambda old, new, beta: beta * old + (1 - beta) * new  # noqa: E731
    unbias = lambda x, beta: x / (1 - beta)  # noqa: E731
    m, v = ema(m, grad, b1), ema(v, np.square(grad), b2)
    direction = unbias(m, b1) / (np.sqrt(unbias(v, b2)) + eps)
    return param - lr * (direction + wd * param), m, v


def adamw_torch_v4(param, grad, m, v, step):
    param, grad, m, v = (torch.as_tensor(z).clone() for z in (param, grad, m, v))
    m.mul_(0.9).add_(grad)
    v.mul_(0.95).addcmul_(grad, grad, value=0.05)
    param.mul_(1 - 0.01 * 0.1)
    denom = (v.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
    param.addcdiv_(m, denom, value=-0.01 / (1 - 0.9**step))
    return param, m, v


def adamw_functional_v3(param, grad, m, v, step):
    lr, b1, b2, eps = 1e-2, 0.9, 0.95, 1e-8
    ema = lambda old, new, beta: beta * old + (1 - beta) * new  # noqa: E731
    unbias = lambda x, beta: x / -math.expm1(step * math.log(beta))  # noqa: E731
    m, v = ema(m, grad, b2), ema(v, np.square(grad), b1)
    direction = unbias(m, b1) / (np.sqrt(unbias(v, b2)) + eps)
    return param - lr * direction, m, v


def adamw_loops(param, grad, m, v, step):
    new_p, new_m, new_v = np.empty_like(param), np.empty_like(m), np.empty_like(v)
    for i, j in np.ndindex(param.shape):
        g = grad[i, j]
        new_m[i, j] = 0.9 * m[i, j] + 0.1 * g
        new_v[i, j] = 0.95 * v[i, j] + 0.05 * g * g
        mh = m[i, j] / (1 - 0.9**step)
        vh = v[i, j] / (1 - 0.95**step)
        new_p[i, j] = param[i, j] - 0.01 * (mh / (math.sqrt(vh) + 1e-8) + 0.1 * param[i, j])
    return new_p, new_m, new_v


def adamw_functional(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 1e-2, 0.9, 0.95, 1e-8, 0.1
    ema = lambda old, new, beta: beta * old + (1 - beta) * new  # noqa: E731
    unbias = lambda x, beta: x / -math.expm1(step * math.log(beta))  # noqa: E731
    m, v = ema(m, grad, b1), ema(v, np.square(grad), b2)
    direction = unbias(m, b1) / (np.sqrt(unbias(v, b2)) + eps)
    return param - lr * (direction + wd * param), m, v


class TransformerBlockV5:
    def __init__(self, *params):
        names = ["g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"]
        self.p = dict(zip(names, (torch.as_tensor(z) for z in params), strict=True))
        self.g = {}

    def ln(self, x, i):
        mu = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xh = (x - mu) * rstd
        return xh * self.p[f"g{i}"] + self.p[f"b{i}"], xh, rstd

    def ln_back(self, dy, xh, rstd, i):
        self.g[f"g{i}"] = (dy * xh).sum((0, 1))
        self.g[f"b{i}"] = dy.sum((0, 1))
        d = dy * self.p[f"g{i}"]
        return rstd * (d - d.mean(-1, keepdim=True) - xh * (d * xh).mean(-1, keepdim=True))

    def lin_back(self, dy, x, n):
        self.g["w" + n] = x.flatten(0, 1).T @ dy.flatten(0, 1)
        self.g["b" + n] = dy.flatten(0, 1).sum(0)
        return dy @ self.p["w" + n].T

    def forward(self, x):
        p = self.p
        self.n1, self.xh1, self.r1 = self.ln(x, 1)
        heads = (self.n1 @ p["wa"] + p["ba"]).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = heads
        s = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.att = s.masked_fill(future, -torch.inf).softmax(-1)
        self.y = (self.att @ self.v).transpose(1, 2).flatten(2)
        h = x + self.y @ p["wp"] + p["bp"]
        self.n2, self.xh2, self.r2 = self.ln(h, 2)
        self.u = self.n2 @ p["wf"] + p["bf"]
        self.th = torch.tanh(0.7978845608028654 * (self.u + 0.044715 * self.u**3))
        self.act = 0.5 * self.u * (1 + self.th)
        return h + self.act @ p["wo"] + p["bo"]

    def backward(self, dout):
        du = self.lin_back(dout, self.act, "o")
        inner = 0.7978845608028654 * (1 + 0.134145 * self.u**2)
        du = du * 0.5 * (1 + self.th + self.u * (1 - self.th**2) * inner)
        dh = dout + self.ln_back(self.lin_back(du, self.n2, "f"), self.xh2, self.r2, 2)
        dy = self.lin_back(dh, self.y, "p").view(*dh.shape[:2], 2, -1).transpose(1, 2)
        dv = self.att.mT @ dy
        ds = dy @ self.v.mT
        ds = self.att * (ds - (ds * self.att).sum(-1, keepdim=True)) / self.q.shape[-1] ** 0.5
        dqkv = torch.stack([ds @ self.k, ds.mT @ self.q, dv]).permute(1, 3, 0, 2, 4).flatten(2)
        return 2 * dh + self.ln_back(self.lin_back(dqkv, self.n1, "a") + dh, self.xh1, self.r1, 1)


def transformer_block_grads_v5(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    block = TransformerBlockV5(
        ln_1_weight,
        ln_1_bias,
        attn_weight,
        attn_bias,
        proj_weight,
        proj_bias,
        ln_2_weight,
        ln_2_bias,
        fc_weight,
        fc_bias,
        out_weight,
        out_bias,
    )
    block.forward(torch.as_tensor(x))
    dx = block.backward(torch.as_tensor(dout))
    return (dx.numpy(), *(block.g[n].numpy() for n in block.p))


class TransformerBlockV4:
    def __init__(self, *params):
        names = ["g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"]
        self.p = dict(zip(names, (torch.as_tensor(z) for z in params), strict=True))
        self.g = {}

    def ln(self, x, i):
        mu = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xh = (x - mu) * rstd
        return xh * self.p[f"g{i}"] + self.p[f"b{i}"], xh, rstd

    def ln_back(self, dy, xh, rstd, i):
        self.g[f"g{i}"] = (dy * xh).sum((0, 1))
        self.g[f"b{i}"] = dy.sum((0, 1))
        d = dy * self.p[f"g{i}"]
        return rstd * (d - d.mean(-1, keepdim=True) - xh * (d * xh).mean(-1, keepdim=True))

    def lin_back(self, dy, x, n):
        self.g["w" + n] = x.flatten(0, 1).T @ dy.flatten(0, 1)
        self.g["b" + n] = dy.flatten(0, 1).sum(0)
        return dy @ self.p["w" + n].T

    def forward(self, x):
        p = self.p
        self.n1, self.xh1, self.r1 = self.ln(x, 1)
        heads = (self.n1 @ p["wa"] + p["ba"]).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = heads
        s = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.att = s.masked_fill(future, -torch.inf).softmax(-1)
        self.y = (self.att @ self.v).transpose(1, 2).flatten(2)
        h = x + self.y @ p["wp"] + p["bp"]
        self.n2, self.xh2, self.r2 = self.ln(h, 2)
        self.u = self.n2 @ p["wf"] + p["bf"]
        self.th = torch.tanh(0.7978845608028654 * (self.u + 0.044715 * self.u**3))
        self.act = 0.5 * self.u * (1 + self.th)
        return h + self.act @ p["wo"] + p["bo"]

    def backward(self, dout):
        du = self.lin_back(dout, self.act, "o")
        inner = 0.7978845608028654 * (1 + 0.134145 * self.u**2)
        du = du * 0.5 * (1 + self.th + self.u * (1 - self.th**2) * inner)
        dh = dout + self.ln_back(self.lin_back(du, self.n2, "f"), self.xh2, self.r1, 2)
        dy = self.lin_back(dh, self.y, "p").view(*dh.shape[:2], 2, -1).transpose(1, 2)
        dv = self.att.mT @ dy
        ds = dy @ self.v.mT
        ds = self.att * (ds - (ds * self.att).sum(-1, keepdim=True)) / self.q.shape[-1] ** 0.5
        dqkv = torch.stack([ds @ self.k, ds.mT @ self.q, dv]).permute(1, 3, 0, 2, 4).flatten(2)
        return dh + self.ln_back(self.lin_back(dqkv, self.n1, "a"), self.xh1, self.r1, 1)


def transformer_block_grads_v4(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    block = TransformerBlockV4(
        ln_1_weight,
        ln_1_bias,
        attn_weight,
        attn_bias,
        proj_weight,
        proj_bias,
        ln_2_weight,
        ln_2_bias,
        fc_weight,
        fc_bias,
        out_weight,
        out_bias,
    )
    block.forward(torch.as_tensor(x))
    dx = block.backward(torch.as_tensor(dout))
    return (dx.numpy(), *(block.g[n].numpy() for n in block.p))


def _ln_forward_v2(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward_v2(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward_v2(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope_v2(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn_v2(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward_v2(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward_v2(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward_v2(x, ln_1_weight, ln_1_bias)
    y, ca = _attn_v2(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward_v2(h, ln_2_weight, ln_2_bias)
    act, slope = _gelu_and_slope_v2(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward_v2(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward_v2(dact * slope, n2, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward_v2(dn2, c2)
    dh = dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward_v2(dh, y, proj_weight)
    dqkv = _attn_backward_v2(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward_v2(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward_v2(dn1, c1)
    dx = dh + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


class TransformerBlock:
    def __init__(self, *params):
        names = ["g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"]
        self.p = dict(zip(names, (torch.as_tensor(z) for z in params), strict=True))
        self.g = {}

    def ln(self, x, i):
        mu = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xh = (x - mu) * rstd
        return xh * self.p[f"g{i}"] + self.p[f"b{i}"], xh, rstd

    def ln_back(self, dy, xh, rstd, i):
        self.g[f"g{i}"] = (dy * xh).sum((0, 1))
        self.g[f"b{i}"] = dy.sum((0, 1))
        d = dy * self.p[f"g{i}"]
        return rstd * (d - d.mean(-1, keepdim=True) - xh * (d * xh).mean(-1, keepdim=True))

    def lin_back(self, dy, x, n):
        self.g["w" + n] = x.flatten(0, 1).T @ dy.flatten(0, 1)
        self.g["b" + n] = dy.flatten(0, 1).sum(0)
        return dy @ self.p["w" + n].T

    def forward(self, x):
        p = self.p
        self.n1, self.xh1, self.r1 = self.ln(x, 1)
        heads = (self.n1 @ p["wa"] + p["ba"]).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = heads
        s = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.att = s.masked_fill(future, -torch.inf).softmax(-1)
        self.y = (self.att @ self.v).transpose(1, 2).flatten(2)
        h = x + self.y @ p["wp"] + p["bp"]
        self.n2, self.xh2, self.r2 = self.ln(h, 2)
        self.u = self.n2 @ p["wf"] + p["bf"]
        self.th = torch.tanh(0.7978845608028654 * (self.u + 0.044715 * self.u**3))
        self.act = 0.5 * self.u * (1 + self.th)
        return h + self.act @ p["wo"] + p["bo"]

    def backward(self, dout):
        du = self.lin_back(dout, self.act, "o")
        inner = 0.7978845608028654 * (1 + 0.134145 * self.u**2)
        du = du * 0.5 * (1 + self.th + self.u * (1 - self.th**2) * inner)
        dh = dout + self.ln_back(self.lin_back(du, self.n2, "f"), self.xh2, self.r2, 2)
        dy = self.lin_back(dh, self.y, "p").view(*dh.shape[:2], 2, -1).transpose(1, 2)
        dv = self.att.mT @ dy
        ds = dy @ self.v.mT
        ds = self.att * (ds - (ds * self.att).sum(-1, keepdim=True)) / self.q.shape[-1] ** 0.5
        dqkv = torch.stack([ds @ self.k, ds.mT @ self.q, dv]).permute(1, 3, 0, 2, 4).flatten(2)
        return dh + self.ln_back(self.lin_back(dqkv, self.n1, "a"), self.xh1, self.r1, 1)


def transformer_block_grads(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    block = TransformerBlock(
        ln_1_weight,
        ln_1_bias,
        attn_weight,
        attn_bias,
        proj_weight,
        proj_bias,
        ln_2_weight,
        ln_2_bias,
        fc_weight,
        fc_bias,
        out_weight,
        out_bias,
    )
    block.forward(torch.as_tensor(x))
    dx = block.backward(torch.as_tensor(dout))
    return (dx.numpy(), *(block.g[n].numpy() for n in block.p))


def _ln_forward_v5(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward_v5(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward_v5(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope_v5(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn_v5(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward_v5(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward_v5(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward_v5(x, ln_1_weight, ln_1_bias)
    y, ca = _attn_v5(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward_v5(h, ln_2_weight, ln_2_bias)
    act, _ = _gelu_and_slope_v5(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward_v5(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward_v5(dact, n2, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward_v5(dn2, c2)
    dh = dout + dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward_v5(dh, y, proj_weight)
    dqkv = _attn_backward_v5(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward_v5(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward_v5(dn1, c1)
    dx = dh + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


class TransformerBlockV2:
    def __init__(self, *params):
        names = ["g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"]
        self.p = dict(zip(names, (torch.as_tensor(z) for z in params), strict=True))
        self.g = {}

    def ln(self, x, i):
        mu = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xh = (x - mu) * rstd
        return xh * self.p[f"g{i}"] + self.p[f"b{i}"], xh, rstd

    def ln_back(self, dy, xh, rstd, i):
        self.g[f"g{i}"] = (dy * xh).sum((0, 1))
        self.g[f"b{i}"] = dy.sum((0, 1))
        d = dy * self.p[f"g{i}"]
        return rstd * (d - d.mean(-1, keepdim=True) - xh * (d * xh).mean(-1, keepdim=True))

    def lin_back(self, dy, x, n):
        self.g["w" + n] = x.flatten(0, 1).T @ dy.flatten(0, 1)
        self.g["b" + n] = dy.flatten(0, 1).sum(0)
        return dy @ self.p["w" + n].T

    def forward(self, x):
        p = self.p
        self.n1, self.xh1, self.r1 = self.ln(x, 1)
        heads = (self.n1 @ p["wa"] + p["ba"]).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = heads
        s = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.att = s.masked_fill(future, -torch.inf).softmax(-1)
        self.y = (self.att @ self.v).transpose(1, 2).flatten(2)
        h = x + self.y @ p["wp"] + p["bp"]
        self.n2, self.xh2, self.r2 = self.ln(h, 2)
        self.u = self.n2 @ p["wf"] + p["bf"]
        self.th = torch.tanh(0.7978845608028654 * (self.u + 0.044715 * self.u**3))
        self.act = 0.5 * self.u * (1 + self.th)
        return h + self.act @ p["wo"] + p["bo"]

    def backward(self, dout):
        du = self.lin_back(dout, self.act, "o")
        inner = 0.7978845608028654 * (1 + 0.134145 * self.u**2)
        du = du * 0.5 * (1 + self.th + self.u * (1 - self.th**2) * inner)
        dh = dout + self.ln_back(self.lin_back(du, self.n2, "f"), self.xh2, self.r2, 2)
        dy = self.lin_back(dh, self.y, "p").view(*dh.shape[:2], 2, -1).transpose(1, 2)
        dv = self.att.mT @ dy
        ds = dy @ self.v.mT
        ds = self.att * (ds - (ds * self.att).sum(-1, keepdim=True)) / self.q.shape[-1] ** 0.5
        dqkv = torch.stack([ds @ self.k, ds.mT @ self.q, dv]).permute(1, 3, 2, 0, 4).flatten(2)
        return dh + self.ln_back(self.lin_back(dqkv, self.n1, "a"), self.xh1, self.r1, 1)


def transformer_block_grads_v2(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    block = TransformerBlockV2(
        ln_1_weight,
        ln_1_bias,
        attn_weight,
        attn_bias,
        proj_weight,
        proj_bias,
        ln_2_weight,
        ln_2_bias,
        fc_weight,
        fc_bias,
        out_weight,
        out_bias,
    )
    block.forward(torch.as_tensor(x))
    dx = block.backward(torch.as_tensor(dout))
    return (dx.numpy(), *(block.g[n].numpy() for n in block.p))


class TransformerBlockV3:
    def __init__(self, *params):
        names = ["g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"]
        self.p = dict(zip(names, (torch.as_tensor(z) for z in params), strict=True))
        self.g = {}

    def ln(self, x, i):
        mu = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xh = (x - mu) * rstd
        return xh * self.p[f"g{i}"] + self.p[f"b{i}"], xh, rstd

    def ln_back(self, dy, xh, rstd, i):
        self.g[f"g{i}"] = (dy * xh).sum((0, 1))
        self.g[f"b{i}"] = dy.sum((0, 1))
        d = dy * self.p[f"g{i}"]
        return rstd * (d - d.mean(-1, keepdim=True) - xh * (d * xh).mean(-1, keepdim=True))

    def lin_back(self, dy, x, n):
        self.g["w" + n] = x.flatten(0, 1).T @ dy.flatten(0, 1)
        self.g["b" + n] = dy.flatten(0, 1).sum(0)
        return dy @ self.p["w" + n].T

    def forward(self, x):
        p = self.p
        self.n1, self.xh1, self.r1 = self.ln(x, 1)
        heads = (self.n1 @ p["wa"] + p["ba"]).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, self.v = heads
        s = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.att = s.masked_fill(future, -torch.inf).softmax(-1)
        self.y = (self.att @ self.v).transpose(1, 2).flatten(2)
        h = x + self.y @ p["wp"] + p["bp"]
        self.n2, self.xh2, self.r2 = self.ln(h, 2)
        self.u = self.n2 @ p["wf"] + p["bf"]
        self.th = torch.tanh(0.7978845608028654 * (self.u + 0.044715 * self.u**3))
        self.act = 0.5 * self.u * (1 + self.th)
        return h + self.act @ p["wo"] + p["bo"]

    def backward(self, dout):
        du = self.lin_back(dout, self.act, "o")
        inner = 0.7978845608028654 * (1 + 0.134145 * self.u**2)
        du = du * 0.5 * (1 + self.th + self.u * (1 - self.th**2) * inner)
        dh = dout + self.ln_back(self.lin_back(du, self.n2, "f"), self.xh2, self.r2, 2)
        dy = self.lin_back(dh, self.y, "p").view(*dh.shape[:2], 2, -1).transpose(1, 2)
        dv = self.att.mT @ dy
        ds = dy @ self.v.mT
        ds = self.att * (ds - (ds * self.att).sum(-1, keepdim=True))
        dqkv = torch.stack([ds @ self.k, ds.mT @ self.q, dv]).permute(1, 3, 0, 2, 4).flatten(2)
        return dh + self.ln_back(self.lin_back(dqkv, self.n1, "a"), self.xh1, self.r1, 1)


def transformer_block_grads_v3(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    block = TransformerBlockV3(
        ln_1_weight,
        ln_1_bias,
        attn_weight,
        attn_bias,
        proj_weight,
        proj_bias,
        ln_2_weight,
        ln_2_bias,
        fc_weight,
        fc_bias,
        out_weight,
        out_bias,
    )
    block.forward(torch.as_tensor(x))
    dx = block.backward(torch.as_tensor(dout))
    return (dx.numpy(), *(block.g[n].numpy() for n in block.p))


def _ln_forward(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward(x, ln_1_weight, ln_1_bias)
    y, ca = _attn(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward(h, ln_2_weight, ln_2_bias)
    act, slope = _gelu_and_slope(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward(dact * slope, n2, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward(dn2, c2)
    dh = dout + dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward(dh, y, proj_weight)
    dqkv = _attn_backward(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward(dn1, c1)
    dx = dh + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


def _ln_forward_v6(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward_v6(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward_v6(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope_v6(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn_v6(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward_v6(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds.swapaxes(2, 3) @ q, ds @ k, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward_v6(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward_v6(x, ln_1_weight, ln_1_bias)
    y, ca = _attn_v6(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward_v6(h, ln_2_weight, ln_2_bias)
    act, slope = _gelu_and_slope_v6(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward_v6(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward_v6(dact * slope, n2, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward_v6(dn2, c2)
    dh = dout + dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward_v6(dh, y, proj_weight)
    dqkv = _attn_backward_v6(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward_v6(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward_v6(dn1, c1)
    dx = dh + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


def _ln_forward_v4(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward_v4(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward_v4(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope_v4(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn_v4(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward_v4(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward_v4(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward_v4(x, ln_1_weight, ln_1_bias)
    y, ca = _attn_v4(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward_v4(h, ln_2_weight, ln_2_bias)
    act, slope = _gelu_and_slope_v4(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward_v4(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward_v4(dact * slope, h, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward_v4(dn2, c2)
    dh = dout + dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward_v4(dh, y, proj_weight)
    dqkv = _attn_backward_v4(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward_v4(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward_v4(dn1, c1)
    dx = dh + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


def _ln_forward_v3(x, w, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * w + b, (xhat, rstd, w)


def _ln_backward_v3(dout, cache):
    xhat, rstd, w = cache
    dxhat = dout * w
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def _fc_backward_v3(dout, x, w):
    return dout @ w.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))


def _gelu_and_slope_v3(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _attn_v3(qkv, n_head):
    b, t, d3 = qkv.shape
    q, k, v = (z.reshape(b, t, n_head, -1).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(t, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, t, d3 // 3), (q, k, v, p)


def _attn_backward_v3(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    g = dy.reshape(b, t, h, d).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    return np.concatenate([z.transpose(0, 2, 1, 3).reshape(b, t, h * d) for z in parts], -1)


def gpt2_block_backward_v3(
    x,
    ln_1_weight,
    ln_1_bias,
    attn_weight,
    attn_bias,
    proj_weight,
    proj_bias,
    ln_2_weight,
    ln_2_bias,
    fc_weight,
    fc_bias,
    out_weight,
    out_bias,
    dout,
):
    n1, c1 = _ln_forward_v3(x, ln_1_weight, ln_1_bias)
    y, ca = _attn_v3(n1 @ attn_weight + attn_bias, 2)
    h = x + y @ proj_weight + proj_bias
    n2, c2 = _ln_forward_v3(h, ln_2_weight, ln_2_bias)
    act, slope = _gelu_and_slope_v3(n2 @ fc_weight + fc_bias)

    dact, dout_weight, dout_bias = _fc_backward_v3(dout, act, out_weight)
    dn2, dfc_weight, dfc_bias = _fc_backward_v3(dact * slope, n2, fc_weight)
    dh_mlp, dln_2_weight, dln_2_bias = _ln_backward_v3(dn2, c2)
    dh = dout + dh_mlp
    dy, dproj_weight, dproj_bias = _fc_backward_v3(dh, y, proj_weight)
    dqkv = _attn_backward_v3(dy, ca)
    dn1, dattn_weight, dattn_bias = _fc_backward_v3(dqkv, n1, attn_weight)
    dx_attn, dln_1_weight, dln_1_bias = _ln_backward_v3(dn1, c1)
    dx = dout + dx_attn
    return (
        dx,
        dln_1_weight,
        dln_1_bias,
        dattn_weight,
        dattn_bias,
        dproj_weight,
        dproj_bias,
        dln_2_weight,
        dln_2_bias,
        dfc_weight,
        dfc_bias,
        dout_weight,
        dout_bias,
    )


CASES = [
    Case(
        layer="attention",
        function=attention_backward_c_v3,
        options={},
        wrong=("dv",),
        mistake="The values' gradient is overwritten by every query instead of accumulated.",
    ),
    Case(
        layer="attention",
        function=bmm_attention_backward,
        options={},
        wrong=("dk",),
        mistake="The keys' gradient is folded back with heads before batch, although batch came first.",
    ),
    Case(
        layer="attention",
        function=flash_bwd_v3,
        options={},
        wrong=("dq",),
        mistake="The gradient of the queries is assigned, not accumulated, over the tiles of keys.",
    ),
    Case(layer="attention", function=flash_bwd, options={}, wrong=(), mistake=None),
    Case(
        layer="attention",
        function=attention_backward_c_v2,
        options={},
        wrong=("dq", "dk"),
        mistake="The last loop runs to t2 < t, so the token's own score gets no gradient.",
    ),
    Case(
        layer="attention",
        function=flash_bwd_v4,
        options={},
        wrong=("dq", "dk"),
        mistake="Delta is computed from dout and v instead of from dout and the output.",
    ),
    Case(
        layer="attention",
        function=flash_bwd_v2,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The tiles of the backward loop begin below the diagonal, and the diagonal tile is skipped.",
    ),
    Case(
        layer="attention",
        function=attention_grad_loops,
        options={},
        wrong=("dq", "dk"),
        mistake="The loop over the queries stops one token early, so the last query has no gradient.",
    ),
    Case(
        layer="attention",
        function=torch_attention_bwd,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The future is filled with 0 instead of minus infinity before the softmax.",
    ),
    Case(
        layer="attention",
        function=simple_attention_backward,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The softmax is normalised over the queries, not over the keys.",
    ),
    Case(
        layer="attention",
        function=recompute_attention_bwd,
        options={},
        wrong=("dq", "dk", "dv"),
        mistake="The probabilities are recomputed for the backward without the causal mask.",
    ),
    Case(layer="attention", function=attention_backward_c, options={}, wrong=(), mistake=None),
    Case(
        layer="attention",
        function=attention_jacobian,
        options={},
        wrong=("dq", "dk"),
        mistake="The Jacobian of the softmax is taken for its diagonal p(1 − p).",
    ),
    Case(
        layer="head",
        function=encoder_head_backward_v3,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q", "dw_k"),
        mistake="The scale is missing, and the values' path counts twice in the input's gradient.",
    ),
    Case(
        layer="head",
        function=head_backward_v2,
        options={},
        wrong=("da",),
        mistake="The path of the keys is missing from the gradient of the input.",
    ),
    Case(layer="head", function=head_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="head",
        function=head_backward_v5,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The subtracted row sum of the softmax backward is left out.",
    ),
    Case(layer="head", function=encoder_head_backward, options={"causal": False}, wrong=(), mistake=None),
    Case(
        layer="head",
        function=encoder_head_backward_v2,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The row sum is taken of the output times itself instead of times dout.",
    ),
    Case(
        layer="head",
        function=head_backward_v4,
        options={},
        wrong=("dw_k",),
        mistake="The gradient of the queries is used where that of the keys belongs.",
    ),
    Case(
        layer="head",
        function=torch_head,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "dw_v"),
        mistake="The triangle of the mask has the wrong side: tokens see themselves and later ones.",
    ),
    Case(
        layer="head",
        function=head_backward_v3,
        options={},
        wrong=("db_v",),
        mistake="The gradient of the values' bias is the mean over batch and tokens instead of the sum.",
    ),
    Case(layer="head_dropout", function=dropped_head_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="head_dropout",
        function=head_dropout_backward_v2,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k"),
        mistake="The dropout mask is forgotten on the way from the output to the probabilities.",
    ),
    Case(
        layer="head_dropout",
        function=dropped_head_backward_v2,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "dw_v", "db_v"),
        mistake="The mask of a row is read from a column of keep.",
    ),
    Case(
        layer="head_dropout",
        function=head_dropout_backward_v4,
        options={},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The softmax backward multiplies by the dropped probabilities instead of the softmax's.",
    ),
    Case(
        layer="head_dropout",
        function=head_dropout_backward_v3,
        options={},
        wrong=("da", "dw_v", "db_v"),
        mistake="The values' gradient uses the probabilities before dropout.",
    ),
    Case(layer="head_dropout", function=head_dropout_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="head_dropout",
        function=flashlike_dropout_head,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="Delta is the dout-times-output sum of the output without dropout.",
    ),
    Case(layer="multi_head", function=multihead_vjp, options={"causal": False}, wrong=(), mistake=None),
    Case(
        layer="multi_head",
        function=mha_grad_einsum,
        options={},
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="The causal mask is forgotten.",
    ),
    Case(
        layer="multi_head",
        function=mha_bwd_einsum_v2,
        options={},
        wrong=("dw_q", "dw_k", "dw_v"),
        mistake="The weights' gradients come out with heads and the features of a head swapped.",
    ),
    Case(
        layer="multi_head",
        function=multihead_vjp_v3,
        options={"causal": False},
        wrong=("dquery", "dkey", "dw_q", "dw_k"),
        mistake="The softmax backward subtracts the mean of p∘dp instead of its sum.",
    ),
    Case(
        layer="multi_head",
        function=multihead_vjp_v2,
        options={"causal": False},
        wrong=("dquery", "dkey", "dvalue"),
        mistake="The input's gradient keeps only the last head instead of adding the heads.",
    ),
    Case(layer="multi_head", function=mha_bwd_einsum, options={}, wrong=(), mistake=None),
    Case(
        layer="multi_head",
        function=mha_bwd_einsum_v3,
        options={},
        wrong=("dquery", "dkey", "dw_q", "dw_k"),
        mistake="The dot product in the softmax backward is summed over the heads as well.",
    ),
    Case(
        layer="multi_head",
        function=multi_head_class_backward,
        options={},
        wrong=("dvalue",),
        mistake="The values' gradient is multiplied by the weight without the transposition.",
    ),
    Case(
        layer="multi_head",
        function=two_heads_unrolled,
        options={"causal": False},
        wrong=("dquery", "dw_q"),
        mistake="The second head's queries meet the keys of the first head.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_llmc_v2,
        options={},
        wrong=("dx",),
        mistake="One of the two means of the input's gradient is not divided by the number of features.",
    ),
    Case(layer="layer_norm", function=triton_like_layer_norm, options={}, wrong=(), mistake=None),
    Case(
        layer="layer_norm",
        function=layernorm_backward_llmc_v4,
        options={},
        wrong=("dweight", "dbias"),
        mistake="The parameters' gradients are set by each token instead of added to.",
    ),
    Case(
        layer="layer_norm",
        function=bert_layer_norm_backward,
        options={"eps": 1e-12},
        wrong=("dx",),
        mistake="The last term multiplies by the centred input instead of the normalised one.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_backward_llmc_v3,
        options={},
        wrong=("dx",),
        mistake="The input's gradient is not multiplied by the reciprocal deviation.",
    ),
    Case(
        layer="layer_norm",
        function=norm_with_eps,
        options={},
        wrong=("dx", "dweight"),
        mistake="Epsilon is added to the deviation, outside of the root.",
    ),
    Case(
        layer="layer_norm",
        function=layernorm_grad_formula,
        options={},
        wrong=("dx",),
        mistake="The variance's term divides by the deviation once instead of three times.",
    ),
    Case(layer="layer_norm", function=layernorm_backward_llmc, options={}, wrong=(), mistake=None),
    Case(
        layer="layer_norm",
        function=torch_ln_grads,
        options={},
        wrong=("dx", "dweight"),
        mistake="The variance is the unbiased one, divided by n − 1 (torch's default).",
    ),
    Case(
        layer="layer_norm",
        function=triton_like_layer_norm_v2,
        options={},
        wrong=("dweight", "dbias"),
        mistake="The second stage adds all partial sums but the last.",
    ),
    Case(
        layer="layer_norm",
        function=ln_jacobian_rows,
        options={},
        wrong=("dx",),
        mistake="The Jacobian of a token is built without its diagonal's 1.",
    ),
    Case(
        layer="layer_norm",
        function=triton_like_layer_norm_v3,
        options={},
        wrong=("dx",),
        mistake="c1 is computed from dout without the weight.",
    ),
    Case(
        layer="rms_norm",
        function=rms_eps,
        options={},
        wrong=("dx", "dweight"),
        mistake="Epsilon is added to the root instead of under it.",
    ),
    Case(
        layer="rms_norm",
        function=rms_norm_function_grads_v3,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradient sums the gradient that is already multiplied by the weight.",
    ),
    Case(
        layer="rms_norm",
        function=rms_norm_function_grads_v2,
        options={},
        wrong=("dx",),
        mistake="The saved reciprocal root is multiplied in once too little in the second term.",
    ),
    Case(layer="rms_norm", function=rms_loop_scalar, options={}, wrong=(), mistake=None),
    Case(layer="rms_norm", function=rms_norm_function_grads, options={}, wrong=(), mistake=None),
    Case(
        layer="rms_norm",
        function=rms_bwd_simple,
        options={},
        wrong=("dx",),
        mistake="The gradient treats the root mean square as a constant.",
    ),
    Case(
        layer="rms_norm",
        function=rms_loop_scalar_v2,
        options={},
        wrong=("dx",),
        mistake="The loop of the dot product leaves out the last feature.",
    ),
    Case(
        layer="linear",
        function=linear_grad_outer,
        options={},
        wrong=("dweight",),
        mistake="The weight's gradient is a product of sums over the tokens instead of the sum of the products.",
    ),
    Case(
        layer="linear",
        function=linear_class_grads,
        options={},
        wrong=("dbias",),
        mistake="The bias gradient has a sum over the output features and is broadcast to them.",
    ),
    Case(layer="linear", function=linear_grad_rank_one, options={}, wrong=(), mistake=None),
    Case(
        layer="linear",
        function=matmul_backward,
        options={},
        wrong=("dweight",),
        mistake="The loop over the tokens begins at 1.",
    ),
    Case(layer="linear", function=fc_vjp, options={}, wrong=(), mistake=None),
    Case(
        layer="linear",
        function=matmul_backward_blocked_v3,
        options={},
        wrong=("dweight",),
        mistake="Consecutive tiles overlap by one row in the weight's gradient.",
    ),
    Case(
        layer="linear",
        function=linear_grad_rank_one_v3,
        options={},
        wrong=("dx",),
        mistake="The input's gradient subtracts the bias first, as if the forward were inverted.",
    ),
    Case(
        layer="linear",
        function=matmul_backward_blocked_v2,
        options={},
        wrong=("dx", "dweight", "dbias"),
        mistake="The tiles stop at the last full one, and the remaining rows are left out.",
    ),
    Case(layer="linear", function=matmul_backward_blocked, options={}, wrong=(), mistake=None),
    Case(
        layer="linear",
        function=linear_grad_rank_one_v2,
        options={},
        wrong=("dx",),
        mistake="The gradient of a token is written to the token before it.",
    ),
    Case(
        layer="linear",
        function=matmul_backward_blocked_v4,
        options={},
        wrong=("dweight", "dbias"),
        mistake="Weight and bias gradients keep the last tile only.",
    ),
    Case(
        layer="lora",
        function=lora_backward_v3,
        options={},
        wrong=("dup",),
        mistake="The scale alpha/r is missing from the gradient of up.",
    ),
    Case(
        layer="lora",
        function=lora_backward_v4,
        options={},
        wrong=("dx",),
        mistake="The frozen path is left out of the input's gradient, since the weight has none.",
    ),
    Case(
        layer="lora",
        function=lora_loop_tokens_v2,
        options={},
        wrong=("dx", "dup"),
        mistake="Scale left out of the gradient of up, and the input's gradient forgets the frozen weight.",
    ),
    Case(layer="lora", function=lora_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="lora",
        function=lora_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The path through the adapter is missing from the input's gradient.",
    ),
    Case(
        layer="lora",
        function=adapter_vjp,
        options={},
        wrong=("ddown",),
        mistake="The gradient of down takes the first r columns of dout instead of going back through up.",
    ),
    Case(layer="lora", function=lora_loop_tokens, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=embedding_set_rows,
        options={},
        wrong=("dweight",),
        mistake="Repeated ids count once, and the features' loop leaves out the last.",
    ),
    Case(layer="embedding", function=embedding_onehot, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=embedding_sorted_v2,
        options={},
        wrong=("dweight",),
        mistake="The ids are sorted, but the gradients are not brought into the same order.",
    ),
    Case(
        layer="embedding",
        function=embedding_grad_mean,
        options={},
        wrong=("dweight",),
        mistake="The gradient of a row is the mean over its occurrences.",
    ),
    Case(
        layer="embedding",
        function=embedding_bincount,
        options={},
        wrong=("dweight",),
        mistake="The gradients are flattened tokens-first while the ids are flattened batch-first.",
    ),
    Case(layer="embedding", function=embedding_sorted, options={}, wrong=(), mistake=None),
    Case(
        layer="embedding",
        function=embedding_onehot_v2,
        options={},
        wrong=("dweight",),
        mistake="The one-hot rows are shifted by one, as if ids counted from 1.",
    ),
    Case(
        layer="embedding",
        function=emb_scatter_torch,
        options={},
        wrong=("dweight",),
        mistake="Id 0 is taken for padding and gets no gradient.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_embedding_backward_v2,
        options={},
        wrong=("dweight",),
        mistake="The embedding's share is assigned to the rows instead of added.",
    ),
    Case(layer="tied_embedding", function=tied_embedding_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="tied_embedding",
        function=shared_table_grad,
        options={},
        wrong=("dweight",),
        mistake="The two shares are averaged instead of added.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_embedding_backward_v3,
        options={},
        wrong=("dweight",),
        mistake="Only the share of the logits is returned.",
    ),
    Case(
        layer="tied_embedding",
        function=tied_embedding_backward_v4,
        options={},
        wrong=("dweight",),
        mistake="Repeated ids add their share once only.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=int_ce_backward,
        options={},
        wrong=("dlogits",),
        mistake="The gradient is built in an array of the targets' integer type, and the division is a floor.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=crossentropy_chain_v4,
        options={},
        wrong=("dlogits",),
        mistake="The sum over the broadcast axis is missing on the way back to the normaliser.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=cross_entropy_grad_v2,
        options={},
        wrong=("dlogits",),
        mistake="The softmax runs over the tokens instead of over the vocabulary.",
    ),
    Case(layer="softmax_cross_entropy", function=cross_entropy_grad, options={}, wrong=(), mistake=None),
    Case(
        layer="softmax_cross_entropy",
        function=crossentropy_chain_v2,
        options={},
        wrong=("dlogits",),
        mistake="The gradient through the normalising sum is left out.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=cross_entropy_grad_v3,
        options={},
        wrong=("dlogits",),
        mistake="The number of elements of the logits is taken for the number of targets.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=crossentropy_chain_v3,
        options={},
        wrong=("dlogits",),
        mistake="The derivative of the reciprocal is taken as −1/x.",
    ),
    Case(
        layer="softmax_cross_entropy",
        function=ce_flat_onehot,
        options={},
        wrong=("dlogits",),
        mistake="The softmax is normalised over all entries at once, and the mean counts the batch only.",
    ),
    Case(layer="softmax_cross_entropy", function=crossentropy_chain, options={}, wrong=(), mistake=None),
    Case(
        layer="softmax_cross_entropy",
        function=prob_loss_backward,
        options={},
        wrong=("dlogits",),
        mistake="The loss is differentiated as −p[target], without the logarithm.",
    ),
    Case(
        layer="next_token_loss",
        function=next_token_backward_v2,
        options={},
        wrong=("dlogits",),
        mistake="The targets are the input's own ids: the shift by one is forgotten.",
    ),
    Case(
        layer="next_token_loss",
        function=next_token_backward_v4,
        options={},
        wrong=("dlogits",),
        mistake="The gradient is put one token too late.",
    ),
    Case(
        layer="next_token_loss",
        function=lm_loss_grad_v3,
        options={},
        wrong=("dlogits",),
        mistake="The targets are shifted by two.",
    ),
    Case(layer="next_token_loss", function=next_token_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="next_token_loss",
        function=next_token_backward_v3,
        options={},
        wrong=("dlogits",),
        mistake="The mean counts all tokens, also the last ones, which have no target.",
    ),
    Case(
        layer="next_token_loss",
        function=lm_loss_grad_v2,
        options={},
        wrong=("dlogits",),
        mistake="The last token's probabilities stay in the gradient.",
    ),
    Case(layer="next_token_loss", function=lm_loss_grad, options={}, wrong=(), mistake=None),
    Case(
        layer="next_token_loss",
        function=next_token_loops,
        options={},
        wrong=("dlogits",),
        mistake="The loop over the tokens stops one before the last target.",
    ),
    Case(
        layer="gelu",
        function=gelu_exact_backward_v2,
        options={"form": "erf"},
        wrong=("dx",),
        mistake="The density is exp(−x²) without the half.",
    ),
    Case(
        layer="gelu",
        function=gelu_exact_backward_v3,
        options={"form": "erf"},
        wrong=("dx",),
        mistake="The density lacks its factor 1/√(2π).",
    ),
    Case(
        layer="gelu",
        function=gelu_backward_c,
        options={},
        wrong=("dx",),
        mistake="The scalar loop uses sech instead of its square.",
    ),
    Case(
        layer="gelu",
        function=gelu_erf_grad,
        options={"form": "erf"},
        wrong=("dx",),
        mistake="The derivative is Φ(x) alone, the term x φ(x) is forgotten.",
    ),
    Case(layer="gelu", function=gelu_exact_backward, options={"form": "erf"}, wrong=(), mistake=None),
    Case(
        layer="gelu",
        function=gelu_sigmoid_form_v2,
        options={},
        wrong=("dx",),
        mistake="The factor 2 of the sigmoid's argument is forgotten in its derivative.",
    ),
    Case(layer="gelu", function=gelu_sigmoid_form, options={}, wrong=(), mistake=None),
    Case(
        layer="swiglu",
        function=glu_grads,
        options={},
        wrong=("dgate", "dup"),
        mistake="The roles of gate and up are exchanged.",
    ),
    Case(layer="swiglu", function=swiglu_scalar, options={}, wrong=(), mistake=None),
    Case(layer="swiglu", function=swiglu_saved, options={}, wrong=(), mistake=None),
    Case(
        layer="swiglu",
        function=swiglu_saved_v3,
        options={},
        wrong=("dgate", "dup"),
        mistake="up's gradient is multiplied by up, and the gate's forgets it.",
    ),
    Case(
        layer="swiglu",
        function=swiglu_scalar_v2,
        options={},
        wrong=("dgate",),
        mistake="The sign in the silu's derivative is wrong: 1 − x(1 − s).",
    ),
    Case(
        layer="swiglu",
        function=swiglu_saved_v2,
        options={},
        wrong=("dgate",),
        mistake="The derivative of the silu is written with silu (1 − silu).",
    ),
    Case(layer="rope", function=rope_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="rope",
        function=rope_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The exponent is −i/D instead of −2i/D.",
    ),
    Case(layer="rope", function=llama3_rope_vjp, options={"theta": 500000.0}, wrong=(), mistake=None),
    Case(
        layer="rope",
        function=rope_backward_v4,
        options={},
        wrong=("dx",),
        mistake="Positions count from 1 in the backward.",
    ),
    Case(layer="rope", function=rope_matrix, options={}, wrong=(), mistake=None),
    Case(
        layer="rope",
        function=llama3_rope_vjp_v2,
        options={"theta": 500000.0},
        wrong=("dx",),
        mistake="The loop over the frequencies stops one early.",
    ),
    Case(
        layer="rope",
        function=rope_backward_v2,
        options={},
        wrong=("dx",),
        mistake="The gradient is rotated forward instead of back.",
    ),
    Case(
        layer="rope",
        function=rope_matrix_v2,
        options={},
        wrong=("dx",),
        mistake="The loop index is taken for the position, and the rotation is not transposed.",
    ),
    Case(layer="adamw", function=adamw_torch, options={}, wrong=(), mistake=None),
    Case(
        layer="adamw",
        function=adamw_decay_last,
        options={},
        wrong=("param",),
        mistake="The parameter is decayed after the update, so the update is decayed with it.",
    ),
    Case(
        layer="adamw",
        function=adamw_torch_v2,
        options={},
        wrong=("param", "v"),
        mistake="The weight of the new squared gradient is 0.1, the first moment's.",
    ),
    Case(
        layer="adamw",
        function=adamw_torch_v3,
        options={},
        wrong=("param",),
        mistake="Weight decay is not multiplied by the learning rate.",
    ),
    Case(
        layer="adamw",
        function=adamw_functional_v2,
        options={},
        wrong=("param",),
        mistake="The bias corrections divide by 1 − beta, whatever the step.",
    ),
    Case(
        layer="adamw",
        function=adamw_torch_v4,
        options={},
        wrong=("param", "m"),
        mistake="The first moment adds the whole gradient.",
    ),
    Case(
        layer="adamw",
        function=adamw_functional_v3,
        options={},
        wrong=("param", "m", "v"),
        mistake="The betas of the two moments are exchanged, and the decay is left out.",
    ),
    Case(
        layer="adamw",
        function=adamw_loops,
        options={},
        wrong=("param",),
        mistake="The moments used for the update are the ones before this step.",
    ),
    Case(layer="adamw", function=adamw_functional, options={}, wrong=(), mistake=None),
    Case(
        layer="block",
        function=transformer_block_grads_v5,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias"),
        mistake="The skip of the attention counts twice, and its gradient flows into LayerNorm 1 as well.",
    ),
    Case(
        layer="block",
        function=transformer_block_grads_v4,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias", "dproj_weight", "dproj_bias"),
        mistake="The second normalisation's backward uses the first one's reciprocal deviation.",
    ),
    Case(
        layer="block",
        function=gpt2_block_backward_v2,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias", "dproj_weight", "dproj_bias"),
        mistake="The second skip is missing on the way back: dh lacks dout.",
    ),
    Case(layer="block", function=transformer_block_grads, options={}, wrong=(), mistake=None),
    Case(
        layer="block",
        function=gpt2_block_backward_v5,
        options={},
        wrong=(
            "dx",
            "dln_1_weight",
            "dln_1_bias",
            "dattn_weight",
            "dattn_bias",
            "dproj_weight",
            "dproj_bias",
            "dln_2_weight",
            "dln_2_bias",
            "dfc_weight",
            "dfc_bias",
        ),
        mistake="The GELU's derivative is left out of the backward.",
    ),
    Case(
        layer="block",
        function=transformer_block_grads_v2,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="The gradient of q, k and v is put together with heads before the three parts.",
    ),
    Case(
        layer="block",
        function=transformer_block_grads_v3,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="The score gradient of the attention is not scaled.",
    ),
    Case(layer="block", function=gpt2_block_backward, options={}, wrong=(), mistake=None),
    Case(
        layer="block",
        function=gpt2_block_backward_v6,
        options={},
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="The parts of the gradient of q and k are concatenated in the order k, q, v.",
    ),
    Case(
        layer="block",
        function=gpt2_block_backward_v4,
        options={},
        wrong=("dfc_weight",),
        mistake="The gradient of the MLP's first weight is computed with h, before the second normalisation.",
    ),
    Case(
        layer="block",
        function=gpt2_block_backward_v3,
        options={},
        wrong=("dx",),
        mistake="The first skip adds dout instead of the gradient of h.",
    ),
]
