"""Backward passes as different people write them: wrong ones with what is wrong, and right ones."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from case import Case

CASES = []


# ---------------------------------------------------------------- attention


def attn_bwd_einsum(q, k, v, dout):
    d = q.shape[-1]
    n = q.shape[-2]
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(d)
    s = np.where(np.tril(np.ones((n, n), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bhij,bhid->bhjd", p, dout)
    dp = np.einsum("bhid,bhjd->bhij", dout, v)
    ds = p * (dp - np.einsum("bhij,bhij->bhi", dp, p)[..., None])
    dq = np.einsum("bhij,bhjd->bhid", ds, k) / np.sqrt(d)
    dk = np.einsum("bhij,bhid->bhjd", ds, q)
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention",
        function=attn_bwd_einsum,
        wrong=("dk",),
        mistake="dk lacks the factor 1/sqrt(d_k) that dq gets; both must be scaled.",
    )
)


def attn_tiled_v1(q, k, v, dout):
    """FlashAttention-2 style: outer loop over key blocks, inner loop over query blocks."""
    B, H, N, D = q.shape
    BM, BN = 2, 2
    scale = 1.0 / math.sqrt(D)
    out = np.zeros_like(dout)
    lse = np.zeros((B, H, N))
    for i in range(0, N, BM):
        rows = np.arange(i, min(i + BM, N))
        m = np.full((B, H, len(rows)), -np.inf)
        den = np.zeros((B, H, len(rows)))
        acc = np.zeros((B, H, len(rows), v.shape[-1]))
        for j in range(0, i + BM, BN):
            cols = np.arange(j, min(j + BN, N))
            if len(cols) == 0:
                continue
            s = q[:, :, rows] @ k[:, :, cols].swapaxes(-1, -2) * scale
            s = np.where(rows[:, None] >= cols[None, :], s, -np.inf)
            m_new = np.maximum(m, s.max(-1))
            alpha = np.exp(m - m_new)
            p = np.exp(s - m_new[..., None])
            den = den * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + p @ v[:, :, cols]
            m = m_new
        out[:, :, rows] = acc / den[..., None]
        lse[:, :, rows] = m + np.log(den)

    delta = (dout * out).sum(-1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, N, BN):
        cols = np.arange(j, min(j + BN, N))
        kj, vj = k[:, :, cols], v[:, :, cols]
        for i in range(j, N, BM):
            rows = np.arange(i, min(i + BM, N))
            qi, doi = q[:, :, rows], dout[:, :, rows]
            s = qi @ kj.swapaxes(-1, -2) * scale
            p = np.exp(s - lse[:, :, rows, None])
            p = np.where(rows[:, None] >= cols[None, :], p, 0.0)
            dv[:, :, cols] += p.swapaxes(-1, -2) @ doi
            ds = p * (doi @ vj.swapaxes(-1, -2) - delta[:, :, rows, None]) * scale
            dq[:, :, rows] = ds @ kj
            dk[:, :, cols] += ds.swapaxes(-1, -2) @ qi
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention",
        function=attn_tiled_v1,
        wrong=("dq",),
        mistake="The tile's contribution is assigned to dq and overwrites those of earlier key blocks; "
        "it should be added.",
    )
)


def attention_cstyle(q, k, v, dout):
    B, NH, T, hs = q.shape
    hv = v.shape[-1]
    scale = 1.0 / math.sqrt(hs)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(B):
        for h in range(NH):
            for t in range(T):
                # forward of this row
                pre = np.zeros(T)
                maxval = -1e30
                for t2 in range(t + 1):
                    val = 0.0
                    for i in range(hs):
                        val += q[b, h, t, i] * k[b, h, t2, i]
                    val *= scale
                    pre[t2] = val
                    maxval = max(maxval, val)
                att = np.zeros(T)
                expsum = 0.0
                for t2 in range(t + 1):
                    att[t2] = math.exp(pre[t2] - maxval)
                    expsum += att[t2]
                att /= expsum
                # backward 1: through the value accumulation
                datt = np.zeros(T)
                for t2 in range(t + 1):
                    for i in range(hv):
                        datt[t2] += v[b, h, t2, i] * dout[b, h, t, i]
                        dv[b, h, t2, i] += att[t2] * dout[b, h, t, i]
                # backward 2: through the softmax
                dpre = np.zeros(T)
                for t2 in range(t + 1):
                    for t3 in range(t):
                        indicator = 1.0 if t2 == t3 else 0.0
                        dpre[t3] += att[t2] * (indicator - att[t3]) * datt[t2]
                # backward 3: through q @ k
                for t2 in range(t + 1):
                    for i in range(hs):
                        dq[b, h, t, i] += k[b, h, t2, i] * dpre[t2] * scale
                        dk[b, h, t2, i] += q[b, h, t, i] * dpre[t2] * scale
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention",
        function=attention_cstyle,
        wrong=("dq", "dk"),
        mistake="The inner loop of the softmax's backward stops before t, so the diagonal score gets no gradient; "
        "it should include t.",
    )
)


def attention_torch_a(q, k, v, dout):
    q, k, v, dout = (torch.as_tensor(z) for z in (q, k, v, dout))
    L = q.size(-2)
    scale = q.size(-1) ** -0.5
    bias = torch.zeros(L, L, dtype=q.dtype).masked_fill_(torch.ones(L, L).tril().logical_not(), float("-inf"))
    attn = torch.softmax(q @ k.transpose(-2, -1) * scale + bias, dim=-1)
    grad_v = attn.transpose(-2, -1) @ dout
    grad_attn = dout @ v.transpose(-2, -1)
    grad_scores = attn * (grad_attn - (grad_attn * attn).sum(dim=-2, keepdim=True))
    grad_q = grad_scores @ k * scale
    grad_k = grad_scores.transpose(-2, -1) @ q * scale
    return grad_q.numpy(), grad_k.numpy(), grad_v.numpy()


CASES.append(
    Case(
        layer="attention",
        function=attention_torch_a,
        wrong=("dq", "dk"),
        mistake="The softmax's backward sums attn * grad over the queries (dim -2); it should sum over the keys.",
    )
)


def attention_student1(q, k, v, dout):
    # Step 1: recompute everything we need from the forward pass
    batch, heads, tokens, d_k = q.shape
    d_v = v.shape[-1]
    scores = np.matmul(q, np.transpose(k, (0, 1, 3, 2)))
    scaled_scores = scores / np.sqrt(d_v)
    mask = np.triu(np.ones((tokens, tokens)), k=1).astype(bool)
    scaled_scores[:, :, mask] = -1e9
    exps = np.exp(scaled_scores - np.max(scaled_scores, axis=-1, keepdims=True))
    weights = exps / np.sum(exps, axis=-1, keepdims=True)
    # Step 2: output = weights @ v
    d_weights = np.matmul(dout, np.transpose(v, (0, 1, 3, 2)))
    d_v_result = np.matmul(np.transpose(weights, (0, 1, 3, 2)), dout)
    # Step 3: the softmax
    tmp = np.sum(d_weights * weights, axis=-1, keepdims=True)
    d_scaled = weights * (d_weights - tmp)
    d_scaled[:, :, mask] = 0
    # Step 4: the scaling
    d_scores = d_scaled / np.sqrt(d_v)
    # Step 5: scores = q @ k^T
    d_q = np.matmul(d_scores, k)
    d_k_result = np.matmul(np.transpose(d_scores, (0, 1, 3, 2)), q)
    return d_q, d_k_result, d_v_result


CASES.append(
    Case(
        layer="attention",
        function=attention_student1,
        wrong=("dq", "dk", "dv"),
        mistake="The scores are divided by the square root of the values' width; it should be the keys' width d_k.",
    )
)


def attn_exp2_kernel(q, k, v, dout):
    """Port of a kernel that keeps the scores in base 2, as exp2 is what the hardware has."""
    LOG2E = 1.4426950408889634
    n_ctx, head_dim = q.shape[2:]
    sm_scale = head_dim**-0.5
    qk_scale = sm_scale * LOG2E
    causal = np.arange(n_ctx)[:, None] >= np.arange(n_ctx)
    qk = np.where(causal, (q @ k.transpose(0, 1, 3, 2)) * qk_scale, -np.inf)
    m = qk.max(-1, keepdims=True)
    m = m + np.log2(np.exp2(qk - m).sum(-1, keepdims=True))
    p = np.exp2(qk - m)
    o = p @ v
    delta = (o * dout).sum(-1, keepdims=True)
    dv = p.transpose(0, 1, 3, 2) @ dout
    ds = p * (dout @ v.transpose(0, 1, 3, 2) - delta)
    dk = ds.transpose(0, 1, 3, 2) @ q
    dk *= sm_scale
    k_pre = k * qk_scale
    dq = ds @ k_pre
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention",
        function=attn_exp2_kernel,
        wrong=("dq",),
        mistake="dq is computed with keys scaled by log2(e)/sqrt(d_k) and never multiplied by ln 2; "
        "the factor should be 1/sqrt(d_k).",
    )
)


def attn_full_rows(q, k, v, dout):
    B, H, T, D = q.shape
    q2, k2, v2, g2 = (z.reshape(B * H, T, z.shape[-1]) for z in (q, k, v, dout))
    dq, dk, dv = np.empty_like(q2), np.empty_like(k2), np.empty_like(v2)
    for n in range(B * H):
        A = q2[n] @ k2[n].T / D**0.5
        A = np.exp(A - A.max(axis=1)[:, None])
        A = A / A.sum(axis=1)[:, None]
        dv[n] = A @ g2[n]
        dA = g2[n] @ v2[n].T
        dZ = A * (dA - (A * dA).sum(axis=1)[:, None]) / D**0.5
        dq[n] = dZ @ k2[n]
        dk[n] = dZ @ q2[n]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


CASES.append(
    Case(
        layer="attention",
        function=attn_full_rows,
        options={"causal": False},
        wrong=("dk", "dv"),
        mistake="Neither the weights in dv nor the score gradient in dk is transposed; both should be.",
    )
)


def attn_online_right(q, k, v, dout):
    """One row of queries at a time; only running sums are kept, the weights are recomputed."""
    B, H, N, D = q.shape
    c = D**-0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(N):
        m = np.full((B, H), -np.inf)
        z = np.zeros((B, H))
        o = np.zeros((B, H, v.shape[-1]))
        for j in range(i + 1):
            s = c * np.einsum("bhd,bhd->bh", q[:, :, i], k[:, :, j])
            top = np.maximum(m, s)
            shrink, e = np.exp(m - top), np.exp(s - top)
            z = z * shrink + e
            o = o * shrink[..., None] + e[..., None] * v[:, :, j]
            m = top
        o /= z[..., None]
        for j in range(i + 1):
            s = c * np.einsum("bhd,bhd->bh", q[:, :, i], k[:, :, j])
            p = (np.exp(s - m) / z)[..., None]
            dv[:, :, j] += p * dout[:, :, i]
            ds = c * p * ((v[:, :, j] - o) * dout[:, :, i]).sum(-1, keepdims=True)
            dq[:, :, i] += ds * k[:, :, j]
            dk[:, :, j] += ds * q[:, :, i]
    return dq, dk, dv


CASES.append(Case(layer="attention", function=attn_online_right))


def attn_centered_keys(q, k, v, dout):
    # dq = sum_j p_j (g.v_j) (k_j - sum_l p_l k_l): the softmax's Jacobian as a covariance
    n = q.shape[2]
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3]) + np.triu(np.full((n, n), -1e30), 1)
    w = np.exp(s - np.logaddexp.reduce(s, axis=3, keepdims=True))
    g = dout @ v.swapaxes(2, 3)
    wg = w * g
    mean_k = w @ k
    dq = (wg @ k - wg.sum(3, keepdims=True) * mean_k) / math.sqrt(q.shape[3])
    dk = (wg - w * wg.sum(3, keepdims=True)).swapaxes(2, 3) @ q / math.sqrt(q.shape[3])
    return dq, dk, w.swapaxes(2, 3) @ dout


CASES.append(Case(layer="attention", function=attn_centered_keys))


class _SDPA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        s = (q * q.shape[-1] ** -0.5) @ k.mT
        p = s.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        r = q.shape[-1] ** -0.5
        gp = p * (g @ v.mT)
        gs = torch.addcmul(gp, p, gp.sum(-1, keepdim=True), value=-1)
        return r * gs @ k, gs.mT @ (r * q), p.mT @ g


def attn_autograd_function(q, k, v, dout):
    leaves = [torch.tensor(z, requires_grad=True) for z in (q, k, v)]
    _SDPA.apply(*leaves).backward(torch.as_tensor(dout))
    return tuple(z.grad.numpy() for z in leaves)


CASES.append(Case(layer="attention", function=attn_autograd_function, options={"causal": False}))


# ---------------------------------------------------------------- attention_dropout


def attn_drop_numpy(q, k, v, keep, dout):
    T, d = q.shape[-2:]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d)
    scores = scores + np.where(np.tri(T) > 0, 0.0, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    pd = p * keep
    dv = pd.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv


CASES.append(
    Case(
        layer="attention_dropout",
        function=attn_drop_numpy,
        wrong=("dq", "dk"),
        mistake="The gradient of the weights is not multiplied by the dropout mask before the softmax's backward.",
    )
)


def sdpa_dropout_torch(q, k, v, keep, dout):
    q, k, v, keep, g = map(torch.as_tensor, (q, k, v, keep, dout))
    T = q.shape[-2]
    s = torch.einsum("...id,...jd->...ij", q, k) * q.shape[-1] ** -0.5
    s.masked_fill_(torch.triu(torch.ones(T, T, dtype=torch.bool), 1), -math.inf)
    p = F.softmax(s, -1)
    p_drop = p * keep
    dp = (g @ v.mT) * keep
    ds = p_drop * (dp - (dp * p_drop).sum(-1, keepdim=True))
    ds = ds * q.shape[-1] ** -0.5
    return (ds @ k).numpy(), (ds.mT @ q).numpy(), (p_drop.mT @ g).numpy()


CASES.append(
    Case(
        layer="attention_dropout",
        function=sdpa_dropout_torch,
        wrong=("dq", "dk"),
        mistake="The softmax's backward uses the weights after dropout; it should use those before dropout.",
    )
)


def attention_dropout_student(q, k, v, keep, dout):
    B, H, T, D = q.shape
    dropped = keep.astype(bool)
    dq = np.zeros_like(q)
    dk = np.zeros_like(k)
    dv = np.zeros_like(v)
    for b in range(B):
        for h in range(H):
            s = q[b, h].dot(k[b, h].T) / math.sqrt(D)
            for i in range(T):
                s[i, i + 1 :] = -np.inf
            e = np.exp(s - s.max(axis=1, keepdims=True))
            p = e / e.sum(axis=1, keepdims=True)
            dv[b, h] = (p * dropped[b, h]).T.dot(dout[b, h])
            dp = dout[b, h].dot(v[b, h].T) * dropped[b, h]
            inner = (dp * p).sum(axis=1, keepdims=True)
            ds = p * (dp - inner) / math.sqrt(D)
            dq[b, h] = ds.dot(k[b, h])
            dk[b, h] = ds.T.dot(q[b, h])
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention_dropout",
        function=attention_dropout_student,
        wrong=("dq", "dk", "dv"),
        mistake="The mask is cast to booleans, which loses its factor 1/(1 - p); it should be used as given.",
    )
)


def attn_drop_recompute(q, k, v, keep, dout):
    scale = q.shape[-1] ** -0.5
    n = q.shape[-2]
    idx = np.arange(n)
    s = np.matmul(q * scale, k.transpose(0, 1, 3, 2))
    s[..., idx[:, None] < idx] = -np.inf
    lse = np.log(np.exp(s).sum(-1))
    P = np.exp(s - lse[..., None])
    out = np.matmul(P, v)
    D = np.einsum("bhtd,bhtd->bht", dout, out)
    dP = np.matmul(dout, v.transpose(0, 1, 3, 2)) * keep
    dS = P * (dP - D[..., None])
    dq = np.matmul(dS, k) * scale
    dk = np.matmul(dS.transpose(0, 1, 3, 2), q) * scale
    dv = np.matmul(P.transpose(0, 1, 3, 2), dout)
    return dq, dk, dv


CASES.append(
    Case(
        layer="attention_dropout",
        function=attn_drop_recompute,
        wrong=("dq", "dk", "dv"),
        mistake="The recomputed output (hence D) and dv use the weights without the dropout mask; both need it.",
    )
)


def attn_drop_delta(q, k, v, keep, dout):
    # D_i = dO_i . O_i holds with dropout as well, with the dropped output
    t, d = q.shape[-2:]
    s = np.where(np.tri(t, dtype=bool), q @ k.swapaxes(-1, -2) * d**-0.5, -np.inf)
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    z = s * keep
    delta = ((z @ v) * dout).sum(-1, keepdims=True)
    ds = z * (dout @ v.swapaxes(-1, -2)) - s * delta
    ds *= d**-0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, z.swapaxes(-1, -2) @ dout


CASES.append(Case(layer="attention_dropout", function=attn_drop_delta))


# ---------------------------------------------------------------- rope_attention


def _tables(positions, d, theta=10000.0):
    inv_freq = 1.0 / theta ** (np.arange(0, d, 2) / d)
    angle = np.outer(positions, inv_freq)
    angle = np.concatenate([angle, angle], axis=-1)
    return np.cos(angle), np.sin(angle)


def _rotate_half(x):
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([-b, a], axis=-1)


def rope_attn_hf(q, k, v, positions, dout):
    d = q.shape[-1]
    cos, sin = _tables(positions, d)
    qr = q * cos + _rotate_half(q) * sin
    kr = k * cos + _rotate_half(k) * sin
    s = qr @ kr.swapaxes(-1, -2) / math.sqrt(d)
    s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    dqr, dkr = ds @ kr, ds.swapaxes(-1, -2) @ qr
    dq = dqr * cos + _rotate_half(dqr) * sin
    dk = dkr * cos + _rotate_half(dkr) * sin
    return dq, dk, dv


CASES.append(
    Case(
        layer="rope_attention",
        function=rope_attn_hf,
        wrong=("dq", "dk"),
        mistake="The gradients are rotated by the positions' angles once more; they should be rotated back.",
    )
)


def rope_attention_complex(q, k, v, positions, dout):
    h = q.shape[-1] // 2
    cis = np.exp(1j * np.asarray(positions)[:, None] * 10000.0 ** (-np.arange(h) / h))

    def rot(x, c):
        z = (x[..., :h] + 1j * x[..., h:]) * c
        return np.concatenate([z.real, z.imag], -1)

    Q, K = rot(q, cis), rot(k, cis)
    scale = (2 * h) ** -0.5
    n = q.shape[2]
    S = np.einsum("bhid,bhjd->bhij", Q, K) * scale - 1e30 * np.triu(np.ones((n, n)), 1)
    P = np.exp(S - S.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    G = np.einsum("bhid,bhjd->bhij", dout, v)
    G = scale * P * (G - (G * P).sum(-1, keepdims=True))
    dq = rot(np.einsum("bhij,bhjd->bhid", G, K), cis.conj())
    dk = rot(np.einsum("bhij,bhid->bhjd", G, q), cis.conj())
    return dq, dk, np.einsum("bhij,bhid->bhjd", P, dout)


CASES.append(
    Case(
        layer="rope_attention",
        function=rope_attention_complex,
        wrong=("dk",),
        mistake="dk is computed with the queries before rotation; the scores' derivative has the rotated ones.",
    )
)


def _rot_pairs(x, cos, sin):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def rope_attention_torch(q, k, v, positions, dout):
    q, k, v, pos, g = (torch.as_tensor(z) for z in (q, k, v, positions, dout))
    D = q.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=q.dtype) / D)
    ang = pos.to(q.dtype)[:, None] * freq
    cos, sin = ang.cos(), ang.sin()
    q_, k_ = _rot_pairs(q, cos, sin), _rot_pairs(k, cos, sin)
    s = q_ @ k_.mT / D**0.5
    s = s.masked_fill(torch.ones_like(s[0, 0]).triu(1).bool(), -torch.inf)
    p = s.softmax(-1)
    dp = g @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / D**0.5
    dq = _rot_pairs(ds @ k_, cos, -sin)
    dk = _rot_pairs(ds.mT @ q_, cos, -sin)
    return dq.numpy(), dk.numpy(), (p.mT @ g).numpy()


CASES.append(
    Case(
        layer="rope_attention",
        function=rope_attention_torch,
        wrong=("dq", "dk", "dv"),
        mistake="Neighbouring features 2i and 2i + 1 are rotated together; the pairs should be i and i + D/2.",
    )
)


def rope_attn_loops(q, k, v, positions, dout):
    B, H, T, D = q.shape
    half = D // 2

    def rotate(vec, pos, sign):
        res = np.empty_like(vec)
        for i in range(half):
            a = sign * pos * 10000.0 ** (-2.0 * i / D)
            res[..., i] = vec[..., i] * math.cos(a) - vec[..., i + half] * math.sin(a)
            res[..., i + half] = vec[..., i] * math.sin(a) + vec[..., i + half] * math.cos(a)
        return res

    rq = np.stack([rotate(q[:, :, t], positions[t], 1) for t in range(T)], axis=2)
    rk = np.stack([rotate(k[:, :, t], positions[t], 1) for t in range(T)], axis=2)
    drq, drk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for t in range(T):
        s = np.einsum("bhd,bhjd->bhj", rq[:, :, t], rk[:, :, : t + 1]) / math.sqrt(D)
        w = np.exp(s - s.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
        dw = np.einsum("bhd,bhjd->bhj", dout[:, :, t], v[:, :, : t + 1])
        ds = w * (dw - (w * dw).sum(-1, keepdims=True)) / math.sqrt(D)
        dv[:, :, : t + 1] += w[..., None] * dout[:, :, t][:, :, None]
        drq[:, :, t] = np.einsum("bhj,bhjd->bhd", ds, rk[:, :, : t + 1])
        drk[:, :, : t + 1] += rotate(ds[..., None] * rq[:, :, t][:, :, None], positions[t], -1)
        drq[:, :, t] = rotate(drq[:, :, t], positions[t], -1)
    return drq, drk, dv


CASES.append(
    Case(
        layer="rope_attention",
        function=rope_attn_loops,
        wrong=("dk",),
        mistake="The keys' gradients are rotated back by the query's position; it should be each key's own position.",
    )
)


def rope_attn_relative(q, k, v, positions, dout):
    # q_i^T R(p_j - p_i) k_j: neither q nor k is rotated, the relative rotation sits between them
    h = q.shape[-1] // 2
    w = 10000.0 ** (-np.arange(h) / h)
    rel = np.subtract.outer(positions, positions)[..., None] * w  # i, j, h
    c, s = np.cos(rel), np.sin(rel)
    qa, qb, ka, kb = q[..., :h], q[..., h:], k[..., :h], k[..., h:]
    r = (2 * h) ** -0.5
    e = np.einsum
    aa = "bnih,bnjh,ijh->bnij"
    score = r * (e(aa, qa, ka, c) + e(aa, qb, kb, c) + e(aa, qa, kb, s) - e(aa, qb, ka, s))
    score = np.where(np.tri(len(positions), dtype=bool), score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    g = dout @ v.swapaxes(-1, -2)
    g = r * p * (g - (p * g).sum(-1, keepdims=True))
    i_, j_ = "bnij,bnjh,ijh->bnih", "bnij,bnih,ijh->bnjh"
    dq = np.concatenate([e(i_, g, ka, c) + e(i_, g, kb, s), e(i_, g, kb, c) - e(i_, g, ka, s)], -1)
    dk = np.concatenate([e(j_, g, qa, c) - e(j_, g, qb, s), e(j_, g, qb, c) + e(j_, g, qa, s)], -1)
    return dq, dk, p.swapaxes(-1, -2) @ dout


CASES.append(Case(layer="rope_attention", function=rope_attn_relative))


# ---------------------------------------------------------------- grouped_query_attention


def gqa_repeat_np(q, k, v, dout):
    B, H, T, D = q.shape
    Hkv = k.shape[1]
    G = H // Hkv
    K, V = np.tile(k, (1, G, 1, 1)), np.tile(v, (1, G, 1, 1))
    s = q @ K.swapaxes(-1, -2) / np.sqrt(D)
    s = np.where(np.tril(np.ones((T, T))) == 1, s, -1e30)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dV = p.swapaxes(-1, -2) @ dout
    dp = dout @ V.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(D)
    dq = ds @ K
    dK = ds.swapaxes(-1, -2) @ q
    dk = dK.reshape(B, G, Hkv, T, D).sum(1)
    dv = dV.reshape(B, G, Hkv, T, D).sum(1)
    return dq, dk, dv


CASES.append(
    Case(
        layer="grouped_query_attention",
        function=gqa_repeat_np,
        wrong=("dq", "dk", "dv"),
        mistake="Keys and values are tiled, so that query head h reads head h mod H_kv; it should read h // G.",
    )
)


def gqa_torch_interleave(q, k, v, dout):
    q, k, v, g = (torch.as_tensor(z) for z in (q, k, v, dout))
    b, n_kv, t, d = k.shape
    rep = q.shape[1] // n_kv
    kk = k.repeat_interleave(rep, dim=1)
    vv = v.repeat_interleave(rep, dim=1)
    att = (q @ kk.mT) * d**-0.5
    att = att.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool)), float("-inf")).softmax(-1)
    d_vv = att.mT @ g
    d_att = g @ vv.mT
    d_s = att * (d_att - (att * d_att).sum(-1, keepdim=True)) * d**-0.5
    d_q = d_s @ kk
    d_kk = d_s.mT @ q
    d_k = d_kk.view(b, n_kv, rep, t, d).mean(2)
    d_v = d_vv.view(b, n_kv, rep, t, d).mean(2)
    return d_q.numpy(), d_k.numpy(), d_v.numpy()


CASES.append(
    Case(
        layer="grouped_query_attention",
        function=gqa_torch_interleave,
        wrong=("dk", "dv"),
        mistake="dk and dv are averaged over the query heads of a group; they should be summed.",
    )
)


def gqa_per_head(q, k, v, dout):
    B, H, T, D = q.shape
    group = H // k.shape[1]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    lower = np.tri(T, dtype=bool)
    for h in range(H):
        kv = h // group
        s = np.einsum("btd,bsd->bts", q[:, h], k[:, kv]) / np.sqrt(D)
        s[:, ~lower] = -np.inf
        a = np.exp(s - s.max(2, keepdims=True))
        a /= a.sum(2, keepdims=True)
        da = np.einsum("btd,bsd->bts", dout[:, h], v[:, kv])
        ds = a * (da - (a * da).sum(2, keepdims=True)) / np.sqrt(D)
        dq[:, h] = np.einsum("bts,bsd->btd", ds, k[:, kv])
        dk[:, kv] = np.einsum("bts,btd->bsd", ds, q[:, h])
        dv[:, kv] += np.einsum("bts,btd->bsd", a, dout[:, h])
    return dq, dk, dv


CASES.append(
    Case(
        layer="grouped_query_attention",
        function=gqa_per_head,
        wrong=("dk",),
        mistake="dk of a key head is overwritten by each query head of the group; the contributions should be added.",
    )
)


def gqa_grouped_einsum(q, k, v, dout):
    b, H, t, d = q.shape
    n = k.shape[1]
    q5, g5 = q.reshape(b, n, H // n, t, d), dout.reshape(b, n, H // n, t, d)
    s = np.einsum("bngid,bnjd->bngij", q5, k) * d**-0.5
    s = s + np.triu(np.full((t, t), -np.inf), 1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bngij,bnjd->bngid", p, v)
    delta = np.einsum("bngid,bngid->bni", o, g5)[:, :, None, :, None]
    ds = p * (np.einsum("bngid,bnjd->bngij", g5, v) - delta) * d**-0.5
    dq = np.einsum("bngij,bnjd->bngid", ds, k).reshape(q.shape)
    dk = np.einsum("bngij,bngid->bnjd", ds, q5)
    dv = np.einsum("bngij,bngid->bnjd", p, g5)
    return dq, dk, dv


CASES.append(
    Case(
        layer="grouped_query_attention",
        function=gqa_grouped_einsum,
        wrong=("dq", "dk"),
        mistake="delta is summed over the query heads of a group as well; each query head has its own delta.",
    )
)


def gqa_bidirectional(q, k, v, dout):
    b, H, t, d = q.shape
    n = k.shape[1]
    rep = H // n
    idx = np.repeat(np.arange(n), rep)
    s = np.einsum("bhid,bhjd->bhij", q, k[:, idx]) / d**0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bhid,bhjd->bhij", dout, v[:, idx])
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / d**0.5
    dk_full = np.einsum("bhij,bhid->bhjd", ds, q)
    dv_full = np.einsum("bhij,bhid->bhjd", p, dout)
    fold = lambda z: z.reshape(b, rep, n, t, d).sum(axis=1)  # noqa: E731
    return np.einsum("bhij,bhjd->bhid", ds, k[:, idx]), fold(dk_full), fold(dv_full)


CASES.append(
    Case(
        layer="grouped_query_attention",
        function=gqa_bidirectional,
        options={"causal": False},
        wrong=("dk", "dv"),
        mistake="The heads are folded as (G, H_kv) although they were repeated as (H_kv, G), "
        "so the wrong heads are summed.",
    )
)


def gqa_stacked_queries(q, k, v, dout):
    # the G queries of a group are just G*T queries of one head
    b, H, t, d = q.shape
    n = k.shape[1]
    Q, dO = q.reshape(b, n, -1, d), dout.reshape(b, n, -1, d)
    mask = np.tile(np.tri(t, dtype=bool), (H // n, 1))
    s = np.where(mask, Q @ k.swapaxes(-1, -2) / math.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ dO
    ds = p * ((dO @ v.swapaxes(-1, -2)) - (dO * (p @ v)).sum(-1, keepdims=True)) / math.sqrt(d)
    return (ds @ k).reshape(q.shape), ds.swapaxes(-1, -2) @ Q, dv


CASES.append(Case(layer="grouped_query_attention", function=gqa_stacked_queries))


# ---------------------------------------------------------------- head


def _softmax(z, axis=-1):
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)


def _causal(s):
    n, m = s.shape[-2:]
    return np.where(np.arange(n)[:, None] >= np.arange(m)[None, :], s, -np.inf)


def head_plain_numpy(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    c = 1 / np.sqrt(q.shape[-1])
    p = _softmax(_causal(c * q @ k.transpose(0, 2, 1)))
    dv = p.transpose(0, 2, 1) @ dout
    dp = dout @ v.transpose(0, 2, 1)
    ds = p * (dp - np.sum(dp * p, axis=2, keepdims=True))
    dq = c * ds @ k
    dk = c * ds.transpose(0, 2, 1) @ q
    at = a.transpose(0, 2, 1)
    dw_q, dw_k, dw_v = (at @ dq).sum(0), (at @ dk).sum(0), (at @ dv).sum(0)
    db_q, db_k, db_v = dq.sum((0, 1)), dk.sum((0, 1)), dv.sum((0, 1))
    da = dq @ w_q.T + dk @ w_k.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


CASES.append(
    Case(
        layer="head",
        function=head_plain_numpy,
        wrong=("da",),
        mistake="da lacks the path through the values, dv w_v^T.",
    )
)


def head_rotary_np(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    B, T, _ = a.shape
    half = w_q.shape[1] // 2
    ang = np.arange(T)[:, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(ang), np.sin(ang)

    def rot(z, sgn):
        u, w = z[..., :half], z[..., half:]
        return np.concatenate((u * cos - sgn * w * sin, w * cos + sgn * u * sin), axis=-1)

    q, k, v = rot(a @ w_q + b_q, 1), rot(a @ w_k + b_k, 1), a @ w_v + b_v
    scale = (2 * half) ** -0.5
    p = _softmax(_causal(np.einsum("btd,bsd->bts", q, k) * scale))
    dv = np.einsum("bts,btd->bsd", p, dout)
    dp = np.einsum("btd,bsd->bts", dout, v)
    ds = scale * p * (dp - np.einsum("bts,bts->bt", dp, p)[..., None])
    dq, dk = ds @ k, np.einsum("bts,btd->bsd", ds, q)
    da = rot(dq, -1) @ w_q.T + rot(dk, -1) @ w_k.T + dv @ w_v.T
    grads = []
    for g in (dq, dk, dv):
        grads += [np.einsum("bti,btj->ij", a, g), g.sum(axis=(0, 1))]
    return (da, *grads)


CASES.append(
    Case(
        layer="head",
        function=head_rotary_np,
        options={"rotary": True},
        wrong=("dw_q", "db_q", "dw_k", "db_k"),
        mistake="The gradients of w_q, b_q, w_k, b_k use the rotated dq, dk; they should be rotated back first, "
        "as for da.",
    )
)


def head_bidirectional(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    a_, W, dO = torch.as_tensor(a), [torch.as_tensor(w) for w in (w_q, w_k, w_v)], torch.as_tensor(dout)
    q, k, v = (a_ @ w + torch.as_tensor(b) for w, b in zip(W, (b_q, b_k, b_v)))
    att = F.softmax(q @ k.mT / math.sqrt(k.shape[-1]), dim=1)
    dv = att.mT @ dO
    datt = dO @ v.mT
    ds = att * (datt - (att * datt).sum(1, keepdim=True)) / math.sqrt(k.shape[-1])
    gs = (ds @ k, ds.mT @ q, dv)
    da = sum(g @ w.T for g, w in zip(gs, W))
    flat = a_.flatten(0, 1)
    out = [da]
    for g in gs:
        out.extend((flat.T @ g.flatten(0, 1), g.sum((0, 1))))
    return tuple(z.numpy() for z in out)


CASES.append(
    Case(
        layer="head",
        function=head_bidirectional,
        options={"causal": False},
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k", "dw_v", "db_v"),
        mistake="The softmax normalises over the queries (dim 1 of batch, queries, keys); it should be the keys.",
    )
)


def head_sequences(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    """Keeps nothing from the forward pass; one sequence at a time."""
    dw_q, dw_k, dw_v = np.zeros_like(w_q), np.zeros_like(w_k), np.zeros_like(w_v)
    db_q, db_k, db_v = np.zeros_like(b_q), np.zeros_like(b_k), np.zeros_like(b_v)
    da = np.zeros_like(a)
    for n, (x, g) in enumerate(zip(a, dout)):
        q, k, v = x @ w_q, x @ w_k + b_k, x @ w_v + b_v
        s = q @ k.T / math.sqrt(len(b_k))
        s[np.triu_indices(len(s), 1)] = -np.inf
        p = _softmax(s)
        dv = p.T @ g
        dp = g @ v.T
        ds = p * (dp - (p * dp).sum(1)[:, None]) / math.sqrt(len(b_k))
        dq, dk = ds @ k, ds.T @ q
        dw_q += x.T @ dq
        dw_k += x.T @ dk
        dw_v += x.T @ dv
        db_q += dq.sum(0)
        db_k += dk.sum(0)
        db_v += dv.sum(0)
        da[n] = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


CASES.append(
    Case(
        layer="head",
        function=head_sequences,
        wrong=("da", "dw_q", "db_q", "dw_k", "dw_v"),
        mistake="The recomputed queries lack the bias b_q; they should be x w_q + b_q.",
    )
)


def head_verbose(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    batch_size, seq_len, d_model = a.shape
    # forward
    queries = np.dot(a, w_q) + b_q
    keys = np.dot(a, w_k) + b_k
    values = np.dot(a, w_v) + b_v
    scaling = np.sqrt(queries.shape[-1])
    logits = np.matmul(queries, keys.swapaxes(1, 2)) / scaling
    probabilities = _softmax(_causal(logits))
    # backward
    grad_values = np.matmul(probabilities.swapaxes(1, 2), dout)
    grad_probabilities = np.matmul(dout, values.swapaxes(1, 2))
    grad_logits = np.zeros_like(logits)
    for b in range(batch_size):
        for t in range(seq_len):
            row = probabilities[b, t].reshape(-1, 1)
            jacobian = np.diagflat(row) - row @ row.T
            grad_logits[b, t] = jacobian @ grad_probabilities[b, t]
    grad_logits = grad_logits / scaling
    grad_queries = np.matmul(grad_logits, keys)
    grad_keys = np.matmul(grad_logits.swapaxes(1, 2), queries)
    # the parameters
    inputs = a.reshape(-1, d_model)
    grad_w_q = inputs.T @ grad_queries.reshape(-1, grad_queries.shape[-1])
    grad_w_k = inputs.T @ grad_keys.reshape(-1, grad_keys.shape[-1])
    grad_w_v = inputs.T @ grad_values.reshape(-1, grad_values.shape[-1]) / batch_size
    grad_b_q = grad_queries.sum(axis=0).sum(axis=0)
    grad_b_k = grad_keys.sum(axis=0).sum(axis=0)
    grad_b_v = grad_values.mean(axis=0).sum(axis=0)
    # the input
    grad_a = grad_queries @ w_q.T
    grad_a += grad_keys @ w_k.T
    grad_a += grad_values @ w_v.T
    return grad_a, grad_w_q, grad_b_q, grad_w_k, grad_b_k, grad_w_v, grad_b_v


CASES.append(
    Case(
        layer="head",
        function=head_verbose,
        wrong=("dw_v", "db_v"),
        mistake="The value projection's gradients are averaged over the batch; they should be summed.",
    )
)


def head_invariant(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    # b_k shifts a row of scores by a constant, b_v a row of dp: neither matters for p and ds
    q = a @ w_q + b_q
    k, v = a @ w_k, a @ w_v
    c = w_q.shape[1] ** -0.5
    p = _softmax(_causal(q @ k.swapaxes(1, 2) * c))
    u = p * (dout @ v.swapaxes(1, 2))
    ds = c * (u - p * u.sum(-1, keepdims=True))
    g = np.concatenate([ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout], axis=-1)
    w = np.concatenate([w_q, w_k, w_v], axis=1)
    cut = [w_q.shape[1], 2 * w_q.shape[1]]
    dw_q, dw_k, dw_v = np.split(np.tensordot(a, g, axes=((0, 1), (0, 1))), cut, axis=1)
    return g @ w.T, dw_q, g[..., : cut[0]].sum((0, 1)), dw_k, np.zeros_like(b_k), dw_v, dout.sum((0, 1))


CASES.append(Case(layer="head", function=head_invariant))


def head_rotary_matrix(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    T, d = a.shape[1], w_q.shape[1]
    R = np.zeros((T, d, d))
    for t in range(T):
        for i in range(d // 2):
            ang = t / 10000 ** (2 * i / d)
            j = i + d // 2
            R[t, i, i] = R[t, j, j] = math.cos(ang)
            R[t, j, i] = math.sin(ang)
            R[t, i, j] = -math.sin(ang)
    q = np.einsum("tde,bte->btd", R, a @ w_q + b_q)
    k = np.einsum("tde,bte->btd", R, a @ w_k + b_k)
    v = a @ w_v + b_v
    p = _softmax(_causal(np.einsum("btd,bsd->bts", q, k) / d**0.5))
    dp = np.einsum("btd,bsd->bts", dout, v)
    ds = (p * dp - p * np.einsum("bts,bts->bt", p, dp)[:, :, None]) / d**0.5
    dq = np.einsum("bts,bsd,tde->bte", ds, k, R)
    dk = np.einsum("bts,btd,sde->bse", ds, q, R)
    dv = np.einsum("bts,btd->bsd", p, dout)
    res = [dq @ w_q.T + dk @ w_k.T + dv @ w_v.T]
    for g in (dq, dk, dv):
        res.append(np.einsum("btd,bte->de", a, g))
        res.append(np.einsum("btd->d", g))
    return res


CASES.append(Case(layer="head", function=head_rotary_matrix, options={"rotary": True}))


# ---------------------------------------------------------------- head_dropout


def head_drop_numpy(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    r = q.shape[-1] ** -0.5
    p = _softmax(_causal(q @ k.swapaxes(-1, -2) * r))
    pk = p * keep
    dv = pk.swapaxes(-1, -2) @ dout
    dp = keep * (dout @ v.swapaxes(-1, -2))
    ds = r * p * (dp - (dp * p).sum(-1, keepdims=True))
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = [np.einsum("btc,btd->cd", a, z) for z in (dq, dk, dv)]
    db_v = dout.sum((0, 1))
    return da, dw[0], dq.sum((0, 1)), dw[1], dk.sum((0, 1)), dw[2], db_v


CASES.append(
    Case(
        layer="head_dropout",
        function=head_drop_numpy,
        wrong=("db_v",),
        mistake="db_v is the sum of dout, as if rows of weights summed to one; with dropout it is the sum of dv.",
    )
)


def head_dropout_torch(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout = (
        torch.as_tensor(z) for z in (a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout)
    )
    T = a.shape[1]
    q, k, v = torch.addmm(b_q, a.flatten(0, 1), w_q), torch.addmm(b_k, a.flatten(0, 1), w_k), a @ w_v + b_v
    q, k = q.view(*a.shape[:2], -1), k.view(*a.shape[:2], -1)
    s = torch.bmm(q, k.mT) / q.shape[-1] ** 0.5
    s = s + torch.full((T, T), -torch.inf, dtype=s.dtype).triu(1)
    p = s.softmax(-1)
    dv = torch.bmm((p * keep).mT, dout)
    dp = torch.bmm(dout, v.mT)
    row = (dp * p).sum(-1, keepdim=True)
    ds = p * (dp * keep - row) / q.shape[-1] ** 0.5
    dq, dk = torch.bmm(ds, k), torch.bmm(ds.mT, q)
    A = a.flatten(0, 1).T
    lin = lambda g: (A @ g.flatten(0, 1), g.sum((0, 1)))  # noqa: E731
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return tuple(z.numpy() for z in (da, *lin(dq), *lin(dk), *lin(dv)))


CASES.append(
    Case(
        layer="head_dropout",
        function=head_dropout_torch,
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k"),
        mistake="The row sum of the softmax's backward is taken before the gradient is multiplied by the dropout "
        "mask; it should be taken after.",
    )
)


def head_dropout_student2(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    B, T, C = a.shape
    q = a @ w_q + b_q
    k = a @ w_k + b_k
    v = a @ w_v + b_v
    dk_ = q.shape[2]
    scores = np.zeros((B, T, T))
    for b in range(B):
        scores[b] = q[b] @ k[b].T / np.sqrt(dk_)
    scores = scores * keep
    scores = np.where(np.tril(np.ones((T, T))) == 0, -1e30, scores)
    p = _softmax(scores)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(B):
        dv[b] = p[b].T @ dout[b]
        dp = dout[b] @ v[b].T
        ds = p[b] * (dp - np.sum(dp * p[b], axis=1, keepdims=True))
        ds = ds * keep[b] / np.sqrt(dk_)
        dq[b] = ds @ k[b]
        dk[b] = ds.T @ q[b]
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    x2 = a.reshape(B * T, C)
    dw_q = x2.T @ dq.reshape(B * T, -1)
    dw_k = x2.T @ dk.reshape(B * T, -1)
    dw_v = x2.T @ dv.reshape(B * T, -1)
    return da, dw_q, dq.sum(0).sum(0), dw_k, dk.sum(0).sum(0), dw_v, dv.sum(0).sum(0)


CASES.append(
    Case(
        layer="head_dropout",
        function=head_dropout_student2,
        wrong=("da", "dw_q", "db_q", "dw_k", "db_k", "dw_v", "db_v"),
        mistake="The dropout mask multiplies the scores before the softmax; it should multiply the weights after it.",
    )
)


def head_drop_fused(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    w, b = np.hstack([w_q, w_k, w_v]), np.hstack([b_q, b_k, np.zeros_like(b_v)])
    n = w_q.shape[1]
    q, k, v = np.split(a @ w + b, [n, 2 * n], axis=-1)
    p = _softmax(_causal(q @ np.swapaxes(k, 1, 2) / math.sqrt(n)))
    z = keep * p
    dv = np.swapaxes(z, 1, 2) @ dout
    dz = z * (dout @ np.swapaxes(v, 1, 2))
    ds = (dz - p * dz.sum(2, keepdims=True)) / math.sqrt(n)
    g = np.concatenate([ds @ k, np.swapaxes(ds, 1, 2) @ q, dv], 2)
    dw = np.split(np.tensordot(a, g, ((0, 1), (0, 1))), [n, 2 * n], axis=1)
    db = np.split(g.sum((0, 1)), [n, 2 * n])
    return g @ w.T, dw[0], db[0], dw[1], db[1], dw[2], db[2]


CASES.append(
    Case(
        layer="head_dropout",
        function=head_drop_fused,
        wrong=("da", "dw_q", "db_q", "dw_k"),
        mistake="The recomputed values lack b_v, which does cancel without dropout but not with it; "
        "they should be a w_v + b_v.",
    )
)


def head_drop_blocks(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    # blocks of two queries; what they owe to keys and values is accumulated
    k, v = a @ w_k + b_k, a @ w_v + b_v
    T, c = a.shape[1], w_q.shape[1] ** -0.5
    dk, dv, dq = np.zeros_like(k), np.zeros_like(v), []
    for t in range(0, T, 2):
        e = min(t + 2, T)
        q = a[:, t:e] @ w_q + b_q
        s = c * q @ k[:, :e].swapaxes(1, 2)
        s[:, np.arange(t, e)[:, None] < np.arange(e)] = -np.inf
        p = _softmax(s)
        pk = p * keep[:, t:e, :e]
        g = dout[:, t:e]
        dv[:, :e] += pk.swapaxes(1, 2) @ g
        ds = c * (pk * (g @ v[:, :e].swapaxes(1, 2)) - p * (g * (pk @ v[:, :e])).sum(-1, keepdims=True))
        dq.append(ds @ k[:, :e])
        dk[:, :e] += ds.swapaxes(1, 2) @ q
    dq = np.concatenate(dq, 1)
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    gw = [np.einsum("bti,btj->ij", a, g) for g in (dq, dk, dv)]
    gb = [np.einsum("btj->j", g) for g in (dq, dk, dv)]
    return da, gw[0], gb[0], gw[1], gb[1], gw[2], gb[2]


CASES.append(Case(layer="head_dropout", function=head_drop_blocks))


# ---------------------------------------------------------------- multi_head


def mha_numpy(query, key, value, w_q, w_k, w_v, dout):
    B, T, C = query.shape
    H = 2
    d = C // H
    split = lambda z: z.reshape(B, H, T, d)  # noqa: E731
    merge = lambda z: z.reshape(B, T, C)  # noqa: E731
    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    p = _softmax(_causal(q @ k.swapaxes(2, 3) / np.sqrt(d)))
    do = split(dout)
    dv = p.swapaxes(2, 3) @ do
    dp = do @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dq, dk, dv = merge(ds @ k), merge(ds.swapaxes(2, 3) @ q), merge(dv)
    rows = lambda z: z.reshape(-1, C)  # noqa: E731
    return (
        dq @ w_q.T,
        dk @ w_k.T,
        dv @ w_v.T,
        rows(query).T @ rows(dq),
        rows(key).T @ rows(dk),
        rows(value).T @ rows(dv),
    )


CASES.append(
    Case(
        layer="multi_head",
        function=mha_numpy,
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="(B, T, C) is reshaped straight to (B, H, T, d), mixing tokens and heads; it should be reshaped to "
        "(B, T, H, d) and transposed.",
    )
)


def mha_einsum_heads(query, key, value, w_q, w_k, w_v, dout):
    n_head, c = 2, query.shape[-1]
    W = [w.reshape(c, n_head, -1) for w in (w_q, w_k, w_v)]
    X = (query, key, value)
    q, k, v = (np.einsum("btc,chd->bhtd", x, w) for x, w in zip(X, W))
    a = _softmax(_causal(np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(c)))
    g = dout.reshape(*dout.shape[:2], n_head, -1)
    dv = np.einsum("bhij,bihd->bhjd", a, g)
    da = np.einsum("bihd,bhjd->bhij", g, v)
    ds = a * (da - np.einsum("bhij,bhij->bhi", a, da)[..., None]) / np.sqrt(c)
    D = (np.einsum("bhij,bhjd->bhid", ds, k), np.einsum("bhij,bhid->bhjd", ds, q), dv)
    dX = [np.einsum("bhtd,chd->btc", d, w) for d, w in zip(D, W)]
    dW = [np.einsum("btc,bhtd->chd", x, d).reshape(c, c) for x, d in zip(X, D)]
    return (*dX, *dW)


CASES.append(
    Case(
        layer="multi_head",
        function=mha_einsum_heads,
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="The scores are divided by the root of the model's width; it should be the width of a head.",
    )
)


class _MultiHead:
    def __init__(self, w_q, w_k, w_v, n_head):
        self.w = {"q": w_q, "k": w_k, "v": w_v}
        self.n_head = n_head
        self.cache = {}

    def _heads(self, x):
        b, t, c = x.shape
        return x.reshape(b, t, self.n_head, c // self.n_head).transpose(0, 2, 1, 3)

    def _unheads(self, x):
        b, h, t, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)

    def forward(self, query, key, value):
        q, k, v = (self._heads(x @ self.w[n]) for n, x in (("q", query), ("k", key), ("v", value)))
        p = _softmax(_causal(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5))
        self.cache = dict(q=q, k=k, v=v, p=p, query=query, key=key, value=value)
        return self._unheads(p @ v)


class _MultiHeadA(_MultiHead):
    def backward(self, dout):
        c = self.cache
        g = self._heads(dout)
        p = c["p"]
        dp = g @ c["v"].swapaxes(2, 3)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * c["q"].shape[-1] ** -0.5
        dq = self._unheads(ds @ c["k"])
        dk = self._unheads(ds.swapaxes(2, 3) @ c["q"])
        dv = self._unheads(p.swapaxes(2, 3) @ g)
        dw_q = np.einsum("bti,btj->ij", c["query"], dq)
        dw_k = np.einsum("bti,btj->ij", c["query"], dk)
        dw_v = np.einsum("bti,btj->ij", c["value"], dv)
        return dq @ self.w["q"].T, dk @ self.w["k"].T, dv @ self.w["v"].T, dw_q, dw_k, dw_v


def mha_layer_object(query, key, value, w_q, w_k, w_v, dout):
    layer = _MultiHeadA(w_q, w_k, w_v, 2)
    layer.forward(query, key, value)
    return layer.backward(dout)


CASES.append(
    Case(
        layer="multi_head",
        function=mha_layer_object,
        wrong=("dw_k",),
        mistake="dw_k is computed with the input of the queries; it should be that of the keys.",
    )
)


def mha_torch_full(query, key, value, w_q, w_k, w_v, dout):
    query, key, value, w_q, w_k, w_v, g = (torch.as_tensor(z) for z in (query, key, value, w_q, w_k, w_v, dout))
    B, T, C = query.shape
    nh, hd = 2, C // 2
    view = lambda z: z.view(B, T, nh, hd).transpose(1, 2)  # noqa: E731
    q, k, v = view(query @ w_q), view(key @ w_k), view(value @ w_v)
    att = (q @ k.transpose(-2, -1) / math.sqrt(hd)).softmax(-1)
    gy = view(g)
    gv = att.transpose(-2, -1) @ gy
    ga = gy @ v.transpose(-2, -1)
    gs = att * (ga - (ga * att).sum(-1, keepdim=True)) / math.sqrt(hd)
    gq = (gs @ k).transpose(1, 2).reshape(B, T, C)
    gk = (gs.transpose(-2, -1) @ q).transpose(1, 2).reshape(B, T, C)
    gv = gv.contiguous().view(B, T, C)
    grads = [gq @ w_q.t(), gk @ w_k.t(), gv @ w_v.t()]
    for x, gz in ((query, gq), (key, gk), (value, gv)):
        grads.append(x.reshape(-1, C).t() @ gz.reshape(-1, C))
    return tuple(z.numpy() for z in grads)


CASES.append(
    Case(
        layer="multi_head",
        function=mha_torch_full,
        options={"causal": False},
        wrong=("dvalue", "dw_v"),
        mistake="The heads of dv are merged by a view of (B, H, T, d) without transposing back to (B, T, H, d).",
    )
)


def mha_head_columns(query, key, value, w_q, w_k, w_v, dout):
    H = 3
    B, T, C = query.shape
    d = C // H
    dquery, dkey, dvalue = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    dwq, dwk, dwv = np.zeros_like(w_q), np.zeros_like(w_k), np.zeros_like(w_v)
    for h in range(H):
        cols = np.arange(h, C, H)
        q, k, v, g = query @ w_q[:, cols], key @ w_k[:, cols], value @ w_v[:, cols], dout[..., cols]
        p = _softmax(_causal(q @ k.transpose(0, 2, 1) / math.sqrt(d)))
        dp = g @ v.transpose(0, 2, 1)
        ds = p * (dp - (p * dp).sum(2, keepdims=True)) / math.sqrt(d)
        for x, w, dx, dw, dz in (
            (query, w_q, dquery, dwq, ds @ k),
            (key, w_k, dkey, dwk, ds.transpose(0, 2, 1) @ q),
            (value, w_v, dvalue, dwv, p.transpose(0, 2, 1) @ g),
        ):
            dx += dz @ w[:, cols].T
            dw[:, cols] += np.einsum("bti,btj->ij", x, dz)
    return dquery, dkey, dvalue, dwq, dwk, dwv


CASES.append(
    Case(
        layer="multi_head",
        function=mha_head_columns,
        options={"n_head": 3},
        wrong=("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"),
        mistake="Head h takes every H-th column, starting at h; it should take the h-th block of C/H columns.",
    )
)


def mha_folded_scores(query, key, value, w_q, w_k, w_v, dout):
    # per head the scores are query M key^T with M = w_q w_k^T, and dM gives both weights
    B, T, C = query.shape
    d = C // 2
    dquery, dkey, dvalue = (np.zeros_like(z) for z in (query, key, value))
    dw = [np.zeros_like(w_q) for _ in range(3)]
    for h in range(2):
        c = slice(h * d, (h + 1) * d)
        M = w_q[:, c] @ w_k[:, c].T / d**0.5
        p = _softmax(_causal(np.einsum("bic,ce,bje->bij", query, M, key)))
        g = dout[..., c]
        pv = p @ value
        dpx = (g @ w_v[:, c].T) @ value.swapaxes(1, 2)
        ds = p * (dpx - (p * dpx).sum(-1, keepdims=True))
        dM = np.einsum("bic,bij,bje->ce", query, ds, key)
        dquery += ds @ key @ M.T
        dkey += ds.swapaxes(1, 2) @ query @ M
        dvalue += p.swapaxes(1, 2) @ g @ w_v[:, c].T
        dw[0][:, c] = dM @ w_k[:, c] / d**0.5
        dw[1][:, c] = dM.T @ w_q[:, c] / d**0.5
        dw[2][:, c] = np.einsum("bic,bid->cd", pv, g)
    return dquery, dkey, dvalue, *dw


CASES.append(Case(layer="multi_head", function=mha_folded_scores))


# ---------------------------------------------------------------- self_attention


def self_attn_gpt2(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, C = x.shape
    nh = 2
    hs = C // nh
    qkv = x @ w_qkv + b_qkv
    q, k, v = (z.reshape(B, T, nh, hs).transpose(0, 2, 1, 3) for z in np.split(qkv, 3, axis=2))
    att = _softmax(_causal(q @ k.transpose(0, 1, 3, 2) / math.sqrt(hs)))
    y = (att @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
    dw_o = dout.reshape(-1, C).T @ y.reshape(-1, C)
    db_o = dout.reshape(-1, C).mean(0)
    dy = (dout @ w_o.T).reshape(B, T, nh, hs).transpose(0, 2, 1, 3)
    dv = att.transpose(0, 1, 3, 2) @ dy
    datt = dy @ v.transpose(0, 1, 3, 2)
    ds = att * (datt - (att * datt).sum(-1, keepdims=True)) / math.sqrt(hs)
    dq, dk = ds @ k, ds.transpose(0, 1, 3, 2) @ q
    dqkv = np.concatenate([z.transpose(0, 2, 1, 3).reshape(B, T, C) for z in (dq, dk, dv)], axis=2)
    dx = dqkv @ w_qkv.T
    dw_qkv = x.reshape(-1, C).T @ dqkv.reshape(-1, 3 * C)
    return dx, dw_qkv, dqkv.sum((0, 1)), dw_o, db_o


CASES.append(
    Case(
        layer="self_attention",
        function=self_attn_gpt2,
        wrong=("dw_o", "db_o"),
        mistake="dw_o is dout^T y, the layout of (out, in) weights, and db_o the mean of dout's rows; "
        "they should be y^T dout and the sum of the rows.",
    )
)


def self_attn_packed5d(x, w_qkv, b_qkv, w_o, b_o, dout):
    b, t, c = x.shape
    h = 2
    qkv = (x @ w_qkv + b_qkv).reshape(b, t, h, 3, c // h)
    q, k, v = np.moveaxis(qkv, 3, 0)
    r = (c // h) ** -0.5
    p = _softmax(_causal(np.einsum("bihd,bjhd->bhij", q, k) * r))
    y = np.einsum("bhij,bjhd->bihd", p, v).reshape(b, t, c)
    g = (dout @ w_o.T).reshape(b, t, h, -1)
    dp = np.einsum("bihd,bjhd->bhij", g, v)
    ds = r * p * (dp - (p * dp).sum(-1, keepdims=True))
    d = np.stack(
        [
            np.einsum("bhij,bjhd->bihd", ds, k),
            np.einsum("bhij,bihd->bjhd", ds, q),
            np.einsum("bhij,bihd->bjhd", p, g),
        ],
        axis=3,
    ).reshape(b, t, 3 * c)
    return (
        d @ w_qkv.T,
        np.einsum("bti,btj->ij", x, d),
        d.sum((0, 1)),
        np.einsum("bti,btj->ij", y, dout),
        dout.sum((0, 1)),
    )


CASES.append(
    Case(
        layer="self_attention",
        function=self_attn_packed5d,
        wrong=("dx", "dw_qkv", "db_qkv", "dw_o"),
        mistake="The columns are unpacked as (head, 3, d), q, k, v of a head next to each other; "
        "they are q | k | v, that is (3, head, d).",
    )
)


def self_attention_buffers(x, w_qkv, b_qkv, w_o, b_o, dout):
    """Memory-saving version."""
    B, T, C = x.shape
    H, D = 2, C // 2
    qkv = np.ascontiguousarray((x @ w_qkv + b_qkv).reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4))
    q, k, v = qkv
    att = q @ k.swapaxes(-1, -2)
    att *= D**-0.5
    att[..., np.triu_indices(T, 1)[0], np.triu_indices(T, 1)[1]] = -np.inf
    att -= att.max(-1, keepdims=True)
    np.exp(att, out=att)
    att /= att.sum(-1, keepdims=True)
    ctx = (att @ v).swapaxes(1, 2).reshape(B * T, C)
    d_ctx = (dout @ w_o.T).reshape(B, T, H, D).swapaxes(1, 2)
    d_att = d_ctx @ v.swapaxes(-1, -2)
    d_att -= np.sum(d_att * att, axis=-1, keepdims=True)
    d_score = att
    d_score *= d_att
    d_score *= D**-0.5
    d_qkv = np.empty_like(qkv)
    np.matmul(d_score, k, out=d_qkv[0])
    np.matmul(d_score.swapaxes(-1, -2), q, out=d_qkv[1])
    np.matmul(att.swapaxes(-1, -2), d_ctx, out=d_qkv[2])
    d_flat = d_qkv.transpose(1, 3, 0, 2, 4).reshape(B * T, 3 * C)
    rows = dout.reshape(B * T, C)
    return (
        (d_flat @ w_qkv.T).reshape(x.shape),
        x.reshape(B * T, C).T @ d_flat,
        d_flat.sum(0),
        ctx.T @ rows,
        rows.sum(0),
    )


CASES.append(
    Case(
        layer="self_attention",
        function=self_attention_buffers,
        wrong=("dx", "dw_qkv", "db_qkv"),
        mistake="The buffer of the weights is overwritten by the score gradient before dv is computed from it; "
        "dv should be computed first.",
    )
)


def selfattn_torch_nanogpt(x, w_qkv, b_qkv, w_o, b_o, dout):
    x, w, b, wo, g = (torch.as_tensor(z) for z in (x, w_qkv, b_qkv, w_o, dout))
    B, T, C = x.size()
    n_head = 2
    q, k, v = (x @ w + b).split(C, dim=2)
    q = q.view(B, T, n_head, C // n_head).transpose(1, 2)
    k = k.view(B, T, n_head, C // n_head).transpose(1, 2)
    v = v.view(B, T, n_head, C // n_head).transpose(1, 2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
    # backward
    dwo = y.view(-1, C).T @ g.view(-1, C)
    dbo = g.sum((0, 1))
    dy = (g @ wo).view(B, T, n_head, C // n_head).transpose(1, 2)
    datt = dy @ v.transpose(-2, -1)
    dv = att.transpose(-2, -1) @ dy
    ds = att * (datt - (datt * att).sum(-1, keepdim=True)) / math.sqrt(k.size(-1))
    dq, dk = ds @ k, ds.transpose(-2, -1) @ q
    dqkv = torch.cat([z.transpose(1, 2).reshape(B, T, C) for z in (dq, dk, dv)], 2)
    dx = dqkv @ w.T
    dw = x.view(-1, C).T @ dqkv.view(-1, 3 * C)
    return dx.numpy(), dw.numpy(), dqkv.sum((0, 1)).numpy(), dwo.numpy(), dbo.numpy()


CASES.append(
    Case(
        layer="self_attention",
        function=selfattn_torch_nanogpt,
        wrong=("dx", "dw_qkv", "db_qkv"),
        mistake="The gradient goes back through the output projection by w_o; it should be its transpose.",
    )
)


def self_attention_slices(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, C = x.shape
    heads = 3
    n = C // heads
    qkv = x @ w_qkv + b_qkv
    dqkv = np.zeros_like(qkv)
    y = np.zeros_like(x)
    dy = dout @ w_o.T
    for b in range(B):
        for h in range(heads):
            iq, ik, iv = (slice(j * C + h * n, j * C + (h + 1) * n) for j in range(3))
            io = slice(h * n, (h + 1) * n)
            q, k, v = qkv[b, :, iq], qkv[b, :, ik], qkv[b, :, iv]
            p = _softmax(q @ k.T / np.sqrt(n))
            y[b, :, io] = p @ v
            dp = dy[b, :, io] @ v.T
            ds = p * (dp - (dp * p).sum(1, keepdims=True)) / np.sqrt(n)
            dqkv[b, :, iq] = ds @ k
            dqkv[b, :, ik] = ds.T @ q
            dqkv[b, :, iv] = p.T @ dy[b, :, io]
    dw_qkv = x.reshape(C, -1) @ dqkv.reshape(-1, 3 * C)
    dw_o = y.reshape(C, -1) @ dout.reshape(-1, C)
    return dqkv @ w_qkv.T, dw_qkv, dqkv.sum(axis=(0, 1)), dw_o, dout.sum(axis=(0, 1))


CASES.append(
    Case(
        layer="self_attention",
        function=self_attention_slices,
        options={"causal": False, "n_head": 3},
        wrong=("dw_qkv", "dw_o"),
        mistake="The inputs are reshaped to (C, rows) instead of being flattened to rows and transposed.",
    )
)


def self_attn_tokenwise(x, w_qkv, b_qkv, w_o, b_o, dout):
    """As in decoding: token by token with a cache of keys and values, then backwards in time."""
    B, T, C = x.shape
    hd = C // 2
    qkv = (x @ w_qkv + b_qkv).reshape(B, T, 3, 2, hd)
    g = (dout @ w_o.T).reshape(B, T, 2, hd)
    d = np.zeros_like(qkv)
    y = np.zeros_like(g)
    for t in reversed(range(T)):
        q, K, V = qkv[:, t, 0], qkv[:, : t + 1, 1], qkv[:, : t + 1, 2]
        p = _softmax(np.einsum("bhd,bshd->bhs", q, K) / hd**0.5)
        y[:, t] = np.einsum("bhs,bshd->bhd", p, V)
        w = p * (np.einsum("bhd,bshd->bhs", g[:, t], V) - (g[:, t] * y[:, t]).sum(-1)[..., None]) / hd**0.5
        d[:, t, 0] = np.einsum("bhs,bshd->bhd", w, K)
        d[:, : t + 1, 1] += np.einsum("bhs,bhd->bshd", w, q)
        d[:, : t + 1, 2] += np.einsum("bhs,bhd->bshd", p, g[:, t])
    d = d.reshape(B, T, 3 * C)
    e = np.einsum
    dw_o = e("bti,btj->ij", y.reshape(B, T, C), dout)
    return d @ w_qkv.T, e("bti,btj->ij", x, d), d.sum((0, 1)), dw_o, dout.sum((0, 1))


CASES.append(Case(layer="self_attention", function=self_attn_tokenwise))


# ---------------------------------------------------------------- self_attention_separate


def _heads(x, n):
    b, t, c = x.shape
    return x.reshape(b, t, n, c // n).transpose(0, 2, 1, 3)


def _unheads(x):
    b, h, t, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)


def _dense_grads(x, w, g):
    """dx, dw, db of x @ w + b."""
    return g @ w.T, x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1]), g.reshape(-1, g.shape[-1]).sum(0)


def sep_attn_np(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    scale = (x.shape[-1] // 2) ** -0.5
    q = _heads(x @ w_q + b_q, 2) * scale
    k, v = _heads(x @ w_k + b_k, 2), _heads(x @ w_v + b_v, 2)
    p = _softmax(_causal(q @ k.swapaxes(-1, -2)))
    y = _unheads(p @ v)
    dy, dw_o, db_o = _dense_grads(y, w_o, dout)
    dy = _heads(dy, 2)
    dp = dy @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk, dv = _unheads(ds @ k), _unheads(ds.swapaxes(-1, -2) @ q), _unheads(p.swapaxes(-1, -2) @ dy)
    dx_q, dw_q, db_q = _dense_grads(x, w_q, dq)
    dx_k, dw_k, db_k = _dense_grads(x, w_k, dk)
    dx_v, dw_v, db_v = _dense_grads(x, w_v, dv)
    return dx_q + dx_k + dx_v, dw_q, db_q, dw_k, db_k, dw_v, db_v, dw_o, db_o


CASES.append(
    Case(
        layer="self_attention_separate",
        function=sep_attn_np,
        wrong=("dx", "dw_q", "db_q"),
        mistake="The queries are scaled by 1/sqrt(d_k) in the forward pass but their gradient is not.",
    )
)


def sep_attn_helpers(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, T, C = x.shape
    mask = np.tril(np.ones((T, T)))
    q, k, v = (_heads(x @ w + b, 2) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    r = 1 / math.sqrt(C // 2)
    attn = _softmax(q @ k.swapaxes(-1, -2) * r)
    attn = attn * mask
    y = _unheads(attn @ v)
    dy, dw_o, db_o = _dense_grads(y, w_o, dout)
    dy = _heads(dy, 2)
    dattn = (dy @ v.swapaxes(-1, -2)) * mask
    dv = attn.swapaxes(-1, -2) @ dy
    ds = attn * (dattn - (dattn * attn).sum(-1, keepdims=True)) * mask * r
    dx = np.zeros_like(x)
    res = []
    for w, g in ((w_q, ds @ k), (w_k, ds.swapaxes(-1, -2) @ q), (w_v, dv)):
        dxi, dw, db = _dense_grads(x, w, _unheads(g))
        dx += dxi
        res += [dw, db]
    return dx, *res, dw_o, db_o


CASES.append(
    Case(
        layer="self_attention_separate",
        function=sep_attn_helpers,
        wrong=("dx", "dw_q", "db_q", "dw_k", "db_k", "dw_v", "db_v", "dw_o"),
        mistake="Future weights are set to zero after the softmax without renormalising; "
        "their scores should be -inf before it.",
    )
)


def sep_attn_torch(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    t = [torch.as_tensor(z) for z in (x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout)]
    x, wq, bq, wk, bk, wv, bv, wo, bo, g = t
    B, N, C = x.shape
    hd = C // 2
    q, k, v = (torch.unflatten(x @ w + b, -1, (2, hd)).permute(0, 2, 1, 3) for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    s = (q @ k.mT) / hd**0.5
    p = s.masked_fill(torch.triu(torch.ones(N, N), 1).bool(), -torch.inf).softmax(-1)
    ctx = p @ v
    dwo = torch.einsum("bni,bnj->ij", ctx.reshape(B, N, C), g)
    dctx = (g @ wo.T).unflatten(-1, (2, hd)).permute(0, 2, 1, 3)
    dp = dctx @ v.mT
    ds = p * (dp - (dp * p).sum(-1, True)) / hd**0.5
    flat = lambda z: z.permute(0, 2, 1, 3).reshape(B, N, C)  # noqa: E731
    dq, dk, dv = flat(ds @ k), flat(ds.mT @ q), flat(p.mT @ dctx)
    dx = dq @ wq.T + dk @ wk.T + dv @ wv.T
    gw = [torch.einsum("bni,bnj->ij", x, z) for z in (dq, dk, dv)]
    gb = [z.sum((0, 1)) for z in (dq, dk, dv)]
    return [z.numpy() for z in (dx, gw[0], gb[0], gw[1], gb[1], gw[2], gb[2], dwo, g.sum((0, 1)))]


CASES.append(
    Case(
        layer="self_attention_separate",
        function=sep_attn_torch,
        wrong=("dw_o",),
        mistake="For dw_o the heads' outputs are reshaped to (B, T, C) without moving the head axis behind the tokens.",
    )
)


def sep_attn_headloop(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    C = x.shape[-1]
    n_head = 3
    d = C // n_head
    dx = np.zeros_like(x)
    dwq, dwk, dwv, dwo = (np.zeros_like(w) for w in (w_q, w_k, w_v, w_o))
    dbq, dbk, dbv = (np.zeros_like(b) for b in (b_q, b_k, b_v))
    for h in range(n_head):
        c = slice(h * d, (h + 1) * d)
        q, k, v = x @ w_q[:, c] + b_q[c], x @ w_k[:, c] + b_k[c], x @ w_v[:, c] + b_v[c]
        p = _softmax(_causal(np.einsum("bid,bjd->bij", q, k) / d**0.5))
        o = p @ v
        dwo[c] = np.einsum("btd,btc->dc", o, dout)
        do = dout @ w_o[c].T
        dp = np.einsum("bid,bjd->bij", do, v)
        ds = p * (dp - np.einsum("btd,btd->bt", do, o)[..., None]) / d**0.5
        dq, dk, dv = ds @ k, np.einsum("bij,bid->bjd", ds, q), np.einsum("bij,bid->bjd", p, do)
        dx = dq @ w_q[:, c].T + dk @ w_k[:, c].T + dv @ w_v[:, c].T
        for dw, db, g in ((dwq, dbq, dq), (dwk, dbk, dk), (dwv, dbv, dv)):
            dw[:, c] = np.einsum("bti,btd->id", x, g)
            db[c] = g.sum((0, 1))
    return dx, dwq, dbq, dwk, dbk, dwv, dbv, dwo, dout.sum((0, 1))


CASES.append(
    Case(
        layer="self_attention_separate",
        function=sep_attn_headloop,
        options={"n_head": 3},
        wrong=("dx",),
        mistake="dx is reassigned for every head, so only the last head's contribution remains; "
        "they should be accumulated.",
    )
)


def sep_attn_bidirectional(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    # out = sum_h P_h (x W_h + b_h) with W_h = w_v[:, h] w_o[h]: values and output projection merged per head
    C = x.shape[-1]
    d = C // 2
    x1 = np.concatenate([x, np.ones_like(x[..., :1])], -1)
    ext = lambda w, b: np.vstack([w, b])  # noqa: E731
    Q, K, V = ext(w_q, b_q), ext(w_k, b_k), ext(w_v, b_v)
    dx = np.zeros_like(x)
    gQ, gK, gV, gO = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V), np.zeros_like(w_o)
    for c in (slice(0, d), slice(d, C)):
        W = V[:, c] @ w_o[c]
        q, k = x1 @ Q[:, c], x1 @ K[:, c]
        p = _softmax(q @ k.swapaxes(1, 2) * d**-0.5)
        u = x1 @ W
        dp = dout @ u.swapaxes(1, 2)
        ds = p * (dp - (p * dp).sum(2, keepdims=True)) * d**-0.5
        du = p.swapaxes(1, 2) @ dout
        dq, dk = ds @ k, ds.swapaxes(1, 2) @ q
        dW = np.tensordot(x1, du, ((0, 1), (0, 1)))
        gV[:, c] = dW @ w_o[c].T
        gO[c] = V[:, c].T @ dW
        gQ[:, c] = np.tensordot(x1, dq, ((0, 1), (0, 1)))
        gK[:, c] = np.tensordot(x1, dk, ((0, 1), (0, 1)))
        dx += (dq @ Q[:, c].T + dk @ K[:, c].T + du @ W.T)[..., :C]
    return dx, gQ[:C], gQ[C], gK[:C], gK[C], gV[:C], gV[C], gO, dout.sum((0, 1))


CASES.append(Case(layer="self_attention_separate", function=sep_attn_bidirectional, options={"causal": False}))


# ---------------------------------------------------------------- cross_attention


def cross_attn_numpy(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    H = 2
    q, k, v = _heads(query @ w_q + b_q, H), _heads(key @ w_k + b_k, H), _heads(value @ w_v + b_v, H)
    r = q.shape[-1] ** -0.5
    p = _softmax(q @ k.swapaxes(-1, -2) * r)
    y = _unheads(p @ v)
    dy, dw_o, db_o = _dense_grads(y, w_o, dout)
    dy = _heads(dy, H)
    dv = _unheads(p.swapaxes(-1, -2) @ dy)
    dp = dy @ v.swapaxes(-1, -2)
    ds = r * p * (dp - (dp * p).sum(-1, keepdims=True))
    dq, dk = _unheads(ds @ k), _unheads(ds.swapaxes(-1, -2) @ q)
    dquery, dw_q, db_q = _dense_grads(query, w_q, dq)
    dkey, dw_k, db_k = _dense_grads(value, w_k, dk)
    dvalue, dw_v, db_v = _dense_grads(value, w_v, dv)
    return dquery, dkey, dvalue, dw_q, db_q, dw_k, db_k, dw_v, db_v, dw_o, db_o


CASES.append(
    Case(
        layer="cross_attention",
        function=cross_attn_numpy,
        wrong=("dw_k",),
        mistake="dw_k is computed with the input of the values; it should be that of the keys.",
    )
)


def cross_attn_decoder(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    """Decoder reading an encoder's memory."""
    B, N, C = query.shape
    M = key.shape[1]
    h, d = 2, C // 2
    q = (query @ w_q + b_q).reshape(B, N, h, d)
    k = (key @ w_k + b_k).reshape(B, M, h, d)
    v = (value @ w_v + b_v).reshape(B, M, h, d)
    a = _softmax(np.einsum("bnhd,bmhd->bhnm", q, k) / d**0.5)
    ctx = np.einsum("bhnm,bmhd->bnhd", a, v).reshape(B, N, C)
    dctx = (dout @ w_o.T).reshape(B, N, h, d)
    da = np.einsum("bnhd,bmhd->bhnm", dctx, v)
    ds = a * (da - np.einsum("bhnm,bhnm->bhn", da, a)[..., None]) / d**0.5
    dq = np.einsum("bhnm,bmhd->bnhd", ds, k).reshape(B, N, C)
    dk = np.einsum("bhnm,bnhd->bmhd", ds, q).reshape(B, M, C)
    dv = np.einsum("bhnm,bnhd->bmhd", a, dctx).reshape(B, M, C)
    mm = lambda s, t: np.einsum("bti,btj->ij", s, t)  # noqa: E731
    dmem = dk @ w_k.T + dv @ w_v.T
    sm = lambda s: s.sum((0, 1))  # noqa: E731
    return (
        dq @ w_q.T,
        dmem,
        dmem,
        mm(query, dq),
        sm(dq),
        mm(key, dk),
        sm(dk),
        mm(value, dv),
        sm(dv),
        mm(ctx, dout),
        sm(dout),
    )


