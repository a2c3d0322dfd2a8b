"""The tangents of every op against PyTorch's double backward and finite differences, in float64 on odd shapes.

A tangent is compared through its dot product with random arrays: ⟨w, ẏ⟩ is a derivative of ⟨w, y⟩, and ⟨w, dẋ⟩ one of
⟨w, dx⟩, which autograd has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_op_gradients import CASES, Case, normal
from torch.nn.attention import SDPBackend, sdpa_kernel

from onfoot import ops
from onfoot.arrays import to_numpy
from onfoot.engine import OPS
from onfoot.ops import tangents
from onfoot.ops.tangents.activation import gelu_erf_curvature, gelu_tanh_curvature
from onfoot.ops.tangents.attention import softmax_backward_tangent

Tangent = Callable[..., Any]


class Along(NamedTuple):
    """An op's two tangents, called with the tangents of a case's arrays."""

    forward: Tangent
    backward: Tangent


def of(pair: str, *missing: int) -> Along:
    """The tangents of a pair; `missing` are its arguments that a case does not move."""
    forward, backward = getattr(tangents, f"{pair}_tangent"), getattr(tangents, f"{pair}_backward_tangent")

    def call(dots: list[Any], saved: Any) -> Any:
        full = list(dots)
        for i in missing:
            full.insert(i, None)
        return forward(*full, saved)

    return Along(call, backward)


def flat_head(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, ...]:
    da, head = tangents.head_backward_tangent(dy, dy_dot, saved, saved_dot)
    return (da, *head)


def flat_heads(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, ...]:
    da, heads = tangents.heads_backward_tangent(dy, dy_dot, saved, saved_dot)
    return (da, *heads[0], *heads[1])


def two_heads(dots: list[Any], saved: Any) -> Any:
    return tangents.heads_tangent(dots[0], [ops.Head(*dots[1:7]), ops.Head(*dots[7:])], saved)


def without_biases(*args: Any) -> tuple[Any, ...]:
    return tuple(d for d in tangents.multi_head_backward_tangent(*args) if d is not None)


ONE_HEAD = Along(lambda dots, saved: tangents.head_tangent(dots[0], ops.Head(*dots[1:]), saved), flat_head)
ALONG = {
    "linear": of("linear"),
    "linear without bias": Along(of("linear", 2).forward, lambda *a: tangents.linear_backward_tangent(*a)[:2]),
    "frozen linear": of("frozen_linear", 1, 2),
    "embedding": of("embedding"),
    "layer norm": of("layer_norm"),
    "batch norm": of("batch_norm"),
    "rms norm": of("rms_norm"),
    "rope": of("rope"),
    "rope, interleaved": of("rope"),
    "swiglu": of("swiglu"),
    "grouped-query attention": of("grouped_query"),
    "grouped-query attention, one head of keys, packed": of("grouped_query"),
    "grouped queries behind cached keys": of("grouped_query"),
    "relu": of("relu"),
    "gelu tanh": of("gelu_tanh"),
    "gelu erf": of("gelu_erf"),
    "causal attention": of("attention"),
    "full attention": of("attention"),
    "cross-attention": of("attention"),
    "a chunk of queries behind cached keys": of("attention"),
    "packed attention": of("attention"),
    "attention with dropout": of("attention"),
    "attention over one token": of("attention"),
    "one head": ONE_HEAD,
    "one head, not causal, no batch": ONE_HEAD,
    "heads of different widths": Along(two_heads, flat_heads),
    "multi-head attention": of("multi_head"),
    "multi-head cross-attention, inputs of three widths": of("multi_head"),
    "multi-head attention behind cached keys, without biases": Along(of("multi_head", 4, 6, 8).forward, without_biases),
    "cross-entropy": of("cross_entropy"),
    "lora": of("lora"),
    "lora beside a frozen layer": of("lora_linear", 1, 2),
    "dropout": of("dropout"),
}


class Run(NamedTuple):
    """A case with random directions: the arrays' tangents, the upstream gradient and its tangent."""

    dots: list[np.ndarray]
    dy: np.ndarray
    dy_dot: np.ndarray


def directions(case: Case) -> Run:
    shape = tuple(case.reference(*[torch.tensor(a) for a in case.arrays]).shape)
    dots = [normal(*a.shape, seed=60 + i) for i, a in enumerate(case.arrays)]
    # the loss is a scalar whose own gradient is the constant 1
    dy, dy_dot = (np.array(1.0), np.array(0.0)) if shape == () else (normal(*shape, seed=70), normal(*shape, seed=71))
    return Run(dots, dy, dy_dot)


