"""E28 to E32 against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from errata import norm_lora_network as literal
from errata.oracle import attention, attention_data, draw, multiplications, outcome
from errata.registry import Line, erratum
from onfoot.check.mistakes.gelu import gelu_mixed_backward
from onfoot.check.mistakes.layer_norm import weight_gradient_diag_builds
from onfoot.check.mistakes.linear import input_gradient_after_update
from onfoot.ops import (
    attention_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
    lora_forward,
    lora_linear_backward,
    lora_linear_forward,
)
from oracles import autograd, relative_error

EPS = 1e-5


@erratum("E28", "I/T", "§5, eq 36 to 41", "layer norm: epsilon, divisor, axis, diag")
def e28() -> list[Line]:
    x, weight, bias, dy = draw(28, (7, 8), (8,), (8,), (7, 8))

    def line(what: str, formula: Callable[..., np.ndarray], x: np.ndarray) -> Line:
        def output(x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (8,), torch.as_tensor(weight), torch.as_tensor(bias), EPS)

        reference = autograd(output, [x], dy)[0]
        right = layer_norm_backward(dy, layer_norm_forward(x, weight, bias, EPS)[1])[0]
        return Line(what, relative_error(formula(x, weight, dy), reference), relative_error(right, reference))

    def nans(dx: np.ndarray) -> str:
        return f"{np.isnan(dx).sum()} nan"

    small = 3e-3 * x  # σ of about √eps, where the place of eps matters
    constant = np.ones((1, 8))
    with np.errstate(invalid="ignore", divide="ignore"):
        as_printed = literal.layer_norm_without_eps(constant, weight, dy[:1])
    right = layer_norm_backward(dy[:1], layer_norm_forward(constant, weight, bias, EPS)[1])[0]
    normed = layer_norm_forward(x, weight, bias, EPS)[1].normed
    return [
        line("Δ, no eps at all, σ ≈ √eps", literal.layer_norm_without_eps, small),
        line("Δ, eps outside the root, σ ≈ √eps", literal.layer_norm_eps_outside_root, small),
        line("Δ, variance divided by d − 1, d = 8", literal.layer_norm_unbiased, x),
        line("Δ, the sums of eq 40 over tokens", literal.layer_norm_over_tokens, x),
        Line("the 8 features of a constant token, no eps", nans(as_printed), nans(right)),
        Line(
            "shape of ∂w, diag as a maker of matrices",
            outcome(lambda: weight_gradient_diag_builds(normed, dy)),
            outcome(lambda: layer_norm_backward(dy, layer_norm_forward(x, weight, bias, EPS)[1])[1]),
        ),
    ]


@erratum("E29", "W", "§7, LoRA on the logits", "the frozen path is missing from Δ_11")
def e29() -> list[Line]:
    x, weight, bias, down, up, dy = draw(29, (7, 6), (6, 9), (9,), (6, 2), (2, 9), (7, 9))
    alpha = 2.0

    def line(what: str, up: np.ndarray) -> Line:
        def output(x: torch.Tensor) -> torch.Tensor:
            w, b, d, u = map(torch.as_tensor, (weight, bias, down, up))
            return x @ w + b + alpha * x @ d @ u

        reference = autograd(output, [x], dy)[0]
        right = lora_linear_backward(dy, lora_linear_forward(x, weight, bias, down, up, alpha)[1])[0]
        as_printed = literal.lora_input_gradient_without_frozen_path(dy, down, up, alpha)
        return Line(what, relative_error(as_printed, reference), relative_error(right, reference))

    return [line("Δ_11", up), line("Δ_11 of a fresh adapter, u = 0: the formula gives 0", np.zeros_like(up))]


@erratum("E30", "A", "§6, eq 43", "α or α/r")
def e30() -> list[Line]:
    x, down, up = draw(30, (7, 6), (6, 4), (4, 9))
    alpha, rank = 16.0, 4
    reference = ((torch.as_tensor(x) @ torch.as_tensor(down)) @ torch.as_tensor(up) * (alpha / rank)).numpy()
    return [
        Line(
            "the adapter's output, α = 16, r = 4, as an adapter file means it",
            relative_error(literal.lora_scaled_by_alpha(x, down, up, alpha), reference),
            relative_error(lora_forward(x, down, up, alpha / rank)[0], reference),
        )
    ]


@erratum("E31", "W", "§7, §6, eq 44", "the count and the cost of LoRA")
def e31() -> list[Line]:
    gpt2 = {"d": 768, "n_vocab": 50257, "n_blocks": 12, "rank": 16}
    logits = (1024, 50257), (768, 16), (16, 50257)  # dy, down, up
    return [
        Line(
            "parameters of LoRA on every layer of GPT-2, r = 16",
            literal.lora_parameters_as_printed(**gpt2),
            literal.lora_parameters(**gpt2),
        ),
        Line(
            "multiplications of eq 44 at the logits, 1,024 tokens",
            multiplications(lambda *x: literal.lora_input_gradient_without_frozen_path(*x, alpha=1.0), *logits),
            multiplications(lambda *x: literal.lora_input_gradient_low_rank_first(*x, alpha=1.0), *logits),
        ),
    ]


@erratum("E32", "T", "Table 3; the blog post", "order of updates, g′, √d_ρ, zero means")
def e32() -> list[Line]:
    x, weight, dy = draw(32, (7, 6), (6, 5), (7, 5))
    dx = autograd(lambda x: x @ torch.as_tensor(weight), [x], dy)[0]
    z, dg = draw(33, (7, 24), (7, 24))
    dz = autograd(lambda z: F.gelu(z, approximate="tanh"), [z], dg)[0]
    q, k, v, _ = attention_data()
    y = attention(*map(torch.as_tensor, (q, k, v))).numpy()
    # X and Y uniform on {0, 2}: mean 1 and variance 1 each; their product, case by case
    products = np.array([a * b for a in (0.0, 2.0) for b in (0.0, 2.0)])
    return [
        Line(
            "Δ through a weight already updated, η = 0.1",
            relative_error(input_gradient_after_update(dy, x, weight, 0.1), dx),
            relative_error(linear_backward(dy, linear_forward(x, weight)[1])[0], dx),
        ),
        Line(
            "Δ_7 with GELU's tanh form forward and the erf form's derivative",
            relative_error(gelu_mixed_backward(dg, z), dz),
            relative_error(gelu_tanh_backward(dg, gelu_tanh_forward(z)[1]), dz),
        ),
        Line(
            "y with scores divided by d_ρ",
            relative_error(literal.attention_scaled_by_width(q, k, v), y),
            relative_error(attention_forward(q, k, v)[0], y),
        ),
        Line(
            "Var(XY) as σ²σ² for means of 1",
            relative_error(literal.product_variance_for_zero_means(1, 1), products.var()),
            relative_error(literal.product_variance(1, 1, 1, 1), products.var()),
        ),
    ]
