"""Autograd through a whole training run: the derivative of a query's loss with respect to each example's weight.

The training loop is written in PyTorch with create_graph=True; each example runs on its own, unpacked, and its loss has
a weight, which is a leaf. None of onfoot's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onfoot import GPT2Config
from oracles import gpt2_logits

Params = dict[str, torch.Tensor]
Logits = Callable[[Params, torch.Tensor], torch.Tensor]  # of (1, T) tokens
EPS = 1e-8


def examples_of(batch: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens and targets of each example of a batch, padding removed."""
    found = []
    segments = np.zeros_like(batch.tokens) if batch.segments is None else batch.segments
    for tokens, targets, numbers in zip(batch.tokens, batch.targets, segments, strict=True):
        for number in np.unique(numbers):
            mine = numbers == number
            used = np.flatnonzero(mine & (targets != -100))
            if used.size:
                keep = mine & (np.arange(len(tokens)) <= used[-1])
                found.append((tokens[keep], targets[keep]))
    return found


def summed_loss(logits: Logits, params: Params, tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
    out = logits(params, torch.tensor(tokens)[None])[0]
    return F.cross_entropy(out, torch.tensor(targets), ignore_index=-100, reduction="sum")


def weight_derivatives(
    logits: Logits,
    start: dict[str, np.ndarray],
    steps: list[list[tuple[int, np.ndarray, np.ndarray]]],
    query: tuple[np.ndarray, np.ndarray],
    n_examples: int,
    options: Any,
    zero_gradient: Callable[[str, torch.Tensor], torch.Tensor],
) -> tuple[np.ndarray, float, dict[str, np.ndarray], int]:
    """d(loss of the query)/d(weight of each example); also that loss, the final parameters, and the clipped steps.

    A step is a list of (example's number, tokens, targets).
    """
    w = torch.ones(n_examples, dtype=torch.float64, requires_grad=True)
    params = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in start.items()}
    m = {k: torch.zeros_like(p) for k, p in params.items()}
    v = {k: torch.zeros_like(p) for k, p in params.items()}
    beta1, beta2 = options.betas
    clipped = 0
    for t, examples in enumerate(steps, start=1):
        total = sum(w[e] * summed_loss(logits, params, tokens, targets) for e, tokens, targets in examples)
        count = sum(w[e] * int((targets != -100).sum()) for e, _, targets in examples)
        found = torch.autograd.grad(total / count, list(params.values()), create_graph=True)
        grads = {k: zero_gradient(k, g) for k, g in zip(params, found, strict=True)}
        norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped += int(norm > options.clip)
        scale = options.clip / norm if options.clip and norm > options.clip else 1.0
        warm = (t - 1) < options.warmup
        done = ((t - 1) - options.warmup) / max(options.steps - options.warmup, 1)
        share = t / options.warmup if warm else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        lr = options.lr * share
        after = {}
        for k, p in params.items():
            g = grads[k] * scale
            m[k] = beta1 * m[k] + (1 - beta1) * g
            v[k] = beta2 * v[k] + (1 - beta2) * g**2
            zero = v[k] == 0
            root = torch.sqrt(torch.where(zero, 1.0, v[k] / (1 - beta2**t)))
            spread = torch.where(zero, EPS, root + EPS)
            decay = options.weight_decay if p.ndim > 1 else 0.0
            after[k] = (1 - lr * decay) * p - lr * (m[k] / (1 - beta1**t)) / spread
        params = after
    loss = summed_loss(logits, params, *query)
    (dw,) = torch.autograd.grad(loss, [w])
    return dw.numpy(), loss.item(), {k: p.detach().numpy() for k, p in params.items()}, clipped


def zero_key_bias(config: GPT2Config) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """b_k has no effect; autograd's gradient of it is rounding noise, which AdamW would amplify."""
    n = config.n_head * config.key_width
    keep = torch.cat([torch.ones(n), torch.zeros(n), torch.ones(config.n_head * config.value_width)]).double()
    return lambda name, g: g * keep if name.endswith("c_attn.bias") else g


def gpt2(config: GPT2Config) -> Logits:
    def logits(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
            return gpt2_logits(params, config, tokens)

    return logits
