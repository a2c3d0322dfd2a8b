"""Frozen weights in fewer bits than float32: 16-bit floats, or GGUF's blocks of small codes with a scale.

A weight is stored (out, in). It is never converted to floats all at once: a product converts a few rows at a time, so
only one chunk of floats exists besides the codes. Q8_0 needs 8.5 bits per number, Q4_0 4.5, Q4_1 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

BLOCK = 32  # numbers per block
KINDS = ("Q8_0", "Q4_0", "Q4_1")  # what `quantize` makes
CHUNK = 1 << 19  # numbers converted to floats at a time: 2 MiB of float32


class Form(NamedTuple):
    """How a kind of block is kept in memory."""

    bits: int  # 8: a signed byte per number; 4: two numbers per byte
    block: int  # numbers per scale
    scale: Any  # the dtype of scales and minima
    has_minimum: bool

    @property
    def n_bytes(self) -> int:
        """The bytes of codes per block."""
        return self.block * self.bits // 8


# The 2-, 3-, 5- and 6-bit codes of a file become bytes. A K-quant's scale is the product of a float16 and an integer of
# up to 8 bits, which is exact in float32.
FORMS = {
    "Q8_0": Form(8, 32, np.float16, False),
    "Q4_0": Form(4, 32, np.float16, False),
    "Q4_1": Form(4, 32, np.float16, True),
    "Q5_0": Form(8, 32, np.float16, False),
    "Q5_1": Form(8, 32, np.float16, True),
    "Q2_K": Form(8, 16, np.float32, True),
    "Q3_K": Form(8, 16, np.float32, False),
    "Q4_K": Form(4, 32, np.float32, True),
    "Q5_K": Form(8, 32, np.float32, True),
    "Q6_K": Form(8, 16, np.float32, False),
    "Q8_K": Form(8, 32, np.float32, False),
}


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """The float32 numbers of 16-bit floats given as uint16; exact."""
    if kind == "F16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)  # a bfloat16 is the upper half of a float32


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """The nearest 16-bit floats as uint16, ties to even; a ValueError if a finite number is too large for float16."""
    x = np.ascontiguousarray(x, np.float32)
    if kind == "F16":
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        if (np.isinf(half) & np.isfinite(x)).any():
            largest = float(np.abs(x[np.isfinite(x)]).max())
            raise ValueError(f"{largest:.6g} exceeds 65504, the largest float16; use bfloat16 or float32")
        return half.view(np.uint16)
    bits = x.view(np.uint32)
    upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), upper)


class Quantized:
    """A frozen weight in fewer bits than float32, or its transpose."""

    __array_ufunc__ = None  # so `array @ weight` calls __rmatmul__ below instead of converting the whole weight
    ndim = 2


class FrozenWeight(Quantized):
    """A read-only weight (out, in). `x @ weight.T` and `dy @ weight` are the products of a linear layer."""

    kind: str
    shape: tuple[int, int]

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays that the weight consists of, each with one row per row of the weight."""
        raise NotImplementedError

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> FrozenWeight:
        """The weight with `function` applied to each of its arrays."""
        raise NotImplementedError

    def floats(self, rows: Any, dtype: Any = np.float32) -> np.ndarray:
        """The given rows as floats, (..., in); `rows` is a slice or an array of indices."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

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
        return f"{type(self).__name__}({self.kind}, {self.shape}, {self.nbytes:,} bytes)"


class HalfWeight(FrozenWeight):
    """A weight in bfloat16 ("BF16") or float16 ("F16")."""

    def __init__(self, kind: str, bits: np.ndarray) -> None:
        if kind not in ("BF16", "F16"):
            raise ValueError(f"unknown 16-bit type {kind!r}; choose from BF16, F16")
        if bits.ndim != 2 or bits.dtype != np.uint16:
            raise ValueError(
                f"{kind} numbers must have shape (out, in) and dtype uint16, got {bits.shape} and {bits.dtype}"
            )
        self.kind, self.bits = kind, bits  # (out, in)
        self.shape = (bits.shape[0], bits.shape[1])

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.bits]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> HalfWeight:
        return HalfWeight(self.kind, function(self.bits))

    def floats(self, rows: Any, dtype: Any = np.float32) -> np.ndarray:
        return widened(self.bits[rows], self.kind).astype(dtype, copy=False)  # eq QUANT.4


class QuantizedWeight(FrozenWeight):
    """A weight in blocks of codes, each block with a scale and, in some kinds, a minimum."""

    def __init__(self, kind: str, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> None:
        if kind not in FORMS:
            raise ValueError(f"unknown quantisation {kind!r}; choose from {', '.join(FORMS)}")
        self.kind = kind
        self.form = FORMS[kind]
        self.codes = codes  # (out, blocks, block) int8, or (out, blocks, 16) bytes: entries 0-15 low, 16-31 high
        self.scale = scale  # (out, blocks)
        self.minimum = minimum  # (out, blocks)
        self._check()
        self.shape = (codes.shape[0], codes.shape[1] * self.form.block)

    def _check(self) -> None:
        """Raises ValueError if codes or scales have a wrong shape or dtype."""
        n_bytes, dtype = self.form.n_bytes, np.int8 if self.form.bits == 8 else np.uint8
        if self.codes.shape[2:] != (n_bytes,) or self.codes.dtype != dtype:
            raise ValueError(
                f"{self.kind} codes must have shape (out, blocks, {n_bytes}) and dtype {dtype.__name__}, "
                f"got {self.codes.shape} and {self.codes.dtype}"
            )
        for scale in [self.scale, self.minimum] if self.form.has_minimum else [self.scale]:
            if scale is None or scale.shape != self.codes.shape[:2] or scale.dtype != self.form.scale:
                found = None if scale is None else (scale.shape, str(scale.dtype))
                raise ValueError(
                    f"{self.kind} codes of shape {self.codes.shape} require {np.dtype(self.form.scale).name} scales of "
                    f"shape {self.codes.shape[:2]}, got {found}"
                )

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.codes, self.scale, *([] if self.minimum is None else [self.minimum])]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> QuantizedWeight:
        return QuantizedWeight(self.kind, *map(function, self.arrays))

    @cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Each block's scale and offset, (out, blocks) float32."""
        scale = self.scale.astype(np.float32, copy=False)
        if self.kind == "Q4_0":
            return scale, -8 * scale
        return scale, scale[:0] if self.minimum is None else self.minimum.astype(np.float32, copy=False)

    def floats(self, rows: Any, dtype: Any = np.float32) -> np.ndarray:
        scale = self.scale[rows].astype(dtype)[..., None]  # (..., blocks, 1)
        codes = self.codes[rows]
        out = np.empty((*codes.shape[:-1], self.form.block), dtype)
        if self.form.bits == 8:
            out[...] = codes
        else:
            out[..., :16] = codes & 15
            out[..., 16:] = codes >> 4
        if self.kind == "Q4_0":
            out -= 8  # eq QUANT.2
        out *= scale  # eq QUANT.1
        if self.minimum is not None:
            out += self.minimum[rows].astype(dtype)[..., None]  # eq QUANT.3
        return out.reshape(*out.shape[:-2], self.shape[1])


class Transposed(Quantized):
    """The transpose wᵗ (in, out) of a frozen weight, sharing its arrays."""

    def __init__(self, weight: FrozenWeight) -> None:
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


def frozen_weight(value: Any) -> FrozenWeight | None:
    """The weight (out, in) of a parameter, which may be its transpose; None for an array of floats."""
    found = value.T if isinstance(value, Transposed) else value
    return found if isinstance(found, FrozenWeight) else None


def quantize(weight: np.ndarray, kind: str = "Q8_0") -> QuantizedWeight:
    """The weight (out, in) rounded to codes, each block scaled by its largest magnitude (Q4_1: by its range)."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise ValueError(
            f"cannot quantise a weight of shape {weight.shape}: it must be 2-D, its row length a multiple of {BLOCK}"
        )
    if kind not in KINDS:
        raise ValueError(f"unknown quantisation {kind!r}; choose from {', '.join(KINDS)}")
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
