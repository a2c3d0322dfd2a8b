"""E6 to E19 against the oracle."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from errata import attention as literal
from errata.core import SoftmaxBackward, scaled_scores, t
from errata.oracle import (
    attention,
    attention_data,
    attention_gradients,
    draw,
    full_attention,
    full_weights,
    multiplications,
    outcome,
    score_gradients,
)
from errata.registry import Line, erratum
from errata.rotation import key_gradient_under_rotation, rotate, rotated_attention
from onfoot.check.mistakes.attention import (
    softmax_backward_over_tokens,
    softmax_backward_with_hadamard,
    softmax_backward_without_keepdims,
)
from onfoot.check.mistakes.heads import split_heads_by_reshape
from onfoot.ops import Head, attention_backward, attention_forward, head_backward, head_forward
from onfoot.ops.attention import attention_weights, softmax_backward
from onfoot.ops.multi_head import merge_heads, split_heads
from oracles import autograd, relative_error


def softmax_line(what: str, as_printed: SoftmaxBackward, causal: bool = True) -> Line:
    """Δ_causal by some formula for the gradient of softmax, and by the right one."""
    q, k, v, dout = attention_data()
    reference = score_gradients(scaled_scores(q, k), v, dout, causal)
    drho, rho = dout @ t(v), attention_weights(q, k, causal)
    return Line(
        what,
        relative_error(as_printed(drho, rho), reference),
        relative_error(softmax_backward(drho, rho), reference),
    )


@erratum("E6", "T", "§3.2, eq 25, 50", "row sums that broadcast along the wrong axis")
def e6() -> list[Line]:
    return [
        softmax_line("Δ_causal, without keepdims", softmax_backward_without_keepdims),
        softmax_line("Δ_causal, summed over axis 0", softmax_backward_over_tokens),
    ]


@erratum("E7", "S", "§3.2, the derivation of eq 25", "~∘ printed for ~⊖")
def e7() -> list[Line]:
    return [softmax_line("Δ_causal, with ∘ taken at its word", softmax_backward_with_hadamard)]


@erratum("E8", "S", "§3.1, eq 17", "the shape of w_v")
def e8() -> list[Line]:
    a, vector, matrix = draw(8, (7, 6), (4,), (6, 4))
    return [Line("a w_v for d = 6, d_h = 4", outcome(lambda: a @ vector), outcome(lambda: a @ matrix))]


@erratum("E9", "A", "§3.1, eq 20", "w_v² is a matrix product")
def e9() -> list[Line]:
    a, w_q, w_k, w_1, w_2 = draw(9, (7, 5), (5, 5), (5, 5), (5, 5), (5, 5))

    def layer(x: torch.Tensor, w_v: np.ndarray) -> torch.Tensor:
        q, k, v = (x @ torch.as_tensor(w) for w in (w_q, w_k, w_v))
        return attention(q[None], k[None], v[None])[0]

    def rho(x: np.ndarray) -> np.ndarray:
        return attention_weights(x @ w_q, x @ w_k)

    middle = layer(torch.as_tensor(a), w_1)
    same, own = layer(middle, w_1).numpy(), layer(middle, w_2).numpy()
    rhos = rho(middle.numpy()), rho(a)
    return [
        Line(
            "a_{i+1}, the same w_v twice: w_v ∘ w_v against w_v w_v",
            relative_error(literal.two_layers_elementwise_square(*rhos, a, w_1), same),
            relative_error(literal.two_layers_matrix_square(*rhos, a, w_1), same),
        ),
        Line(
            "a_{i+1}, each layer its own w_v: the square of one against w^(i−1) w^(i)",
            relative_error(literal.two_layers_matrix_square(*rhos, a, w_1), own),
            relative_error(literal.two_layers(*rhos, a, w_1, w_2), own),
        ),
    ]


@erratum("E10", "A", "§3.1, after eq 11", "one layer and two-token relations")
def e10() -> list[Line]:
    q, k, _, _ = attention_data()
    exchanged = k.copy()
    (exchanged[..., 1, :],) = draw(10, k[..., 1, :].shape)
    before, after = full_weights(q, k)[..., 2, 0], full_weights(q, exchanged)[..., 2, 0]

    def weight_31(k: torch.Tensor) -> torch.Tensor:
        return (torch.as_tensor(q) @ k.mT / math.sqrt(k.shape[-1])).softmax(-1)[..., 2, 0]

    reference = autograd(weight_31, [k], np.ones(k.shape[:2]))[0][..., 1, :]  # ∂ρ_31/∂k_2, (2, 3, d_ρ)
    rho = attention_weights(q, k, causal=False)
    pick = np.zeros_like(rho)
    pick[..., 2, 0] = 1

    def of_key_2(softmax_backward: SoftmaxBackward) -> np.ndarray:
        return (t(softmax_backward(pick, rho)) @ q / math.sqrt(q.shape[-1]))[..., 1, :]

    return [
        Line(
            "ρ_31 after token 2 was exchanged, taken to be what it was",
            relative_error(before, after),
            relative_error(attention_weights(q, exchanged)[..., 2, 0], after),
        ),
        Line(
            "∂ρ_31/∂k_2, as if ρ_31 came from the score of tokens 3 and 1 alone",
            relative_error(of_key_2(literal.softmax_backward_of_pairs), reference),
            relative_error(of_key_2(softmax_backward), reference),  # −ρ_31 ρ_32 at the place 3, 2
        ),
    ]


@erratum("E11", "I", "§3.2, eq 21, 24", "∂b_v under attention dropout")
def e11() -> list[Line]:
    q, k, v, dout = attention_data()
    keep = (np.random.RandomState(11).random_sample((2, 3, 7, 7)) >= 0.3) / 0.7
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)

    def dropped(b_v: torch.Tensor) -> torch.Tensor:
        qt, kt, vt, kept = map(torch.as_tensor, (q, k, v, keep))
        rho = (qt @ kt.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf).softmax(-1)
        return (rho * kept) @ (vt + b_v[..., None, :])

    reference = autograd(dropped, [np.zeros((2, 3, 4))], dout)[0]
    _, _, dv = attention_backward(dout, attention_forward(q, k, v, keep=keep)[1])
    return [
        Line(
            "∂b_v with dropout 0.3 on ρ",
            relative_error(literal.value_bias_gradient(dout), reference),
            relative_error(dv.sum(axis=-2), reference),
        )
    ]


@erratum("E12", "I", "§3.2, eq 29, 32", "∂b_k under rotary positions")
def e12() -> list[Line]:
    q, k, v, dout = attention_data(d_rho=6)

    def of_bias(b_k: torch.Tensor) -> torch.Tensor:
        qt, kt, vt = map(torch.as_tensor, (q, k, v))
        return rotated_attention(qt, kt + b_k[..., None, :], vt)

    reference = autograd(of_bias, [np.zeros((2, 3, 6))], dout)[0]
    still, moved = (of_bias(torch.full((2, 3, 6), b_k, dtype=torch.float64)).numpy() for b_k in (0.0, 1.0))
    return [
        Line(
            "∂b_k with RoPE, by eq 29",
            relative_error(literal.key_bias_gradient_summed(rotate(q), rotate(k), v, dout), reference),
            relative_error(key_gradient_under_rotation(q, k, v, dout).sum(axis=-2), reference),
        ),
        Line(
            "y with RoPE and b_k = 1, taken to be that of b_k = 0",
            relative_error(still, moved),
            relative_error(attention_forward(rotate(q), rotate(k + 1), v)[0], moved),
        ),
    ]


def largest_key_bias_after_adam(exact: bool, steps: int = 20, lr: float = 1e-3) -> float:
    """The largest |b_k| of a head in float32 after some steps of Adam, from b_k = 0."""
    a, w_q, w_k, w_v, b_q, b_v, dy = (
        x.astype(np.float32) for x in draw(13, (4, 32, 16), (16, 8), (16, 8), (16, 8), (8,), (8,), (4, 32, 8))
    )
    b_k = torch.zeros(8, requires_grad=True)
    adam = torch.optim.Adam([b_k], lr=lr)
    for _ in range(steps):
        head = Head(w_q, b_q, w_k, b_k.detach().numpy(), w_v, b_v)
        _, saved = head_forward(a, head)
        if exact:
            gradient = head_backward(dy, saved)[1].b_k
        else:
            gradient = literal.key_bias_gradient_summed(saved.q, saved.k, saved.v, dy).sum(axis=0)
        b_k.grad = torch.as_tensor(gradient)
        adam.step()
    return float(b_k.detach().abs().max())


@erratum("E13", "T", "§3.2, eq 29", "noise in place of an exact 0")
def e13() -> list[Line]:
    moved, still = largest_key_bias_after_adam(exact=False), largest_key_bias_after_adam(exact=True)
    return [
        Line(
            "largest |b_k| after 20 steps of Adam at 1e-3, float32",
            "> 1e-3" if moved > 1e-3 else f"{moved:.0e}",  # how far noise carries differs between machines
            "exactly 0" if still == 0 else f"{still:.0e}",
        )
    ]


@erratum("E14", "W", "§3, KV cache", "the scale is missing from the cached row")
def e14() -> list[Line]:
    q, k, v, _ = attention_data()
    last = q[..., -1:, :]
    rho, y = full_weights(q, k)[..., -1:, :], full_attention(q, k, v)[..., -1:, :]
    as_printed = literal.cached_weights_without_scale(last, k)
    return [
        Line("ρ of the new token", relative_error(as_printed, rho), relative_error(attention_weights(last, k), rho)),
        Line(
            "y of the new token", relative_error(as_printed @ v, y), relative_error(attention_forward(last, k, v)[0], y)
        ),
    ]


@erratum("E15", "S", "§3, KV cache", "the shape of the cached step's output")
def e15() -> list[Line]:
    n, d_rho, d_h = 7, 5, 4
    q, k, v = draw(15, (n + 1, d_rho), (n + 1, d_rho), (n + 1, d_h))
    y = full_attention(*(x[None, None] for x in (q, k, v)))[0, 0, -1]
    as_printed = literal.cached_output_with_a_row_for_each_token(q[-1:], k, v)
    right = attention_forward(q[-1:], k, v)[0][0]
    return [
        Line("y(t_next) for n_T = 7, d_h = 4", str(as_printed.shape), str(right.shape)),
        Line(
            "y(t_next), the last row of the printed shape", relative_error(as_printed[-1], y), relative_error(right, y)
        ),
    ]


@cache
def step_multiplications(held: int) -> int:
    """One token's row of q kᵗ and of ρ v, over so many cached keys and values of width 64."""
    return multiplications(attention_forward, (1, 64), (held, 64), (held, 64))


