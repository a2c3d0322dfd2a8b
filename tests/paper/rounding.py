"""The figures of docs/equations/mixed_precision.md: what 16-bit numbers do to gradients, sums and updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

import onfoot
import oracles
from onfoot import ops
from onfoot.models.model import Model

HALF, BRAIN = torch.float16, torch.bfloat16


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray], np.ndarray]]:
    """Each op: its forward, its backward, its inputs and an upstream gradient."""
    r, (t, d) = rng(), (128, 64)
    x, dy, w, b, gain = (r.normal(size=s) for s in ((t, d), (t, d), (d, d), (d,), (d,)))
    q, k, v = r.normal(size=(3, t, d))
    targets = torch.from_numpy(r.integers(0, d, t))
    return {
        "linear": (ops.linear_forward, ops.linear_backward, [x, w / 8, b], dy),
        "GELU": (ops.gelu_tanh_forward, ops.gelu_tanh_backward, [x], dy),
        "layer norm": (ops.layer_norm_forward, ops.layer_norm_backward, [x + 10, gain, b], dy),
        "attention": (ops.attention_forward, ops.attention_backward, [q, k, v], dy),
        "cross-entropy": (
            lambda a: ops.cross_entropy_forward(a, targets, t),
            ops.cross_entropy_backward,
            [4 * x],
            np.ones(()),
        ),
    }


def run(forward: Any, backward: Any, inputs: list[np.ndarray], dy: np.ndarray, dtype: Any, inside: Any) -> np.ndarray:
    """The gradient of the first input: inputs and upstream gradient rounded to `dtype`, arithmetic in `inside`."""
    rounded = [torch.from_numpy(np.asarray(x)).to(dtype).to(inside) for x in (*inputs, dy)]
    _, saved = forward(*rounded[:-1])
    gradient = backward(rounded[-1], saved)
    return (gradient[0] if isinstance(gradient, tuple) else gradient).double().numpy()


def errors_of_ops() -> dict[str, tuple[float, float]]:
    """Of the gradient in bfloat16: with inputs rounded and arithmetic in float32, and with all arithmetic rounded."""
    out = {}
    for name, case in cases().items():
        exact = run(*case, torch.float64, torch.float64)
        out[name] = tuple(oracles.relative_error(run(*case, BRAIN, x), exact) for x in (torch.float32, BRAIN))
    return out  # type: ignore[return-value]


def network() -> tuple[Model, np.ndarray]:
    config = onfoot.GPT2Config(n_layer=4, n_head=4, n_embd=64, n_positions=64, vocab_size=200)
    model = onfoot.create(config, seed=0, dtype="float64", engine="numpy")
    return model, rng().integers(0, 200, (8, 64))


@cache
def gradients() -> np.ndarray:
    """Every gradient of a small GPT-2 in float64, as one vector, without the exact zeros."""
    model, tokens = network()
    _, grads = model.loss_and_grads(tokens)
    every = np.concatenate([g.ravel() for g in grads.values()])
    return every[every != 0]


def underflow(scale: float, dtype: Any) -> tuple[float, float]:
    """The share of gradients that become 0 in this format, and that become subnormal, if the loss is scaled."""
    g = torch.from_numpy(gradients() * scale)
    stored = g.to(dtype).double().abs()
    zero, tiny = stored == 0, (stored > 0) & (stored < torch.finfo(dtype).tiny)
    return zero.double().mean().item(), tiny.double().mean().item()


def network_errors() -> dict[str, float]:
    """Of all gradients of the network as one vector, against float64, by PyTorch's own mixed precision."""
    model, tokens = network()
    targets = np.concatenate([tokens[:, 1:], np.full((8, 1), -100)], axis=1)
    _, exact = oracles.gpt2_loss_and_grads(dict(model.params), model.config, tokens, targets)

    def error(weights: Any, autocast: Any) -> float:
        leaves = {k: torch.tensor(v).to(weights).requires_grad_() for k, v in model.params.items()}
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            logits = oracles.gpt2_logits(leaves, model.config, torch.tensor(tokens))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
        loss.backward()
        got = np.concatenate([leaves[k].grad.double().numpy().ravel() for k in exact])
        return oracles.relative_error(got, np.concatenate([g.ravel() for g in exact.values()]))

    return {
        "all in float32": error(torch.float32, None),
        "weights in float32, products in bfloat16": error(torch.float32, BRAIN),
        "everything in bfloat16": error(BRAIN, None),
    }


def lost_updates(rate: float, dtype: Any) -> float:
    """The share of weights, of deviation 0.02, that a step of ±rate leaves where they were."""
    w = torch.from_numpy(rng().normal(0, 0.02, 100_000)).to(dtype)
    step = torch.from_numpy(rate * rng().choice([-1.0, 1.0], 100_000))
    return ((w.double() + step).to(dtype) == w).double().mean().item()


def sum_of_ones(n: int, dtype: Any) -> float:
    """1 + 1 + …, n times, each partial sum rounded."""
    total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    for _ in range(n):
        total = total + one
    return total.item()