CASES.append(
    Case(
        layer="cross_attention",
        function=cross_attn_decoder,
        wrong=("dkey", "dvalue"),
        mistake="dkey and dvalue both get the sum of the two paths, as for one memory; "
        "each should get its own path only.",
    )
)


def cross_attention_torch(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    arrays = (query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout)
    xq, xk, xv, wq, bq, wk, bk, wv, bv, wo, bo, g = map(torch.as_tensor, arrays)
    split = lambda z: z.unflatten(-1, (2, -1)).transpose(1, 2)  # noqa: E731
    join = lambda z: z.transpose(1, 2).flatten(2)  # noqa: E731
    q, k, v = split(xq @ wq + bq), split(xk @ wk + bk), split(xv @ wv + bv)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(s.shape[-2:]).tril() == 0, float("-inf"))
    p = s.softmax(-1)
    y = join(p @ v)
    gy = split(g @ wo.T)
    gp = gy @ v.mT
    gs = p * (gp - (gp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    gq, gk, gv = join(gs @ k), join(gs.mT @ q), join(p.mT @ gy)
    out = [gq @ wq.T, gk @ wk.T, gv @ wv.T]
    for x, z in ((xq, gq), (xk, gk), (xv, gv), (y, g)):
        out += [x.flatten(0, 1).T @ z.flatten(0, 1), z.sum((0, 1))]
    return [z.numpy() for z in out]


CASES.append(
    Case(
        layer="cross_attention",
        function=cross_attention_torch,
        wrong=("dquery", "dkey", "dvalue", "dw_q", "db_q", "dw_k", "dw_v", "dw_o"),
        mistake="A causal mask is applied to the scores; cross-attention has none.",
    )
)


def cross_attn_loop(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    n_batch, n_q, C = query.shape
    n_head = 2
    d = C // n_head
    Q, K, V = query @ w_q + b_q, key @ w_k + b_k, value @ w_v + b_v
    dY = dout @ w_o.T
    Y, dQ, dK, dV = np.zeros_like(Q), np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for b in range(n_batch):
        for h in range(n_head):
            lo, hi = h * d, (h + 1) * d
            k, v = K[b, :, lo:hi], V[b, :, lo:hi]
            for i in range(n_q):
                qi = Q[b, i, lo:hi]
                s = k @ qi / np.sqrt(len(k))
                e = np.exp(s - s.max())
                p = e / e.sum()
                Y[b, i, lo:hi] = p @ v
                gi = dY[b, i, lo:hi]
                dp = v @ gi
                ds = p * (dp - p @ dp) / np.sqrt(len(k))
                dQ[b, i, lo:hi] = ds @ k
                dK[b, :, lo:hi] += np.outer(ds, qi)
                dV[b, :, lo:hi] += np.outer(p, gi)
    res = [dQ @ w_q.T, dK @ w_k.T, dV @ w_v.T]
    for inp, grad in ((query, dQ), (key, dK), (value, dV), (Y, dout)):
        res.append(np.tensordot(inp, grad, axes=([0, 1], [0, 1])))
        res.append(grad.sum(axis=(0, 1)))
    return tuple(res)


CASES.append(
    Case(
        layer="cross_attention",
        function=cross_attn_loop,
        wrong=("dquery", "dkey", "dvalue", "dw_q", "db_q", "dw_k", "dw_v", "dw_o"),
        mistake="The scores are divided by the root of the number of keys; it should be the width of a head.",
    )
)


def cross_attn_chunked(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    # keys arrive in chunks of three; running maximum and sum as for long memories
    C = query.shape[-1]
    d = C // 2
    q = _heads(query @ w_q + b_q, 2) * d**-0.5
    k, v = _heads(key @ w_k + b_k, 2), _heads(value @ w_v + b_v, 2)
    m = np.full(q.shape[:-1], -np.inf)
    den, acc = np.zeros_like(m), np.zeros_like(q)
    for j in range(0, k.shape[2], 3):
        s = q @ k[:, :, j : j + 3].swapaxes(2, 3)
        new = np.maximum(m, s.max(-1))
        e = np.exp(s - new[..., None])
        f = np.exp(m - new)
        den, acc, m = den * f + e.sum(-1), acc * f[..., None] + e @ v[:, :, j : j + 3], new
    y = acc / den[..., None]
    dy, dw_o, db_o = _dense_grads(_unheads(y), w_o, dout)
    dy = _heads(dy, 2)
    lse, delta = (m + np.log(den))[..., None], (dy * y).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.empty_like(k), np.empty_like(v)
    for j in range(0, k.shape[2], 3):
        b = slice(j, j + 3)
        p = np.exp(q @ k[:, :, b].swapaxes(2, 3) - lse)
        dv[:, :, b] = p.swapaxes(2, 3) @ dy
        ds = p * (dy @ v[:, :, b].swapaxes(2, 3) - delta)
        dq += ds @ k[:, :, b]
        dk[:, :, b] = ds.swapaxes(2, 3) @ q
    dquery, dw_q, db_q = _dense_grads(query, w_q, _unheads(dq) * d**-0.5)
    dkey, dw_k, db_k = _dense_grads(key, w_k, _unheads(dk))
    dvalue, dw_v, db_v = _dense_grads(value, w_v, _unheads(dv))
    return dquery, dkey, dvalue, dw_q, db_q, dw_k, db_k, dw_v, db_v, dw_o, db_o


CASES.append(Case(layer="cross_attention", function=cross_attn_chunked))


# ---------------------------------------------------------------- layer_norm


def layernorm_student1(x, weight, bias, dout):
    """Step by step through the computational graph, as in the batch norm exercise."""
    N = x.shape[-1]
    mu = np.mean(x, axis=-1, keepdims=True)
    xmu = x - mu
    var = np.mean(xmu**2, axis=-1, keepdims=True)
    sqrtvar = np.sqrt(var + 1e-5)
    ivar = 1.0 / sqrtvar
    xhat = xmu * ivar
    # scale and shift
    dbias = np.sum(dout, axis=(0, 1))
    dweight = np.sum(dout * xhat, axis=(0, 1))
    dxhat = dout * weight
    # xhat = xmu * ivar
    divar = np.sum(dxhat * xmu, axis=-1, keepdims=True)
    dxmu1 = dxhat * ivar
    dsqrtvar = -1.0 / (sqrtvar**2) * divar
    dvar = 0.5 * 1.0 / np.sqrt(var + 1e-5) * dsqrtvar
    dsq = 1.0 / N * np.ones_like(x) * dvar
    dxmu2 = xmu * dsq
    # xmu = x - mu
    dx1 = dxmu1 + dxmu2
    dmu = -1 * np.sum(dxmu1 + dxmu2, axis=-1, keepdims=True)
    dx2 = 1.0 / N * np.ones_like(x) * dmu
    return dx1 + dx2, dweight, dbias


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_student1,
        wrong=("dx",),
        mistake="The derivative of the square in the variance lacks its factor 2.",
    )
)


def layernorm_fast(x, weight, bias, dout):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    n = (x - mean) * rstd
    core = dout - dout.mean(-1, keepdims=True) - n * (dout * n).mean(-1, keepdims=True)
    dx = weight * rstd * core
    return dx, (dout * n).sum((0, 1)), dout.sum((0, 1))


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_fast,
        wrong=("dx",),
        mistake="The weight multiplies the result; it should multiply dout before the means are taken.",
    )
)


