"""The exact gradients of every layer: PyTorch's own layers under autograd in float64, and inputs to compare them on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Rng = np.random.Generator
Inputs = list[Any]


def _heads(x: Any, n: int) -> Any:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _attention(q: Any, k: Any, v: Any, causal: bool = True, keep: Any = None) -> Any:
    n, m = q.shape[-2], k.shape[-2]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else torch.ones(n, m, dtype=torch.bool)
    if keep is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) * keep) @ v


def _rotated(x: Any, positions: Any, theta: float = 10000.0) -> Any:
    """(x_i + i x_{i + D/2}) e^{i angle}, as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.outer(positions.double(), theta ** (-torch.arange(half, dtype=torch.float64) / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _head(
    a: Any, w_q: Any, b_q: Any, w_k: Any, b_k: Any, w_v: Any, b_v: Any, *keep: Any, causal: bool = True,
    rotary: bool = False,
) -> Any:  # fmt: skip
    q, k, v = (F.linear(a, w.T, b) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    if rotary:
        q, k = (_rotated(x, torch.arange(a.shape[-2])) for x in (q, k))
    return _attention(q, k, v, causal, *keep)


def _multi_head(query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, causal: bool, n_head: int) -> Any:
    q, k, v = (_heads(x @ w, n_head) for x, w in ((query, w_q), (key, w_k), (value, w_v)))
    return _attention(q, k, v, causal).transpose(1, 2).flatten(2)


def _block(x: Any, *given: Any, n_head: int = 2, causal: bool = True) -> Any:
    g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out = given
    size = x.shape[-1:]
    qkv = F.linear(F.layer_norm(x, size, g1, b1), w_qkv.T, b_qkv)
    q, k, v = (_heads(part, n_head) for part in qkv.chunk(3, -1))
    h = x + F.linear(_attention(q, k, v, causal).transpose(1, 2).flatten(2), w_proj.T, b_proj)
    hidden = F.gelu(F.linear(F.layer_norm(h, size, g2, b2), w_fc.T, b_fc), approximate="tanh")
    return h + F.linear(hidden, w_out.T, b_out)


def _relu_block(x: Any, *given: Any, n_head: int = 2, causal: bool = True) -> Any:
    """Pre-norm, with PyTorch's own encoder layer."""
    return _encoder(x, given, n_head, causal, norm_first=True)


def _post_norm_block(x: Any, *given: Any, n_head: int = 2, causal: bool = True) -> Any:
    return _encoder(x, given, n_head, causal, norm_first=False)


def _encoder(x: Any, given: Any, n_head: int, causal: bool, norm_first: bool) -> Any:
    g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out = given
    layer = torch.nn.TransformerEncoderLayer(
        x.shape[-1], n_head, w_fc.shape[1], 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    named = {
        "self_attn.in_proj_weight": w_qkv.T, "self_attn.in_proj_bias": b_qkv,
        "self_attn.out_proj.weight": w_proj.T, "self_attn.out_proj.bias": b_proj,
        "linear1.weight": w_fc.T, "linear1.bias": b_fc, "linear2.weight": w_out.T, "linear2.bias": b_out,
        "norm1.weight": g1, "norm1.bias": b1, "norm2.weight": g2, "norm2.bias": b2,
    }  # fmt: skip
    unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
    return torch.func.functional_call(layer, named, (x,), {"src_mask": unseen})


def _projected(query: Any, key: Any, value: Any, *given: Any, causal: bool = False, n_head: int = 2) -> Any:
    """Multi-head attention by PyTorch's own function."""
    w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o = given
    unseen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1) if causal else None
    out, _ = F.multi_head_attention_forward(
        *(x.transpose(0, 1) for x in (query, key, value)), query.shape[-1], n_head, None,
        torch.cat([b_q, b_k, b_v]), None, None, False, 0.0, w_o.T, b_o, need_weights=False, attn_mask=unseen,
        use_separate_proj_weight=True, q_proj_weight=w_q.T, k_proj_weight=w_k.T, v_proj_weight=w_v.T,
    )  # fmt: skip
    return out.transpose(0, 1)


def _packed(x: Any, w_qkv: Any, b_qkv: Any, w_o: Any, b_o: Any, causal: bool = True, n_head: int = 2) -> Any:
    parts = [part for w, b in zip(w_qkv.chunk(3, 1), b_qkv.chunk(3), strict=True) for part in (w, b)]
    return _projected(x, x, x, *parts, w_o, b_o, causal=causal, n_head=n_head)


def _rope_attention(q: Any, k: Any, v: Any, positions: Any, causal: bool, theta: float) -> Any:
    return _attention(_rotated(q, positions, theta), _rotated(k, positions, theta), v, causal)


def _grouped(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _tied_head(ids: Any, weight: Any, ln_weight: Any, ln_bias: Any, targets: Any) -> Any:
    hidden = F.layer_norm(F.embedding(ids, weight), ln_weight.shape, ln_weight, ln_bias)
    return _loss(F.linear(hidden, weight), targets, "mean")


def _dpo(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, beta: float) -> Any:
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def _loss(logits: Any, targets: Any, reduction: str) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


FORWARD: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "head": _head,
    "head_dropout": _head,
    "multi_head": _multi_head,
    "block": _block,
    "relu_block": _relu_block,
    "post_norm_block": _post_norm_block,
    "attention_dropout": lambda q, k, v, keep, causal: _attention(q, k, v, causal, keep),
    "rope_attention": _rope_attention,
    "grouped_query_attention": _grouped,
    "self_attention": _packed,
    "self_attention_separate": lambda x, *given, **options: _projected(x, x, x, *given, **options),
    "cross_attention": _projected,
    "loss_head": lambda x, weight, bias, targets: _loss(F.linear(x, weight.T, bias), targets, "mean"),
    "tied_head": _tied_head,
    "dpo": _dpo,
    "softmax": lambda x: F.softmax(x, -1),
    "relu": F.relu,
    "silu": F.silu,
    "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "rms_norm": lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
    "linear": lambda x, weight, bias: F.linear(x, weight.T, bias),
    "lora": lambda x, weight, down, up, alpha: F.linear(x, (weight + alpha / down.shape[1] * down @ up).T),
    "embedding": lambda ids, weight: F.embedding(ids, weight),
    "tied_embedding": lambda ids, weight: F.linear(F.embedding(ids, weight), weight),
    "softmax_cross_entropy": _loss,
    "next_token_loss": lambda logits, ids, reduction: _loss(logits[:, :-1], ids[:, 1:], reduction),
    "gelu": lambda x, form: F.gelu(x, approximate="tanh" if form == "tanh" else "none"),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "rope": _rotated,
}
WITHOUT_GRADIENT = {  # keep; the frozen weight and alpha; the reference
    "head_dropout": (7,), "attention_dropout": (3,), "lora": (1, 4), "dpo": (2, 3),
}  # fmt: skip


def exact(layer: str, inputs: Inputs, options: Mapping[str, Any]) -> list[np.ndarray]:
    """The gradients (AdamW: the new values) in float64, computed by PyTorch alone."""
    if layer == "adamw":
        return _adamw(*inputs, **options)
    if layer == "adamw_step":
        return _adamw_step(*inputs, **options)
    *given, dout = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    fixed = WITHOUT_GRADIENT.get(layer, ())
    leaves = [
        x.double().requires_grad_()
        for i, x in enumerate(given)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and i not in fixed
    ]
    rest = iter(leaves)
    arguments = [
        next(rest) if isinstance(x, torch.Tensor) and x.is_floating_point() and i not in fixed else x
        for i, x in enumerate(given)
    ]
    out = FORWARD[layer](*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                           for x in arguments), **options)  # fmt: skip
    upstream = torch.as_tensor(dout, dtype=torch.float64).expand(out.shape)
    return [g.numpy() for g in torch.autograd.grad(out, leaves, upstream)]


def _adamw(param: Any, grad: Any, m: Any, v: Any, step: int, **options: float) -> list[np.ndarray]:
    p = torch.nn.Parameter(torch.tensor(param, dtype=torch.float64))
    p.grad = torch.tensor(grad, dtype=torch.float64)
    betas = options["beta1"], options["beta2"]
    optimizer = torch.optim.AdamW([p], options["lr"], betas, options["eps"], options["weight_decay"], foreach=False)
    moments = {"exp_avg": torch.tensor(m).double(), "exp_avg_sq": torch.tensor(v).double()}
    optimizer.state[p] = {"step": torch.tensor(float(step - 1)), **moments}
    optimizer.step()
    state = optimizer.state[p]
    return [x.detach().numpy() for x in (p, state["exp_avg"], state["exp_avg_sq"])]


def _adamw_step(
    weight: Any, bias: Any, x: Any, dout: Any, m_weight: Any, v_weight: Any, m_bias: Any, v_bias: Any, step: int,
    max_norm: float, weight_decay: float, **options: float,
) -> list[np.ndarray]:  # fmt: skip
    w, b = (torch.nn.Parameter(torch.tensor(p, dtype=torch.float64)) for p in (weight, bias))
    F.linear(torch.tensor(x).double(), w.T, b).backward(torch.tensor(dout).double())
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in (w, b)))  # type: ignore[union-attr]
    scale = min(1.0, max_norm / norm) if norm else 1.0
    found = []
    for p, m, v, decay in ((w, m_weight, v_weight, weight_decay), (b, m_bias, v_bias, 0.0)):
        grad = scale * p.grad.numpy()  # type: ignore[union-attr]
        found.append(_adamw(p.detach().numpy(), grad, m, v, step, weight_decay=decay, **options))
    return [found[0][0], found[1][0], *found[0][1:], *found[1][1:]]


