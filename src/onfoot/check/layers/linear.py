"""The linear layer, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows
from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import linear_backward, linear_forward

PIECES = Pieces(
    through=lambda dy, weight, x: dy @ weight.T,
    dweight=lambda x, dy: rows(x).T @ rows(dy),
    dbias=lambda dy: rows(dy).sum(axis=0),
)


def steps(p: Pieces, x: Array, weight: Array, bias: Array, dout: Array) -> Gradients:
    return p.through(dout, weight, x), p.dweight(x, dout), p.dbias(dout)


def reference(x: Array, weight: Array, bias: Array, dout: Array) -> Gradients:
    dx, dweight, dbias = linear_backward(dout, linear_forward(x, weight, bias)[1])
    assert dbias is not None
    return dx, dweight, dbias


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, *shape: int, exact: bool = False) -> Case | None:
        b, n, n_in, n_out = shape
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=n_in)
        if fitted is None:
            return None
        (b, n, n_in), n_out = fitted, sizes.nearest("width", n_out)
        draw = rng.standard_normal
        inputs = (draw((b, n, n_in)), draw((n_in, n_out)), draw(n_out), draw((b, n, n_out)))
        return Case(name, inputs, {"n": n, "B": b, "B·n": b * n, "in": n_in, "out": n_out})

    square = int(rng.integers(4, 9))
    found = [
        case("odd sizes", *distinct(rng, 4)),
        case("other sizes", *distinct(rng, 4, 3, 11)),
        case("one token", 1, 1, *distinct(rng, 2), exact=True),
        case("one feature in", *distinct(rng, 2), 1, 5, exact=True),
        case("as many features out as in", *distinct(rng, 2), square, square),
        case("as many tokens as features", 1, square, square, square, exact=True),
    ]
    return kept(found)


LINEAR = Layer(
    name="linear",
    arguments=("x", "weight", "bias", "dout"),
    gradients=("dx", "dweight", "dbias"),
    contract=(
        "out = x weight + bias",
        "x (batch, tokens, in); weight (in, out); bias (out); dout (batch, tokens, out)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
)
