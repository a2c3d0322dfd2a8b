"""Every op against autograd and finite differences, in float64, with random upstream gradients on odd shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onfoot import ops
from onfoot.arrays import to_numpy
from onfoot.engine import OPS
from onfoot.ops.dropout import dropout_pattern
from oracles import assert_close, autograd, directional_difference


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(0, scale, shape)


@dataclass
class Case:
    """A pair, the same layer by PyTorch, and the arrays it is tried on (those that are differentiated)."""

    name: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    reference: Callable[..., torch.Tensor]
    arrays: list[np.ndarray]
    wrong: list[Callable[..., Any]] = field(default_factory=list)  # planted bugs: backward passes that must be caught

    def __str__(self) -> str:
        return self.name


def bound(forward: Callable[..., Any], *rest: Any, **options: Any) -> Callable[..., Any]:
    return lambda *arrays: forward(*arrays, *rest, **options)


def attention_reference(causal: bool, start: np.ndarray | None = None) -> Callable[..., torch.Tensor]:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n_q, n_k = q.shape[-2], k.shape[-2]
        mask = torch.ones(n_q, n_k, dtype=torch.bool)
        if causal:
            mask = mask.tril(n_k - n_q)
        if start is not None:
            mask = mask & (torch.arange(n_k) >= torch.tensor(start)[..., None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return reference


def head_reference(a: torch.Tensor, *p: torch.Tensor, causal: bool = True) -> torch.Tensor:
    w_q, b_q, w_k, b_k, w_v, b_v = p
    return F.scaled_dot_product_attention(a @ w_q + b_q, a @ w_k + b_k, a @ w_v + b_v, is_causal=causal)


def flat_head_backward(dy: Any, saved: Any) -> tuple[Any, ...]:
    da, head = ops.head_backward(dy, saved)
    return (da, *head)


def head_arrays(d: int, d_rho: int, d_h: int, lead: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    shapes = [(*lead, d), (d, d_rho), (d_rho,), (d, d_rho), (d_rho,), (d, d_h), (d_h,)]
    return [normal(*s, seed=seed + i) for i, s in enumerate(shapes)]


def two_heads_forward(a: Any, *p: Any) -> tuple[Any, Any]:
    return ops.heads_forward(a, [ops.Head(*p[:6]), ops.Head(*p[6:])])


def two_heads_backward(dy: Any, saved: Any) -> tuple[Any, ...]:
    da, heads = ops.heads_backward(dy, saved)
    return (da, *heads[0], *heads[1])


def two_heads_reference(a: torch.Tensor, *p: torch.Tensor) -> torch.Tensor:
    return torch.cat([head_reference(a, *p[:6]), head_reference(a, *p[6:])], dim=-1)


def heads_without_the_sum(dy: Any, saved: Any) -> Any:
    """The input's gradient of the first head alone."""
    return ops.head_backward(dy[..., :5], saved[0])[0], *two_heads_backward(dy, saved)[1:]


def multi_head_reference(n_head: int, causal: bool) -> Callable[..., torch.Tensor]:
    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *p: torch.Tensor) -> torch.Tensor:
        w_q, b_q, w_k, b_k, w_v, b_v = p if len(p) == 6 else (x for w in p for x in (w, 0.0))
        made = query @ w_q + b_q, key @ w_k + b_k, value @ w_v + b_v
        by_head = zip(*(x.tensor_split(n_head, dim=-1) for x in made), strict=True)
        return torch.cat([attention_reference(causal)(*one) for one in by_head], dim=-1)

    return reference


def multi_head_arrays(n_q: int, n_k: int, widths: tuple[int, int, int], out: tuple[int, int]) -> list[np.ndarray]:
    """Inputs of three widths; projections to `out`, the widths of all queries (and keys) and of all values."""
    c_q, c_k, c_v = widths
    d_rho, d_h = out
    shapes = [(2, n_q, c_q), (2, n_k, c_k), (2, n_k, c_v), (c_q, d_rho), (d_rho,), (c_k, d_rho), (d_rho,), (c_v, d_h)]
    return [normal(*s, seed=30 + i, scale=0.6) for i, s in enumerate([*shapes, (d_h,)])]


