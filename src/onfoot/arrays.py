"""The differences between NumPy and PyTorch.

An op gets the namespace of its first array, `xp = namespace(x)`, and writes its formula with it. NumPy and PyTorch
agree on most names (`exp`, `where`, `swapaxes`, ... with `axis` and `keepdims`); the rest is here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any  # a NumPy array or a PyTorch tensor
Shape = tuple[int, ...]


def is_torch(x: Array) -> bool:
    """Whether `x` is a PyTorch tensor. Does not import PyTorch."""
    return type(x).__module__.startswith("torch")


def namespace(x: Array) -> Any:
    """The module whose functions work on `x`: `numpy` or `torch`."""
    if is_torch(x):
        import torch

        return torch
    return np


def rows(x: Array) -> Array:
    """(..., C) -> (N, C): one row per token of the batch."""
    return x.reshape(-1, x.shape[-1])


def zeros_like_shape(shape: Shape, like: Array) -> Array:
    """Zeros of the given shape, with the dtype and the device of `like`."""
    if is_torch(like):
        return like.new_zeros(shape)
    return np.zeros(shape, dtype=like.dtype)


def arange(n: int, like: Array) -> Array:
    """The integers 0 ... n-1, on the device of `like`."""
    if is_torch(like):
        import torch

        return torch.arange(n, device=like.device)
    return np.arange(n)


_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has no erf; the C library's is accurate to the last bits


def erf(x: Array) -> Array:
    """The error function, 2/√π ∫₀ˣ exp(−t²) dt."""
    if is_torch(x):
        return namespace(x).erf(x)
    return np.asarray(_erf(x), dtype=x.dtype)


def scatter_add(n_rows: int, ids: Array, values: Array) -> Array:
    """out[id] = the sum of all values with that id, (n_rows, C): repeated ids accumulate."""
    flat = rows(values)  # (N, C)
    out = zeros_like_shape((n_rows, flat.shape[-1]), flat)
    if is_torch(flat):
        return out.index_add_(0, ids.reshape(-1), flat)
    np.add.at(out, ids.reshape(-1), flat)
    return out


def to_numpy(x: Array) -> np.ndarray:
    """`x` as a NumPy array, from any device."""
    if is_torch(x):
        return x.detach().cpu().numpy()
    return np.asarray(x)
