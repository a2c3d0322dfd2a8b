"""The tangents of layer norm and RMS norm: one kernel for both, each row read from the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot.kernels import layer_norm, rms_norm
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import kernel
from onfoot.kernels.layer_norm import BLOCK, LayerNormKernelSaved, sum_parts
from onfoot.kernels.product import NO_ROW
from onfoot.kernels.rms_norm import RMSNormKernelSaved
from onfoot.kernels.shapes import as_rows, contiguous, thread_range
from onfoot.ops import tangents as formulas


class NormKernelDot(NamedTuple):
    x: np.ndarray  # ẋ, (N, C)
    mean: np.ndarray  # mean ẋ, (N,); 0 for RMS norm
    along: np.ndarray  # mean(ā ∘ ẋ), (N,)
    weight: np.ndarray  # ẇ, or empty


@kernel(
    "f4[:,::1], f4[::1], f4[::1], f4[::1], b1, f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1], f4[::1]",
    "n c, n, n, c, , n c, c?, c?, n c, n, n",
)
def _norm_tangent(
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray,
    centred: bool,
    x_dot: np.ndarray,
    weight_dot: np.ndarray,
    bias_dot: np.ndarray,
    y_dot: np.ndarray,
    mean_dot: np.ndarray,
    along: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    n, c = x.shape
    first, last = thread_range(n, BLOCK, thread, threads)
    for i in range(first, last):
        row, moved, out, r = x[i], x_dot[i], y_dot[i], rstd[i]
        mu = mean[i] if centred else F(0)
        total, side = F(0), F(0)
        for j in range(c):
            total += moved[j]
            side += (row[j] - mu) * r * moved[j]
        total = total / F(c) if centred else F(0)
        side /= F(c)
        mean_dot[i], along[i] = total, side
        for j in range(c):
            out[j] = (moved[j] - total - (row[j] - mu) * r * side) * r * weight[j]  # eq LN.2, LN.3, RMS.6, RMS.7
        if weight_dot.size:
            for j in range(c):
                out[j] += (row[j] - mu) * r * weight_dot[j]
        if bias_dot.size:
            for j in range(c):
                out[j] += bias_dot[j]


@kernel(
    "f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[::1], b1, f4[:,::1], f4[::1], f4[::1], f4[::1], f4[:,::1], "
    "f4[:,:,::1]",
    "n c, n c, n c, n, n, c, , n c, n, n, c?, n c, . . c",
)
def _norm_backward_tangent(
    dy: np.ndarray,
    dy_dot: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray,
    centred: bool,
    x_dot: np.ndarray,
    mean_dot: np.ndarray,
    along: np.ndarray,
    weight_dot: np.ndarray,
    dx_dot: np.ndarray,
    parts: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """The tangent of dx, and the contributions of every BLOCK rows to those of dweight and dbias."""
    n, c = x.shape
    first, last = thread_range(parts.shape[0], 1, thread, threads)
    for b in range(first, last):
        dw, db = parts[b, 0], parts[b, 1]
        dw[:] = 0
        db[:] = 0
        for i in range(b * BLOCK, min((b + 1) * BLOCK, n)):
            row, moved, up, up_dot, out, r = x[i], x_dot[i], dy[i], dy_dot[i], dx_dot[i], rstd[i]
            mu = mean[i] if centred else F(0)
            shift, side = mean_dot[i], along[i]
            for j in range(c):  # the tangent of the gradient of ā, kept where the result goes
                out[j] = up_dot[j] * weight[j]
            if weight_dot.size:
                for j in range(c):
                    out[j] += up[j] * weight_dot[j]  # eq LN.4, RMS.8
            g_mean, g_mean_dot, g_along, g_along_dot = F(0), F(0), F(0), F(0)
            for j in range(c):
                normed = (row[j] - mu) * r
                normed_dot = (moved[j] - shift - normed * side) * r
                g = up[j] * weight[j]
                g_mean += g
                g_mean_dot += out[j]
                g_along += normed * g
                g_along_dot += normed_dot * g + normed * out[j]
                dw[j] += normed_dot * up[j] + normed * up_dot[j]  # eq LN.6, RMS.10
                db[j] += up_dot[j]  # eq LN.7
            g_mean = g_mean / F(c) if centred else F(0)
            g_mean_dot = g_mean_dot / F(c) if centred else F(0)
            g_along /= F(c)
            g_along_dot /= F(c)
            r_dot = -r * r * side  # eq LN.1, RMS.5
            for j in range(c):
                normed = (row[j] - mu) * r
                normed_dot = (moved[j] - shift - normed * side) * r
                inner_ = up[j] * weight[j] - g_mean - normed * g_along
                inner_dot = out[j] - g_mean_dot - normed_dot * g_along - normed * g_along_dot
                out[j] = inner_dot * r + inner_ * r_dot  # eq LN.5, RMS.9


def _norm_arrays(saved: Any) -> tuple[Any, Any, Any, Any, bool]:
    """x, mean, 1/σ and weight of either norm, and whether the mean counts."""
    if isinstance(saved, LayerNormKernelSaved):
        return saved.x, saved.mean, saved.rstd, saved.weight, True
    return saved.x, saved.inverse, saved.inverse, saved.weight, False


def _normed(x_dot: Any, weight_dot: Any, bias_dot: Any, saved: Any) -> tuple[Any, NormKernelDot]:
    moved = as_rows(x_dot)
    weight_dot, bias_dot = (NO_ROW if d is None else contiguous(d) for d in (weight_dot, bias_dot))
    y_dot, (mean_dot, along) = empty(moved.shape), empty((2, moved.shape[0]))
    _norm_tangent(*_norm_arrays(saved), moved, weight_dot, bias_dot, y_dot, mean_dot, along)
    return y_dot.reshape(x_dot.shape), NormKernelDot(moved, mean_dot, along, weight_dot)


def _norm_gradients(dy: Any, dy_dot: Any, saved: Any, saved_dot: NormKernelDot) -> tuple[Any, Any, Any]:
    up, up_dot = as_rows(dy), as_rows(dy_dot)
    dx_dot, weight = empty(up.shape), saved.weight
    dweight_dot, dbias_dot = empty(weight.shape), empty(weight.shape)
    parts = empty(((up.shape[0] + BLOCK - 1) // BLOCK, 2, up.shape[1]))
    _norm_backward_tangent(up, up_dot, *_norm_arrays(saved), *saved_dot, dx_dot, parts)
    sum_parts(parts, dweight_dot, dbias_dot)
    return dx_dot.reshape(dy.shape), dweight_dot, dbias_dot


def layer_norm_tangent(x_dot: Any, weight_dot: Any, bias_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ of layer norm."""
    if not isinstance(saved, LayerNormKernelSaved):
        return formulas.layer_norm_tangent(x_dot, weight_dot, bias_dot, saved)
    return _normed(x_dot, weight_dot, bias_dot, saved)


def layer_norm_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of x, weight and bias."""
    if not isinstance(saved, LayerNormKernelSaved):
        return formulas.layer_norm_backward_tangent(dy, dy_dot, saved, saved_dot)
    return _norm_gradients(dy, dy_dot, saved, saved_dot)


def rms_norm_tangent(x_dot: Any, weight_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ of RMS norm."""
    if not isinstance(saved, RMSNormKernelSaved):
        return formulas.rms_norm_tangent(x_dot, weight_dot, saved)
    return _normed(x_dot, weight_dot, None, saved)


def rms_norm_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any]:
    """Tangents of the gradients of x and weight."""
    if not isinstance(saved, RMSNormKernelSaved):
        return formulas.rms_norm_backward_tangent(dy, dy_dot, saved, saved_dot)
    return _norm_gradients(dy, dy_dot, saved, saved_dot)[:2]


KERNELS = (*layer_norm.KERNELS, *rms_norm.KERNELS, _norm_tangent, _norm_backward_tangent)
