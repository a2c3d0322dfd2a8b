"""The tangents of `ops/tangents` as kernels: what is not a matrix product is one pass over memory.

They take what the pairs of the other kernels save; for anything else, the formulas are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot.kernels import activation, attention, dropout, embedding, linear, logits_loss, lora, rms_norm, rope, swiglu
from onfoot.kernels import layer_norm as norms
from onfoot.kernels.activation import CUBE, DENSITY, TWO_ROOT, gelu_erf_slope, gelu_tanh_slope
from onfoot.kernels.attention import AttentionKernelSaved, empty_heads, four_axes
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.cross_entropy import as_array, checked_targets, total
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.layer_norm import BLOCK, LayerNormKernelSaved
from onfoot.kernels.linear import FrozenLinearKernelSaved, LinearKernelSaved, affine, input_gradient, sum_rows
from onfoot.kernels.logits_loss import rows_per_part
from onfoot.kernels.lora import LoRAKernelSaved
from onfoot.kernels.matrix import FLOAT, Matrix, head_of, transposed
from onfoot.kernels.product import NO_ROW, SCRATCH, multiply, product
from onfoot.kernels.rms_norm import RMSNormKernelSaved
from onfoot.kernels.shapes import as_rows, contiguous, filled, is_float32, thread_range, threads
from onfoot.kernels.simd import address, floats, greatest, integers
from onfoot.kernels.swiglu import SwiGLUKernelSaved
from onfoot.kernels.update import add, scale_by, times
from onfoot.ops import tangents as formulas
from onfoot.ops.cross_entropy import IGNORE

GRAIN = 1024  # elements

# Linear layers: products that accumulate


def linear_tangent(x_dot: Any, weight_dot: Any, bias_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ w + x ẇ + ḃ."""
    if not isinstance(saved, LinearKernelSaved):
        return formulas.linear_tangent(x_dot, weight_dot, bias_dot, saved)
    x, weight, has_bias = saved
    y_dot = affine(x_dot, weight, bias_dot)
    if weight_dot is not None:
        product(as_rows(x), weight_dot, out=as_rows(y_dot), accumulate=True)  # eq FC.5
    return y_dot, LinearKernelSaved(x_dot, weight_dot, has_bias)


def linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of x, weight and bias."""
    if not isinstance(saved, LinearKernelSaved):
        return formulas.linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    x, weight, has_bias = saved
    dx_dot = input_gradient(dy_dot, weight)
    if saved_dot.weight is not None:
        product(as_rows(dy), saved_dot.weight.T, out=as_rows(dx_dot), accumulate=True)  # eq FC.6
    left, right = (as_rows(x), as_rows(saved_dot.x)), (as_rows(dy), as_rows(dy_dot))
    if not weight.flags.c_contiguous:  # stored (out, in): so is its gradient
        dweight_dot = weight_gradient_tangent(right, left).T
    else:
        dweight_dot = weight_gradient_tangent(left, right)
    return dx_dot, dweight_dot, sum_rows(right[1]) if has_bias else None  # eq FC.8


def weight_gradient_tangent(left: tuple[Any, Any], right: tuple[Any, Any], out: Any = None) -> np.ndarray:
    """The tangent of leftᵗ right, each with its tangent; added to `out` if given."""
    made = product(left[1].T, right[0], out=out, accumulate=out is not None)
    return product(left[0].T, right[1], out=made, accumulate=True)  # eq FC.7


def frozen_linear_tangent(x_dot: Any, weight_dot: None, bias_dot: None, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ w."""
    if not isinstance(saved, FrozenLinearKernelSaved):
        return formulas.frozen_linear_tangent(x_dot, weight_dot, bias_dot, saved)
    return affine(x_dot, saved.weight, None), None


def frozen_linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not isinstance(saved, FrozenLinearKernelSaved):
        return formulas.frozen_linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    return input_gradient(dy_dot, saved.weight)


