"""Arrays of incompatible shapes never reach the loops of a kernel: a one-line error names their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onfoot import kernels, ops
from onfoot.kernels import buffers
from onfoot.kernels.product import product
from onfoot.quantized import QuantizedWeight, quantize

pytest.importorskip("numba")
TABLE = kernels.table()


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def saved(pair: str, *args: Any) -> Any:
    return TABLE[f"{pair}_forward"](*args)[1]


def cached(**others: np.ndarray) -> Any:
    """One new token for two sequences after three in a cache for eight, with some arrays replaced."""
    right = {"q": ones(2, 4, 1, 6), "k": ones(2, 2, 1, 6), "v": ones(2, 2, 1, 5)}
    right |= {"keys": ones(2, 2, 8, 6), "values": ones(2, 2, 8, 5), "length": np.array([3])}
    return TABLE["cached_attention"](**right | others)


IDS = np.zeros((2, 3), np.int64)
REFUSED: dict[str, Callable[[], Any]] = {
    "layer norm with a short weight": lambda: TABLE["layer_norm_forward"](ones(4, 600), ones(599), ones(600)),
    "layer norm with a short bias": lambda: TABLE["layer_norm_forward"](ones(4, 600), ones(600), ones(7)),
    "layer norm back from fewer rows": lambda: TABLE["layer_norm_backward"](
        ones(3, 8), saved("layer_norm", ones(4, 8), ones(8), ones(8))
    ),
    "layer norm back from other axes": lambda: TABLE["layer_norm_backward"](
        ones(2, 6, 8), saved("layer_norm", ones(3, 4, 8), ones(8), ones(8))
    ),
    "layer norm back beside another skip": lambda: TABLE["layer_norm_skip_backward"](
        ones(4, 8), saved("layer_norm", ones(4, 8), ones(8), ones(8)), ones(3, 8)
    ),
    "RMS norm back from more columns": lambda: TABLE["rms_norm_backward"](
        ones(4, 9), saved("rms_norm", ones(4, 8), ones(8))
    ),
    "linear of another width": lambda: TABLE["linear_forward"](ones(4, 5), ones(6, 7), ones(7)),
    "linear with a long bias": lambda: TABLE["linear_forward"](ones(40, 5), ones(5, 7), ones(8)),
    "linear beside another skip": lambda: TABLE["linear_skip"](ones(40, 5), ones(5, 7), ones(7), ones(39, 7)),
    "linear back from fewer rows": lambda: TABLE["linear_backward"](
        ones(30, 7), saved("linear", ones(40, 5), ones(5, 7), ones(7))
    ),
    "linear back from fewer columns": lambda: TABLE["linear_backward"](
        ones(40, 6), saved("linear", ones(40, 5), ones(5, 7), ones(7))
    ),
    "frozen linear back from fewer columns": lambda: TABLE["frozen_linear_backward"](
        ones(40, 6), saved("frozen_linear", ones(40, 5), ones(5, 7))
    ),
    "linear in blocks of another width": lambda: TABLE["frozen_linear_forward"](ones(4, 32), quantize(ones(3, 64)).T),
    "a LoRA layer of another width": lambda: TABLE["lora_linear_forward"](
        ones(4, 5), ones(5, 7), None, ones(6, 2), ones(2, 7), 1.0
    ),
    "a LoRA layer of two ranks": lambda: TABLE["lora_linear_forward"](
        ones(4, 5), ones(5, 7), None, ones(5, 2), ones(3, 7), 1.0
    ),
    "a LoRA layer back from fewer rows": lambda: TABLE["lora_linear_backward"](
        ones(3, 7), saved("lora_linear", ones(4, 5), ones(5, 7), None, ones(5, 2), ones(2, 7), 1.0)
    ),
    "attention over more values than keys": lambda: TABLE["attention_forward"](
        ones(1, 2, 5, 4), ones(1, 2, 6, 4), ones(1, 2, 60, 4)
    ),
    "attention of queries wider than keys": lambda: TABLE["attention_forward"](
        ones(1, 2, 5, 8), ones(1, 2, 5, 4), ones(1, 2, 5, 4)
    ),
    "attention back from fewer queries": lambda: TABLE["attention_backward"](
        ones(1, 2, 4, 4), saved("attention", *[ones(1, 2, 5, 4)] * 3)
    ),
    "parts of other rows side by side": lambda: TABLE["side_by_side"]([ones(5, 3), ones(4, 3)]),
    "attention with starts of other queries": lambda: TABLE["attention_forward"](
        *[ones(1, 2, 5, 4)] * 3, True, np.zeros((1, 1, 4), np.int64)
    ),
    "a cached query of two tokens": lambda: cached(q=ones(2, 4, 2, 6)),
    "two tokens for a cache": lambda: cached(k=ones(2, 2, 2, 6), v=ones(2, 2, 2, 5)),
    "a cached query wider than the keys": lambda: cached(q=ones(2, 4, 1, 7)),
    "a cached query of a head too many": lambda: cached(q=ones(2, 5, 1, 6)),
    "a cached query without heads": lambda: cached(q=ones(2, 1, 6)),
    "a key wider than its cache": lambda: cached(k=ones(2, 2, 1, 7)),
    "a value of another width": lambda: cached(v=ones(2, 2, 1, 6)),
    "values of fewer tokens than keys": lambda: cached(values=ones(2, 2, 7, 5)),
    "a cache of other sequences": lambda: cached(keys=ones(1, 2, 8, 6), values=ones(1, 2, 8, 5)),
    "a cache of other heads": lambda: cached(keys=ones(2, 1, 8, 6), values=ones(2, 1, 8, 5)),
    "starts of other sequences than a cache's": lambda: cached(start=np.zeros(1, np.int64)),
    "attention that drops weights of other keys": lambda: TABLE["attention_forward"](
        *[ones(1, 2, 5, 4)] * 3, True, None, ones(1, 2, 5, 6)
    ),
    "attention that drops weights of other queries": lambda: TABLE["attention_forward"](
        *[ones(1, 2, 5, 4)] * 3, True, None, ones(1, 2, 4, 5)
    ),
    "attention that drops weights of other heads": lambda: TABLE["attention_forward"](
        *[ones(1, 2, 5, 4)] * 3, True, None, ones(1, 3, 5, 5)
    ),
    "attention back through weights of other keys": lambda: TABLE["attention_backward"](
        ones(1, 2, 5, 4), saved("attention", *[ones(1, 2, 5, 4)] * 3)._replace(keep=ones(1, 2, 5, 6))
    ),
    "attention back through weights of other heads": lambda: TABLE["attention_backward"](
        ones(1, 2, 5, 4), saved("attention", *[ones(1, 2, 5, 4)] * 3)._replace(keep=ones(1, 1, 5, 5))
    ),
    "grouped queries that drop weights of fewer heads": lambda: TABLE["grouped_query_forward"](
        ones(1, 4, 5, 4), *[ones(1, 2, 5, 4)] * 2, True, None, ones(1, 2, 5, 4)
    ),
    "dropout of fewer columns": lambda: TABLE["dropout_forward"](ones(4, 5), ones(4, 6)),
    "dropout back from fewer rows": lambda: TABLE["dropout_backward"](ones(3, 5), saved("dropout", *[ones(4, 5)] * 2)),
    "cross-entropy with too few targets": lambda: TABLE["cross_entropy_forward"](
        ones(40, 5), np.zeros(30, np.int64), 1.0
    ),
    "head and loss with too few targets": lambda: TABLE["logits_loss_forward"](
        ones(40, 5), ones(7, 5), None, np.zeros(30, np.int64), 1.0
    ),
    "a head of another width": lambda: TABLE["logits_loss_value"](
        ones(4, 5), ones(7, 6), None, np.zeros(4, np.int64), 1.0
    ),
    "an embedding back from fewer tokens": lambda: TABLE["embedding_backward"](
        ones(2, 2, 4), saved("embedding", IDS, ones(5, 4))
    ),
    "an embedding added to a smaller table": lambda: TABLE["embedding_add_backward"](
        ones(2, 3, 4), saved("embedding", IDS, ones(5, 4)), ones(4, 4)
    ),
    "GELU back from fewer rows": lambda: TABLE["gelu_tanh_backward"](ones(3, 5), saved("gelu_tanh", ones(4, 5))),
    "ReLU back from a longer row": lambda: TABLE["relu_backward"](ones(4, 50), saved("relu", ones(4, 5))),
    "SwiGLU back from fewer rows": lambda: TABLE["swiglu_backward"](
        ones(3, 5), saved("swiglu", ones(4, 5), ones(4, 5))
    ),
    "RoPE back through angles of another width": lambda: TABLE["rope_backward"](
        ones(1, 2, 3, 6), saved("rope", ones(1, 2, 3, 8), ones(3, 4), ones(3, 4))
    ),
    "a product of two depths": lambda: product(ones(4, 5), ones(6, 7)),
    "a sum of two shapes": lambda: TABLE["add"](ones(4, 5), ones(4, 6)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_do_not_go_together_are_refused_with_their_shapes(case: str) -> None:
    with pytest.raises((ValueError, IndexError)) as refusal:
        REFUSED[case]()
    assert "\n" not in str(refusal.value) and str(refusal.value).count("(") >= 2


def updated(p: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray) -> None:
    TABLE["adamw_updates"]([(p, m, v, g, 0.0)], 1e-3, (0.9, 0.99), 1e-8, 1, 1.0)


@pytest.mark.parametrize("which", range(4))
def test_an_update_with_an_array_of_another_shape_is_refused_before_anything_is_written(which: int) -> None:
    good = [ones(6) for _ in range(4)]
    bad = [ones(6) for _ in range(4)]
    bad[which] = ones(6, 6)
    updates = [(*good, 0.0), (*bad, 0.0)]
    with pytest.raises(ValueError, match=r"the parameter \(6"):
        TABLE["adamw_updates"](updates, 1e-3, (0.9, 0.99), 1e-8, 1, 1.0)
    assert all((x == 1).all() for x in (*good, *bad))


@pytest.mark.parametrize("which", range(3))
def test_an_update_of_read_only_memory_is_refused(which: int) -> None:
    arrays = [ones(6) for _ in range(4)]
    arrays[which].flags.writeable = False
    with pytest.raises(ValueError, match="read-only; replace it with a copy"):
        updated(*arrays)
    assert all((x == 1).all() for x in arrays)


def test_an_array_in_two_places_is_updated_as_by_the_formula() -> None:
    for function in (TABLE["adamw_updates"], ops.adamw_updates):
        p, m, v, g = ones(5), ones(5), ones(5), ones(5)
        function([(p, m, v, g, 0.1), (p, m, v, g, 0.1)], 1e-1, (0.9, 0.99), 1e-8, 1, 1.0)
        if function is TABLE["adamw_updates"]:
            ours = p
    assert np.abs(ours - p).max() < 1e-6


def test_what_formulas_broadcast_is_broadcast() -> None:
    rng = np.random.default_rng(0)
    x, row = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (1, 5)))
    one = ones(1)
    for name, args in {
        "layer_norm_forward": (x, one, one),
        "rms_norm_forward": (x, one),
        "linear_forward": (x, ones(5, 3), one),
        "swiglu_forward": (x, row),
        "cross_entropy_forward": (x, np.array([2]), 1.0),
        "dropout_forward": (x, row),
        "attention_forward": (*[x.reshape(1, 2, 2, 5)] * 3, True, None, x[:2, :2].copy()),
    }.items():
        right = getattr(ops, name)(*args)[0]
        assert np.allclose(TABLE[name](*args)[0], right, rtol=1e-6), name
    assert (TABLE["relu_backward"](row, saved("relu", x)) == ops.relu_backward(row, ops.relu_forward(x)[1])).all()


@pytest.mark.parametrize("ids", [[-6], [5], [1 << 40], [-(1 << 63)]])
def test_an_id_outside_the_table_is_refused(ids: list[int]) -> None:
    with pytest.raises(IndexError):
        TABLE["embedding_forward"](np.array(ids), ones(5, 4))
    with pytest.raises(IndexError):
        TABLE["cross_entropy_forward"](ones(1, 5), np.array(ids), 1.0)


def test_ids_that_changed_since_the_forward_pass_are_looked_at_again() -> None:
    ids = np.zeros(3, np.int64)
    _, kept = TABLE["embedding_forward"](ids, ones(5, 4))
    ids[1] = 1 << 40
    with pytest.raises(IndexError):
        TABLE["embedding_backward"](ones(3, 4), kept)


def test_targets_that_are_no_integers_are_refused() -> None:
    with pytest.raises(IndexError, match="float64"):
        TABLE["cross_entropy_forward"](ones(3, 5), np.array([0.5, 1.0, 2.0]), 1.0)


def test_arrays_that_lie_oddly_give_the_same() -> None:
    """Reversed, spread, unaligned, of the other byte order, read-only, or one row for all."""
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.ndarray(x.shape, x.dtype, memory, 1)
    unaligned[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    spread = np.zeros((12, 16), np.float32)[::2, ::2]
    spread[...] = x
    odd = [x[::-1, ::-1].copy()[::-1, ::-1], np.asfortranarray(x), spread, unaligned, frozen, x.astype(">f4")]
    right = TABLE["layer_norm_forward"](x, ones(8), ones(8))[0]
    for one in odd:
        assert np.allclose(TABLE["layer_norm_forward"](one, ones(8), ones(8))[0], right, atol=1e-6)
        if one is not unaligned:
            assert np.allclose(TABLE["linear_forward"](x.T.copy(), one)[0], x.T @ x, atol=1e-4)
        assert np.allclose(TABLE["linear_forward"](one, ones(8, 3))[0], x @ ones(8, 3), atol=1e-5)
    with pytest.raises(TypeError, match="aligned"):
        TABLE["linear_forward"](x.T.copy(), unaligned)


def test_codes_and_scales_of_other_blocks_are_refused() -> None:
    weight = quantize(ones(4, 64))
    for codes, scale in (
        (weight.codes, weight.scale[:3]),
        (weight.codes, weight.scale[:, :1]),
        (weight.codes[..., :16], weight.scale),
        (weight.codes.view(np.uint8), weight.scale),
        (weight.codes, weight.scale.astype(np.float32)),
    ):
        with pytest.raises(ValueError, match="Q8_0 codes"):
            QuantizedWeight("Q8_0", codes, scale)
    with pytest.raises(ValueError, match=r"require float16 scales .*, got None"):
        QuantizedWeight("Q4_1", quantize(ones(4, 64), "Q4_1").codes, weight.scale)


def test_a_kernel_never_runs_on_more_threads_than_it_has_memory_for(
    monkeypatch: pytest.MonkeyPatch, on_threads: Callable[[int], None]
) -> None:
    """As if another Python thread raised their number between the allocation and the call."""
    a, b = np.random.default_rng(0).standard_normal((2, 70, 70)).astype(np.float32)
    real = buffers.scratch
    monkeypatch.setattr("onfoot.kernels.product.scratch", lambda threads, floats: real(1, floats))
    on_threads(3)
    assert np.allclose(product(a, b), a @ b, atol=1e-4)


def test_a_cache_that_cannot_be_written_is_not_written() -> None:
    keys, values = (np.zeros((1, 2, 8, 4), np.float32) for _ in range(2))
    new, length = [ones(1, 2, 1, 4)] * 3, np.zeros(1, np.int64)
    assert TABLE["cached_attention"](*new, keys, values, length) is not None
    assert (keys[:, :, 0] == 1).all() and (values[:, :, 0] == 1).all() and not keys[:, :, 1:].any()
    for one in (keys, values):
        keys[...], values[...], one.flags.writeable = 0, 0, False
        assert TABLE["cached_attention"](*new, keys, values, length) is None
        assert not keys.any() and not values.any()
        one.flags.writeable = True


@pytest.mark.parametrize("length", [-1, 8, 1 << 40])
def test_a_length_beyond_the_cache_is_refused_and_nothing_written(length: int) -> None:
    keys, values = (np.zeros((2, 2, 8, width), np.float32) for width in (6, 5))
    with pytest.raises(IndexError, match=r"cannot add token .*: the KV cache has capacity 8"):
        cached(keys=keys, values=values, length=np.array([length]))
    with pytest.raises(IndexError, match=r"cannot add token .*: the KV cache has capacity 8"):
        cached(keys=keys, values=values, length=np.array([3, length]), slots=np.array([1, 0]))
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("slots", [[-1, 0], [0, 2]])
def test_a_slot_beyond_the_cache_is_refused_and_nothing_written(slots: list[int]) -> None:
    keys, values = (np.zeros((2, 2, 8, width), np.float32) for width in (6, 5))
    with pytest.raises(IndexError, match=r"slots must be in \[0, 2\)"):
        cached(keys=keys, values=values, length=np.array([3, 3]), slots=np.array(slots))
    assert not keys.any() and not values.any()


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (5, [3], "length must be an int64 array"),
        (5, 3, "length must be an int64 array"),
        (5, np.array([3], np.int32), "length must be an int64 array"),
        (6, 1, "start must be an int64 array"),
        (6, np.array(1), "start must be an int64 array"),
        (6, np.array([1, 1, 1]), "start must be an int64 array"),
        (2, np.zeros((2, 5, 1, 1, 1), np.float32), "must have 4 axes"),
        (0, np.zeros((2, 1, 3), np.float32), "must have 4 axes"),
    ],
)
def test_cached_attention_rejects_what_is_not_an_array_of_its_shape(argument: int, value: object, message: str) -> None:
    """The kernel would read a Python number or list as an array, or fold an axis into another."""
    new = [np.ones((2, 1, 1, 3), np.float32) for _ in range(3)]
    args = [*new, *(np.ones((2, 1, 8, 3), np.float32) for _ in range(2)), np.array([3]), np.zeros(2, np.int64)]
    cached_attention = kernels.table()["cached_attention"]
    assert cached_attention(*args).shape == (2, 1, 1, 3) and cached_attention(*args[:6]).shape == (2, 1, 1, 3)
    args[argument] = value  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=message):
        cached_attention(*args)