@erratum("E16", "A", "§3, KV cache", "linear per token, quadratic in all")
def e16() -> list[Line]:
    costs = [step_multiplications(held) for held in range(1, 129)]
    q, k, v, _ = attention_data()
    y, chunk = full_attention(q, k, v)[..., 4:, :], q[..., 4:, :]
    return [
        Line(
            "multiplications to generate 128 tokens over those for 64",
            f"×{costs[127] / costs[63]:.2g}",
            f"×{sum(costs) / sum(costs[:64]):.2g}",
        ),
        Line(
            "y of a chunk of 3 behind 4 cached tokens, mask without offset",
            relative_error(literal.chunk_without_offset(chunk, k, v), y),
            relative_error(attention_forward(chunk, k, v)[0], y),
        ),
    ]


@erratum("E17", "S", "§3.2, eq 22, 30, Table 1", "Δ_q, Δ_k, Δ_v are gradients of a")
def e17() -> list[Line]:
    a, w_q, w_k, v, dout = draw(17, (1, 7, 5), (5, 5), (5, 5), (1, 7, 4), (1, 7, 4))
    q, k = a @ w_q, a @ w_k
    reference = attention_gradients(q, k, v, dout)[0]
    return [
        Line(
            "Δ_q taken for ∂L/∂q, d_ρ = d",
            relative_error(literal.delta_q(a, w_q, w_k, v, dout), reference),
            relative_error(attention_backward(dout, attention_forward(q, k, v)[1])[0], reference),
        )
    ]


@erratum("E18", "A", "§3.1, second attempt", "q·q is symmetric before softmax only")
def e18() -> list[Line]:
    q, _, _, _ = attention_data()
    rho, raw = literal.weights_of_queries_alone(q), q @ t(q)
    return [Line("asymmetry: of softmax(q qᵗ/√d_ρ), of q qᵗ", relative_error(t(rho), rho), relative_error(t(raw), raw))]


@erratum("E19", "T", "§4, eq 34", "heads split by reshape alone")
def e19() -> list[Line]:
    q, k, v = draw(19, (2, 7, 12), (2, 7, 12), (2, 7, 12))
    heads = [full_attention(*(x[None, ..., 4 * h : 4 * h + 4] for x in (q, k, v)))[0] for h in range(3)]
    reference = np.concatenate(heads, axis=-1)
    reshaped = attention_forward(*(split_heads_by_reshape(x, 3) for x in (q, k, v)))[0].reshape(2, 7, 12)
    right = merge_heads(attention_forward(*(split_heads(x, 3) for x in (q, k, v)))[0])
    return [Line("y of three heads", relative_error(reshaped, reference), relative_error(right, reference))]