def lora_linear_tangent(
    x_dot: Any, weight_dot: None, bias_dot: None, down_dot: Any, up_dot: Any, saved: Any
) -> tuple[Any, Any]:
    """ẏ of a frozen layer and its LoRA layer."""
    if not isinstance(saved, LoRAKernelSaved):
        return formulas.lora_linear_tangent(x_dot, weight_dot, bias_dot, down_dot, up_dot, saved)
    x, weight, keep, down, up, scale, low = saved
    x, moved = (_kept(one, keep) for one in (x, x_dot))
    y_dot = affine(x_dot, weight, None)
    low_dot = product(moved, down)
    product(x, down_dot, out=low_dot, accumulate=True)
    scale_by(low_dot, scale)  # eq LORA.3
    product(low_dot, up, out=as_rows(y_dot), accumulate=True)
    product(low, up_dot, out=as_rows(y_dot), accumulate=True)  # eq LORA.4
    return y_dot, LoRAKernelSaved(x_dot, weight, keep, down_dot, up_dot, scale, low_dot)


def lora_linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of x, down and up."""
    if not isinstance(saved, LoRAKernelSaved):
        return formulas.lora_linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    x, weight, keep, down, up, scale, low = saved
    right, right_dot = as_rows(dy), as_rows(dy_dot)
    dlow, dlow_dot = product(right, up.T), product(right_dot, up.T)
    product(right, saved_dot.up.T, out=dlow_dot, accumulate=True)
    scale_by(dlow, scale)
    scale_by(dlow_dot, scale)
    dx_dot = input_gradient(dy_dot, weight)
    through = as_rows(dx_dot) if keep is None else None
    through = product(dlow_dot, down.T, out=through, accumulate=keep is None)
    product(dlow, saved_dot.down.T, out=through, accumulate=True)  # eq LORA.5
    if keep is not None:
        dx_dot = add(dx_dot, times(through.reshape(dx_dot.shape), keep))
    left = _kept(x, keep), _kept(saved_dot.x, keep)
    ddown_dot = weight_gradient_tangent(left, (dlow, dlow_dot))  # eq LORA.6
    dup_dot = weight_gradient_tangent((low, saved_dot.low), (right, right_dot))  # eq LORA.7
    return dx_dot, ddown_dot, dup_dot


def _kept(x: Any, keep: Any) -> Any:
    return as_rows(x if keep is None else times(x, keep))


def zeros_like(x: Any) -> Any:
    """The tangent of something that does not move."""
    if not is_float32(x):
        return np.zeros_like(x)
    made = empty(x.shape)
    filled(made, 0.0)
    return made


# Layers that are linear in their input


def embedding_tangent(weight_dot: Any, saved: Any) -> tuple[Any, None]:
    """Rows of the direction."""
    return embedding.embedding_forward(saved.ids, weight_dot)[0], None  # eq EMB.2


def embedding_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of weight."""
    return embedding.embedding_backward(dy_dot, saved)  # eq EMB.3


def dropout_tangent(x_dot: Any, saved: Any) -> tuple[Any, None]:
    """ẏ = ẋ ∘ keep."""
    return dropout.dropout_backward(x_dot, saved), None  # eq DO.3


def dropout_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of x."""
    return dropout.dropout_backward(dy_dot, saved)  # eq DO.4


def rope_tangent(x_dot: Any, saved: Any) -> tuple[Any, None]:
    """ẋ, rotated as x is."""
    return rope.rope_forward(x_dot, saved.cos, saved.sin, saved.interleaved)[0], None  # eq ROPE.6


def rope_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of x."""
    return rope.rope_backward(dy_dot, saved)  # eq ROPE.7


# Norms


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
    norms.sum_parts(parts, dweight_dot, dbias_dot)
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


# Activations


@inner
def gelu_tanh_curvature(x: float) -> float:
    """g'' with the logistic function s of 2u: 2 s(1 − s) 2u' + x [s(1 − s)(1 − 2s)(2u')² + s(1 − s) 2u'']."""
    x2 = x * x
    s = F(1) / (F(1) + exp(-TWO_ROOT * (x + CUBE * (x2 * x))))
    slope, bend = TWO_ROOT * (F(1) + F(3) * CUBE * x2), TWO_ROOT * (F(6) * CUBE * x)
    return s * (F(1) - s) * (F(2) * slope + x * ((F(1) - F(2) * s) * slope * slope + bend))  # eq G.9


