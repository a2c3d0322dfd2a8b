"""Dropout, one pass over memory each way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import update
from onfoot.kernels.shapes import contiguous, fall_back_to_formula, is_float32
from onfoot.kernels.update import times


class DropoutKernelSaved(NamedTuple):
    keep: np.ndarray


def dropout_forward(x: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = x ∘ keep."""
    if not is_float32(x, keep) or x.shape != keep.shape:
        return fall_back_to_formula(ops.dropout_forward, x, keep)
    keep = contiguous(keep)
    return times(x, keep), DropoutKernelSaved(keep)  # eq DO.1


def dropout_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """dx = dy ∘ keep: dropped features get no gradient."""
    if not isinstance(saved, DropoutKernelSaved) or not is_float32(dy) or dy.shape != saved.keep.shape:
        return fall_back_to_formula(ops.dropout_backward, dy, saved)
    return times(dy, saved.keep)  # eq DO.2


KERNELS = update.KERNELS
