"""Verifies the corpus against oracles of its own: forward passes in torch, differentiated by autograd in float64.

    python tests/check/fresh/verify.py [-v]

Every wrong case must have exactly the results wrong that it declares (off by more than 1e-6, relative to
the largest entry of the oracle's, in at least one of the draws), and all its other results right to 1e-9 in
every draw; every right case must be right to 1e-9 in every draw.
"""

import math
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import development
import final

RIGHT, WRONG = 1e-9, 1e-6
T = torch.as_tensor


def normal(rng, *shape):
    return rng.standard_normal(shape)


# --- the oracles: per layer the names of the results, the arguments (drawn) and the forward pass


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
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


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
        return torch.nn.functional.embedding(ids, weight)


class TiedEmbedding(Embedding):
    def forward(self, ids, weight):
        return torch.nn.functional.embedding(ids, weight) @ weight.T


class CrossEntropy:
    names = ("logits", "targets")
    returned = ("logits",)
    scalar = True

    def draw(self, rng, b, t, scale, options):
        return [scale * normal(rng, b, t, 9), rng.integers(0, 9, (b, t))]

    def forward(self, logits, targets, reduction="mean"):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class NextTokenLoss(CrossEntropy):
    names = ("logits", "ids")

    def forward(self, logits, ids, reduction="mean"):
        return super().forward(logits[:, :-1], ids[:, 1:], reduction)


class Gelu:
    names = ("x",)

    def draw(self, rng, b, t, scale, options):
        return [1.5 * scale * normal(rng, b, t, 7)]

    def forward(self, x, form="tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if form == "tanh" else "none")


class Swiglu:
    names = ("gate", "up")

    def draw(self, rng, b, t, scale, options):
        return [1.5 * scale * normal(rng, b, t, 7), normal(rng, b, t, 7)]

    def forward(self, gate, up):
        return torch.nn.functional.silu(gate) * up


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
        f = torch.nn.functional.gelu(linear(norm(h, g2, b2, 1e-5), wf, bf), approximate="tanh")
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
}

# (seed, batch, tokens, scale of the inputs): the first two are ordinary, the third has small inputs
DRAWS = [(0, 2, 5, 1.0), (1, 3, 6, 1.0), (2, 3, 4, 1e-2)]


def setup(layer, draw, options):
    """The function's arguments, the names of its results, and what they should be."""
    seed, b, t, scale = draw
    rng = np.random.default_rng(seed)
    oracle = ORACLES[layer]
    args = oracle.draw(rng, b, t, scale, options)
    if layer == "adamw":
        return args, oracle.returned, oracle.results(*args, **options)
    leaves = [T(a) if isinstance(a, np.ndarray) else a for a in args]
    returned = getattr(oracle, "returned", oracle.names)
    wanted = [leaves[oracle.names.index(n)].requires_grad_() for n in returned]
    out = oracle.forward(*leaves, **options)
    dout = 0.5 + 0.1 * b if getattr(oracle, "scalar", False) else normal(rng, *out.shape)
    refs = torch.autograd.grad(out, wanted, T(np.asarray(dout)))
    return [*args, dout], tuple("d" + n for n in returned), [r.numpy() for r in refs]


def error(got, ref):
    """The largest error relative to the largest entry; infinite where the shape differs or a value is no number."""
    got = np.asarray(got.detach() if isinstance(got, torch.Tensor) else got, dtype=np.float64)
    if got.shape != ref.shape or not np.isfinite(got).all():
        return np.inf
    return np.abs(got - ref).max() / max(np.abs(ref).max(), 1e-3)


def errors(case, draw):
    args, names, refs = setup(case.layer, draw, case.options)
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    got = case.function(*copies)
    changed = [i for i, (a, c) in enumerate(zip(args, copies, strict=True)) if not np.array_equal(a, c)]
    assert not changed, (case.function.__name__, "changes its arguments", changed)
    got = [got] if len(refs) == 1 and not isinstance(got, tuple | list) else list(got)
    assert len(got) == len(refs), (case.function.__name__, len(got))
    return dict(zip(names, (error(g, r) for g, r in zip(got, refs, strict=True)), strict=True))


def problems(case):
    """What is not as the case declares, and whether its mistake shows in the ordinary draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [errors(case, draw) for draw in DRAWS]
    worst = {n: max(e[n] for e in every) for n in every[0]}
    ordinary = {n for n in worst if max(e[n] for e in every[:2]) > WRONG}
    found = {n for n, e in worst.items() if e > WRONG}
    text = []
    if found != set(case.wrong):
        text.append(f"wrong are {','.join(n for n in worst if n in found) or '-'}, declared {','.join(case.wrong)}")
    text += [f"{n} off by {e:.1e}" for n, e in worst.items() if RIGHT < e <= WRONG]
    if (case.mistake is None) != (not case.wrong):
        text.append("a wrong case needs a mistake, a right one has none")
    return text, ordinary, worst


def main():
    verbose = "-v" in sys.argv
    bad = 0
    names = set()
    for module in (development, final):
        counts = {}
        for case in module.CASES:
            text, ordinary, worst = problems(case)
            where = f"{module.__name__}.{case.function.__name__} ({case.layer})"
            assert where not in names, where
            names.add(where)
            row = counts.setdefault(case.layer, [0, 0])
            row[not case.wrong] += 1
            if text:
                bad += 1
                print(f"{where}: {'; '.join(text)}  [{case.mistake}]")
            elif case.wrong and not ordinary:
                print(f"{where}: shows with small inputs only  [{case.mistake}]")
            if verbose:
                print(where, {n: f"{e:.1e}" for n, e in worst.items()})
        print(
            f"{module.__name__}: {sum(c[0] for c in counts.values())} wrong, {sum(c[1] for c in counts.values())} right"
        )
        for layer, (wrong, right) in counts.items():
            print(f"  {layer:22} {wrong:3} wrong {right:3} right")
    print("all as declared" if not bad else f"{bad} not as declared")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