def layer_norm_torch(x, weight, bias, dout):
    x, w, g = torch.as_tensor(x), torch.as_tensor(weight), torch.as_tensor(dout)
    var, mean = torch.var_mean(x, dim=-1, keepdim=True)
    inv = torch.rsqrt(var + 1e-5)
    xh = (x - mean) * inv
    gw = (g * xh).flatten(0, -2).sum(0)
    gb = g.flatten(0, -2).sum(0)
    gx = g * w
    gx = inv * (gx - gx.mean(-1, keepdim=True) - xh * (gx * xh).mean(-1, keepdim=True))
    return gx.numpy(), gw.numpy(), gb.numpy()


CASES.append(
    Case(
        layer="layer_norm",
        function=layer_norm_torch,
        wrong=("dx", "dweight"),
        mistake="torch.var_mean divides by n - 1 by default; the layer's variance divides by n.",
    )
)


def layernorm_kernel_rows(x, weight, bias, dout):
    """Like a kernel: blocks of rows, partial sums of the parameters' gradients per block."""
    C = x.shape[-1]
    rows, grad = x.reshape(-1, C), dout.reshape(-1, C)
    BLOCK = 4
    n_blocks = rows.shape[0] // BLOCK
    dx = np.zeros_like(rows)
    partial_w = np.zeros((n_blocks, C))
    partial_b = np.zeros((n_blocks, C))
    for r in range(rows.shape[0]):
        mean = rows[r].sum() / C
        c = rows[r] - mean
        rstd = (c @ c / C + 1e-5) ** -0.5
        xhat = c * rstd
        wdy = weight * grad[r]
        c1 = (xhat * wdy).sum() / C
        c2 = wdy.sum() / C
        dx[r] = (wdy - (xhat * c1 + c2)) * rstd
        if r // BLOCK < n_blocks:
            partial_w[r // BLOCK] += grad[r] * xhat
            partial_b[r // BLOCK] += grad[r]
    return dx.reshape(x.shape), partial_w.sum(0), partial_b.sum(0)


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_kernel_rows,
        wrong=("dweight", "dbias"),
        mistake="The number of blocks is rounded down, so the rows of the last, incomplete block are left out of "
        "dweight and dbias; it should be rounded up.",
    )
)


