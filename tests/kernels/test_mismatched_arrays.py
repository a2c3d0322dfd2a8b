"""Arrays that do not go together never reach the loops of a kernel: one line refuses them, and names their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot import kernels, ops
from onfoot.kernels import buffers, pool
from onfoot.kernels.product import product
from onfoot.quantized import QuantizedWeight, quantize

pytest.importorskip("numba")
TABLE = kernels.table()


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def saved(pair: str, *args: Any) -> Any:
    return TABLE[f"{pair}_forward"](*args)[1]


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
    "a companion of another width": lambda: TABLE["lora_linear_forward"](
        ones(4, 5), ones(5, 7), None, ones(6, 2), ones(2, 7), 1.0
    ),
    "a companion of two ranks": lambda: TABLE["lora_linear_forward"](
        ones(4, 5), ones(5, 7), None, ones(5, 2), ones(3, 7), 1.0
    ),
    "a companion back from fewer rows": lambda: TABLE["lora_linear_backward"](
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
    "self-attention back from fewer tokens": lambda: TABLE["self_attention_backward"](
        ones(1, 4, 8), saved("self_attention", ones(1, 5, 24), 2, 4)
    ),
    "attention with starts of other queries": lambda: TABLE["attention_forward"](
        *[ones(1, 2, 5, 4)] * 3, True, np.zeros((1, 1, 4), np.int64)
    ),
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
    with pytest.raises(ValueError, match=r"for a parameter of shape \(6"):
        TABLE["adamw_updates"](updates, 1e-3, (0.9, 0.99), 1e-8, 1, 1.0)
    assert all((x == 1).all() for x in (*good, *bad))


@pytest.mark.parametrize("which", range(3))
def test_an_update_of_read_only_memory_is_refused(which: int) -> None:
    arrays = [ones(6) for _ in range(4)]
    arrays[which].flags.writeable = False
    with pytest.raises(ValueError, match="read-only; put a copy in its place"):
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
    with pytest.raises(ValueError, match="do not go with scales None"):
        QuantizedWeight("Q4_1", quantize(ones(4, 64), "Q4_1").codes, weight.scale)


def test_a_kernel_never_runs_on_more_threads_than_it_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread of Python's raises their number between the memory and the call."""
    a, b = np.random.default_rng(0).standard_normal((2, 70, 70)).astype(np.float32)
    real = buffers.scratch
    monkeypatch.setattr("onfoot.kernels.product.scratch", lambda threads, floats: real(1, floats))
    monkeypatch.setattr(pool, "_threads", pool._most)
    assert np.allclose(product(a, b), a @ b, atol=1e-4)


def test_a_pass_in_one_refuses_targets_of_another_shape() -> None:
    model = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=12))
    tokens = np.random.default_rng(0).integers(0, 12, (3, 7))
    params = list(model.params.values())
    with pytest.raises(ValueError, match=r"targets have shape \(7, 3\), tokens \(3, 7\)"):
        TABLE["gpt2_pass"](tokens, np.ascontiguousarray(tokens.T), 5.0, params, 1, 1e-5, True)


def test_a_cache_that_cannot_be_written_is_not_decoded_into() -> None:
    model = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=12))
    run = model.new_run(keep_saved=False)
    names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    layers = [[run.parameters(f"transformer.h.0.{name}") for name in names]]
    keys, values = (np.zeros((1, 2, 8, 4), np.float32) for _ in range(2))
    assert TABLE["gpt2_decoder"](layers, [(keys, values)], None, 1e-5, "gelu_tanh") is not None
    values.flags.writeable = False
    assert TABLE["gpt2_decoder"](layers, [(keys, values)], None, 1e-5, "gelu_tanh") is None
