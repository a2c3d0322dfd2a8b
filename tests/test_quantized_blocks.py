"""Blocks of codes against the gguf package: what each kind stands for, and products that never unpack the whole."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from onfoot import quantized
from onfoot.quantized import QuantizedWeight, quantize
from oracles import assert_close

KINDS = ("Q8_0", "Q4_0", "Q4_1")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_gguf_packages(kind: str) -> None:
    weight = np.random.default_rng(0).normal(size=(50, 96)).astype(np.float32)
    weight[3, :32] = 0
    weight[4, :32] = np.abs(weight[4, :32])
    weight[5, :32] = -np.abs(weight[5, :32])
    type_ = gguf.GGMLQuantizationType[kind]
    theirs = dequantize(gguf_quantize(weight, type_), type_)
    ours = quantize(weight, kind)
    assert (np.asarray(ours) == theirs).mean() > 0.999  # but for numbers midway between two codes
    assert np.abs(np.asarray(ours) - theirs).max() <= np.abs(theirs).max() / 6
    assert ours.nbytes == gguf_quantize(weight, type_).nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_shift_make_the_same_numbers(kind: str) -> None:
    """The kernels read `factors`: a number is scale × code + shift."""
    weight = quantize(np.random.default_rng(1).normal(size=(7, 64)).astype(np.float32), kind)
    scale, shift = weight.factors
    codes = weight.codes.astype(np.float32)
    if kind != "Q8_0":
        codes = np.concatenate([weight.codes & 15, weight.codes >> 4], axis=-1).astype(np.float32)
    numbers = scale[..., None] * codes + (shift[..., None] if shift.size else 0)
    assert_close(numbers.reshape(7, 64), np.asarray(weight), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [64, 200, 1 << 19])
def test_products_are_those_of_the_numbers(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "CHUNK", chunk)
    rng = np.random.default_rng(2)
    weight = quantize(rng.normal(size=(13, 64)), kind)
    whole = np.asarray(weight, np.float64)
    x, dy = rng.normal(size=(5, 64)), rng.normal(size=(5, 13))
    assert_close(x @ weight.T, x @ whole.T, 1e-13)
    assert_close(dy @ weight, dy @ whole, 1e-13)
    assert_close(weight[np.array([12, 0])], whole[[12, 0]].astype(np.float32), 1e-6)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    for width in (16, 40, 48):
        with pytest.raises(ValueError, match="its row length a multiple of 32"):
            quantize(np.zeros((3, width), np.float32))
    with pytest.raises(ValueError, match="unknown quantisation 'Q9'"):
        QuantizedWeight("Q9", np.zeros((1, 1, 32), np.int8), np.zeros((1, 1), np.float16))
