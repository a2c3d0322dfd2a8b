"""E33 to E40 against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from errata import note_with_listings as literal
from errata.core import scaled_scores, t
from errata.measure_attention import softmax_line
from errata.oracle import attention, attention_data, attention_gradients, draw, outcome, score_gradients
from errata.registry import Line, erratum
from onfoot import GPT2Config
from onfoot.check.mistakes.attention import (
    softmax_backward_matrix_products,
    softmax_backward_minus_mean,
    softmax_backward_over_tokens,
    softmax_jacobian_without_outer_product,
    value_gradient_without_transpose,
)
from onfoot.check.mistakes.linear import input_gradient_after_update
from onfoot.ops import attention_backward, attention_forward, linear_backward, linear_forward
from onfoot.ops.attention import attention_weights, softmax
from onfoot.ops.multi_head import merge_heads, split_heads
from oracles import autograd, relative_error

N_HEAD = 2


def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The oracle's form of the note's layer."""
    q, k, v = (
        (x @ w).unflatten(-1, (N_HEAD, -1)).transpose(1, 2) for x, w in zip((query, key, value), weights, strict=True)
    )
    return attention(q, k, v, causal=False).transpose(1, 2).flatten(2)


def right_layer_backward(
    dout: np.ndarray, inputs: list[np.ndarray], weights: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The gradients of the three weights and of the three inputs, by onfoot's pairs."""
    projected, saved = zip(*(linear_forward(x, w) for x, w in zip(inputs, weights, strict=True)), strict=True)
    s_attention = attention_forward(*(split_heads(x, N_HEAD) for x in projected), causal=False)[1]
    dqkv = attention_backward(split_heads(dout, N_HEAD), s_attention)
    grads = [linear_backward(merge_heads(d), s) for d, s in zip(dqkv, saved, strict=True)]
    return [g[1] for g in grads], [g[0] for g in grads]


def layer_data() -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    dout, *rest = draw(33, (3, 5, 8), *[(3, 5, 8)] * 3, *[(8, 8)] * 3)
    return dout, rest[:3], [w / 2 for w in rest[3:]]


@erratum("E33", "W", "the note's listings", "the listings do not run")
def e33() -> list[Line]:
    dout, inputs, weights = layer_data()
    (scores,) = draw(34, (7, 7))
    reference = autograd(layer, [*inputs, *weights], dout)
    dweights, dinputs = literal.layer_backward(dout, *inputs, tuple(weights), N_HEAD)
    dweights_right, dinputs_right = right_layer_backward(dout, inputs, weights)
    lines = [
        Line("np.softmax of scores 7 × 7", outcome(lambda: np.softmax(scores)), outcome(lambda: softmax(scores))),
        Line(
            "dW_Q by np.dot of arrays (d, n, batch) and (batch, n, d)",
            outcome(lambda: np.dot(inputs[0].T, dout)),
            outcome(lambda: dweights_right[0]),
        ),
    ]
    names = ("dW_Q", "dW_K", "dW_V", "dquery", "dkey", "dvalue")
    computed = zip(
        names, dweights + dinputs, dweights_right + dinputs_right, reference[3:] + reference[:3], strict=True
    )
    return lines + [
        Line(f"{name}, the listing made to run", relative_error(as_printed, ref), relative_error(right, ref))
        for name, as_printed, right, ref in computed
    ]


@erratum("E34", "W", "the note's listings", "the mean in place of the weighted sum")
def e34() -> list[Line]:
    return [
        softmax_line("dS, every token visible", softmax_backward_minus_mean, causal=False),
        softmax_line("dS, causal", softmax_backward_minus_mean, causal=True),
    ]


@erratum("E35", "W", "the note, gradient of S", "A dAᵗ A as matrix products")
def e35() -> list[Line]:
    return [softmax_line("dS, every token visible", softmax_backward_matrix_products, causal=False)]


@erratum("E36", "A", "the note, table of gradients", "the sum over i")
def e36() -> list[Line]:
    return [softmax_line("dS, every token visible, i as the row", softmax_backward_over_tokens, causal=False)]


@erratum("E37", "A", "the note, Jacobian of softmax", "a product that must be an outer one")
def e37() -> list[Line]:
    q, k, v, dout = attention_data()
    reference = score_gradients(scaled_scores(q, k), v, dout, causal=False)[0, 0]
    da, a = (dout @ t(v))[0, 0], attention_weights(q, k, causal=False)[0, 0]

    def by_jacobian(jacobian: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([da_i @ jacobian(a_i) for da_i, a_i in zip(da, a, strict=True)])

    return [
        Line(
            "dS by the Jacobian of each row, one-dimensional arrays",
            relative_error(by_jacobian(softmax_jacobian_without_outer_product), reference),
            relative_error(by_jacobian(literal.softmax_jacobian), reference),
        ),
        Line(
            "shape of the Jacobian, a matrix product, n = 7",
            outcome(lambda: a[0] @ (np.eye(7) - a[0].T)),
            outcome(lambda: literal.softmax_jacobian(a[0])),
        ),
    ]


@erratum("E38", "W", "the note, gradient of K", "dK is transposed")
def e38() -> list[Line]:
    q, k, v, dout = attention_data(n=5, d_rho=5)
    reference = attention_gradients(q, k, v, dout, causal=False)[1]
    _, as_printed, _ = literal.keys_transposed(q, k, v, dout)
    _, right, _ = attention_backward(dout, attention_forward(q, k, v, causal=False)[1])
    wide = attention_data(n=7, d_rho=5)
    return [
        Line("dK, n = d_k = 5", relative_error(as_printed, reference), relative_error(right, reference)),
        Line(
            "shape of dK, n = 7, d_k = 5",
            outcome(lambda: literal.keys_transposed(*wide)[1][0, 0]),
            outcome(lambda: attention_backward(wide[3], attention_forward(*wide[:3], causal=False)[1])[1][0, 0]),
        ),
    ]


@erratum("E39", "W", "the note's listings", "a transpose that changes nothing")
def e39() -> list[Line]:
    q, k, v, dout = attention_data()
    reference = attention_gradients(q, k, v, dout, causal=False)[2]
    as_printed = value_gradient_without_transpose(attention_weights(q, k, causal=False), dout)
    _, _, right = attention_backward(dout, attention_forward(q, k, v, causal=False)[1])
    return [Line("dV", relative_error(as_printed, reference), relative_error(right, reference))]


@erratum("E40", "I", "the note's listings", "update inside backward, one input, heads that do not divide")
def e40() -> list[Line]:
    dout, inputs, weights = layer_data()
    x = inputs[0]
    dquery, *_ = autograd(layer, [*inputs, *weights], dout)
    _, dinputs = right_layer_backward(dout, inputs, weights)
    q, k, v = (split_heads(x @ w, N_HEAD) for x, w in zip(inputs, weights, strict=True))
    dq = attention_backward(split_heads(dout, N_HEAD), attention_forward(q, k, v, causal=False)[1])[0]
    rows = merge_heads(dq).reshape(-1, 8)
    late = input_gradient_after_update(rows, x.reshape(-1, 8), weights[0], 0.1).reshape(x.shape)

    own = autograd(lambda x, *w: layer(x, x, x, *w), [x, *weights], dout)[0]
    _, own_parts = right_layer_backward(dout, [x, x, x], weights)
    (twelve,) = draw(40, (1, 10, 12))
    return [
        Line(
            "dquery through an updated W_Q, η = 0.1", relative_error(late, dquery), relative_error(dinputs[0], dquery)
        ),
        Line(
            "self-attention: the queries' path alone, the sum of all three",
            relative_error(own_parts[0], own),
            relative_error(sum(own_parts), own),
        ),
        Line(
            "10 tokens of width 12 split into 8 heads",
            outcome(lambda: literal.split_heads_unchecked(twelve, 8)),
            outcome(lambda: GPT2Config(n_embd=12, n_head=8)),
        ),
    ]
