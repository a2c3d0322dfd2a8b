"""A frozen linear layer with a LoRA adapter, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows
from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import lora_linear_backward, lora_linear_forward

WIDE = 64  # from here on, the rank is more than half of it: beyond a tile of 16, 32 or 64

PIECES = Pieces(
    scale=lambda alpha, rank: alpha / rank,
    low=lambda x, down: x @ down,
    dlow=lambda dy, up, scale: scale * (dy @ up.T),
    frozen_path=lambda dy, weight: dy @ weight.T,
    adapter_path=lambda dlow, down, scale: dlow @ down.T,
    both_dx=lambda frozen, adapter: frozen + adapter,
    ddown=lambda x, dlow, scale: rows(x).T @ rows(dlow),
    dup=lambda low, dy, scale: scale * (rows(low).T @ rows(dy)),
)


def steps(p: Pieces, x: Array, weight: Array, down: Array, up: Array, alpha: float, dout: Array) -> Gradients:
    scale = p.scale(alpha, down.shape[1])
    dlow = p.dlow(dout, up, scale)
    dx = p.both_dx(p.frozen_path(dout, weight), p.adapter_path(dlow, down, scale))
    return dx, p.ddown(x, dlow, scale), p.dup(p.low(x, down), dout, scale)


def reference(x: Array, weight: Array, down: Array, up: Array, alpha: float, dout: Array) -> Gradients:
    saved = lora_linear_forward(x, weight, None, down, up, alpha / down.shape[1])[1]
    return lora_linear_backward(dout, saved)


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, *shape: int, alpha: float, fresh: bool = False, exact: bool = False) -> Case | None:
        b, n, n_in, n_out, r = shape
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=n_in)
        if fitted is None:
            return None
        (b, n, n_in), n_out = fitted, sizes.nearest("width", n_out)
        r += n_in // 2 if n_in > WIDE else 0
        draw = rng.standard_normal
        x, weight, down, up = draw((b, n, n_in)), draw((n_in, n_out)), draw((n_in, r)), draw((r, n_out))
        inputs = (x, weight, down, 0 * up if fresh else up, alpha, draw((b, n, n_out)))
        return Case(
            name,
            inputs,
            {"r": r, "α": alpha, "α/r": alpha / r, "d_in": n_in, "d_out": n_out, "n": n, "B": b, "B·n": b * n},
        )

    square = int(rng.integers(5, 9))
    found = [
        case("odd sizes", *distinct(rng, 5, 2, 9), alpha=16.0),
        case("other sizes", *distinct(rng, 5, 3, 12), alpha=5.0),
        case("rank 1", *distinct(rng, 4), 1, alpha=3.0),
        case("a fresh adapter, up = 0", *distinct(rng, 4), 3, alpha=7.0, fresh=True),
        case("as many features out as in", *distinct(rng, 2), square, square, 3, alpha=8.0),
        case("one token", 1, 1, *distinct(rng, 2, 4, 9), 2, alpha=10.0, exact=True),
    ]
    return kept(found)


LORA = Layer(
    name="lora",
    arguments=("x", "weight", "down", "up", "alpha", "dout"),
    gradients=("dx", "ddown", "dup"),
    contract=(
        "out = x weight + (alpha/r) x down up; weight is frozen, and dx flows through both paths",
        "x (batch, tokens, in); weight (in, out); down (in, r); up (r, out); alpha a number; dout as out",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
)
