"""Softmax over the last axis, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.learn.layers.own import mistake
from onfoot.ops.attention import softmax, softmax_backward

PIECES = Pieces(
    weights=softmax,
    row_dots=lambda drho, rho: (drho * rho).sum(axis=-1, keepdims=True),
    dscores=lambda drho, rho, dots: (drho - dots) * rho,
)


def steps(p: Pieces, scores: Array, dout: Array) -> Gradients:
    rho = p.weights(scores)
    return (p.dscores(dout, rho, p.row_dots(dout, rho)),)


def reference(scores: Array, dout: Array) -> Gradients:
    return (softmax_backward(dout, softmax(scores)),)


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, drawn: Sequence[int], spread: float = 1.0, exact: bool = False) -> Case | None:
        shape = sizes.fit(name, exact, batch=drawn[0], tokens=drawn[1], width=drawn[2])
        if shape is None:
            return None
        scores, dout = spread * rng.standard_normal(shape), rng.standard_normal(shape)
        return Case(name, (scores, dout), {"d": shape[2], "n": shape[1], "B": shape[0]})

    square = int(rng.integers(4, 9))
    found = [
        case("odd sizes", distinct(rng, 3)),
        case("other sizes", distinct(rng, 3, 3, 11)),
        case("as many rows as columns", (2, square, square), exact=True),
        case("large scores", distinct(rng, 3, 3), 20.0),
        case("one number", (1, 1, 1), exact=True),
    ]
    return kept(found)


MISTAKES = (
    mistake(
        "learn_softmax",
        "25",
        "the other weights of the row forgotten",
        "Only each weight's own derivative ρ (1 − ρ) is used; a score also changes all other weights of its row.",
        "subtract the row's sum of dρ ρ, not ρ dρ of the entry alone",
        dscores=lambda drho, rho, dots: drho * rho * (1 - rho),
    ),
    mistake(
        "learn_softmax",
        "25",
        "the row sum missing",
        "The gradient is dρ ρ: the denominator of softmax is treated as a constant.",
        "the denominator depends on every score of the row",
        dscores=lambda drho, rho, dots: drho * rho,
    ),
    mistake(
        "learn_softmax",
        "25",
        "the row sum not multiplied by ρ",
        "The row sum is subtracted after dρ was multiplied by ρ, so it lacks the factor ρ.",
        "multiply the whole difference by ρ",
        dscores=lambda drho, rho, dots: drho * rho - dots,
    ),
    mistake(
        "learn_softmax",
        "25",
        "the sum over the wrong axis",
        "The sum runs over the rows, but softmax normalises each row by itself.",
        "sum over the last axis",
        row_dots=lambda drho, rho: (drho * rho).sum(axis=-2, keepdims=True),
    ),
    mistake(
        "learn_softmax",
        "25",
        "the mean in place of the row sum",
        "The row's products dρ ρ are averaged; the weights already sum to 1, so they are summed.",
        "use the sum",
        row_dots=lambda drho, rho: (drho * rho).mean(axis=-1, keepdims=True),
    ),
    mistake(
        "learn_softmax",
        "25",
        "the sum over the whole array",
        "The sum runs over all rows together, but softmax normalises each row by itself.",
        "sum over the last axis only, with keepdims=True",
        row_dots=lambda drho, rho: (drho * rho).sum(),
    ),
    mistake(
        "learn_softmax",
        "25",
        "the row sum of dρ without ρ",
        "The plain sum of dρ over the row is subtracted; its entries must be weighted by ρ.",
        "sum the products of dρ and ρ",
        row_dots=lambda drho, rho: drho.sum(axis=-1, keepdims=True),
    ),
)

SOFTMAX = Layer(
    name="learn_softmax",
    arguments=("scores", "dout"),
    gradients=("dscores",),
    contract=("out = exp(scores) over its sum along the last axis", "scores, dout (batch, tokens, tokens)"),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
    mistakes=MISTAKES,
)
