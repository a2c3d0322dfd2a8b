"""Softmax of attention scores with one query per lane: no sum runs across a vector, and no row is too short for one.

Scores are stored as sᵗ, one row of BLOCK queries per key. A group is WIDTH adjacent queries; `low` and `high` are the
addresses of the first key that each of them attends to and of the end of its keys, as floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onfoot.kernels.cpu import WIDTH
from onfoot.kernels.elementary import exp_of_vector
from onfoot.kernels.jit import cgutils, intrinsic, types
from onfoot.kernels.simd import FLOAT, I64, VECTOR, _const, _load, _store, lanes, larger

TOGETHER = 32  # keys whose terms are summed first: sums of sums, for less rounding
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def _each_key(build: Any, first: Any, end: Any, body: Any, sums: int = 0) -> list[Any]:
    """Runs `body(j)` for the keys first ... end; it returns `sums` vectors, whose sums are returned."""
    totals = [cgutils.alloca_once_value(build, ZERO) for _ in range(sums)]
    parts = [cgutils.alloca_once_value(build, ZERO) for _ in range(sums)]
    groups = build.sdiv(build.add(build.sub(end, first), _const(TOGETHER - 1)), _const(TOGETHER))
    with cgutils.for_range(build, groups) as outer:
        begin = build.add(first, build.mul(outer.index, _const(TOGETHER)))
        last = build.add(begin, _const(TOGETHER))
        last = build.select(build.icmp_signed("<", last, end), last, end)
        for part in parts:
            build.store(ZERO, part)
        with cgutils.for_range_slice(build, begin, last, _const(1), I64) as (j, _):
            for part, term in zip(parts, body(j), strict=True):
                build.store(build.fadd(build.load(part), term), part)
        for total, part in zip(totals, parts, strict=True):
            build.store(build.fadd(build.load(total), build.load(part)), total)
    return [build.load(total) for total in totals]


def _unless_zero(build: Any, divisor: Any, value: Any) -> Any:
    """The value, or 0 where a query attends to nothing. (A divisor of NaN is not 0.)"""
    return build.select(build.fcmp_unordered("!=", divisor, ZERO), value, ZERO)


@intrinsic
def softmax(typing: Any, s: Any, row: Any, first: Any, end: Any, low: Any, high: Any, scale: Any) -> Any:
    """ρᵗ of a group in place of its scores, for the keys first ... end; 0 where a query does not attend to a key."""

    def make(context: Any, build: Any, signature: Any, args: Any) -> Any:
        s, row, first, end, low, high, scale = args
        low, high, scale = _load(build, low), _load(build, high), lanes(build, scale)
        best = cgutils.alloca_once_value(build, ir.Constant(VECTOR, [float("-inf")] * WIDTH))

        def scores(j: Any) -> tuple[Any, Any, Any]:
            at, key = build.add(s, build.mul(j, row)), lanes(build, build.sitofp(j, FLOAT))
            seen = build.and_(build.fcmp_ordered("<=", low, key), build.fcmp_ordered("<", key, high))
            return at, _load(build, at), seen

        def find_best(j: Any) -> list[Any]:
            _, x, seen = scores(j)
            top = build.load(best)
            build.store(build.select(seen, larger(build, top, x), top), best)
            return []

        def exponential(j: Any) -> list[Any]:
            at, x, seen = scores(j)
            x = build.fmul(build.fsub(x, build.load(best)), scale)
            weight = build.select(seen, exp_of_vector(build, x), ZERO)  # eq 12, 13
            _store(build, weight, at)
            return [weight]

        _each_key(build, first, end, find_best)
        (total,) = _each_key(build, first, end, exponential, sums=1)
        share = _unless_zero(build, total, build.fdiv(ir.Constant(VECTOR, [1.0] * WIDTH), total))

        def normalise(j: Any) -> list[Any]:
            at = build.add(s, build.mul(j, row))
            _store(build, build.fmul(_load(build, at), share), at)  # eq 15
            return []

        _each_key(build, first, end, normalise)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32), make


@intrinsic
def softmax_backward(typing: Any, rho: Any, ds: Any, row: Any, first: Any, end: Any, scale: Any) -> Any:
    """The gradients of a group's scores in place of those of ρᵗ: ρ ∘ (dρ − dρ ⊖ ρ), times the scale."""

    def make(context: Any, build: Any, signature: Any, args: Any) -> Any:
        rho, ds, row, first, end, scale = args
        scale = lanes(build, scale)

        def both(j: Any) -> tuple[Any, Any, Any]:
            at = build.mul(j, row)
            to = build.add(ds, at)
            return _load(build, build.add(rho, at)), _load(build, to), to

        def terms(j: Any) -> list[Any]:
            weight, grad, _ = both(j)
            return [weight, build.fmul(weight, grad)]

        # dρ ⊖ ρ from the same values that it is subtracted from: if they are nearly equal, the differences cancel
        total, along = _each_key(build, first, end, terms, sums=2)
        along = _unless_zero(build, total, build.fdiv(along, total))

        def gradient(j: Any) -> list[Any]:
            weight, grad, to = both(j)
            _store(build, build.fmul(build.fmul(weight, build.fsub(grad, along)), scale), to)  # eq 25, 27, 28
            return []

        _each_key(build, first, end, gradient)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), make
