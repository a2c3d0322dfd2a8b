"""Writes GGUF files: header, metadata, the list of tensors, then their aligned data, one tensor at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.formats.gguf import ARRAY, FLOATS, STRING, TYPES
from onfoot.formats.gguf_blocks import BLOCKS
from onfoot.formats.write import atomic_write
from onfoot.quantized import BLOCK, CHUNK, QuantizedWeight, quantize

ALIGNMENT = 32
VERSION = 3
BOOL, UINT32, INT32, FLOAT32 = 7, 4, 5, 6  # metadata types
TYPE_IDS = {name: number for number, name in TYPES.items()}
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
LARGEST_F16 = 65504.0


class Tensor(NamedTuple):
    """A tensor to write. The shape is in NumPy's order; `chunks` yields its data, which must have n_bytes in all."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    chunks: Callable[[], Iterable[bytes]]


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Writes a file; each tensor's data is made when it is written, so that only one is in memory."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(key, value)
        parts += [_text(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]  # the fastest first
        parts += [_text(tensor.name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims)]
        parts += [struct.pack("<IQ", TYPE_IDS[tensor.type], offset)]
        offset += tensor.n_bytes + -tensor.n_bytes % ALIGNMENT
    header = b"".join(parts)
    with atomic_write(path) as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for tensor in tensors:
            written = sum(file.write(chunk) for chunk in tensor.chunks())
            if written != tensor.n_bytes:
                raise ValueError(f"{tensor.name} has {written:,} bytes of data, expected {tensor.n_bytes:,}")
            file.write(bytes(-written % ALIGNMENT))


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """The type id of a metadata value, and its bytes."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _text(value)
    if isinstance(value, np.ndarray) and value.dtype in (np.int32, np.float32):
        inner = INT32 if value.dtype == np.int32 else FLOAT32
        return ARRAY, struct.pack("<IQ", inner, value.size) + value.tobytes()
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(_text, value))
    raise TypeError(f"{key}: cannot write a {type(value).__name__}")


def float_tensor(name: str, shape: tuple[int, ...], type_: str, values: Callable[[], np.ndarray]) -> Tensor:
    """A tensor of floats, rounded to a type of WRITABLE when it is written."""
    n = int(np.prod(shape))
    if type_ in FLOATS:
        n_bytes = n * np.dtype(FLOATS[type_]).itemsize
    elif shape[-1] % BLOCK:
        raise ValueError(
            f"{name} has rows of {shape[-1]} numbers; {type_} needs a multiple of {BLOCK}: choose f32, f16 or bf16"
        )
    else:
        n_bytes = n // BLOCK * BLOCKS[type_][1]
    return Tensor(name, shape, type_, n_bytes, lambda: _rounded(name, values(), type_))


def quantized_tensor(name: str, weight: QuantizedWeight) -> Tensor:
    """A quantised weight with its own blocks."""
    n_bytes = weight.shape[0] * weight.shape[1] // BLOCK * BLOCKS[weight.kind][1]
    return Tensor(name, weight.shape, weight.kind, n_bytes, lambda: [blocks(weight).tobytes()])


def _rounded(name: str, values: np.ndarray, type_: str) -> Iterator[bytes]:
    """The bytes of an array in a type, a few rows at a time."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(CHUNK // rows.shape[1], 1)
    for i in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[i : i + step], np.float32)
        if type_ == "F16" and not np.abs(part).max() <= LARGEST_F16:
            raise ValueError(f"{name} has values beyond ±{LARGEST_F16:g}, the range of f16; choose bf16 or f32")
        yield encode(part, type_).tobytes()


def encode(rows: np.ndarray, type_: str) -> np.ndarray:
    """Float32 rows (n, in) in a type of WRITABLE, as an array of its storage type."""
    if type_ == "F32":
        return rows
    if type_ == "F16":
        return rows.astype(np.float16)
    if type_ == "BF16":
        return to_bfloat16(rows)
    return blocks(quantize(rows, type_))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 64, rounded).astype(np.uint16)


def blocks(weight: QuantizedWeight) -> np.ndarray:
    """The blocks of a quantised weight as in a file, (out, blocks, bytes): scale, minimum of a Q4_1 block, codes."""
    scales = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    parts = [np.ascontiguousarray(x)[..., None].view(np.uint8) for x in scales]
    return np.concatenate([*parts, np.ascontiguousarray(weight.codes).view(np.uint8)], -1)
