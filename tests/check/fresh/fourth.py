"""The fourth set: backward passes as different people write them."""

import math

import numpy as np
import torch
from case import Case

CASES = []


# --- relu


def relu_version_4(x, dout):
    out = np.maximum(x, 0)
    dx = np.zeros_like(out)
    mask = dout > 0
    dx[mask] = dout[mask]
    return dx


def relu_version_5(x, grad_out):
    xt, g = torch.from_numpy(x), torch.from_numpy(grad_out)
    gate = (xt > 0).to(g.dtype)
    g = g.clamp(min=0)
    return (g * gate).numpy()


def relu_version_1(x, dY):
    slope = 0.01

    def derivative(z):
        d = np.full_like(z, slope)
        d[z > 0] = 1.0
        return d

    return dY * derivative(x)


def relu_version_3(x, dout):
    # eight lanes at a time
    flat_x, flat_g = x.ravel(), dout.ravel()
    n_vec = flat_x.size // 8
    res = np.zeros_like(flat_g)
    xs = flat_x[: n_vec * 8].reshape(n_vec, 8)
    gs = flat_g[: n_vec * 8].reshape(n_vec, 8)
    res[: n_vec * 8] = np.where(xs > 0, gs, 0.0).ravel()
    return res.reshape(x.shape)


def relu_version_2(x, g):
    out = np.maximum(0, x)
    active = np.sign(out)
    return active * g


CASES += [
    Case(
        "relu",
        relu_version_4,
        {},
        ("dx",),
        "The mask is taken from the upstream gradient (dout > 0) instead of from the input x > 0.",
    ),
    Case(
        "relu",
        relu_version_5,
        {},
        ("dx",),
        "Negative upstream gradients are clamped to zero as in guided backpropagation, in addition to the mask x > 0.",
    ),
    Case("relu", relu_version_1, {}, ("dx",), "The derivative for x <= 0 is 0.01, that of a leaky ReLU, instead of 0."),
    Case(
        "relu",
        relu_version_3,
        {},
        ("dx",),
        "Only whole groups of eight flattened elements are processed: the remaining tail (size % 8 elements) keeps a zero gradient.",
    ),
    Case("relu", relu_version_2),
]


# --- silu


def silu_version_5(x, dout):
    sig = 1.0 / (1.0 + np.exp(-x))
    dsig = sig * (1.0 - sig)
    return dout * x * dsig


def silu_version_3(x, grad):
    s = 1 / (1 + np.exp(-x))
    return grad * s * (1 + x) * (1 - s)


def silu_version_6(x, dy):
    class Ctx:
        pass

    ctx = Ctx()

    def forward(inp):
        ctx.sigma = 1 / (1 + np.exp(-inp))
        ctx.y = inp * ctx.sigma
        return ctx.y

    def backward(g):
        return g * (ctx.sigma * (1 + ctx.y * (1 - ctx.sigma)))

    forward(x)
    return backward(dy)


def silu_version_1(x, dout):
    z = np.exp(-np.abs(x))
    pos = 1 / (1 + z)
    neg = 1 / (1 + z)
    s = np.where(x >= 0, pos, neg)
    return dout * (s + x * s * (1 - s))


def silu_version_2(x, dout):
    s = 0.5 * (1 + np.tanh(0.5 * x))
    y = x * s
    return dout * (y + s * (1 - y))


def silu_version_4(x, dout):
    dx = torch.empty(x.shape, dtype=torch.float64)
    for b in range(x.shape[0]):
        t = torch.from_numpy(x[b])
        s = t.sigmoid()
        dx[b] = torch.from_numpy(dout[b]) * s * (1 + t * (1 - s))
    return dx.numpy()


CASES += [
    Case(
        "silu",
        silu_version_5,
        {},
        ("dx",),
        "The product rule's first term is missing: dx is dout x s(1-s), without the term s = sigmoid(x).",
    ),
    Case(
        "silu",
        silu_version_3,
        {},
        ("dx",),
        "Misplaced parentheses: the derivative is s (1 + x)(1 - s) instead of s (1 + x (1 - s)).",
    ),
    Case(
        "silu",
        silu_version_6,
        {},
        ("dx",),
        "The saved output y = x s is used in the derivative in place of the input x: s (1 + y (1 - s)).",
    ),
    Case(
        "silu",
        silu_version_1,
        {},
        ("dx",),
        "The stable sigmoid's branch for negative x is 1/(1 + e^x) in place of e^x/(1 + e^x), so that sigmoid(|x|) is used for negative inputs.",
    ),
    Case("silu", silu_version_2),
    Case("silu", silu_version_4),
]


# --- softmax


def softmax_version_2(x, dout):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return dout * p * (1 - p)


def softmax_version_6(x, dout):
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    inner = np.sum(p * dout, axis=1, keepdims=True)
    return p * (dout - inner)


def softmax_version_1(x, g):
    m = np.max(x, axis=-1, keepdims=True)
    logp = x - m - np.log(np.exp(x - m).sum(axis=-1, keepdims=True))
    p = np.exp(logp)
    return g - p * g.sum(axis=-1, keepdims=True)


def softmax_version_3(x, dout):
    # one pass over the row for max and normalizer
    width, n = 4, x.shape[-1]
    m = np.full(x.shape[:-1], -np.inf)
    l = np.zeros(x.shape[:-1])
    for s in range(0, n, width):
        tile = x[..., s : s + width]
        m = np.maximum(m, tile.max(-1))
        l = l + np.exp(tile - m[..., None]).sum(-1)
    y = np.exp(x - m[..., None]) / l[..., None]
    acc = np.zeros(x.shape[:-1])
    for s in range(0, n, width):
        acc += (y[..., s : s + width] * dout[..., s : s + width]).sum(-1)
    return y * (dout - acc[..., None])


