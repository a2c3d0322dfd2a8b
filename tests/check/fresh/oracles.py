"""Oracles of the 32 layers: the names of the results, drawn arguments, and the forward pass in torch."""

import math

import numpy as np
import torch

F = torch.nn.functional
T = torch.as_tensor


def normal(rng, *shape):
    return rng.standard_normal(shape)


def causal_softmax(s, causal):
    if causal:
        n = s.shape[-1]
        s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1)


def attend(q, k, v, causal, keep=None):
    p = causal_softmax(q @ k.mT / math.sqrt(q.shape[-1]), causal)
    if keep is not None:
        p = p * keep
    return p @ v


def rotate(x, positions, theta=10000.0):
    d = x.shape[-1]
    angle = positions[:, None] * theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def split(x, n):
    return x.unflatten(-1, (n, -1)).transpose(-3, -2)


def merge(x):
    return x.transpose(-3, -2).flatten(-2)


def norm(x, weight, bias, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def linear(x, w, b):
    return x @ w + b


class Attention:
    names = ("q", "k", "v")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, 3, t, 4), normal(rng, b, 3, t, 4), normal(rng, b, 3, t, 6)]

    def forward(self, q, k, v, causal=True):
        return attend(q, k, v, causal)


class Head:
    names = ("a", "w_q", "b_q", "w_k", "b_k", "w_v", "b_v")

    def draw(self, rng, b, t, scale, options):
        d, d_k, d_v = 5, 4, 6
        parts = [(d, d_k), (d_k,), (d, d_k), (d_k,), (d, d_v), (d_v,)]
        return [scale * normal(rng, b, t, d), *(0.7 * normal(rng, *s) for s in parts)]

    def forward(self, a, w_q, b_q, w_k, b_k, w_v, b_v, keep=None, causal=True, rotary=False):
        q, k, v = a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v
        if rotary:
            positions = torch.arange(a.shape[1], dtype=torch.float64)
            q, k = rotate(q, positions), rotate(k, positions)
        return attend(q, k, v, causal, keep)


class HeadDropout(Head):
    fixed = ("keep",)

    def draw(self, rng, b, t, scale, options):
        keep = (rng.random((b, t, t)) > 0.3) / 0.7
        return [*super().draw(rng, b, t, scale, options), keep]


class MultiHead:
    names = ("query", "key", "value", "w_q", "w_k", "w_v")

    def draw(self, rng, b, t, scale, options):
        return [*(scale * normal(rng, b, t, 6) for _ in range(3)), *(0.6 * normal(rng, 6, 6) for _ in range(3))]

    def forward(self, query, key, value, w_q, w_k, w_v, causal=True, n_head=2):
        return merge(attend(split(query @ w_q, n_head), split(key @ w_k, n_head), split(value @ w_v, n_head), causal))


class LayerNorm:
    names = ("x", "weight", "bias")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 7) + 0.3, 1 + 0.5 * normal(rng, 7), normal(rng, 7)]

    def forward(self, x, weight, bias, eps=1e-5):
        return norm(x, weight, bias, eps)


class RMSNorm:
    names = ("x", "weight")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 7), 1 + 0.5 * normal(rng, 7)]

    def forward(self, x, weight, eps=1e-6):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class Linear:
    names = ("x", "weight", "bias")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 5), normal(rng, 5, 6), normal(rng, 6)]

    def forward(self, x, weight, bias):
        return x @ weight + bias


class Lora:
    names = ("x", "weight", "down", "up", "alpha")
    returned = ("x", "down", "up")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 5), normal(rng, 5, 6), normal(rng, 5, 3), normal(rng, 3, 6), 1.7]

    def forward(self, x, weight, down, up, alpha):
        return x @ weight + alpha / down.shape[1] * (x @ down @ up)


class Embedding:
    names = ("ids", "weight")
    returned = ("weight",)

    def draw(self, rng, b, t, scale, options):
        return [rng.integers(0, 8, (b, t)), scale * normal(rng, 8, 5)]

    def forward(self, ids, weight):
        return F.embedding(ids, weight)