def multi_head_without_transpose(dy: Any, saved: Any) -> Any:
    """Heads split by a reshape alone: the right shape, with tokens and features mixed."""
    *lead, t, width = dy.shape
    mixed = dy.reshape(*lead, 3, t, width // 3)
    return ops.multi_head_backward(ops.multi_head.merge_heads(mixed), saved)


def multi_head_with_key_and_value_exchanged(dy: Any, saved: Any) -> Any:
    dquery, dkey, dvalue, *rest = ops.multi_head_backward(dy, saved)
    return dquery, dvalue, dkey, *rest


def multi_head_with_noise_at_the_bias_of_keys(dy: Any, saved: Any) -> Any:
    grads = list(ops.multi_head_backward(dy, saved))
    grads[6] = grads[6] + 1e-17
    return tuple(grads)


def norm_with_weight_outside(dy: Any, saved: Any) -> Any:
    normed, rstd, weight = saved
    dx = (dy - dy.mean(-1, keepdims=True) - normed * (normed * dy).mean(-1, keepdims=True)) * rstd * weight
    return dx, *ops.layer_norm_backward(dy, saved)[1:]


def norm_summed_over_tokens(dy: Any, saved: Any) -> Any:
    normed, rstd, weight = saved
    x = dy * weight
    dx = (x - x.mean(0, keepdims=True) - normed * (normed * x).mean(0, keepdims=True)) * rstd
    return dx, *ops.layer_norm_backward(dy, saved)[1:]


def batch_norm_over_features(dy: Any, saved: Any) -> Any:
    normed, rstd, weight = saved
    x = dy * weight
    dx = (x - x.mean(-1, keepdims=True) - normed * (normed * x).mean(-1, keepdims=True)) * rstd
    return dx, *ops.batch_norm_backward(dy, saved)[1:]


def batch_norm_with_constant_statistics(dy: Any, saved: Any) -> Any:
    return dy * saved.weight * saved.rstd, *ops.batch_norm_backward(dy, saved)[1:]


def batch_norm_of_each_sequence(dy: Any, saved: Any) -> Any:
    """Means over the tokens of each sequence, not over the whole batch."""
    normed, rstd, weight = saved
    x = dy * weight
    dx = (x - x.mean(1, keepdims=True) - normed * (normed * x).mean(1, keepdims=True)) * rstd
    return dx, *ops.batch_norm_backward(dy, saved)[1:]


def attention_without_scale(dy: Any, saved: Any) -> Any:
    dq, dk, dv = ops.attention_backward(dy, saved)
    root = math.sqrt(saved.q.shape[-1])
    return dq * root, dk * root, dv


def attention_with_plain_mean(dy: Any, saved: Any) -> Any:
    q, k, v, rho, _ = saved
    ds = (dy @ v.swapaxes(-1, -2)) * rho
    ds = (ds - ds.mean(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.swapaxes(-1, -2) @ q, rho.swapaxes(-1, -2) @ dy


def head_without_value_path(dy: Any, saved: Any) -> Any:
    da, *rest = flat_head_backward(dy, saved)
    return da - saved.rho.swapaxes(-1, -2) @ dy @ saved.head.w_v.T, *rest


def embedding_that_loses_repeats(dy: Any, saved: Any) -> Any:
    out = np.zeros((saved.n_rows, dy.shape[-1]))
    out[saved.ids] = dy
    return out


def rope_reference(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The rotation as a product of complex numbers."""
    turn = torch.polar(torch.ones(ANGLES.shape, dtype=torch.float64), torch.tensor(ANGLES))
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def grouped_reference(ratio: int, start: np.ndarray | None = None) -> Callable[..., torch.Tensor]:
    """Keys and values repeated for each query head of their group."""
    core = attention_reference(True, start)
    return lambda q, k, v: core(q, k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1))


def rms_norm_with_weight_outside(dy: Any, saved: Any) -> Any:
    normed, inverse, weight = saved
    dx = (dy - normed * (normed * dy).mean(-1, keepdims=True)) * inverse * weight
    return dx, ops.rms_norm_backward(dy, saved)[1]


def rms_norm_as_layer_norm(dy: Any, saved: Any) -> Any:
    dx, dweight = ops.rms_norm_backward(dy, saved)
    return dx - dx.mean(-1, keepdims=True), dweight


def rope_turned_on(dy: Any, saved: Any) -> Any:
    return ops.rope_forward(dy, saved.cos, saved.sin, saved.interleaved)[0]


def swiglu_without_the_gates_slope(dy: Any, saved: Any) -> Any:
    silu = saved.gate / (1 + np.exp(-saved.gate))
    return dy * saved.up / (1 + np.exp(-saved.gate)), dy * silu


def grouped_by_mean(dy: Any, saved: Any) -> Any:
    dq, dk, dv = ops.grouped_query_backward(dy, saved)
    group = saved.shared.q.shape[-3]
    return dq, dk / group, dv / group


def grouped_the_other_way(dy: Any, saved: Any) -> Any:
    """Query head h reading keys of head h mod Hkv: the right shapes, the wrong group."""
    dq, dk, dv = ops.grouped_query_backward(dy[:, [0, 3, 1, 4, 2, 5]], saved)
    return dq[:, [0, 2, 4, 1, 3, 5]], dk, dv


IDS = np.array([[3, 0, 3], [3, 5, 0]])
TARGETS = np.array([[1, -100, 4], [0, 4, -100]])
ANGLES = np.arange(5.0)[:, None] * np.array([1.0, 0.3, 0.01])
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
KEEP = dropout_pattern((2, 3, 5), 0.4, seed=1, dtype="float64")
KEEP_RHO = dropout_pattern((2, 3, 5, 5), 0.3, seed=2, dtype="float64")
START = np.array([[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])[:, None]


def on(kind: Any, array: np.ndarray) -> Any:
    """A constant (ids, patterns) in the kind of array that `kind` is."""
    return torch.from_numpy(array) if isinstance(kind, torch.Tensor) else array


def cases() -> list[Case]:
    qkv = [normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1), normal(2, 3, 5, 6, seed=2)]
    cross = [normal(2, 3, 4), normal(2, 7, 4, seed=1), normal(2, 7, 5, seed=2)]
    lora = [normal(2, 3, 7), normal(7, 2, seed=1), normal(2, 5, seed=2)]
    beside = [normal(2, 3, 5), normal(5, 2, seed=1), normal(2, 4, seed=2)]
    w, b = normal(5, 4, seed=3), normal(4, seed=4)
    activation = [normal(3, 1, 17, scale=2.0)]
    return [
        Case(
            "linear", ops.linear_forward, ops.linear_backward, lambda x, w, b: F.linear(x, w.T, b),
            [normal(2, 3, 7), normal(7, 5), normal(5)],
            wrong=[
                lambda dy, s: (dy @ s.weight.T, s.x.reshape(-1, 7).T @ dy.reshape(-1, 5), dy.mean((0, 1))),
                lambda dy, s: (dy @ s.weight.T, s.x[0].T @ dy[0], dy.sum((0, 1))),
            ],
        ),
        Case(
            "linear without bias", ops.linear_forward, lambda dy, s: ops.linear_backward(dy, s)[:2],
            lambda x, w: F.linear(x, w.T), [normal(1, 7), normal(7, 5)],
        ),
        Case(
            "frozen linear", lambda x: ops.frozen_linear_forward(x, on(x, w), on(x, b)), ops.frozen_linear_backward,
            lambda x: F.linear(x, torch.tensor(w).T, torch.tensor(b)), [normal(2, 3, 5)],
            wrong=[lambda dy, s: dy @ s.weight.T * 2],
        ),
        Case(
            "embedding", lambda table: ops.embedding_forward(on(table, IDS), table), ops.embedding_backward,
            lambda table: F.embedding(torch.tensor(IDS), table), [normal(6, 5)],
            wrong=[embedding_that_loses_repeats],
        ),
        Case(
            "layer norm", bound(ops.layer_norm_forward, eps=1e-3), ops.layer_norm_backward,
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-3),
            [normal(2, 3, 7), normal(7), normal(7, seed=1)],
            wrong=[norm_with_weight_outside, norm_summed_over_tokens],
        ),
        Case(
            "batch norm", bound(ops.batch_norm_forward, eps=1e-3), ops.batch_norm_backward,
            lambda x, w, b: F.batch_norm(x.flatten(0, 1), None, None, w, b, True, eps=1e-3).view_as(x),
            [normal(2, 3, 7), normal(7), normal(7, seed=1)],
            wrong=[batch_norm_over_features, batch_norm_with_constant_statistics, batch_norm_of_each_sequence],
        ),
        Case(
            "rms norm", bound(ops.rms_norm_forward, eps=1e-3), ops.rms_norm_backward,
            lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-3), [normal(2, 3, 7), normal(7)],
            wrong=[rms_norm_with_weight_outside, rms_norm_as_layer_norm],
        ),
        Case(
            "rope", lambda x: ops.rope_forward(x, on(x, COS), on(x, SIN)), ops.rope_backward,
            lambda x: rope_reference(x, False), [normal(2, 3, 5, 6)], wrong=[rope_turned_on],
        ),
        Case(
            "rope, interleaved", lambda x: ops.rope_forward(x, on(x, COS), on(x, SIN), interleaved=True),
            ops.rope_backward, lambda x: rope_reference(x, True), [normal(2, 3, 5, 6)],
            wrong=[rope_turned_on, lambda dy, s: ops.rope_backward(dy, s._replace(interleaved=False))],
        ),
        Case(
            "swiglu", ops.swiglu_forward, ops.swiglu_backward, lambda gate, up: F.silu(gate) * up,
            [normal(3, 1, 17, scale=2.0), normal(3, 1, 17, seed=1)], wrong=[swiglu_without_the_gates_slope],
        ),
        Case(
            "grouped-query attention", ops.grouped_query_forward, ops.grouped_query_backward, grouped_reference(3),
            [normal(2, 6, 5, 4), normal(2, 2, 5, 4, seed=1), normal(2, 2, 5, 3, seed=2)],
            wrong=[grouped_by_mean, grouped_the_other_way],
        ),
        Case(
            "grouped-query attention, one head of keys, packed",
            lambda q, k, v: ops.grouped_query_forward(q, k, v, start=on(q, START)), ops.grouped_query_backward,
            grouped_reference(4, START), [normal(2, 4, 5, 4), normal(2, 1, 5, 4, seed=1), normal(2, 1, 5, 3, seed=2)],
        ),
        Case(
            "grouped queries behind cached keys", ops.grouped_query_forward, ops.grouped_query_backward,
            grouped_reference(1), [normal(2, 3, 2, 4), normal(2, 3, 7, 4, seed=1), normal(2, 3, 7, 4, seed=2)],
        ),
        Case(
            "relu", ops.relu_forward, ops.relu_backward, F.relu, activation, wrong=[lambda dy, s: dy * (s.x < 0)]
        ),
        Case(
            "gelu tanh", ops.gelu_tanh_forward, ops.gelu_tanh_backward, lambda x: F.gelu(x, approximate="tanh"),
            activation, wrong=[ops.gelu_erf_backward],
        ),
        Case(
            "gelu erf", ops.gelu_erf_forward, ops.gelu_erf_backward, F.gelu, activation,
            wrong=[ops.gelu_tanh_backward],
        ),
        Case(
            "causal attention", ops.attention_forward, ops.attention_backward, attention_reference(True), qkv,
            wrong=[attention_without_scale, attention_with_plain_mean],
        ),
        Case(
            "full attention", bound(ops.attention_forward, causal=False), ops.attention_backward,
            attention_reference(False), qkv,
        ),
        Case(
            "cross-attention", bound(ops.attention_forward, causal=False), ops.attention_backward,
            attention_reference(False), cross,
        ),
        Case(
            "a chunk of queries behind cached keys", ops.attention_forward, ops.attention_backward,
            attention_reference(True), cross,
        ),
        Case(
            "packed attention", lambda q, k, v: ops.attention_forward(q, k, v, start=on(q, START)),
            ops.attention_backward, attention_reference(True, START), qkv,
        ),
        Case(
            "attention with dropout", lambda q, k, v: ops.attention_forward(q, k, v, keep=on(q, KEEP_RHO)),
            ops.attention_backward,
            lambda q, k, v: (
                ((q @ k.mT / 2 + torch.full((5, 5), -torch.inf).triu(1)).softmax(-1) * torch.tensor(KEEP_RHO)) @ v
            ),
            qkv,
        ),
        Case("attention over one token", ops.attention_forward, ops.attention_backward, attention_reference(True),
             [normal(2, 1, 3), normal(2, 1, 3, seed=1), normal(2, 1, 4)]),
        Case(
            "one head", lambda a, *p: ops.head_forward(a, ops.Head(*p)), flat_head_backward, head_reference,
            head_arrays(7, 3, 5, (2, 4)), wrong=[head_without_value_path],
        ),
        Case(
            "one head, not causal, no batch", lambda a, *p: ops.head_forward(a, ops.Head(*p), causal=False),
            flat_head_backward, lambda a, *p: head_reference(a, *p, causal=False), head_arrays(7, 5, 3, (6,)),
        ),
        Case(
            "heads of different widths", two_heads_forward, two_heads_backward, two_heads_reference,
            head_arrays(7, 3, 5, (2, 4)) + head_arrays(7, 1, 2, (2, 4), seed=9)[1:],
            wrong=[heads_without_the_sum],
        ),
        Case(
            "multi-head attention", bound(ops.multi_head_forward, 3), ops.multi_head_backward,
            multi_head_reference(3, True), multi_head_arrays(4, 4, (7, 7, 7), (6, 9)),
            wrong=[multi_head_without_transpose, multi_head_with_key_and_value_exchanged,
                   multi_head_with_noise_at_the_bias_of_keys],
        ),
        Case(
            "multi-head cross-attention, inputs of three widths", bound(ops.multi_head_forward, 2, causal=False),
            ops.multi_head_backward, multi_head_reference(2, False), multi_head_arrays(5, 3, (4, 5, 3), (6, 2)),
        ),
        Case(
            "multi-head attention behind cached keys, without biases",
            lambda q, k, v, *w: ops.multi_head_forward(q, k, v, *(x for one in w for x in (one, None)), 2),
            lambda dy, s: tuple(d for d in ops.multi_head_backward(dy, s) if d is not None),
            multi_head_reference(2, True),
            [*multi_head_arrays(2, 5, (4, 4, 4), (4, 6))[:4], normal(4, 4, seed=5), normal(4, 6, seed=6)],
        ),
        Case(
            "cross-entropy", lambda x: ops.cross_entropy_forward(x, on(x, TARGETS), 4),
            lambda dy, s: ops.cross_entropy_backward(float(dy), s),
            lambda x: F.cross_entropy(x.flatten(0, 1), torch.tensor(TARGETS).flatten()), [normal(2, 3, 5)],
            wrong=[
                lambda dy, s: ops.cross_entropy_backward(float(dy), s) * 4,
                lambda dy, s: ops.cross_entropy_backward(float(dy), s) * 4 / 6,
            ],
        ),
        Case(
            "lora", bound(ops.lora_forward, 1.7), ops.lora_backward, lambda x, d, u: 1.7 * x @ d @ u, lora,
            wrong=[lambda dy, s: tuple(g / 1.7 for g in ops.lora_backward(dy, s))],
        ),
        Case(
            "lora beside a frozen layer",
            lambda x, d, u: ops.lora_linear_forward(x, on(x, w), on(x, b), d, u, 0.6, on(x, KEEP)),
            ops.lora_linear_backward,
            lambda x, d, u: F.linear(x, torch.tensor(w).T, torch.tensor(b)) + 0.6 * (x * torch.tensor(KEEP)) @ d @ u,
            beside,
            wrong=[lambda dy, s: (ops.lora_backward(dy, s.lora)[0] * s.keep, *ops.lora_linear_backward(dy, s)[1:])],
        ),
        Case(
            "dropout", lambda x: ops.dropout_forward(x, on(x, KEEP)), ops.dropout_backward,
            lambda x: x * torch.tensor(KEEP), [normal(2, 3, 5)], wrong=[lambda dy, s: dy * (s.keep > 0)],
        ),
    ]  # fmt: skip


CASES = cases()


def check(case: Case, backward: Callable[..., Any], as_arrays: Callable[[np.ndarray], Any]) -> None:
    """The value, the gradients against autograd, and a finite difference along a random direction."""
    inputs = [as_arrays(a) for a in case.arrays]
    y, saved = case.forward(*inputs)
    expected = case.reference(*[torch.tensor(a) for a in case.arrays]).detach().numpy()
    assert_close(to_numpy(y), expected, 1e-12, f"{case}: value")

    dy = np.random.default_rng(77).normal(size=expected.shape)
    grads = backward(as_arrays(dy), saved)
    grads = [to_numpy(g) for g in (grads if isinstance(grads, tuple) else (grads,))]
    assert len(grads) == len(case.arrays), f"{case}: {len(grads)} gradients for {len(case.arrays)} arguments"
    for i, (got, by_autograd) in enumerate(zip(grads, autograd(case.reference, case.arrays, dy), strict=True)):
        if np.abs(by_autograd).max() < 1e-13:  # b_k: autograd's own rounding noise around 0
            assert np.abs(got).max() == 0
            continue
        assert_close(got, by_autograd, 1e-10, f"{case}: gradient {i}")

    directions = [normal(*a.shape, seed=50 + i) for i, a in enumerate(case.arrays)]

    def value(*arrays: np.ndarray) -> np.ndarray:
        return to_numpy(case.forward(*[as_arrays(a) for a in arrays])[0])

    slope = directional_difference(value, case.arrays, directions, dy, 1e-4)
    by_hand = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
    assert abs(slope - by_hand) <= 1e-7 * max(1, abs(slope)), f"{case}: finite difference {slope}, by hand {by_hand}"


@pytest.mark.parametrize("as_arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_autograd_and_finite_differences(case: Case, as_arrays: Callable[[np.ndarray], Any]) -> None:
    check(case, case.backward, as_arrays)


@pytest.mark.parametrize("case", [c for c in CASES if c.wrong], ids=str)
def test_a_planted_bug_is_caught(case: Case) -> None:
    for wrong in case.wrong:
        with pytest.raises(AssertionError):
            check(case, wrong, np.asarray)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_and_torch_arrays_agree(case: Case) -> None:
    results = []
    for as_arrays in (np.asarray, torch.from_numpy):
        y, saved = case.forward(*[as_arrays(a) for a in case.arrays])
        grads = case.backward(as_arrays(np.random.default_rng(1).normal(size=tuple(np.shape(to_numpy(y))))), saved)
        results.append([to_numpy(g) for g in (y, *(grads if isinstance(grads, tuple) else (grads,)))])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, 1e-12, case.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_stays_float32_and_close(case: Case) -> None:
    y64, saved64 = case.forward(*case.arrays)
    dy = np.random.default_rng(2).normal(size=np.shape(y64))
    grads64 = case.backward(dy, saved64)
    _, saved32 = case.forward(*[a.astype(np.float32) for a in case.arrays])
    grads32 = case.backward(dy.astype(np.float32), saved32)
    if not isinstance(grads32, tuple):
        grads32, grads64 = (grads32,), (grads64,)
    for i, (got, expected) in enumerate(zip(grads32, grads64, strict=True)):
        if "frozen" not in case.name and "dropout" not in case.name:  # their constants are float64 in these cases
            assert got.dtype == np.float32, f"{case}: gradient {i} is {got.dtype}"
        assert_close(got, expected, 2e-6, f"{case}: gradient {i}")


def test_every_pair_of_the_engines_table_has_a_case() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert {name.removesuffix("_forward") for name in OPS if name.endswith("_forward")} == {
        name.removesuffix("_backward") for name in OPS if name.endswith("_backward")
    }
    for name in OPS:
        assert f"ops.{name}" in source, f"{name} is in the table but in no case"


def test_every_pair_of_the_engines_table_has_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = [name for name in OPS if name.endswith("_forward")]
    called = set()

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args, **options: called.add(name) or OPS[name](*args, **options)

    for name in forwards:
        monkeypatch.setattr(ops, name, noted(name))
    for case in cases():
        if case.wrong:
            case.forward(*case.arrays)
    assert called == set(forwards)


def test_softmax_survives_large_scores_and_rows_that_see_nothing() -> None:
    q, k, v = normal(1, 2, 3) * 1e4, normal(1, 5, 3) * 1e4, normal(1, 5, 2)
    y, saved = ops.attention_forward(q, k, v)
    assert np.isfinite(y).all()
    assert all(np.isfinite(g).all() for g in ops.attention_backward(np.ones_like(y), saved))

    y, saved = ops.attention_forward(normal(1, 4, 3), normal(1, 2, 3), v[:, :2])  # two queries before any key
    assert (y[:, :2] == 0).all()
    dq, dk, dv = ops.attention_backward(normal(*y.shape), saved)
    assert (dq[:, :2] == 0).all()
    assert np.isfinite(dk).all() and np.isfinite(dv).all()


def test_cross_entropy_survives_large_logits() -> None:
    logits = np.array([[1e4, -1e4, 0.0]])
    loss, saved = ops.cross_entropy_forward(logits, np.array([1]), 1)
    assert loss == pytest.approx(2e4)
    assert np.allclose(ops.cross_entropy_backward(1.0, saved), [[1, -1, 0]])


def test_layer_norm_of_a_constant_row_is_its_bias() -> None:
    y, saved = ops.layer_norm_forward(np.full((1, 4), 3.0), np.ones(4), np.arange(4.0))
    assert (y == np.arange(4.0)).all()
    assert np.isfinite(ops.layer_norm_backward(normal(1, 4), saved)[0]).all()


def test_dropout_keeps_the_mean_and_refuses_bad_probabilities() -> None:
    keep = dropout_pattern((200, 500), 0.3, seed=3)
    assert keep.mean() == pytest.approx(1, abs=0.01)
    assert (keep == 0).mean() == pytest.approx(0.3, abs=0.01)
    assert (keep == dropout_pattern((200, 500), 0.3, seed=3)).all()
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got 1\.0"):
        dropout_pattern((2,), 1.0, seed=0)
