"""Wrong backward passes made by editing a line of a correct one, with what the finding must say (a regular expression).

None of these edits is one of the planted functions; most are no entry of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SOURCES = {
    "layer_norm": """
def backward(x, weight, bias, dout):
    d = x.shape[-1]
    mu = x.mean(-1, keepdims=True)
    c = x - mu
    var = (c ** 2).mean(-1, keepdims=True)
    inv = 1 / np.sqrt(var + 1e-5)
    xhat = c * inv
    dbias = dout.sum((0, 1))
    dweight = (dout * xhat).sum((0, 1))
    g = dout * weight
    term1 = g.sum(-1, keepdims=True)
    term2 = xhat * (g * xhat).sum(-1, keepdims=True)
    dx = inv / d * (d * g - term1 - term2)
    return dx, dweight, dbias
""",
    "rms_norm": """
def backward(x, weight, dout):
    ms = (x * x).mean(-1, keepdims=True)
    r = 1 / np.sqrt(ms + 1e-6)
    n = x * r
    dweight = (dout * n).sum((0, 1))
    g = dout * weight
    dot = (g * n).mean(-1, keepdims=True)
    dx = r * (g - n * dot)
    return dx, dweight
""",
    "linear": """
def backward(x, weight, bias, dout):
    b, t, i = x.shape
    x2, d2 = x.reshape(b * t, i), dout.reshape(b * t, -1)
    dx = (d2 @ weight.T).reshape(b, t, i)
    dweight = x2.T @ d2
    dbias = d2.sum(0)
    return dx, dweight, dbias
""",
    "attention": """
def backward(q, k, v, dout):
    scale = 1 / np.sqrt(q.shape[-1])
    s = np.einsum("bhid,bhjd->bhij", q, k) * scale
    n, m = s.shape[-2:]
    future = np.arange(m)[None, :] > np.arange(n)[:, None]
    s = np.where(future, -np.inf, s)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp = np.einsum("bhid,bhjd->bhij", dout, v)
    dv = np.einsum("bhij,bhid->bhjd", p, dout)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    ds = ds * scale
    dq = np.einsum("bhij,bhjd->bhid", ds, k)
    dk = np.einsum("bhij,bhid->bhjd", ds, q)
    return dq, dk, dv
""",
    "softmax_cross_entropy": """