def random_inputs(layer: str, rng: Rng, options: Mapping[str, Any], sizes: Mapping[str, int]) -> Inputs:
    """Inputs of the layer in these sizes (batch, tokens, width, heads, head_dim, vocabulary), the upstream one last."""
    b, n, d, h, d_k, v = (sizes[name] for name in ("batch", "tokens", "width", "heads", "head_dim", "vocabulary"))

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    def dense(n_in: int, n_out: int) -> list[np.ndarray]:
        return [draw(n_in, n_out) / math.sqrt(n_in), draw(n_out)]

    def norm(width: int) -> list[np.ndarray]:
        return [1 + 0.5 * draw(width), draw(width)]

    projections = [x for _ in range(3) for x in dense(d, d_k)]
    wide = options.get("n_head", 1) * d_k
    made: dict[str, Callable[[], Inputs]] = {
        "attention": lambda: [draw(b, h, n, d_k) for _ in range(4)],
        "head": lambda: [draw(b, n, d), *projections, draw(b, n, d_k)],
        "head_dropout": lambda: [draw(b, n, d), *projections, (rng.random((b, n, n)) > 0.3) / 0.7, draw(b, n, d_k)],
        "multi_head": lambda: [
            *(draw(b, n, wide) for _ in range(3)), *(draw(wide, wide) / math.sqrt(wide) for _ in range(3)),
            draw(b, n, wide),
        ],
        "block": lambda: [
            draw(b, n, wide), *norm(wide), *dense(wide, 3 * wide), *dense(wide, wide), *norm(wide), *dense(wide, d),
            *dense(d, wide), draw(b, n, wide),
        ],
        "relu_block": lambda: made["block"](),
        "post_norm_block": lambda: made["block"](),
        "attention_dropout": lambda: [
            *(draw(b, h, n, d_k) for _ in range(3)), (rng.random((b, h, n, n)) > 0.3) / 0.7, draw(b, h, n, d_k)
        ],
        "rope_attention": lambda: [
            *(draw(b, h, n, 2 * d_k) for _ in range(3)), int(rng.integers(0, 30)) + np.arange(n),
            draw(b, h, n, 2 * d_k),
        ],
        "grouped_query_attention": lambda: [draw(b, 3 * h, n, d_k), draw(b, h, n, d_k), draw(b, h, n, d_k),
                                            draw(b, 3 * h, n, d_k)],
        "self_attention": lambda: [
            draw(b, n, wide), *dense(wide, 3 * wide), *dense(wide, wide), draw(b, n, wide)
        ],
        "self_attention_separate": lambda: [
            draw(b, n, wide), *(x for _ in range(4) for x in dense(wide, wide)), draw(b, n, wide)
        ],
        "cross_attention": lambda: [
            draw(b, n, wide), draw(b, n + 2, wide), draw(b, n + 2, wide),
            *(x for _ in range(4) for x in dense(wide, wide)), draw(b, n, wide),
        ],
        "loss_head": lambda: [
            draw(b, n, d), *dense(d, v), rng.integers(0, v, (b, n)), float(rng.uniform(0.4, 0.9))
        ],
        "tied_head": lambda: [
            rng.integers(0, v, (b, n)), draw(v, d), *norm(d), rng.integers(0, v, (b, n)), float(rng.uniform(0.4, 0.9))
        ],
        "dpo": lambda: [*(20 * draw(n) for _ in range(4)), float(rng.uniform(0.4, 0.9))],
        "softmax": lambda: [3 * draw(b, n, d), draw(b, n, d)],
        "relu": lambda: [draw(b, n, d), draw(b, n, d)],
        "silu": lambda: [2 * draw(b, n, d), draw(b, n, d)],
        "layer_norm": lambda: [draw(b, n, d), *norm(d), draw(b, n, d)],
        "rms_norm": lambda: [draw(b, n, d), norm(d)[0], draw(b, n, d)],
        "linear": lambda: [draw(b, n, d), *dense(d, d_k), draw(b, n, d_k)],
        "lora": lambda: [
            draw(b, n, d), draw(d, d_k), draw(d, h), draw(h, d_k), float(rng.uniform(1, 20)), draw(b, n, d_k)
        ],
        "embedding": lambda: [rng.integers(0, v, (b, n)), draw(v, d), draw(b, n, d)],
        "tied_embedding": lambda: [rng.integers(0, v, (b, n)), draw(v, d), draw(b, n, v)],
        "softmax_cross_entropy": lambda: [draw(b, n, v), rng.integers(0, v, (b, n)), float(rng.uniform(0.4, 0.9))],
        "next_token_loss": lambda: [draw(b, n + 1, v), rng.integers(0, v, (b, n + 1)), float(rng.uniform(0.4, 0.9))],
        "gelu": lambda: [2 * draw(b, n, d), draw(b, n, d)],
        "swiglu": lambda: [2 * draw(b, n, d), draw(b, n, d), draw(b, n, d)],
        "rope": lambda: [draw(b, h, n, 2 * d_k), int(rng.integers(0, 30)) + np.arange(n), draw(b, h, n, 2 * d_k)],
        "adamw": lambda: [draw(n, d), draw(n, d), draw(n, d), draw(n, d) ** 2 + 0.1, int(rng.integers(1, 300))],
        "adamw_step": lambda: [
            *dense(d, d_k), draw(b, n, d), draw(b, n, d_k), draw(d, d_k), draw(d, d_k) ** 2 + 0.1, draw(d_k),
            draw(d_k) ** 2 + 0.1, int(rng.integers(1, 300)),
        ],
    }  # fmt: skip
    return made[layer]()
