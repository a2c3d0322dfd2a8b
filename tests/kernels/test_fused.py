"""Fused kernels, against their pairs in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onfoot import kernels, ops
from onfoot.ops.attention import softmax
from onfoot.ops.cross_entropy import IGNORE

pytest.importorskip("numba")
TABLE = kernels.table()
CLOSE = 2e-6


def close(ours: Any, truth: np.ndarray, terms: Any = 0.0) -> bool:
    """Within a few roundings of the truth; where it is the small sum of large terms, within one of theirs."""
    assert np.shape(ours) == np.shape(truth)
    rounding = float(np.finfo(np.float32).eps) * float(np.linalg.norm(terms))
    return bool(np.linalg.norm(ours - truth) <= CLOSE * max(float(np.linalg.norm(truth)), 1e-12) + rounding)


def composed_loss(x: Any, weight: Any, bias: Any, targets: Any, divisor: float, dloss: float) -> tuple[Any, ...]:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    bias = None if bias is None else bias.astype(np.float64)
    logits, s_head = ops.linear_forward(x, weight.T, bias)
    loss, s_loss = ops.cross_entropy_forward(logits, targets, divisor)
    dx, dweight, dbias = ops.linear_backward(ops.cross_entropy_backward(dloss, s_loss), s_head)
    return loss, dx, dweight.T, dbias


def sizes_of_terms(x: Any, weight: Any, bias: Any, targets: Any, divisor: float, dloss: float) -> tuple[Any, ...]:
    """The same four with every term's size in place of the term: log Σ exp and a logit, p and 1, and their products."""
    logits = x @ weight.T + (0 if bias is None else bias)
    counts = targets[..., None] != IGNORE
    right = np.arange(len(weight)) == targets[..., None]
    both = counts * (softmax(logits) + right) * dloss / divisor  # (B, T, V)
    loss = float((2 * counts * np.abs(logits).max(axis=-1, keepdims=True)).sum()) / divisor
    return loss, both @ np.abs(weight), np.einsum("btv,btd->vd", both, np.abs(x)), both.sum(axis=(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    width=st.integers(1, 40),
    vocabulary=st.integers(2, 130),
    ignored=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    with_bias=st.booleans(),
    part=st.sampled_from([1, 100, 1000, 1 << 20]),
    dloss=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_head_and_loss_in_parts_equal_the_two_pairs(
    rows: int, width: int, vocabulary: int, ignored: float, with_bias: bool, part: int, dloss: float, seed: int
) -> None:
    from onfoot.kernels import logits_loss

    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, rows, width), (vocabulary, width)))
    bias = rng.standard_normal(vocabulary).astype(np.float32) if with_bias else None
    targets = rng.integers(0, vocabulary, (2, rows))
    targets[rng.random(targets.shape) < ignored] = IGNORE
    before, logits_loss.PART = logits_loss.PART, part  # parts of one row, of a few, of all
    try:
        loss, saved = TABLE["logits_loss_forward"](x, weight, bias, targets, 7.0)
        frozen_loss, frozen = TABLE["frozen_logits_loss_forward"](x, weight, bias, targets, 7.0)
        value = TABLE["logits_loss_value"](x, weight, bias, targets, 7.0)
    finally:
        logits_loss.PART = before
    apart, dx_1, dlogits = TABLE["logits_loss_gradients"](x, weight, bias, targets, 7.0)
    truth, dx, dweight, dbias = composed_loss(x, weight, bias, targets, 7.0, dloss)
    of_loss, of_dx, of_dweight, of_dbias = sizes_of_terms(x, weight, bias, targets, 7.0, dloss)
    assert all(close(v, truth, of_loss) for v in (loss, frozen_loss, value, apart))
    assert close(dloss * dx_1, dx, of_dx) and close(dloss * dlogits.T @ x.reshape(-1, width), dweight, of_dweight)
    ours = TABLE["logits_loss_backward"](dloss, saved)
    assert close(ours[0], dx, of_dx) and close(ours[1], dweight, of_dweight)
    assert dbias is None if ours[2] is None else close(ours[2], dbias, of_dbias)
    assert close(TABLE["frozen_logits_loss_backward"](dloss, frozen), dx, of_dx)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 5),
    widths=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    causal=st.booleans(),
    packed=st.booleans(),
    dropped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_heads_cut_from_one_array_have_their_gradients_in_one_array(
    tokens: int, heads: int, widths: tuple[int, int], causal: bool, packed: bool, dropped: bool, seed: int
) -> None:
    from onfoot.ops.multi_head import merge_heads, split_heads

    rng = np.random.default_rng(seed)
    dk, dv = widths
    qk = heads * dk
    qkv = rng.standard_normal((2, tokens, 2 * qk + heads * dv)).astype(np.float32)
    start = rng.integers(0, np.arange(tokens) + 1, (2, 1, tokens)) if packed else None
    keep = (2.0 * (rng.random((2, heads, tokens, tokens)) < 0.5)).astype(np.float32) if dropped else None
    up = rng.standard_normal((2, tokens, heads * dv)).astype(np.float32)
    cut = [split_heads(p, heads) for p in (qkv[..., :qk], qkv[..., qk : 2 * qk], qkv[..., 2 * qk :])]
    heads_out, saved = TABLE["attention_forward"](*cut, causal, start, keep)
    y = merge_heads(heads_out)
    own = [merge_heads(g) for g in TABLE["attention_backward"](split_heads(up, heads), saved)]
    dqkv = TABLE["side_by_side"](own)
    copied = not all(np.shares_memory(dqkv, part) for part in own)
    assert not copied or tokens == 1 or heads * min(widths) == 1  # an axis of one has any stride
    exact = qkv.astype(np.float64)
    parts = (split_heads(p, heads) for p in (exact[..., :qk], exact[..., qk : 2 * qk], exact[..., 2 * qk :]))
    truth, s_truth = ops.attention_forward(*parts, causal, start, keep)
    grads = ops.attention_backward(split_heads(up.astype(np.float64), heads), s_truth)
    assert close(y, merge_heads(truth))
    assert close(dqkv, np.concatenate([merge_heads(g) for g in grads], axis=-1))


