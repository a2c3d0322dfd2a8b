"""Fixed random data, PyTorch's own attention as the oracle, and its counter of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from oracles import autograd

Array = np.ndarray


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Array]:
    """Standard normal numbers in float64. RandomState's stream is frozen, and the page's figures depend on it."""
    rng = np.random.RandomState(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def attention_data(n: int = 7, d_rho: int = 5, d_h: int = 4, seed: int = 1) -> list[Array]:
    """q, k, v and the gradient of the output: 2 sequences, 3 heads, n tokens."""
    return draw(seed, (2, 3, n, d_rho), (2, 3, n, d_rho), (2, 3, n, d_h), (2, 3, n, d_h))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """PyTorch's own scaled dot-product attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def full_attention(q: Array, k: Array, v: Array) -> Array:
    """PyTorch's causal attention of arrays."""
    return attention(*map(torch.as_tensor, (q, k, v))).numpy()


def full_weights(q: Array, k: Array) -> Array:
    """Its ρ, read off with the identity as values: (batch, heads, n, n)."""
    n = k.shape[-2]
    return full_attention(q, k, np.tile(np.eye(n), (*k.shape[:-2], 1, 1)))


def attention_gradients(q: Array, k: Array, v: Array, dy: Array, causal: bool = True) -> list[Array]:
    """dq, dk, dv of PyTorch's own attention."""
    return autograd(lambda *qkv: attention(*qkv, causal=causal), [q, k, v], dy)


def score_gradients(scores: Array, v: Array, dy: Array, causal: bool = True) -> Array:
    """The gradient of the scaled scores, the paper's Δ_causal, under a mask of −inf."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & causal

    def output(s: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(hidden, -torch.inf).softmax(-1) @ torch.as_tensor(v)

    return autograd(output, [scores], dy)[0]


def outcome(function: Callable[[], Any]) -> str:
    """What happens when it is run: the shape of the result, or the name of the error."""
    try:
        return str(np.shape(function()))
    except (ValueError, IndexError, AttributeError) as error:
        return type(error).__name__


def multiplications(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """Those of a function's matrix products, counted by PyTorch while it runs on arrays that have no numbers."""
    counter = FlopCounterMode(display=False)
    with counter:
        function(*(torch.empty(shape, device="meta") for shape in shapes))
    return counter.get_total_flops() // 2  # each comes with an addition
