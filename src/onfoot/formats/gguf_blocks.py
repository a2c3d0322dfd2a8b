"""Unpacks the blocks of quantised GGUF tensors into codes and scales; what they mean is in `quantized`.

The old types have blocks of 32 numbers with float16 scales. The K-quants have super-blocks of 256 numbers: a float16
scale, and a small integer for every 16 or 32 numbers that multiplies it (`_scales_and_minima` and below).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.quantized import FORMS, QuantizedWeight

SUPER = 256  # numbers per super-block of a K-quant
# type: (numbers per block, bytes per block)
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (SUPER, 84),
    "Q3_K": (SUPER, 110), "Q4_K": (SUPER, 144), "Q5_K": (SUPER, 176), "Q6_K": (SUPER, 210), "Q8_K": (SUPER, 292),
}  # fmt: skip

Parts = tuple[np.ndarray, ...]  # codes (..., 32 or more), scales, and minima if the kind has them


def unpacked(kind: str, raw: np.ndarray) -> QuantizedWeight:
    """The weight whose rows consist of the blocks `raw`, (rows, blocks, bytes per block)."""
    form, rows = FORMS[kind], raw.shape[0]
    codes, *scales = _UNPACK[kind](raw)
    codes = codes.reshape(rows, -1, form.block)
    if form.bits == 4:
        codes = codes[..., :16] | (codes[..., 16:] << 4)
    codes = np.ascontiguousarray(codes.astype(np.int8 if form.bits == 8 else np.uint8, copy=False))
    return QuantizedWeight(kind, codes, *(np.ascontiguousarray(x.reshape(codes.shape[:2])) for x in scales))


def _cut(raw: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """The fields of each block, which have these sizes in bytes."""
    return np.split(raw, np.cumsum(sizes)[:-1], axis=-1)


def _numbers(field: np.ndarray, dtype: type) -> np.ndarray:
    """The bytes of a field as numbers."""
    return np.ascontiguousarray(field).view(dtype)


def _bit_planes(field: np.ndarray, group: int, bits: int) -> np.ndarray:
    """Codes of `bits` bits: those in the lowest bits of `group` bytes come first, then those in the next bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]  # (8 / bits, 1)
    planes = (field.reshape(*field.shape[:-1], -1, 1, group) >> shifts) & np.uint8((1 << bits) - 1)
    return planes.reshape(*field.shape[:-1], -1)


def _q8_0(raw: np.ndarray) -> Parts:
    scale, codes = _cut(raw, 2, 32)
    return codes.view(np.int8), _numbers(scale, np.float16)


def _q4_0(raw: np.ndarray) -> Parts:
    scale, codes = _cut(raw, 2, 16)
    return _bit_planes(codes, 16, 4), _numbers(scale, np.float16)


def _q4_1(raw: np.ndarray) -> Parts:
    scale, minimum, codes = _cut(raw, 2, 2, 16)
    return _bit_planes(codes, 16, 4), _numbers(scale, np.float16), _numbers(minimum, np.float16)


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes from 16 bytes with the four low bits of 32 numbers, and 32 bits, the fifth of each."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return _bit_planes(low, 16, 4) | (fifth << 4)


def _q5_0(raw: np.ndarray) -> Parts:
    scale, high, low = _cut(raw, 2, 4, 16)
    return _five_bits(low, high).astype(np.int8) - np.int8(16), _numbers(scale, np.float16)


def _q5_1(raw: np.ndarray) -> Parts:
    scale, minimum, high, low = _cut(raw, 2, 2, 4, 16)
    return _five_bits(low, high), _numbers(scale, np.float16), _numbers(minimum, np.float16)


def _scaled(factor: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """float16 factors (..., 2 bytes) times the integers of their super-block: exact in float32."""
    return _numbers(factor, np.float16).astype(np.float32) * integers.astype(np.float32)


def _q2_k(raw: np.ndarray) -> Parts:
    both, codes, factor, minimum = _cut(raw, 16, 64, 2, 2)  # a byte per 16 numbers: scale low, minimum high
    return _bit_planes(codes, 32, 2), _scaled(factor, both & 15), -_scaled(minimum, both >> 4)


def _q3_k(raw: np.ndarray) -> Parts:
    high, low, packed, factor = _cut(raw, 32, 64, 12, 2)
    codes = _bit_planes(low, 32, 2).astype(np.int8) - 4 * (1 - _bit_planes(high, 32, 1).astype(np.int8))
    four, two = _cut(packed, 8, 4)  # the scales of 16 blocks: four low bits each, then two high bits each
    scales = _bit_planes(four, 8, 4) | (_bit_planes(two, 4, 2) << 4)
    return codes, _scaled(factor, scales.astype(np.int8) - np.int8(32))


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minima of eight blocks from 12 bytes.

    Four bytes have the first four scales, four the first four minima. Their two highest bits, and the last four bytes,
    make up the other four: scales low, minima high.
    """
    scales, minima, rest = _cut(packed, 4, 4, 4)
    more_scales, more_minima = (rest & 15) | (scales >> 6 << 4), (rest >> 4) | (minima >> 6 << 4)
    return np.concatenate([scales & 63, more_scales], -1), np.concatenate([minima & 63, more_minima], -1)


def _q4_k(raw: np.ndarray) -> Parts:
    factor, minimum, packed, codes = _cut(raw, 2, 2, 12, 128)
    scales, minima = _scales_and_minima(packed)
    return _bit_planes(codes, 32, 4), _scaled(factor, scales), -_scaled(minimum, minima)


def _q5_k(raw: np.ndarray) -> Parts:
    factor, minimum, packed, high, low = _cut(raw, 2, 2, 12, 32, 128)
    scales, minima = _scales_and_minima(packed)
    codes = _bit_planes(low, 32, 4) | (_bit_planes(high, 32, 1) << 4)
    return codes, _scaled(factor, scales), -_scaled(minimum, minima)


def _q6_k(raw: np.ndarray) -> Parts:
    low, high, scales, factor = _cut(raw, 128, 64, 16, 2)
    codes = _bit_planes(low, 64, 4) | (_bit_planes(high, 32, 2) << 4)
    return codes.astype(np.int8) - np.int8(32), _scaled(factor, scales.view(np.int8))


def _q8_k(raw: np.ndarray) -> Parts:
    scale, codes, _ = _cut(raw, 4, SUPER, 32)  # the last field has sums of codes, which nothing needs here
    return codes.view(np.int8), np.repeat(_numbers(scale, np.float32), SUPER // FORMS["Q8_K"].block, axis=-1)


_UNPACK: dict[str, Callable[[np.ndarray], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k,
}  # fmt: skip
