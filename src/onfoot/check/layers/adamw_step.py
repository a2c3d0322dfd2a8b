"""A whole step of AdamW for a linear layer, in steps: its gradients, clipped together, then both updates."""

from __future__ import annotations

import math

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import adamw, linear
from onfoot.ops import adamw_update, linear_backward, linear_forward

DEFAULTS: dict[str, float] = {**adamw.DEFAULTS, "max_norm": 1.0}

PIECES = Pieces(
    **vars(adamw.PIECES),
    dweight=linear.PIECES.dweight,
    dbias=linear.PIECES.dbias,
    total_norm=lambda dweight, dbias: math.sqrt(float((dweight * dweight).sum() + (dbias * dbias).sum())),
    clip=lambda norm, max_norm: max_norm / norm if norm > max_norm else 1.0,
    clipped_weight=lambda dweight, scale, max_norm: scale * dweight,
    clipped_bias=lambda dbias, scale, max_norm: scale * dbias,
    decay_of_bias=lambda decay: 0.0,
)


def steps(
    p: Pieces,
    weight: Array,
    bias: Array,
    x: Array,
    dout: Array,
    m_weight: Array,
    v_weight: Array,
    m_bias: Array,
    v_bias: Array,
    step: int,
    max_norm: float = 1.0,
    weight_decay: float = 0.1,
    **options: float,
) -> Gradients:
    dweight, dbias = p.dweight(x, dout), p.dbias(dout)
    scale = p.clip(p.total_norm(dweight, dbias), max_norm)
    dweight, dbias = p.clipped_weight(dweight, scale, max_norm), p.clipped_bias(dbias, scale, max_norm)
    of_weight = adamw.steps(p, weight, dweight, m_weight, v_weight, step, weight_decay=weight_decay, **options)
    decay = p.decay_of_bias(weight_decay)
    of_bias = adamw.steps(p, bias, dbias, m_bias, v_bias, step, weight_decay=decay, **options)
    return of_weight[0], of_bias[0], *of_weight[1:], *of_bias[1:]


def reference(
    weight: Array,
    bias: Array,
    x: Array,
    dout: Array,
    m_weight: Array,
    v_weight: Array,
    m_bias: Array,
    v_bias: Array,
    step: int,
    **options: float,
) -> Gradients:
    _, dweight, dbias = linear_backward(dout, linear_forward(x, weight, bias)[1])
    assert dbias is not None
    norm = float(np.linalg.norm(np.concatenate([dweight.ravel(), dbias])))
    scale = options["max_norm"] / norm if norm > options["max_norm"] else 1.0
    found = []
    for state, grad, decay in (
        ((weight, m_weight, v_weight), dweight, options["weight_decay"]),
        ((bias, m_bias, v_bias), dbias, 0.0),
    ):
        updated = [array.copy() for array in state]
        betas = options["beta1"], options["beta2"]
        adamw_update(
            updated[0], updated[1], updated[2], scale * grad, options["lr"], betas, options["eps"], decay, step
        )
        found.append(updated)
    (weight, m_weight, v_weight), (bias, m_bias, v_bias) = found
    return weight, bias, m_weight, v_weight, m_bias, v_bias


def cases(rng: np.random.Generator, sizes: Sizes = ANY, **options: float) -> list[Case]:
    def case(name: str, step: int, norm: float, exact: bool = False) -> Case | None:
        """The gradients have this norm; beyond 10⁹ max_norms, max_norm/(norm + 1e-6), PyTorch's form, is the same."""
        b, n, n_in, n_out = distinct(rng, 4)
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=n_in)
        if fitted is None:
            return None
        (b, n, n_in), n_out = fitted, sizes.nearest("width", n_out)
        draw = rng.standard_normal
        weight, bias, x, dout = draw((n_in, n_out)), draw(n_out), draw((b, n, n_in)), draw((b, n, n_out))
        _, dweight, dbias = linear.reference(x, weight, bias, dout)
        dout *= norm * options["max_norm"] / np.linalg.norm(np.concatenate([dweight.ravel(), dbias]))
        moments: list[Array] = []
        for array in (weight, bias):
            m, v = 0.1 * draw(array.shape), (0.1 * draw(array.shape)) ** 2 + 1e-2
            moments += [0 * m, 0 * v] if step == 1 else [m, v]
        found = {"n": n, "B": b, "B·n": b * n, "in": n_in, "out": n_out}
        return Case(name, (weight, bias, x, dout, *moments, step), found)

    found = [
        case("odd sizes", int(rng.integers(2, 6)), 0.4),
        case("the first step", 1, 0.7),
        case("a late step", int(rng.integers(200, 400)), 0.2),
        case("gradients that are clipped", int(rng.integers(2, 6)), 1e11),
        case("clipped in the first step", 1, 1e12),
    ]
    return kept(found)


ADAMW_STEP = Layer(
    name="adamw_step",
    arguments=("weight", "bias", "x", "dout", "m_weight", "v_weight", "m_bias", "v_bias", "step"),
    gradients=("weight", "bias", "m_weight", "v_weight", "m_bias", "v_bias"),
    contract=(
        "one step for a linear layer out = x weight + bias: the gradients dweight and dbias, both multiplied by "
        "max_norm/‖(dweight, dbias)‖ if that is below 1, then AdamW; the bias is not decayed; results are returned",
        "weight, m_weight, v_weight (in, out); bias, m_bias, v_bias (out); x (batch, tokens, in); dout (batch, tokens, "
        "out); step counts from 1; " + ", ".join(f"{name} = {value:g}" for name, value in DEFAULTS.items()),
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options=DEFAULTS,
    sizes=("batch", "tokens", "width"),
    parts=("adamw", "linear"),
)
