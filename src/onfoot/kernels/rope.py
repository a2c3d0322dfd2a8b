"""RoPE on heads that are a view of the tokens' rows; the result has the same memory layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.attention import empty_heads, four_axes
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.shapes import contiguous, fall_back_to_formula, is_float32, thread_range
from onfoot.kernels.simd import address, floats


class RoPEKernelSaved(NamedTuple):
    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False


@inner
def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float, y: np.ndarray) -> None:
    """Rotates one token of one head: feature i is paired with feature i + D/2. A sign of −1 rotates back."""
    half = cos.size
    for i in range(half):
        a, b, c, s = x[i], x[half + i], cos[i], sign * sin[i]
        y[i] = a * c - b * s  # eq ROPE.4, ROPE.5
        y[half + i] = a * s + b * c


@kernel("f4[:,:,:,:], f4[:,:,:], f4[:,:,:], f4, f4[:,:,:,:]", "b h t d, b t e, b t e, , b h t d")
def _turn(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float, y: np.ndarray, thread: int, threads: int
) -> None:
    """Rotates all heads; the last axis of each array must be contiguous."""
    batch, heads, tokens, width = x.shape
    first, last = thread_range(batch * tokens, 1, thread, threads)
    for task in range(first, last):
        b, t = task // tokens, task % tokens
        cosines = floats(address(cos) + b * cos.strides[0] + t * cos.strides[1], width // 2)
        sines = floats(address(sin) + b * sin.strides[0] + t * sin.strides[1], width // 2)
        for h in range(heads):
            one = floats(address(x) + b * x.strides[0] + h * x.strides[1] + t * x.strides[2], width)
            out = floats(address(y) + b * y.strides[0] + h * y.strides[1] + t * y.strides[2], width)
            turn(one, cosines, sines, sign, out)


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float) -> np.ndarray:
    four = four_axes(x)
    batch, heads, tokens, width = four.shape
    y = empty_heads(batch, heads, tokens, width)
    shape = (batch, tokens, width // 2)
    _turn(four, _for_each(cos, shape), _for_each(sin, shape), F(sign), y)
    return y if x.ndim == 4 else y.reshape(x.shape)


def _for_each(cos: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """(T, D/2) or (B, 1, T, D/2), the same for all heads -> (B, T, D/2)."""
    return np.broadcast_to(contiguous(cos) if cos.ndim == 2 else contiguous(cos)[:, 0], shape)


def _fit(x: Any, cos: Any, sin: Any) -> bool:
    """Whether the kernel supports these: one set of angles per token, the same for all heads."""
    if not is_float32(x, cos, sin) or x.ndim < 2 or cos.shape != sin.shape or 2 * cos.shape[-1] != x.shape[-1]:
        return False
    if cos.ndim == 4:
        return x.ndim == 4 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == 1 and cos.shape[2] in (1, x.shape[2])
    return cos.ndim == 2 and cos.shape[0] in (1, x.shape[-2])


def rope_forward(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool = False) -> tuple[np.ndarray, Any]:
    """x (..., T, D) with each pair (a, b) of features rotated to (a cos − b sin, a sin + b cos)."""
    if interleaved or not _fit(x, cos, sin):
        return fall_back_to_formula(ops.rope_forward, x, cos, sin, interleaved)
    return _turned(x, cos, sin, 1), RoPEKernelSaved(cos, sin)


def rope_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """The gradient of x: dy rotated back."""
    if not isinstance(saved, RoPEKernelSaved) or not _fit(dy, saved.cos, saved.sin):
        return fall_back_to_formula(ops.rope_backward, dy, saved)
    return _turned(dy, saved.cos, saved.sin, -1)


KERNELS = (_turn,)
