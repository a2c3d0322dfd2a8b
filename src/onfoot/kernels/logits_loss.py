"""The fused head and loss, one part of the tokens at a time, so that the logits never exist all at once.

A part's logits are overwritten by their gradient, which is used at once for the gradients of x and of the weight. So
the gradients are computed in the forward pass, and the backward pass only returns them, scaled. Besides the gradients,
this needs one buffer of at most PART floats (104 MB).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot.kernels import LOGITS, cross_entropy, linear
from onfoot.kernels.buffers import empty
from onfoot.kernels.cross_entropy import as_array, checked_targets, log_sum_exp, targets_match, total
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.linear import affine, input_gradient, shapes_match, sum_rows
from onfoot.kernels.product import product
from onfoot.kernels.shapes import as_rows, contiguous, is_float32, thread_range
from onfoot.kernels.simd import address, greatest
from onfoot.kernels.update import add
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import FrozenWeight

PART = LOGITS
ROWS = 170  # minimum rows per part: with fewer, packing the weight again for each part costs too much


class LogitsLossKernelSaved(NamedTuple):
    dx: np.ndarray
    dweight: np.ndarray | None
    dbias: np.ndarray | None


class Composed(NamedTuple):
    head: Any
    loss: Any


@inner
def loss_and_gradient(row: np.ndarray, target: int, scale: float) -> float:
    """The loss of one token; its logits are overwritten by their gradient."""
    top, hit = greatest(address(row), row.size), row[target]
    total = F(0)
    for j in range(row.size):
        row[j] = exp(row[j] - top)
        total += row[j]
    share = scale / total
    for j in range(row.size):
        row[j] *= share
    row[target] -= scale  # eq CE.2
    return np.float64(np.log(total) + top) - np.float64(hit)  # eq CE.1


@kernel("f4[:,::1], i8[::1], f8[::1], f8[::1], b1", "n v, n, ., n")
def _losses(
    logits: np.ndarray,
    targets: np.ndarray,
    divisor: np.ndarray,
    losses: np.ndarray,
    grad: bool,
    thread: int,
    threads: int,
) -> None:
    """Each token's loss; with `grad`, its logits are overwritten by their gradient."""
    a, e = thread_range(logits.shape[0], 1, thread, threads)
    scale = F(1 / divisor[0])
    for i in range(a, e):
        row, target = logits[i], targets[i]
        losses[i] = 0.0
        if target == IGNORE:
            if grad:
                row[:] = 0
        elif grad:
            losses[i] = loss_and_gradient(row, target, scale)
        else:
            losses[i] = np.float64(log_sum_exp(row)) - np.float64(row[target])  # eq CE.1


