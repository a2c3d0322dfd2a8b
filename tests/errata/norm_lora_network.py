"""Layer norm, LoRA, the network and its counts: formulas as printed, and the traps beside them (E28 to E32)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layers.layer_norm import PIECES, steps
from onfoot.check.mistakes.layer_norm import (
    along_over_tokens,
    mean_over_tokens,
    rstd_eps_outside_root,
    rstd_without_eps,
    variance_unbiased,
)
from onfoot.ops.attention import softmax

Array = np.ndarray


# E28: layer norm, eqs 36 to 41


def _norm_backward(x: Array, weight: Array, dy: Array, eps: float, **changes: Callable[..., Array]) -> Array:
    """(40) with some of its steps exchanged."""
    return steps(PIECES.with_changes(changes), x, weight, np.zeros_like(weight), dy, eps)[0]


def layer_norm_without_eps(x: Array, weight: Array, dy: Array) -> Array:
    """As printed: a token whose features are all alike divides 0 by 0."""
    return _norm_backward(x, weight, dy, 0, rstd=rstd_without_eps)


def layer_norm_eps_outside_root(x: Array, weight: Array, dy: Array, eps: float = 1e-5) -> Array:
    return _norm_backward(x, weight, dy, eps, rstd=rstd_eps_outside_root)


def layer_norm_unbiased(x: Array, weight: Array, dy: Array, eps: float = 1e-5) -> Array:
    """The variance divided by d − 1, as `std` has it in some libraries."""
    return _norm_backward(x, weight, dy, eps, variance=variance_unbiased)


def layer_norm_over_tokens(x: Array, weight: Array, dy: Array, eps: float = 1e-5) -> Array:
    """The sums of (40) left where batch norm has them: over the tokens."""
    return _norm_backward(x, weight, dy, eps, mean_term=mean_over_tokens, along_term=along_over_tokens)


# E29, E30, E31: LoRA


def lora_input_gradient_without_frozen_path(dy: Array, down: Array, up: Array, alpha: float) -> Array:
    """Δ_11 = α Δ_12 (d u)ᵗ, as printed for FC_frozen + LoRA."""
    return alpha * dy @ (down @ up).T


def lora_scaled_by_alpha(x: Array, down: Array, up: Array, alpha: float) -> Array:
    """α x d u, the paper's convention; adapter files mean α/r."""
    return alpha * (x @ down @ up)


def lora_parameters_as_printed(d: int, n_vocab: int, n_blocks: int, rank: int) -> int:
    """The logits' adapter inside the bracket: counted once for each block."""
    return n_blocks * (4 * rank * (d + d) + rank * (d + 4 * d) + rank * (4 * d + d) + rank * (d + n_vocab))


def lora_parameters(d: int, n_vocab: int, n_blocks: int, rank: int) -> int:
    """r (in + out) for every layer that has an adapter, each listed once."""
    block = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
    return sum(rank * (n_in + n_out) for n_in, n_out in block * n_blocks + [(d, n_vocab)])


def lora_input_gradient_low_rank_first(dy: Array, down: Array, up: Array, alpha: float) -> Array:
    """α (Δ_12 uᵗ) dᵗ: the same numbers, and never a matrix as large as the frozen one."""
    return alpha * (dy @ up.T) @ down.T


# E32


def attention_scaled_by_width(q: Array, k: Array, v: Array) -> Array:
    """softmax(q kᵗ/d_ρ) v: the division by d_ρ itself, under a causal mask."""
    mask = np.tril(np.ones((q.shape[-2], k.shape[-2]))) > 0
    return softmax(q @ np.swapaxes(k, -1, -2) / q.shape[-1], mask) @ v


def product_variance_for_zero_means(variance_x: float, variance_y: float) -> float:
    return variance_x * variance_y


def product_variance(mean_x: float, variance_x: float, mean_y: float, variance_y: float) -> float:
    """Var(XY) of independent X and Y."""
    return variance_x * variance_y + variance_x * mean_y**2 + variance_y * mean_x**2
