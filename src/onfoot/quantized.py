"""Frozen quantised weights: blocks of 32 numbers, each block with a scale and small codes, as in GGUF files.

A weight is stored (out, in), each row in blocks. It is never dequantised all at once: a product converts a few rows at
a time, so only one chunk of floats exists besides the codes. Q8_0 needs 8.5 bits per number, Q4_0 4.5, Q4_1 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

BLOCK = 32  # numbers per block
KINDS = ("Q8_0", "Q4_0", "Q4_1")
CHUNK = 1 << 19  # numbers converted to floats at a time: 2 MiB of float32


class Quantized:
    """A quantised weight, or its transpose."""

    __array_ufunc__ = None  # so `array @ weight` calls __rmatmul__ below instead of dequantising the weight
    ndim = 2


class QuantizedWeight(Quantized):
    """A read-only weight (out, in). `x @ weight.T` and `dy @ weight` are the products of a linear layer."""

    def __init__(self, kind: str, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown quantisation {kind!r}; choose from {', '.join(KINDS)}")
        self.kind = kind
        self.codes = codes  # (out, blocks, 32) int8, or (out, blocks, 16) bytes: entries 0-15 low, 16-31 high
        self.scale = scale  # (out, blocks) float16
        self.minimum = minimum  # (out, blocks) float16: the minimum of each Q4_1 block
        self._check()
        self.shape = (codes.shape[0], codes.shape[1] * BLOCK)

    def _check(self) -> None:
        """Raises ValueError if codes or scales have a wrong shape or dtype."""
        n_bytes, dtype = (BLOCK, np.int8) if self.kind == "Q8_0" else (BLOCK // 2, np.uint8)
        if self.codes.shape[2:] != (n_bytes,) or self.codes.dtype != dtype:
            raise ValueError(
                f"{self.kind} codes must have shape (out, blocks, {n_bytes}) and dtype {dtype.__name__}, "
                f"got {self.codes.shape} and {self.codes.dtype}"
            )
        for scale in [self.scale, self.minimum] if self.kind == "Q4_1" else [self.scale]:
            if scale is None or scale.shape != self.codes.shape[:2] or scale.dtype != np.float16:
                found = None if scale is None else (scale.shape, str(scale.dtype))
                raise ValueError(
                    f"{self.kind} codes of shape {self.codes.shape} require float16 scales of shape "
                    f"{self.codes.shape[:2]}, got {found}"
                )

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> QuantizedWeight:
        """The weight with `function` applied to its arrays of codes and scales."""
        minimum = None if self.minimum is None else function(self.minimum)
        return QuantizedWeight(self.kind, function(self.codes), function(self.scale), minimum)

    @cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Each block's scale and offset, (out, blocks) float32."""
        scale = self.scale.astype(np.float32)
        if self.kind == "Q4_0":
            return scale, -8 * scale
        return scale, scale[:0] if self.minimum is None else self.minimum.astype(np.float32)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def floats(self, rows: Any, dtype: Any = np.float32) -> np.ndarray:
        """The given rows dequantised, (..., in); `rows` is a slice or an array of indices."""
        scale = self.scale[rows].astype(dtype)[..., None]  # (..., blocks, 1)
        codes = self.codes[rows]
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
                out += self.minimum[rows].astype(dtype)[..., None]  # eq QUANT.3
        return out.reshape(*out.shape[:-2], self.shape[1])

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.floats(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.floats(slice(None), dtype or np.float32)

    @property
    def T(self) -> Transposed:  # noqa: N802 (as in NumPy)
        return Transposed(self)

    def __rmatmul__(self, dy: np.ndarray) -> np.ndarray:
        """dy w: (..., out) -> (..., in), the sum over chunks of rows."""
        dtype = np.result_type(dy.dtype, np.float32)
        out = np.zeros((*dy.shape[:-1], self.shape[1]), dtype)
        for rows in self._chunks():
            out += dy[..., rows] @ self.floats(rows, dtype)
        return out

    def _chunks(self) -> list[slice]:
        step = max(CHUNK // self.shape[1], 1)
        return [slice(i, min(i + step, self.shape[0])) for i in range(0, self.shape[0], step)]

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.kind}, {self.shape}, {self.nbytes:,} bytes)"


class Transposed(Quantized):
    """The transpose wᵗ (in, out) of a quantised weight, sharing its codes."""

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
        dtype = np.result_type(x.dtype, np.float32)
        out = np.empty((*x.shape[:-1], self.shape[1]), dtype)
        for rows in self.T._chunks():
            out[..., rows] = x @ self.T.floats(rows, dtype).T
        return out


def quantize(weight: np.ndarray, kind: str = "Q8_0") -> QuantizedWeight:
    """The weight (out, in) rounded to codes, each block scaled by its largest magnitude (Q4_1: by its range)."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise ValueError(
            f"cannot quantise a weight of shape {weight.shape}: it must be 2-D, its row length a multiple of {BLOCK}"
        )
    step = max(CHUNK // weight.shape[1], 1)  # a few rows at a time, to avoid a second float copy of the weight
    parts = [_quantize_rows(weight[i : i + step], kind) for i in range(0, weight.shape[0], step)]
    codes, scale, *minimum = (np.concatenate(x) for x in zip(*parts, strict=True))
    return QuantizedWeight(kind, codes, scale, *minimum)


def _quantize_rows(weight: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
    blocks = weight.astype(np.float32).reshape(weight.shape[0], -1, BLOCK)
    if kind == "Q4_1":
        minimum, maximum = blocks.min(-1), blocks.max(-1)
        scale = (maximum - minimum) / 15
        codes = np.clip(_round((blocks - minimum[..., None]) * _inverse(scale)[..., None]), 0, 15)
        return _packed(codes), scale.astype(np.float16), minimum.astype(np.float16)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]  # with its sign
    if kind == "Q8_0":
        scale = np.abs(largest) / 127
        codes = _round(blocks * _inverse(scale)[..., None]).astype(np.int8)
        return codes, scale.astype(np.float16)
    scale = largest / -8  # code 0 means −8, so the largest number is exact
    codes = np.clip(np.floor(blocks * _inverse(scale)[..., None] + np.float32(8.5)), 0, 15)
    return _packed(codes), scale.astype(np.float16)


def _round(x: np.ndarray) -> np.ndarray:
    """The nearest integers, halves away from zero, as GGUF's quantisation rounds."""
    whole = np.trunc(x)
    return whole + np.trunc(2 * (x - whole))


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _packed(codes: np.ndarray) -> np.ndarray:
    small = codes.astype(np.uint8)
    return small[..., :16] | (small[..., 16:] << 4)