class TiedEmbedding(Embedding):
    def forward(self, ids, weight):
        return F.embedding(ids, weight) @ weight.T


class CrossEntropy:
    names = ("logits", "targets")
    returned = ("logits",)
    scalar = True

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 9), rng.integers(0, 9, (b, t))]

    def forward(self, logits, targets, reduction="mean"):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class NextTokenLoss(CrossEntropy):
    names = ("logits", "ids")

    def forward(self, logits, ids, reduction="mean"):
        return super().forward(logits[:, :-1], ids[:, 1:], reduction)


class Gelu:
    names = ("x",)

    def draw(self, rng, b, t, scale, options):
        return [1.5 * scale * normal(rng, b, t, 7)]

    def forward(self, x, form="tanh"):
        return F.gelu(x, approximate="tanh" if form == "tanh" else "none")


class Swiglu:
    names = ("gate", "up")

    def draw(self, rng, b, t, scale, options):
        return [1.5 * scale * normal(rng, b, t, 7), normal(rng, b, t, 7)]

    def forward(self, gate, up):
        return F.silu(gate) * up


class Rope:
    names = ("x", "positions")
    returned = ("x",)

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, 3, t, 8), np.arange(t) + (b == 3) * 4]

    def forward(self, x, positions, theta=10000.0):
        return rotate(x, positions.double(), theta)


class Block:
    names = (
        "x",
        "ln_1_weight",
        "ln_1_bias",
        "attn_weight",
        "attn_bias",
        "proj_weight",
        "proj_bias",
        "ln_2_weight",
        "ln_2_bias",
        "fc_weight",
        "fc_bias",
        "out_weight",
        "out_bias",
    )

    def draw(self, rng, b, t, scale, options):
        d = 6
        shapes = [(d, 3 * d), (3 * d,), (d, d), (d,)], [(d, 4 * d), (4 * d,), (4 * d, d), (d,)]
        args = [scale * normal(rng, b, t, d)]
        for part in shapes:
            args += [1 + 0.3 * normal(rng, d), 0.3 * normal(rng, d), *(0.5 * normal(rng, *s) for s in part)]
        return args

    def forward(self, x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, n_head=2, causal=True):
        q, k, v = (split(z, n_head) for z in linear(norm(x, g1, b1, 1e-5), wa, ba).chunk(3, -1))
        h = x + linear(merge(attend(q, k, v, causal)), wp, bp)
        f = F.gelu(linear(norm(h, g2, b2, 1e-5), wf, bf), approximate="tanh")
        return h + linear(f, wo, bo)


class AdamW:
    """The oracle is torch's optimizer, with its state set."""

    returned = ("param", "m", "v")

    def draw(self, rng, b, t, scale, options):
        shape = (b + 2, t)
        grad = scale * normal(rng, *shape)
        return [normal(rng, *shape), grad, 0.3 * scale * normal(rng, *shape), (scale * normal(rng, *shape)) ** 2, t]

    def results(self, param, grad, m, v, step, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1):
        p = torch.nn.Parameter(T(param).clone())
        opt = torch.optim.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        opt.state[p] = {"step": torch.tensor(float(step - 1)), "exp_avg": T(m).clone(), "exp_avg_sq": T(v).clone()}
        p.grad = T(grad).clone()
        opt.step()
        return [p.detach().numpy(), opt.state[p]["exp_avg"].numpy(), opt.state[p]["exp_avg_sq"].numpy()]


class AttentionDropout:
    names = ("q", "k", "v", "keep")
    returned = ("q", "k", "v")

    def draw(self, rng, b, t, scale, options):
        keep = (rng.random((b, 3, t, t)) > 0.3) / 0.7
        return [scale * normal(rng, b, 3, t, 4), normal(rng, b, 3, t, 4), normal(rng, b, 3, t, 4), keep]

    def forward(self, q, k, v, keep, causal=True):
        return attend(q, k, v, causal, keep)


