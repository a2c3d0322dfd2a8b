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


UPDATE: dict[str, Maker] = {"adamw": adamw}
