"""Rotary positions, as far as E12 needs them: attention with rotated queries and keys, and the gradient of the keys."""

from __future__ import annotations

import numpy as np
import torch

from errata.oracle import attention
from onfoot.ops import attention_backward, attention_forward

Array = np.ndarray


def angles(n: int, d: int) -> Array:
    """Position times frequency, (n, d/2)."""
    return np.outer(np.arange(n), 10000.0 ** (-np.arange(0, d, 2) / d))


def rotate(x: Array, direction: int = 1) -> Array:
    """Each pair of features turned by its token's angle; direction −1 is the inverse, and so the transpose."""
    angle = direction * angles(*x.shape[-2:])
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return turned


def key_gradient_under_rotation(q: Array, k: Array, v: Array, dout: Array) -> Array:
    """∂L/∂k before the rotation: the gradient of the rotated keys, turned back."""
    _, dk, _ = attention_backward(dout, attention_forward(rotate(q), rotate(k), v)[1])
    return rotate(dk, -1)


def rotated_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The oracle's form: a pair of features is a complex number, and the rotation is a product."""
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.as_tensor(angles(*q.shape[-2:])))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    return attention(rotated(q), rotated(k), v)