def by_hand(case: Case, along: Along, run: Run, as_arrays: Callable[..., Any] = np.asarray) -> list[np.ndarray]:
    """ẏ and the tangents of the gradients."""
    _, saved = case.forward(*[as_arrays(a) for a in case.arrays])
    y_dot, saved_dot = along.forward([as_arrays(d) for d in run.dots], saved)
    dy, dy_dot = (float(x) if x.shape == () else as_arrays(x) for x in (run.dy, run.dy_dot))
    grads_dot = along.backward(dy, dy_dot, saved, saved_dot)
    return [to_numpy(x) for x in (y_dot, *(grads_dot if isinstance(grads_dot, tuple) else (grads_dot,)))]


def check(case: Case, along: Along, as_arrays: Callable[..., Any] = np.asarray) -> None:
    run = directions(case)
    y_dot, *grads_dot = by_hand(case, along, run, as_arrays)
    assert len(grads_dot) == len(case.arrays)

    leaves = [torch.tensor(a, requires_grad=True) for a in case.arrays]
    dy = torch.tensor(run.dy, requires_grad=True)
    moves = [torch.tensor(d) for d in (*run.dots, run.dy_dot)]

    def derivative(scalar: torch.Tensor) -> float:
        made = torch.autograd.grad(scalar, [*leaves, dy], retain_graph=True, allow_unused=True)
        return sum(float((g * m).sum()) for g, m in zip(made, moves, strict=True) if g is not None)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no double backward
        y = case.reference(*leaves)
        grads = torch.autograd.grad(y, leaves, dy, create_graph=True)
        for what, array, dot in zip(["y", *map(str, range(len(grads)))], [y, *grads], [y_dot, *grads_dot], strict=True):
            for seed in range(3):
                w = normal(*dot.shape, seed=80 + seed)
                scalar = (array * torch.tensor(w)).sum()
                expected = derivative(scalar) if scalar.requires_grad else 0.0
                scale = max(abs(expected), np.linalg.norm(w) * np.linalg.norm(dot), 1.0)
                got = float((w * dot).sum())
                assert abs(got - expected) <= 1e-11 * scale, f"{case}, tangent of {what}: {got}, autograd {expected}"

    h = 1e-4

    def at(step: float) -> list[np.ndarray]:
        value, saved = case.forward(*[a + step * d for a, d in zip(case.arrays, run.dots, strict=True)])
        upstream = run.dy + step * run.dy_dot
        made = case.backward(float(upstream) if upstream.shape == () else upstream, saved)
        return [np.asarray(x) for x in (value, *(made if isinstance(made, tuple) else (made,)))]

    for got, a, b, c, d in zip([y_dot, *grads_dot], at(h), at(-h), at(2 * h), at(-2 * h), strict=True):
        slope = (8 * (a - b) - (c - d)) / (12 * h)
        assert np.linalg.norm(got - slope) <= 1e-8 * max(np.linalg.norm(slope), 1), f"{case}: finite difference"


