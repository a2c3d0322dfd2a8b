"""Every kernel against its pair in `ops`, computed in float64: outputs and gradients, on odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onfoot import kernels, ops
from onfoot.kernels import attention as attention_kernels
from onfoot.ops.cross_entropy import IGNORE
from onfoot.ops.dropout import dropout_pattern
from onfoot.recording import pool

pytest.importorskip("numba")
TABLE = kernels.table()
CLOSE = 2e-6  # relative to the norm of the whole array
ROWS = (1, 3, 7, 33)
Case = tuple[tuple[Any, ...], tuple[int, ...]]  # the forward's arguments, and which of them are frozen or no floats


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def linear(rng: np.random.Generator, n: int, bias: bool = True) -> tuple[Any, ...]:
    c, d = (int(rng.integers(1, 90)) for _ in range(2))
    return normal(rng, n, c), normal(rng, c, d), normal(rng, d) if bias else None


def transposed(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    x, weight, bias = linear(rng, n)
    return x, np.ascontiguousarray(weight.T).T, bias


def layer_norm(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    c = int(rng.integers(2, 300))
    return 3 * normal(rng, n, c) + 2, normal(rng, c), normal(rng, c), 1e-5


def activation(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    return (3 * normal(rng, n, int(rng.integers(1, 2000))),)


def embedding(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    v = int(rng.integers(1, 9))  # few: ids repeat
    return rng.integers(0, v, (2, n)), normal(rng, v, int(rng.integers(1, 70)))


def cross_entropy(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    v = int(rng.integers(2, 500))
    targets = rng.integers(0, v, n)
    targets[rng.random(n) < 0.3] = IGNORE
    return 4 * normal(rng, n, v), targets, 7.0


def pattern(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return dropout_pattern(shape, 0.3, int(rng.integers(2**32)))


def attention(
    rng: np.random.Generator, n: int, causal: bool = True, packed: bool = False, dropped: bool = False
) -> tuple[Any, ...]:
    more, dk, dv = int(rng.integers(0, 40)), int(rng.integers(1, 50)), int(rng.integers(1, 50))
    q, k, v = normal(rng, 2, 3, n, dk), normal(rng, 2, 3, n + more, dk), normal(rng, 2, 3, n + more, dv)
    start = rng.integers(0, np.arange(n) + more + 1, (2, 1, n)) if packed else None
    return q, k, v, causal, start, pattern(rng, 2, 3, n, n + more) if dropped else None


def grouped_query(
    rng: np.random.Generator, n: int, causal: bool = True, packed: bool = False, dropped: bool = False
) -> tuple[Any, ...]:
    more, d_k, d_v, group = (int(rng.integers(low, high)) for low, high in ((0, 40), (1, 50), (1, 50), (1, 5)))
    q, k, v = normal(rng, 2, 3 * group, n, d_k), normal(rng, 2, 3, n + more, d_k), normal(rng, 2, 3, n + more, d_v)
    start = rng.integers(0, np.arange(n) + more + 1, (2, 1, n)) if packed else None
    return q, k, v, causal, start, pattern(rng, 2, 3 * group, n, n + more) if dropped else None


def dropout(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    shape = n, int(rng.integers(1, 2000))
    return normal(rng, *shape), pattern(rng, *shape)


def rms_norm(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    c = int(rng.integers(2, 300))
    return 3 * normal(rng, n, c) + 2, normal(rng, c), 1e-6


def rope(rng: np.random.Generator, n: int, own: bool = False) -> tuple[Any, ...]:
    half = int(rng.integers(1, 40))
    angle = 9 * normal(rng, *((2, 1, n, half) if own else (n, half)))
    return normal(rng, 2, n, 3, 2 * half).swapaxes(1, 2), np.cos(angle), np.sin(angle)


def swiglu(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    c = int(rng.integers(1, 2000))
    return 4 * normal(rng, n, c), normal(rng, n, c)


def lora_linear(rng: np.random.Generator, n: int, keep: bool = False) -> tuple[Any, ...]:
    x, weight, bias = linear(rng, n)
    r = int(rng.integers(1, 20))
    pattern = (2.0 * (rng.random(x.shape) < 0.5)).astype(np.float32) if keep else None
    return x, weight, bias, normal(rng, x.shape[1], r), normal(rng, r, weight.shape[1]), 0.5, pattern


CASES: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "attention": ("attention", attention),
    "attention to both sides": ("attention", lambda rng, n: attention(rng, n, causal=False)),
    "attention in packed examples": ("attention", lambda rng, n: attention(rng, n, packed=True)),
    "attention with dropout": ("attention", lambda rng, n: attention(rng, n, dropped=True)),
    "attention to both sides with dropout": ("attention", lambda rng, n: attention(rng, n, causal=False, dropped=True)),
    "attention in packed examples with dropout": (
        "attention",
        lambda rng, n: attention(rng, n, packed=True, dropped=True),
    ),
    "cross_entropy": ("cross_entropy", cross_entropy),
    "dropout": ("dropout", dropout),
    "embedding": ("embedding", embedding),
    "frozen_linear": ("frozen_linear", linear),
    "gelu_erf": ("gelu_erf", activation),
    "gelu_tanh": ("gelu_tanh", activation),
    "grouped_query": ("grouped_query", grouped_query),
    "grouped_query in packed examples": ("grouped_query", lambda rng, n: grouped_query(rng, n, packed=True)),
    "grouped_query with dropout": ("grouped_query", lambda rng, n: grouped_query(rng, n, dropped=True)),
    "grouped_query to both sides in packed examples with dropout": (
        "grouped_query",
        lambda rng, n: grouped_query(rng, n, causal=False, packed=True, dropped=True),
    ),
    "layer_norm": ("layer_norm", layer_norm),
    "linear": ("linear", linear),
    "linear without a bias": ("linear", lambda rng, n: linear(rng, n, bias=False)),
    "linear with a transposed weight": ("linear", transposed),
    "lora_linear": ("lora_linear", lora_linear),
    "lora_linear with dropout": ("lora_linear", lambda rng, n: lora_linear(rng, n, keep=True)),
    "relu": ("relu", activation),
    "rms_norm": ("rms_norm", rms_norm),
    "rope": ("rope", rope),
    "rope with positions of each sequence": ("rope", lambda rng, n: rope(rng, n, own=True)),
    "swiglu": ("swiglu", swiglu),
}


def exact(x: Any) -> Any:
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def distance(ours: np.ndarray, truth: np.ndarray, least: float) -> float:
    """The norm of the difference over that of the truth, or over what cancels where (nearly) nothing is left."""
    assert ours.shape == truth.shape
    return float(np.linalg.norm(ours - truth) / max(np.linalg.norm(truth), least))


def outcome(forward: Callable[..., Any], backward: Callable[..., Any], args: tuple[Any, ...], seed: int) -> list[Any]:
    """The output and all gradients, for an upstream gradient that does not depend on who computes."""
    y, saved = forward(*args)
    up = np.random.default_rng(seed).standard_normal(np.shape(y))
    grads = backward(np.asarray(up, np.asarray(y).dtype) if up.shape else float(up), saved)
    grads = grads if isinstance(grads, tuple) else (grads,)
    return [np.asarray(x) for x in (y, *grads) if x is not None]


def compare(name: str, make: Callable[..., tuple[Any, ...]], n: int, seed: int, strict: bool = False) -> None:
    """Within CLOSE of the norm; unless `strict`, a lone sum that cancels is measured by what its terms amount to."""
    args = make(np.random.default_rng(seed), n)
    untouched = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
    ours = outcome(TABLE[f"{name}_forward"], TABLE[f"{name}_backward"], args, seed)
    truth = outcome(
        getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward"), tuple(exact(x) for x in args), seed
    )
    assert len(ours) == len(truth)
    least = 1e-12
    if name in ("attention", "grouped_query"):
        least = 0.1 * max(float(np.linalg.norm(x)) for x in truth)
    elif "linear" in name and not strict:
        least = 0.25 * np.sqrt(n)  # a sum of n normal terms is about √n; one that is much smaller has cancelled
    for mine, right in zip(ours, truth, strict=True):
        assert mine.dtype == np.float32
        assert distance(mine, right, least) < CLOSE
    again = outcome(TABLE[f"{name}_forward"], TABLE[f"{name}_backward"], args, seed)
    assert all((a == b).all() for a, b in zip(ours, again, strict=True))  # the same bits
    for before, after in zip(untouched, args, strict=True):
        assert before is after or not isinstance(before, np.ndarray) or (before == after).all()  # a pair is pure


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", ROWS)
def test_a_kernel_has_the_output_and_the_gradients_of_its_formula(case: str, n: int, threads: int) -> None:
    compare(*CASES[case], n, seed=n, strict=True)


@pytest.mark.parametrize(
    "case", ["cross_entropy", "dropout", "layer_norm", "linear", "lora_linear", "rms_norm", "rope", "swiglu"]
)
def test_many_rows_are_as_right_as_few(case: str, threads: int) -> None:
    compare(*CASES[case], 1023, seed=5, strict=True)


@pytest.mark.parametrize("case", ["attention", "attention with dropout", "grouped_query", "grouped_query with dropout"])
def test_many_tokens_are_as_right_as_few(case: str, threads: int) -> None:
    compare(*CASES[case], 203, seed=5, strict=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(CASES)), st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_any_shape_has_the_right_gradients(case: str, n: int, seed: int) -> None:
    compare(*CASES[case], n, seed)


def test_every_kernel_that_replaces_a_pair_is_compared_with_it() -> None:
    replaced = {n.removesuffix("_forward") for n in TABLE if n.endswith("_forward") and hasattr(ops, n)}
    assert replaced == {name for name, _ in CASES.values()}


def test_two_thread_counts_give_the_same_sums() -> None:
    """An entry of a product is the same sum in the same order, for any number of threads."""
    rng = np.random.default_rng(0)
    x, weight, bias = normal(rng, 97, 70), normal(rng, 70, 131), normal(rng, 131)
    results, before = [], pool.threads()
    for n in (1, 2):
        pool.set_threads(n)
        results.append(outcome(TABLE["linear_forward"], TABLE["linear_backward"], (x, weight, bias), 0))
    pool.set_threads(before)
    assert all((a == b).all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case][0] in ("attention", "dropout", "grouped_query")]
)
def test_attention_and_dropout_have_the_same_bits_on_any_number_of_threads(
    case: str, on_threads: Callable[[int], None]
) -> None:
    name, make = CASES[case]
    for n in (3, 101):
        args, results = make(np.random.default_rng(n), n), []
        for count in (1, 2, 3):
            on_threads(count)
            results.append(outcome(TABLE[f"{name}_forward"], TABLE[f"{name}_backward"], args, n))
        for others in results[1:]:
            assert all((a == b).all() for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 1)])
@pytest.mark.parametrize("n", [2, 37])
def test_a_dropout_pattern_may_have_any_leading_axes(lead: tuple[int, ...], n: int) -> None:
    rng = np.random.default_rng(n)
    args = normal(rng, *lead, n, 5), normal(rng, *lead, n + 3, 5), normal(rng, *lead, n + 3, 7), True, None
    compare("attention", lambda rng, n: (*args, pattern(rng, *lead, n, n + 3)), n, seed=n)


def oddly(keep: np.ndarray) -> list[np.ndarray]:
    """The same pattern in Fortran order, spread, and unaligned."""
    spread = np.zeros([2 * n for n in keep.shape], np.float32)[::2, ::2, ::2, ::2]
    unaligned = np.ndarray(keep.shape, keep.dtype, np.zeros(keep.nbytes + 1, np.uint8), 1)
    spread[...], unaligned[...] = keep, keep
    return [np.asfortranarray(keep), spread, unaligned]


@pytest.mark.parametrize("name", ["attention", "grouped_query"])
def test_a_dropout_pattern_is_the_kernels_own_however_it_lies(name: str) -> None:
    q, k, v, causal, start, keep = attention(np.random.default_rng(0), 37, packed=True, dropped=True)
    forward, backward = TABLE[f"{name}_forward"], TABLE[f"{name}_backward"]
    _, saved = forward(q, k, v, causal, start, keep)
    assert isinstance(saved, attention_kernels.AttentionKernelSaved) and np.shares_memory(saved.keep, keep)  # and no ρ
    right = outcome(forward, backward, (q, k, v, causal, start, keep), 0)
    for odd in oddly(keep):
        ours = outcome(forward, backward, (q, k, v, causal, start, odd), 0)
        assert all((a == b).all() for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("name", ["attention", "grouped_query"])
@pytest.mark.parametrize("n", [3, 101])
def test_what_is_dropped_has_no_part_in_anything(name: str, n: int) -> None:
    """A query all of whose weights are dropped, a key that all queries drop, and a pattern that keeps all."""
    q, k, v, causal, start, keep = attention(np.random.default_rng(n), n, dropped=True)
    forward, backward = TABLE[f"{name}_forward"], TABLE[f"{name}_backward"]
    keep[:, :, 1] = keep[..., 2] = 0
    y, dq, dk, dv = outcome(forward, backward, (q, k, v, causal, start, keep), 0)
    assert not y[:, :, 1].any() and not dq[:, :, 1].any() and not dv[:, :, 2].any()
    assert y[:, :, 2].any() and dk[:, :, 1].any() and dv[:, :, 1].any()
    for ours, right in zip(
        outcome(forward, backward, (q, k, v, causal, start, np.ones_like(keep)), 0),
        outcome(forward, backward, (q, k, v, causal, start), 0),
        strict=True,
    ):
        assert (ours == right).all()


def test_what_kernels_do_not_take_goes_to_the_formulas() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = (exact(x) for x in linear(rng, 5))
    ours = outcome(TABLE["linear_forward"], TABLE["linear_backward"], (x, weight, bias), 0)
    truth = outcome(ops.linear_forward, ops.linear_backward, (x, weight, bias), 0)
    assert all((a == b).all() and a.dtype == np.float64 for a, b in zip(ours, truth, strict=True))


def test_arrays_that_do_not_go_together_are_left_to_the_formulas() -> None:
    """The formulas add an axis of 1, or refuse; a kernel would read out of bounds."""
    x = normal(np.random.default_rng(0), 2, 3, 5, 8)
    one = np.ones((5, 1), np.float32)
    assert (TABLE["rope_forward"](x, one, 0 * one)[0] == x).all()
    assert (TABLE["rms_norm_forward"](x, one[0])[0] == ops.rms_norm_forward(x, one[0])[0]).all()
    for forward, args in (
        ("rope", (x[..., :7], one, one)),
        ("rope", (x, np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))),
        ("grouped_query", (x, x[:, :2], x[:, :2])),
        ("grouped_query", (x, x, x[:, :, :4])),
        ("grouped_query", (x, x[..., :7], x)),
        ("rms_norm", (x, np.ones(7, np.float32))),
        ("swiglu", (x, x[..., :7])),
    ):
        with pytest.raises(ValueError):
            TABLE[f"{forward}_forward"](*args)
    _, saved = TABLE["swiglu_forward"](x, x)
    with pytest.raises(ValueError):
        TABLE["swiglu_backward"](x[:, :, :4], saved)


def test_a_planted_mistake_would_be_seen() -> None:
    def wrong(dy: Any, saved: Any) -> Any:
        dx, *rest = right(dy, saved)
        return dx * np.float32(1 + 1e-5), *rest

    right, TABLE["linear_backward"] = TABLE["linear_backward"], wrong
    try:
        with pytest.raises(AssertionError):
            compare("linear", linear, 7, 0)
    finally:
        TABLE["linear_backward"] = right
