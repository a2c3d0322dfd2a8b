"""AdamW's update: the running means, the corrections and the decay in several equal orders."""

from __future__ import annotations

import math
from typing import Any

import torch

from campaigns.right_functions.author import Author, Function, Maker, tensor


def adamw(author: Author) -> Function:
    xp = author.xp
    running = author.choose(
        "mean",
        {
            "weighted": lambda a, b, beta: beta * a + (1 - beta) * b,
            "moved": lambda a, b, beta: a + (1 - beta) * (b - a),
            "less": lambda a, b, beta: a - (1 - beta) * (a - b),
        },
    )
    corrected = author.draw("both", "step size", "one root", "denominator")
    decay, square = author.draw("first", "last", "together"), author.draw("g·g", "g²")

    def move(m: Any, v: Any, step: int, lr: float, beta1: float, beta2: float, eps: float) -> Any:
        """lr m̂/(√v̂ + eps)."""
        one, two = 1 - beta1**step, 1 - beta2**step
        if corrected == "both":
            return lr * (m / one) / (xp.sqrt(v / two) + eps)
        if corrected == "step size":
            return lr / one * m / (xp.sqrt(v) / math.sqrt(two) + eps)
        if corrected == "one root":
            return lr * math.sqrt(two) / one * (m / (xp.sqrt(v) + eps * math.sqrt(two)))
        return m * (lr / (one * (xp.sqrt(v / two) + eps)))

    def by_hand(
        param: Any, grad: Any, m: Any, v: Any, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        for what, option in (("corrected", corrected), ("decay", decay), ("square", square)):
            author.used(what, option)
        m = running(m, grad, beta1)
        v = running(v, grad * grad if square == "g·g" else grad**2, beta2)
        moved = move(m, v, step, lr, beta1, beta2, eps)
        if decay == "first":
            return param * (1 - lr * weight_decay) - moved, m, v
        if decay == "last":
            return (param - moved) - lr * weight_decay * param, m, v
        return param - (moved + lr * (weight_decay * param)), m, v

    def by_torch(
        param: Any, grad: Any, m: Any, v: Any, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        p = torch.nn.Parameter(tensor(param).clone())
        p.grad = tensor(grad).clone()
        optimizer = torch.optim.AdamW([p], lr, (beta1, beta2), eps, weight_decay, foreach=with_foreach)
        state = {"step": torch.tensor(float(step - 1)), "exp_avg": tensor(m).clone(), "exp_avg_sq": tensor(v).clone()}
        optimizer.state[p] = state
        optimizer.step()
        found = optimizer.state[p]
        return tuple(author.array(x) for x in (p, found["exp_avg"], found["exp_avg_sq"]))

    with_foreach = bool(author.draw(False, True))
    return by_torch if author.yes("torch.optim", 0.25) else by_hand


def adamw_step(author: Author) -> Function:
    """The gradients of a linear layer, clipped together, then both updates."""
    update, xp = adamw(author), author.xp
    norm = author.choose(
        "norm",
        {
            "sum of squares": lambda a, b: math.sqrt(float((a * a).sum() + (b * b).sum())),
            "norm of norms": lambda a, b: math.hypot(float(xp.linalg.norm(a)), float(xp.linalg.norm(b))),
            "one long vector": lambda a, b: float(xp.linalg.norm(xp.concatenate([a.reshape(-1), b]))),
        },
    )
    clip = author.choose(
        "clip",
        {
            "if larger": lambda n, most: most / n if n > most else 1.0,
            "min": lambda n, most: min(1.0, most / n) if n else 1.0,
            "max": lambda n, most: most / max(n, most),
        },
    )

    def backward(
        weight: Any, bias: Any, x: Any, dout: Any, m_weight: Any, v_weight: Any, m_bias: Any, v_bias: Any, step: int,
        max_norm: float = 1.0, weight_decay: float = 0.1, **options: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        dweight, dbias = author.dweight(x, dout), author.over_tokens(dout)
        scale = clip(norm(dweight, dbias), max_norm)
        weights = update(weight, scale * dweight, m_weight, v_weight, step, weight_decay=weight_decay, **options)
        biases = update(bias, scale * dbias, m_bias, v_bias, step, weight_decay=0.0, **options)
        return weights[0], biases[0], *weights[1:], *biases[1:]

    return backward


UPDATE: dict[str, Maker] = {"adamw": adamw, "adamw_step": adamw_step}