def layernorm_llmc(x, weight, bias, dout):
    B, T, C = x.shape
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for b in range(B):
        for t in range(T):
            mean = sum(x[b, t]) / C
            v = 0.0
            for i in range(C):
                v += (x[b, t, i] - mean) ** 2
            rstd = 1.0 / math.sqrt(v / C + 1e-5)
            dnorm_mean = 0.0
            dnorm_norm_mean = 0.0
            for i in range(C):
                norm_bti = (x[b, t, i] - mean) * rstd
                dnorm_i = weight[i] * dout[b, t, i]
                dnorm_mean += dnorm_i
                dnorm_norm_mean += dnorm_i * norm_bti
            dnorm_mean = dnorm_mean / C
            for i in range(C):
                norm_bti = (x[b, t, i] - mean) * rstd
                dnorm_i = weight[i] * dout[b, t, i]
                dbias[i] += dout[b, t, i]
                dweight[i] += norm_bti * dout[b, t, i]
                dval = dnorm_i
                dval -= dnorm_mean
                dval -= norm_bti * dnorm_norm_mean
                dval *= rstd
                dx[b, t, i] += dval
    return dx, dweight, dbias


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_llmc,
        wrong=("dx",),
        mistake="The sum of dnorm * norm is not divided by C, so the projection term is C times too large.",
    )
)


