"""Softmax as the checker knows it, with the exercise's own names and words for its mistakes."""

from __future__ import annotations

from dataclasses import replace

from onfoot.check.layers import LAYERS
from onfoot.learn.layers.own import mistake

MISTAKES = (
    mistake(
        "learn_softmax",
        "25",
        "the other weights of the row forgotten",
        "Only each weight's own derivative ρ (1 − ρ) is used; a score also changes all other weights of its row.",
        "subtract the row's sum of dρ ρ, not ρ dρ of the entry alone",
        dscores=lambda drho, rho, dots, scores, mask: drho * rho * (1 - rho),
    ),
    mistake(
        "learn_softmax",
        "25",
        "the row sum missing",
        "The gradient is dρ ρ: the denominator of softmax is treated as a constant.",
        "the denominator depends on every score of the row",
        dscores=lambda drho, rho, dots, scores, mask: drho * rho,
    ),
    mistake(
        "learn_softmax",
        "25",
        "the row sum not multiplied by ρ",
        "The row sum is subtracted after dρ was multiplied by ρ, so it lacks the factor ρ.",
        "multiply the whole difference by ρ",
        dscores=lambda drho, rho, dots, scores, mask: drho * rho - dots,
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

SOFTMAX = replace(
    LAYERS["softmax"],
    name="learn_softmax",
    arguments=("scores", "dout"),
    gradients=("dscores",),
    contract=("out = exp(scores) over its sum along the last axis", "scores, dout (batch, tokens, tokens)"),
    parts=(),
    mistakes=MISTAKES,
)
