"""Frozen weights that stay quantised: blocks of 32 numbers with a scale and small codes, as GGUF files have them.

A weight is stored (out, in), each row in blocks. It is never turned into floats as a whole: a product takes a few rows
at a time, so that beside the codes only one chunk of floats exists. Q8_0 needs 8.5 bits a number, Q4_0 4.5, Q4_1 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

BLOCK = 32  # numbers a block
KINDS = ("Q8_0", "Q4_0", "Q4_1")
CHUNK = 1 << 19  # numbers that are floats at a time: 2 MiB of float32


class Quantized:
    """A weight in blocks, or its transpose."""

    __array_ufunc__ = None  # so that `array @ weight` asks this class, and does not make one large array of it
    ndim = 2


class QuantizedWeight(Quantized):
    """A weight (out, in) that is read only. `x @ weight.T` and `dy @ weight` are the products of a linear layer."""

    def __init__(self, kind: str, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown quantisation {kind!r}; known are {', '.join(KINDS)}")
        self.kind = kind
        self.codes = codes  # (out, blocks, 32) int8, or (out, blocks, 16) bytes: entries 0-15 low, 16-31 high
        self.scale = scale  # (out, blocks) float16
        self.minimum = minimum  # (out, blocks) float16: Q4_1's smallest value
        self._check()
        self.shape = (codes.shape[0], codes.shape[1] * BLOCK)

    def _check(self) -> None:
        """Refuses codes and scales that are not of the same blocks."""
        bytes_, kind = (BLOCK, np.int8) if self.kind == "Q8_0" else (BLOCK // 2, np.uint8)
        if self.codes.shape[2:] != (bytes_,) or self.codes.dtype != kind:
            raise ValueError(f"{self.kind} codes of shape {self.codes.shape} and {self.codes.dtype}: not its blocks")
        for scale in [self.scale, self.minimum] if self.kind == "Q4_1" else [self.scale]:
            if scale is None or scale.shape != self.codes.shape[:2] or scale.dtype != np.float16:
                found = None if scale is None else (scale.shape, str(scale.dtype))
                raise ValueError(f"{self.kind} codes of shape {self.codes.shape} do not go with scales {found}")

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> QuantizedWeight:
        """The same weight with other arrays for its codes and scales."""
        minimum = None if self.minimum is None else function(self.minimum)
        return QuantizedWeight(self.kind, function(self.codes), function(self.scale), minimum)

    @cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Each block's scale and what is added to all its numbers, (out, blocks) float32."""
        scale = self.scale.astype(np.float32)
        if self.kind == "Q4_0":
            return scale, -8 * scale
        return scale, scale[:0] if self.minimum is None else self.minimum.astype(np.float32)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def floats(self, which: Any, dtype: Any = np.float32) -> np.ndarray:
        """Rows as numbers, (..., in): those that a slice or an array of indices names."""
        scale = self.scale[which].astype(dtype)[..., None]  # (..., blocks, 1)
        codes = self.codes[which]
        out = np.empty((*codes.shape[:-1], BLOCK), dtype)
        if self.kind == "Q8_0":
            np.multiply(codes, scale, out=out)  # eq QUANT.1
        else:
            out[..., :16] = codes & 15
            out[..., 16:] = codes >> 4
            if self.minimum is None:
                out -= 8
                out *= scale  # eq QUANT.2
            else:
                out *= scale
                out += self.minimum[which].astype(dtype)[..., None]  # eq QUANT.3
        return out.reshape(*out.shape[:-2], self.shape[1])

    def __getitem__(self, which: Any) -> np.ndarray:
        return self.floats(which)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.floats(slice(None), dtype or np.float32)

    @property
    def T(self) -> Transposed:  # noqa: N802 (an array's name)
        return Transposed(self)

    def __rmatmul__(self, dy: np.ndarray) -> np.ndarray:
        """dy w: (..., out) -> (..., in), the sum over chunks of rows."""
        kind = np.result_type(dy.dtype, np.float32)
        out = np.zeros((*dy.shape[:-1], self.shape[1]), kind)
        for rows in self._chunks():
            out += dy[..., rows] @ self.floats(rows, kind)
        return out

    def _chunks(self) -> list[slice]:
        step = max(CHUNK // self.shape[1], 1)
        return [slice(i, min(i + step, self.shape[0])) for i in range(0, self.shape[0], step)]

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.kind}, {self.shape}, {self.nbytes:,} bytes)"


class Transposed(Quantized):
    """wᵗ (in, out) of a quantised weight: the same codes, read the other way."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.T = weight
        self.shape = weight.shape[::-1]
        self.nbytes = weight.nbytes

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Transposed:
        return Transposed(self.T.map(function))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.T, dtype).T

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        """x wᵗ: (..., in) -> (..., out), a few columns at a time."""
        kind = np.result_type(x.dtype, np.float32)
        out = np.empty((*x.shape[:-1], self.shape[1]), kind)
        for rows in self.T._chunks():
            out[..., rows] = x @ self.T.floats(rows, kind).T
        return out


def quantize(weight: np.ndarray, kind: str = "Q8_0") -> QuantizedWeight:
    """The nearest codes of a weight (out, in): per block, the scale that its largest number (or its range) asks for."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"a weight of shape {weight.shape} cannot be quantised: its rows need a multiple of {BLOCK}")
    step = max(CHUNK // weight.shape[1], 1)  # a few rows at a time: no second copy of the whole weight in floats
    parts = [_quantize_rows(weight[i : i + step], kind) for i in range(0, weight.shape[0], step)]
    codes, scale, *minimum = (np.concatenate(x) for x in zip(*parts, strict=True))
    return QuantizedWeight(kind, codes, scale, *minimum)


def _quantize_rows(weight: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
    blocks = weight.astype(np.float32).reshape(weight.shape[0], -1, BLOCK)
    if kind == "Q4_1":
        minimum, most = blocks.min(-1), blocks.max(-1)
        scale = (most - minimum) / 15
        codes = np.clip(np.round((blocks - minimum[..., None]) * _inverse(scale)[..., None]), 0, 15)
        return _packed(codes), scale.astype(np.float16), minimum.astype(np.float16)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]  # with its sign
    if kind == "Q8_0":
        scale = np.abs(largest) / 127
        codes = np.round(blocks * _inverse(scale)[..., None]).astype(np.int8)
        return codes, scale.astype(np.float16)
    scale = largest / -8  # the code 0 stands for −8: the largest number is met exactly
    codes = np.clip(np.round(blocks * _inverse(scale)[..., None]) + 8, 0, 15)
    return _packed(codes), scale.astype(np.float16)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _packed(codes: np.ndarray) -> np.ndarray:
    small = codes.astype(np.uint8)
    return small[..., :16] | (small[..., 16:] << 4)