def layernorm_flat(x, weight, bias, dout):
    B, T, D = x.shape
    x2, g2 = x.reshape(B * T, D), dout.reshape(B * T, D)
    xc = x2 - x2.mean(axis=1, keepdims=True)
    std = x2.std(axis=1, keepdims=True)
    y = xc / (std + 1e-5)
    dgamma = np.einsum("nd,nd->d", g2, y)
    dbeta = np.einsum("nd->d", g2)
    gy = g2 * weight
    proj = (gy * xc).mean(axis=1, keepdims=True) * xc / (std * (std + 1e-5))
    dx = (gy - gy.mean(axis=1, keepdims=True) - proj) / (std + 1e-5)
    return dx.reshape(B, T, D), dgamma, dbeta


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_flat,
        wrong=("dx", "dweight"),
        mistake="eps is added to the standard deviation; it should be added to the variance under the root.",
    )
)


def layernorm_autograd(x, weight, bias, dout):
    X, W, b = (torch.tensor(z, requires_grad=True) for z in (x, weight, bias))
    with torch.no_grad():
        mu = X.mean(-1, keepdim=True)
        sigma = ((X - mu).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = (X - mu) / sigma * W + b
    y.backward(torch.as_tensor(dout))
    return X.grad.numpy(), W.grad.numpy(), b.grad.numpy()


CASES.append(
    Case(
        layer="layer_norm",
        function=layernorm_autograd,
        wrong=("dx",),
        mistake="Mean and deviation are computed under no_grad, so dx lacks the paths through them.",
    )
)


def layernorm_jacobian(x, weight, bias, dout):
    # dx = (J dout weight) with J = (I - 1/n - xhat xhat^T/n)/sigma, one matrix per token
    n = x.shape[-1]
    mu = x.mean(-1, keepdims=True)
    sigma = np.sqrt(((x - mu) ** 2).sum(-1, keepdims=True) / n + 1e-5)
    xh = (x - mu) / sigma
    J = (np.eye(n) - 1 / n - xh[..., :, None] * xh[..., None, :] / n) / sigma[..., None]
    dx = np.einsum("btij,btj->bti", J, dout * weight)
    return dx, np.einsum("bti,bti->i", xh, dout), np.einsum("bti->i", dout)


CASES.append(Case(layer="layer_norm", function=layernorm_jacobian))


def layernorm_moments(x, weight, bias, dout):
    # everything from sums of x and x^2, after a shift
    n = x.shape[-1]
    y = x - x[..., :1]
    s1, s2 = y.sum(-1, keepdims=True), (y * y).sum(-1, keepdims=True)
    r = 1 / np.sqrt(s2 / n - (s1 / n) ** 2 + 1e-3)
    g = dout * weight
    a, c = g.sum(-1, keepdims=True), (g * y).sum(-1, keepdims=True)
    dot = r * (c - s1 / n * a)
    beta = -(r**2) * dot / n
    alpha = -r * a / n - beta * s1 / n
    dx = r * g + beta * y + alpha
    dweight = ((y - s1 / n) * r * dout).sum((0, 1))
    return dx, dweight, dout.sum((0, 1))


CASES.append(Case(layer="layer_norm", function=layernorm_moments, options={"eps": 1e-3}))


# ---------------------------------------------------------------- rms_norm


def rmsnorm_np(x, weight, dout):
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    xn = x / rms
    dweight = np.sum(dout * xn, axis=(0, 1))
    dxn = dout * weight
    dx = (dxn - xn * np.sum(dxn * xn, axis=-1, keepdims=True)) / rms
    return dx, dweight


CASES.append(
    Case(
        layer="rms_norm",
        function=rmsnorm_np,
        wrong=("dx",),
        mistake="The projection on the normalised input is a sum over the features; it should be the mean.",
    )
)


def rmsnorm_torch_rows(x, weight, dout):
    x_, w, g = (torch.as_tensor(z) for z in (x, weight, dout))
    h = x_.reshape(-1, x_.shape[-1])
    gh = g.reshape(h.shape)
    inv = torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-6)
    grad_w = (gh * h).sum(0)
    dot = (gh * h).sum(1, keepdim=True)
    grad_x = inv * gh * w - h * inv.pow(3) * dot / h.shape[1]
    return grad_x.reshape(x_.shape).numpy(), grad_w.numpy()


CASES.append(
    Case(
        layer="rms_norm",
        function=rmsnorm_torch_rows,
        wrong=("dx", "dweight"),
        mistake="The dot product with x uses dout without the weight, and dweight uses x before normalisation; "
        "they should be (dout * weight) . x and the sum of dout times the normalised x.",
    )
)


def rms_norm_loop(x, weight, dout):
    EPS = 1e-5
    B, T, n = x.shape
    dx = np.zeros_like(x)
    dw = np.zeros(n)
    for b in range(B):
        for t in range(T):
            ss = 0.0
            for j in range(n):
                ss += x[b, t, j] * x[b, t, j]
            inv = 1.0 / math.sqrt(ss / n + EPS)
            dot = 0.0
            for j in range(n):
                dot += dout[b, t, j] * weight[j] * x[b, t, j]
            for j in range(n):
                dw[j] += dout[b, t, j] * x[b, t, j] * inv
                dx[b, t, j] = inv * (dout[b, t, j] * weight[j] - x[b, t, j] * dot * inv * inv / n)
    return dx, dw


CASES.append(
    Case(
        layer="rms_norm",
        function=rms_norm_loop,
        wrong=("dx", "dweight"),
        mistake="eps is 1e-5; this layer's is 1e-6.",
    )
)


def rmsnorm_terse(x, weight, dout):
    r = ((x**2).mean(-1) + 1e-6)[..., None] ** -0.5
    xhat = x * r
    g = dout * weight
    dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    return dx, np.einsum("btc,btc->c", xhat, dout)


CASES.append(
    Case(
        layer="rms_norm",
        function=rmsnorm_terse,
        wrong=("dx",),
        mistake="The mean of the gradient is subtracted as in a layer norm; RMSNorm subtracts no mean.",
    )
)


def rmsnorm_liger(x, weight, dout):
    n = x.shape[-1]
    X, dY = x.reshape(-1, n), dout.reshape(-1, n)
    rstd = 1 / np.sqrt((X * X).sum(1) / n + 1e-6)
    dX = np.empty_like(X)
    dW = np.zeros(n)
    for i in range(len(X)):
        m = dY[i] * weight
        dX[i] = rstd[i] * m
        dX[i] += rstd[i] * (-(1 / n) * rstd[i] * rstd[i] * np.sum(m * X[i]) * X[i])
        dW += dY[i] * (X[i] * rstd[i])
    return dX.reshape(x.shape), dW


CASES.append(Case(layer="rms_norm", function=rmsnorm_liger))


def rmsnorm_jacobian(x, weight, dout):
    # d(x r)/dx = r I - r^3 x x^T/n, one symmetric matrix per token
    n = x.shape[-1]
    r = 1 / np.sqrt(np.square(x).mean(-1) + 1e-6)
    J = r[..., None, None] * np.eye(n) - np.einsum("bt,bti,btj->btij", r**3 / n, x, x)
    return (J @ (dout * weight)[..., None])[..., 0], np.einsum("bt,bti,bti->i", r, x, dout)


CASES.append(Case(layer="rms_norm", function=rmsnorm_jacobian))


# ---------------------------------------------------------------- linear


def linear_for_loops(x, weight, bias, dout):
    B, T, n_in = x.shape
    n_out = weight.shape[1]
    dx = np.zeros(x.shape)
    dweight = np.zeros(weight.shape)
    dbias = np.zeros(bias.shape)
    for b in range(B):
        for t in range(T):
            for i in range(n_in):
                for o in range(n_out):
                    dx[b, t, i] += dout[b, t, o] * weight[i, o]
                    dweight[i, o] += x[b, t, i] * dout[b, t, o]
                    dbias[o] += dout[b, t, o]
    return dx, dweight, dbias


CASES.append(
    Case(
        layer="linear",
        function=linear_for_loops,
        wrong=("dbias",),
        mistake="dbias is added up inside the loop over the inputs, so it is n_in times too large.",
    )
)


def linear_per_sequence(x, weight, bias, dout):
    dx = np.empty_like(x)
    for b in range(x.shape[0]):
        dweight = np.zeros_like(weight)
        dbias = np.zeros_like(bias)
        dx[b] = dout[b] @ weight.T
        dweight += x[b].T @ dout[b]
        dbias += dout[b].sum(0)
    return dx, dweight, dbias


CASES.append(
    Case(
        layer="linear",
        function=linear_per_sequence,
        wrong=("dweight", "dbias"),
        mistake="The buffers of dweight and dbias are reset for every sequence, so only the last one counts.",
    )
)


def linear_outer_sum(x, weight, bias, dout):
    ones = np.ones((*x.shape[:-1], 1))
    aug = np.concatenate([x, ones], axis=-1).reshape(-1, x.shape[-1] + 1)
    full = sum(np.outer(row, g) for row, g in zip(aug, dout.reshape(-1, dout.shape[-1])))
    return np.tensordot(dout, weight, axes=(2, 1)), full[:-1], full[-1]


CASES.append(Case(layer="linear", function=linear_outer_sum))


# ---------------------------------------------------------------- lora


def lora_np(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    scale = alpha / r
    z = x @ down
    dup = np.einsum("btr,bto->ro", z, dout)
    dz = scale * (dout @ up.T)
    ddown = np.einsum("bti,btr->ir", x, dz)
    dx = dout @ weight.T + dz @ down.T
    return dx, ddown, dup


CASES.append(
    Case(
        layer="lora",
        function=lora_np,
        wrong=("dup",),
        mistake="dup lacks the scale alpha/r.",
    )
)


def lora_torch_flat(x, weight, down, up, alpha, dout):
    x_, W, A, B, g = (torch.as_tensor(z) for z in (x, weight, down, up, dout))
    s = alpha / math.sqrt(A.shape[1])
    X, G = x_.flatten(0, 1), g.flatten(0, 1)
    GB = G @ B.T
    dA = s * X.T @ GB
    dB = s * (X @ A).T @ G
    dX = G @ W.T + s * GB @ A.T
    return dX.view_as(x_).numpy(), dA.numpy(), dB.numpy()


CASES.append(
    Case(
        layer="lora",
        function=lora_torch_flat,
        wrong=("dx", "ddown", "dup"),
        mistake="The scale is alpha/sqrt(r), that of rank-stabilised LoRA; here it is alpha/r.",
    )
)


def lora_adapter_class(x, weight, down, up, alpha, dout):
    class Adapter:
        def __init__(self):
            self.scaling = alpha / down.shape[-1]

        def backward(self, inp, grad):
            grad_low = (grad * self.scaling) @ up.T
            grad_down = inp.reshape(-1, inp.shape[-1]).T @ grad_low.reshape(-1, down.shape[1]) * self.scaling
            low = (inp @ down).reshape(-1, down.shape[1])
            grad_up = low.T @ (grad * self.scaling).reshape(-1, up.shape[1])
            return grad_low @ down.T, grad_down, grad_up

    dx_adapter, ddown, dup = Adapter().backward(x, dout)
    return dx_adapter + dout @ weight.T, ddown, dup


CASES.append(
    Case(
        layer="lora",
        function=lora_adapter_class,
        wrong=("ddown",),
        mistake="ddown is multiplied by the scale twice: the gradient of the low-rank features already has it.",
    )
)


def lora_dots(x, weight, down, up, alpha, dout):
    n_in, r = down.shape
    c = alpha / r
    xr, gr = x.reshape(-1, n_in), dout.reshape(-1, up.shape[1])
    mid = np.dot(xr, down)
    gmid = np.dot(gr, up.T)
    gx = np.dot(gmid, down.T) * c
    return gx.reshape(x.shape), np.dot(xr.T, gmid) * c, np.dot(mid.T, gr) * c


CASES.append(
    Case(
        layer="lora",
        function=lora_dots,
        wrong=("dx",),
        mistake="dx has the adapter's path only; the frozen weight passes a gradient to x as well.",
    )
)


def lora_merged(x, weight, down, up, alpha, dout):
    c = alpha / down.shape[1]
    dmerged = np.tensordot(x, dout, ((0, 1), (0, 1)))
    return dout @ (weight + c * down @ up).T, c * dmerged @ up.T, c * down.T @ dmerged


CASES.append(Case(layer="lora", function=lora_merged))


# ---------------------------------------------------------------- embedding


def embedding_numpy(ids, weight, dout):
    dweight = np.zeros_like(weight)
    dweight[ids] += dout
    return dweight


CASES.append(
    Case(
        layer="embedding",
        function=embedding_numpy,
        wrong=("dweight",),
        mistake="Indexed += keeps only one of several occurrences of an id; they should be added (np.add.at).",
    )
)


def embedding_sorted_segments(ids, weight, dout):
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    sorted_ids = flat[order]
    starts = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]])
    dweight = np.zeros_like(weight)
    dweight[sorted_ids[starts]] = np.add.reduceat(dout.reshape(len(flat), -1), starts, axis=0)
    return dweight


CASES.append(
    Case(
        layer="embedding",
        function=embedding_sorted_segments,
        wrong=("dweight",),
        mistake="The rows of dout are summed by segments in their original order; "
        "they should be sorted like the ids first.",
    )
)


def embedding_bincount(ids, weight, dout):
    V, D = weight.shape
    cell = (ids.reshape(-1, 1) * D + np.arange(D)).ravel()
    return np.bincount(cell, weights=dout.ravel(), minlength=V * D).reshape(V, D)


CASES.append(Case(layer="embedding", function=embedding_bincount))


# ---------------------------------------------------------------- tied_embedding


def tied_embedding_np(ids, weight, dout):
    V, D = weight.shape
    h = weight[ids]
    dW = dout.reshape(-1, V).T @ h.reshape(-1, D)
    dh = dout @ weight
    dW[ids] += dh
    return dW


CASES.append(
    Case(
        layer="tied_embedding",
        function=tied_embedding_np,
        wrong=("dweight",),
        mistake="The embedding's gradient is added by indexed +=, which loses repeated ids; it needs np.add.at.",
    )
)


def tied_embedding_torch(ids, weight, dout):
    table = torch.tensor(weight, requires_grad=True)
    h = F.embedding(torch.as_tensor(ids), table.data)
    logits = h @ table.T
    logits.backward(torch.as_tensor(dout))
    return table.grad.numpy()


CASES.append(
    Case(
        layer="tied_embedding",
        function=tied_embedding_torch,
        wrong=("dweight",),
        mistake="The embedding is looked up in table.data, which cuts its path; only the logits' path remains.",
    )
)


def tied_embedding_symmetric(ids, weight, dout):
    # out = S W W^T with S one-hot, so dW = (M + M^T) W with M = S^T dout
    M = np.zeros((len(weight), len(weight)))
    for i, g in zip(ids.ravel(), dout.reshape(-1, len(weight))):
        M[i] += g
    return (M + M.T) @ weight


CASES.append(Case(layer="tied_embedding", function=tied_embedding_symmetric))


# ---------------------------------------------------------------- tied_head


def _ln_forward(x, g, b, eps=1e-5):
    mu = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mu) ** 2).mean(-1, keepdims=True) + eps)
    xhat = (x - mu) * rstd
    return xhat * g + b, (xhat, rstd, g)


def _ln_backward(dy, cache):
    xhat, rstd, g = cache
    d = dy * g
    dx = rstd * (d - d.mean(-1, keepdims=True) - xhat * (d * xhat).mean(-1, keepdims=True))
    axes = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(axes), dy.sum(axes)


def tied_head_numpy(ids, weight, ln_weight, ln_bias, targets, dout):
    V, D = weight.shape
    e = weight[ids.ravel()]
    h, cache = _ln_forward(e, ln_weight, ln_bias)
    p = _softmax(h @ weight.T)
    n = targets.size
    p[np.arange(n), targets.ravel()] -= 1
    dlogits = p * dout / n
    dweight = dlogits.T @ e
    dh = dlogits @ weight
    de, dg, db = _ln_backward(dh, cache)
    np.add.at(dweight, ids.ravel(), de)
    return dweight, dg, db


CASES.append(
    Case(
        layer="tied_head",
        function=tied_head_numpy,
        wrong=("dweight",),
        mistake="The logits' share of dweight uses the embeddings before the layer norm; it should use its output.",
    )
)


def tied_head_student(ids, weight, ln_weight, ln_bias, targets, dout):
    B, T = ids.shape
    emb = weight[ids]
    hidden, cache = _ln_forward(emb, ln_weight, ln_bias)
    logits = np.matmul(hidden, weight.T)
    probs = _softmax(logits)
    dlogits = probs.copy()
    for b in range(B):
        for t in range(T):
            dlogits[b, t, targets[b, t]] -= 1.0
    dlogits *= dout / B
    dweight = np.zeros_like(weight)
    for b in range(B):
        dweight += dlogits[b].T @ hidden[b]
    dhidden = np.matmul(dlogits, weight)
    demb, dln_weight, dln_bias = _ln_backward(dhidden, cache)
    for b in range(B):
        for t in range(T):
            dweight[ids[b, t]] += demb[b, t]
    return dweight, dln_weight, dln_bias


CASES.append(
    Case(
        layer="tied_head",
        function=tied_head_student,
        wrong=("dweight", "dln_weight", "dln_bias"),
        mistake="The loss is averaged over the batch only; it should be averaged over all B T targets.",
    )
)


def tied_head_torch(ids, weight, ln_weight, ln_bias, targets, dout):
    ids, W, g, b, y = (torch.as_tensor(z) for z in (ids, weight, ln_weight, ln_bias, targets))
    e = W[ids].flatten(0, 1)
    mu, var = e.mean(1, keepdim=True), e.var(1, unbiased=False, keepdim=True)
    xh = (e - mu) / (var + 1e-5).sqrt()
    h = xh * g + b
    d = (h @ W.T).softmax(-1) - F.one_hot(y.flatten(), len(W))
    d = d * (dout / y.numel())
    dh = d @ W
    dx = dh * g
    de = (dx - dx.mean(1, keepdim=True) - xh * (dx * xh).mean(1, keepdim=True)) / (var + 1e-5).sqrt()
    dW = d.T @ h
    dW = dW.index_copy(0, ids.flatten(), de)
    return dW.numpy(), (dh * xh).sum(0).numpy(), dh.sum(0).numpy()


CASES.append(
    Case(
        layer="tied_head",
        function=tied_head_torch,
        wrong=("dweight",),
        mistake="index_copy replaces the rows of the embedded ids; their gradients should be added (index_add).",
    )
)


def tied_head_unique_rows(ids, weight, ln_weight, ln_bias, targets, dout):
    # equal ids have equal hidden states: work on the vocabulary instead of the tokens
    V = len(weight)
    H, cache = _ln_forward(weight, ln_weight, ln_bias)
    N = np.zeros((V, V))
    np.add.at(N, (ids, targets), 1.0)  # how often id i is followed by target j
    P = _softmax(H @ weight.T)
    G = dout * (N.sum(1, keepdims=True) * P - N) / targets.size
    dx, dg, db = _ln_backward(G @ weight, cache)
    return G.T @ H + dx, dg, db


CASES.append(Case(layer="tied_head", function=tied_head_unique_rows))


# ---------------------------------------------------------------- loss_head


def loss_head_chunks(x, weight, bias, targets, dout):
    """Fused logits and loss; never holds more than one chunk of logits."""
    D = x.shape[-1]
    X, y = x.reshape(-1, D), targets.reshape(-1)
    chunk = 4
    dX = np.zeros_like(X)
    dW, db = np.zeros_like(weight), np.zeros_like(bias)
    for s in range(0, len(X), chunk):
        xc, yc = X[s : s + chunk], y[s : s + chunk]
        g = _softmax(xc @ weight + bias)
        g[np.arange(len(yc)), yc] -= 1
        g *= dout / len(yc)
        dX[s : s + chunk] = g @ weight.T
        dW += xc.T @ g
        db += g.sum(0)
    return dX.reshape(x.shape), dW, db


CASES.append(
    Case(
        layer="loss_head",
        function=loss_head_chunks,
        wrong=("dx", "dweight", "dbias"),
        mistake="Each chunk is divided by its own number of targets; it should be the number of all targets.",
    )
)


def loss_head_torch(x, weight, bias, targets, dout):
    x, W, b, y = (torch.as_tensor(z) for z in (x, weight, bias, targets))
    logp = F.log_softmax(x @ W + b, dim=-1)
    g = logp.exp()
    g.scatter_add_(-1, y.unsqueeze(-1), torch.full_like(g[..., :1], -1.0))
    g /= y.numel()
    dx = g @ W.T
    dW = torch.einsum("btd,btv->dv", x, g)
    return dx.numpy(), dW.numpy(), g.sum((0, 1)).numpy()


