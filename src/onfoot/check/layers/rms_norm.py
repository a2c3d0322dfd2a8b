"""RMS norm, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows
from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces
from onfoot.check.layers.layer_norm import norm_cases, norm_inputs
from onfoot.ops import rms_norm_backward, rms_norm_forward

PIECES = Pieces(
    rms_centred=lambda x: x,
    mean_square=lambda x: (x * x).mean(axis=-1, keepdims=True),
    rms_rstd=lambda mean_square, eps: 1 / np.sqrt(mean_square + eps),
    rms_normed=lambda x, rstd: x * rstd,
    rms_dnormed=lambda dy, weight: dy * weight,
    rms_along=lambda normed, dnormed: (normed * dnormed).mean(axis=-1, keepdims=True),
    rms_along_term=lambda along, normed, x: normed * along,
    rms_mean_term=lambda dnormed: np.zeros(()),
    rms_bracket=lambda dnormed, mean, along, weight: dnormed - mean - along,
    rms_dx=lambda bracket, rstd: bracket * rstd,
    rms_dweight=lambda dy, normed, x: rows(dy * normed).sum(axis=0),
)


def steps(p: Pieces, x: Array, weight: Array, dout: Array, eps: float = 1e-6) -> Gradients:
    centred = p.rms_centred(x)
    rstd = p.rms_rstd(p.mean_square(centred), eps)
    normed = p.rms_normed(centred, rstd)
    dnormed = p.rms_dnormed(dout, weight)
    along = p.rms_along_term(p.rms_along(normed, dnormed), normed, centred)
    dx = p.rms_dx(p.rms_bracket(dnormed, p.rms_mean_term(dnormed), along, weight), rstd)
    return dx, p.rms_dweight(dout, normed, centred)


def reference(x: Array, weight: Array, dout: Array, eps: float = 1e-6) -> Gradients:
    return rms_norm_backward(dout, rms_norm_forward(x, weight, eps)[1])


def cases(rng: np.random.Generator, eps: float = 1e-6, sizes: Sizes = ANY) -> list[Case]:
    found = []
    for name, (b, n, d), changes in norm_cases(rng, sizes):
        x, weight, _, dout = norm_inputs(rng, b, n, d, **changes)
        found.append(Case(name, (x, weight, dout), {"d": d, "n": n, "B": b, "B·n": b * n}))
    return found


RMS_NORM = Layer(
    name="rms_norm",
    arguments=("x", "weight", "dout"),
    gradients=("dx", "dweight"),
    contract=(
        "out = x/√(mean of x² + eps) ∘ weight, over the last axis; eps = 1e-6",
        "x, dout (batch, tokens, features); weight (features)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"eps": 1e-6},
    sizes=("batch", "tokens", "width"),
)
