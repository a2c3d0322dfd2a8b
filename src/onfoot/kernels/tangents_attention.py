"""The tangents of attention: one head at a time on each thread, with its Tq × Tk matrices in working memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import attention, grouped_query
from onfoot.kernels.attention import AttentionKernelSaved, empty_heads, four_axes
from onfoot.kernels.buffers import scratch
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.matrix import FLOAT, Matrix, head_of, transposed
from onfoot.kernels.product import SCRATCH, multiply
from onfoot.kernels.shapes import thread_range, threads
from onfoot.kernels.simd import address, floats, greatest, integers
from onfoot.ops import tangents as formulas


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


KERNELS = (*attention.KERNELS, *grouped_query.KERNELS, _attention_tangent, _attention_backward_tangent)
