"""Valid calls of every pair and every single of the kernels, each with the formula that says what it should give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onfoot import kernels, ops
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import KINDS, quantize

Rng = np.random.Generator


@dataclass
class Call:
    """A function of kernels, the same by formulas, and arguments that both take."""

    name: str
    ours: Callable[..., Any]
    formula: Callable[..., Any]
    args: list[Any]


def normal(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def sizes(rng: Rng, n: int, low: int = 1, high: int = 12) -> list[int]:
    return [int(x) for x in rng.integers(low, high, n)]


def _rows(rng: Rng) -> tuple[int, ...]:
    """Leading axes: a few rows, many, or a batch of sequences."""
    few, many, b = int(rng.integers(1, 9)), int(rng.integers(9, 40)), int(rng.integers(1, 4))
    return [(few,), (many,), (b, few), (b, many)][int(rng.integers(4))]


def linear(rng: Rng) -> list[Any]:
    c, d = sizes(rng, 2, 1, 40)
    weight = normal(rng, c, d) if rng.random() < 0.7 else normal(rng, d, c).T
    return [normal(rng, *_rows(rng), c), weight, normal(rng, d) if rng.random() < 0.7 else None]


def quantized_linear(rng: Rng) -> list[Any]:
    c, d = 32 * int(rng.integers(1, 4)), int(rng.integers(1, 40))
    return [normal(rng, *_rows(rng), c), quantize(normal(rng, d, c), str(rng.choice(KINDS))).T, normal(rng, d)]


def layer_norm(rng: Rng) -> list[Any]:
    c = int(rng.integers(2, 50))
    return [normal(rng, *_rows(rng), c), normal(rng, c), normal(rng, c), 1e-5]


def rms_norm(rng: Rng) -> list[Any]:
    x, weight, _, _ = layer_norm(rng)
    return [x, weight, 1e-6]


def activation(rng: Rng) -> list[Any]:
    return [normal(rng, *_rows(rng), int(rng.integers(1, 50)))]


def swiglu(rng: Rng) -> list[Any]:
    (gate,) = activation(rng)
    return [gate, normal(rng, *gate.shape)]


def dropout(rng: Rng) -> list[Any]:
    (x,) = activation(rng)
    return [x, (2 * (rng.random(x.shape) < 0.5)).astype(np.float32)]


def embedding(rng: Rng) -> list[Any]:
    v, c = sizes(rng, 2, 1, 20)
    return [rng.integers(0, v, _rows(rng)), normal(rng, v, c)]


def cross_entropy(rng: Rng) -> list[Any]:
    v, lead = int(rng.integers(2, 30)), _rows(rng)
    return [normal(rng, *lead, v), _targets(rng, v, lead), 7.0]


def _targets(rng: Rng, v: int, lead: tuple[int, ...]) -> np.ndarray:
    targets = rng.integers(0, v, lead)
    targets[rng.random(lead) < 0.2] = IGNORE
    return targets


def _keep(rng: Rng, *shape: int) -> np.ndarray | None:
    """A dropout pattern, or none."""
    return (2 * (rng.random(shape) < 0.5)).astype(np.float32) if rng.random() < 0.4 else None


def attention(rng: Rng, group: int = 1) -> list[Any]:
    b, h, n, more, dk, dv = sizes(rng, 6, 1, 9)
    n, more = n * int(rng.choice([1, 4])), more - 1
    q, k, v = normal(rng, b, group * h, n, dk), normal(rng, b, h, n + more, dk), normal(rng, b, h, n + more, dv)
    start = rng.integers(0, n + more + 1, (b, 1, n)) if rng.random() < 0.4 else None
    return [q, k, v, bool(rng.random() < 0.7), start, _keep(rng, *q.shape[:3], n + more)]


def grouped_query(rng: Rng) -> list[Any]:
    return attention(rng, int(rng.integers(1, 4)))


def rope(rng: Rng) -> list[Any]:
    b, h, t, half = sizes(rng, 4, 1, 9)
    angle = 9 * normal(rng, *((b, 1, t, half) if rng.random() < 0.5 else (t, half)))
    return [normal(rng, b, h, t, 2 * half), np.cos(angle), np.sin(angle)]


def lora_linear(rng: Rng) -> list[Any]:
    x, weight, bias = linear(rng) if rng.random() < 0.7 else quantized_linear(rng)
    r = int(rng.integers(1, 6))
    low_rank = normal(rng, weight.shape[0], r), normal(rng, r, weight.shape[1])
    return [x, weight, bias, *low_rank, 0.5, _keep(rng, *x.shape)]


def logits_loss(rng: Rng) -> list[Any]:
    x, weight, bias = linear(rng)
    weight = np.ascontiguousarray(weight.T)
    return [x, weight, bias, _targets(rng, weight.shape[0], x.shape[:-1]), 3.0]


def _logits_loss_formula(x: Any, weight: Any, bias: Any, targets: Any, divisor: float) -> tuple[Any, Any]:
    logits, head = ops.linear_forward(x, weight.T, bias)
    loss, saved = ops.cross_entropy_forward(logits, targets, divisor)
    return loss, (head, saved)


def _logits_loss_formula_backward(dloss: float, saved: Any) -> Any:
    dx, dweight, dbias = ops.linear_backward(ops.cross_entropy_backward(dloss, saved[1]), saved[0])
    return dx, dweight.T, dbias


MAKERS: dict[str, tuple[str, Callable[[Rng], list[Any]]]] = {
    "attention": ("attention", attention),
    "cross_entropy": ("cross_entropy", cross_entropy),
    "dropout": ("dropout", dropout),
    "embedding": ("embedding", embedding),
    "frozen_linear": ("frozen_linear", linear),
    "frozen_linear of blocks": ("frozen_linear", quantized_linear),
    "frozen_logits_loss": ("frozen_logits_loss", logits_loss),
    "gelu_erf": ("gelu_erf", activation),
    "gelu_tanh": ("gelu_tanh", activation),
    "grouped_query": ("grouped_query", grouped_query),
    "layer_norm": ("layer_norm", layer_norm),
    "linear": ("linear", linear),
    "logits_loss": ("logits_loss", logits_loss),
    "lora_linear": ("lora_linear", lora_linear),
    "relu": ("relu", activation),
    "rms_norm": ("rms_norm", rms_norm),
    "rope": ("rope", rope),
    "swiglu": ("swiglu", swiglu),
}
FORMULAS: dict[str, Callable[..., Any]] = {
    "logits_loss_forward": _logits_loss_formula,
    "logits_loss_backward": _logits_loss_formula_backward,
    "frozen_logits_loss_forward": _logits_loss_formula,
    "frozen_logits_loss_backward": lambda dloss, saved: _logits_loss_formula_backward(dloss, saved)[0],
}


def formula(name: str) -> Callable[..., Any]:
    return FORMULAS.get(name) or getattr(ops, name)


def _output(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)[0]


def forward(rng: Rng, which: str) -> Call:
    """A forward half: its output."""
    name, make = MAKERS[which]
    ours = kernels.table()[f"{name}_forward"]
    return Call(f"{which}_forward", _output(ours), _output(formula(f"{name}_forward")), make(rng))


def backward(rng: Rng, which: str) -> Call:
    """A backward half, on what its forward half saved; now and then, on what another call of it saved."""
    name, make = MAKERS[which]
    args = make(rng)
    y, ours = kernels.table()[f"{name}_forward"](*args)
    _, saved = formula(f"{name}_forward")(*args)
    if rng.random() < 0.15:
        y = kernels.table()[f"{name}_forward"](*make(rng))[0]
        which += " of another call"
    dy = normal(rng, *np.shape(y)) if np.ndim(y) else float(rng.normal())
    back, right = kernels.table()[f"{name}_backward"], formula(f"{name}_backward")
    return Call(f"{which}_backward", lambda dy: back(dy, ours), lambda dy: right(dy, saved), [dy])


def _skip(rng: Rng, name: str) -> Call:
    args = lora_linear(rng) if name == "lora_linear" else linear(rng)
    skip = normal(rng, *args[0].shape[:-1], args[1].shape[1])
    right = formula(f"{name}_forward")

    def by_formula(x: Any, weight: Any, bias: Any, skip: Any, *more: Any) -> Any:
        return skip + right(x, weight, bias, *more)[0]

    return Call(f"{name}_skip", _output(kernels.table()[f"{name}_skip"]), by_formula, [*args[:3], skip, *args[3:]])


def _layer_norm_skip_backward(rng: Rng) -> Call:
    args = layer_norm(rng)
    y, ours = kernels.table()["layer_norm_forward"](*args)
    _, saved = ops.layer_norm_forward(*args)
    back = kernels.table()["layer_norm_skip_backward"]

    def by_formula(dy: Any, dskip: Any) -> Any:
        dx, dweight, dbias = ops.layer_norm_backward(dy, saved)
        return dskip + dx, dweight, dbias

    both = [normal(rng, *y.shape), normal(rng, *y.shape)]
    return Call("layer_norm_skip_backward", lambda dy, dskip: back(dy, ours, dskip), by_formula, both)


def _embedding_add_backward(rng: Rng) -> Call:
    ids, weight = embedding(rng)
    y, ours = kernels.table()["embedding_forward"](ids, weight)
    saved = ops.embedding_forward(ids, weight)[1]
    back = kernels.table()["embedding_add_backward"]

    def by_kernel(dy: Any, total: Any) -> Any:
        back(dy, ours, total)
        return total

    def by_formula(dy: Any, total: Any) -> Any:
        total += ops.embedding_backward(dy, saved)
        return total

    return Call("embedding_add_backward", by_kernel, by_formula, [normal(rng, *y.shape), normal(rng, *weight.shape)])


def _adamw_updates(rng: Rng) -> Call:
    shapes = [tuple(sizes(rng, int(rng.integers(1, 3)), 1, 40)) for _ in range(int(rng.integers(1, 4)))]
    args = [x for shape in shapes for x in (*(normal(rng, *shape) for _ in "pm"), normal(rng, *shape) ** 2)]
    args += [normal(rng, *shape) for shape in shapes]
    n = len(shapes)

    def update(function: Callable[..., None], *arrays: Any) -> list[Any]:
        updates = [(*arrays[3 * i : 3 * i + 3], arrays[3 * n + i], 0.1 * (i % 2)) for i in range(n)]
        function(updates, 1e-2, (0.9, 0.999), 1e-8, 3, 0.5)
        return list(arrays[: 3 * n])

    ours, right = (partial(update, f) for f in (kernels.table()["adamw_updates"], ops.adamw_updates))
    return Call("adamw_updates", ours, right, args)


def _small(rng: Rng, name: str) -> Call:
    x = normal(rng, *sizes(rng, 3, 1, 20))
    args = [x, normal(rng, *x.shape[int(rng.integers(0, 3)) :])] if name == "add" else [x]
    return Call(name, kernels.table()[name], getattr(ops, name), args)


def _logits_loss_value(rng: Rng) -> Call:
    right = lambda *args: _logits_loss_formula(*args)[0]  # noqa: E731
    return Call("logits_loss_value", kernels.table()["logits_loss_value"], right, logits_loss(rng))


SINGLES: dict[str, Callable[[Rng], Call]] = {
    "adamw_updates": _adamw_updates,
    "add": partial(_small, name="add"),
    "embedding_add_backward": _embedding_add_backward,
    "frozen_linear_skip": partial(_skip, name="frozen_linear"),
    "layer_norm_skip_backward": _layer_norm_skip_backward,
    "linear_skip": partial(_skip, name="linear"),
    "logits_loss_value": _logits_loss_value,
    "lora_linear_skip": partial(_skip, name="lora_linear"),
    "sum_first": partial(_small, name="sum_first"),
    "sum_of_squares": partial(_small, name="sum_of_squares"),
}