class RopeAttention:
    names = ("q", "k", "v", "positions")
    returned = ("q", "k", "v")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, 3, t, 8), *(normal(rng, b, 3, t, 8) for _ in range(2)), np.arange(t) + b - 2]

    def forward(self, q, k, v, positions, causal=True, theta=10000.0):
        positions = positions.double()
        return attend(rotate(q, positions, theta), rotate(k, positions, theta), v, causal)


class GroupedQuery(Attention):
    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, 6, t, 4), normal(rng, b, 2, t, 4), normal(rng, b, 2, t, 4)]

    def forward(self, q, k, v, causal=True):
        groups = q.shape[1] // k.shape[1]
        index = torch.arange(q.shape[1]) // groups
        return attend(q, k[:, index], v[:, index], causal)


class SelfAttention:
    names = ("x", "w_qkv", "b_qkv", "w_o", "b_o")

    def draw(self, rng, b, t, scale, options):
        shapes = [(6, 18), (18,), (6, 6), (6,)]
        return [scale * normal(rng, b, t, 6), *(0.6 * normal(rng, *s) for s in shapes)]

    def forward(self, x, w, bias, w_o, b_o, causal=True, n_head=2):
        q, k, v = (split(z, n_head) for z in linear(x, w, bias).chunk(3, -1))
        return linear(merge(attend(q, k, v, causal)), w_o, b_o)


class Separate:
    names = ("x", "w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "b_o")

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 6), *(0.6 * normal(rng, *s) for s in [(6, 6), (6,)] * 4)]

    def forward(self, x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, causal=True, n_head=2):
        q, k, v = (split(linear(x, w, b), n_head) for w, b in [(w_q, b_q), (w_k, b_k), (w_v, b_v)])
        return linear(merge(attend(q, k, v, causal)), w_o, b_o)


class Cross:
    names = ("query", "key", "value", "w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "b_o")

    def draw(self, rng, b, t, scale, options):
        inputs = [scale * normal(rng, b, n, 6) for n in (t, t + 2, t + 2)]
        return [*inputs, *(0.6 * normal(rng, *s) for s in [(6, 6), (6,)] * 4)]

    def forward(self, query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, n_head=2):
        parts = (query, w_q, b_q), (key, w_k, b_k), (value, w_v, b_v)
        q, k, v = (split(linear(*p), n_head) for p in parts)
        return linear(merge(attend(q, k, v, False)), w_o, b_o)


class TiedHead:
    names = ("ids", "weight", "ln_weight", "ln_bias", "targets")
    returned = ("weight", "ln_weight", "ln_bias")
    scalar = True

    def draw(self, rng, b, t, scale, options):
        ids, targets = rng.integers(0, 8, (2, b, t))
        return [ids, scale * normal(rng, 8, 5), 1 + 0.5 * normal(rng, 5), normal(rng, 5), targets]

    def forward(self, ids, weight, g, b, targets):
        logits = norm(weight[ids], g, b, 1e-5) @ weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossHead:
    names = ("x", "weight", "bias", "targets")
    returned = ("x", "weight", "bias")
    scalar = True

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 5), normal(rng, 5, 9), normal(rng, 9), rng.integers(0, 9, (b, t))]

    def forward(self, x, weight, bias, targets):
        return F.cross_entropy((x @ weight + bias).flatten(0, 1), targets.flatten())