def test_queries_of_some_tokens_in_an_array_of_all() -> None:
    """They are adjacent in memory to the keys of all tokens, but there are fewer of them."""
    from onfoot.ops.multi_head import split_heads

    rng = np.random.default_rng(0)
    qkv, up = rng.standard_normal((2, 7, 12)).astype(np.float32), rng.standard_normal((2, 2, 5, 2)).astype(np.float32)
    cut = [split_heads(p, 2) for p in (qkv[:, :5, :4], qkv[..., 4:8], qkv[..., 8:])]
    y, saved = TABLE["attention_forward"](*cut)
    truth, s_truth = ops.attention_forward(*(x.astype(np.float64) for x in cut))
    right = ops.attention_backward(up.astype(np.float64), s_truth)
    assert close(y, truth)
    assert all(close(a, b) for a, b in zip(TABLE["attention_backward"](up, saved), right, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 5000), steps=st.integers(1, 50), decay=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 2**32 - 1)
)
def test_the_update_is_that_of_the_formula(n: int, steps: int, decay: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, m, g = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    v = rng.random(n).astype(np.float32)
    before = [x.astype(np.float64) for x in (p, m, v)]
    truth = [x.copy() for x in before]
    ops.adamw_update(*truth, g.astype(np.float64), 1e-2, (0.9, 0.95), 1e-8, decay, steps, 0.5)
    ours = [p, m, v]
    others = [np.ones((3, 5), np.float32) for _ in range(4)]
    updates = [(*others, 0.0), (*ours, g, decay), (*(x.astype(np.float64) for x in others), 0.0)]
    TABLE["adamw_updates"](updates, 1e-2, (0.9, 0.95), 1e-8, steps, 0.5)
    terms = [np.abs(b) + np.abs(b - a) for a, b in zip(before, truth, strict=True)]  # what was there, and the step
    assert all(close(*one) for one in zip(ours, truth, terms, strict=True))
    assert close(others[0], updates[2][0]) and (others[0] < 1).all()  # those beside it, of two dtypes
    assert abs(TABLE["sum_of_squares"](g) / ops.sum_of_squares(g.astype(np.float64)) - 1) < 1e-12
    assert (TABLE["add"](p, g) == p + g).all()
    several = np.stack([p, g, v]).reshape(3, 1, n)
    assert (TABLE["add"](several, p) == several + p).all()  # the same to each
    assert np.abs(TABLE["sum_first"](several) - several.sum(axis=0)).max() <= CLOSE * np.abs(several).max()


def test_a_table_gets_the_sum_of_what_it_has_and_what_its_ids_bring() -> None:
    rng = np.random.default_rng(3)
    ids, weight, total = rng.integers(0, 5, (3, 7)), np.zeros((5, 13), np.float32), rng.standard_normal((5, 13))
    up, held = rng.standard_normal((3, 7, 13)).astype(np.float32), total.astype(np.float32)
    _, saved = TABLE["embedding_forward"](ids, weight)
    TABLE["embedding_add_backward"](up, saved, held)
    assert close(held, total.astype(np.float32) + ops.embedding_backward(up.astype(np.float64), saved))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 50),
    outputs=st.integers(8, 60),
    with_bias=st.booleans(),
    stored_out_in=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_layer_that_closes_a_skip_is_the_layer_and_a_sum(
    rows: int, width: int, outputs: int, with_bias: bool, stored_out_in: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, skip, dy = normal(2, rows, width), normal(2, rows, outputs), normal(2, rows, outputs)
    weight = normal(outputs, width).T if stored_out_in else normal(width, outputs)
    bias = normal(outputs) if with_bias else None
    down, up = normal(width, 3), normal(3, outputs)
    exact = [None if a is None else a.astype(np.float64) for a in (x, weight, bias)]
    truth, s_truth = ops.linear_forward(*exact)
    for name in ("linear_skip", "frozen_linear_skip"):
        y, saved = TABLE[name](x, weight, bias, skip)
        assert close(y, skip + truth), name
    y, saved = TABLE["linear_skip"](x, weight, bias, skip)
    for ours, right in zip(
        TABLE["linear_backward"](dy, saved), ops.linear_backward(dy.astype(np.float64), s_truth), strict=True
    ):
        assert (ours is None and right is None) or close(ours, right)
    y, _ = TABLE["lora_linear_skip"](x, weight, bias, skip, down, up, 0.5)
    low_rank, _ = ops.lora_linear_forward(*exact, down.astype(np.float64), up.astype(np.float64), 0.5)
    assert close(y, skip + low_rank)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 60), width=st.integers(2, 70), seed=st.integers(0, 2**32 - 1))
def test_a_norm_beside_a_skip_adds_what_comes_past_it(rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, dy, past = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(3))
    weight, bias = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    _, saved = TABLE["layer_norm_forward"](x, weight, bias, 1e-5)
    together, apart = TABLE["layer_norm_skip_backward"](dy, saved, past), TABLE["layer_norm_backward"](dy, saved)
    assert close(together[0], past.astype(np.float64) + apart[0])
    assert all((a == b).all() for a, b in zip(together[1:], apart[1:], strict=True))


@pytest.mark.parametrize("where", [0, 5, 36])
def test_a_logit_that_is_no_number_makes_the_loss_none(where: int) -> None:
    x, weight = np.ones((3, 4), np.float32), np.ones((37, 4), np.float32)
    weight[where, 0] = np.nan
    loss, _ = TABLE["logits_loss_forward"](x, weight, None, np.array([1, 2, 3]), 3.0)
    assert np.isnan(loss) and np.isnan(TABLE["logits_loss_value"](x, weight, None, np.array([1, 2, 3]), 3.0))