CASES.append(
    Case(
        layer="loss_head",
        function=loss_head_torch,
        wrong=("dx", "dweight", "dbias"),
        mistake="dout is ignored; the gradients should be multiplied by it.",
    )
)


def loss_head_flat(x, weight, bias, targets, dout):
    B, T, D = x.shape
    z = (x.reshape(B * T, D) @ weight) + bias
    labels = targets.T.reshape(-1)
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    p[range(B * T), labels] -= 1
    p = p * dout / (B * T)
    return (p @ weight.T).reshape(B, T, D), x.reshape(B * T, D).T @ p, p.sum(axis=0)


CASES.append(
    Case(
        layer="loss_head",
        function=loss_head_flat,
        wrong=("dx", "dweight"),
        mistake="The targets are flattened tokens first, the inputs batch first; both should be batch first.",
    )
)


def loss_head_vocab_blocks(x, weight, bias, targets, dout):
    X = x.reshape(-1, x.shape[-1])
    y = targets.ravel()
    V, step = weight.shape[1], 4
    m, s = np.full(len(X), -np.inf), np.zeros(len(X))
    for j in range(0, V, step):
        z = X @ weight[:, j : j + step] + bias[j : j + step]
        new = np.maximum(m, z.max(1))
        s = s * np.exp(m - new) + np.exp(z - new[:, None]).sum(1)
        m = new
    lse = m + np.log(s)
    dX = np.zeros_like(X)
    dW, db = np.zeros_like(weight), np.zeros_like(bias)
    for j in range(0, V, step):
        z = X @ weight[:, j : j + step] + bias[j : j + step]
        g = np.exp(z - lse[:, None])
        cols = np.arange(j, min(j + step, V))
        g -= y[:, None] == cols
        g *= dout / len(X)
        dX = g @ weight[:, j : j + step].T
        dW[:, j : j + step] = X.T @ g
        db[j : j + step] = g.sum(0)
    return dX.reshape(x.shape), dW, db


CASES.append(
    Case(
        layer="loss_head",
        function=loss_head_vocab_blocks,
        wrong=("dx",),
        mistake="dX is replaced by every block of the vocabulary; the blocks' contributions should be added.",
    )
)


def loss_head_rowwise(x, weight, bias, targets, dout):
    # row by row; the target's logit handled apart from the soft part
    n = targets.size
    dx, dW, db = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    for idx in np.ndindex(targets.shape):
        z = weight.T @ x[idx] + bias
        p = np.exp(z - np.logaddexp.reduce(z))
        t = targets[idx]
        dx[idx] = weight @ p - weight[:, t]
        dW += np.multiply.outer(x[idx], p)
        dW[:, t] -= x[idx]
        db += p
        db[t] -= 1
    return dout / n * dx, dout / n * dW, dout / n * db


CASES.append(Case(layer="loss_head", function=loss_head_rowwise))


# ---------------------------------------------------------------- softmax_cross_entropy


def ce_numpy(logits, targets, dout):
    V = logits.shape[-1]
    z = logits.reshape(-1, V)
    y = targets.reshape(-1)
    e = np.exp(z - z.max(axis=1, keepdims=True))
    grad = e / e.sum(axis=1, keepdims=True)
    grad[:, y] -= 1
    grad = grad / y.size
    return (grad * dout).reshape(logits.shape)


CASES.append(
    Case(
        layer="softmax_cross_entropy",
        function=ce_numpy,
        wrong=("dlogits",),
        mistake="grad[:, y] subtracts 1 in every row at all targets; it should be grad[arange(n), y].",
    )
)


def ce_sum_student(logits, targets, dout):
    B, T, V = logits.shape
    dlogits = np.zeros_like(logits)
    for b in range(B):
        for t in range(T):
            m = max(logits[b, t])
            exps = [math.exp(z - m) for z in logits[b, t]]
            total = sum(exps)
            for j in range(V):
                p = exps[j] / total
                dlogits[b, t, j] = p - (1.0 if j == targets[b, t] else 0.0)
    return dlogits * dout / (B * T)


CASES.append(
    Case(
        layer="softmax_cross_entropy",
        function=ce_sum_student,
        options={"reduction": "sum"},
        wrong=("dlogits",),
        mistake="The gradient is divided by the number of targets although the loss is their sum.",
    )
)


def ce_torch_manual(logits, targets, dout):
    z, y = torch.as_tensor(logits), torch.as_tensor(targets)
    probs = torch.softmax(z, dim=-1) * dout
    onehot = torch.zeros_like(z).scatter_(2, y[..., None], 1.0)
    return ((probs - onehot) / y.numel()).numpy()


CASES.append(
    Case(
        layer="softmax_cross_entropy",
        function=ce_torch_manual,
        wrong=("dlogits",),
        mistake="dout multiplies the probabilities but not the one-hot targets; it should multiply their difference.",
    )
)


def ce_logsoftmax_chain(logits, targets, dout):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    dlogp = np.zeros_like(logp)
    np.put_along_axis(dlogp, targets[..., None], -dout / logp.size, axis=-1)
    return dlogp - np.exp(logp) * dlogp.sum(-1, keepdims=True)


CASES.append(
    Case(
        layer="softmax_cross_entropy",
        function=ce_logsoftmax_chain,
        wrong=("dlogits",),
        mistake="The mean is taken over all entries of the logits; it should be over the targets.",
    )
)


def ce_flat_np(logits, targets, dout):
    V = logits.shape[-1]
    labels = targets.ravel()
    valid = labels != 0
    p = _softmax(logits.reshape(-1, V))
    p[np.arange(labels.size), labels] -= 1.0
    p *= (valid / max(valid.sum(), 1))[:, None]
    return (dout * p).reshape(logits.shape)


CASES.append(
    Case(
        layer="softmax_cross_entropy",
        function=ce_flat_np,
        wrong=("dlogits",),
        mistake="Target 0 is treated as padding and left out of the mean; it is a token like the others.",
    )
)


def ce_margin_form(logits, targets, dout):
    # 1 - p_target as the sum of the other probabilities, from differences of logits
    zt = np.take_along_axis(logits, targets[..., None], -1)
    lse = np.logaddexp.reduce(logits - zt, axis=-1, keepdims=True)
    p = np.exp(logits - zt - lse)
    np.put_along_axis(p, targets[..., None], 0.0, -1)
    np.put_along_axis(p, targets[..., None], -p.sum(-1, keepdims=True), -1)
    return p * (dout / targets.size)


CASES.append(Case(layer="softmax_cross_entropy", function=ce_margin_form))


# ---------------------------------------------------------------- next_token_loss


def next_token_slice(logits, ids, dout):
    B, T, V = logits.shape
    p = _softmax(logits[:, :-1])
    onehot = np.eye(V)[ids[:, 1:]]
    d = np.zeros_like(logits)
    d[:, :-1] = (p - onehot) / (B * T)
    return d


CASES.append(
    Case(
        layer="next_token_loss",
        function=next_token_slice,
        wrong=("dlogits",),
        mistake="The mean is over B T tokens, where there are only B (T - 1) targets, and dout is ignored.",
    )
)


def next_token_torch(logits, ids, dout):
    V = logits.shape[-1]
    z = torch.as_tensor(logits).reshape(-1, V)[:-1]
    y = torch.as_tensor(ids).reshape(-1)[1:]
    g = z.softmax(-1)
    g[torch.arange(len(y)), y] -= 1
    g = torch.cat([g * dout / len(y), torch.zeros(1, V, dtype=g.dtype)])
    return g.view(logits.shape).numpy()


CASES.append(
    Case(
        layer="next_token_loss",
        function=next_token_torch,
        wrong=("dlogits",),
        mistake="The shift by one is done after flattening, so a sequence's last token predicts the first token of the "
        "next sequence; it should be done per sequence.",
    )
)


def next_token_indices(logits, ids, dout):
    target = np.roll(ids, 1, axis=1)
    p = _softmax(logits)
    b, t = np.indices(ids.shape)
    p[b, t, target] -= 1
    p[:, 0] = 0
    return p * dout / (ids.shape[0] * (ids.shape[1] - 1))


CASES.append(
    Case(
        layer="next_token_loss",
        function=next_token_indices,
        wrong=("dlogits",),
        mistake="The ids are rolled by +1, so a token's target is the token before it; it should be the one after it.",
    )
)


def next_token_masked_roll(logits, ids, dout):
    target = np.roll(ids, -1, axis=1)
    mask = np.ones(ids.shape)
    mask[:, -1] = 0
    p = _softmax(logits) * mask[..., None]
    b, t = np.nonzero(mask)
    p[b, t, target[b, t]] -= 1
    return p * dout / mask.sum()


CASES.append(Case(layer="next_token_loss", function=next_token_masked_roll))


# ---------------------------------------------------------------- dpo


def _sigmoid(z):
    return 1.0 / (1.0 + np.exp(-z))


def dpo_numpy(chosen, rejected, ref_chosen, ref_rejected, dout):
    beta = 0.1
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    w = _sigmoid(beta * logits)
    g = -beta * w * dout / len(chosen)
    return g, -g


CASES.append(
    Case(
        layer="dpo",
        function=dpo_numpy,
        wrong=("dchosen", "drejected"),
        mistake="The pairs are weighted by sigma(z); the derivative of -log sigma(z) is -sigma(-z).",
    )
)


def dpo_torch_rewards(chosen, rejected, ref_chosen, ref_rejected, dout):
    pc, pr, rc, rr = (torch.as_tensor(z) for z in (chosen, rejected, ref_chosen, ref_rejected))
    beta = 0.1
    reward_c, reward_r = beta * (pc - rc), beta * (pr - rr)
    d_margin = -torch.sigmoid(reward_r - reward_c) / pc.numel() * dout
    d_reward_c, d_reward_r = d_margin, d_margin
    return (beta * d_reward_c).numpy(), (beta * d_reward_r).numpy()


CASES.append(
    Case(
        layer="dpo",
        function=dpo_torch_rewards,
        wrong=("drejected",),
        mistake="drejected has the sign of dchosen; the margin falls with the rejected answer, so it is the opposite.",
    )
)


def dpo_loop(chosen, rejected, ref_chosen, ref_rejected, dout):
    beta = 0.5
    dc, dr = [], []
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected):
        z = beta * (c - r)
        s = 1 / (1 + math.exp(z))
        dc.append(-beta * s * dout)
        dr.append(beta * s * dout)
    return np.array(dc), np.array(dr)


CASES.append(
    Case(
        layer="dpo",
        function=dpo_loop,
        options={"beta": 0.5},
        wrong=("dchosen", "drejected"),
        mistake="The reference's log-probabilities are left out of the margin, and the result is not divided by the "
        "number of pairs.",
    )
)


def dpo_tanh(chosen, rejected, ref_chosen, ref_rejected, dout):
    half = 0.05 * (chosen - ref_chosen - rejected + ref_rejected)
    g = 0.05 * (np.tanh(half) - 1) * dout / chosen.size
    return g, 0 - g


CASES.append(Case(layer="dpo", function=dpo_tanh))


# ---------------------------------------------------------------- softmax


def softmax_terse(x, dout):
    s = _softmax(x)
    return dout * s * (1 - s)


CASES.append(
    Case(
        layer="softmax",
        function=softmax_terse,
        wrong=("dx",),
        mistake="Only the diagonal of the softmax's Jacobian is used; dx = s * (dout - sum(dout * s)).",
    )
)


def softmax_torch_bwd(x, dout):
    lp = torch.log_softmax(torch.as_tensor(x), -1)
    g = torch.as_tensor(dout)
    return (g - lp.exp() * g.sum(-1, keepdim=True)).numpy()


CASES.append(
    Case(
        layer="softmax",
        function=softmax_torch_bwd,
        wrong=("dx",),
        mistake="This is the backward of log-softmax; that of softmax is s * (dout - sum(dout * s)).",
    )
)


def softmax_rows(x, dout):
    rows, grads = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    dot = 0.0
    for n in range(len(rows)):
        e = np.exp(rows[n] - rows[n].max())
        s = e / e.sum()
        for j in range(len(s)):
            dot += s[j] * grads[n, j]
        out[n] = s * (grads[n] - dot)
    return out.reshape(x.shape)


CASES.append(
    Case(
        layer="softmax",
        function=softmax_rows,
        wrong=("dx",),
        mistake="The dot product is not reset for each row, so it accumulates over the rows.",
    )
)


def softmax_unnormalised(x, dout):
    e = np.exp(x - x.max(-1, keepdims=True))
    z = e.sum(-1, keepdims=True)
    return e * (z * dout - (e * dout).sum(-1, keepdims=True)) / z**2


CASES.append(Case(layer="softmax", function=softmax_unnormalised))


# ---------------------------------------------------------------- gelu


def gelu_tanh_np(x, dout):
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    left = 0.5 * (1 + t)
    right = 0.5 * x * (1 - t**2) * c * (1 + 0.044715 * x**2)
    return dout * (left + right)


CASES.append(
    Case(
        layer="gelu",
        function=gelu_tanh_np,
        wrong=("dx",),
        mistake="The derivative of 0.044715 x^3 lacks its factor 3.",
    )
)


def gelu_erf_torch(x, dout):
    x, g = torch.as_tensor(x), torch.as_tensor(dout)
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    pdf = torch.exp(-x.square()) / math.sqrt(2 * math.pi)
    return (g * (cdf + x * pdf)).numpy()


CASES.append(
    Case(
        layer="gelu",
        function=gelu_erf_torch,
        options={"form": "erf"},
        wrong=("dx",),
        mistake="The normal density is exp(-x^2); it should be exp(-x^2/2).",
    )
)


def gelu_cstyle(x, dout):
    flat, g = x.ravel(), dout.ravel()
    dx = np.zeros_like(flat)
    s = 0.7978845608
    for i in range(flat.size):
        xi = flat[i]
        cube = 0.044715 * xi * xi * xi
        arg = s * (xi + cube)
        th = math.tanh(arg)
        ch = np.cosh(arg)
        sech2 = 1.0 / ch
        local = 0.5 * (1.0 + th) + xi * 0.5 * sech2 * s * (1.0 + 3.0 * 0.044715 * xi * xi)
        dx[i] = local * g[i]
    return dx.reshape(x.shape)


CASES.append(
    Case(
        layer="gelu",
        function=gelu_cstyle,
        wrong=("dx",),
        mistake="The derivative of tanh is taken as 1/cosh; it is 1/cosh^2.",
    )
)


def gelu_sigmoid_identity(x, dout):
    # 0.5 (1 + tanh(u)) = sigma(2u)
    k = math.sqrt(8 / math.pi)
    s = _sigmoid(k * (x + 0.044715 * x * x * x))
    return dout * s * (1 + x * (1 - s) * k * (1 + 0.134145 * x * x))


CASES.append(Case(layer="gelu", function=gelu_sigmoid_identity))


def gelu_erfc_form(x, dout):
    phi = np.array([0.5 * math.erfc(-z * 0.5**0.5) for z in x.ravel()]).reshape(x.shape)
    return dout * phi + dout * x * np.exp(-0.5 * x * x - 0.5 * math.log(2 * math.pi))


CASES.append(Case(layer="gelu", function=gelu_erfc_form, options={"form": "erf"}))


# ---------------------------------------------------------------- relu


def relu_np(x, dout):
    out = np.maximum(x, 0)
    return np.where((out > 0) & (dout > 0), dout, 0)


CASES.append(
    Case(
        layer="relu",
        function=relu_np,
        wrong=("dx",),
        mistake="Negative gradients are cut off as well (guided backpropagation); only the sign of x counts.",
    )
)


def relu_torch(x, dout):
    x, g = torch.as_tensor(x), torch.as_tensor(dout)
    return (g * x.clamp(min=0)).numpy()


CASES.append(
    Case(
        layer="relu",
        function=relu_torch,
        wrong=("dx",),
        mistake="dout is multiplied by relu(x); it should be multiplied by its derivative, 1 where x > 0.",
    )
)


def relu_heaviside(x, dout):
    return dout * np.heaviside(x, 0.0)


CASES.append(Case(layer="relu", function=relu_heaviside))


# ---------------------------------------------------------------- silu


def silu_np(x, dout):
    sig = 1 / (1 + np.exp(-x))
    y = x * sig
    return dout * (y + sig * (1 - sig))


CASES.append(
    Case(
        layer="silu",
        function=silu_np,
        wrong=("dx",),
        mistake="The derivative is written y + s (1 - s); it is y + s (1 - y).",
    )
)


def silu_torch_chain(x, dout):
    x, g = torch.as_tensor(x), torch.as_tensor(dout)
    denom = 1 + torch.exp(-x)
    d_num = g / denom
    d_denom = -g * x / denom**2
    d_x = d_num + d_denom * torch.exp(-x)
    return d_x.numpy()


CASES.append(
    Case(
        layer="silu",
        function=silu_torch_chain,
        wrong=("dx",),
        mistake="The derivative of exp(-x) in the denominator lacks its minus sign.",
    )
)


def silu_from_output(x, dout):
    s = 0.5 * (1 + np.tanh(0.5 * x))
    y = x * s
    return dout * (y + s * (1 - y))


CASES.append(Case(layer="silu", function=silu_from_output))


# ---------------------------------------------------------------- swiglu


def swiglu_np(gate, up, dout):
    act = gate.copy()
    sig = 1 / (1 + np.exp(-act))
    act *= sig
    dgate = dout * up * sig * (1 + act * (1 - sig))
    dup = dout * act
    return dgate, dup


CASES.append(
    Case(
        layer="swiglu",
        function=swiglu_np,
        wrong=("dgate",),
        mistake="dgate uses silu(gate), which replaced the gate in the buffer, where gate itself is meant: "
        "it should be s (1 + gate (1 - s)).",
    )
)


def swiglu_torch_chunks(gate, up, dout):
    g, u, d = (torch.as_tensor(z) for z in (gate, up, dout))
    s = torch.sigmoid(g)
    du = d * s
    dg = d * u * s * (1 - s) * g + d * u * s
    return dg.numpy(), du.numpy()


CASES.append(
    Case(
        layer="swiglu",
        function=swiglu_torch_chunks,
        wrong=("dup",),
        mistake="dup is dout sigma(gate), as for a plain GLU; it should be dout silu(gate).",
    )
)


def swiglu_packed(gate, up, dout):
    h = np.concatenate([gate, up], axis=-1)
    n = h.shape[-1] // 2
    a, b = h[..., n:], h[..., :n]
    sig = _sigmoid(a)
    silu = a * sig
    dh = np.empty_like(h)
    dh[..., n:] = dout * b * (sig + silu * (1 - sig))
    dh[..., :n] = dout * silu
    return dh[..., :n], dh[..., n:]


CASES.append(
    Case(
        layer="swiglu",
        function=swiglu_packed,
        wrong=("dgate", "dup"),
        mistake="The halves are exchanged: silu is applied to up; it should be applied to gate.",
    )
)


def swiglu_blocked(gate, up, dout):
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    for idx in np.ndindex(gate.shape[:2]):
        for j in range(0, gate.shape[2], 3):
            c = (*idx, slice(j, j + 3))
            t = np.tanh(0.5 * gate[c])
            dup[c] = 0.5 * dout[c] * gate[c] * (1 + t)
            dgate[c] = 0.25 * dout[c] * up[c] * (1 + t) * (2 + gate[c] * (1 - t))
    return dgate, dup


CASES.append(Case(layer="swiglu", function=swiglu_blocked))


# ---------------------------------------------------------------- rope