def rows_per_part(n: int, vocabulary: int, trains: bool) -> int:
    """At most PART logits; fewer if the buffer would otherwise be large beside the gradient of the weight."""
    parts = -(-n * vocabulary // PART)
    if parts == 1 and 2 * n * vocabulary > PART:
        parts = min(3 if trains else 2, n // ROWS)
    return max(1, -(-n // max(1, parts)))


def _run(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    targets: np.ndarray,
    divisor: Any,
    trains: bool,
    grad: bool = True,
) -> tuple[Any, Any]:
    rows, weight = as_rows(x), weight if isinstance(weight, FrozenWeight) else contiguous(weight)
    vocabulary, width = weight.shape
    target, over = checked_targets(targets, vocabulary), as_array(divisor)
    n = rows.shape[0]
    losses = empty((n,), np.float64)
    dx = empty((n, width)) if grad else None
    dweight = empty(weight.shape) if trains else None
    dbias: np.ndarray | None = None
    size = rows_per_part(n, vocabulary, trains)
    buffer = empty((size, vocabulary))
    for a in range(0, n, size):
        part = rows[a : a + size]
        logits = buffer[: part.shape[0]]
        affine(part, weight.T, bias, out=logits)
        _losses(logits, target[a : a + size], over, losses[a : a + size], grad)
        if dx is not None:
            input_gradient(logits, weight.T, out=dx[a : a + size])  # eq FC.2
        if dweight is not None:
            product(logits.T, part, out=dweight, accumulate=a > 0)  # eq FC.3
            if bias is not None:
                one = sum_rows(logits)
                dbias = one if dbias is None else add(dbias, one)  # eq FC.4
    loss = total(losses, over)
    return loss, None if dx is None else LogitsLossKernelSaved(dx.reshape(x.shape), dweight, dbias)


def _shapes_match(x: np.ndarray, weight: Any, bias: Any, targets: Any) -> bool:
    """Whether the kernels support these arrays, and there is one target per row."""
    return shapes_match(x, weight.T, bias) and targets_match(targets, x)


def _composed(logits: tuple[np.ndarray, Any], targets: np.ndarray, divisor: float) -> tuple[Any, Composed]:
    """The two pairs one after the other, for arrays that the kernels do not support."""
    loss, saved = cross_entropy.cross_entropy_forward(logits[0], targets, divisor)
    return loss, Composed(logits[1], saved)


def logits_loss_forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, targets: np.ndarray, divisor: float
) -> tuple[np.float32, Any]:
    """L = Σ (log Σ exp a − a[target]) / divisor with a = x wᵗ + b, over the tokens that have a target."""
    if not is_float32(weight) or not _shapes_match(x, weight, bias, targets):
        return _composed(linear.linear_forward(x, weight.T, bias), targets, divisor)
    return _run(x, weight, bias, targets, divisor, trains=True)


def logits_loss_backward(dloss: float, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients of x, weight and bias; with dloss = 1, they are returned without a copy."""
    if isinstance(saved, Composed):
        dx, dweight, dbias = linear.linear_backward(cross_entropy.cross_entropy_backward(dloss, saved.loss), saved.head)
        return dx, dweight.T, dbias
    if dloss == 1:
        return saved.dx, saved.dweight, saved.dbias
    factor = np.float32(dloss)
    return saved.dx * factor, saved.dweight * factor, None if saved.dbias is None else saved.dbias * factor


def frozen_logits_loss_forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, targets: np.ndarray, divisor: float
) -> tuple[np.float32, Any]:
    """`logits_loss_forward` with a frozen head."""
    if not _shapes_match(x, weight, bias, targets):
        return _composed(linear.frozen_linear_forward(x, weight.T, bias), targets, divisor)
    return _run(x, weight, bias, targets, divisor, trains=False)


def frozen_logits_loss_backward(dloss: float, saved: Any) -> np.ndarray:
    """The gradient of x only."""
    if isinstance(saved, Composed):
        return linear.frozen_linear_backward(cross_entropy.cross_entropy_backward(dloss, saved.loss), saved.head)
    return saved.dx if dloss == 1 else saved.dx * np.float32(dloss)


def logits_loss_gradients(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, targets: np.ndarray, divisor: float
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The loss, and the gradients of x and of the logits, (N, V): for those who need the rows of each example."""
    if not is_float32(weight) or not _shapes_match(x, weight, bias, targets):
        loss, saved = _composed(linear.frozen_linear_forward(x, weight.T, bias), targets, divisor)
        dlogits = cross_entropy.cross_entropy_backward(1.0, saved.loss)
        return loss, linear.frozen_linear_backward(dlogits, saved.head), dlogits.reshape(-1, dlogits.shape[-1])
    rows, weight = as_rows(x), contiguous(weight)
    over, losses = as_array(divisor), empty(rows.shape[:1], np.float64)
    logits = affine(rows, weight.T, bias)
    _losses(logits, checked_targets(targets, weight.shape[0]), over, losses, True)
    return total(losses, over), input_gradient(logits, weight.T).reshape(x.shape), logits  # eq FC.2


def logits_loss_value(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, targets: np.ndarray, divisor: float
) -> np.float32:
    """The loss only, if no backward pass follows."""
    if not _shapes_match(x, weight, bias, targets):
        return frozen_logits_loss_forward(x, weight, bias, targets, divisor)[0]
    return _run(x, weight, bias, targets, divisor, trains=False, grad=False)[0]


KERNELS = (*linear.KERNELS, *cross_entropy.KERNELS, _losses)