def softmax_version_5(x, dout):
    shape, n = x.shape, x.shape[-1]
    out = np.empty((x.size // n, n))
    for i, (row, g) in enumerate(zip(x.reshape(-1, n), dout.reshape(-1, n))):
        s = np.exp(row - row.max())
        s /= s.sum()
        jac = np.diag(s) - np.outer(s, s)
        out[i] = jac @ g
    return out.reshape(shape)


def softmax_version_4(x, dout):
    width, n = 4, x.shape[-1]
    m = np.full(x.shape[:-1] + (1,), -np.inf)
    l = np.zeros_like(m)
    for s in range(0, n, width):
        tile = x[..., s : s + width]
        m_new = np.maximum(m, tile.max(-1, keepdims=True))
        l = l * np.exp(m - m_new) + np.exp(tile - m_new).sum(-1, keepdims=True)
        m = m_new
    y = np.exp(x - m) / l
    return y * dout - y * np.einsum("btf,btf->bt", y, dout)[..., None]


CASES += [
    Case(
        "softmax",
        softmax_version_2,
        {},
        ("dx",),
        "Only the diagonal of the softmax's Jacobian is used, p (1 - p) dout elementwise; the terms between different features are missing.",
    ),
    Case(
        "softmax",
        softmax_version_6,
        {},
        ("dx",),
        "The inner product sum of p dout is taken over axis 1 (tokens) instead of the last axis.",
    ),
    Case(
        "softmax",
        softmax_version_1,
        {},
        ("dx",),
        "The backward of log-softmax, dout - p sum(dout), is used for softmax.",
    ),
    Case(
        "softmax",
        softmax_version_3,
        {},
        ("dx",),
        "In the online softmax the running denominator l is not rescaled by exp(m_old - m_new) when a later tile raises the maximum.",
    ),
    Case("softmax", softmax_version_5),
    Case("softmax", softmax_version_4),
]


# --- gelu


def gelu_version_4(x, dout):
    c = np.sqrt(2 / np.pi)
    u = c * (x + 0.044715 * x**3)
    t = np.tanh(u)
    du = c * (1 + 0.044715 * x**2)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


def gelu_version_1(x, dout):
    k = math.sqrt(2.0 / math.pi)
    inner = k * (x + 0.044715 * x * x * x)
    left = 0.5 * (1.0 + np.tanh(inner))
    sech2 = 1.0 / np.cosh(x) ** 2
    right = 0.5 * x * sech2 * k * (1.0 + 3 * 0.044715 * x * x)
    return (left + right) * dout


def gelu_version_2(x, dout):
    xt = torch.from_numpy(x)
    cdf = 0.5 * (1 + torch.erf(xt / 2**0.5))
    pdf = torch.exp(-0.5 * xt * xt) / math.sqrt(math.pi)
    return (torch.from_numpy(dout) * (cdf + xt * pdf)).numpy()


def gelu_version_3(x, g):
    z = torch.as_tensor(x)
    phi = torch.distributions.Normal(0.0, 1.0).cdf(z)
    dens = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return (torch.as_tensor(g) * (phi + z * dens)).numpy()


def gelu_version_6(x, dout):
    # x * sigmoid(2u)
    a = 2 * np.sqrt(2 / np.pi)
    s = 1 / (1 + np.exp(-a * (x + 0.044715 * x**3)))
    ds = s * (1 - s) * a * (1 + 0.134145 * x**2)
    return dout * (s + x * ds)


def gelu_version_5(x, dout):
    erf = np.vectorize(math.erf, otypes=[float])
    cdf = (1 + erf(x / math.sqrt(2))) / 2
    return dout * (cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


CASES += [
    Case(
        "gelu",
        gelu_version_4,
        {},
        ("dx",),
        "The derivative of 0.044715 x^3 is written 0.044715 x^2: the factor 3 is missing in the derivative of tanh's argument.",
    ),
    Case(
        "gelu",
        gelu_version_1,
        {},
        ("dx",),
        "sech^2 is evaluated at x instead of at tanh's argument sqrt(2/pi)(x + 0.044715 x^3).",
    ),
    Case(
        "gelu",
        gelu_version_2,
        {"form": "erf"},
        ("dx",),
        "The normal density is divided by sqrt(pi) instead of sqrt(2 pi).",
    ),
    Case(
        "gelu",
        gelu_version_3,
        {},
        ("dx",),
        "The derivative of the exact (erf) GELU is used although the layer is the tanh approximation.",
    ),
    Case("gelu", gelu_version_6),
    Case("gelu", gelu_version_5, {"form": "erf"}),
]


# --- swiglu


def swiglu_version_2(gate, up, dout):
    s = 1 / (1 + np.exp(-up))
    act = up * s
    d_gate = dout * act
    d_up = dout * gate * (s + act * (1 - s))
    return d_gate, d_up


def swiglu_version_4(gate, up, dout):
    def sigmoid(z):
        return 0.5 * (np.tanh(z / 2) + 1)

    sg = sigmoid(gate)
    dup = dout * sg
    dgate = dout * (sg * (1 + gate * (1 - sg)))
    return dgate, dup


def swiglu_version_5(gate, up, dout):
    packed = np.concatenate([gate, up], axis=-1)
    half = packed.shape[-1] // 2
    a, b = packed[..., :half], packed[..., half:]
    s = 1 / (1 + np.exp(-a))
    dpacked = np.empty_like(packed)
    dpacked[..., half:] = dout * b * s * (1 + a * (1 - s))
    dpacked[..., :half] = dout * a * s
    return dpacked[..., :half], dpacked[..., half:]


def swiglu_version_3(gate, up, dout):
    sig = 1 / (1 + np.exp(-gate))
    d_silu = dout * up
    d_up = dout * gate * sig
    d_gate = d_silu * sig * (1 - sig)
    return d_gate, d_up


def swiglu_version_1(gate, up, dout):
    dgate, dup = np.empty_like(gate), np.empty_like(up)
    for i in np.ndindex(gate.shape[:-1]):
        s = 1 / (1 + np.exp(-gate[i]))
        dup[i] = dout[i] * gate[i] * s
        dgate[i] = dout[i] * up[i] * s + dup[i] * up[i] * (1 - s)
    return dgate, dup


CASES += [
    Case(
        "swiglu",
        swiglu_version_2,
        {},
        ("dgate", "dup"),
        "The roles of gate and up are exchanged: silu is applied to up and gate multiplies.",
    ),
    Case(
        "swiglu",
        swiglu_version_4,
        {},
        ("dgate", "dup"),
        "Two mistakes: dup is dout sigmoid(gate) instead of dout silu(gate) (the factor gate is missing), and dgate is not multiplied by up.",
    ),
    Case(
        "swiglu",
        swiglu_version_5,
        {},
        ("dgate", "dup"),
        "The two halves of the packed gradient are exchanged: the gradient of gate is written to up's half and the other way round.",
    ),
    Case(
        "swiglu",
        swiglu_version_3,
        {},
        ("dgate",),
        "dgate uses sigmoid's derivative s (1 - s) (that of GLU) instead of silu's s + gate s (1 - s).",
    ),
    Case("swiglu", swiglu_version_1),
]


# --- linear


def linear_version_2(x, weight, bias, dout):
    dx = dout @ weight.T
    dweight = np.einsum("bti,bto->io", x, dout)
    dbias = dout.mean(axis=0).sum(axis=0)
    return dx, dweight, dbias


def linear_version_4(x, weight, bias, dout):
    X = torch.from_numpy(x).reshape(-1, x.shape[-1])
    G = torch.from_numpy(dout).reshape(-1, dout.shape[-1])
    grad_w = G.t().mm(X)
    grad_x = G.mm(torch.from_numpy(weight).t()).view(x.shape)
    return grad_x.numpy(), grad_w.reshape(weight.shape).numpy(), G.sum(0).numpy()


def linear_version_1(x, weight, bias, dY):
    fin, fout = weight.shape
    d2 = dY.reshape(-1, fout)
    dW = x.reshape(fin, -1) @ d2
    db = np.ones(d2.shape[0]) @ d2
    dX = (d2 @ weight.T).reshape(x.shape)
    return dX, dW, db


def linear_version_5(x, weight, bias, dout):
    rows, cols = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    BLOCK = 4
    dw, db = np.zeros_like(weight), np.zeros_like(bias)
    for blk in range(rows.shape[0] // BLOCK):
        sl = slice(blk * BLOCK, (blk + 1) * BLOCK)
        dw += rows[sl].T @ cols[sl]
        db += cols[sl].sum(0)
    return np.matmul(dout, weight.T), dw, db


def linear_version_3(x, weight, bias, dout):
    # bias as an extra row of the weight
    ones = np.ones(x.shape[:-1] + (1,))
    xa = np.concatenate([x, ones], -1).reshape(-1, x.shape[-1] + 1)
    wa = np.vstack([weight, bias])
    g = dout.reshape(-1, dout.shape[-1])
    dwa = xa.T @ g
    dxa = g @ wa.T
    return dxa[:, :-1].reshape(x.shape), dwa[:-1], dwa[-1]


CASES += [
    Case(
        "linear",
        linear_version_2,
        {},
        ("dbias",),
        "dbias is averaged over the batch (mean over axis 0) and only summed over the tokens, instead of summed over both.",
    ),
    Case(
        "linear",
        linear_version_4,
        {},
        ("dweight",),
        "The weight's gradient is computed in torch's layout (out, in) and then reshaped to (in, out) instead of transposed.",
    ),
    Case(
        "linear",
        linear_version_1,
        {},
        ("dweight",),
        "x is reshaped to (in, rows) instead of reshaped to (rows, in) and transposed before the product with dout.",
    ),
    Case(
        "linear",
        linear_version_5,
        {},
        ("dweight", "dbias"),
        "The loop over blocks of four rows runs rows // 4 times and drops the remaining rows of the last, partial block in dweight and dbias.",
    ),
    Case("linear", linear_version_3),
]


# --- lora


def lora_version_1(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    s = alpha / r
    h = x @ down
    dup = s * np.einsum("btr,bto->ro", h, dout)
    dh = dout @ up.T
    ddown = np.einsum("bti,btr->ir", x, dh)
    dx = dout @ weight.T + s * dh @ down.T
    return dx, ddown, dup


def lora_version_2(x, weight, down, up, alpha, dout):
    X, D, U, G = (torch.from_numpy(a) for a in (x, down, up, dout))
    scale = alpha / D.shape[-1]
    X2, G2 = X.flatten(0, 1), G.flatten(0, 1) * scale
    H = X2 @ D
    dU = H.T @ G2
    dH = G2 @ U.T
    dD = X2.T @ dH
    dX = (dH @ D.T).view_as(X)
    return dX.numpy(), dD.numpy(), dU.numpy()


def lora_version_4(x, weight, down, up, alpha, dout):
    rank = up.shape[0]
    scaling = alpha / math.sqrt(rank)
    merged = weight + scaling * down @ up
    dmerged = np.tensordot(x, dout, axes=([0, 1], [0, 1]))
    ddown = scaling * dmerged @ up.T
    dup = scaling * down.T @ dmerged
    return dout @ merged.T, ddown, dup


def lora_version_5(x, weight, down, up, alpha, dout):
    scale = alpha / down.shape[1]
    n = x.shape[0] * x.shape[1]
    xf, gf = x.reshape(n, -1), dout.reshape(n, -1)
    g_adapter = scale * gf
    dup = (xf @ down).T @ g_adapter
    g_hidden = (g_adapter @ up.T) * scale
    ddown = xf.T @ g_hidden
    dx = gf @ weight.T + g_hidden @ down.T
    return dx.reshape(x.shape), ddown, dup


def lora_version_3(x, weight, down, up, alpha, dout):
    s = alpha / down.shape[1]
    acc = np.zeros_like(weight)
    for xb, gb in zip(x, dout):
        acc += xb.T @ gb
    dx = dout @ (weight + s * (down @ up)).T
    return dx, s * (acc @ up.T), s * (down.T @ acc)


CASES += [
    Case("lora", lora_version_1, {}, ("ddown",), "ddown is not multiplied by the scale alpha/r."),
    Case(
        "lora",
        lora_version_2,
        {},
        ("dx",),
        "dx misses the path through the frozen weight, dout weight^T; only the adapter's path is there.",
    ),
    Case(
        "lora",
        lora_version_4,
        {},
        ("dx", "ddown", "dup"),
        "The scale is alpha/sqrt(r) (rank-stabilised LoRA) instead of alpha/r.",
    ),
    Case(
        "lora",
        lora_version_5,
        {},
        ("dx", "ddown"),
        "The scale alpha/r is applied twice on the way to down and x: the gradient at the adapter's output is already scaled and the hidden gradient is scaled again.",
    ),
    Case("lora", lora_version_3),
]


# --- embedding


def embedding_version_5(ids, weight, dout):
    dweight = np.zeros_like(weight)
    flat = ids.reshape(-1)
    dweight[flat] += dout.reshape(-1, weight.shape[1])
    return dweight


def embedding_version_2(ids, weight, dout):
    pad_id = 0
    grad = torch.zeros(weight.shape, dtype=torch.float64)
    grad.index_add_(0, torch.from_numpy(ids).flatten(), torch.from_numpy(dout).flatten(0, 1))
    grad[pad_id].zero_()
    return grad.numpy()


def embedding_version_4(ids, weight, dout):
    # sort the tokens so that each row of the table is written once
    keys = ids.ravel()
    perm = np.argsort(keys, kind="stable")
    rows = dout.reshape(-1, dout.shape[-1])
    sorted_keys = keys[perm]
    uniq, start = np.unique(sorted_keys, return_index=True)
    out = np.zeros_like(weight)
    out[uniq] = np.add.reduceat(rows, start, axis=0)
    return out


def embedding_version_3(ids, weight, dout):
    vocab = weight.shape[0]
    onehot = (ids.T.reshape(-1, 1) == np.arange(vocab)).astype(float)
    return onehot.T @ dout.reshape(-1, dout.shape[-1])


def embedding_version_1(ids, weight, dout):
    dweight = np.zeros(weight.shape)
    for token in np.unique(ids):
        dweight[token] = dout[ids == token].sum(axis=0)
    return dweight


CASES += [
    Case(
        "embedding",
        embedding_version_5,
        {},
        ("dweight",),
        "dweight[ids] += dout with fancy indexing: for a token that occurs several times only one occurrence is added.",
    ),
    Case(
        "embedding",
        embedding_version_2,
        {},
        ("dweight",),
        "The gradient of row 0 is set to zero as if token 0 were padding.",
    ),
    Case(
        "embedding",
        embedding_version_4,
        {},
        ("dweight",),
        "The ids are sorted but the rows of dout are not permuted with them before the segment sums, so that gradients go to the wrong tokens.",
    ),
    Case(
        "embedding",
        embedding_version_3,
        {},
        ("dweight",),
        "The ids are flattened from their transpose (token-major) while dout is flattened batch-major, so that rows and ids do not match.",
    ),
    Case("embedding", embedding_version_1),
]


# --- tied_embedding


def tied_embedding_version_4(ids, weight, dout):
    d_hidden = np.einsum("btv,vf->btf", dout, weight)
    dW = np.zeros_like(weight)
    np.add.at(dW, ids, d_hidden)
    return dW


def tied_embedding_version_3(ids, weight, dout):
    V = weight.shape[0]
    P = np.eye(V)[ids.ravel()]
    G = dout.reshape(-1, V)
    # out = P W W^T, quadratic in W
    return 2 * G.T @ P @ weight


def tied_embedding_version_1(ids, weight, dout):
    d = weight.shape[1]
    scale = math.sqrt(d)
    hidden = weight[ids] * scale
    dweight = np.tensordot(dout, hidden, axes=((0, 1), (0, 1)))
    dhidden = dout @ weight
    np.add.at(dweight, ids.ravel(), scale * dhidden.reshape(-1, d))
    return dweight


def tied_embedding_version_2(ids, weight, dout):
    grad = np.zeros_like(weight)
    for b in range(ids.shape[0]):
        h = weight[ids[b]]
        grad = dout[b].T @ h
    dh = dout @ weight
    grad[ids.ravel()] += dh.reshape(-1, weight.shape[1])
    return grad


def tied_embedding_version_5(ids, weight, dout):
    V = weight.shape[0]
    P = np.eye(V)[ids.ravel()]
    G = dout.reshape(-1, V)
    return P.T @ G @ weight + G.T @ P @ weight


CASES += [
    Case(
        "tied_embedding",
        tied_embedding_version_4,
        {},
        ("dweight",),
        "The output projection's contribution dout^T weight[ids] is missing; only the lookup's path is there.",
    ),
    Case(
        "tied_embedding",
        tied_embedding_version_3,
        {},
        ("dweight",),
        "Twice the output projection's contribution is used in place of the sum of the two paths, as if the form were symmetric in the two uses of the table.",
    ),
    Case(
        "tied_embedding",
        tied_embedding_version_1,
        {},
        ("dweight",),
        "The embedding is scaled by sqrt(d), in the hidden state and in the lookup's gradient, which this layer does not have.",
    ),
    Case(
        "tied_embedding",
        tied_embedding_version_2,
        {},
        ("dweight",),
        "Two mistakes: the projection's gradient is assigned instead of accumulated over the batch, so that only the last sequence counts, and the lookup's gradient is added with fancy indexing, which loses repeated ids.",
    ),
    Case("tied_embedding", tied_embedding_version_5),
]


# --- softmax_cross_entropy


def softmax_cross_entropy_version_6(logits, targets, dout=1.0):
    B, T, V = logits.shape
    z = logits - logits.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    b, t = np.indices((B, T))
    p[b, t, targets] -= 1
    return dout * p / B


def softmax_cross_entropy_version_2(logits, targets, dout=1.0):
    lt = torch.from_numpy(logits)
    onehot = torch.nn.functional.one_hot(torch.from_numpy(targets), lt.shape[-1])
    probs = torch.softmax(lt, dim=-1)
    return ((probs - onehot) / targets.size).numpy()


def softmax_cross_entropy_version_5(logits, targets, dout=1.0):
    B, T, V = logits.shape
    m = logits.max(axis=2, keepdims=True)
    g = np.exp(logits - m)
    g /= g.sum(axis=2, keepdims=True)
    g[:, np.arange(T), targets] -= 1.0
    g *= dout / (B * T)
    return g


def softmax_cross_entropy_version_1(logits, targets, dout=1.0):
    n, V = targets.size, logits.shape[-1]
    flat = logits.reshape(n, V)
    lse = np.logaddexp.reduce(flat, axis=1)
    d = np.exp(flat - lse[:, None])
    d[np.arange(n), targets.ravel()] -= 1
    return (dout / n * d).reshape(logits.shape)


def softmax_cross_entropy_version_3(logits, targets, dout=1.0):
    m = logits.max(-1, keepdims=True)
    logp = logits - m - np.log(np.exp(logits - m).sum(-1, keepdims=True))
    dlogp = np.zeros_like(logits)
    np.put_along_axis(dlogp, targets[..., None], -dout / targets.size, axis=-1)
    return dlogp - np.exp(logp) * dlogp.sum(-1, keepdims=True)


def softmax_cross_entropy_version_4(logits, targets, dout=1.0):
    p = torch.softmax(torch.from_numpy(logits), -1)
    p.scatter_add_(-1, torch.from_numpy(targets)[..., None], -torch.ones(*targets.shape, 1, dtype=p.dtype))
    return (p * dout).numpy()


CASES += [
    Case(
        "softmax_cross_entropy",
        softmax_cross_entropy_version_6,
        {},
        ("dlogits",),
        "The mean divides by the batch size only, not by batch times tokens.",
    ),
    Case(
        "softmax_cross_entropy",
        softmax_cross_entropy_version_2,
        {},
        ("dlogits",),
        "The gradient is not multiplied by the upstream gradient dout.",
    ),
    Case(
        "softmax_cross_entropy",
        softmax_cross_entropy_version_5,
        {},
        ("dlogits",),
        "g[:, arange(T), targets] -= 1 broadcasts: at every position 1 is subtracted at the targets of all sequences of the batch, not just the sequence's own.",
    ),
    Case(
        "softmax_cross_entropy",
        softmax_cross_entropy_version_1,
        {"reduction": "sum"},
        ("dlogits",),
        "The gradient is divided by the number of targets although the reduction is the sum.",
    ),
    Case("softmax_cross_entropy", softmax_cross_entropy_version_3),
    Case("softmax_cross_entropy", softmax_cross_entropy_version_4, {"reduction": "sum"}),
]


# --- next_token_loss


def next_token_loss_version_5(logits, ids, dout=1.0):
    labels = np.roll(ids, -1, axis=1)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[labels]
    return dout * (p - onehot) / labels.size


def next_token_loss_version_2(logits, ids, dout=1.0):
    B, T, V = logits.shape
    d = np.zeros_like(logits)
    for t in range(T - 1):
        row = logits[:, t]
        p = np.exp(row - row.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(B), ids[:, t + 1]] -= 1
        d[:, t] = p / (B * T)
    return d * dout


def next_token_loss_version_4(logits, ids, dout=1.0):
    V = logits.shape[-1]
    pred = logits.reshape(-1, V)[:-1]
    label = ids.reshape(-1)[1:]
    p = np.exp(pred - pred.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(label)), label] -= 1
    full = np.zeros((ids.size, V))
    full[:-1] = dout * p / len(label)
    return full.reshape(logits.shape)


def next_token_loss_version_3(logits, ids, dout=1.0):
    B, T, V = logits.shape
    inp, tgt = logits[:, : T - 1], ids[:, 1:]
    z = np.exp(inp - inp.max(-1, keepdims=True))
    probs = z / z.sum(-1, keepdims=True)
    delta = probs - (tgt[..., None] == np.arange(V))
    # pad the missing position back
    delta = np.pad(delta, ((0, 0), (1, 0), (0, 0)))
    return delta * (dout / tgt.size)


def next_token_loss_version_1(logits, ids, dout=1.0):
    d = np.zeros_like(logits)
    for b in range(len(ids)):
        z = logits[b, :-1]
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(z)), ids[b, 1:]] -= 1
        d[b, :-1] = p
    return d * dout


CASES += [
    Case(
        "next_token_loss",
        next_token_loss_version_5,
        {},
        ("dlogits",),
        "The labels are made by np.roll, so that the last position, which has no next token, gets a gradient towards the first token, and the mean counts all positions.",
    ),
    Case(
        "next_token_loss",
        next_token_loss_version_2,
        {},
        ("dlogits",),
        "The mean divides by batch times tokens instead of batch times (tokens - 1).",
    ),
    Case(
        "next_token_loss",
        next_token_loss_version_4,
        {},
        ("dlogits",),
        "The shift happens after flattening the batch, so that a sequence's last position predicts the first token of the next sequence (and the count is batch tokens - 1).",
    ),
    Case(
        "next_token_loss",
        next_token_loss_version_3,
        {},
        ("dlogits",),
        "The zero row is padded at the front instead of the end, so that every position's gradient is written one position too late.",
    ),
    Case("next_token_loss", next_token_loss_version_1, {"reduction": "sum"}),
]


# --- dpo


def dpo_version_1(chosen, rejected, ref_chosen, ref_rejected, dout=1.0):
    beta = 0.1
    pi = torch.from_numpy(chosen - rejected)
    ref = torch.from_numpy(ref_chosen - ref_rejected)
    logits = beta * (pi - ref)
    w = torch.sigmoid(logits)
    g = -beta * w * dout / len(chosen)
    return g.numpy(), (-g).numpy()


def dpo_version_3(chosen, rejected, ref_chosen, ref_rejected, dout=1.0):
    beta, n = 0.1, chosen.shape[0]
    policy_logratio = chosen - rejected
    reference_logratio = ref_rejected - ref_chosen
    h = policy_logratio - reference_logratio
    s = 1 / (1 + np.exp(-beta * h))
    grad = dout * beta * (s - 1) / n
    return grad, -grad


def dpo_version_4(chosen, rejected, ref_chosen, ref_rejected, dout=1.0):
    beta = 0.1
    out = []
    h = chosen - ref_chosen - rejected + ref_rejected
    sig = 1 / (1 + np.exp(-beta * h))
    dh = -(1 - sig) * dout / h.size
    for sign in (1, -1):
        out.append(sign * dh)
    return tuple(out)


def dpo_version_2(chosen, rejected, ref_chosen, ref_rejected, dout=1.0):
    beta = 0.1
    u = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    s = 1 / (1 + np.exp(-u))
    # d(-log s)/du = -s'/s
    du = -(s * (1 - s)) * dout / u.size
    return beta * du, -beta * du


def dpo_version_5(chosen, rejected, ref_chosen, ref_rejected, dout=1.0):
    beta = 0.3
    u = beta * (chosen - rejected - ref_chosen + ref_rejected)
    g = np.empty((2, u.size))
    g[0] = -beta * np.exp(-np.logaddexp(0, u)) * (dout / u.size)
    g[1] = -g[0]
    return g[0], g[1]


CASES += [
    Case(
        "dpo",
        dpo_version_1,
        {},
        ("dchosen", "drejected"),
        "The weight is sigmoid(margin) instead of sigmoid(-margin) = 1 - sigmoid(margin).",
    ),
    Case(
        "dpo",
        dpo_version_3,
        {},
        ("dchosen", "drejected"),
        "The reference's log-ratio has the wrong sign (ref_rejected - ref_chosen is subtracted), so that the reference is added to the margin instead of subtracted.",
    ),
    Case(
        "dpo",
        dpo_version_4,
        {},
        ("dchosen", "drejected"),
        "The inner derivative beta is missing: the gradients are not multiplied by beta.",
    ),
    Case(
        "dpo",
        dpo_version_2,
        {},
        ("dchosen", "drejected"),
        "The derivative of the logarithm is missing: -s (1 - s), sigmoid's own derivative, is used without the division by s.",
    ),
    Case("dpo", dpo_version_5, {"beta": 0.3}),
]


# --- rope


def rope_version_1(x, positions, dout):
    D = x.shape[-1]
    inv = 10000.0 ** (-np.arange(0, D, 2) / D)
    ang = np.concatenate([np.outer(positions, inv)] * 2, axis=-1)

    def rotate_half(z):
        return np.concatenate([-z[..., D // 2 :], z[..., : D // 2]], -1)

    return dout * np.cos(ang) + rotate_half(dout) * np.sin(ang)


def rope_version_2(x, positions, dout):
    d = x.shape[-1]
    freqs = 1.0 / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    ang = torch.outer(torch.from_numpy(positions).double(), freqs)
    cis = torch.polar(torch.ones_like(ang), -ang)
    g = torch.view_as_complex(torch.from_numpy(dout).reshape(*dout.shape[:-1], d // 2, 2).contiguous())
    return torch.view_as_real(g * cis).flatten(-2).numpy()


def rope_version_4(x, positions, dout):
    B, H, T, D = x.shape
    h = D // 2
    dx = np.empty_like(dout)
    inv = 1.0 / 10000.0 ** (2 * np.arange(h) / D)
    for t in range(T):
        cos, sin = np.cos(t * inv), np.sin(t * inv)
        dx[:, :, t, :h] = cos * dout[:, :, t, :h] + sin * dout[:, :, t, h:]
        dx[:, :, t, h:] = cos * dout[:, :, t, h:] - sin * dout[:, :, t, :h]
    return dx


def rope_version_3(x, positions, dout):
    half = x.shape[-1] // 2
    theta = positions[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(theta), np.sin(theta)
    g = dout.copy()
    a, b = g[..., :half], g[..., half:]
    a[...] = a * cos + b * sin
    b[...] = b * cos - a * sin
    return g


def rope_version_5(x, positions, dout):
    D = x.shape[-1]
    h = D // 2
    dx = np.zeros_like(dout)
    for i in range(h):
        phi = positions * 10000.0 ** (-2 * i / D)
        R = np.array([[np.cos(phi), -np.sin(phi)], [np.sin(phi), np.cos(phi)]])
        pair = np.stack([dout[..., i], dout[..., i + h]], -1)
        back = np.einsum("ijt,bhti->bhtj", R, pair)
        dx[..., i], dx[..., i + h] = back[..., 0], back[..., 1]
    return dx


def rope_version_6(x, positions, dout):
    D = x.shape[-1]
    ang = torch.outer(torch.from_numpy(positions).double(), 500.0 ** (-torch.arange(0, D, 2).double() / D))
    cos, sin = torch.cat([ang.cos()] * 2, -1), torch.cat([ang.sin()] * 2, -1)
    g = torch.from_numpy(dout)
    a, b = (g * sin).chunk(2, -1)
    return (g * cos + torch.cat([b, -a], -1)).numpy()


CASES += [
    Case("rope", rope_version_6, {"theta": 500.0}),
    Case(
        "rope",
        rope_version_1,
        {},
        ("dx",),
        "The gradient is rotated forward by +angle again instead of back by -angle (the sine's sign is that of the forward pass).",
    ),
    Case(
        "rope",
        rope_version_2,
        {},
        ("dx",),
        "Adjacent features 2i and 2i + 1 are rotated as pairs (interleaved convention) instead of i and i + D/2.",
    ),
    Case("rope", rope_version_4, {}, ("dx",), "The token's index 0, 1, ... is used instead of the given positions."),
    Case(
        "rope",
        rope_version_3,
        {},
        ("dx",),
        "The first half is overwritten in place before the second half is computed, which then uses the already rotated first half.",
    ),
    Case("rope", rope_version_5),
]


# --- rms_norm


def rms_norm_version_4(x, weight, dout):
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    xhat = x / rms
    dweight = (dout * xhat).sum(axis=(0, 1))
    dx = dout * weight / rms
    return dx, dweight


def rms_norm_version_1(x, weight, dout):
    n = x.shape[-1]
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    y = x * r
    dw = np.einsum("btf,btf->f", dout, y)
    proj = (dout * y).sum(-1, keepdims=True) / n
    dx = r * (dout * weight - y * proj)
    return dx, dw


def rms_norm_version_5(x, weight, dout):
    dx = np.empty_like(x)
    dw = np.zeros_like(weight)
    for b in range(x.shape[0]):
        inv = (np.mean(x[b] ** 2, axis=1) + 1e-6) ** -0.5
        wg = dout[b] * weight
        dot = np.mean(wg * x[b], axis=1)
        dx[b] = wg * inv[:, None] - x[b] * (dot * inv**2)[:, None]
        dw += np.sum(dout[b] * x[b] * inv[:, None], axis=0)
    return dx, dw


def rms_norm_version_3(x, weight, dout):
    inv = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
    n = x * inv
    dw = (dout * n).reshape(-1, x.shape[-1]).mean(0)
    dn = dout * (1 + weight)
    return inv * (dn - n * np.mean(dn * n, -1, keepdims=True)), dw


def rms_norm_version_2(x, weight, dout):
    D = x.shape[-1]
    ss = (x * x).sum(-1, keepdims=True)
    rms = np.sqrt(ss / D + 1e-6)
    y = x / rms
    grads = {"y": dout * weight}
    grads["rms"] = -(grads["y"] * x).sum(-1, keepdims=True) / rms**2
    grads["ss"] = grads["rms"] / (2 * D * rms)
    dx = grads["y"] / rms + 2 * x * grads["ss"]
    return dx, (dout * y).sum((0, 1))


CASES += [
    Case(
        "rms_norm",
        rms_norm_version_4,
        {},
        ("dx",),
        "The root mean square is treated as a constant: dx misses the term from its derivative (the projection on x).",
    ),
    Case(
        "rms_norm",
        rms_norm_version_1,
        {},
        ("dx",),
        "In dx's projection term the weight is missing: mean(dout xhat) instead of mean(dout weight xhat).",
    ),
    Case(
        "rms_norm",
        rms_norm_version_5,
        {},
        ("dx",),
        "dx's projection term has the inverse root mean square squared instead of cubed.",
    ),
    Case(
        "rms_norm",
        rms_norm_version_3,
        {},
        ("dx", "dweight"),
        "Two mistakes: dx uses 1 + weight (a weight stored as an offset from one) instead of weight, and dweight is averaged over the tokens instead of summed.",
    ),
    Case("rms_norm", rms_norm_version_2),
]


# --- layer_norm


def layer_norm_version_5(x, weight, bias, dout):
    mu = x.mean(-1, keepdims=True)
    std = x.std(-1, keepdims=True) + 1e-5
    xhat = (x - mu) / std
    dxhat = dout * weight
    dx = (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True)) / std
    return dx, (dout * xhat).sum((0, 1)), dout.sum((0, 1))


def layer_norm_version_2(x, weight, bias, dout):
    X, W, G = (torch.from_numpy(a) for a in (x, weight, dout))
    mean, var = X.mean(-1, keepdim=True), X.var(-1, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    norm = (X - mean) * rstd
    dnorm = G * W
    dx = rstd * (dnorm - dnorm.mean(-1, keepdim=True) - norm * (dnorm * norm).mean(-1, keepdim=True))
    return dx.numpy(), (G * norm).sum((0, 1)).numpy(), G.sum((0, 1)).numpy()


def layer_norm_version_3(x, gamma, beta, dout):
    N = x.shape[-1]
    mu = x.mean(axis=-1, keepdims=True)
    xc = x - mu
    ivar = 1 / np.sqrt((xc**2).mean(axis=-1, keepdims=True) + 1e-5)
    xn = xc * ivar
    s1 = dout.sum(-1, keepdims=True)
    s2 = (dout * xn).sum(-1, keepdims=True)
    dx = gamma * ivar / N * (N * dout - s1 - xn * s2)
    return dx, np.sum(dout * xn, axis=(0, 1)), np.sum(dout, axis=(0, 1))


def layer_norm_version_4(x, weight, bias, dout):
    C = x.shape[-1]
    xf, gf = x.reshape(-1, C), dout.reshape(-1, C)
    dx = np.empty_like(xf)
    dgamma, dbeta = np.zeros(C), np.zeros(C)
    for s in range(0, len(xf), 4):
        xs, gs = xf[s : s + 4], gf[s : s + 4]
        rs = 1 / np.sqrt(xs.var(1, keepdims=True) + 1e-5)
        xh = (xs - xs.mean(1, keepdims=True)) * rs
        gw = gs * weight
        dx[s : s + 4] = rs * (gw - gw.mean(1, keepdims=True) - xh * (gw * xh).mean(1, keepdims=True))
        dgamma = (gs * xh).sum(0)
        dbeta = gs.sum(0)
    return dx.reshape(x.shape), dgamma, dbeta


def layer_norm_version_6(x, weight, bias, dout):
    # J = (I - 11^T/n) (...) applied as matrices
    n = x.shape[-1]
    center = np.eye(n) - np.ones((n, n)) / n
    xc = x @ center
    r = 1 / np.sqrt((xc * xc).sum(-1) / n + 1e-5)
    gc = (dout * weight) @ center
    dot = np.einsum("btn,btn->bt", gc, xc)
    dx = gc * r[..., None] - xc * (dot * r**3 / n)[..., None]
    return dx, np.einsum("btn,btn,bt->n", dout, xc, r), dout.sum((0, 1))


def layer_norm_version_1(x, weight, bias, dout):
    eps = 1e-3
    D = x.shape[-1]
    mu, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    inv = 1 / np.sqrt(var + eps)
    dxhat = dout * weight
    dvar = (dxhat * (x - mu)).sum(-1, keepdims=True) * -0.5 * inv**3
    dmu = -(dxhat * inv).sum(-1, keepdims=True)
    dx = dxhat * inv + 2 * dvar * (x - mu) / D + dmu / D
    return dx, (dout * (x - mu) * inv).sum(0).sum(0), dout.sum(0).sum(0)


CASES += [
    Case(
        "layer_norm",
        layer_norm_version_5,
        {},
        ("dx", "dweight"),
        "eps is added to the standard deviation, outside the square root, instead of to the variance.",
    ),
    Case(
        "layer_norm",
        layer_norm_version_2,
        {},
        ("dx", "dweight"),
        "The variance is the unbiased one (division by n - 1, torch's default of var) instead of the biased one.",
    ),
    Case(
        "layer_norm",
        layer_norm_version_3,
        {},
        ("dx",),
        "The weight is multiplied on dx at the end, after the means, instead of on dout before them: the means are of dout without the weight.",
    ),
    Case(
        "layer_norm",
        layer_norm_version_4,
        {},
        ("dweight", "dbias"),
        "In the loop over chunks of rows dweight and dbias are assigned instead of accumulated, so that only the last chunk counts.",
    ),
    Case("layer_norm", layer_norm_version_6),
    Case("layer_norm", layer_norm_version_1, {"eps": 1e-3}),
]


# --- loss_head


def loss_head_version_1(x, weight, bias, targets, dout=1.0):
    # never holds the logits of more than four tokens
    X, y = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    dX, dW, db = np.zeros_like(X), np.zeros_like(weight), np.zeros_like(bias)
    for s in range(0, len(y), 4):
        xc, yc = X[s : s + 4], y[s : s + 4]
        z = xc @ weight + bias
        g = np.exp(z - z.max(1, keepdims=True))
        g /= g.sum(1, keepdims=True)
        g[np.arange(len(yc)), yc] -= 1
        g *= dout / len(yc)
        dX[s : s + 4] = g @ weight.T
        dW += xc.T @ g
        db += g.sum(0)
    return dX.reshape(x.shape), dW, db


def loss_head_version_2(x, weight, bias, targets, dout=1.0):
    X, y = x.reshape(-1, x.shape[-1]), targets.ravel()
    N, V, step = len(y), weight.shape[1], 4
    z = X @ weight + bias
    m = z.max(1)
    lse = m + np.log(np.exp(z - m[:, None]).sum(1))
    dX, dW, db = np.zeros_like(X), np.empty_like(weight), np.empty_like(bias)
    for lo in range(0, V, step):
        hi = min(lo + step, V)
        g = np.exp(X @ weight[:, lo:hi] + bias[lo:hi] - lse[:, None])
        local = np.clip(y - lo, 0, hi - lo - 1)
        here = y < hi
        g[np.flatnonzero(here), local[here]] -= 1
        g *= dout / N
        dX += g @ weight[:, lo:hi].T
        dW[:, lo:hi] = X.T @ g
        db[lo:hi] = g.sum(0)
    return dX.reshape(x.shape), dW, db


def loss_head_version_3(x, weight, bias, targets, dout=1.0):
    Xt, Wt, bt, yt = map(torch.from_numpy, (x, weight, bias, targets))
    probs = torch.softmax(Xt @ Wt + bt, dim=-1)
    n = yt.numel()
    delta = probs.clone()
    delta.scatter_(-1, yt[..., None], delta.gather(-1, yt[..., None]) - 1)
    delta = delta * dout / n
    dx = delta @ Wt.T
    dw = torch.einsum("btd,btv->dv", Xt, probs) * dout / n
    db = delta.mean(1).sum(0)
    return dx.numpy(), dw.numpy(), db.numpy()


def loss_head_version_4(x, weight, bias, targets, dout=1.0):
    n = targets.size
    h = x.reshape(n, -1)
    scores = h @ weight
    scores -= scores.max(axis=1, keepdims=True)
    soft = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    err = (soft - np.eye(weight.shape[1])[targets.ravel()]) * (dout / n)
    return (err @ weight.T).reshape(x.shape), h.T @ err, err.sum(0)


def loss_head_version_5(x, weight, bias, targets, dout=1.0):
    X, y = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    N = len(y)
    dX, dW, db = np.zeros_like(X), np.zeros_like(weight), np.zeros_like(bias)
    for s in range(0, N, 4):
        xc, yc = X[s : s + 4], y[s : s + 4]
        z = xc @ weight + bias
        g = np.exp(z - z.max(1, keepdims=True))
        g /= g.sum(1, keepdims=True)
        g[np.arange(len(yc)), yc] -= 1
        dX[s : s + 4] = g @ weight.T
        dW += xc.T @ g
        db += g.sum(0)
    c = dout / N
    return c * dX.reshape(x.shape), c * dW, c * db


CASES += [
    Case(
        "loss_head",
        loss_head_version_1,
        {},
        ("dx", "dweight", "dbias"),
        "Each chunk of four tokens divides by its own number of tokens instead of the total number of targets.",
    ),
    Case(
        "loss_head",
        loss_head_version_2,
        {},
        ("dx", "dweight", "dbias"),
        "In the tiles over the vocabulary the test for the target's tile lacks y >= lo: for targets of earlier tiles 1 is also subtracted in the first column of every later tile.",
    ),
    Case(
        "loss_head",
        loss_head_version_3,
        {},
        ("dweight", "dbias"),
        "Two mistakes: dweight is computed from the probabilities before the one-hot targets are subtracted, and dbias is averaged over the tokens instead of summed.",
    ),
    Case("loss_head", loss_head_version_4, {}, ("dx", "dweight", "dbias"), "The recomputed logits lack the bias."),
    Case("loss_head", loss_head_version_5),
]


# --- tied_head


def tied_head_version_3(ids, weight, ln_weight, ln_bias, targets, dout=1.0):
    tok, tgt = ids.ravel(), targets.ravel()
    n, d = tok.size, weight.shape[1]
    emb = weight[tok]
    mean = emb.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(((emb - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    norm = (emb - mean) * rstd
    logits = (norm * ln_weight + ln_bias) @ weight.T
    g = np.exp(logits - logits.max(1, keepdims=True))
    g /= g.sum(1, keepdims=True)
    g[np.arange(n), tgt] -= 1
    g *= dout / n
    dW = g.T @ emb
    dy = g @ weight
    dn = dy * ln_weight
    demb = rstd * (dn - dn.mean(1, keepdims=True) - norm * (dn * norm).mean(1, keepdims=True))
    np.add.at(dW, tok, demb)
    return dW, (dy * norm).sum(0), dy.sum(0)


def tied_head_version_4(ids, weight, ln_weight, ln_bias, targets, dout=1.0):
    W, g, b = map(torch.from_numpy, (weight, ln_weight, ln_bias))
    i, t = torch.from_numpy(ids).flatten(), torch.from_numpy(targets).flatten()
    x = W[i]
    mu = x.mean(-1, keepdim=True)
    rs = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    xh = (x - mu) * rs
    y = xh * g + b
    dl = torch.softmax(y @ W.T, -1)
    dl[torch.arange(len(t)), t] -= 1
    dl *= dout / len(t)
    dW = dl.T @ y
    dy = dl @ W
    dxh = dy * g
    dx = rs * (dxh - dxh.mean(-1, keepdim=True) - xh * (dxh * xh).mean(-1, keepdim=True))
    dW.index_add_(0, t, dx)
    return dW.numpy(), (dy * xh).sum(0).numpy(), dy.sum(0).numpy()


def tied_head_version_1(ids, weight, ln_weight, ln_bias, targets, dout=1.0):
    V = weight.shape[0]

    def layer_norm(e):
        c = e - e.mean(-1, keepdims=True)
        r = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)
        return c * r, r

    def layer_norm_grad(g, xh, r):
        return r * (g - g.mean(-1, keepdims=True) - xh * (g * xh).mean(-1, keepdims=True))

    xh, r = layer_norm(weight[ids])
    h = ln_weight * xh + ln_bias
    s = h @ weight.T
    s = np.exp(s - s.max(-1, keepdims=True))
    ds = (s / s.sum(-1, keepdims=True) - (targets[..., None] == np.arange(V))) * (dout / ids.size)
    dh = ds @ weight
    dweight = ds.reshape(-1, V).T @ h.reshape(-1, h.shape[-1])
    np.add.at(dweight, ids, layer_norm_grad(dh, xh, r))
    return dweight, np.einsum("btd,btd->d", dh, xh), np.einsum("btd->d", dh)


def tied_head_version_5(ids, weight, ln_weight, ln_bias, targets, dout=1.0):
    n = ids.size
    one_in, one_out = np.eye(len(weight))[ids.ravel()], np.eye(len(weight))[targets.ravel()]
    e = one_in @ weight
    c = e - e.mean(1, keepdims=True)
    r = 1 / np.sqrt((c**2).mean(1, keepdims=True) + 1e-5)
    xh = c * r
    h = xh * ln_weight + ln_bias
    z = h @ weight.T
    z -= z.max(1, keepdims=True)
    dz = np.exp(z) / np.exp(z).sum(1, keepdims=True) - one_out
    dz *= dout / n
    dh = dz @ weight
    dxh = dh * ln_weight
    dln_weight, dln_bias = (dxh * xh).sum(0), dxh.sum(0)
    de = r * (dxh - dxh.mean(1, keepdims=True) - xh * (dxh * xh).mean(1, keepdims=True))
    return one_in.T @ de + dz.T @ h, dln_weight, dln_bias


def tied_head_version_2(ids, weight, ln_weight, ln_bias, targets, dout=1.0):
    dW = np.zeros_like(weight)
    dg, db = np.zeros_like(ln_weight), np.zeros_like(ln_bias)
    for seq, tgt in zip(ids, targets):
        e = weight[seq]
        r = 1 / np.sqrt(e.var(1, keepdims=True) + 1e-5)
        xh = (e - e.mean(1, keepdims=True)) * r
        h = xh * ln_weight + ln_bias
        z = h @ weight.T
        lse = np.logaddexp.reduce(z, axis=1)
        dz = np.exp(z - lse[:, None])
        dz[np.arange(len(seq)), tgt] -= 1
        dz *= dout / ids.size
        dW += dz.T @ h
        dh = dz @ weight
        dg += (dh * xh).sum(0)
        db += dh.sum(0)
        dxh = dh * ln_weight
        de = r * (dxh - dxh.mean(1, keepdims=True) - xh * (dxh * xh).mean(1, keepdims=True))
        np.add.at(dW, seq, de)
    return dW, dg, db


CASES += [
    Case(
        "tied_head",
        tied_head_version_3,
        {},
        ("dweight",),
        "The output projection's contribution to dweight uses the embeddings before the layer norm instead of the layer norm's output.",
    ),
    Case(
        "tied_head",
        tied_head_version_4,
        {},
        ("dweight",),
        "The embedding's gradient is scattered to the rows of the targets instead of the rows of the input ids.",
    ),
    Case(
        "tied_head",
        tied_head_version_1,
        {},
        ("dweight",),
        "The layer norm's backward is given dh without the multiplication by ln_weight, so that the embedding's part of dweight is wrong.",
    ),
    Case(
        "tied_head",
        tied_head_version_5,
        {},
        ("dln_weight", "dln_bias"),
        "dln_weight and dln_bias are summed from the gradient already multiplied by ln_weight instead of from the gradient of the layer norm's output.",
    ),
    Case("tied_head", tied_head_version_2),
]


# --- attention


def attention_version_5(q, k, v, dout):
    B, H, T, d = q.shape
    scale, bs = 1 / math.sqrt(d), 4
    causal = np.tril(np.ones((T, T), bool))
    acc = np.zeros(v.shape)
    m = np.full((B, H, T, 1), -np.inf)
    l = np.zeros((B, H, T, 1))
    for j in range(0, T, bs):
        s = np.where(causal[:, j : j + bs], scale * q @ k[:, :, j : j + bs].swapaxes(-1, -2), -np.inf)
        m_new = np.maximum(m, s.max(-1, keepdims=True))
        corr, p = np.exp(m - m_new), np.exp(s - m_new)
        l = l * corr + p.sum(-1, keepdims=True)
        acc = acc * corr + p @ v[:, :, j : j + bs]
        m = m_new
    lse = m + np.log(l)
    delta = (dout * acc).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, T, bs):
        kj, vj = k[:, :, j : j + bs], v[:, :, j : j + bs]
        p = np.where(causal[:, j : j + bs], np.exp(scale * q @ kj.swapaxes(-1, -2) - lse), 0)
        dv[:, :, j : j + bs] = p.swapaxes(-1, -2) @ dout
        ds = p * (dout @ vj.swapaxes(-1, -2) - delta) * scale
        dq += ds @ kj
        dk[:, :, j : j + bs] = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def attention_version_6(q, k, v, dout):
    n, d = q.shape[-2:]
    mask = np.tril(np.ones((n, n)))
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(d) * mask
    e = np.exp(s - s.max(-1, keepdims=True))
    a = e / e.sum(-1, keepdims=True)
    dv = np.einsum("bhij,bhie->bhje", a, dout)
    da = np.einsum("bhie,bhje->bhij", dout, v)
    ds = a * (da - (da * a).sum(-1, keepdims=True)) * mask / np.sqrt(d)
    return np.einsum("bhij,bhjd->bhid", ds, k), np.einsum("bhij,bhid->bhjd", ds, q), dv


def attention_version_1(q, k, v, dout):
    Q, K, V, dO = map(torch.from_numpy, (q, k, v, dout))
    T = Q.shape[2]
    block = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=2)
    S = (Q @ K.mT / K.shape[-1] ** 0.5).masked_fill(block, float("-inf"))
    P = S.softmax(-1)
    dV = P.mT @ dO
    dP = dO @ V.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) / K.shape[-1] ** 0.5
    return (dS @ K).numpy(), (dS.mT @ Q).numpy(), dV.numpy()


def attention_version_3(q, k, v, dout):
    qs = q / np.sqrt(q.shape[-1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(q.shape[2]):
        keys, vals = k[:, :, : i + 1], v[:, :, : i + 1]
        s = np.einsum("bhd,bhjd->bhj", qs[:, :, i], keys)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        g = dout[:, :, i]
        dp = np.einsum("bhe,bhje->bhj", g, vals)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        dq[:, :, i] = np.einsum("bhj,bhjd->bhd", ds, keys)
        dk[:, :, : i + 1] += ds[..., None] * qs[:, :, i, None]
        dv[:, :, : i + 1] += p[..., None] * g[:, :, None]
    return dq, dk, dv


def attention_version_4(q, k, v, dout):
    c = 1 / math.sqrt(q.shape[-1])
    s = c * np.einsum("bhid,bhjd->bhij", q, k)
    lse = np.logaddexp.reduce(s, axis=-1, keepdims=True)
    p = np.exp(s - lse)
    o = p @ v
    delta = np.einsum("bhie,bhie->bhi", o, dout)[..., None]
    ds = p * (dout @ v.swapaxes(-1, -2) - delta)
    return c * ds @ k, c * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def attention_version_2(q, k, v, dout):
    T, d = q.shape[-2:]
    bq, bk, scale = 4, 2, d**-0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(0, T, bq):
        qi, gi = q[:, :, i : i + bq], dout[:, :, i : i + bq]
        hi = min(i + bq, T)
        seen = np.arange(i, hi)[:, None] >= np.arange(hi)
        s = np.where(seen, scale * qi @ k[:, :, :hi].swapaxes(2, 3), -1e30)
        lse = np.logaddexp.reduce(s, axis=-1, keepdims=True)
        delta = (np.exp(s - lse) @ v[:, :, :hi] * gi).sum(-1, keepdims=True)
        for j in range(0, hi, bk):
            sl = slice(j, min(j + bk, hi))
            p = np.exp(s[..., sl] - lse)
            dv[:, :, sl] += p.swapaxes(2, 3) @ gi
            ds = scale * p * (gi @ v[:, :, sl].swapaxes(2, 3) - delta)
            dq[:, :, i:hi] += ds @ k[:, :, sl]
            dk[:, :, sl] += ds.swapaxes(2, 3) @ qi
    return dq, dk, dv


CASES += [
    Case(
        "attention",
        attention_version_5,
        {},
        ("dq", "dk"),
        "delta, the row sum of dout times the output, is computed from the online softmax's accumulator before the division by the denominator l.",
    ),
    Case(
        "attention",
        attention_version_6,
        {},
        ("dq", "dk", "dv"),
        "The causal mask multiplies the scores by 0 before the softmax instead of setting them to -inf, so that future tokens keep weight exp(0).",
    ),
    Case(
        "attention",
        attention_version_1,
        {},
        ("dq", "dk", "dv"),
        "The causal mask starts at diagonal 2 instead of 1: each token also attends to the next one.",
    ),
    Case(
        "attention",
        attention_version_3,
        {},
        ("dq",),
        "q is scaled beforehand, and dq is returned as the gradient of the scaled q: the factor 1/sqrt(d_k) is missing in dq.",
    ),
    Case("attention", attention_version_4, {"causal": False}),
    Case("attention", attention_version_2),
]


# --- attention_dropout


def attention_dropout_version_2(q, k, v, keep, dout):
    T, d = q.shape[-2:]
    s = q @ k.swapaxes(-1, -2) / np.sqrt(d)
    s[..., np.triu_indices(T, 1)[0], np.triu_indices(T, 1)[1]] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    pd = p * keep
    dv = pd.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    ds = ds * keep / np.sqrt(d)
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv


def attention_dropout_version_1(q, k, v, keep, dout):
    T, d = q.shape[-2:]
    BM, BN, scale = 4, 2, 1 / math.sqrt(d)
    rows = np.arange(T)
    s = np.where(rows[:, None] >= rows, scale * q @ k.swapaxes(2, 3), -np.inf)
    lse = np.logaddexp.reduce(s, axis=-1)
    out = (np.exp(s - lse[..., None]) * keep) @ v
    delta = (dout * out).sum(-1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for n0 in range(0, T, BN):
        cs = slice(n0, n0 + BN)
        for m0 in range(0, T, BM):
            if m0 < n0:
                continue  # above the diagonal
            rs = slice(m0, m0 + BM)
            p = np.exp(s[:, :, rs, cs] - lse[:, :, rs, None])
            z = keep[:, :, rs, cs]
            dv[:, :, cs] += (p * z).swapaxes(2, 3) @ dout[:, :, rs]
            dp = z * (dout[:, :, rs] @ v[:, :, cs].swapaxes(2, 3))
            ds = scale * p * (dp - delta[:, :, rs, None])
            dq[:, :, rs] += ds @ k[:, :, cs]
            dk[:, :, cs] += ds.swapaxes(2, 3) @ q[:, :, rs]
    return dq, dk, dv


def attention_dropout_version_5(q, k, v, keep, dout):
    n, d = q.shape[2], q.shape[3]
    logits = np.einsum("bhid,bhjd->bhij", q, k) * d**-0.5
    logits = np.where(np.tri(n, dtype=bool), logits, -np.inf)
    w = np.exp(logits - logits.max(-1, keepdims=True))
    w = w / w.sum(-1, keepdims=True)
    out = np.einsum("bhij,bhjd->bhid", w, v)
    D = (out * dout).sum(-1, keepdims=True)
    dv = np.einsum("bhij,bhid->bhjd", w * keep, dout)
    dw = np.einsum("bhid,bhjd->bhij", dout, v) * keep
    dl = w * (dw - D) * d**-0.5
    return np.einsum("bhij,bhjd->bhid", dl, k), np.einsum("bhij,bhid->bhjd", dl, q), dv


def attention_dropout_version_3(q, k, v, keep, dout):
    d = q.shape[-1]
    dq, dk, dv = (np.zeros_like(a) for a in (q, k, v))
    for b, h in np.ndindex(q.shape[:2]):
        s = q[b, h] @ k[b, h].T / np.sqrt(d)
        s[np.triu_indices_from(s, 1)] = -np.inf
        a = np.exp(s - s.max(1, keepdims=True))
        a /= a.sum(1, keepdims=True)
        a *= keep[b, h]
        dv[b, h] = a.T @ dout[b, h]
        da = (dout[b, h] @ v[b, h].T) * keep[b, h]
        ds = a * (da - (a * da).sum(1, keepdims=True)) / np.sqrt(d)
        dq[b, h], dk[b, h] = ds @ k[b, h], ds.T @ q[b, h]
    return dq, dk, dv


def attention_dropout_version_4(q, k, v, keep, dout):
    d = q.shape[-1]
    dq, dk, dv = (np.zeros_like(a) for a in (q, k, v))
    for b, h in np.ndindex(q.shape[:2]):
        s = q[b, h] @ k[b, h].T / np.sqrt(d)
        a = np.exp(s - s.max(1, keepdims=True))
        a /= a.sum(1, keepdims=True)
        dv[b, h] = (a * keep[b, h]).T @ dout[b, h]
        da = (dout[b, h] @ v[b, h].T) * keep[b, h]
        ds = a * (da - (a * da).sum(1, keepdims=True)) / np.sqrt(d)
        dq[b, h], dk[b, h] = ds @ k[b, h], ds.T @ q[b, h]
    return dq, dk, dv


CASES += [
    Case(
        "attention_dropout",
        attention_dropout_version_2,
        {},
        ("dq", "dk"),
        "The dropout mask keep is applied to the scores' gradient after the softmax's backward instead of to the probabilities' gradient before it.",
    ),
    Case(
        "attention_dropout",
        attention_dropout_version_1,
        {},
        ("dq", "dk", "dv"),
        "Query tiles (4 rows) are skipped when their first row is before the key tile's first column (tiles of 2), although their later rows attend to those keys.",
    ),
    Case(
        "attention_dropout",
        attention_dropout_version_5,
        {},
        ("dq", "dk"),
        "delta, the row sum of dout times the output, is computed from an output without dropout.",
    ),
    Case(
        "attention_dropout",
        attention_dropout_version_3,
        {},
        ("dq", "dk"),
        "The softmax's backward uses the probabilities after dropout (overwritten in place by a *= keep) instead of those before it.",
    ),
    Case("attention_dropout", attention_dropout_version_4, {"causal": False}),
]


# --- rope_attention


def rope_attention_version_2(q, k, v, positions, dout):
    d = q.shape[-1]
    h = d // 2
    ang = positions[:, None] * 10000.0 ** (-2 * np.arange(h) / d)
    c, s = np.cos(ang), np.sin(ang)

    def rot(x, s):
        return np.concatenate([x[..., :h] * c - x[..., h:] * s, x[..., :h] * s + x[..., h:] * c], -1)

    qr, kr = rot(q, s), rot(k, s)
    T = q.shape[2]
    a = qr @ kr.swapaxes(2, 3) / np.sqrt(d) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(a - a.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    da = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = rot(da @ kr, -s)
    dk = da.swapaxes(2, 3) @ qr
    return dq, dk, p.swapaxes(2, 3) @ dout


def rope_attention_version_5(q, k, v, positions, dout):
    Q, K, V, G = map(torch.from_numpy, (q, k, v, dout))
    d = Q.shape[-1]
    inv = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    ang = torch.outer(torch.from_numpy(positions).double(), inv)
    cos, sin = ang.cos().repeat(1, 2), ang.sin().repeat(1, 2)

    def rotate_half(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def apply(x):
        return x * cos + rotate_half(x) * sin

    def undo(g):
        return g * cos - rotate_half(g) * sin

    Qr, Kr, Vr = apply(Q), apply(K), apply(V)
    T = Q.shape[-2]
    S = (Qr @ Kr.mT / d**0.5).masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
    P = S.softmax(-1)
    dP = G @ Vr.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) / d**0.5
    return undo(dS @ Kr).numpy(), undo(dS.mT @ Qr).numpy(), undo(P.mT @ G).numpy()


def rope_attention_version_4(q, k, v, positions, dout):
    D = q.shape[-1]
    T = len(positions)
    phase = np.exp(1j * positions[:, None] / 10000.0 ** (2 * np.arange(D // 2) / D))

    def turn(x, ph):
        z = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * ph
        return np.concatenate([z.real, z.imag], axis=-1)

    qt, kt = turn(q, phase), turn(k, phase)
    s = np.einsum("bhid,bhjd->bhij", qt, kt) / np.sqrt(D)
    s = np.where(np.tri(T, dtype=bool), s, -1e300)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bhid,bhjd->bhij", dout, v)
    ds = p * (dp - np.einsum("bhij,bhij->bhi", p, dp)[..., None]) / np.sqrt(D)
    dq = turn(np.einsum("bhij,bhjd->bhid", ds, kt), phase.conj())
    dk = turn(np.einsum("bhij,bhid->bhjd", ds, q), phase.conj())
    return dq, dk, np.einsum("bhij,bhid->bhjd", p, dout)


def rope_attention_version_1(q, k, v, positions, dout):
    # halves as real and imaginary part
    d, T = q.shape[-1], q.shape[2]
    h = d // 2
    ph = np.exp(1j * np.outer(positions, 10000.0 ** (-np.arange(h) / h)))
    qc = (q[..., :h] + 1j * q[..., h:]) * ph
    kc = (k[..., :h] + 1j * k[..., h:]) * ph
    s = (qc @ kc.swapaxes(2, 3)).real / math.sqrt(d)
    s[..., ~np.tri(T, dtype=bool)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(d)
    dqc = (ds @ kc.conj()) * ph.conj()
    dkc = (ds.swapaxes(2, 3) @ qc.conj()) * ph.conj()
    dq = np.concatenate([dqc.real, dqc.imag], -1)
    dk = np.concatenate([dkc.real, dkc.imag], -1)
    return dq, dk, p.swapaxes(2, 3) @ dout


def rope_attention_version_3(q, k, v, positions, dout):
    d, T = q.shape[-1], q.shape[2]
    h = d // 2
    ph = np.exp(1j * np.outer(positions, 10000.0 ** (-np.arange(h) / h)))
    qc = (q[..., :h] + 1j * q[..., h:]) * ph
    kc = (k[..., :h] + 1j * k[..., h:]) * ph
    s = (qc @ kc.conj().swapaxes(2, 3)).real / math.sqrt(d)
    s[..., ~np.tri(T, dtype=bool)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(d)
    dqc = (ds @ kc) * ph.conj()
    dkc = (ds.swapaxes(2, 3) @ qc) * ph.conj()
    dq = np.concatenate([dqc.real, dqc.imag], -1)
    dk = np.concatenate([dkc.real, dkc.imag], -1)
    return dq, dk, p.swapaxes(2, 3) @ dout


CASES += [
    Case(
        "rope_attention",
        rope_attention_version_2,
        {},
        ("dk",),
        "dk is not rotated back: it is the gradient of the rotated keys.",
    ),
    Case(
        "rope_attention",
        rope_attention_version_5,
        {},
        ("dq", "dk", "dv"),
        "The values are rotated as well (and dv rotated back), although only q and k are.",
    ),
    Case(
        "rope_attention",
        rope_attention_version_4,
        {},
        ("dk",),
        "dk is computed with the query before rotation instead of the rotated one.",
    ),
    Case(
        "rope_attention",
        rope_attention_version_1,
        {},
        ("dq", "dk", "dv"),
        "The complex scores are Re(q k) without the conjugate of k, so that the product of the imaginary parts has the wrong sign (angles add instead of subtract).",
    ),
    Case("rope_attention", rope_attention_version_3),
]


# --- grouped_query_attention


def grouped_query_attention_version_4(q, k, v, dout):
    B, H, T, d = q.shape
    G = H // k.shape[1]
    kk, vv = np.tile(k, (1, G, 1, 1)), np.tile(v, (1, G, 1, 1))
    s = q @ kk.swapaxes(2, 3) / np.sqrt(d)
    s = np.where(np.tri(T, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ vv.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dkk, dvv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    fold = lambda g: g.reshape(B, G, H // G, T, d).sum(1)
    return ds @ kk, fold(dkk), fold(dvv)


def grouped_query_attention_version_1(q, k, v, dout):
    B, H, T, d = q.shape
    Hk = k.shape[1]
    Q, G = (a.reshape(B, Hk, H // Hk, T, d) for a in (q, dout))
    s = np.einsum("bgrid,bgjd->bgrij", Q, k) / math.sqrt(d)
    s[..., ~np.tri(T, dtype=bool)] = -np.inf
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    da = np.einsum("bgrid,bgjd->bgrij", G, v)
    ds = a * (da - (a * da).sum(-1, keepdims=True)) / math.sqrt(d)
    dq = np.einsum("bgrij,bgjd->bgrid", ds, k).reshape(q.shape)
    dk = np.einsum("bgrij,bgrid->bgrjd", ds, Q).mean(2)
    dv = np.einsum("bgrij,bgrid->bgrjd", a, G).mean(2)
    return dq, dk, dv


def grouped_query_attention_version_2(q, k, v, dout):
    Q, K, V, dO = map(torch.from_numpy, (q, k, v, dout))
    b, h, t, d = Q.shape
    hk = K.shape[1]
    n_rep = h // hk
    K_, V_ = K.repeat_interleave(n_rep, 1), V.repeat_interleave(n_rep, 1)
    S = (Q @ K_.mT / math.sqrt(d)).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
    P = S.softmax(-1)
    dP = dO @ V_.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True)) / math.sqrt(d)
    dK_, dV_ = dS.mT @ Q, P.mT @ dO
    dK = dK_.view(b, n_rep, hk, t, d).sum(1)
    dV = dV_.view(b, n_rep, hk, t, d).sum(1)
    return (dS @ K_).numpy(), dK.numpy(), dV.numpy()


def grouped_query_attention_version_5(q, k, v, dout):
    B, H, T, d = q.shape
    group = H // k.shape[1]
    mask = np.triu(np.full((T, T), -np.inf), 1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(H):
        j = h // group
        s = q[:, h] @ k[:, j].swapaxes(1, 2) / d**0.5 + mask
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = dout[:, h] @ v[:, j].swapaxes(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / d**0.5
        dq[:, h] = ds @ k[:, j]
        dk[:, j] = ds.swapaxes(1, 2) @ q[:, h]
        dv[:, j] = p.swapaxes(1, 2) @ dout[:, h]
    return dq, dk, dv


def grouped_query_attention_version_3(q, k, v, dout):
    B, H, T, d = q.shape
    n = k.shape[1]
    r = H // n
    # the queries of a group as more rows
    qg, og = q.reshape(B, n, r * T, d), dout.reshape(B, n, r * T, d)
    s = qg @ k.swapaxes(2, 3) / math.sqrt(d)
    s = np.where(np.tile(np.tri(T, dtype=bool), (r, 1)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = og @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(d)
    return (ds @ k).reshape(q.shape), ds.swapaxes(2, 3) @ qg, p.swapaxes(2, 3) @ og


def grouped_query_attention_version_6(q, k, v, dout):
    group, d = q.shape[1] // k.shape[1], q.shape[-1]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(k.shape[1]):
        for h in range(j * group, (j + 1) * group):
            s = q[:, h] @ k[:, j].swapaxes(1, 2) / d**0.5
            p = np.exp(s - np.logaddexp.reduce(s, axis=-1, keepdims=True))
            delta = (dout[:, h] * (p @ v[:, j])).sum(-1, keepdims=True)
            ds = p * (dout[:, h] @ v[:, j].swapaxes(1, 2) - delta) / d**0.5
            dq[:, h] = ds @ k[:, j]
            dk[:, j] += ds.swapaxes(1, 2) @ q[:, h]
            dv[:, j] += p.swapaxes(1, 2) @ dout[:, h]
    return dq, dk, dv


CASES += [
    Case("grouped_query_attention", grouped_query_attention_version_6, {"causal": False}),
    Case(
        "grouped_query_attention",
        grouped_query_attention_version_4,
        {},
        ("dq", "dk", "dv"),
        "The key and value heads are tiled instead of repeated: query head h reads head h % H_kv instead of h // G.",
    ),
    Case(
        "grouped_query_attention",
        grouped_query_attention_version_1,
        {},
        ("dk", "dv"),
        "dk and dv are averaged over the query heads of a group instead of summed.",
    ),
    Case(
        "grouped_query_attention",
        grouped_query_attention_version_2,
        {},
        ("dk", "dv"),
        "The expanded dk and dv are folded as (G, H_kv) although the heads were repeated as (H_kv, G): the wrong heads are summed.",
    ),
    Case(
        "grouped_query_attention",
        grouped_query_attention_version_5,
        {},
        ("dk", "dv"),
        "dk and dv of a key head are assigned instead of accumulated in the loop over query heads: only the group's last head counts.",
    ),
    Case("grouped_query_attention", grouped_query_attention_version_3),
]


# --- head


def head_version_4(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    T, d = a.shape[1], w_q.shape[1]
    h = d // 2
    ang = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(h) / d)
    cos, sin = np.cos(ang), np.sin(ang)

    def rot(x, sn):
        return np.concatenate([x[..., :h] * cos - x[..., h:] * sn, x[..., h:] * cos + x[..., :h] * sn], -1)

    q, k, v = rot(a @ w_q + b_q, sin), rot(a @ w_k + b_k, sin), a @ w_v + b_v
    s = q @ k.swapaxes(1, 2) / math.sqrt(d)
    s[:, ~np.tri(T, dtype=bool)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    dq, dk, dv = ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout
    db_q, db_k, db_v = (g.sum((0, 1)) for g in (dq, dk, dv))
    dq, dk = rot(dq, -sin), rot(dk, -sin)
    dw_q, dw_k, dw_v = (np.tensordot(a, g, ((0, 1), (0, 1))) for g in (dq, dk, dv))
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v


def head_version_1(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    A, Wq, bq, Wk, bk, Wv, bv, G = map(torch.from_numpy, (a, w_q, b_q, w_k, b_k, w_v, b_v, dout))
    B, T, C = A.shape
    q, k, v = A @ Wq + bq, A @ Wk + bk, A @ Wv + bv
    wei = q @ k.transpose(-2, -1) * C**-0.5
    wei = wei.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
    wei = wei.softmax(-1)
    dv = wei.transpose(-2, -1) @ G
    dwei = G @ v.transpose(-2, -1)
    dsc = wei * (dwei - (dwei * wei).sum(-1, keepdim=True)) * C**-0.5
    dq, dk = dsc @ k, dsc.transpose(-2, -1) @ q
    res = [dq @ Wq.T + dk @ Wk.T + dv @ Wv.T]
    for g in (dq, dk, dv):
        res += [A.reshape(-1, C).T @ g.reshape(B * T, -1), g.sum((0, 1))]
    return tuple(r.numpy() for r in res)


def head_version_5(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    B, T, D = a.shape
    tri, root = np.tril(np.ones((T, T))), np.sqrt(w_k.shape[-1])
    grads = {n: 0.0 for n in ("wq", "bq", "wk", "bk", "wv", "bv")}
    da = np.zeros_like(a)
    for n in range(B):
        x = a[n]
        q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v
        s = q @ k.T / root
        e = np.exp(s - s.max(1, keepdims=True))
        soft = e / e.sum(1, keepdims=True)
        att = soft * tri
        dv = att.T @ dout[n]
        dsoft = (dout[n] @ v.T) * tri
        ds = soft * (dsoft - (dsoft * soft).sum(1, keepdims=True)) / root
        dq, dk = ds @ k, ds.T @ q
        for name, g in (("q", dq), ("k", dk), ("v", dv)):
            grads["w" + name] = grads["w" + name] + x.T @ g
            grads["b" + name] = grads["b" + name] + g.sum(0)
        da[n] = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    return (da, *grads.values())


def head_version_3(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    T = a.shape[1]
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    c = w_k.shape[1] ** -0.5
    s = c * np.einsum("bid,bjd->bij", q, k)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bij,bie->bje", p, dout)
    dp = np.einsum("bie,bje->bij", dout, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    ds = np.tril(ds) * c
    dq, dk = np.einsum("bij,bjd->bid", ds, k), np.einsum("bij,bid->bjd", ds, q)
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    flat = a.reshape(-1, a.shape[-1]).T
    out = [da]
    for g in (dq, dk, dv):
        g = g.reshape(-1, g.shape[-1])
        out += [flat @ g, g.sum(0)]
    return tuple(out)


def head_version_2(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    A, Wq, bq, Wk, bk, Wv, bv, G = map(torch.from_numpy, (a, w_q, b_q, w_k, b_k, w_v, b_v, dout))
    B, T, C = A.shape
    d = Wq.shape[1]
    inv = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    ang = torch.arange(T, dtype=torch.float64)[:, None] * inv
    R = torch.zeros(T, d, d, dtype=torch.float64)
    i = torch.arange(d // 2)
    R[:, i, i] = R[:, i + d // 2, i + d // 2] = ang.cos()
    R[:, i, i + d // 2], R[:, i + d // 2, i] = -ang.sin(), ang.sin()
    q = torch.einsum("tij,btj->bti", R, A @ Wq + bq)
    k = torch.einsum("tij,btj->bti", R, A @ Wk + bk)
    v = A @ Wv + bv
    p = (q @ k.mT / d**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    dp = G @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / d**0.5
    dq = torch.einsum("tij,bti->btj", R, ds @ k)
    dk = torch.einsum("tij,bti->btj", R, ds.mT @ q)
    dv = p.mT @ G
    res = [dq @ Wq.T + dk @ Wk.T + dv @ Wv.T]
    for g in (dq, dk, dv):
        res += [torch.einsum("bti,bto->io", A, g), g.sum((0, 1))]
    return tuple(r.numpy() for r in res)


CASES += [
    Case(
        "head",
        head_version_4,
        {"rotary": True},
        ("db_q", "db_k"),
        "db_q and db_k are summed from the gradients of the rotated q and k, before the rotation is undone.",
    ),
    Case(
        "head",
        head_version_1,
        {},
        ("da", "dw_q", "db_q", "dw_k", "dw_v"),
        "The scores are scaled by 1/sqrt(d) of the input's width instead of 1/sqrt(d_k) of the head.",
    ),
    Case(
        "head",
        head_version_5,
        {},
        ("da", "dw_q", "db_q", "dw_k", "dw_v", "db_v"),
        "The causal mask multiplies the probabilities after a softmax over all tokens, without renormalising, instead of masking the scores before it.",
    ),
    Case(
        "head",
        head_version_3,
        {"causal": False},
        ("da", "dw_q", "db_q", "dw_k", "db_k"),
        "The scores' gradient is masked causally (np.tril) although the attention is not causal.",
    ),
    Case("head", head_version_2, {"rotary": True}),
]


# --- head_dropout


def head_dropout_version_2(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    A, Wq, bq, Wk, bk, Wv, bv, K, G = map(torch.from_numpy, (a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout))
    T, c = A.shape[1], Wq.shape[1] ** -0.5
    q, k, v = A @ Wq + bq, A @ Wk + bk, A @ Wv + bv
    s = (c * q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    num = e * K
    z = num.sum(-1, keepdim=True)
    z = torch.where(z > 0, z, 1.0)  # a row may be dropped altogether
    p = num / z
    dv = p.mT @ G
    dp = G @ v.mT
    ds = c * p * (dp - (p * dp).sum(-1, keepdim=True))
    dq, dk = ds @ k, ds.mT @ q
    outs = [dq @ Wq.T + dk @ Wk.T + dv @ Wv.T]
    for g in (dq, dk, dv):
        outs.append(torch.einsum("bti,bto->io", A, g))
        outs.append(g.sum(dim=(0, 1)))
    return tuple(o.numpy() for o in outs)


def head_dropout_version_5(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    B, T, D = a.shape
    dk_dim = w_k.shape[1]
    G = [np.zeros_like(w) for w in (w_q, b_q, w_k, b_k, w_v, b_v)]
    da = np.empty_like(a)
    for b in range(B):
        x = a[b]
        q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v
        s = q @ k.T / math.sqrt(dk_dim)
        s[np.triu_indices(T, 1)] = -np.inf
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        # column j of the gradient at a time
        dv = (p * keep[b]).T @ dout[b]
        dpT = v @ dout[b].T
        dp = (dpT * keep[b]).T
        ds = p * (dp - (dp * p).sum(1, keepdims=True)) / math.sqrt(dk_dim)
        dq, dk = ds @ k, ds.T @ q
        da[b] = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
        for slot, g in zip((0, 2, 4), (dq, dk, dv)):
            G[slot] += x.T @ g
            G[slot + 1] += g.sum(0)
    return (da, *G)


def head_dropout_version_4(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    T = a.shape[1]
    query = np.matmul(a, w_q) + b_q
    key = np.matmul(a, w_k) + b_k
    value = np.matmul(a, w_v) + b_v
    scale = 1.0 / math.sqrt(query.shape[-1])
    scores = np.where(np.tri(T, dtype=bool), np.einsum("bqd,bkd->bqk", query, key) * scale, -1e30)
    attn = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attn /= attn.sum(axis=-1, keepdims=True)
    grad_value = np.einsum("bqk,bqd->bkd", attn * keep, dout)
    grad_attn = np.einsum("bqd,bkd->bqk", dout, value) * keep
    grad_scores = attn * (grad_attn - np.sum(grad_attn * attn, -1, keepdims=True)) * scale
    grad_query = np.einsum("bqk,bkd->bqd", grad_scores, key)
    grad_key = np.einsum("bqk,bqd->bkd", grad_scores, query)
    grad_w_q = np.einsum("bti,bto->io", a, grad_query)
    grad_w_k = np.einsum("bti,bto->io", a, grad_query)
    grad_w_v = np.einsum("bti,bto->io", a, grad_value)
    grad_a = grad_query @ w_q.T + grad_key @ w_k.T
    sums = [g.sum(axis=(0, 1)) for g in (grad_query, grad_key, grad_value)]
    return grad_a, grad_w_q, sums[0], grad_w_k, sums[1], grad_w_v, sums[2]


def head_dropout_version_3(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    mask = np.tri(a.shape[1], dtype=bool)

    def forward():
        q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
        s = np.where(mask, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        return q, k, v, p, keep * p

    q, k, v, p, dropped = forward()
    dv = (dropped * keep).swapaxes(1, 2) @ dout
    ddropped = dout @ v.swapaxes(1, 2)
    dp = ddropped * keep
    ds = (p * dp - p * (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    dq, dk = ds @ k, ds.swapaxes(1, 2) @ q

    def back(g):
        return np.tensordot(a, g, axes=([0, 1], [0, 1])), g.sum(axis=(0, 1))

    return (dq @ w_q.T + dk @ w_k.T + dv @ w_v.T, *back(dq), *back(dk), *back(dv))


def head_dropout_version_1(a, w_q, b_q, w_k, b_k, w_v, b_v, keep, dout):
    W = np.concatenate([w_q, w_k, w_v], 1)
    bias = np.concatenate([b_q, b_k, b_v])
    n = w_q.shape[1]
    q, k, v = np.split(a @ W + bias, [n, 2 * n], axis=-1)
    s = q @ k.swapaxes(1, 2) / np.sqrt(n)
    s[:, ~np.tri(a.shape[1], dtype=bool)] = -np.inf
    lse = np.logaddexp.reduce(s, axis=-1, keepdims=True)
    p = np.exp(s - lse)
    pk = p * keep
    delta = (dout * (pk @ v)).sum(-1, keepdims=True)
    ds = (pk * (dout @ v.swapaxes(1, 2)) - p * delta) / np.sqrt(n)
    g = np.concatenate([ds @ k, ds.swapaxes(1, 2) @ q, pk.swapaxes(1, 2) @ dout], -1)
    dW = np.einsum("bti,bto->io", a, g)
    db = g.sum((0, 1))
    (x, y, z), (u, v_, w) = np.split(dW, [n, 2 * n], 1), np.split(db, [n, 2 * n])
    return g @ W.T, x, u, y, v_, z, w


CASES += [
    Case(
        "head_dropout",
        head_dropout_version_2,
        {},
        ("da", "dw_q", "db_q", "dw_k", "dw_v", "db_v"),
        "The probabilities are normalised after the dropout (the denominator sums the kept entries) instead of before it.",
    ),
    Case(
        "head_dropout",
        head_dropout_version_5,
        {},
        ("da", "dw_q", "db_q", "dw_k"),
        "keep is multiplied with the transposed gradient of the probabilities (keys by queries) and so is applied transposed.",
    ),
    Case(
        "head_dropout",
        head_dropout_version_4,
        {},
        ("da", "dw_k"),
        "Two mistakes: dw_k is computed from the query's gradient instead of the key's (copied line), and da misses the values' path dv w_v^T.",
    ),
    Case(
        "head_dropout",
        head_dropout_version_3,
        {},
        ("da", "dw_v", "db_v"),
        "In dv the dropout mask keep is applied twice: to probabilities that already contain it.",
    ),
    Case("head_dropout", head_dropout_version_1),
]


# --- multi_head


def multi_head_version_4(query, key, value, w_q, w_k, w_v, dout):
    B, T, D = query.shape
    H = 2
    hd = D // H
    split = lambda z: z.reshape(B, T, H, hd).transpose(0, 2, 1, 3)
    q, k, v, g = split(query @ w_q), split(key @ w_k), split(value @ w_v), split(dout)
    s = q @ k.swapaxes(2, 3) / np.sqrt(hd) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(hd)
    dq, dk, dv = (z.reshape(B, T, D) for z in (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g))
    proj = lambda x, z: np.einsum("bti,bto->io", x, z)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, proj(query, dq), proj(key, dk), proj(value, dv)


def multi_head_version_2(query, key, value, w_q, w_k, w_v, dout):
    n, t, c = query.shape
    nh = 3
    q, k, v, g = (np.stack(np.split(z, nh, axis=-1), axis=1) for z in (query @ w_q, key @ w_k, value @ w_v, dout))
    att = np.einsum("nhid,nhjd->nhij", q, k) / math.sqrt(c)
    att = np.where(np.tri(t, dtype=bool), att, -np.inf)
    att = np.exp(att - att.max(-1, keepdims=True))
    att /= att.sum(-1, keepdims=True)
    datt = np.einsum("nhid,nhjd->nhij", g, v)
    datt = att * (datt - (att * datt).sum(-1, keepdims=True)) / math.sqrt(c)
    dq = np.einsum("nhij,nhjd->nihd", datt, k).reshape(n, t, c)
    dk = np.einsum("nhij,nhid->njhd", datt, q).reshape(n, t, c)
    dv = np.einsum("nhij,nhid->njhd", att, g).reshape(n, t, c)
    dws = [np.einsum("nti,nto->io", x, y) for x, y in ((query, dq), (key, dk), (value, dv))]
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, *dws


def multi_head_version_1(query, key, value, w_q, w_k, w_v, dout):
    H = 2
    mask = np.tri(query.shape[1], dtype=bool)
    q, k, v = query @ w_q, key @ w_k, value @ w_v
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    root = math.sqrt(q.shape[-1] // H)
    for h in range(H):
        cols = slice(h, None, H)
        s = np.where(mask, q[..., cols] @ k[..., cols].swapaxes(1, 2) / root, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        g = dout[..., cols]
        dp = g @ v[..., cols].swapaxes(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / root
        dq[..., cols], dk[..., cols] = ds @ k[..., cols], ds.swapaxes(1, 2) @ q[..., cols]
        dv[..., cols] = p.swapaxes(1, 2) @ g
    dw = [sum(x[b].T @ y[b] for b in range(len(x))) for x, y in ((query, dq), (key, dk), (value, dv))]
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, *dw


def multi_head_version_5(query, key, value, w_q, w_k, w_v, dout):
    B, T, D = query.shape
    h, d = 2, D // 2
    Wq, Wk, Wv = (w.reshape(D, h, d) for w in (w_q, w_k, w_v))
    q = np.einsum("bti,ihd->bhtd", query, Wq)
    k = np.einsum("bti,ihd->bhtd", key, Wk)
    v = np.einsum("bti,ihd->bhtd", value, Wv)
    g = dout.reshape(B, T, h, d).transpose(0, 2, 1, 3)
    s = np.where(np.tri(T, dtype=bool), np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bhts,bhtd->bhsd", p, g)
    dp = np.einsum("bhtd,bhsd->bhts", g, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = np.einsum("bhts,bhsd->bhtd", ds, k)
    dk = np.einsum("bhts,bhtd->bhsd", ds, q)
    back = lambda z, W: np.einsum("bhtd,ihd->bti", z, W)
    wgrad = lambda x, z: np.einsum("bti,bhtd->ihd", x, z).reshape(D, D)
    dvalue = np.einsum("bhtd,ihd->bti", dv[:, :1], Wv[:, :1])
    return back(dq, Wq), back(dk, Wk), dvalue, wgrad(query, dq), wgrad(query, dk), wgrad(value, dv)


def multi_head_version_3(query, key, value, w_q, w_k, w_v, dout):
    B, T, D = query.shape
    h, d = 2, D // 2
    Wq, Wk, Wv = (w.reshape(D, h, d) for w in (w_q, w_k, w_v))
    q = np.einsum("bti,ihd->bhtd", query, Wq)
    k = np.einsum("bti,ihd->bhtd", key, Wk)
    v = np.einsum("bti,ihd->bhtd", value, Wv)
    g = dout.reshape(B, T, h, d).transpose(0, 2, 1, 3)
    s = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(d)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bhts,bhtd->bhsd", p, g)
    dp = np.einsum("bhtd,bhsd->bhts", g, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = np.einsum("bhts,bhsd->bhtd", ds, k)
    dk = np.einsum("bhts,bhtd->bhsd", ds, q)
    back = lambda z, W: np.einsum("bhtd,ihd->bti", z, W)
    wgrad = lambda x, z: np.einsum("bti,bhtd->ihd", x, z).reshape(D, D)
    return back(dq, Wq), back(dk, Wk), back(dv, Wv), wgrad(query, dq), wgrad(key, dk), wgrad(value, dv)


ALL_MH = ("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v")
CASES += [
    Case(
        "multi_head",
        multi_head_version_4,
        {},
        ALL_MH,
        "The heads' gradients (batch, heads, tokens, d) are reshaped to (batch, tokens, features) without transposing heads and tokens back.",
    ),
    Case(
        "multi_head",
        multi_head_version_2,
        {"n_head": 3},
        ALL_MH,
        "The scores are scaled by 1/sqrt of the full width instead of the head's width d_k = features/n_head.",
    ),
    Case(
        "multi_head",
        multi_head_version_1,
        {},
        ALL_MH,
        "The heads take every n_head-th feature (strided) instead of contiguous blocks of features.",
    ),
    Case(
        "multi_head",
        multi_head_version_5,
        {},
        ("dvalue", "dw_k"),
        "Two mistakes: dvalue has only the first head's contribution, and dw_k multiplies with query instead of key.",
    ),
    Case("multi_head", multi_head_version_3, {"causal": False}),
]


# --- self_attention


def self_attention_version_4(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, D = x.shape
    H, hd = 2, D // 2
    qkv = (x @ w_qkv + b_qkv).reshape(B, T, H, 3, hd)
    q, k, v = (qkv[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(hd), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = (p @ v).transpose(0, 2, 1, 3).reshape(B, T, D)
    dctx = (dout @ w_o.T).reshape(B, T, H, hd).transpose(0, 2, 1, 3)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(hd)
    parts = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dctx]
    dqkv = np.stack([g.transpose(0, 2, 1, 3) for g in parts], axis=3).reshape(B, T, 3 * D)
    dw = np.einsum("bti,bto->io", x, dqkv)
    return dqkv @ w_qkv.T, dw, dqkv.sum((0, 1)), np.einsum("bti,bto->io", ctx, dout), dout.sum((0, 1))


def self_attention_version_2(x, w_qkv, b_qkv, w_o, b_o, dout):
    X, W, b, Wo, G = map(torch.from_numpy, (x, w_qkv, b_qkv, w_o, dout))
    B, T, D = X.shape
    nh = 2
    q, k, v = (X @ W + b).split(D, dim=2)
    q, k, v = (z.view(B, T, nh, D // nh).transpose(1, 2) for z in (q, k, v))
    att = (q @ k.transpose(-2, -1)) * (D // nh) ** -0.5
    att = att.masked_fill(torch.tril(torch.ones(T, T)) == 0, -torch.inf).softmax(-1)
    y = (att @ v).transpose(1, 2).reshape(B, T, D)
    dy = (G @ Wo.T).view(B, T, nh, D // nh).transpose(1, 2)
    dv = att.transpose(-2, -1) @ dy
    datt = dy @ v.transpose(-2, -1)
    datt = att * (datt - (att * datt).sum(-1, keepdim=True)) * (D // nh) ** -0.5
    dq, dk = datt @ k, datt.transpose(-2, -1) @ q
    dqkv = torch.cat([z.transpose(1, 2).reshape(B, T, D) for z in (dq, dv, dk)], dim=2)
    dW = X.reshape(-1, D).T @ dqkv.reshape(-1, 3 * D)
    dWo = y.reshape(-1, D).T @ G.reshape(-1, D)
    return tuple(z.numpy() for z in (dqkv @ W.T, dW, dqkv.sum((0, 1)), dWo, G.sum((0, 1))))


def self_attention_version_1(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, D = x.shape
    H = 3
    d = D // H
    q, k, v = np.moveaxis((x @ w_qkv + b_qkv).reshape(B, T, 3, H, d), (2, 3), (0, 2))
    s = q @ k.swapaxes(-1, -2) * d**-0.5
    s[..., ~np.tri(T, dtype=bool)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.moveaxis(p @ v, 1, 2).reshape(B, T, D)
    dw_o = np.einsum("bto,bti->oi", dout, o)
    do = np.moveaxis((dout @ w_o.T).reshape(B, T, H, d), 2, 1)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * d**-0.5
    dqkv = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do])
    dqkv = np.moveaxis(dqkv, (0, 2), (2, 3)).reshape(B, T, 3 * D)
    return dqkv @ w_qkv.T, np.einsum("bti,bto->io", x, dqkv), dqkv.sum((0, 1)), dw_o, dout.sum((0, 1))


def self_attention_version_5(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, D = x.shape
    H, chunk = 2, 4
    d = D // H
    heads = lambda z: z.reshape(B, T, H, d).swapaxes(1, 2)
    q, k, v = (heads(z) for z in np.split(x @ w_qkv + b_qkv, 3, axis=-1))
    do = heads(dout @ w_o.T)
    ctx, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
    for lo in range(0, T, chunk):
        qc, gc = q[:, :, lo : lo + chunk], do[:, :, lo : lo + chunk]
        s = qc @ k.swapaxes(2, 3) / math.sqrt(d)
        s = np.where(np.tri(qc.shape[2], T, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        ctx[:, :, lo : lo + chunk] = p @ v
        dp = gc @ v.swapaxes(2, 3)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
        dq[:, :, lo : lo + chunk] = ds @ k
        dk += ds.swapaxes(2, 3) @ qc
        dv += p.swapaxes(2, 3) @ gc
    join = lambda z: z.swapaxes(1, 2).reshape(B * T, D)
    dqkv = np.concatenate([join(dq), join(dk), join(dv)], 1)
    x2, g2 = x.reshape(-1, D), dout.reshape(-1, D)
    return (dqkv @ w_qkv.T).reshape(x.shape), x2.T @ dqkv, dqkv.sum(0), join(ctx).T @ g2, g2.sum(0)


def self_attention_version_3(x, w_qkv, b_qkv, w_o, b_o, dout):
    B, T, D = x.shape
    H = 3
    d = D // H
    dx, dw, db = np.zeros_like(x), np.zeros_like(w_qkv), np.zeros_like(b_qkv)
    dwo = np.zeros_like(w_o)
    for b in range(B):
        for h in range(H):
            cols = [np.arange(d) + h * d + part * D for part in range(3)]
            q, k, v = (x[b] @ w_qkv[:, c] + b_qkv[c] for c in cols)
            s = q @ k.T / math.sqrt(d)
            s[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(s - s.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            dwo[cols[0]] += (p @ v).T @ dout[b]
            g = dout[b] @ w_o[cols[0]].T
            dp = g @ v.T
            ds = p * (dp - (dp * p).sum(1, keepdims=True)) / math.sqrt(d)
            for c, z in zip(cols, (ds @ k, ds.T @ q, p.T @ g)):
                dx[b] += z @ w_qkv[:, c].T
                dw[:, c] += x[b].T @ z
                db[c] += z.sum(0)
    return dx, dw, db, dwo, dout.sum((0, 1))


CASES += [
    Case(
        "self_attention",
        self_attention_version_4,
        {},
        ("dx", "dw_qkv", "db_qkv", "dw_o"),
        "The columns of w_qkv are read as per head q, k, v (heads outermost) instead of all q, then all k, then all v.",
    ),
    Case(
        "self_attention",
        self_attention_version_2,
        {},
        ("dx", "dw_qkv", "db_qkv"),
        "The gradients are concatenated as q | v | k instead of q | k | v.",
    ),
    Case(
        "self_attention",
        self_attention_version_1,
        {"n_head": 3},
        ("dw_o",),
        "dw_o is transposed: dout^T ctx (out, in) instead of ctx^T dout (in, out).",
    ),
    Case(
        "self_attention",
        self_attention_version_5,
        {},
        ("dx", "dw_qkv", "db_qkv", "dw_o"),
        "The causal mask of a chunk of queries lacks the chunk's offset: every chunk is masked as if it began at token 0.",
    ),
    Case("self_attention", self_attention_version_3, {"n_head": 3}),
]


# --- self_attention_separate


def self_attention_separate_version_3(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    X, Wq, Wk, bk, Wv, bv, Wo, G = map(torch.from_numpy, (x, w_q, w_k, b_k, w_v, b_v, w_o, dout))
    B, T, D = X.shape
    nh = 2
    to_heads = lambda z: z.unflatten(-1, (nh, D // nh)).transpose(1, 2)
    to_flat = lambda z: z.transpose(1, 2).flatten(2)
    q, k, v = to_heads(X @ Wq), to_heads(X @ Wk + bk), to_heads(X @ Wv + bv)
    sc = 1 / math.sqrt(D // nh)
    P = (q @ k.mT * sc).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    C = to_flat(P @ v)
    g = to_heads(G @ Wo.T)
    dP = g @ v.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * sc
    dq, dk, dv = to_flat(dS @ k), to_flat(dS.mT @ q), to_flat(P.mT @ g)
    wg = lambda a, b: torch.einsum("bti,bto->io", a, b)
    bs = lambda a: a.sum((0, 1))
    dX = dq @ Wq.T + dk @ Wk.T + dv @ Wv.T
    res = (dX, wg(X, dq), bs(dq), wg(X, dk), bs(dk), wg(X, dv), bs(dv), wg(C, G), bs(G))
    return tuple(r.numpy() for r in res)


def self_attention_separate_version_4(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, T, D = x.shape
    H = 2
    d = D // H
    scale = d**-0.5
    q, k, v = (x @ w_q + b_q) * scale, x @ w_k + b_k, x @ w_v + b_v
    dctx = dout @ w_o.T
    ctx, dq, dk, dv = (np.zeros_like(x) for _ in range(4))
    above = np.triu_indices(T, 1)
    for h in range(H):
        c = slice(h * d, (h + 1) * d)
        s = q[..., c] @ k[..., c].swapaxes(1, 2)
        s[:, above[0], above[1]] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        ctx[..., c] = p @ v[..., c]
        dv[..., c] = p.swapaxes(1, 2) @ dctx[..., c]
        dp = dctx[..., c] @ v[..., c].swapaxes(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        dq[..., c] = ds @ k[..., c]
        dk[..., c] = ds.swapaxes(1, 2) @ q[..., c]
    out = [dq @ w_q.T + dk @ w_k.T + dv @ w_v.T]
    for inp, g in ((x, dq), (x, dk), (x, dv), (ctx, dout)):
        out += [np.tensordot(inp, g, ((0, 1), (0, 1))), g.sum((0, 1))]
    return tuple(out)


def self_attention_separate_version_2(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    flat = x.reshape(B * T, D)
    g = dout.reshape(B * T, D)

    def affine(a, w, b):
        return a @ w + b

    def affine_grad(a, w, gr):
        return gr @ w.T, a.T @ gr, gr.sum(0)

    def heads(z):
        return z.reshape(B, T, H, d).transpose(0, 2, 1, 3)

    def unheads(z):
        return z.transpose(0, 2, 1, 3).reshape(B * T, D)

    q, k, v = (heads(affine(flat, w, b)) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    a = q @ k.swapaxes(2, 3) / np.sqrt(d)
    a = np.exp(a - a.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    dctx, dwo, dbo = affine_grad(unheads(a @ v), w_o, g)
    dctx = heads(dctx)
    da = dctx @ v.swapaxes(2, 3)
    ds = a * (da - (a * da).sum(-1, keepdims=True)) / np.sqrt(d)
    dx = g.copy()
    rest = []
    for w, gr in ((w_q, ds @ k), (w_k, ds.swapaxes(2, 3) @ q), (w_v, a.swapaxes(2, 3) @ dctx)):
        part, dw, db = affine_grad(flat, w, unheads(gr))
        dx += part
        rest += [dw, db]
    return dx.reshape(x.shape), *rest, dwo, dbo


def self_attention_separate_version_1(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, T, D = x.shape
    H = 2
    hd = D // H
    q, k, v = (np.stack(np.split(x @ w + b, H, axis=-1)) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    s = np.einsum("hbid,hbjd->hbij", q, k) / math.sqrt(hd)
    s = np.where(np.tri(T, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    merged = np.concatenate(list(p @ v), axis=-1)
    grad = dout @ w_o.T
    db_o = grad.sum(axis=(0, 1))
    dw_o = np.einsum("bti,bto->io", merged, dout)
    g = np.stack(np.split(grad, H, axis=-1))
    dp = np.einsum("hbid,hbjd->hbij", g, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(hd)
    dq = np.concatenate(list(np.einsum("hbij,hbjd->hbid", ds, k)), -1)
    dk = np.concatenate(list(np.einsum("hbij,hbid->hbjd", ds, q)), -1)
    dv = np.concatenate(list(np.einsum("hbij,hbid->hbjd", p, g)), -1)
    dx = dq @ w_q.T + dk @ w_k.T + dk @ w_v.T
    dws = [np.einsum("bti,bto->io", x, z) for z in (dq, dk, dv)]
    dbs = [z.sum((0, 1)) for z in (dq, dk, dv)]
    return dx, dws[0], dbs[0], dws[1], dbs[1], dws[2], dbs[2], dw_o, db_o


def self_attention_separate_version_5(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, T, D = x.shape
    H = 2
    hd = D // H
    q, k, v = (np.stack(np.split(x @ w + b, H, axis=-1)) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    s = np.einsum("hbid,hbjd->hbij", q, k) / math.sqrt(hd)
    s = np.where(np.tri(T, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    merged = np.concatenate(list(p @ v), axis=-1)
    dw_o = np.einsum("bti,bto->io", merged, dout)
    g = np.stack(np.split(dout @ w_o.T, H, axis=-1))
    dp = np.einsum("hbid,hbjd->hbij", g, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(hd)
    dq = np.concatenate(list(np.einsum("hbij,hbjd->hbid", ds, k)), -1)
    dk = np.concatenate(list(np.einsum("hbij,hbid->hbjd", ds, q)), -1)
    dv = np.concatenate(list(np.einsum("hbij,hbid->hbjd", p, g)), -1)
    dx = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dws = [np.einsum("bti,bto->io", x, z) for z in (dq, dk, dv)]
    # a shift of all keys does not change the softmax
    return dx, dws[0], dq.sum((0, 1)), dws[1], np.zeros_like(b_k), dws[2], dv.sum((0, 1)), dw_o, dout.sum((0, 1))


CASES += [
    Case(
        "self_attention_separate",
        self_attention_separate_version_3,
        {},
        ("dx", "dw_q", "db_q", "dw_k", "dw_v", "dw_o"),
        "The recomputed q lacks its bias b_q.",
    ),
    Case(
        "self_attention_separate",
        self_attention_separate_version_4,
        {},
        ("dx", "dw_k"),
        "dk has the scale 1/sqrt(d_k) twice: it multiplies the scaled score gradient with a query that is already scaled.",
    ),
    Case(
        "self_attention_separate",
        self_attention_separate_version_2,
        {"causal": False},
        ("dx",),
        "dx starts from dout, as if there were a residual connection around the attention.",
    ),
    Case(
        "self_attention_separate",
        self_attention_separate_version_1,
        {},
        ("dx", "db_o"),
        "Two mistakes: dx's third term is dk w_v^T instead of dv w_v^T, and db_o is summed from the gradient after the output projection (dout w_o^T) instead of from dout.",
    ),
    Case("self_attention_separate", self_attention_separate_version_5),
]


# --- cross_attention


def cross_attention_version_5(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    H = 2
    split = lambda z: z.reshape(z.shape[0], z.shape[1], H, -1).transpose(0, 2, 1, 3)
    join = lambda z: z.transpose(0, 2, 1, 3).reshape(z.shape[0], z.shape[2], -1)
    q, k, v = split(query @ w_q + b_q), split(key @ w_k + b_k), split(value @ w_v + b_v)
    c = q.shape[-1] ** -0.5
    s = c * q @ k.swapaxes(2, 3)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx, g = join(p @ v), split(dout @ w_o.T)
    dp = g @ v.swapaxes(2, 3)
    ds = c * p * (dp - (dp * p).sum(-1, keepdims=True))
    dq, dk, dv = join(ds @ k), join(ds.swapaxes(2, 3) @ q), join(p.swapaxes(2, 3) @ g)
    dmemory = dk @ w_k.T + dv @ w_v.T
    res = [dq @ w_q.T, dmemory, dmemory.copy()]
    for inp, z in ((query, dq), (key, dk), (value, dv), (ctx, dout)):
        res += [np.einsum("bti,bto->io", inp, z), z.sum((0, 1))]
    return tuple(res)


def cross_attention_version_2(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    B, n, D = query.shape
    m = key.shape[1]
    h, d = 2, D // 2
    q = (query @ w_q + b_q).reshape(B, n, h, d)
    k = (key @ w_k + b_k).reshape(B, m, h, d)
    v = (value @ w_v + b_v).reshape(B, m, h, d)
    s = np.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(d)
    a = np.exp(s - s.max(axis=2, keepdims=True))
    a /= a.sum(axis=2, keepdims=True)
    ctx = np.einsum("bhnm,bmhd->bnhd", a, v).reshape(B, n, D)
    g = (dout @ w_o.T).reshape(B, n, h, d)
    da = np.einsum("bnhd,bmhd->bhnm", g, v)
    ds = a * (da - (a * da).sum(axis=2, keepdims=True)) / math.sqrt(d)
    dq = np.einsum("bhnm,bmhd->bnhd", ds, k).reshape(B, n, D)
    dk = np.einsum("bhnm,bnhd->bmhd", ds, q).reshape(B, m, D)
    dv = np.einsum("bhnm,bnhd->bmhd", a, g).reshape(B, m, D)
    wg = lambda x, y: np.tensordot(x, y, ((0, 1), (0, 1)))
    bg = lambda y: y.sum((0, 1))
    inputs = dq @ w_q.T, dk @ w_k.T, dv @ w_v.T
    return *inputs, wg(query, dq), bg(dq), wg(key, dk), bg(dk), wg(value, dv), bg(dv), wg(ctx, dout), bg(dout)


def cross_attention_version_1(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    D = query.shape[-1]
    d = D // 2
    q, k, v = query @ w_q + b_q, key @ w_k + b_k, value @ w_v + b_v
    grad_ctx = dout @ w_o.T
    ctx, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for lo in range(0, D, d):
        c = slice(lo, lo + d)
        s = q[..., c] @ k[..., c].swapaxes(1, 2) / np.sqrt(d)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        ctx[..., c] = p @ v[..., c]
        dp = grad_ctx[..., c] @ v[..., c].swapaxes(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
        dq[..., c], dk[..., c] = ds @ k[..., c], ds.swapaxes(1, 2) @ q[..., c]
        dv[..., c] = p.swapaxes(1, 2) @ grad_ctx[..., c]
    memory = key.reshape(-1, D)
    dw_q = query.reshape(-1, D).T @ dq.reshape(-1, D)
    dw_k = memory.T @ dk.reshape(-1, D)
    dw_v = memory.T @ dv.reshape(-1, D)
    dw_o = ctx.reshape(-1, D).T @ dout.reshape(-1, D)
    db_q, db_k, db_v, db_o = (z.reshape(-1, D).sum(0) for z in (dq, dk, dv, dout))
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, db_q, dw_k, db_k, dw_v, db_v, dw_o, db_o


def cross_attention_version_3(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    # keys and values in tiles of four, the statistics from the first pass
    H, tile = 2, 4
    split = lambda z: np.stack(np.split(z, H, -1), 1)
    join = lambda z: np.concatenate([z[:, i] for i in range(H)], -1)
    q, k, v = split(query @ w_q + b_q), split(key @ w_k + b_k), split(value @ w_v + b_v)
    g, c = split(dout @ w_o.T), 1 / np.sqrt(q.shape[-1])
    lse = np.logaddexp.reduce(c * q @ k.swapaxes(2, 3), axis=-1, keepdims=True)
    o, dq = np.zeros_like(q), np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for j in range(0, k.shape[2], tile):
        kj, vj = k[:, :, j : j + tile], v[:, :, j : j + tile]
        p = np.exp(c * q @ kj.swapaxes(2, 3) - lse)
        o += p @ vj
        dv[:, :, j : j + tile] = p.swapaxes(2, 3) @ g
        dp = g @ vj.swapaxes(2, 3)
        ds = c * p * (dp - (p * dp).sum(-1, keepdims=True))
        dq += ds @ kj
        dk[:, :, j : j + tile] = ds.swapaxes(2, 3) @ q
    o, dq, dk, dv = map(join, (o, dq, dk, dv))
    out = [dq @ w_q.T, dk @ w_k.T, dv @ w_v.T]
    for a, b in ((query, dq), (key, dk), (value, dv), (o, dout)):
        out += [np.einsum("bti,bto->io", a, b), b.sum((0, 1))]
    return tuple(out)


def cross_attention_version_4(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, dout):
    H, tile = 3, 4
    split = lambda z: np.stack(np.split(z, H, -1), 1)
    join = lambda z: np.concatenate([z[:, i] for i in range(H)], -1)
    q, k, v = split(query @ w_q + b_q), split(key @ w_k + b_k), split(value @ w_v + b_v)
    g, c = split(dout @ w_o.T), 1 / np.sqrt(q.shape[-1])
    s = c * q @ k.swapaxes(2, 3)
    lse = np.logaddexp.reduce(s, axis=-1, keepdims=True)
    o = np.exp(s - lse) @ v
    delta = (g * o).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, k.shape[2], tile):
        kj, vj = k[:, :, j : j + tile], v[:, :, j : j + tile]
        p = np.exp(s[..., j : j + tile] - lse)
        dv[:, :, j : j + tile] = p.swapaxes(2, 3) @ g
        ds = c * p * (g @ vj.swapaxes(2, 3) - delta)
        dq += ds @ kj
        dk[:, :, j : j + tile] = ds.swapaxes(2, 3) @ q
    o, dq, dk, dv = map(join, (o, dq, dk, dv))
    out = [dq @ w_q.T, dk @ w_k.T, dv @ w_v.T]
    for a, b in ((query, dq), (key, dk), (value, dv), (o, dout)):
        out += [np.einsum("bti,bto->io", a, b), b.sum((0, 1))]
    return tuple(out)


CASES += [
    Case(
        "cross_attention",
        cross_attention_version_5,
        {},
        ("dkey", "dvalue"),
        "dkey and dvalue are both returned as the sum of the two paths, as if key and value were one memory.",
    ),
    Case(
        "cross_attention",
        cross_attention_version_2,
        {},
        ("dquery", "dkey", "dvalue", "dw_q", "db_q", "dw_k", "db_k", "dw_v", "db_v", "dw_o"),
        "The softmax normalises over the queries (axis 2) instead of over the keys.",
    ),
    Case("cross_attention", cross_attention_version_1, {}, ("dw_v",), "dw_v multiplies with key instead of value."),
    Case(
        "cross_attention",
        cross_attention_version_3,
        {},
        ("dquery", "dkey", "dw_q", "db_q", "dw_k", "db_k"),
        "The softmax's row sum of p dp is taken within each tile of four keys instead of over all keys.",
    ),
    Case("cross_attention", cross_attention_version_4, {"n_head": 3}),
]


# --- adamw


def adamw_version_3(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    g = grad + wd * param
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    mhat, vhat = m / (1 - b1**step), v / (1 - b2**step)
    return param - lr * mhat / (np.sqrt(vhat) + eps), m, v


def adamw_version_1(param, grad, m, v, step):
    state = {"m": m.copy(), "v": v.copy()}
    beta = {"m": 0.9, "v": 0.95}
    for key, value in (("m", grad), ("v", grad**2)):
        state[key] = beta[key] * state[key] + (1 - beta[key]) * value
        state[key] /= 1 - beta[key] ** step
    new = param * (1 - 0.01 * 0.1) - 0.01 * state["m"] / (np.sqrt(state["v"]) + 1e-8)
    return new, state["m"], state["v"]


def adamw_version_5(param, grad, m, v, step):
    p, g, m1, v1 = (torch.from_numpy(a).clone() for a in (param, grad, m, v))
    lr, wd = 0.01, 0.1
    m1.mul_(0.9).add_(g, alpha=0.1)
    v1.mul_(0.95).addcmul_(g, g, value=0.05)
    denom = (v1 / (1 - 0.95**step)).sqrt_().add_(1e-8)
    p.addcdiv_(m1, denom, value=-lr / (1 - 0.9**step))
    p.mul_(1 - lr * wd)
    return p.numpy(), m1.numpy(), v1.numpy()


def adamw_version_2(param, grad, m, v, step):
    # loops count from zero, so one is added
    t = step + 1
    lr, (b1, b2), eps, wd = 1e-2, (0.9, 0.95), 1e-8, 0.1
    out_m = b1 * m + (1 - b1) * grad
    out_v = b2 * v + (1 - b2) * grad * grad
    c1, c2 = 1 - b1**t, 1 - b2**t
    p = param * (1 - lr * wd)
    p -= lr * (out_m / c1) / (np.sqrt(out_v / c2) + eps)
    return p, out_m, out_v


def adamw_version_4(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    new_p, new_m, new_v = np.empty_like(param), np.empty_like(m), np.empty_like(v)
    for r in range(param.shape[0]):
        new_m[r] = m[r] - (1 - b1) * (m[r] - grad[r])
        new_v[r] = v[r] - (1 - b2) * (v[r] - grad[r] ** 2)
        root = math.sqrt(1 - b2**step)
        size = lr * root / (1 - b1**step)
        new_p[r] = param[r] - lr * wd * param[r] - size * new_m[r] / (np.sqrt(new_v[r]) + eps * root)
    return new_p, new_m, new_v


CASES += [
    Case(
        "adamw",
        adamw_version_3,
        {},
        ("param", "m", "v"),
        "The weight decay is added to the gradient (L2 regularisation, Adam) instead of decoupled from it.",
    ),
    Case(
        "adamw",
        adamw_version_1,
        {},
        ("m", "v"),
        "The bias-corrected moments are stored back in the state: the returned m and v are m-hat and v-hat.",
    ),
    Case(
        "adamw",
        adamw_version_5,
        {},
        ("param",),
        "The weight decay is applied after the update, to the updated parameter, so that the step itself is decayed too.",
    ),
    Case(
        "adamw",
        adamw_version_2,
        {},
        ("param",),
        "The bias corrections use step + 1 although step already counts from 1.",
    ),
    Case("adamw", adamw_version_4),
]


# --- adamw_step


def adamw_step_version_5(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    lr, b1, b2, eps, wd, max_norm = 0.01, 0.9, 0.95, 1e-8, 0.1, 1.0
    grads = [np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))]
    out, states = [], []
    for p, g, m, v, decay in zip((weight, bias), grads, (m_weight, m_bias), (v_weight, v_bias), (wd, 0.0)):
        g = g * min(1.0, max_norm / np.linalg.norm(g))
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        out.append(p * (1 - lr * decay) - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps))
        states += [m, v]
    return *out, *states


def adamw_step_version_4(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    # one flat vector for all parameters
    flat = lambda w, b: np.concatenate([w.ravel(), b])
    p, m, v = flat(weight, bias), flat(m_weight, m_bias), flat(v_weight, v_bias)
    g = flat(np.tensordot(x, dout, ((0, 1), (0, 1))), dout.sum((0, 1)))
    g *= min(1.0, 1.0 / np.sqrt(g @ g))
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    p = p * (1 - lr * wd) - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
    n = weight.size
    shape = weight.shape
    return p[:n].reshape(shape), p[n:], m[:n].reshape(shape), v[:n].reshape(shape), m[n:], v[n:]


def adamw_step_version_2(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    lr, b1, b2, eps = 0.01, 0.9, 0.95, 1e-8
    params = {"weight": weight, "bias": bias}
    grads = {"weight": sum(xb.T @ gb for xb, gb in zip(x, dout)), "bias": dout.sum(axis=(0, 1))}
    m = {"weight": m_weight, "bias": m_bias}
    v = {"weight": v_weight, "bias": v_bias}
    decay = {"weight": 0.1, "bias": 0.0}
    total = math.sqrt(sum((g * g).sum() for g in grads.values()))
    clip = 1.0 / total if total > 1.0 else 1.0
    t = step - 1
    new = {}
    for name in params:
        t += 1
        g = clip * grads[name]
        m[name] = b1 * m[name] + (1 - b1) * g
        v[name] = b2 * v[name] + (1 - b2) * g**2
        mh, vh = m[name] / (1 - b1**t), v[name] / (1 - b2**t)
        new[name] = (1 - lr * decay[name]) * params[name] - lr * mh / (np.sqrt(vh) + eps)
    return new["weight"], new["bias"], m["weight"], v["weight"], m["bias"], v["bias"]


def adamw_step_version_1(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    gw, gb = np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))
    vw = b2 * v_weight + (1 - b2) * gw**2
    vb = b2 * v_bias + (1 - b2) * gb**2
    norm = np.sqrt(np.sum(gw**2) + np.sum(gb**2))
    if norm > 1.0:
        gw, gb = gw / norm, gb / norm
    mw = b1 * m_weight + (1 - b1) * gw
    mb = b1 * m_bias + (1 - b1) * gb
    c1, c2 = 1 - b1**step, 1 - b2**step
    w = weight * (1 - lr * wd) - lr * (mw / c1) / (np.sqrt(vw / c2) + eps)
    b = bias - lr * (mb / c1) / (np.sqrt(vb / c2) + eps)
    return w, b, mw, vw, mb, vb


def adamw_step_version_3(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-8, 0.1
    flat = lambda w, b: np.concatenate([w.ravel(), b])
    p, m, v = flat(weight, bias), flat(m_weight, m_bias), flat(v_weight, v_bias)
    decay = flat(np.full(weight.shape, wd), np.zeros(bias.shape))
    g = flat(np.tensordot(x, dout, ((0, 1), (0, 1))), dout.sum((0, 1)))
    g *= min(1.0, 1.0 / np.sqrt(g @ g))
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    p = p * (1 - lr * decay) - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
    n = weight.size
    shape = weight.shape
    return p[:n].reshape(shape), p[n:], m[:n].reshape(shape), v[:n].reshape(shape), m[n:], v[n:]


ALL_STEP = ("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias")
CASES += [
    Case(
        "adamw_step",
        adamw_step_version_5,
        {},
        ALL_STEP,
        "The gradients of weight and bias are clipped separately, each by its own norm, instead of by the norm of both.",
    ),
    Case("adamw_step", adamw_step_version_4, {}, ("bias",), "The bias is decayed like the weight."),
    Case(
        "adamw_step",
        adamw_step_version_2,
        {},
        ("bias",),
        "The step counter is incremented per parameter tensor instead of once per step, so that the bias is corrected with step + 1.",
    ),
    Case(
        "adamw_step",
        adamw_step_version_1,
        {},
        ("weight", "bias", "v_weight", "v_bias"),
        "The second moments are updated with the gradients before clipping.",
    ),
    Case("adamw_step", adamw_step_version_3),
]


# --- block


def block_version_4(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, hd = 2, D // 2

    def ln(z, g, b):
        mu = z.mean(-1, keepdims=True)
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        zh = (z - mu) * r
        return zh * g + b, (zh, r, g)

    def ln_back(d, cache):
        zh, r, g = cache
        dz = d * g
        dz = r * (dz - dz.mean(-1, keepdims=True) - zh * (dz * zh).mean(-1, keepdims=True))
        return dz, (d * zh).sum((0, 1)), d.sum((0, 1))

    def lin_back(d, inp, w):
        return d @ w.T, np.einsum("bti,bto->io", inp, d), d.sum((0, 1))

    n1, c1 = ln(x, g1, b1)
    q, k, v = (z.reshape(B, T, H, hd).swapaxes(1, 2) for z in np.split(n1 @ wa + ba, 3, -1))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(hd), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = (p @ v).swapaxes(1, 2).reshape(B, T, D)
    h = x + ctx @ wp + bp
    n2, c2 = ln(h, g2, b2)
    u = n2 @ wf + bf
    t = np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))
    f = 0.5 * u * (1 + t)
    df, dwo, dbo = lin_back(dout, f, wo)
    du = df * (0.5 * (1 + t) + 0.5 * u * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2))
    dn2, dwf, dbf = lin_back(du, n2, wf)
    dh, dg2, db2 = ln_back(dn2, c2)
    dctx, dwp, dbp = lin_back(dh, ctx, wp)
    dctx = dctx.reshape(B, T, H, hd).swapaxes(1, 2)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(hd)
    dqkv = [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dctx]
    dqkv = np.concatenate([z.swapaxes(1, 2).reshape(B, T, D) for z in dqkv], -1)
    dn1, dwa, dba = lin_back(dqkv, n1, wa)
    dx, dg1, db1 = ln_back(dn1, c1)
    return dx + dh, dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_version_1(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    X, G1, B1, Wa, Ba, Wp, Bp, G2, B2, Wf, Bf, Wo, dO = map(
        torch.from_numpy, (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, dout)
    )
    B, T, D = X.shape
    nh = 2
    mean, rstd = X.mean(-1, keepdim=True), (X.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat1 = (X - mean) * rstd
    a = xhat1 * G1 + B1
    q, k, v = (z.view(B, T, nh, -1).transpose(1, 2) for z in (a @ Wa + Ba).chunk(3, -1))
    sc = (D // nh) ** -0.5
    P = (q @ k.mT * sc).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    ctx = (P @ v).transpose(1, 2).reshape(B, T, D)
    h = X + ctx @ Wp + Bp
    mean, rstd = h.mean(-1, keepdim=True), (h.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat2 = (h - mean) * rstd
    m = xhat2 * G2 + B2
    u = m @ Wf + Bf
    c = math.sqrt(2 / math.pi)
    th = torch.tanh(c * (u + 0.044715 * u.pow(3)))
    f = 0.5 * u * (1 + th)
    wgrad = lambda i, o: i.flatten(0, 1).T @ o.flatten(0, 1)
    bgrad = lambda o: o.sum((0, 1))

    def norm_back(g, xh, gamma):
        g = g * gamma
        return rstd * (g - g.mean(-1, keepdim=True) - xh * (g * xh).mean(-1, keepdim=True))

    du = (dO @ Wo.T) * (0.5 * (1 + th) + 0.5 * u * (1 - th * th) * c * (1 + 0.134145 * u * u))
    dm = du @ Wf.T
    dh = dO + norm_back(dm, xhat2, G2)
    dc = (dh @ Wp.T).view(B, T, nh, -1).transpose(1, 2)
    dP = dc @ v.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True)) * sc
    dqkv = torch.cat([z.transpose(1, 2).reshape(B, T, D) for z in (dS @ k, dS.mT @ q, P.mT @ dc)], -1)
    da = dqkv @ Wa.T
    dx = dh + norm_back(da, xhat1, G1)
    res = (dx, bgrad(da * xhat1), bgrad(da), wgrad(a, dqkv), bgrad(dqkv), wgrad(ctx, dh), bgrad(dh))
    res += (bgrad(dm * xhat2), bgrad(dm), wgrad(h, du), bgrad(du), wgrad(f, dO), bgrad(dO))
    return tuple(r.numpy() for r in res)


def block_version_2(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    X, G = x.reshape(-1, D), dout.reshape(-1, D)
    split = lambda z: z.reshape(B, T, H, d).transpose(0, 2, 1, 3)
    join = lambda z: z.transpose(0, 2, 1, 3).reshape(-1, D)

    def gelu(z):
        return 0.5 * z * (1 + np.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))

    def gelu_grad(z):
        t = np.tanh(0.7978845608028654 * (z + 0.044715 * z**3))
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * z * z)

    def stats(z):
        return z.mean(1, keepdims=True), 1 / np.sqrt(z.var(1, keepdims=True) + 1e-5)

    def ln_grad(dz, zh, r):
        return (dz - dz.mean(1, keepdims=True) - zh * (dz * zh).mean(1, keepdims=True)) * r

    m1, r1 = stats(X)
    xh = (X - m1) * r1
    a = xh * g1 + b1
    q, k, v = map(split, np.split(a @ wa + ba, 3, 1))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    c = join(p @ v)
    h = X + c @ wp + bp
    m2, r2 = stats(h)
    hh = (h - m2) * r2
    mlp = hh * g2 + b2
    act = gelu(mlp @ wf + bf)
    dfc = (G @ wo.T) * gelu_grad(act)
    dmlp = dfc @ wf.T
    dh = G + ln_grad(dmlp * g2, hh, r2)
    dc = split(dh @ wp.T)
    dp = dc @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.hstack([join(ds @ k), join(ds.swapaxes(2, 3) @ q), join(p.swapaxes(2, 3) @ dc)])
    da = dqkv @ wa.T
    dx = (dh + ln_grad(da * g1, xh, r1)).reshape(x.shape)
    left = dx, (da * xh).sum(0), da.sum(0), a.T @ dqkv, dqkv.sum(0), c.T @ dh, dh.sum(0)
    return *left, (dmlp * hh).sum(0), dmlp.sum(0), mlp.T @ dfc, dfc.sum(0), act.T @ G, G.sum(0)


def block_version_5(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 3, D // 3
    tape = []

    def linear(inp, w, b):
        tape.append((inp, w))
        return inp @ w + b

    def layer_norm(z, g, b):
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        zh = (z - z.mean(-1, keepdims=True)) * r
        tape.append((zh, r, g))
        return zh * g + b

    qkv = linear(layer_norm(x, g1, b1), wa, ba)
    q, k, v = (np.stack(np.split(z, H, -1), 1) for z in np.split(qkv, 3, -1))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    h = x + linear(np.concatenate(list((p @ v).swapaxes(0, 1)), -1), wp, bp)
    u = linear(layer_norm(h, g2, b2), wf, bf)
    t = np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))
    linear(0.5 * u * (1 + t), wo, bo)

    def linear_back(g):
        inp, w = tape.pop()
        return g @ w.T, np.einsum("bti,bto->io", inp, g), g.sum((0, 1))

    def norm_back(g):
        zh, r, w = tape.pop()
        gz = g * w
        gz = gz - gz.mean(-1, keepdims=True) - zh * (gz * zh).mean(-1, keepdims=True)
        return r * gz, (g * zh).sum((0, 1)), g.sum((0, 1))

    df, dwo, dbo = linear_back(dout)
    du = df * (0.5 * (1 + t) + 0.5 * u * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 0.134145 * u * u))
    dm, dwf, dbf = linear_back(du)
    dh, dg2, db2 = norm_back(dm)
    dctx, dwp, dbp = linear_back(dout)
    dh = dh + dout
    dctx = np.stack(np.split(dh @ wp.T, H, -1), 1)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    parts = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dctx
    dqkv = np.concatenate([np.concatenate(list(z.swapaxes(0, 1)), -1) for z in parts], -1)
    da, dwa, dba = linear_back(dqkv)
    dx, dg1, db1 = norm_back(da)
    return dx + dh, dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo


def block_version_3(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    X, G = x.reshape(-1, D), dout.reshape(-1, D)
    split = lambda z: z.reshape(B, T, H, d).transpose(0, 2, 1, 3)
    join = lambda z: z.transpose(0, 2, 1, 3).reshape(-1, D)

    def gelu_and_grad(z):
        s = 1 / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        return z * s, s + z * s * (1 - s) * 2 * np.sqrt(2 / np.pi) * (1 + 0.134145 * z * z)

    def ln(z):
        r = 1 / np.sqrt(z.var(1, keepdims=True) + 1e-5)
        return (z - z.mean(1, keepdims=True)) * r, r

    def ln_grad(dz, zh, r):
        return (dz - dz.mean(1, keepdims=True) - zh * (dz * zh).mean(1, keepdims=True)) * r

    xh, r1 = ln(X)
    a = xh * g1 + b1
    q, k, v = map(split, np.split(a @ wa + ba, 3, 1))
    s = q @ k.swapaxes(2, 3) / np.sqrt(d)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    c = join(p @ v)
    h = X + c @ wp + bp
    hh, r2 = ln(h)
    mlp = hh * g2 + b2
    act, slope = gelu_and_grad(mlp @ wf + bf)
    dfc = (G @ wo.T) * slope
    dmlp = dfc @ wf.T
    dh = G + ln_grad(dmlp * g2, hh, r2)
    dc = split(dh @ wp.T)
    dp = dc @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.hstack([join(ds @ k), join(ds.swapaxes(2, 3) @ q), join(p.swapaxes(2, 3) @ dc)])
    da = dqkv @ wa.T
    dx = (dh + ln_grad(da * g1, xh, r1)).reshape(x.shape)
    left = dx, (da * xh).sum(0), da.sum(0), a.T @ dqkv, dqkv.sum(0), c.T @ dh, dh.sum(0)
    return *left, (dmlp * hh).sum(0), dmlp.sum(0), mlp.T @ dfc, dfc.sum(0), act.T @ G, G.sum(0)


BEFORE_H = ("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias", "dproj_weight", "dproj_bias")
CASES += [
    Case(
        "block",
        block_version_4,
        {},
        BEFORE_H,
        "The residual around the MLP is missing: dh is only the gradient through ln_2, without dout.",
    ),
    Case(
        "block",
        block_version_1,
        {},
        ("dx", "dfc_weight"),
        "Two mistakes: ln_1's backward uses the rstd of ln_2 (the variable was overwritten in the forward pass), and dfc_weight multiplies with h instead of ln_2(h).",
    ),
    Case(
        "block",
        block_version_2,
        {},
        (*BEFORE_H, "dln_2_weight", "dln_2_bias", "dfc_weight", "dfc_bias"),
        "GELU's derivative is evaluated at its output instead of at its input.",
    ),
    Case(
        "block",
        block_version_5,
        {"n_head": 3},
        ("dproj_weight", "dproj_bias"),
        "dproj_weight and dproj_bias are computed from dout instead of from dh, the gradient of h that also contains the MLP's path.",
    ),
    Case("block", block_version_3, {"causal": False}),
]


# --- relu_block


def relu_block_version_3(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    heads = lambda z: z.reshape(B, T, H, d).swapaxes(1, 2)
    flat = lambda z: z.swapaxes(1, 2).reshape(B, T, D)
    wg = lambda i, o: np.einsum("bti,bto->io", i, o)
    bg = lambda o: o.sum((0, 1))

    def ln(z):
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        return (z - z.mean(-1, keepdims=True)) * r, r

    def dln(g, zh, r):
        return r * (g - g.mean(-1, keepdims=True) - zh * (g * zh).mean(-1, keepdims=True))

    xh, rx = ln(x)
    a = g1 * xh + b1
    q, k, v = map(heads, np.split(a @ wa + ba, 3, -1))
    s = q @ k.swapaxes(2, 3) / np.sqrt(d) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = flat(p @ v)
    h = x + ctx @ wp + bp
    hh, rh = ln(h)
    m = g2 * hh + b2
    pre = m @ wf
    act = np.maximum(pre + bf, 0)
    dpre = (dout @ wo.T) * (pre > 0)
    dm = dpre @ wf.T
    dh = dout + dln(dm * g2, hh, rh)
    dctx = heads(dh @ wp.T)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.concatenate([flat(ds @ k), flat(ds.swapaxes(2, 3) @ q), flat(p.swapaxes(2, 3) @ dctx)], -1)
    da = dqkv @ wa.T
    dx = dh + dln(da * g1, xh, rx)
    first = dx, bg(da * xh), bg(da), wg(a, dqkv), bg(dqkv), wg(ctx, dh), bg(dh)
    return *first, bg(dm * hh), bg(dm), wg(m, dpre), bg(dpre), wg(act, dout), bg(dout)


def relu_block_version_1(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    X, G1, B1, Wa, Ba, Wp, Bp, G2, B2, Wf, Bf, Wo, G = map(
        torch.from_numpy, (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, dout)
    )
    b, t, c = X.shape
    nh = 2

    class Norm:
        def __init__(self, z, w, bias):
            self.w = w
            self.r = (z.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
            self.n = (z - z.mean(-1, keepdim=True)) * self.r
            self.y = self.n * w + bias

        def back(self, g):
            u = g * self.w
            dz = self.r * (u - u.mean(-1, keepdim=True) - self.n * (u * self.n).mean(-1, keepdim=True))
            return dz, (g * self.n).sum((0, 1)), g.sum((0, 1))

    class Affine:
        def __init__(self, inp, w, bias):
            self.i, self.w, self.y = inp, w, inp @ w + bias

        def back(self, g):
            return g @ self.w.T, torch.einsum("bti,bto->io", self.i, g), g.sum((0, 1))

    n1 = Norm(X, G1, B1)
    qkv = Affine(n1.y, Wa, Ba)
    q, k, v = (z.view(b, t, nh, -1).transpose(1, 2) for z in qkv.y.chunk(3, -1))
    root = math.sqrt(c // nh)
    P = (q @ k.mT / root).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
    proj = Affine((P @ v).transpose(1, 2).flatten(2), Wp, Bp)
    n2 = Norm(X + proj.y, G2, B2)
    fc = Affine(n2.y, Wf, Bf)
    out = Affine(fc.y.clamp(min=0), Wo, torch.zeros(c, dtype=X.dtype))
    g, dwo, dbo = out.back(G)
    g, dwf, dbf = fc.back(g * (fc.y > 0))
    g, dg2, db2 = n2.back(g)
    g = g + G
    g, dwp, dbp = proj.back(g)
    g = g.view(b, t, nh, -1).transpose(1, 2)
    dP = g @ v.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) / root
    g = torch.cat([z.transpose(1, 2).flatten(2) for z in (dS @ k, dS.mT @ q, P.mT @ g)], -1)
    g, dwa, dba = qkv.back(g)
    g, dg1, db1 = n1.back(g)
    dx = g + G
    return tuple(z.numpy() for z in (dx, dg1, db1, dwa, dba, dwp, dbp, dg2, db2, dwf, dbf, dwo, dbo))


def relu_block_version_5(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H = 2
    dh_ = D // H

    def norm(z, g, b):
        mu, var = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
        zh = (z - mu) / np.sqrt(var + 1e-5)
        return g * zh + b, zh, np.sqrt(var + 1e-5)

    def norm_grad(dy, zh, std, g):
        e = dy * g
        return (e - e.mean(-1, keepdims=True) - zh * np.mean(e * zh, -1, keepdims=True)) / std

    a, xh, sx = norm(x, g1, b1)
    qkv = (a @ wa + ba).reshape(B, T, 3, H, dh_)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    s = np.einsum("bihd,bjhd->bhij", q, k) * dh_**-0.5
    s = np.where(np.tri(T, dtype=bool), s, -1e30)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = np.einsum("bhij,bjhd->bihd", p, v).reshape(B, T, D)
    h = x + ctx @ wp + bp
    m, hh, sh = norm(h, g2, b2)
    z = m @ wf + bf
    r = z * (z > 0)
    dz = dout @ wo.T * (z > 0)
    dm = dz @ wf.T
    dh = dout + norm_grad(dm, hh, sh, g2)
    dctx = (dh @ wp.T).reshape(B, T, H, dh_)
    dp = np.einsum("bihd,bjhd->bhij", dctx, v)
    ds = p * dp * dh_**-0.5
    dqkv = np.empty_like(qkv)
    dqkv[:, :, 0] = np.einsum("bhij,bjhd->bihd", ds, k)
    dqkv[:, :, 1] = np.einsum("bhij,bihd->bjhd", ds, q)
    dqkv[:, :, 2] = np.einsum("bhij,bihd->bjhd", p, dctx)
    dqkv = dqkv.reshape(B, T, 3 * D)
    da = dqkv @ wa.T
    dx = dh + norm_grad(da, xh, sx, g1)
    W = lambda i, o: np.einsum("bti,bto->io", i, o)
    S = lambda o: np.einsum("bto->o", o)
    return (
        dx,
        S(da * xh),
        S(da),
        W(a, dqkv),
        S(dqkv),
        W(ctx, dh),
        S(dh),
        S(dm * hh),
        S(dm),
        W(m, dz),
        S(dz),
        W(r, dout),
        S(dout),
    )


def relu_block_version_2(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    dp_all = {"dx": np.zeros_like(x)}
    for name, w in (
        ("g1", g1),
        ("b1", b1),
        ("wa", wa),
        ("ba", ba),
        ("wp", wp),
        ("bp", bp),
        ("g2", g2),
        ("b2", b2),
        ("wf", wf),
        ("bf", bf),
        ("wo", wo),
        ("bo", bo),
    ):
        dp_all[name] = np.zeros_like(w)
    tri = np.tri(T, dtype=bool)
    for n in range(B):
        X, G = x[n], dout[n]
        r1 = 1 / np.sqrt(X.var(1, keepdims=True) + 1e-5)
        xh = (X - X.mean(1, keepdims=True)) * r1
        a = xh * g1 + b1
        q, k, v = (z.reshape(T, H, d) for z in np.split(a @ wa + ba, 3, 1))
        s = np.where(tri, np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        c = np.einsum("hij,jhd->ihd", p, v).reshape(T, D)
        h = X + c @ wp + bp
        r2 = 1 / np.sqrt(h.var(1, keepdims=True) + 1e-5)
        hh = (h - h.mean(1, keepdims=True)) * r2
        m = hh * g2 + b2
        z = np.maximum(m @ wf + bf, 0)
        dp_all["wo"] += z.T @ G
        dp_all["bo"] += G.sum(0)
        dz = (G @ wo.T) * (z > 0)
        dp_all["wf"] += m.T @ dz
        dp_all["bf"] = dz.sum(0)
        dm = dz @ wf.T
        dp_all["g2"] += (dm * hh).sum(0)
        dp_all["b2"] += dm.sum(0)
        e = dm * g2
        dh = G + r2 * (e - e.mean(1, keepdims=True) - hh * (e * hh).mean(1, keepdims=True))
        dp_all["wp"] += c.T @ dh
        dp_all["bp"] += dh.sum(0)
        dc = (dh @ wp.T).reshape(T, H, d)
        dpr = np.einsum("ihd,jhd->hij", dc, v)
        ds = p * (dpr - (p * dpr).sum(-1, keepdims=True)) / np.sqrt(d)
        dqkv = [np.einsum("hij,jhd->ihd", ds, k), np.einsum("hij,ihd->jhd", ds, q), np.einsum("hij,ihd->jhd", p, dc)]
        dqkv = np.concatenate([y.reshape(T, D) for y in dqkv], 1)
        dp_all["wa"] += X.T @ dqkv
        dp_all["ba"] += dqkv.sum(0)
        da = dqkv @ wa.T
        dp_all["g1"] += (da * xh).sum(0)
        dp_all["b1"] += da.sum(0)
        e = da * g1
        dp_all["dx"][n] = dh + r1 * (e - e.mean(1, keepdims=True) - xh * (e * xh).mean(1, keepdims=True))
    return tuple(dp_all.values())


def relu_block_version_4(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H = 2
    dh_ = D // H

    def norm(z, g, b):
        mu, var = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
        zh = (z - mu) / np.sqrt(var + 1e-5)
        return g * zh + b, zh, np.sqrt(var + 1e-5)

    def norm_grad(dy, zh, std, g):
        e = dy * g
        return (e - e.mean(-1, keepdims=True) - zh * np.mean(e * zh, -1, keepdims=True)) / std

    a, xh, sx = norm(x, g1, b1)
    qkv = (a @ wa + ba).reshape(B, T, 3, H, dh_)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    s = np.einsum("bihd,bjhd->bhij", q, k) * dh_**-0.5
    s = np.where(np.tri(T, dtype=bool), s, -1e30)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = np.einsum("bhij,bjhd->bihd", p, v).reshape(B, T, D)
    h = x + ctx @ wp + bp
    m, hh, sh = norm(h, g2, b2)
    z = m @ wf + bf
    r = z * (z > 0)
    dz = dout @ wo.T * (z > 0)
    dm = dz @ wf.T
    dh = dout + norm_grad(dm, hh, sh, g2)
    dctx = (dh @ wp.T).reshape(B, T, H, dh_)
    dp = np.einsum("bihd,bjhd->bhij", dctx, v)
    ds = p * (dp - np.einsum("bihd,bihd->bhi", dctx, ctx.reshape(dctx.shape))[..., None]) * dh_**-0.5
    dqkv = np.empty_like(qkv)
    dqkv[:, :, 0] = np.einsum("bhij,bjhd->bihd", ds, k)
    dqkv[:, :, 1] = np.einsum("bhij,bihd->bjhd", ds, q)
    dqkv[:, :, 2] = np.einsum("bhij,bihd->bjhd", p, dctx)
    dqkv = dqkv.reshape(B, T, 3 * D)
    da = dqkv @ wa.T
    dx = dh + norm_grad(da, xh, sx, g1)
    W = lambda i, o: np.einsum("bti,bto->io", i, o)
    S = lambda o: np.einsum("bto->o", o)
    return (
        dx,
        S(da * xh),
        S(da),
        W(a, dqkv),
        S(dqkv),
        W(ctx, dh),
        S(dh),
        S(dm * hh),
        S(dm),
        W(m, dz),
        S(dz),
        W(r, dout),
        S(dout),
    )


CASES += [
    Case(
        "relu_block",
        relu_block_version_3,
        {},
        (*BEFORE_H, "dln_2_weight", "dln_2_bias", "dfc_weight", "dfc_bias"),
        "ReLU's mask is taken from the pre-activation without fc_bias.",
    ),
    Case(
        "relu_block",
        relu_block_version_1,
        {},
        ("dx",),
        "The first residual adds dout to dx instead of dh, the gradient of h: the MLP's path is missing in the skip connection.",
    ),
    Case(
        "relu_block",
        relu_block_version_5,
        {},
        ("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias"),
        "The softmax's backward lacks the subtracted row sum: ds = p dp.",
    ),
    Case(
        "relu_block",
        relu_block_version_2,
        {},
        ("dattn_weight", "dfc_bias"),
        "Two mistakes: dattn_weight multiplies with x instead of ln_1(x), and dfc_bias is assigned instead of accumulated in the loop over the batch (only the last sequence counts).",
    ),
    Case("relu_block", relu_block_version_4),
]


# --- post_norm_block


def post_norm_block_version_2(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H, d = 2, D // 2
    heads = lambda z: z.reshape(B, T, H, d).swapaxes(1, 2)
    flat = lambda z: z.swapaxes(1, 2).reshape(B, T, D)
    wg = lambda i, o: np.einsum("bti,bto->io", i, o)
    bg = lambda o: o.sum((0, 1))

    def ln(z):
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        return (z - z.mean(-1, keepdims=True)) * r, r

    def dln(g, zh, r):
        return r * (g - g.mean(-1, keepdims=True) - zh * (g * zh).mean(-1, keepdims=True))

    q, k, v = map(heads, np.split(x @ wa + ba, 3, -1))
    s = q @ k.swapaxes(2, 3) / np.sqrt(d) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ctx = flat(p @ v)
    n1, r1 = ln(x + ctx @ wp + bp)
    h = n1 * g1 + b1
    f = np.maximum(h @ wf + bf, 0)
    n2, r2 = ln(h + f @ wo + bo)
    d2 = dln(dout * g2, n2, r2)
    df = (d2 @ wo.T) * (f > 0)
    dh = dout + df @ wf.T
    d1 = dln(dh * g1, n1, r1)
    dctx = heads(d1 @ wp.T)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.concatenate([flat(ds @ k), flat(ds.swapaxes(2, 3) @ q), flat(p.swapaxes(2, 3) @ dctx)], -1)
    dx = d1 + dqkv @ wa.T
    first = dx, bg(dh * n1), bg(dh), wg(x, dqkv), bg(dqkv), wg(ctx, d1), bg(d1)
    return *first, bg(dout * n2), bg(dout), wg(h, df), bg(df), wg(f, d2), bg(d2)


def post_norm_block_version_3(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    X, G1, B1, Wa, Ba, Wp, Bp, G2, B2, Wf, Bf, Wo, Bo, G = map(
        torch.from_numpy, (x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout)
    )
    B, T, D = X.shape
    nh = 2
    hs = lambda z: z.unflatten(-1, (nh, -1)).transpose(1, 2)
    un = lambda z: z.transpose(1, 2).flatten(2)

    def norm(z):
        r = torch.rsqrt(z.var(-1, correction=0, keepdim=True) + 1e-5)
        return (z - z.mean(-1, keepdim=True)) * r, r

    def norm_back(g, n, r):
        return r * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))

    def linear_back(g, inp, w):
        gf, xf = g.flatten(0, 1), inp.flatten(0, 1)
        return g @ w.T, xf.T @ gf, gf.sum(0)

    q, k, v = map(hs, (X @ Wa + Ba).chunk(3, -1))
    sc = q.shape[-1] ** -0.5
    P = (sc * q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    ctx = un(P @ v)
    n1, r1 = norm(X + ctx @ Wp + Bp)
    h = n1 * G1 + B1
    pre = h @ Wf + Bf
    n2, r2 = norm(h + pre.relu() @ Wo + Bo)
    gsum2 = norm_back(G * G2, n2, r2)
    dact, dWo, dBo = linear_back(gsum2, pre.relu(), Wo)
    dBf = dact.sum((0, 1))
    dact = dact * (pre > 0)
    dh, dWf, _ = linear_back(dact, h, Wf)
    dh = dh + gsum2
    gsum1 = norm_back(dh * G1, n1, r1)
    dctx, dWp, dBp = linear_back(gsum1, ctx, Wp)
    dctx = hs(dctx)
    dP = dctx @ v.mT
    dS = sc * P * (dP - (dP * P).sum(-1, keepdim=True))
    dqkv = torch.cat([un(dS @ k), un(dS.mT @ q), un(P.mT @ dctx)], -1)
    dX, dWa, dBa = linear_back(dqkv, X, Wa)
    res = (dX + gsum1, (dh * n1).sum((0, 1)), dh.sum((0, 1)), dWa, dBa, dWp, dBp)
    res += ((G * n2).sum((0, 1)), G.sum((0, 1)), dWf, dBf, dWo, dBo)
    return tuple(t.numpy() for t in res)


def post_norm_block_version_4(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H = 3
    d = D // H
    wgrad = lambda i, o: np.tensordot(i, o, ((0, 1), (0, 1)))

    def ln_forward(z, g, b):
        mu = z.mean(-1, keepdims=True)
        r = (z.var(-1, keepdims=True) + 1e-5) ** -0.5
        n = (z - mu) * r
        return n * g + b, (n, r, g)

    def ln_backward(dy, cache):
        n, r, g = cache
        dn = dy * g
        dz = r * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
        return dz, np.sum(dy * n, axis=(0, 1)), np.sum(dy, axis=(0, 1))

    q, k, v = (np.stack(np.split(z, H, -1), 1) for z in np.split(x @ wa + ba, 3, -1))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    merge = lambda z: np.concatenate([z[:, i] for i in range(H)], -1)
    ctx = merge(p @ v)
    h, c1 = ln_forward(x + ctx @ wp + bp, g1, b1)
    r = np.maximum(h @ wf + bf, 0)
    _, c2 = ln_forward(h + r @ wo + bo, g2, b2)
    dres, dg2, db2 = ln_backward(dout, c2)
    dr = dres @ wo.T * (r > 0)
    dmlp = dr @ wf.T
    _, dg1, db1 = ln_backward(dmlp, c1)
    dy, _, _ = ln_backward(dres + dmlp, c1)
    dctx = np.stack(np.split(dy @ wp.T, H, -1), 1)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.concatenate([merge(ds @ k), merge(ds.swapaxes(2, 3) @ q), merge(p.swapaxes(2, 3) @ dctx)], -1)
    return (
        dy + dqkv @ wa.T,
        dg1,
        db1,
        wgrad(x, dqkv),
        dqkv.sum((0, 1)),
        wgrad(ctx, dy),
        dy.sum((0, 1)),
        dg2,
        db2,
        wgrad(h, dr),
        dr.sum((0, 1)),
        wgrad(r, dres),
        dres.sum((0, 1)),
    )


def post_norm_block_version_5(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    nh, hd = 2, D // 2
    adj = {}
    # forward
    qkv = np.einsum("bti,io->bto", x, wa) + ba
    q, k, v = (qkv[..., i * D : (i + 1) * D].reshape(B, T, nh, hd) for i in range(3))
    s = np.where(np.tri(T, dtype=bool), np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(hd), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    ctx = np.einsum("bhij,bjhd->bihd", p, v).reshape(B, T, D)
    y1 = x + ctx @ wp + bp
    i1 = 1 / np.sqrt(y1.var(-1, keepdims=True) + 1e-5)
    n1 = (y1 - y1.mean(-1, keepdims=True)) * i1
    h = n1 * g1 + b1
    z = h @ wf + bf
    a = np.where(z > 0, z, 0)
    y2 = h + a @ wo + bo
    i2 = 1 / np.sqrt(y2.var(-1, keepdims=True) + 1e-5)
    n2 = (y2 - y2.mean(-1, keepdims=True)) * i2
    # backward
    adj["g2"], adj["b2"] = (dout * n2).sum((0, 1)), dout.sum((0, 1))
    adj["wo"], adj["bo"] = np.einsum("bti,bto->io", a, dout), dout.sum((0, 1))
    adj_n2 = dout * g2
    adj_y2 = i2 * (adj_n2 - adj_n2.mean(-1, keepdims=True) - n2 * (adj_n2 * n2).mean(-1, keepdims=True))
    adj_z = np.where(z > 0, adj_y2 @ wo.T, 0)
    adj["wf"], adj["bf"] = np.einsum("bti,bto->io", h, adj_z), adj_z.sum((0, 1))
    adj_h = adj_y2 + adj_z @ wf.T
    adj["g1"], adj["b1"] = (adj_h * n1).sum((0, 1)), adj_h.sum((0, 1))
    adj_n1 = adj_h * g1
    adj_y1 = i1 * (adj_n1 - adj_n1.mean(-1, keepdims=True) - n1 * (adj_n1 * n1).mean(-1, keepdims=True))
    adj["wp"], adj["bp"] = np.einsum("bti,bto->io", ctx, adj_y1), adj_y1.sum((0, 1))
    adj_ctx = (adj_y1 @ wp.T).reshape(B, T, nh, hd)
    adj_p = np.einsum("bihd,bjhd->bhij", adj_ctx, v)
    adj_s = p * (adj_p - (p * adj_p).sum(-1, keepdims=True)) / np.sqrt(hd)
    adj_q, adj_k = np.einsum("bhij,bjhd->bihd", adj_s, k), np.einsum("bhij,bihd->bjhd", adj_s, q)
    adj_v = np.einsum("bhij,bihd->bjhd", p, adj_ctx)
    adj_qkv = np.stack([adj_q, adj_k, adj_v], 2).reshape(B, T, 3 * D)
    adj["wa"], adj["ba"] = np.einsum("bti,bto->io", x, adj_qkv), adj_qkv.sum((0, 1))
    adj_x = adj_y1 + adj_qkv @ wa.T
    return adj_x, *(adj[n] for n in ("g1", "b1", "wa", "ba", "wp", "bp", "g2", "b2", "wf", "bf", "wo", "bo"))


def post_norm_block_version_1(x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, dout):
    B, T, D = x.shape
    H = 3
    d = D // H
    wgrad = lambda i, o: np.tensordot(i, o, ((0, 1), (0, 1)))

    def ln_forward(z, g, b):
        mu = z.mean(-1, keepdims=True)
        r = (z.var(-1, keepdims=True) + 1e-5) ** -0.5
        n = (z - mu) * r
        return n * g + b, (n, r, g)

    def ln_backward(dy, cache):
        n, r, g = cache
        dn = dy * g
        dz = r * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
        return dz, np.sum(dy * n, axis=(0, 1)), np.sum(dy, axis=(0, 1))

    q, k, v = (np.stack(np.split(z, H, -1), 1) for z in np.split(x @ wa + ba, 3, -1))
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    merge = lambda z: np.concatenate([z[:, i] for i in range(H)], -1)
    ctx = merge(p @ v)
    h, c1 = ln_forward(x + ctx @ wp + bp, g1, b1)
    r = np.maximum(h @ wf + bf, 0)
    _, c2 = ln_forward(h + r @ wo + bo, g2, b2)
    dres, dg2, db2 = ln_backward(dout, c2)
    dr = dres @ wo.T * (r > 0)
    dy, dg1, db1 = ln_backward(dres + dr @ wf.T, c1)
    dctx = np.stack(np.split(dy @ wp.T, H, -1), 1)
    dp = dctx @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = np.concatenate([merge(ds @ k), merge(ds.swapaxes(2, 3) @ q), merge(p.swapaxes(2, 3) @ dctx)], -1)
    return (
        dy + dqkv @ wa.T,
        dg1,
        db1,
        wgrad(x, dqkv),
        dqkv.sum((0, 1)),
        wgrad(ctx, dy),
        dy.sum((0, 1)),
        dg2,
        db2,
        wgrad(h, dr),
        dr.sum((0, 1)),
        wgrad(r, dres),
        dres.sum((0, 1)),
    )


CASES += [
    Case(
        "post_norm_block",
        post_norm_block_version_2,
        {},
        BEFORE_H,
        "The MLP's residual carries dout, the gradient after ln_2, to h instead of the gradient behind ln_2's backward: the skip is taken as lying outside the norm.",
    ),
    Case(
        "post_norm_block",
        post_norm_block_version_3,
        {},
        ("dfc_bias",),
        "dfc_bias is summed before ReLU's mask is applied.",
    ),
    Case(
        "post_norm_block",
        post_norm_block_version_4,
        {"n_head": 3},
        ("dln_1_weight", "dln_1_bias"),
        "dln_1_weight and dln_1_bias are computed from the MLP's path only, without the residual's gradient.",
    ),
    Case(
        "post_norm_block",
        post_norm_block_version_5,
        {},
        ("dout_weight", "dout_bias"),
        "dout_weight and dout_bias are computed from dout instead of from the gradient behind ln_2's backward.",
    ),
    Case("post_norm_block", post_norm_block_version_1, {"n_head": 3}),
]