@pytest.mark.parametrize("as_arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tangents_equal_double_backward_and_finite_differences(case: Case, as_arrays: Callable[..., Any]) -> None:
    check(case, ALONG[case.name], as_arrays)


def test_every_op_has_both_tangents() -> None:
    pairs = {name.removesuffix("_forward") for name in OPS if name.endswith("_forward")}
    assert pairs == {
        n.removesuffix("_tangent") for n in tangents.__all__ if f"{n.removesuffix('_tangent')}_forward" in OPS
    }
    assert {f"{pair}_backward_tangent" for pair in pairs} <= set(tangents.__all__)
    assert set(ALONG) == {case.name for case in CASES}


def without_moving_weight(pair: str) -> Tangent:
    """A planted bug: the weight's own tangent is forgotten in the backward pass."""
    backward = getattr(tangents, f"{pair}_backward_tangent")
    return lambda dy, dy_dot, s, s_dot: backward(dy, dy_dot, s, s_dot._replace(weight=None))


def frozen_statistics(pair: str, field: str) -> Tangent:
    """A planted bug: 1/σ is a constant."""
    backward = getattr(tangents, f"{pair}_backward_tangent")
    return lambda dy, dy_dot, s, s_dot: backward(dy, dy_dot, s, s_dot._replace(**{field: 0.0}))


def attention_with(softmax: Tangent) -> Tangent:
    def backward(dy: Any, dy_dot: Any, s: Any, s_dot: Any) -> Any:
        root, t = math.sqrt(s.q.shape[-1]), lambda x: np.swapaxes(x, -1, -2)
        g, g_dot = dy @ t(s.v), dy_dot @ t(s.v) + dy @ t(s_dot.v)
        z, z_dot = ops.attention.softmax_backward(g, s.rho) / root, softmax(g, g_dot, s.rho, s_dot.rho) / root
        dv_dot = t(s_dot.rho) @ dy + t(s.rho) @ dy_dot
        return z_dot @ s.k + z @ s_dot.k, t(z_dot) @ s.q + t(z) @ s_dot.q, dv_dot

    return backward


def softmax_with_still_weights(g: Any, g_dot: Any, rho: Any, rho_dot: Any) -> Any:
    return ops.attention.softmax_backward(g_dot, rho)


def softmax_with_a_still_mean(g: Any, g_dot: Any, rho: Any, rho_dot: Any) -> Any:
    return softmax_backward_tangent(g, g_dot, rho, rho_dot) + (g * rho_dot).sum(-1, keepdims=True) * rho


def curved_by(curvature: Callable[..., Any], backward: Callable[..., Any]) -> Tangent:
    return lambda dy, dy_dot, s, s_dot: backward(dy_dot, s) + dy * curvature(s.x) * s_dot.x


def multi_head_with_still_projections(dy: Any, dy_dot: Any, s: Any, s_dot: Any) -> Any:
    still = [one._replace(weight=None) for one in s_dot[:3]]
    return tangents.multi_head_backward_tangent(dy, dy_dot, s, s_dot._replace(q=still[0], k=still[1], v=still[2]))


WRONG: list[tuple[str, Tangent]] = [
    ("linear", without_moving_weight("linear")),
    ("linear", lambda dy, dy_dot, s, s_dot: ops.linear_backward(dy_dot, s)),
    ("layer norm", without_moving_weight("layer_norm")),
    ("layer norm", frozen_statistics("layer_norm", "rstd")),
    ("layer norm", frozen_statistics("layer_norm", "normed")),
    ("batch norm", without_moving_weight("batch_norm")),
    ("batch norm", frozen_statistics("batch_norm", "rstd")),
    ("multi-head attention", lambda dy, dy_dot, s, s_dot: ops.multi_head_backward(dy_dot, s)),
    ("multi-head attention", multi_head_with_still_projections),
    ("rms norm", frozen_statistics("rms_norm", "inverse")),
    ("rms norm", without_moving_weight("rms_norm")),
    ("causal attention", attention_with(softmax_with_still_weights)),
    ("causal attention", attention_with(softmax_with_a_still_mean)),
    ("gelu tanh", curved_by(gelu_erf_curvature, ops.gelu_tanh_backward)),
    ("gelu erf", curved_by(gelu_tanh_curvature, ops.gelu_erf_backward)),
    ("gelu tanh", lambda dy, dy_dot, s, s_dot: ops.gelu_tanh_backward(dy_dot, s)),
    ("swiglu", lambda dy, dy_dot, s, s_dot: ops.swiglu_backward(dy_dot, s)),
    ("lora", lambda dy, dy_dot, s, s_dot: ops.lora_backward(dy_dot, s)),
    ("cross-entropy", lambda dy, dy_dot, s, s_dot: np.exp(s.logits - s.lse.reshape(2, 3, 1)) * s_dot / s.divisor),
    ("rope", lambda dy, dy_dot, s, s_dot: ops.rope_forward(dy_dot, s.cos, s.sin)[0]),
]


@pytest.mark.parametrize(("name", "backward"), WRONG, ids=[f"{i} {name}" for i, (name, _) in enumerate(WRONG)])
def test_a_planted_bug_is_caught(name: str, backward: Tangent) -> None:
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(AssertionError):
        check(case, Along(ALONG[name].forward, backward))


def test_the_attention_of_these_bugs_is_right_without_them() -> None:
    case = next(case for case in CASES if case.name == "causal attention")
    check(case, Along(ALONG[case.name].forward, attention_with(softmax_backward_tangent)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_stays_close(case: Case) -> None:
    run = directions(case)
    expected = by_hand(case, ALONG[case.name], run)
    single = Case(case.name, case.forward, case.backward, case.reference, [a.astype(np.float32) for a in case.arrays])
    low = Run([d.astype(np.float32) for d in run.dots], run.dy.astype(np.float32), run.dy_dot.astype(np.float32))
    for got, wanted in zip(by_hand(single, ALONG[case.name], low), expected, strict=True):
        assert np.linalg.norm(got - wanted) <= 2e-5 * max(np.linalg.norm(wanted), 1)