@inner
def gelu_erf_curvature(x: float) -> float:
    """φ(x) (2 − x²)."""
    return DENSITY * exp(F(-0.5) * x * x) * (F(2) - x * x)  # eq G.10


def _curved(name: str, slope: Any, curvature: Any) -> Any:
    @kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n", f"{name}_backward")
    def backward(
        dy: np.ndarray, dy_dot: np.ndarray, x: np.ndarray, x_dot: np.ndarray, out: np.ndarray, thread: int, threads: int
    ) -> None:
        a, e = thread_range(x.size, GRAIN, thread, threads)
        d, d_dot, here, moved, to = dy[a:e], dy_dot[a:e], x[a:e], x_dot[a:e], out[a:e]
        for i in range(e - a):
            to[i] = d_dot[i] * slope(here[i]) + d[i] * curvature(here[i]) * moved[i]  # eq G.8

    return backward


_gelu_tanh = _curved("gelu_tanh", gelu_tanh_slope, gelu_tanh_curvature)
_gelu_erf = _curved("gelu_erf", gelu_erf_slope, gelu_erf_curvature)


def gelu_tanh_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = g'(x) ∘ ẋ."""
    return activation.gelu_tanh_backward(x_dot, saved), x_dot  # eq G.7


def gelu_erf_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = g'(x) ∘ ẋ."""
    return activation.gelu_erf_backward(x_dot, saved), x_dot  # eq G.7