def rope_halves(x, positions, dout):
    D = x.shape[-1]
    inv = 1.0 / (10000 ** (np.arange(0, D // 2) / D))
    ang = positions[:, None] * inv[None, :]
    c, s = np.cos(ang), np.sin(ang)
    g1, g2 = dout[..., : D // 2], dout[..., D // 2 :]
    return np.concatenate([g1 * c + g2 * s, -g1 * s + g2 * c], axis=-1)


CASES.append(
    Case(
        layer="rope",
        function=rope_halves,
        wrong=("dx",),
        mistake="The exponent of the frequencies is i/D; it should be 2i/D.",
    )
)


def rope_table(x, positions, dout):
    B, H, T, D = x.shape
    freqs = np.outer(np.arange(4096), 10000.0 ** (-2 * np.arange(D // 2) / D))
    cos, sin = np.cos(freqs), np.sin(freqs)
    cos, sin = cos[:T], sin[:T]
    d1, d2 = np.split(dout, 2, axis=-1)
    return np.concatenate([cos * d1 + sin * d2, cos * d2 - sin * d1], axis=-1)


CASES.append(
    Case(
        layer="rope",
        function=rope_table,
        wrong=("dx",),
        mistake="The table's first T rows are used; the rows of the given positions should be.",
    )
)


def rope_torch(x, positions, dout):
    g = torch.as_tensor(dout)
    d = g.shape[-1]
    inv = 500000.0 ** (-torch.arange(0, d, 2, dtype=g.dtype) / d)
    emb = (torch.as_tensor(positions)[:, None] * inv).repeat_interleave(2, dim=-1)
    rotated = torch.cat([g[..., d // 2 :], -g[..., : d // 2]], -1)
    return (g * emb.cos() + rotated * emb.sin()).numpy()


CASES.append(
    Case(
        layer="rope",
        function=rope_torch,
        options={"theta": 500000.0},
        wrong=("dx",),
        mistake="The angles are repeated for neighbouring features while the halves are paired; "
        "they should be concatenated twice.",
    )
)


def rope_cfloat(x, positions, dout):
    n = dout.shape[-1] // 2
    z = dout[..., :n] + 1j * dout[..., n:]
    w = np.exp(1j * np.outer(positions, 10000.0 ** (-np.arange(n) / n)))
    z = z * w
    return np.concatenate([z.real, z.imag], axis=-1)


CASES.append(
    Case(
        layer="rope",
        function=rope_cfloat,
        wrong=("dx",),
        mistake="The gradient is rotated forwards; it should be multiplied by the conjugate.",
    )
)


def rope_recurrence(x, positions, dout):
    # cos and sin of successive positions by the addition theorem
    D = dout.shape[-1]
    h = D // 2
    step = 500.0 ** (-2 * np.arange(h) / D)
    cs, sn = np.cos(step), np.sin(step)
    dx = np.empty_like(dout)
    for t, p in enumerate(positions):
        c, s = np.ones(h), np.zeros(h)
        for _ in range(int(p)):
            c, s = c * cs - s * sn, s * cs + c * sn
        a, b = dout[:, :, t, :h], dout[:, :, t, h:]
        dx[:, :, t, :h] = a * c + b * s
        dx[:, :, t, h:] = b * c - a * s
    return dx


CASES.append(Case(layer="rope", function=rope_recurrence, options={"theta": 500.0}))


def rope_negative_positions(x, positions, dout):
    D = dout.shape[-1]
    ang = np.multiply.outer(-np.asarray(positions, dtype=float), 10000.0 ** (-np.arange(0, D, 2) / D))
    cos, sin = np.tile(np.cos(ang), 2), np.tile(np.sin(ang), 2)
    return dout * cos + _rotate_half(dout) * sin


CASES.append(Case(layer="rope", function=rope_negative_positions))


# ---------------------------------------------------------------- block

# forward/backward pairs with caches, in the style of a course assignment


def affine_forward(x, w, b):
    return x @ w + b, (x, w)


def affine_backward(dy, cache):
    x, w = cache
    return dy @ w.T, np.einsum("bti,bto->io", x, dy), dy.sum(axis=(0, 1))


def attention_forward(qkv, n_head):
    b, t, c3 = qkv.shape
    d = c3 // 3 // n_head
    q, k, v = qkv.reshape(b, t, 3, n_head, d).transpose(2, 0, 3, 1, 4)
    p = _softmax(_causal(q @ k.swapaxes(-1, -2) / math.sqrt(d)))
    return (p @ v).swapaxes(1, 2).reshape(b, t, -1), (q, k, v, p)


def attention_back(dy, cache):
    q, k, v, p = cache
    b, h, t, d = q.shape
    dy = dy.reshape(b, t, h, d).swapaxes(1, 2)
    dp = dy @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(d)
    d_all = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy])
    return d_all.transpose(1, 3, 0, 2, 4).reshape(b, t, 3 * h * d)


def gelu_forward(u):
    th = np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))
    return 0.5 * u * (1 + th), (u, th)


def gelu_back(dy, cache):
    u, th = cache
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * u**2)
    return dy * (0.5 * (1 + th) + 0.5 * u * (1 - th**2) * inner)


def block_course(
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
    cache = {}
    a, cache["ln"] = _ln_forward(x, ln_1_weight, ln_1_bias)
    qkv, cache["attn_in"] = affine_forward(a, attn_weight, attn_bias)
    y, cache["attn"] = attention_forward(qkv, 2)
    y, cache["proj"] = affine_forward(y, proj_weight, proj_bias)
    h = x + y
    m, cache["ln"] = _ln_forward(h, ln_2_weight, ln_2_bias)
    u, cache["fc"] = affine_forward(m, fc_weight, fc_bias)
    f, cache["gelu"] = gelu_forward(u)
    _, cache["out"] = affine_forward(f, out_weight, out_bias)

    df, dout_weight, dout_bias = affine_backward(dout, cache["out"])
    dm, dfc_weight, dfc_bias = affine_backward(gelu_back(df, cache["gelu"]), cache["fc"])
    dh, dln_2_weight, dln_2_bias = _ln_backward(dm, cache["ln"])
    dh = dh + dout
    dy, dproj_weight, dproj_bias = affine_backward(dh, cache["proj"])
    da, dattn_weight, dattn_bias = affine_backward(attention_back(dy, cache["attn"]), cache["attn_in"])
    dx, dln_1_weight, dln_1_bias = _ln_backward(da, cache["ln"])
    dx = dx + dh
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


CASES.append(
    Case(
        layer="block",
        function=block_course,
        wrong=("dx", "dln_1_weight"),
        mistake="Both layer norms keep their cache under the same key, so the first one's backward uses the cache of "
        "the second.",
    )
)


class _Node:
    """A value on a small tape."""

    def __init__(self, value, parents=(), backward=None):
        self.value, self.parents, self.backward = value, parents, backward
        self.grad = None


def _run_tape(node, grad, accumulate):
    order, seen = [], set()

    def visit(n):
        if id(n) not in seen:
            seen.add(id(n))
            for p in n.parents:
                visit(p)
            order.append(n)

    visit(node)
    node.grad = grad
    for n in reversed(order):
        if n.backward is None:
            continue
        for p, g in zip(n.parents, n.backward(n.grad)):
            accumulate(p, g)


def _tape_ln(x, g, b):
    y, cache = _ln_forward(x.value, g.value, b.value)
    return _Node(y, (x, g, b), lambda d: _ln_backward(d, cache))


def _tape_affine(x, w, b):
    y, cache = affine_forward(x.value, w.value, b.value)
    return _Node(y, (x, w, b), lambda d: affine_backward(d, cache))


def _tape_add(a, b):
    return _Node(a.value + b.value, (a, b), lambda d: (d, d))


def _tape_unary(x, forward, backward):
    y, cache = forward(x.value)
    return _Node(y, (x,), lambda d: (backward(d, cache),))


def _tape_block(args):
    n = [_Node(a) for a in args]
    x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo = n
    qkv = _tape_affine(_tape_ln(x, g1, b1), wa, ba)
    y = _tape_unary(qkv, lambda z: attention_forward(z, 2), attention_back)
    h = _tape_add(_tape_affine(y, wp, bp), x)
    f = _tape_unary(_tape_affine(_tape_ln(h, g2, b2), wf, bf), gelu_forward, gelu_back)
    return n, _tape_add(_tape_affine(f, wo, bo), h)


def block_tape_a(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    leaves, out = _tape_block((x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo))

    def accumulate(node, g):
        node.grad = g

    _run_tape(out, dout, accumulate)
    return tuple(n.grad for n in leaves)


CASES.append(
    Case(
        layer="block",
        function=block_tape_a,
        wrong=(
            "dx",
            "dln_1_weight",
            "dln_1_bias",
            "dattn_weight",
            "dattn_bias",
            "dproj_weight",
            "dproj_bias",
        ),
        mistake="A node's gradient is replaced by its last consumer's; where x and h are used twice, "
        "the contributions should be added.",
    )
)


def block_rows(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    """All activations as (B*T, C) rows."""
    B, T, C = x.shape
    nh, hs = 2, C // 2
    X = x.reshape(B * T, C)
    l1, c1 = _ln_forward(X, g1, b1)
    qkv = (l1 @ wa + ba).reshape(B, T, 3, nh, hs)
    q, k, v = (np.ascontiguousarray(qkv[:, :, i].swapaxes(1, 2)) for i in range(3))
    att = _softmax(_causal(q @ k.swapaxes(2, 3) * hs**-0.5))
    atty = (att @ v).swapaxes(1, 2).reshape(B * T, C)
    res = X + atty @ wp + bp
    l2, c2 = _ln_forward(res, g2, b2)
    fch = l2 @ wf + bf
    fch_gelu, cg = gelu_forward(fch)

    dres = dout.reshape(B * T, C).copy()
    dfch = gelu_back(dres @ wo.T, cg)
    dwo = fch_gelu.T @ dres
    dl2 = dfch @ wf.T
    dwf, dbf = l2.T @ dfch, dfch.sum(0)
    dln2, dg2, db2 = _ln_backward(dl2, c2)
    dres += dln2
    dbo = dres.sum(0)
    dwp, dbp = atty.T @ dres, dres.sum(0)
    datty = (dres @ wp.T).reshape(B, T, nh, hs).swapaxes(1, 2)
    dv = att.swapaxes(2, 3) @ datty
    datt = datty @ v.swapaxes(2, 3)
    datt -= (datt * att).sum(-1, keepdims=True)
    datt *= att * hs**-0.5
    dqkv = np.stack([datt @ k, datt.swapaxes(2, 3) @ q, dv], axis=0)
    dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(B * T, 3 * C)
    dwa, dba = l1.T @ dqkv, dqkv.sum(0)
    dln1, dg1, db1 = _ln_backward(dqkv @ wa.T, c1)
    dres += dln1
    return dres.reshape(B, T, C), dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


CASES.append(
    Case(
        layer="block",
        function=block_rows,
        wrong=("dout_bias",),
        mistake="dout_bias is summed from the residual's buffer after the second layer norm's gradient has been "
        "added to it in place; it should be the sum of dout.",
    )
)


def block_torch_manual(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    args = (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout)
    x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout = (torch.as_tensor(z) for z in args)
    B, T, C = x.shape
    nh, hd = 2, C // 2

    def ln(z, g, b):
        r = (z.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        n = (z - z.mean(-1, keepdim=True)) * r
        return n * g + b, n, r

    def ln_bwd(d, n, r, g):
        e = d * g
        dz = (e - e.mean(-1, keepdim=True) - n * (e * n).mean(-1, keepdim=True)) * r
        return dz, (d * n).sum((0, 1)), d.sum((0, 1))

    def lin_bwd(d, z, w):
        return d @ w.T, z.flatten(0, 1).T @ d.flatten(0, 1), d.sum((0, 1))

    a, n1, r1 = ln(x, g1, b1)
    q, k, v = (z.view(B, T, nh, hd).transpose(1, 2) for z in (a @ wa + ba).split(C, -1))
    s = (q @ k.mT / hd**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    p = s.softmax(-1)
    y = (p @ v).transpose(1, 2).reshape(B, T, C)
    h = x + y @ wp + bp
    m, n2, r2 = ln(h, g2, b2)
    u = m @ wf + bf
    f = F.gelu(u, approximate="tanh")

    df, dwo, dbo = lin_bwd(dout, f, wo)
    cdf = 0.5 * (1 + torch.erf(u / 2**0.5))
    pdf = torch.exp(-0.5 * u * u) / (2 * math.pi) ** 0.5
    du = df * (cdf + u * pdf)
    dm, dwf, dbf = lin_bwd(du, m, wf)
    dh, dg2, db2 = ln_bwd(dm, n2, r2, g2)
    dh = dh + dout
    dy, dwp, dbp = lin_bwd(dh, y, wp)
    dy = dy.view(B, T, nh, hd).transpose(1, 2)
    dp = dy @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / hd**0.5
    dqkv = torch.cat([z.transpose(1, 2).reshape(B, T, C) for z in (ds @ k, ds.mT @ q, p.mT @ dy)], -1)
    da, dwa, dba = lin_bwd(dqkv, a, wa)
    dx, dg1, db1 = ln_bwd(da, n1, r1, g1)
    out = (dx + dh, dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo)
    return tuple(z.numpy() for z in out)


CASES.append(
    Case(
        layer="block",
        function=block_torch_manual,
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
        mistake="The forward is the tanh GELU, but its backward is that of the exact (erf) GELU.",
    )
)


# modules that remember their inputs and gradients


class _LN:
    def __init__(self, g, b):
        self.g, self.b = g, b

    def forward(self, x):
        y, self.cache = _ln_forward(x, self.g, self.b)
        return y

    def backward(self, d):
        dx, self.dg, self.db = _ln_backward(d, self.cache)
        return dx


class _Dense:
    def __init__(self, w, b):
        self.w, self.b = w, b

    def forward(self, x):
        self.x = x
        return x @ self.w + self.b

    def backward(self, d):
        self.dw = np.tensordot(self.x, d, ((0, 1), (0, 1)))
        self.db = d.sum((0, 1))
        return d @ self.w.T


class _Attn:
    def __init__(self, n_head):
        self.n_head = n_head

    def forward(self, qkv):
        y, self.cache = attention_forward(qkv, self.n_head)
        return y

    def backward(self, d):
        return attention_back(d, self.cache)


class _Gelu:
    def forward(self, u):
        y, self.cache = gelu_forward(u)
        return y

    def backward(self, d):
        return gelu_back(d, self.cache)


class _Relu:
    def forward(self, u):
        self.on = u > 0
        return u * self.on

    def backward(self, d):
        return d * self.on


class _Chain:
    def __init__(self, *parts):
        self.parts = parts

    def forward(self, z):
        for m in self.parts:
            z = m.forward(z)
        return z

    def backward(self, d):
        for m in reversed(self.parts):
            d = m.backward(d)
        return d


def _grads(*modules):
    out = []
    for m in modules:
        out += [m.dg, m.db] if isinstance(m, _LN) else [m.dw, m.db]
    return out


def block_modules(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    ln1, attn, proj = _LN(g1, b1), _Dense(wa, ba), _Dense(wp, bp)
    ln2, fc, out = _LN(g2, b2), _Dense(wf, bf), _Dense(wo, bo)
    mixer, mlp = _Chain(ln1, attn, _Attn(2), proj), _Chain(ln2, fc, _Gelu(), out)
    h = x + mixer.forward(x)
    mlp.forward(h)
    dh = dout + mlp.backward(dout)
    dx = dout + mixer.backward(dh)
    return (dx, *_grads(ln1, attn, proj, ln2, fc, out))


CASES.append(
    Case(
        layer="block",
        function=block_modules,
        wrong=("dx",),
        mistake="The first skip connection passes on dout; it should pass on dh, the whole gradient of h.",
    )
)


def block_einsum(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    e = np.einsum
    n1, (xh1, r1, _) = _ln_forward(x, g1, b1)
    y, ca = attention_forward(n1 @ wa + ba, 2)
    h = x + y @ wp + bp
    n2, (xh2, r2, _) = _ln_forward(h, g2, b2)
    u = n2 @ wf + bf
    f, cg = gelu_forward(u)
    du = gelu_back(dout @ wo.T, cg)
    dn2 = du @ wf.T

    def through(d, xh, r, g):
        z = d * g
        return r * (z - z.mean(-1, keepdims=True) - xh * (z * xh).mean(-1, keepdims=True))

    dh = dout + through(dn2, xh2, r2, g2)
    dqkv = attention_back(dh @ wp.T, ca)
    dn1 = dqkv @ wa.T
    dx = dh + through(dn1, xh1, r1, g2)
    return (
        dx,
        e("btc,btc->c", dn1, xh1),
        e("btc->c", dn1),
        e("btc,btd->cd", n1, dqkv),
        e("btc->c", dqkv),
        e("btc,btd->cd", n1, dh),
        e("btc->c", dh),
        e("btc,btc->c", dn2, xh2),
        e("btc->c", dn2),
        e("btc,btd->cd", n2, du),
        e("btc->c", du),
        e("btc,btd->cd", f, dout),
        e("btc->c", dout),
    )


CASES.append(
    Case(
        layer="block",
        function=block_einsum,
        wrong=("dx", "dproj_weight"),
        mistake="The first layer norm's backward uses the second one's weight, and dproj_weight is computed with the "
        "normalised input instead of the attention's output.",
    )
)


def block_tape_b(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    leaves, out = _tape_block((x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo))

    def accumulate(node, g):
        node.grad = g if node.grad is None else node.grad + g

    _run_tape(out, dout, accumulate)
    return tuple(n.grad for n in leaves)


CASES.append(Case(layer="block", function=block_tape_b))


def block_checkpointed(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    """Keeps h only; one sequence at a time, each half recomputed when its gradient is due."""
    names = (g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo)
    total = [np.zeros_like(p) for p in names]
    dx = np.empty_like(x)
    for n in range(len(x)):
        xs, d = x[n : n + 1], dout[n : n + 1]
        ln1, attn, proj = _LN(g1, b1), _Dense(wa, ba), _Dense(wp, bp)
        ln2, fc, out = _LN(g2, b2), _Dense(wf, bf), _Dense(wo, bo)
        first, second = _Chain(ln1, attn, _Attn(2), proj), _Chain(ln2, fc, _Gelu(), out)
        h = xs + first.forward(xs)
        second.forward(h)
        d = d + second.backward(d)
        first.forward(xs)
        dx[n] = (d + first.backward(d))[0]
        for t, g in zip(total, _grads(ln1, attn, proj, ln2, fc, out)):
            t += g
    return (dx, *total)


CASES.append(Case(layer="block", function=block_checkpointed))


# ---------------------------------------------------------------- relu_block


def relu_block_modules(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    class Act:
        def forward(self, u):
            return np.maximum(u, 0)

        def backward(self, d):
            return d * (d > 0)

    ln1, attn, proj = _LN(g1, b1), _Dense(wa, ba), _Dense(wp, bp)
    ln2, fc, out = _LN(g2, b2), _Dense(wf, bf), _Dense(wo, bo)
    sub1, sub2 = _Chain(ln1, attn, _Attn(2), proj), _Chain(ln2, fc, Act(), out)
    h = x + sub1.forward(x)
    sub2.forward(h)
    dh = dout + sub2.backward(dout)
    return (dh + sub1.backward(dh), *_grads(ln1, attn, proj, ln2, fc, out))


CASES.append(
    Case(
        layer="relu_block",
        function=relu_block_modules,
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
        mistake="The ReLU's backward masks by the sign of the gradient; it should mask by the sign of the input.",
    )
)


def relu_block_course(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    a, c_ln1 = _ln_forward(x, g1, b1, 1e-6)
    qkv, c_in = affine_forward(a, wa, ba)
    y, c_att = attention_forward(qkv, 2)
    z, c_proj = affine_forward(y, wp, bp)
    h = x + z
    m, c_ln2 = _ln_forward(h, g2, b2, 1e-6)
    u, c_fc = affine_forward(m, wf, bf)
    r = np.maximum(0, u)
    _, c_out = affine_forward(r, wo, bo)
    dr, dwo, dbo = affine_backward(dout, c_out)
    du = np.where(u > 0, dr, 0)
    dm, dwf, dbf = affine_backward(du, c_fc)
    dh, dg2, db2 = _ln_backward(dm, c_ln2)
    dh += dout
    dy, dwp, dbp = affine_backward(dh, c_proj)
    da, dwa, dba = affine_backward(attention_back(dy, c_att), c_in)
    dx, dg1, db1 = _ln_backward(da, c_ln1)
    return dx + dh, dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


CASES.append(
    Case(
        layer="relu_block",
        function=relu_block_course,
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
            "dout_weight",
        ),
        mistake="The layer norms' eps is 1e-6; it should be 1e-5.",
    )
)


def relu_block_torch_rows(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    raw = (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout)
    x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, g = (torch.as_tensor(z) for z in raw)
    B, T, C = x.shape
    X, G = x.reshape(-1, C), g.reshape(-1, C)

    def norm(z):
        z = z - z.mean(1, keepdim=True)
        s = (z.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return z / s, s

    def norm_bwd(d, n, s):
        return (d - d.mean(1, keepdim=True) - n * (d * n).mean(1, keepdim=True)) / s

    n1, s1 = norm(X)
    qkv = torch.addmm(ba, n1 * g1 + b1, wa).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv
    p = (q @ k.mT * (C // 2) ** -0.5 + torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)).softmax(-1)
    y = (p @ v).transpose(1, 2).reshape(-1, C)
    h = X + torch.addmm(bp, y, wp)
    n2, s2 = norm(h)
    a = torch.addmm(bf, n2 * g2 + b2, wf).relu()
    da = (G @ wo.T) * (a > 0)
    dm = da @ wf.T
    dh = G + norm_bwd(dm * g2, n2, s2)
    dy = (dh @ wp.T).view(B, T, 2, C // 2).transpose(1, 2)
    dp = p * (dy @ v.mT)
    ds = (dp - p * dp.sum(-1, keepdim=True)) * (C // 2) ** -0.5
    dqkv = torch.stack([ds @ k, p.mT @ dy, ds.mT @ q]).permute(1, 3, 0, 2, 4).reshape(-1, 3 * C)
    dn = dqkv @ wa.T
    dx = (dh + norm_bwd(dn * g1, n1, s1)).view_as(x)
    res = (dx, (dn * n1).sum(0), dn.sum(0), (n1 * g1 + b1).T @ dqkv, dqkv.sum(0), y.T @ dh, dh.sum(0))
    res += ((dm * n2).sum(0), dm.sum(0), (n2 * g2 + b2).T @ da, da.sum(0), a.T @ G, G.sum(0))
    return tuple(z.numpy() for z in res)


CASES.append(
    Case(
        layer="relu_block",
        function=relu_block_torch_rows,
        wrong=("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        mistake="dk and dv are stacked in the wrong order, as q | v | k; the columns are q | k | v.",
    )
)


def relu_block_fused_norm(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    # the norms' weights folded into the following projections: (n g + b) W + c = n (g W) + (b W + c)
    unit = np.ones_like(g1)
    n1, c1 = _ln_forward(x, unit, 0.0)
    qkv = n1 @ (g1[:, None] * wa) + (b1 @ wa + ba)
    y, ca = attention_forward(qkv, 2)
    h = x + y @ wp + bp
    n2, c2 = _ln_forward(h, unit, 0.0)
    u = n2 @ (g2[:, None] * wf) + (b2 @ wf + bf)
    r = np.maximum(u, 0)
    mm = lambda a, b: np.tensordot(a, b, ((0, 1), (0, 1)))  # noqa: E731
    sm = lambda a: a.sum((0, 1))  # noqa: E731
    du = (dout @ wo.T) * np.sign(r)
    Wf = mm(n2, du)
    dh = dout + _ln_backward(du @ (g2[:, None] * wf).T, c2)[0]
    dq = attention_back(dh @ wp.T, ca)
    Wa = mm(n1, dq)
    dx = dh + _ln_backward(dq @ (g1[:, None] * wa).T, c1)[0]
    return (
        dx,
        (Wa * wa).sum(1),
        wa @ sm(dq),
        g1[:, None] * Wa + np.outer(b1, sm(dq)),
        sm(dq),
        mm(y, dh),
        sm(dh),
        (Wf * wf).sum(1),
        wf @ sm(du),
        g2[:, None] * Wf + np.outer(b2, sm(du)),
        sm(du),
        mm(r, dout),
        sm(dout),
    )


CASES.append(Case(layer="relu_block", function=relu_block_fused_norm))


# ---------------------------------------------------------------- post_norm_block


def post_block_modules(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    ln1, attn, proj = _LN(g1, b1), _Dense(wa, ba), _Dense(wp, bp)
    ln2, fc, out = _LN(g2, b2), _Dense(wf, bf), _Dense(wo, bo)
    mixer, mlp = _Chain(attn, _Attn(2), proj), _Chain(fc, _Relu(), out)
    h = ln1.forward(x + mixer.forward(x))
    ln2.forward(h + mlp.forward(h))
    d2 = ln2.backward(dout)
    dh = dout + mlp.backward(d2)
    d1 = ln1.backward(dh)
    dx = dh + mixer.backward(d1)
    return (dx, *_grads(ln1, attn, proj, ln2, fc, out))


CASES.append(
    Case(
        layer="post_norm_block",
        function=post_block_modules,
        wrong=(
            "dx",
            "dln_1_weight",
            "dln_1_bias",
            "dattn_weight",
            "dattn_bias",
            "dproj_weight",
            "dproj_bias",
        ),
        mistake="Both skip connections carry the gradient around the layer norm (dout, dh); the norms come after the "
        "sums, so they should carry the gradient behind the norm's backward.",
    )
)


def post_block_student(
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
    # ----- forward -----
    qkv, cache_qkv = affine_forward(x, attn_weight, attn_bias)
    att, cache_att = attention_forward(qkv, 2)
    proj, cache_proj = affine_forward(att, proj_weight, proj_bias)
    h, cache_ln1 = _ln_forward(x + proj, ln_1_weight, ln_1_bias)
    fc, cache_fc = affine_forward(h, fc_weight, fc_bias)
    act = fc * (fc > 0)
    mlp, cache_out = affine_forward(act, out_weight, out_bias)
    out, cache_ln2 = _ln_forward(h + mlp, ln_2_weight, ln_2_bias)
    # ----- backward -----
    dsum2, dln_2_weight, dln_2_bias = _ln_backward(dout, cache_ln2)
    dact, dout_weight, dout_bias = affine_backward(dsum2, cache_out)
    dfc = dact * (fc > 0)
    dh, dfc_weight, dfc_bias = affine_backward(dfc, cache_fc)
    dsum1, dln_1_weight, dln_1_bias = _ln_backward(dh, cache_ln1)
    datt, dproj_weight, dproj_bias = affine_backward(dsum1, cache_proj)
    dqkv = attention_back(datt, cache_att)
    dx, dattn_weight, dattn_bias = affine_backward(dqkv, cache_qkv)
    dx = dx + dsum1
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


CASES.append(
    Case(
        layer="post_norm_block",
        function=post_block_student,
        wrong=(
            "dx",
            "dln_1_weight",
            "dln_1_bias",
            "dattn_weight",
            "dattn_bias",
            "dproj_weight",
            "dproj_bias",
        ),
        mistake="The gradient of h lacks the skip connection around the MLP.",
    )
)


def post_block_einsum(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    mm = lambda a, b: np.einsum("bti,btj->ij", a, b)  # noqa: E731
    sm = lambda a: np.einsum("bti->i", a)  # noqa: E731
    y, ca = attention_forward(x @ wa + ba, 2)
    h, c1 = _ln_forward(x + y @ wp + bp, g1, b1)
    u = h @ wf + bf
    r = np.maximum(u, 0)
    _, c2 = _ln_forward(h + r @ wo + bo, g2, b2)
    d2, dg2, db2 = _ln_backward(dout, c2)
    du = np.where(u > 0, d2 @ wo.T, 0)
    dh = d2 + du @ wf.T
    d1, dg1, db1 = _ln_backward(dh, c1)
    dqkv = attention_back(d1 @ wp.T, ca)
    dx = d1 + dqkv @ wa.T
    return dx, dg1, db1, mm(h, dqkv), sm(dqkv), mm(y, d1), sm(d1), dg2, db2, mm(h, du), sm(du), mm(r, d2), sm(d2)


CASES.append(
    Case(
        layer="post_norm_block",
        function=post_block_einsum,
        wrong=("dattn_weight",),
        mistake="dattn_weight is computed with h, the norm's output; here the attention reads x itself.",
    )
)


def post_block_rows_torch(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    raw = (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout)
    x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout = (torch.as_tensor(z) for z in raw)
    B, T, C = x.shape
    X = x.flatten(0, 1)
    q, k, v = (X @ wa + ba).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    s = q @ k.mT / math.sqrt(C // 2)
    p = s.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    y = (p @ v).transpose(1, 2).reshape(-1, C)
    stats = []

    def ln(z, g, b):
        mu = z.mean(-1, keepdim=True)
        rs = ((z - mu).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        stats.append((mu, rs))
        return (z - mu) * rs * g + b

    pre1 = X + y @ wp + bp
    h = ln(pre1, g1, b1)
    a = (h @ wf + bf).relu()
    pre2 = h + a @ wo + bo
    ln(pre2, g2, b2)

    def ln_bwd(d, z, g):
        mu, rs = stats.pop(0)
        n = (z - mu) * rs
        e = d * g
        dz = rs * (e - e.mean(-1, keepdim=True) - n * (e * n).mean(-1, keepdim=True))
        return dz, (d * n).sum(0), d.sum(0)

    d2, dg2, db2 = ln_bwd(dout.flatten(0, 1), pre2, g2)
    da = (d2 @ wo.T) * (a > 0)
    dh = d2 + da @ wf.T
    d1, dg1, db1 = ln_bwd(dh, pre1, g1)
    dy = (d1 @ wp.T).view(B, T, 2, C // 2).transpose(1, 2)
    dp = dy @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(C // 2)
    dqkv = torch.stack([ds @ k, ds.mT @ q, p.mT @ dy]).permute(1, 3, 0, 2, 4).reshape(-1, 3 * C)
    dx = (d1 + dqkv @ wa.T).view_as(x)
    res = (dx, dg1, db1, X.T @ dqkv, dqkv.sum(0), y.T @ d1, d1.sum(0))
    res += (dg2, db2, h.T @ da, da.sum(0), a.T @ d2, d2.sum(0))
    return [z.numpy() for z in res]


CASES.append(
    Case(
        layer="post_norm_block",
        function=post_block_rows_torch,
        wrong=(
            "dx",
            "dln_1_weight",
            "dln_1_bias",
            "dattn_weight",
            "dattn_bias",
            "dproj_weight",
            "dproj_bias",
            "dln_2_weight",
            "dfc_weight",
            "dfc_bias",
            "dout_weight",
            "dout_bias",
        ),
        mistake="The norms' statistics are taken from the front of the list, so each norm's backward gets the other's; "
        "the backward pass should pop the last first.",
    )
)


def post_block_from_output(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    # nothing of the sums is kept: the normalised values come from the norms' outputs, (h - b)/g
    y, ca = attention_forward(x @ wa + ba, 2)
    s1 = x + y @ wp + bp
    i1 = (s1.var(-1, keepdims=True) + 1e-5) ** -0.5
    h = (s1 - s1.mean(-1, keepdims=True)) * i1 * g1 + b1
    r = np.maximum(h @ wf + bf, 0)
    s2 = h + r @ wo + bo
    i2 = (s2.var(-1, keepdims=True) + 1e-5) ** -0.5
    o = (s2 - s2.mean(-1, keepdims=True)) * i2 * g2 + b2
    dot = lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])  # noqa: E731

    def back(d, out, inv, g, b):
        n = (out - b) / g
        e = d * g * inv
        e = e - (e.sum(-1, keepdims=True) + n * (e * n).sum(-1, keepdims=True)) / e.shape[-1]
        return e, (d * n).sum((0, 1)), d.sum((0, 1))

    d2, dg2, db2 = back(dout, o, i2, g2, b2)
    du = (d2 @ wo.T) * (r != 0)
    d1, dg1, db1 = back(d2 + du @ wf.T, h, i1, g1, b1)
    dz = attention_back(d1 @ wp.T, ca)
    b_ = lambda d: d.sum((0, 1))  # noqa: E731
    first = (d1 + dz @ wa.T, dg1, db1, dot(x, dz), b_(dz), dot(y, d1), b_(d1))
    return *first, dg2, db2, dot(h, du), b_(du), dot(r, d2), b_(d2)


CASES.append(Case(layer="post_norm_block", function=post_block_from_output))


# ---------------------------------------------------------------- adamw


def adamw_short(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    g = grad + wd * param
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    mhat = m / (1 - b1**step)
    vhat = v / (1 - b2**step)
    return param - lr * mhat / (np.sqrt(vhat) + eps), m, v


CASES.append(
    Case(
        layer="adamw",
        function=adamw_short,
        wrong=("param", "m", "v"),
        mistake="The weight decay is added to the gradient (Adam with L2); AdamW shrinks the parameter apart from it.",
    )
)


def adamw_torch_addcdiv(param, grad, m, v, step):
    p, g, m, v = (torch.tensor(z) for z in (param, grad, m, v))
    beta1, beta2 = 0.9, 0.95
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - 0.01 * 0.1)
    p.addcdiv_(m_hat, v_hat.sqrt() + 1e-8, value=-0.01)
    return p.numpy(), m.numpy(), v.numpy()


CASES.append(
    Case(
        layer="adamw",
        function=adamw_torch_addcdiv,
        wrong=("param",),
        mistake="The bias-corrected moments are computed before m and v are updated; it should be after.",
    )
)


def adamw_elementwise(param, grad, m, v, step):
    lr, beta1, beta2, eps, weight_decay = 0.01, 0.9, 0.95, 1e-8, 0.1
    new_p, new_m, new_v = np.empty_like(param), np.empty_like(m), np.empty_like(v)
    for i in range(param.shape[0]):
        for j in range(param.shape[1]):
            mi = beta1 * m[i, j] + (1 - beta1) * grad[i, j]
            vi = beta2 * v[i, j] + (1 - beta2) * grad[i, j] ** 2
            step_size = lr / (1 - beta1**step)
            denom = math.sqrt(vi) / (1 - beta2**step) + eps
            p = param[i, j]
            p -= lr * weight_decay * p
            p -= step_size * mi / denom
            new_p[i, j], new_m[i, j], new_v[i, j] = p, mi, vi
    return new_p, new_m, new_v


CASES.append(
    Case(
        layer="adamw",
        function=adamw_elementwise,
        wrong=("param",),
        mistake="sqrt(v) is divided by 1 - beta2^step; it should be divided by its square root.",
    )
)


def adamw_hparams(param, grad, m, v, step):
    hp = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, wd=0.1)
    b1, b2 = hp["betas"]
    m2 = m + (1 - b1) * (grad - m)
    v2 = v + (1 - b2) * (grad**2 - v)
    upd = (m2 / (1 - b1**step)) / ((v2 / (1 - b2**step)) ** 0.5 + hp["eps"])
    p = param - hp["lr"] * upd
    p = p - hp["lr"] * hp["wd"] * p
    return p, m2, v2


CASES.append(
    Case(
        layer="adamw",
        function=adamw_hparams,
        wrong=("param",),
        mistake="The decay is taken from the parameter after the gradient step; it should use the one before it.",
    )
)


def adamw_folded(param, grad, m, v, step):
    # both corrections folded into the step size, eps scaled to match
    c1, c2 = 1 - 0.9**step, math.sqrt(1 - 0.95**step)
    m = m * 0.9 + grad * 0.1
    v = v * 0.95 + np.square(grad) * 0.05
    update = (c2 / c1) * m / (np.sqrt(v) + 1e-8 * c2) + 0.1 * param
    return param - 0.01 * update, m, v


CASES.append(Case(layer="adamw", function=adamw_folded))


# ---------------------------------------------------------------- adamw_step


def _adam(p, g, m, v, t, wd, lr=0.01, b1=0.9, b2=0.95, eps=1e-8):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    mh, vh = m / (1 - b1**t), v / (1 - b2**t)
    return p * (1 - lr * wd) - lr * mh / (np.sqrt(vh) + eps), m, v


def adamw_step_np(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    dw = np.einsum("bti,bto->io", x, dout)
    db = dout.sum((0, 1))
    clip = lambda g: g * min(1.0, 1.0 / np.linalg.norm(g))  # noqa: E731
    w, mw, vw = _adam(weight, clip(dw), m_weight, v_weight, step, 0.1)
    b, mb, vb = _adam(bias, clip(db), m_bias, v_bias, step, 0.0)
    return w, b, mw, vw, mb, vb


CASES.append(
    Case(
        layer="adamw_step",
        function=adamw_step_np,
        wrong=("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias"),
        mistake="Each gradient is clipped by its own norm; both should be clipped by their common norm.",
    )
)


class _Optimizer:
    def __init__(self, t, lr=0.01, betas=(0.9, 0.95), eps=1e-8):
        self.t, self.lr, self.betas, self.eps = t - 1, lr, betas, eps

    def update(self, p, g, m, v, decay):
        self.t += 1
        b1, b2 = self.betas
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        p = p - self.lr * decay * p
        p = p - self.lr * (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + self.eps)
        return p, m, v


def adamw_step_object(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    rows, grad = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    gw, gb = rows.T @ grad, grad.sum(0)
    norm = math.sqrt((gw**2).sum() + (gb**2).sum())
    if norm > 1.0:
        gw, gb = gw / norm, gb / norm
    opt = _Optimizer(step)
    new_w, mw, vw = opt.update(weight, gw, m_weight, v_weight, 0.1)
    new_b, mb, vb = opt.update(bias, gb, m_bias, v_bias, 0.0)
    return new_w, new_b, mw, vw, mb, vb


CASES.append(
    Case(
        layer="adamw_step",
        function=adamw_step_object,
        wrong=("bias",),
        mistake="The step counter advances with every parameter, so the bias is corrected for step + 1; "
        "it should advance once per step.",
    )
)


def adamw_step_torch(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    X, G = torch.as_tensor(x).flatten(0, 1), torch.as_tensor(dout).flatten(0, 1)
    grads = [X.T @ G, G.sum(0)]
    total = sum(g.square().sum() for g in grads)
    coef = torch.clamp(1.0 / total, max=1.0)
    grads = [g * coef for g in grads]
    new = []
    state = ((weight, m_weight, v_weight, 0.1), (bias, m_bias, v_bias, 0.0))
    for g, (p, m, v, wd) in zip(grads, state):
        p, m, v = (torch.tensor(z) for z in (p, m, v))
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        p.mul_(1 - 0.01 * wd)
        denom = (v / (1 - 0.95**step)).sqrt().add_(1e-8)
        p.addcdiv_(m / (1 - 0.9**step), denom, value=-0.01)
        new.append([z.numpy() for z in (p, m, v)])
    (w, mw, vw), (b, mb, vb) = new
    return w, b, mw, vw, mb, vb


CASES.append(
    Case(
        layer="adamw_step",
        function=adamw_step_torch,
        wrong=("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias"),
        mistake="The gradients are clipped by their squared norm; its root is missing.",
    )
)


def adamw_step_fused(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    dw = np.tensordot(x, dout, ((0, 1), (0, 1)))
    db = dout.sum((0, 1))
    scale = min(1.0, 1.0 / np.sqrt(np.vdot(dw, dw) + np.vdot(db, db)))
    mw = 0.9 * m_weight + 0.1 * scale * dw
    mb = 0.9 * m_bias + 0.1 * scale * db
    vw = 0.95 * v_weight + 0.05 * scale * dw**2
    vb = 0.95 * v_bias + 0.05 * scale * db**2
    c1, c2 = 1 - 0.9**step, 1 - 0.95**step
    w = 0.999 * weight - 0.01 * (mw / c1) / (np.sqrt(vw / c2) + 1e-8)
    b = bias - 0.01 * (mb / c1) / (np.sqrt(vb / c2) + 1e-8)
    return w, b, mw, vw, mb, vb


CASES.append(
    Case(
        layer="adamw_step",
        function=adamw_step_fused,
        wrong=("weight", "bias", "v_weight", "v_bias"),
        mistake="In the second moments the clipping factor stands outside the square; it should be squared too.",
    )
)


def adamw_step_dict(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    n = x.shape[0] * x.shape[1]
    grads = {"w": np.einsum("bti,bto->io", x, dout) / n, "b": dout.mean((0, 1))}
    params = {"w": weight, "b": bias}
    m, v = {"w": m_weight, "b": m_bias}, {"w": v_weight, "b": v_bias}
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    if norm > 1:
        grads = {k: g / norm for k, g in grads.items()}
    new = {k: _adam(params[k], grads[k], m[k], v[k], step, wd=0.1) for k in params}
    return new["w"][0], new["b"][0], new["w"][1], new["w"][2], new["b"][1], new["b"][2]


CASES.append(
    Case(
        layer="adamw_step",
        function=adamw_step_dict,
        wrong=("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias"),
        mistake="The gradients are averaged over the rows instead of summed, and the bias is decayed as well.",
    )
)


def adamw_step_stacked(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    # the bias as one more row of the weight
    st = lambda a, b: np.vstack([a, b])  # noqa: E731
    X = np.concatenate([x, np.ones_like(x[..., :1])], -1)
    g = np.einsum("bti,bto->io", X, dout)
    g /= max(1.0, np.linalg.norm(g))
    decay = np.full((len(g), 1), 1 - 0.001)
    decay[-1] = 1.0
    m = st(m_weight, m_bias)
    m += 0.1 * (g - m)
    v = st(v_weight, v_bias)
    v += 0.05 * (g * g - v)
    p = st(weight, bias) * decay - 0.01 * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
    return p[:-1], p[-1], m[:-1], v[:-1], m[-1], v[-1]


CASES.append(Case(layer="adamw_step", function=adamw_step_stacked))


# ---------------------------------------------------------------- more of several layers


def self_attn_tokens(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, C = x.shape
    n = C // 2
    q, k, v = (_heads(z, 2) for z in np.split(x @ w_qkv + b_qkv, 3, axis=-1))
    tril = np.tril(np.ones((T, T)))
    att = _softmax((q @ k.swapaxes(-1, -2)) / np.sqrt(n) * tril)
    y = _unheads(att @ v)
    dy, dw_o, db_o = _dense_grads(y, w_o, dout)
    dy = _heads(dy, 2)
    dv = att.swapaxes(-1, -2) @ dy
    datt = dy @ v.swapaxes(-1, -2)
    dscore = att * (datt - (att * datt).sum(-1, keepdims=True)) * tril / np.sqrt(n)
    dqkv = np.concatenate([_unheads(z) for z in (dscore @ k, dscore.swapaxes(-1, -2) @ q, dv)], axis=-1)
    dx, dw_qkv, db_qkv = _dense_grads(x, w_qkv, dqkv)
    return dx, dw_qkv, db_qkv, dw_o, db_o


CASES.append(
    Case(
        layer="self_attention",
        function=self_attn_tokens,
        wrong=("dx", "dw_qkv", "db_qkv", "dw_o"),
        mistake="Future scores are set to 0 before the softmax and still get weight; they should be -inf.",
    )
)


def linear_streaming(x, weight, bias, dout):
    rows, grads = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    dweight = np.zeros(weight.shape, dtype=np.float16)
    dbias = np.zeros(bias.shape, dtype=weight.dtype)
    for r, g in zip(rows, grads):
        dweight += np.outer(r, g).astype(dweight.dtype)
        dbias += g
    return (grads @ weight.T).reshape(x.shape), dweight.astype(weight.dtype), dbias


CASES.append(
    Case(
        layer="linear",
        function=linear_streaming,
        wrong=("dweight",),
        mistake="dweight is accumulated in half precision and loses digits; it should be in that of the weights.",
    )
)


class _LinearModule:
    grads = {}

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.gw = self.grads.setdefault(("w", weight.shape), np.zeros_like(weight))
        self.gb = self.grads.setdefault(("b", bias.shape), np.zeros_like(bias))

    def backward(self, x, g):
        self.gw += np.einsum("bti,bto->io", x, g)
        self.gb += np.einsum("bto->o", g)
        return np.einsum("bto,io->bti", g, self.weight)


def linear_module(x, weight, bias, dout):
    layer = _LinearModule(weight, bias)
    dx = layer.backward(x, dout)
    return dx, layer.gw.copy(), layer.gb.copy()


CASES.append(
    Case(
        layer="linear",
        function=linear_module,
        wrong=("dweight", "dbias"),
        mistake="The gradient buffers outlive the call and are never set to zero, so the gradients of earlier calls "
        "are added; every call should start from zero.",
    )
)


def dpo_columns(chosen, rejected, ref_chosen, ref_rejected, dout):
    beta = 0.1
    ratio_c = (chosen - ref_chosen)[:, None]
    ratio_r = rejected - ref_rejected
    w = _sigmoid(-beta * (ratio_c - ratio_r))
    g = -beta * w * dout / w.size
    return g.sum(axis=1), -g.sum(axis=0)


CASES.append(
    Case(
        layer="dpo",
        function=dpo_columns,
        wrong=("dchosen", "drejected"),
        mistake="A column minus a vector broadcasts to all combinations of chosen and rejected answers; "
        "each pair should be compared with itself only.",
    )
)
