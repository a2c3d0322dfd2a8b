"""Heads with a loss, DPO and a whole step of AdamW, by autograd of changed graphs or by torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from planted.network import Spoilt
from planted.registry import autograd, plant

HEAD, TIED, DPO, STEP = "loss_head", "tied_head", "dpo", "adamw_step"


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_head(x, weight, bias, targets, dout):
    return autograd(lambda x, w, b: loss_of(x @ w + b, targets), [x, weight, bias], dout)


@plant(HEAD, "the gradient of softmax applied twice")
def softmax_again(x, weight, bias, targets, dout):
    def forward(x, w, b):
        logits = x @ w + b
        y = logits.detach().softmax(-1)
        return loss_of(Spoilt.apply(logits, lambda d: y * d - y * (y * d).sum(-1, keepdim=True)), targets)

    return autograd(forward, [x, weight, bias], dout)


@plant(HEAD, "dx not divided by the number of targets")
def dx_of_the_sum(x, weight, bias, targets, dout):
    dx, dweight, dbias = loss_head(x, weight, bias, targets, dout)
    return dx * targets.numel(), dweight, dbias


@plant(HEAD, "dweight and dbias not divided by the number of targets")
def parameters_of_the_sum(x, weight, bias, targets, dout):
    dx, dweight, dbias = loss_head(x, weight, bias, targets, dout)
    return dx, dweight * targets.numel(), dbias * targets.numel()


# the tied table: two copies of it, one per use


def tied(ids, weight, ln_weight, ln_bias, targets, dout, rows=None, features=None, logits=None, sign=1.0):
    def forward(table, head, w, b):
        embedded = table[ids] if rows is None else rows(table)
        normed = F.layer_norm(embedded, embedded.shape[-1:], w, b)
        out = (normed if features is None else features(normed, embedded)) @ head.T
        return loss_of(out if logits is None else Spoilt.apply(out, logits(out.detach())), targets)

    table, head, w, b = autograd(forward, [weight, weight, ln_weight, ln_bias], dout)
    return table + sign * head, w, b


@plant(TIED, "the gradient of softmax applied twice")
def tied_softmax_again(ids, weight, ln_weight, ln_bias, targets, dout):
    def again(logits):
        y = logits.softmax(-1)
        return lambda d: y * d - y * (y * d).sum(-1, keepdim=True)

    return tied(ids, weight, ln_weight, ln_bias, targets, dout, logits=again)


@plant(TIED, "the logits' path subtracted")
def difference(ids, weight, ln_weight, ln_bias, targets, dout):
    return tied(ids, weight, ln_weight, ln_bias, targets, dout, sign=-1.0)


def dlogits(ids, weight, ln_weight, ln_bias, targets, dout):
    """The gradient of the logits, the norm's output, and both uses' gradients by hand from there."""
    embedded = weight[ids]
    normed = F.layer_norm(embedded, embedded.shape[-1:], ln_weight, ln_bias)
    d = (normed @ weight.T).softmax(-1) - F.one_hot(targets, len(weight))
    return d * dout / targets.numel(), embedded, normed


def added(ids, rows, n):
    return torch.zeros(n, rows.shape[-1], dtype=rows.dtype).index_add_(0, ids.flatten(), rows.flatten(0, 1))


@plant(TIED, "the layer norm left out of the backward pass")
def past_the_norm(ids, weight, ln_weight, ln_bias, targets, dout):
    _, dw, db = tied(ids, weight, ln_weight, ln_bias, targets, dout)
    d, _, normed = dlogits(ids, weight, ln_weight, ln_bias, targets, dout)
    return added(ids, d @ weight, len(weight)) + torch.einsum("btv,btc->vc", d, normed), dw, db


@plant(TIED, "the embedding in place of the norm's output in the logits' path")
def unnormed(ids, weight, ln_weight, ln_bias, targets, dout):
    dweight, dw, db = tied(ids, weight, ln_weight, ln_bias, targets, dout)
    d, embedded, normed = dlogits(ids, weight, ln_weight, ln_bias, targets, dout)
    return dweight + torch.einsum("btv,btc->vc", d, embedded - normed), dw, db


@plant(TIED, "the embedding's rows added at the targets")
def at_the_targets(ids, weight, ln_weight, ln_bias, targets, dout):
    d, embedded, normed = dlogits(ids, weight, ln_weight, ln_bias, targets, dout)

    def norm(e, w, b):
        return F.layer_norm(e, e.shape[-1:], w, b)

    dembedded, dw, db = autograd(norm, [embedded, ln_weight, ln_bias], d @ weight)
    return added(targets, dembedded, len(weight)) + torch.einsum("btv,btc->vc", d, normed), dw, db


# DPO


def dpo(chosen, rejected, ref_chosen, ref_rejected, dout, loss=None, beta=0.1):
    def forward(c, r):
        gains = c - ref_chosen, r - ref_rejected
        each = -F.logsigmoid(beta * (gains[0] - gains[1])) if loss is None else loss(c, r, *gains)
        return each.mean()

    return autograd(forward, [chosen, rejected], dout)


def dpo_with(name: str, /, loss: Any = None, change: Any = None) -> None:
    @plant(DPO, name)
    def backward(chosen, rejected, ref_chosen, ref_rejected, dout):
        given = [torch.as_tensor(x) for x in (chosen, rejected, ref_chosen, ref_rejected)]
        found = dpo(*given, dout, loss)
        return found if change is None else change(len(chosen), *found)


class Undone(torch.autograd.Function):
    """−log σ(m), with another derivative."""

    @staticmethod
    def forward(ctx, m, slope):
        ctx.save_for_backward(m)
        ctx.slope = slope
        return -F.logsigmoid(m)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.slope(*ctx.saved_tensors), None


dpo_with("the reference ignored", loss=lambda c, r, a, b: -F.logsigmoid(0.1 * (c - r)))
dpo_with(
    "σ(m) in place of σ(−m)", loss=lambda c, r, a, b: Undone.apply(0.1 * (a - b), lambda m: -1 / (1 + torch.exp(-m)))
)
dpo_with("σ missing from the weight", loss=lambda c, r, a, b: -0.1 * (a - b))
dpo_with("beta missing from the gradient", change=lambda n, c, r: (10 * c, 10 * r))
dpo_with("beta missing from the margin", loss=lambda c, r, a, b: -0.1 * F.logsigmoid(a - b))
dpo_with("the gradient of log σ(m)", change=lambda n, c, r: (r, c))
dpo_with("both answers pushed the same way", change=lambda n, c, r: (c, c))
dpo_with("a mean loss whose gradient is not divided", change=lambda n, c, r: (n * c, n * r))


# a whole step


def step_of(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step, clip=None, decay_bias=0.0):
    """torch.optim.AdamW with two groups of parameters, after clipping."""
    w, b = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())
    w.grad, b.grad = torch.einsum("bti,bto->io", x, dout), dout.sum((0, 1))
    if clip is None:
        torch.nn.utils.clip_grad_norm_([w, b], 1.0)
    else:
        clip(w, b)
    groups = [{"params": [w], "weight_decay": 0.1}, {"params": [b], "weight_decay": decay_bias}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for parameter, m, v in ((w, m_weight, v_weight), (b, m_bias, v_bias)):
        state = {"step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        optimizer.state[parameter] = state
    optimizer.step()
    moments = [optimizer.state[p][name] for p in (w, b) for name in ("exp_avg", "exp_avg_sq")]
    return w.detach(), b.detach(), *moments


def step_with(name: str, /, **changes: Any) -> None:
    @plant(STEP, name)
    def update(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
        return step_of(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step, **changes)


def scaled_by(factor: Any) -> Any:
    """Both gradients times a function of their norm."""

    def clip(w, b):
        norm = torch.cat([w.grad.flatten(), b.grad]).norm()
        w.grad, b.grad = w.grad * factor(norm), b.grad * factor(norm)

    return clip


def separately(w, b):
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    torch.nn.utils.clip_grad_norm_([b], 1.0)


def of_the_weight(w, b):
    factor = min(1.0, 1 / float(w.grad.norm()))
    w.grad, b.grad = w.grad * factor, b.grad * factor


def bias_untouched(w, b):
    kept = b.grad.clone()
    torch.nn.utils.clip_grad_norm_([w, b], 1.0)
    b.grad = kept


step_with("no clipping", clip=lambda w, b: None)
step_with("each gradient clipped by its own norm", clip=separately)
step_with("entries clipped in place of the norm", clip=lambda w, b: torch.nn.utils.clip_grad_value_([w, b], 1.0))
step_with("gradients scaled up to max_norm", clip=scaled_by(lambda norm: 1 / norm))
step_with("the squared norm in the clipping", clip=scaled_by(lambda norm: min(1.0, 1 / float(norm) ** 2)))
step_with("the bias left out of the norm", clip=of_the_weight)
step_with("the bias not clipped", clip=bias_untouched)
step_with("the bias decayed as well", decay_bias=0.1)


def step_by_hand(weight, bias, x, dout, m_weight, v_weight, m_bias, v_bias, step):
    """Right, in NumPy."""
    grads = [np.tensordot(x, dout, axes=([0, 1], [0, 1])), dout.sum(axis=0).sum(axis=0)]
    total = np.sqrt(sum(np.vdot(g, g) for g in grads))
    grads = [g / max(total, 1.0) for g in grads]
    found, moments = [], []
    for p, g, m, v, decay in zip((weight, bias), grads, (m_weight, m_bias), (v_weight, v_bias), (1e-3, 0), strict=True):
        m, v = m + 0.1 * (g - m), v + 0.05 * (g * g - v)
        found.append(p - decay * p - 1e-2 * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8))
        moments += [m, v]
    return *found, *moments