def relu_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ where x > 0."""
    return activation.relu_backward(x_dot, saved), x_dot  # eq G.7


def _activation_backward_tangent(kernel: Any, dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    out = empty(dy.shape)
    kernel(*(contiguous(a).reshape(-1) for a in (dy, dy_dot, saved.x, x_dot)), out.reshape(-1))
    return out


def gelu_tanh_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not is_float32(dy, dy_dot, saved.x, x_dot):
        return formulas.gelu_tanh_backward_tangent(dy, dy_dot, saved, type(saved)(x_dot))
    return _activation_backward_tangent(_gelu_tanh, dy, dy_dot, saved, x_dot)


def gelu_erf_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not is_float32(dy, dy_dot, saved.x, x_dot):
        return formulas.gelu_erf_backward_tangent(dy, dy_dot, saved, type(saved)(x_dot))
    return _activation_backward_tangent(_gelu_erf, dy, dy_dot, saved, x_dot)


def relu_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x: no curvature."""
    return activation.relu_backward(dy_dot, saved)


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n")
def _swiglu_tangent(
    gate: np.ndarray,
    up: np.ndarray,
    gate_dot: np.ndarray,
    up_dot: np.ndarray,
    out: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    g, u, gd, ud, to = gate[a:e], up[a:e], gate_dot[a:e], up_dot[a:e], out[a:e]
    for i in range(e - a):
        s = F(1) / (F(1) + exp(-g[i]))
        silu = g[i] * s
        to[i] = (s + silu * (F(1) - s)) * gd[i] * u[i] + silu * ud[i]  # eq GLU.4


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n, n, n, n")
def _swiglu_backward_tangent(
    dy: np.ndarray,
    dy_dot: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    gate_dot: np.ndarray,
    up_dot: np.ndarray,
    dgate_dot: np.ndarray,
    dup_dot: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    d, dd, g, u, gd, ud = dy[a:e], dy_dot[a:e], gate[a:e], up[a:e], gate_dot[a:e], up_dot[a:e]
    out_g, out_u = dgate_dot[a:e], dup_dot[a:e]
    for i in range(e - a):
        s = F(1) / (F(1) + exp(-g[i]))
        silu = g[i] * s
        slope = s + silu * (F(1) - s)
        curvature = s * (F(1) - s) * (F(2) + g[i] * (F(1) - F(2) * s))  # eq GLU.7
        out_g[i] = (dd[i] * u[i] + d[i] * ud[i]) * slope + d[i] * u[i] * curvature * gd[i]  # eq GLU.5
        out_u[i] = dd[i] * silu + d[i] * slope * gd[i]  # eq GLU.6


def swiglu_tangent(gate_dot: Any, up_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ of SwiGLU."""
    if not isinstance(saved, SwiGLUKernelSaved):
        return formulas.swiglu_tangent(gate_dot, up_dot, saved)
    gate_dot, up_dot = contiguous(gate_dot), contiguous(up_dot)
    out = empty(gate_dot.shape)
    _swiglu_tangent(*(a.reshape(-1) for a in (saved.gate, saved.up, gate_dot, up_dot, out)))
    return out, SwiGLUKernelSaved(gate_dot, up_dot)


def swiglu_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any]:
    """Tangents of the gradients of gate and up."""
    if not isinstance(saved, SwiGLUKernelSaved):
        return formulas.swiglu_backward_tangent(dy, dy_dot, saved, saved_dot)
    dgate_dot, dup_dot = empty(dy.shape), empty(dy.shape)
    arrays = contiguous(dy), contiguous(dy_dot), *saved, *saved_dot, dgate_dot, dup_dot
    _swiglu_backward_tangent(*(a.reshape(-1) for a in arrays))
    return dgate_dot, dup_dot


# Attention: one head at a time on each thread, with its Tq × Tk matrices in working memory


@inner
def weights_and_tangent(
    q: Matrix,
    k: Matrix,
    q_dot: Matrix,
    k_dot: Matrix,
    rho: Matrix,
    rho_dot: Matrix,
    n_q: int,
    n_k: int,
    width: int,
    start: int,
    causal: bool,
    work: int,
) -> None:
    """ρ and ρ̇ of one head."""
    none = Matrix(0, 0, FLOAT)
    multiply(n_q, n_k, width, q, 0, transposed(k), rho, 0, none, work)
    multiply(n_q, n_k, width, q_dot, 0, transposed(k), rho_dot, 0, none, work)
    multiply(n_q, n_k, width, q, 0, transposed(k_dot), rho_dot, 0, rho_dot, work)  # eq ATT.6
    scale = F(1) / np.sqrt(F(width))
    for i in range(n_q):
        weights, moved = floats(rho.at + i * rho.row, n_k), floats(rho_dot.at + i * rho_dot.row, n_k)
        low = integers(start + 8 * i, 1)[0] if start else 0
        high = min(max(i + n_k - n_q + 1, 0), n_k) if causal else n_k
        low = min(low, high)
        weights[:low] = 0
        weights[high:] = 0
        moved[:low] = 0
        moved[high:] = 0
        if low == high:
            continue
        seen, seen_dot = weights[low:high], moved[low:high]
        top, total = greatest(address(seen), high - low), F(0)
        for j in range(high - low):
            seen[j] = exp((seen[j] - top) * scale)
            total += seen[j]
        share, side = F(1) / total, F(0)
        for j in range(high - low):
            seen[j] *= share
            seen_dot[j] *= scale
            side += seen[j] * seen_dot[j]
        for j in range(high - low):
            seen_dot[j] = seen[j] * (seen_dot[j] - side)  # eq ATT.4


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], i8[:,:,:], b1, f4[:,:]",
    "b h q d, b g k d, b g k e, b h q d, b g k d, b g k e, b h q e, b h q?, , threads .",
)
def _attention_tangent(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_dot: np.ndarray,
    k_dot: np.ndarray,
    v_dot: np.ndarray,
    y_dot: np.ndarray,
    start: np.ndarray,
    causal: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    batch, heads, n_q, width = q.shape
    n_k, group, out = k.shape[2], heads // k.shape[1], v.shape[3]
    spare = address(work) + thread * work.strides[0]
    rho = Matrix(spare + SCRATCH * FLOAT, n_k * FLOAT, FLOAT)
    rho_dot = Matrix(rho.at + n_q * n_k * FLOAT, n_k * FLOAT, FLOAT)
    first, last = thread_range(batch * heads, 1, thread, threads)
    for task in range(first, last):
        b, h = task // heads, task % heads
        g = h // group
        starts = address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0
        keys, keys_dot = head_of(k, b, g), head_of(k_dot, b, g)
        moved = head_of(q_dot, b, h)
        weights_and_tangent(
            head_of(q, b, h), keys, moved, keys_dot, rho, rho_dot, n_q, n_k, width, starts, causal, spare
        )
        to = head_of(y_dot, b, h)
        multiply(n_q, out, n_k, rho_dot, 0, head_of(v, b, g), to, 0, Matrix(0, 0, FLOAT), spare)
        multiply(n_q, out, n_k, rho, 0, head_of(v_dot, b, g), to, 0, to, spare)  # eq ATT.7


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], "
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], i8[:,:,:], b1, f4[:,:]",
    "b h q e, b h q e, b h q d, b g k d, b g k e, b h q d, b g k d, b g k e, b h q d, b g k d, b g k e, b h q?, , "
    "threads .",
)
def _attention_backward_tangent(
    dy: np.ndarray,
    dy_dot: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_dot: np.ndarray,
    k_dot: np.ndarray,
    v_dot: np.ndarray,
    dq_dot: np.ndarray,
    dk_dot: np.ndarray,
    dv_dot: np.ndarray,
    start: np.ndarray,
    causal: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    batch, heads, n_q, width = q.shape
    n_k, group, out = k.shape[2], heads // k.shape[1], v.shape[3]
    none, square, scale = Matrix(0, 0, FLOAT), n_q * n_k * FLOAT, F(1) / np.sqrt(F(width))
    spare = address(work) + thread * work.strides[0]
    rho = Matrix(spare + SCRATCH * FLOAT, n_k * FLOAT, FLOAT)
    rho_dot = Matrix(rho.at + square, n_k * FLOAT, FLOAT)
    z = Matrix(rho.at + 2 * square, n_k * FLOAT, FLOAT)  # dρ, then the gradient of the scores
    z_dot = Matrix(rho.at + 3 * square, n_k * FLOAT, FLOAT)
    first, last = thread_range(batch * k.shape[1], 1, thread, threads)
    for task in range(first * group, last * group):  # all query heads of a key/value head are on one thread
        b, h = task // heads, task % heads
        g = h // group
        starts = address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0
        queries, keys, values = head_of(q, b, h), head_of(k, b, g), head_of(v, b, g)
        queries_dot, keys_dot, values_dot = head_of(q_dot, b, h), head_of(k_dot, b, g), head_of(v_dot, b, g)
        up, up_dot = head_of(dy, b, h), head_of(dy_dot, b, h)
        weights_and_tangent(queries, keys, queries_dot, keys_dot, rho, rho_dot, n_q, n_k, width, starts, causal, spare)
        to_k, to_v = head_of(dk_dot, b, g), head_of(dv_dot, b, g)
        before_k, before_v = (to_k, to_v) if h % group else (none, none)
        multiply(n_k, out, n_q, transposed(rho_dot), 0, up, to_v, 0, before_v, spare)
        multiply(n_k, out, n_q, transposed(rho), 0, up_dot, to_v, 0, to_v, spare)  # eq ATT.8
        multiply(n_q, n_k, out, up, 0, transposed(values), z, 0, none, spare)
        multiply(n_q, n_k, out, up_dot, 0, transposed(values), z_dot, 0, none, spare)
        multiply(n_q, n_k, out, up, 0, transposed(values_dot), z_dot, 0, z_dot, spare)
        for i in range(n_q):
            weights, weights_dot = floats(rho.at + i * rho.row, n_k), floats(rho_dot.at + i * rho_dot.row, n_k)
            grad, grad_dot = floats(z.at + i * z.row, n_k), floats(z_dot.at + i * z_dot.row, n_k)
            side, side_dot = F(0), F(0)
            for j in range(n_k):
                side += grad[j] * weights[j]
                side_dot += grad_dot[j] * weights[j] + grad[j] * weights_dot[j]
            for j in range(n_k):
                inside = (grad[j] - side) * scale
                grad_dot[j] = (grad_dot[j] - side_dot) * scale * weights[j] + inside * weights_dot[j]  # eq ATT.5
                grad[j] = inside * weights[j]
        to_q = head_of(dq_dot, b, h)
        multiply(n_q, width, n_k, z_dot, 0, keys, to_q, 0, none, spare)
        multiply(n_q, width, n_k, z, 0, keys_dot, to_q, 0, to_q, spare)  # eq ATT.9
        multiply(n_k, width, n_q, transposed(z_dot), 0, queries, to_k, 0, before_k, spare)
        multiply(n_k, width, n_q, transposed(z), 0, queries_dot, to_k, 0, to_k, spare)  # eq ATT.10


class AttentionKernelDot(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def _attends(saved: Any) -> bool:
    """Whether the kernels support this attention: not with a dropout pattern."""
    return isinstance(saved, AttentionKernelSaved) and not saved.keep.size


def _tangent(pair: str, q_dot: Any, k_dot: Any, v_dot: Any, saved: Any) -> tuple[Any, Any]:
    if not _attends(saved):
        return _with_formula(pair, saved, q_dot, k_dot, v_dot)
    moved = AttentionKernelDot(four_axes(q_dot), four_axes(k_dot), four_axes(v_dot))
    batch, heads, n_q, _ = saved.q.shape
    y_dot = empty_heads(batch, heads, n_q, saved.v.shape[3])
    work = scratch(threads(), SCRATCH + 2 * n_q * saved.k.shape[2])
    _attention_tangent(*saved[:3], *moved, y_dot, saved.start, saved.causal, work)
    return y_dot if len(saved.lead) == 2 else y_dot.reshape(*saved.lead, *y_dot.shape[2:]), moved


def _backward_tangent(pair: str, dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    if not _attends(saved):
        formula, primal = saved_dot
        return getattr(formulas, f"{pair}_backward_tangent")(dy, dy_dot, primal, formula)
    made = [empty_heads(*x.shape) for x in saved[:3]]
    work = scratch(threads(), SCRATCH + 4 * saved.q.shape[2] * saved.k.shape[2])
    arrays = four_axes(dy), four_axes(dy_dot), *saved[:3], *saved_dot
    _attention_backward_tangent(*arrays, *made, saved.start, saved.causal, work)
    if len(saved.lead) != 2:
        made = [x.reshape(*saved.lead, *x.shape[2:]) for x in made]
    return made[0], made[1], made[2]


def _with_formula(pair: str, saved: Any, *dots: Any) -> tuple[Any, Any]:
    """The formula's tangent, from what the formula's forward function saves; both are kept for the backward pass."""
    primal = saved
    if isinstance(saved, AttentionKernelSaved):
        from onfoot import ops

        start = saved.start if saved.start.size else None
        keep = saved.keep if saved.keep.size else None
        _, primal = getattr(ops, f"{pair}_forward")(*saved[:3], saved.causal, start, keep)
    y_dot, saved_dot = getattr(formulas, f"{pair}_tangent")(*dots, primal)
    return y_dot, (saved_dot, primal)


def attention_tangent(q_dot: Any, k_dot: Any, v_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = ρ̇ v + ρ v̇."""
    return _tangent("attention", q_dot, k_dot, v_dot, saved)


def attention_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of q, k and v."""
    return _backward_tangent("attention", dy, dy_dot, saved, saved_dot)


def grouped_query_tangent(q_dot: Any, k_dot: Any, v_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ of each query head."""
    return _tangent("grouped_query", q_dot, k_dot, v_dot, saved)  # eq GQA.4


def grouped_query_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of q, k and v."""
    return _backward_tangent("grouped_query", dy, dy_dot, saved, saved_dot)  # eq GQA.5


# The loss


@kernel("f4[:,::1], f4[:,::1], i8[::1], f8[::1], f8[::1], f8[::1]", "n v, n v, n, ., n, n")
def _losses(
    logits: np.ndarray,
    logits_dot: np.ndarray,
    targets: np.ndarray,
    divisor: np.ndarray,
    losses: np.ndarray,
    dots: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Each token's loss, and its tangent over the divisor; logits and their tangent become their gradient and its."""
    first, last = thread_range(logits.shape[0], 1, thread, threads)
    scale = F(1 / divisor[0])
    for i in range(first, last):
        row, moved, target = logits[i], logits_dot[i], targets[i]
        losses[i] = dots[i] = 0.0
        if target == IGNORE:
            row[:] = 0
            moved[:] = 0
            continue
        top, hit, hit_dot = greatest(address(row), row.size), row[target], moved[target]
        sum_, side = F(0), F(0)
        for j in range(row.size):
            row[j] = exp(row[j] - top)
            sum_ += row[j]
            side += row[j] * moved[j]
        losses[i] = np.float64(np.log(sum_) + top) - np.float64(hit)  # eq CE.1
        side /= sum_
        dots[i] = (np.float64(side) - np.float64(hit_dot)) / divisor[0]  # eq CE.3
        share = scale / sum_
        for j in range(row.size):
            row[j] *= share
            moved[j] = row[j] * (moved[j] - side)  # eq CE.4
        row[target] -= scale  # eq CE.2


class LogitsLossTangents(NamedTuple):
    """The loss, each token's derivative, and the gradients of x, weight and bias with their tangents."""

    loss: Any
    dots: Any  # (N,), float64
    dx: tuple[Any, Any]
    dweight: tuple[Any, Any]
    dbias: tuple[Any, Any]


def logits_loss_tangents(
    x: tuple[Any, Any],
    weight: tuple[Any, Any],
    bias: tuple[Any, Any],
    targets: Any,
    divisor: Any,
    trains: bool,
    kind: str,
) -> LogitsLossTangents:
    """The fused head and loss, some tokens at a time; each argument is (array, tangent), the weight (V, C).

    For "gauss-newton", the tangents are the ordinary gradients of the head for the tangent of the logits' gradient.
    """
    left, left_dot = (as_rows(a) for a in x)
    w, w_dot = weight
    vocabulary, width = w.shape
    target, over = checked_targets(targets, vocabulary), as_array(divisor)
    n, curved = left.shape[0], kind == "hessian"
    losses, dots = empty((n,), np.float64), empty((n,), np.float64)
    dx: Any = empty((n, width)) if curved else None
    dx_dot = empty((n, width))
    dweight = empty(w.shape) if trains and curved else None
    dweight_dot = empty(w.shape) if trains else None
    dbias: Any = None
    dbias_dot: Any = None
    size = rows_per_part(n, 2 * vocabulary, trains)
    logits, logits_dot = empty((size, vocabulary)), empty((size, vocabulary))
    for a in range(0, n, size):
        rows, rows_dot = left[a : a + size], left_dot[a : a + size]
        d, d_dot = logits[: rows.shape[0]], logits_dot[: rows.shape[0]]
        affine(rows, w.T, bias[0], out=d)
        affine(rows_dot, w.T, bias[1], out=d_dot)
        if w_dot is not None:
            product(rows, w_dot.T, out=d_dot, accumulate=True)
        _losses(d, d_dot, target[a : a + size], over, losses[a : a + size], dots[a : a + size])
        to = dx_dot[a : a + size]
        input_gradient(d_dot, w.T, out=to)
        if curved:
            input_gradient(d, w.T, out=dx[a : a + size])
            if w_dot is not None:
                product(d, w_dot, out=to, accumulate=True)
        if not trains:
            continue
        product(d_dot.T, rows, out=dweight_dot, accumulate=a > 0)
        if curved:
            product(d.T, rows_dot, out=dweight_dot, accumulate=True)
            product(d.T, rows, out=dweight, accumulate=a > 0)
        if bias[0] is not None:
            one, one_dot = sum_rows(d), sum_rows(d_dot)
            dbias = one if dbias is None else add(dbias, one)
            dbias_dot = one_dot if dbias_dot is None else add(dbias_dot, one_dot)
    shape = x[0].shape
    dx = dx.reshape(shape) if curved else None
    loss = total(losses, over)
    return LogitsLossTangents(loss, dots, (dx, dx_dot.reshape(shape)), (dweight, dweight_dot), (dbias, dbias_dot))


KERNELS = (
    *linear.KERNELS,
    *lora.KERNELS,
    *attention.KERNELS,
    *norms.KERNELS,
    *rms_norm.KERNELS,
    *activation.KERNELS,
    *swiglu.KERNELS,
    *rope.KERNELS,
    *embedding.KERNELS,
    *dropout.KERNELS,
    *logits_loss.KERNELS,
    _norm_tangent,
    _norm_backward_tangent,
    _gelu_tanh,
    _gelu_erf,
    _swiglu_tangent,
    _swiglu_backward_tangent,
    _attention_tangent,
    _attention_backward_tangent,
    _losses,
)
