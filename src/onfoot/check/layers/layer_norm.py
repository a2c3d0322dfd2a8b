"""Layer norm, in steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onfoot.arrays import rows
from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import layer_norm_backward, layer_norm_forward

PIECES = Pieces(
    mean=lambda x: x.mean(axis=-1, keepdims=True),
    centred=lambda x, mean: x - mean,
    variance=lambda centred: (centred * centred).mean(axis=-1, keepdims=True),
    rstd=lambda variance, eps: 1 / np.sqrt(variance + eps),
    normed=lambda centred, rstd: centred * rstd,
    dnormed=lambda dy, weight: dy * weight,
    mean_term=lambda dnormed: dnormed.mean(axis=-1, keepdims=True),
    along_term=lambda normed, dnormed: (normed * dnormed).mean(axis=-1, keepdims=True),
    bracket=lambda dnormed, mean, along, normed, weight: dnormed - mean - normed * along,
    norm_dx=lambda bracket, rstd: bracket * rstd,
    norm_dweight=lambda dy, normed, x: rows(dy * normed).sum(axis=0),
    norm_dbias=lambda dy: rows(dy).sum(axis=0),
)


def steps(p: Pieces, x: Array, weight: Array, bias: Array, dout: Array, eps: float = 1e-5) -> Gradients:
    centred = p.centred(x, p.mean(x))
    rstd = p.rstd(p.variance(centred), eps)
    normed = p.normed(centred, rstd)
    dnormed = p.dnormed(dout, weight)
    mean, along = p.mean_term(dnormed), p.along_term(normed, dnormed)
    dx = p.norm_dx(p.bracket(dnormed, mean, along, normed, weight), rstd)
    return dx, p.norm_dweight(dout, normed, x), p.norm_dbias(dout)


def reference(x: Array, weight: Array, bias: Array, dout: Array, eps: float = 1e-5) -> Gradients:
    return layer_norm_backward(dout, layer_norm_forward(x, weight, bias, eps)[1])


def norm_inputs(rng: np.random.Generator, b: int, n: int, d: int, **changes: Any) -> tuple[Array, Array, Array, Array]:
    """x, weight, bias and dout; the weights differ, since with equal ones a misplaced γ would not show."""
    x = changes.get("spread", 1.0) * rng.standard_normal((b, n, d)) + changes.get("offset", 0.3)
    if changes.get("constant"):
        x[:, ::2] = rng.uniform(0.1, 0.4, (b, (n + 1) // 2, 1))
    weight = 1 + 0.6 * rng.standard_normal(d)
    return x, weight, rng.standard_normal(d), rng.standard_normal((b, n, d))


def norm_cases(rng: np.random.Generator, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """(name, sizes, changes) of the inputs of layer norm and RMS norm."""
    square = int(rng.integers(4, 9))
    found: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("odd sizes", tuple(distinct(rng, 3)), {}),
        ("other sizes", tuple(distinct(rng, 3, 4, 12)), {}),
        ("one token", (1, 1, int(rng.integers(3, 9))), {"exact": True}),
        ("as many tokens as features", (2, square, square), {"exact": True}),
        ("a variance as small as eps", tuple(distinct(rng, 3, 3)), {"spread": 3e-3, "offset": 0.0}),
        ("constant rows", tuple(distinct(rng, 3, 3)), {"constant": True}),
        ("a large mean", tuple(distinct(rng, 3, 3)), {"offset": 6.0}),
    ]
    for name, (b, n, d), changes in found:
        fitted = sizes.fit(name, changes.pop("exact", False), batch=b, tokens=n, width=d)
        if fitted is not None:
            yield name, fitted, changes


def cases(rng: np.random.Generator, eps: float = 1e-5, sizes: Sizes = ANY) -> list[Case]:
    return [
        Case(name, norm_inputs(rng, b, n, d, **changes), {"d": d, "n": n, "B": b, "B·n": b * n})
        for name, (b, n, d), changes in norm_cases(rng, sizes)
        if eps or not changes.get("constant")  # without eps, constant rows divide by 0
    ]


LAYER_NORM = Layer(
    name="layer_norm",
    arguments=("x", "weight", "bias", "dout"),
    gradients=("dx", "dweight", "dbias"),
    contract=(
        "out = ā ∘ weight + bias with ā = (x − mean)/√(variance + eps), over the last axis; eps = 1e-5",
        "x, dout (batch, tokens, features); weight, bias (features)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"eps": 1e-5},
    sizes=("batch", "tokens", "width"),
)