def backward(logits, targets, dout):
    b, t, v = logits.shape
    e = np.exp(logits - logits.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    hot = np.eye(v)[targets]
    grad = p - hot
    return dout * grad / (b * t)
""",
    "gelu": """
def backward(x, dout):
    k, a = np.sqrt(2 / np.pi), 0.044715
    u = k * (x + a * x ** 3)
    th = np.tanh(u)
    left = 0.5 * (1 + th)
    du = k * (1 + 3 * a * x ** 2)
    right = 0.5 * x * (1 - th ** 2) * du
    return dout * (left + right)
""",
    "swiglu": """
def backward(gate, up, dout):
    sig = 1 / (1 + np.exp(-gate))
    silu = gate * sig
    dup = dout * silu
    dsilu = dout * up
    slope = sig * (1 + gate * (1 - sig))
    dgate = dsilu * slope
    return dgate, dup
""",
    "rope": """
def backward(x, positions, dout):
    half = x.shape[-1] // 2
    freq = 1 / 10000 ** (np.arange(half) / half)
    angle = positions[:, None] * freq[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = dout[..., :half], dout[..., half:]
    out1 = first * cos + second * sin
    out2 = second * cos - first * sin
    return np.concatenate([out1, out2], -1)
""",
    "lora": """
def backward(x, weight, down, up, alpha, dout):
    r = down.shape[1]
    scale = alpha / r
    x2, d2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    low = x2 @ down
    dlow = scale * (d2 @ up.T)
    dx = d2 @ weight.T + dlow @ down.T
    ddown = x2.T @ dlow
    dup = scale * (low.T @ d2)
    return dx.reshape(x.shape), ddown, dup
""",
    "embedding": """
def backward(ids, weight, dout):
    dweight = np.zeros_like(weight)
    flat, rows = ids.reshape(-1), dout.reshape(-1, weight.shape[1])
    np.add.at(dweight, flat, rows)
    return dweight
""",
    "adamw": """
def update(param, grad, m, v, step):
    lr, b1, b2, eps, wd = 1e-2, 0.9, 0.95, 1e-8, 0.1
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    mh = m / (1 - b1 ** step)
    vh = v / (1 - b2 ** step)
    param = param * (1 - lr * wd)
    param = param - lr * mh / (np.sqrt(vh) + eps)
    return param, m, v
""",
    "multi_head": """
def backward(query, key, value, w_q, w_k, w_v, dout):
    h = 2
    b, n, c = query.shape
    def split(z):
        return z.reshape(b, -1, h, c // h).transpose(0, 2, 1, 3)
    def join(z):
        return z.transpose(0, 2, 1, 3).reshape(b, -1, c)
    q, k, v = split(query @ w_q), split(key @ w_k), split(value @ w_v)
    scale = 1 / np.sqrt(c // h)
    s = q @ k.swapaxes(-1, -2) * scale
    s = np.where(np.tril(np.ones((n, n))) > 0, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    do = split(dout)
    dp = do @ v.swapaxes(-1, -2)
    dv = p.swapaxes(-1, -2) @ do
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    dq, dk, dv = join(dq), join(dk), join(dv)
    dw_q = np.einsum("bti,bto->io", query, dq)
    dw_k = np.einsum("bti,bto->io", key, dk)
    dw_v = np.einsum("bti,bto->io", value, dv)
    return dq @ w_q.T, dk @ w_k.T, dv @ w_v.T, dw_q, dw_k, dw_v
""",
    "tied_embedding": """
def backward(ids, weight, dout):
    feats = weight[ids]
    dhead = np.einsum("btv,btc->vc", dout, feats)
    dfeats = dout @ weight
    demb = np.zeros_like(weight)
    np.add.at(demb, ids, dfeats)
    return demb + dhead
""",
    "head": """
def backward(a, w_q, b_q, w_k, b_k, w_v, b_v, dout):
    q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
    scale = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(1, 2) * scale
    s = np.where(np.tril(np.ones(s.shape[-2:])) > 0, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp, dv = dout @ v.swapaxes(1, 2), p.swapaxes(1, 2) @ dout
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    dq, dk = ds @ k, ds.swapaxes(1, 2) @ q
    da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    def params(d):
        return np.einsum("bti,bto->io", a, d), d.sum((0, 1))
    (dw_q, db_q), (dw_k, db_k), (dw_v, db_v) = params(dq), params(dk), params(dv)
    return da, dw_q, db_q, dw_k, db_k, dw_v, db_v
""",
}


def compiled(source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"np": np}
    exec(source, scope)
    return scope.get("backward") or scope["update"]


@dataclass(frozen=True)
class Edit:
    """A line of a correct function, what it is edited to, and what the first finding must say."""

    layer: str
    before: str
    after: str
    says: str

    def function(self) -> Callable[..., Any]:
        source = SOURCES[self.layer]
        assert source.count(self.before) == 1, self
        return compiled(source.replace(self.before, self.after))

    @property
    def id(self) -> str:
        return f"{self.layer}: {self.after.strip()}"


def edits(layer: str, *rows: tuple[str, str, str]) -> list[Edit]:
    return [Edit(layer, *row) for row in rows]


EDITS = [
    *edits(
        "layer_norm",
        ("g = dout * weight", "g = dout * (1 + weight)", r"1 \+ weight"),
        ("var + 1e-5", "var + 1e-12", r"eps = 1e-12"),
        ("var + 1e-5", "var + 1e-6", r"eps = 1e-06"),
        ("- term1 - term2", "- term1 + term2", r"sign.*mean\(g ∘ ā\)|mean\(g ∘ ā\).*sign"),
        ("- term1 - term2", "+ term1 - term2", r"sign.*mean\(g\)|mean\(g\).*sign"),
        ("- term1 - term2", "- term1 - 2 * term2", r"mean\(g ∘ ā\).*twice|twice.*mean\(g ∘ ā\)|2 times"),
        ("dbias = dout.sum((0, 1))", "dbias = dout.sum((0, 1), keepdims=True)", r"shape|keepdims|reshape"),
        ("dbias = dout.sum((0, 1))", "dbias = dout.mean((0, 1))", r"dbias.*B·n|mean"),
        ("dbias = dout.sum((0, 1))", "dbias = dout[0].sum(0)", r"first sequence"),
        ("dbias = dout.sum((0, 1))", "dbias = dout[:, -1].sum(0)", r"last token"),
        ("dbias = dout.sum((0, 1))", "dbias = dout.sum(1)", r"not summed over the batch|sequence"),
        ("dweight = (dout * xhat)", "dweight = (dout * c)", r"x − mean in place of ā in dweight"),
        ("dweight = (dout * xhat)", "dweight = (dout * weight * xhat)", r"weight"),
        ("dweight = (dout * xhat)", "dweight = xhat", r"dout|upstream"),
        ("dweight = (dout * xhat).sum((0, 1))", "dweight = (dout * xhat)[:-1].sum((0, 1))", r"last sequence"),
        ("dweight = (dout * xhat).sum((0, 1))", "dweight = (dout * xhat)[:, 1:].sum((0, 1))", r"first token"),
        ("inv / d * (d * g", "inv / d * (g", r"g.*d|features"),
        ("dx = inv / d *", "dx = inv *", r"dx is d = \d+ times too large"),
        ("return dx, dweight, dbias", "return dx, dbias, dweight", r"place"),
        ("return dx, dweight, dbias", "return dx + x, dweight, dbias", r"x is added|added"),
        ("return dx, dweight, dbias", "return dx + dout, dweight, dbias", r"dx has dout added"),
        ("return dx, dweight, dbias", "return -dx, dweight, dbias", r"dx has the wrong sign"),
        ("return dx, dweight, dbias", "return -dx, -dweight, -dbias", r"wrong sign"),
        ("return dx, dweight, dbias", "return 2 * dx, 2 * dweight, 2 * dbias", r"2 times too large"),
        ("return dx, dweight, dbias", "return dx.transpose(0, 2, 1), dweight, dbias", r"transposed|axes"),
        ("return dx, dweight, dbias", "return dx.reshape(-1, d), dweight, dbias", r"reshape|shape"),
        ("return dx, dweight, dbias", "return np.roll(dx, 1, 1), dweight, dbias", r"shifted"),
        ("xhat = c * inv", "xhat = x * inv", r"centred|x in place|x − mean|mean"),
        ("var = (c ** 2).mean(-1, keepdims=True)", "var = (x ** 2).mean(-1, keepdims=True)", r"variance"),
        ("inv / d *", "inv ** 3 / d *", r"1/σ"),
    ),
    *edits(
        "rms_norm",
        ("ms + 1e-6", "ms + 1e-5", r"eps = 1e-05"),
        ("dx = r * (g - n * dot)", "dx = r * (g + n * dot)", r"sign"),
        (
            "dx = r * (g - n * dot)",
            "dx = r * (g - n * dot * r)",
            r"1/rms|mean\(g ∘ x̂\)|x̂ in place of x in the second term",
        ),
        ("dx = r * (g - n * dot)", "dx = r * (g - dot)", r"x̂"),
        ("dx = r * (g - n * dot)", "dx = r * (g - 2 * n * dot)", r"twice|2 times"),
        ("dx = r * (g - n * dot)", "dx = r * (g - 0.5 * n * dot)", r"mean\(g ∘ x̂\) is halved"),
        ("(x * x).mean(-1, keepdims=True)", "(x * x).sum(-1, keepdims=True)", r"mean of x²|sum"),
        ("r = 1 / np.sqrt(ms + 1e-6)", "r = 1 / (ms + 1e-6)", r"square|root|1/rms"),
        ("g = dout * weight", "g = dout * (1 + weight)", r"1 \+ weight"),
        ("(g * n).mean", "(g * x).mean", r"x̂|x in place|1/rms"),
        ("(dout * n).sum((0, 1))", "(dout * n).sum(0)", r"tokens|summed"),
        ("(dout * n).sum((0, 1))", "(dout * weight * n).sum((0, 1))", r"weight"),
    ),
    *edits(
        "linear",
        ("dbias = d2.sum(0)", "dbias = d2.mean(0)", r"B·n|mean"),
        ("dbias = d2.sum(0)", "dbias = d2[-1]", r"last"),
        ("dbias = d2.sum(0)", "dbias = d2[1:].sum(0)", r"first"),
        ("dbias = d2.sum(0)", "dbias = d2.sum(0, keepdims=True)", r"shape|reshape|keepdims"),
        ("dbias = d2.sum(0)", "dbias = dout.sum((0, 1)) / b", r"B = \d+ times too small"),
        ("dweight = x2.T @ d2", "dweight = x2.T @ d2 / (b * t)", r"B·n = \d+ times too small"),
        ("dweight = x2.T @ d2", "dweight = x2.T @ d2 / np.sqrt(i)", r"√in"),
        ("dweight = x2.T @ d2", "dweight = x2.T @ np.ones_like(d2)", r"dout|upstream"),
        ("dweight = x2.T @ d2", "dweight = x2.T @ d2 + weight", r"weight is added|added"),
        ("dweight = x2.T @ d2", "dweight = x2.T @ d2 + 0.01 * weight", r"0\.01"),
        ("dweight = x2.T @ d2", "dweight = np.roll(x2, 1, 0).T @ d2", r"shifted"),
        (
            "dweight = x2.T @ d2",
            "dweight = x[:, :-1].reshape(-1, i).T @ dout[:, 1:].reshape(-1, d2.shape[-1])",
            r"shift",
        ),
        ("dweight = x2.T @ d2", "dweight = np.einsum('bti,bto->bio', x, dout)", r"batch"),
        ("dx = (d2 @ weight.T)", "dx = (d2 @ weight.T + bias @ weight.T)", r"bias"),
        ("dx = (d2 @ weight.T).reshape(b, t, i)", "dx = d2 @ weight.T", r"reshape|shape"),
        ("return dx, dweight, dbias", "return dx * (x > 0), dweight, dbias", r"x > 0"),
        ("return dx, dweight, dbias", "return dx[:, ::-1], dweight, dbias", r"revers"),
        ("return dx, dweight, dbias", "return np.clip(dx, -1, 1), dweight, dbias", r"clipped"),
        ("return dx, dweight, dbias", "return dx / np.linalg.norm(dx), dweight, dbias", r"norm"),
    ),
    *edits(
        "attention",
        ("np.sqrt(q.shape[-1])", "np.sqrt(v.shape[-1])", r"d_v"),
        ("np.sqrt(q.shape[-1])", "np.sqrt(q.shape[-2])", r"n"),
        ("np.sqrt(q.shape[-1])", "np.sqrt(q.shape[-1] * q.shape[1])", r"d_model|d_k·H|H·d_k"),
        ("np.sqrt(q.shape[-1])", "8.0", r"0\.125|8"),
        ("ds = p * (dp - (p * dp).sum(-1, keepdims=True))", "ds = p * (dp + (p * dp).sum(-1, keepdims=True))", r"sign"),
        ("ds = p * (dp - (p * dp).sum(-1, keepdims=True))", "ds = dp - (p * dp).sum(-1, keepdims=True)", r"ρ"),
        ("ds = p * (dp - (p * dp).sum(-1, keepdims=True))", "ds = p * (dp - dp.sum(-1, keepdims=True))", r"ρ"),
        ("ds = p * (dp - (p * dp).sum(-1, keepdims=True))", "ds = p * (1 - p) * dp", r"elementwise"),
        ("ds = p * (dp - (p * dp).sum(-1, keepdims=True))", "ds = p * (dp - dp.mean(-1, keepdims=True))", r"mean|ρ"),
        ('"bhij,bhid->bhjd", p, dout', '"bhij,bhid->bhjd", e, dout', r"normalis|sum|exp"),
        ('"bhij,bhid->bhjd", p, dout', '"bhij,bhid->bhjd", p, dout * scale', r"√d_k"),
        ('"bhij,bhid->bhjd", p, dout', '"bhij,bhid->bhjd", np.ones_like(p), dout', r"ρ|weights"),
        ('dq = np.einsum("bhij,bhjd->bhid", ds, k)', 'dq = np.einsum("bhij,bhjd->bhid", ds, k) * scale', r"√d_k"),
        ("return dq, dk, dv", "return dk, dq, dv", r"place"),
        ("return dq, dk, dv", "return dq, dk, dv.transpose(0, 2, 1, 3)", r"axes"),
        ("return dq, dk, dv", "return -dq, -dk, dv", r"sign"),
        ("return dq, dk, dv", "return dq + q, dk, dv", r"added"),
        ("return dq, dk, dv", "return dq, np.cumsum(dk, -2), dv", r"accumulated over its tokens"),
        ("return dq, dk, dv", "return dq, dk, np.roll(dv, 1, 1)", r"shifted"),
        ("return dq, dk, dv", "return dq, dk, dv.mean(1, keepdims=True) + 0 * dv", r"mean|averaged"),
        ("return dq, dk, dv", "return dq, dk, dv * np.sign(dv)", r"absolute"),
    ),
    *edits(
        "softmax_cross_entropy",
        ("hot = np.eye(v)[targets]", "hot = 0.9 * np.eye(v)[targets] + 0.1 / v", r"label smoothing = 0\.1"),
        ("grad = p - hot", "grad = hot - p", r"sign"),
        ("grad = p - hot", "grad = p - hot * p", r"target|y_gt"),
        (
            "logits - logits.max(-1, keepdims=True)",
            "(logits - logits.max(-1, keepdims=True)) / 2",
            r"temperature|logits",
        ),
        ("grad = p - hot", "grad = (p - hot) * p", r"y_pred|softmax"),
        ("dout * grad / (b * t)", "dout * grad / v", r"V"),
        ("dout * grad / (b * t)", "dout ** 2 * grad / (b * t)", r"dout"),
        ("dout * grad / (b * t)", "dout * grad / (b * (t + 1))", r"t|n"),
        ("np.eye(v)[targets]", "np.eye(v)[(targets + 1) % v]", r"shift|target"),
        ("np.eye(v)[targets]", "np.eye(v)[np.roll(targets, -1, 1)]", r"shift"),
        ("dout * grad / (b * t)", "dout * grad * (b * t)", r"multiplied by the number of targets in place of divided"),
    ),
    *edits(
        "gelu",
        ("0.044715", "0.0447", r"0\.0447"),
        ("k, a = np.sqrt(2 / np.pi)", "k, a = 0.79788", r"0\.79788"),
        ("k, a = np.sqrt(2 / np.pi)", "k, a = 2 / np.pi", r"0\.63662|2/π"),
        ("left + right", "left - right", r"sign"),
        ("left + right", "2 * left + right", r"Φ|2 times|twice"),
        ("left + right", "right", r"Φ"),
        ("0.5 * x * (1 - th ** 2)", "x * (1 - th ** 2)", r"φ|2 times|twice"),
        ("0.5 * x * (1 - th ** 2)", "0.5 * (1 - th ** 2)", r"x"),
        ("return dout * (left + right)", "return left + right", r"dout|upstream"),
        ("return dout * (left + right)", "return dout + (left + right)", r"dout"),
        ("left = 0.5 * (1 + th)", "left = 0.5 * (1 - th)", r"Φ|tanh"),
        ("du = k * (1 + 3 * a * x ** 2)", "du = 1 + 3 * a * x ** 2", r"√\(2/π\)|φ"),
        ("return dout * (left + right)", "return dout * (x > 0)", r"ReLU"),
    ),
    *edits(
        "swiglu",
        ("sig * (1 + gate * (1 - sig))", "sig * (1 - gate * (1 - sig))", r"silu' as σ − x σ \(1 − σ\)"),
        ("sig * (1 + gate * (1 - sig))", "sig * (1 + gate) * (1 - sig)", r"silu"),
        ("dgate = dsilu * slope", "dgate = dsilu * silu", r"silu"),
        ("dup = dout * silu", "dup = silu", r"dout|upstream"),
        ("dup = dout * silu", "dup = dout * sig * (1 + gate * (1 - sig))", r"silu"),
        ("return dgate, dup", "return dup, dgate", r"place"),
        ("dup = dout * silu", "dup = dout * silu * up", r"up"),
        ("np.exp(-gate)", "np.exp(-1.702 * gate)", r"1\.702"),
    ),
    *edits(
        "rope",
        ("10000 ** (", "500000 ** (", r"theta = 500000|θ = 500000"),
        ("10000 ** (", "1000 ** (", r"theta = 1000|θ = 1000"),
        ("out1 = first * cos + second * sin", "out1 = first * cos - second * sin", r"sign"),
        ("out2 = second * cos - first * sin", "out2 = second * cos", r"first|term|half"),
        ("[out1, out2]", "[out2, out1]", r"halves|half"),
        ("angle = positions[:, None]", "angle = (positions[:, None] - 1)", r"position"),
        ("angle = positions[:, None]", "angle = 2 * positions[:, None]", r"2|twice"),
        (
            "np.concatenate([out1, out2], -1)",
            "np.stack([out1, out2], -1).reshape(x.shape)",
            r"interleav|adjacent|order|axes",
        ),
    ),
    *edits(
        "lora",
        ("scale * (d2 @ up.T)", "scale ** 2 * (d2 @ up.T)", r"α/r"),
        ("dx = d2 @ weight.T + dlow @ down.T", "dx = d2 @ weight.T - dlow @ down.T", r"sign"),
        ("dx = d2 @ weight.T + dlow @ down.T", "dx = d2 @ weight.T + dlow @ down.T / scale", r"α/r|scale"),
        ("return dx.reshape(x.shape), ddown, dup", "return dx.reshape(x.shape), dup.T, ddown.T", r"place|swap"),
        ("dup = scale * (low.T @ d2)", "dup = scale * (d2.T @ low)", r"transposed"),
        ("return dx.reshape(x.shape), ddown, dup", "return dx.reshape(x.shape), ddown, dup / len(x2)", r"B·n"),
        ("return dx.reshape(x.shape), ddown, dup", "return dx.reshape(x.shape), ddown, 0 * dup", r"0 everywhere"),
    ),
    *edits(
        "embedding",
        ("np.add.at(dweight, flat, rows)", "np.add.at(dweight, flat, rows / len(flat))", r"B·n"),
        ("np.add.at(dweight, flat, rows)", "np.add.at(dweight, ids[0], dout[0])", r"first sequence"),
        ("np.add.at(dweight, flat, rows)", "np.add.at(dweight, ids[:, :-1], dout[:, :-1])", r"last token"),
        ("np.add.at(dweight, flat, rows)", "np.add.at(dweight, flat[::-1], rows)", r"revers|order"),
        ("np.zeros_like(weight)", "weight.copy()", r"weight is added|added"),
        ("np.add.at(dweight, flat, rows)", "np.add.at(dweight, flat, 1.0)", r"dout|upstream"),
        ("np.add.at(dweight, flat, rows)", "np.subtract.at(dweight, flat, rows)", r"sign"),
        ("return dweight", "return rows", r"dout"),
    ),
    *edits(
        "adamw",
        ("0.9, 0.95", "0.9, 0.999", r"beta2 = 0\.999"),
        ("0.9, 0.95", "0.8, 0.95", r"beta1 = 0\.8"),
        ("1e-8, 0.1", "1e-6, 0.1", r"eps = 1e-06"),
        ("1e-8, 0.1", "1e-8, 0.01", r"weight_decay = 0\.01"),
        ("mh = m / (1 - b1 ** step)", "mh = m", r"first moment|m̂|correct"),
        ("vh = v / (1 - b2 ** step)", "vh = v", r"second moment|v̂|correct"),
        ("param = param - lr * mh", "param = param + lr * mh", r"sign"),
        ("(1 - b2) * grad ** 2", "(1 - b2) * grad", r"g²|square|gradient"),
        ("m = b1 * m + (1 - b1) * grad", "m = b1 * m + grad", r"1 − β₁|first moment"),
        ("(np.sqrt(vh) + eps)", "np.sqrt(vh)", r"eps"),
        ("param = param - lr * mh", "param = param - lr * grad", r"gradient|grad"),
        ("m = b1 * m + (1 - b1) * grad", "m = (1 - b1) * m + b1 * grad", r"β₁ and 1 − β₁ are exchanged"),
    ),
    *edits(
        "multi_head",
        ("scale = 1 / np.sqrt(c // h)", "scale = 1 / np.sqrt(c)", r"d_model"),
        ('dw_k = np.einsum("bti,bto->io", key, dk)', 'dw_k = np.einsum("bti,bto->io", query, dk)', r"query"),
        ("dk @ w_k.T, dv @ w_v.T", "dk @ w_k, dv @ w_v.T", r"transpose"),
        ("dv @ w_v.T, dw_q", "dv @ w_q.T, dw_q", r"w_q"),
        ('dw_v = np.einsum("bti,bto->io", value, dv)', 'dw_v = np.einsum("bti,bto->oi", value, dv)', r"transposed"),
        ('dw_v = np.einsum("bti,bto->io", value, dv)', 'dw_v = np.einsum("bti,bto->io", value, dout)', r"ρ|dout"),
        ("* scale\n    dq, dk", "\n    dq, dk", r"√d_k"),
        ("return dq @ w_q.T,", "return dq,", r"w_q|weight"),
        ("return dq @ w_q.T,", "return dq @ w_q.T + dk @ w_k.T,", r"dkey is added|dkey"),
    ),
    *edits(
        "tied_embedding",
        ("return demb + dhead", "return demb - dhead", r"sign"),
        ("return demb + dhead", "return 0.5 * (demb + dhead)", r"2 times too small"),
        ("return demb + dhead", "return demb + 2 * dhead", r"twice|2 times"),
        ("return demb + dhead", "return demb + dhead / ids.size", r"logits"),
        ("np.add.at(demb, ids, dfeats)", "demb[ids] += dfeats", r"repeated"),
    ),
    *edits(
        "head",
        ("da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T", "da = dq @ w_q.T + dk @ w_k.T", r"values|d_v"),
        ("da = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T", "da = dq @ w_q.T + 2 * dk @ w_k.T + dv @ w_v.T", r"d_k|keys"),
        ("params(dq), params(dk), params(dv)", "params(dq), params(dk), params(dout)", r"ρ|dout|dw_v"),
        ("params(dq), params(dk), params(dv)", "params(dk), params(dq), params(dv)", r"place"),
        ("d.sum((0, 1))", "d.sum(1)", r"batch|sequence"),
        ("d.sum((0, 1))", "d[:, -1].sum(0)", r"last token"),
        ("v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v", "v = a @ w_q, a @ w_k, a @ w_v", r"b_q is missing|biases"),
    ),
]

HARD = [
    *edits(
        "attention",
        ('"bhij,bhid->bhjd", p, dout', '"bhij,bhid->bhjd", np.where(future, 0, s), dout', r"scores|softmax"),
    ),
    *edits("softmax_cross_entropy", ("grad = p - hot", "grad = p * (1 - p) - hot", r"y_pred")),
]
