"""Tangents of a linear layer, of softmax and of layer norm, in steps. They are forward passes."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers.layer_norm import norm_cases, norm_inputs
from onfoot.learn.layers.own import mistake
from onfoot.ops import layer_norm_forward, linear_forward
from onfoot.ops.attention import softmax
from onfoot.ops.tangents.layer_norm import layer_norm_tangent
from onfoot.ops.tangents.linear import linear_tangent

LINEAR_PIECES = Pieces(
    moved_input=lambda x_dot, weight, x: x_dot @ weight,
    moved_weight=lambda x, weight_dot: x @ weight_dot,
    moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: by_input + by_weight + bias_dot,
)


def linear_steps(p: Pieces, x: Array, weight: Array, bias: Array, *dots: Array) -> Gradients:
    x_dot, weight_dot, bias_dot = dots
    by_input, by_weight = p.moved_input(x_dot, weight, x), p.moved_weight(x, weight_dot)
    return (p.moved(by_input, by_weight, bias_dot, x_dot, weight_dot),)


def linear_reference(x: Array, weight: Array, bias: Array, *dots: Array) -> Gradients:
    x_dot, weight_dot, bias_dot = dots
    return (linear_tangent(x_dot, weight_dot, bias_dot, linear_forward(x, weight, bias)[1])[0],)


def linear_cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, *sizes: int) -> Case:
        b, n, n_in, n_out = sizes
        inputs = tuple(rng.standard_normal(shape) for shape in 2 * ((b, n, n_in), (n_in, n_out), (n_out,)))
        return Case(name, inputs, {"n": n, "B": b, "B·n": b * n, "in": n_in, "out": n_out})

    square = int(rng.integers(4, 9))
    return [
        case("odd sizes", *distinct(rng, 4)),
        case("other sizes", *distinct(rng, 4, 3, 11)),
        case("one token", 1, 1, *distinct(rng, 2)),
        case("as many features out as in", *distinct(rng, 2), square, square),
    ]


LINEAR_TANGENT = Layer(
    name="linear_tangent",
    arguments=("x", "weight", "bias", "x_dot", "weight_dot", "bias_dot"),
    gradients=("y_dot",),
    contract=("y_dot = the derivative of x weight + bias along x_dot, weight_dot, bias_dot",),
    cases=linear_cases,
    reference=linear_reference,
    steps=linear_steps,
    pieces=LINEAR_PIECES,
    mistakes=(
        mistake(
            "linear_tangent",
            "",
            "only the input moves",
            "y_dot = x_dot weight: weight and bias move as well.",
            "the product rule has a term for each of them",
            moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: by_input,
        ),
        mistake(
            "linear_tangent",
            "",
            "the product of the tangents in place of the product rule",
            "x_dot weight_dot: in each term of the product rule one factor moves, and the other is itself.",
            "x_dot weight + x weight_dot",
            moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: x_dot @ weight_dot + bias_dot,
        ),
        mistake(
            "linear_tangent",
            "",
            "the product of the tangents in place of the product rule, and the bias does not move",
            "x_dot weight_dot: in each term of the product rule one factor moves; and bias_dot is added to every row.",
            "x_dot weight + x weight_dot + bias_dot",
            moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: x_dot @ weight_dot,
        ),
        mistake(
            "linear_tangent",
            "",
            "the bias does not move",
            "The tangent of the bias is missing; it is added to every row.",
            "add bias_dot",
            moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: by_input + by_weight,
        ),
        mistake(
            "linear_tangent",
            "",
            "the weight does not move",
            "The term x weight_dot of the product rule is missing.",
            "add x weight_dot",
            moved=lambda by_input, by_weight, bias_dot, x_dot, weight_dot: by_input + bias_dot,
        ),
    ),
)

SOFTMAX_PIECES = Pieces(
    weights=softmax,
    row_dots=lambda scores_dot, rho: (scores_dot * rho).sum(axis=-1, keepdims=True),
    rho_dot=lambda scores_dot, rho, dots: (scores_dot - dots) * rho,
)


def softmax_steps(p: Pieces, scores: Array, scores_dot: Array) -> Gradients:
    rho = p.weights(scores)
    return (p.rho_dot(scores_dot, rho, p.row_dots(scores_dot, rho)),)


def softmax_reference(scores: Array, scores_dot: Array) -> Gradients:
    rho = softmax(scores)
    return ((scores_dot - (scores_dot * rho).sum(axis=-1, keepdims=True)) * rho,)


def softmax_cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, *sizes: int, spread: float = 1.0) -> Case:
        b, n, d = sizes
        scores, dot = spread * rng.standard_normal((b, n, d)), rng.standard_normal((b, n, d))
        return Case(name, (scores, dot), {"n": n, "B": b, "d": d})

    square = int(rng.integers(4, 9))
    return [
        case("odd sizes", *distinct(rng, 3)),
        case("other sizes", *distinct(rng, 3, 3, 11)),
        case("as many rows as columns", 2, square, square),
        case("large scores", *distinct(rng, 3, 3), spread=20.0),
    ]


SOFTMAX_TANGENT = Layer(
    name="softmax_tangent",
    arguments=("scores", "scores_dot"),
    gradients=("rho_dot",),
    contract=("rho_dot = the derivative of softmax(scores) along scores_dot",),
    cases=softmax_cases,
    reference=softmax_reference,
    steps=softmax_steps,
    pieces=SOFTMAX_PIECES,
    mistakes=(
        mistake(
            "softmax_tangent",
            "25",
            "the denominator held fixed",
            "rho_dot = rho scores_dot: the sum in the denominator moves as well.",
            "subtract the row's sum of rho scores_dot before multiplying by rho",
            rho_dot=lambda scores_dot, rho, dots: scores_dot * rho,
        ),
        mistake(
            "softmax_tangent",
            "25",
            "the other scores of the row forgotten",
            "Only each weight's own derivative ρ (1 − ρ) is used; every score of the row moves every weight.",
            "subtract the row's sum of rho scores_dot",
            rho_dot=lambda scores_dot, rho, dots: scores_dot * rho * (1 - rho),
        ),
    ),
)

NORM_PIECES = Pieces(
    along=lambda normed, x_dot: (normed * x_dot).mean(axis=-1, keepdims=True),
    mean_moves=lambda x_dot: x_dot.mean(axis=-1, keepdims=True),
    normed_dot=lambda x_dot, mean, normed, along, rstd: (x_dot - mean - normed * along) * rstd,
    scaled_dot=lambda normed_dot, weight, normed, weight_dot, bias_dot: (
        normed_dot * weight + normed * weight_dot + bias_dot
    ),
)


def norm_steps(p: Pieces, x: Array, weight: Array, bias: Array, *dots: Array) -> Gradients:
    x_dot, weight_dot, bias_dot = dots
    normed, rstd, _ = layer_norm_forward(x, weight, bias)[1]
    normed_dot = p.normed_dot(x_dot, p.mean_moves(x_dot), normed, p.along(normed, x_dot), rstd)
    return (p.scaled_dot(normed_dot, weight, normed, weight_dot, bias_dot),)


def norm_reference(x: Array, weight: Array, bias: Array, *dots: Array) -> Gradients:
    x_dot, weight_dot, bias_dot = dots
    return (layer_norm_tangent(x_dot, weight_dot, bias_dot, layer_norm_forward(x, weight, bias)[1])[0],)


def tangent_norm_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    found = []
    for name, (b, n, d), changes in norm_cases(rng, sizes):
        x, weight, bias, x_dot = norm_inputs(rng, b, n, d, **changes)
        dots = x_dot, rng.standard_normal(d), rng.standard_normal(d)
        found.append(Case(name, (x, weight, bias, *dots), {"d": d, "n": n, "B": b, "B·n": b * n}))
    return found


LAYER_NORM_TANGENT = Layer(
    name="layer_norm_tangent",
    arguments=("x", "weight", "bias", "x_dot", "weight_dot", "bias_dot"),
    gradients=("y_dot",),
    contract=("y_dot = the derivative of layer norm along x_dot, weight_dot, bias_dot; eps = 1e-5",),
    cases=tangent_norm_cases,
    reference=norm_reference,
    steps=norm_steps,
    pieces=NORM_PIECES,
    mistakes=(
        mistake(
            "layer_norm_tangent",
            "36",
            "the variance held fixed",
            "σ moves as well when x moves: the term along normed is missing.",
            "subtract normed · mean(normed ∘ x_dot)",
            normed_dot=lambda x_dot, mean, normed, along, rstd: (x_dot - mean) * rstd,
        ),
        mistake(
            "layer_norm_tangent",
            "36",
            "the mean held fixed",
            "μ moves as well when x moves: mean(x_dot) is not subtracted.",
            "subtract mean(x_dot)",
            normed_dot=lambda x_dot, mean, normed, along, rstd: (x_dot - normed * along) * rstd,
        ),
        mistake(
            "layer_norm_tangent",
            "36",
            "weight and bias do not move",
            "y_dot = normed_dot ∘ weight: the terms of weight_dot and bias_dot are missing.",
            "add normed ∘ weight_dot + bias_dot",
            scaled_dot=lambda normed_dot, weight, normed, weight_dot, bias_dot: normed_dot * weight,
        ),
        mistake(
            "layer_norm_tangent",
            "36",
            "the bias does not move",
            "The tangent of the bias is missing; it is added to every row.",
            "add bias_dot",
            scaled_dot=lambda normed_dot, weight, normed, weight_dot, bias_dot: (
                normed_dot * weight + normed * weight_dot
            ),
        ),
        mistake(
            "layer_norm_tangent",
            "36",
            "the weight does not move",
            "The term normed ∘ weight_dot of the product rule is missing.",
            "add normed ∘ weight_dot",
            scaled_dot=lambda normed_dot, weight, normed, weight_dot, bias_dot: normed_dot * weight + bias_dot,
        ),
    ),
)
