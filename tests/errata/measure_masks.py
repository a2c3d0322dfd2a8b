"""E1 to E4, the causal mask, against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from errata import attention as literal
from errata.core import scaled_scores, t
from errata.oracle import attention_data, full_attention, full_weights
from errata.registry import Line, erratum
from onfoot.check.mistakes.mask import masked_by_a_large_number, masked_by_adding_a_product, plain_softmax
from onfoot.ops import attention_forward
from onfoot.ops.attention import attention_weights, softmax
from oracles import autograd, relative_error


@erratum("E1", "W", "§3.1, eq 13, 18, Table 1", "the causal mask as a product with 0")
def e1() -> list[Line]:
    q, k, v, _ = attention_data()
    y, rho = full_attention(q, k, v), full_weights(q, k)
    as_printed, right = literal.weights_masked_by_product(q, k), attention_weights(q, k)
    return [
        Line("y", relative_error(as_printed @ v, y), relative_error(attention_forward(q, k, v)[0], y)),
        Line(
            "ρ, the first token's row",
            relative_error(as_printed[..., 0, :], rho[..., 0, :]),
            relative_error(right[..., 0, :], rho[..., 0, :]),
        ),
    ]


@erratum("E2", "W", "§3.2, eq 27, 29", "the backward pass of the printed mask")
def e2() -> list[Line]:
    q, k, v, dout = attention_data()
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.float64).tril()

    def as_printed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (mask * (q @ k.mT / math.sqrt(q.shape[-1]))).softmax(-1) @ v

    dq, dk, _ = autograd(as_printed, [q, k, v], dout)
    dq_27, dk_27, _ = literal.masked_by_product_backward(q, k, v, dout)
    dq_m, dk_m, _ = literal.masked_by_product_backward_with_the_mask(q, k, v, dout)
    db_k = dk.sum(axis=-2)
    return [
        Line("dq, forward as printed", relative_error(dq_27, dq), relative_error(dq_m, dq)),
        Line("dk, forward as printed", relative_error(dk_27, dk), relative_error(dk_m, dk)),
        Line(
            "∂b_k, forward as printed, by eq 27 and 29",
            relative_error(dk_27.sum(axis=-2), db_k),
            relative_error(dk_m.sum(axis=-2), db_k),
        ),
    ]


@erratum("E3", "T", "§3.1, eq 13 to 15, 24", "the mask after softmax")
def e3() -> list[Line]:
    q, k, v, dout = attention_data()
    y = full_attention(q, k, v)
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.float64).tril()

    def with_bias(b_v: torch.Tensor) -> torch.Tensor:
        qt, kt, vt = map(torch.as_tensor, (q, k, v))
        return (mask * (qt @ kt.mT / math.sqrt(q.shape[-1])).softmax(-1)) @ (vt + b_v[..., None, :])

    db_v = autograd(with_bias, [np.zeros((*v.shape[:2], v.shape[-1]))], dout)[0]
    weights = literal.lower(q.shape[-2]) * softmax(scaled_scores(q, k))
    other = k.copy()
    other[..., -1, :] += 1  # a change of the last token, which the first must not see

    def change_of_first(function: Callable[..., np.ndarray]) -> float:
        return relative_error(function(q, other, v)[..., 0, :], function(q, k, v)[..., 0, :])

    return [
        Line(
            "y",
            relative_error(literal.attention_masked_after_softmax(q, k, v), y),
            relative_error(attention_forward(q, k, v)[0], y),
        ),
        Line(
            "∂b_v of this forward by eq 24, against Σ_tokens ρᵗΔ",
            relative_error(literal.value_bias_gradient(dout), db_v),
            relative_error((t(weights) @ dout).sum(axis=-2), db_v),
        ),
        Line(
            "change of the first token's y when the last key changes",
            change_of_first(literal.attention_masked_after_softmax),
            change_of_first(lambda *qkv: attention_forward(*qkv)[0]),
        ),
    ]


@erratum("E4", "T", "§3.1, eq 13, 15", "masks that make nan")
def e4() -> list[Line]:
    q, k, _, _ = attention_data()
    scores, mask = scaled_scores(q, k)[0, 0], literal.lower(q.shape[-2])
    nothing = np.zeros_like(mask)

    def nans(weights: np.ndarray) -> str:
        return f"{np.isnan(weights).sum()} nan"

    with np.errstate(invalid="ignore", over="ignore"):
        by_product = plain_softmax(masked_by_adding_a_product(scores, mask))
        blind = plain_softmax(np.where(nothing, scores, -np.inf))
        half = plain_softmax(masked_by_a_large_number(scores.astype(np.float16), nothing))
    return [
        Line("49 weights, (1 − m)·(−inf) added", nans(by_product), nans(softmax(scores, mask > 0))),
        Line("49 weights, rows that see nothing", nans(blind), nans(softmax(scores, nothing > 0))),
        Line(
            "the same with −1e9 in float16",
            nans(half),
            nans(softmax(scores.astype(np.float16), nothing > 0)),
        ),
    ]
