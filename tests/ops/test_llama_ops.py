"""RMS norm, RoPE, SwiGLU and grouped-query attention: their mathematical properties, and their errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onfoot import ops
from onfoot.config import RopeScaling
from onfoot.ops.rope import angles, frequencies
from oracles import assert_close


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


@given(st.floats(0.01, 100), st.integers(0, 10**6))
def test_rms_norm_forgets_scale_and_its_error_signal_is_orthogonal_to_its_input(scale: float, seed: int) -> None:
    x, w, dy = normal(3, 7, seed=seed), normal(7, seed=seed), normal(3, 7, seed=seed + 1)
    y, saved = ops.rms_norm_forward(x, w, eps=1e-12)
    assert_close(ops.rms_norm_forward(scale * x, w, eps=1e-12)[0], y, 1e-7)
    dx, _ = ops.rms_norm_backward(dy, saved)
    assert np.abs((dx * x).sum(-1)).max() <= 1e-8 * max(1, np.abs(dx).max())


def test_rms_norm_of_zeros_is_zero_and_has_a_gradient() -> None:
    y, saved = ops.rms_norm_forward(np.zeros((2, 4)), np.ones(4))
    assert (y == 0).all()
    assert np.isfinite(ops.rms_norm_backward(normal(2, 4), saved)[0]).all()


@pytest.mark.parametrize("interleaved", [False, True])
@given(st.integers(0, 5000))
def test_scores_of_turned_queries_and_keys_depend_on_their_distance_alone(interleaved: bool, shift: int) -> None:
    q, k = normal(6, 8), normal(6, 8, seed=1)
    scores = []
    for first in (0, shift):
        cos, sin = angles(np.arange(6) + first, frequencies(10000.0, 8))
        q_turned, k_turned = (ops.rope_forward(x, cos, sin, interleaved)[0] for x in (q, k))
        scores.append(q_turned @ k_turned.T)
    assert_close(scores[1], scores[0], 1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_is_the_inverse_and_keeps_lengths(interleaved: bool) -> None:
    x = normal(2, 5, 6)
    y, saved = ops.rope_forward(x, *angles(np.arange(5), frequencies(100.0, 6)), interleaved)
    assert_close(ops.rope_backward(y, saved), x, 1e-14)
    assert_close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), 1e-14)
    assert (y[:, 0] == x[:, 0]).all()  # position 0 is not rotated


def test_the_two_layouts_are_a_permutation_of_each_other() -> None:
    x = normal(5, 8)
    cos, sin = angles(np.arange(5), frequencies(100.0, 8))
    order = np.arange(8).reshape(2, 4).T.reshape(-1)  # 0 4 1 5 2 6 3 7: pairs side by side
    halves, _ = ops.rope_forward(x, cos, sin)
    pairs, _ = ops.rope_forward(x[:, order], cos, sin, interleaved=True)
    assert (pairs == halves[:, order]).all()


def test_llama3_scaling_leaves_fast_pairs_and_slows_slow_ones() -> None:
    plain = frequencies(500000.0, 64)
    scaling = RopeScaling("llama3", 8.0)
    ratio = plain / frequencies(500000.0, 64, scaling)
    turns = 8192 * plain / (2 * np.pi)
    assert_close(ratio[turns > 4], np.ones((turns > 4).sum()), 1e-15)
    assert_close(ratio[turns < 1], np.full((turns < 1).sum(), 8.0), 1e-15)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size and (between > 1).all() and (between < 8).all() and (np.diff(ratio) >= -1e-12).all()
    assert_close(frequencies(100.0, 8, RopeScaling("linear", 4.0)), frequencies(100.0, 8) / 4, 1e-15)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width must be even .*, got 5"):
        frequencies(100.0, 5)
    with pytest.raises(ValueError, match="rope scaling 'yarn' is not supported; choose from linear, llama3"):
        frequencies(100.0, 8, SimpleNamespace(rope_type="yarn"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a multiple of the 3 key/value heads, got 4"):
        ops.grouped_query_forward(normal(1, 4, 2, 2), normal(1, 3, 2, 2), normal(1, 3, 2, 2))


def test_swiglu_survives_large_gates() -> None:
    gate = np.array([-1e4, -50.0, 0.0, 50.0, 1e4])
    y, saved = ops.swiglu_forward(gate, np.ones(5))
    assert_close(y, np.array([0, 0, 0, 50, 1e4]), 1e-12)
    dgate, dup = ops.swiglu_backward(np.ones(5), saved)
    assert_close(dgate, np.array([0, 0, 0.5, 1, 1]), 1e-12)
    assert np.isfinite(dup).all()


def test_one_group_of_one_is_attention_itself() -> None:
    q, k, v, dy = (normal(2, 3, 5, 4, seed=i) for i in range(4))
    y, saved = ops.grouped_query_forward(q, k, v)
    plain, saved_plain = ops.attention_forward(q, k, v)
    assert (y == plain).all()
    for got, expected in zip(
        ops.grouped_query_backward(dy, saved), ops.attention_backward(dy, saved_plain), strict=True
    ):
        assert (got == expected).all()


def test_a_group_may_have_starts_and_patterns_of_its_own() -> None:
    """`start` for each query head, or one for all; `keep` for each."""
    q, k, v = normal(2, 4, 5, 3), normal(2, 2, 5, 3, seed=1), normal(2, 2, 5, 3, seed=2)
    start = np.array([[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])[:, None]
    keep = np.random.default_rng(0).integers(0, 2, (2, 4, 5, 5)) * 2.0
    copied = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    expected, _ = ops.attention_forward(q, *copied, True, start, keep)
    for given_start in (start, np.repeat(start, 4, axis=1)):
        assert_close(ops.grouped_query_forward(q, k, v, True, given_start, keep)[0], expected, 1e-14)