class Dpo:
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    returned = ("chosen", "rejected")
    scalar = True

    def draw(self, rng, b, t, scale, options):
        return [-20 * scale + 8 * scale * normal(rng, b + t) for _ in range(4)]

    def forward(self, chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
        return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


class Pointwise:
    names = ("x",)

    def __init__(self, f):
        self.f = f

    def draw(self, rng, b, t, scale, options):
        return [1.5 * scale * normal(rng, b, t, 7)]

    def forward(self, x):
        return self.f(x)


class ReluBlock(Block):
    def forward(self, x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, n_head=2, causal=True):
        q, k, v = (split(z, n_head) for z in linear(norm(x, g1, b1, 1e-5), wa, ba).chunk(3, -1))
        h = x + linear(merge(attend(q, k, v, causal)), wp, bp)
        return h + linear(linear(norm(h, g2, b2, 1e-5), wf, bf).relu(), wo, bo)


class PostNormBlock(Block):
    def forward(self, x, g1, b1, wa, ba, wp, bp, g2, b2, wf, bf, wo, bo, n_head=2, causal=True):
        q, k, v = (split(z, n_head) for z in linear(x, wa, ba).chunk(3, -1))
        h = norm(x + linear(merge(attend(q, k, v, causal)), wp, bp), g1, b1, 1e-5)
        return norm(h + linear(linear(h, wf, bf).relu(), wo, bo), g2, b2, 1e-5)


class AdamWStep:
    """The gradients by autograd, the clip by hand (torch's adds 1e-6 to the norm), torch's optimizer."""

    returned = ("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias")

    def draw(self, rng, b, t, scale, options):
        w, b_ = (5, 4), (4,)
        state = [0.1 * scale * normal(rng, *w), (0.3 * scale * normal(rng, *w)) ** 2]
        state += [0.1 * scale * normal(rng, *b_), (0.3 * scale * normal(rng, *b_)) ** 2]
        return [normal(rng, *w), normal(rng, *b_), normal(rng, b, t, 5), scale * normal(rng, b, t, 4), *state, t]

    def results(
        self,
        weight,
        bias,
        x,
        dout,
        m_w,
        v_w,
        m_b,
        v_b,
        step,
        lr=0.01,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        max_norm=1.0,
    ):
        w, b = (torch.nn.Parameter(T(p).clone()) for p in (weight, bias))
        (T(x) @ w + b).backward(T(dout))
        total = torch.cat([w.grad.flatten(), b.grad]).norm()
        for p in (w, b):
            p.grad *= min(1.0, max_norm / total.item())
        groups = [{"params": [w]}, {"params": [b], "weight_decay": 0.0}]
        opt = torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        for p, m, v in ((w, m_w, v_w), (b, m_b, v_b)):
            step_before = torch.tensor(float(step - 1))
            opt.state[p] = {"step": step_before, "exp_avg": T(m).clone(), "exp_avg_sq": T(v).clone()}
        opt.step()
        state = [opt.state[p][n].numpy() for p in (w, b) for n in ("exp_avg", "exp_avg_sq")]
        return [w.detach().numpy(), b.detach().numpy(), *state]


ORACLES = {
    "attention": Attention(),
    "head": Head(),
    "head_dropout": HeadDropout(),
    "multi_head": MultiHead(),
    "layer_norm": LayerNorm(),
    "rms_norm": RMSNorm(),
    "linear": Linear(),
    "lora": Lora(),
    "embedding": Embedding(),
    "tied_embedding": TiedEmbedding(),
    "softmax_cross_entropy": CrossEntropy(),
    "next_token_loss": NextTokenLoss(),
    "gelu": Gelu(),
    "swiglu": Swiglu(),
    "rope": Rope(),
    "block": Block(),
    "adamw": AdamW(),
    "attention_dropout": AttentionDropout(),
    "rope_attention": RopeAttention(),
    "grouped_query_attention": GroupedQuery(),
    "self_attention": SelfAttention(),
    "self_attention_separate": Separate(),
    "cross_attention": Cross(),
    "tied_head": TiedHead(),
    "loss_head": LossHead(),
    "dpo": Dpo(),
    "softmax": Pointwise(lambda x: x.softmax(-1)),
    "relu": Pointwise(torch.relu),
    "silu": Pointwise(F.silu),
    "relu_block": ReluBlock(),
    "post_norm_block": PostNormBlock(),
    "adamw_step": AdamWStep(),
}
