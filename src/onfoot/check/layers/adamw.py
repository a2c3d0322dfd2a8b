"""AdamW's update, in steps. It is not a gradient, but it can be wrong in the same ways."""

from __future__ import annotations

import math

import numpy as np

from onfoot.check.case_sizes import ANY, FIRST, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import adamw_update

DEFAULTS: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

PIECES = Pieces(
    decayed=lambda param, lr, decay: param * (1 - lr * decay),
    effective_gradient=lambda grad, param, decay: grad,
    first=lambda m, g, beta1: beta1 * m + (1 - beta1) * g,
    second=lambda v, g, beta1, beta2: beta2 * v + (1 - beta2) * (g * g),
    first_corrected=lambda m, beta1, beta2, t: m / (1 - beta1**t),
    second_corrected=lambda v, beta1, beta2, t: v / (1 - beta2**t),
    denominator=lambda v, eps: np.sqrt(v) + eps,
    updated=lambda param, lr, m, denominator, decay: param - lr * m / denominator,
)


def steps(
    p: Pieces,
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Gradients:
    g = p.effective_gradient(grad, param, weight_decay)
    m, v = p.first(m, g, beta1), p.second(v, g, beta1, beta2)
    denominator = p.denominator(p.second_corrected(v, beta1, beta2, step), eps)
    decayed = p.decayed(param, lr, weight_decay)
    updated = p.updated(decayed, lr, p.first_corrected(m, beta1, beta2, step), denominator, weight_decay)
    return updated, m, v


def reference(param: Array, grad: Array, m: Array, v: Array, step: int, **options: float) -> Gradients:
    updated = param.copy(), m.copy(), v.copy()
    betas = options["beta1"], options["beta2"]
    adamw_update(*updated, grad, options["lr"], betas, options["eps"], options["weight_decay"], step)
    return updated


def cases(rng: np.random.Generator, sizes: Sizes = ANY, **options: float) -> list[Case]:
    def case(name: str, step: int, size: float = 1.0) -> Case | None:
        rows, columns = distinct(rng, 2, 3)
        shape = sizes.fit(FIRST if name == "an early step" else name, tokens=rows, width=columns)
        if shape is None:
            return None
        draw = rng.standard_normal
        m, v = size * draw(shape), (size * draw(shape)) ** 2 + size**2
        if step == 1:
            m, v = np.zeros(shape), np.zeros(shape)
        return Case(name, (draw(shape), size * draw(shape), m, v, step), {"√(1 − β₂ᵗ)": math.sqrt(1 - 0.95**step)})

    found = [
        case("the first step", 1),
        case("an early step", int(rng.integers(2, 6))),
        case("a late step", int(rng.integers(200, 400))),
        case("gradients as small as eps", int(rng.integers(2, 9)), 1e-8),
    ]
    return kept(found)


ADAMW = Layer(
    name="adamw",
    arguments=("param", "grad", "m", "v", "step"),
    gradients=("param", "m", "v"),
    contract=(
        "one update of AdamW: param ← param (1 − lr weight_decay) − lr m̂/(√v̂ + eps), returned, not in place",
        "param, grad, m, v (rows, columns); step counts from 1; "
        + ", ".join(f"{name} = {value:g}" for name, value in DEFAULTS.items()),
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options=DEFAULTS,
    sizes=("width",),
)
