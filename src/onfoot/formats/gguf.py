"""Reads GGUF files: a binary header with metadata, then tensors, each loaded on request.

Every length is checked against the file's size before it is used, so that a truncated file gives a clear error.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.formats.files import open_file, plain_name, shown
from onfoot.formats.gguf_blocks import BLOCKS, unpacked
from onfoot.quantized import FrozenWeight, HalfWeight, widened

# Metadata type ids of the format: (struct code, bytes).
SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
STRING, ARRAY = 8, 9
# Tensor type ids of the format, including those that are not supported, for error messages.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
SUPPORTED = (*FLOATS, *BLOCKS)
HEADER_BYTES = 32 << 20  # a vocabulary of 250,000 tokens with its merges needs half of it
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4  # of a tensor
MAX_DEPTH = 4  # of nested metadata arrays


class Entry(NamedTuple):
    """A tensor in the file. The shape is in NumPy's order, rows first."""

    shape: tuple[int, ...]
    type: str
    begin: int
    n_bytes: int


class _HeaderReader:
    """Reads a header sequentially; `data` is the first part of a file of `size` bytes."""

    def __init__(self, data: bytes, path: Path, size: int) -> None:
        self.data, self.path, self.size, self.offset = data, path, size, 0

    def skip(self, n: int) -> int:
        """Moves the offset forward by n bytes; returns the old one."""
        begin, self.offset = self.offset, self.offset + n
        if self.offset > self.size:
            raise ValueError(f"{self.path} is truncated: its header extends beyond its {self.size:,} bytes")
        if self.offset > len(self.data):
            raise ValueError(f"{self.path}: its header exceeds {HEADER_BYTES:,} bytes")
        return begin

    def check_count(self, n: int, n_bytes: int) -> int:
        """n, if n items of at least n_bytes each fit into the rest of the file; otherwise raises ValueError."""
        if n * n_bytes > self.size - self.offset:
            self.skip(n * n_bytes)
        return n

    def number(self, code: str, n_bytes: int) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(n_bytes))[0]

    def text(self) -> str:
        n = self.number("Q", 8)
        begin = self.skip(n)
        return self.data[begin : begin + n].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(*SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"{self.path}: unknown metadata type {kind}; the file is damaged")
        if depth == MAX_DEPTH:
            raise ValueError(f"{self.path}: a metadata array has more than {MAX_DEPTH} levels")
        inner, n = self.number("I", 4), self.number("Q", 8)
        if inner in SCALARS:
            code, n_bytes = SCALARS[inner]
            return np.frombuffer(self.data, f"<{code}", n, self.skip(self.check_count(n, n_bytes) * n_bytes))
        return [self.value(inner, depth + 1) for _ in range(self.check_count(n, 8))]


class GgufFile:
    """A file's metadata by key and tensors by name. Numeric arrays in the metadata are NumPy arrays."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.exists(self.path):
            raise ValueError(f"{self.path} does not exist")
        with open_file(self.path) as file:
            self.size = os.fstat(file.fileno()).st_size
            data = file.read(HEADER_BYTES)
        if data[:4] != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file")
        header = _HeaderReader(data, self.path, self.size)
        header.skip(4)
        version = header.number("I", 4)
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        n_tensors, n_values = header.number("Q", 8), header.number("Q", 8)
        self.metadata: dict[str, Any] = {}
        for _ in range(header.check_count(n_values, 13)):
            key = header.text()
            if key in self.metadata:
                raise ValueError(f"{self.path}: duplicate metadata key {shown(key)}")
            self.metadata[key] = header.value(header.number("I", 4))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(header.check_count(n_tensors, 24)):
            name = header.text()
            if name in infos:
                raise ValueError(f"{self.path}: duplicate tensor {plain_name(name)}")
            shape = tuple(header.number("Q", 8) for _ in range(self._dimensions(name, header.number("I", 4))))[::-1]
            infos[name] = shape, header.number("I", 4), header.number("Q", 8)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {shown(alignment)}"
            )
        start = header.offset + -header.offset % alignment
        self.tensors: dict[str, Entry] = {}
        for name, (shape, kind, offset) in infos.items():
            if offset % alignment:
                raise ValueError(
                    f"{self.path}: {plain_name(name)} starts at {offset:,}, which is not a multiple of {alignment}"
                )
            self.tensors[name] = self._entry(name, shape, kind, start + offset)
        self._check_overlaps()

    def _dimensions(self, name: str, n: int) -> int:
        if not 1 <= n <= MAX_DIMENSIONS:
            raise ValueError(f"{self.path}: {plain_name(name)} has {n} dimensions; 1 to {MAX_DIMENSIONS} are supported")
        return n

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
        type_name = TYPES.get(kind, f"type {kind}")
        if type_name not in SUPPORTED:
            types = ", ".join(SUPPORTED)
            raise ValueError(
                f"{self.path}: {plain_name(name)} is stored as {type_name}, which is not supported; supported: {types}"
            )
        n = math.prod(shape)
        if n == 0:
            raise ValueError(f"{self.path}: {plain_name(name)} has shape {shape}, which has no elements")
        if type_name in FLOATS:
            n_bytes = n * np.dtype(FLOATS[type_name]).itemsize
        else:
            block, block_bytes = BLOCKS[type_name]
            if shape[-1] % block:
                raise ValueError(
                    f"{self.path}: {plain_name(name)} has rows of {shape[-1]} numbers, not a multiple of {block}"
                )
            n_bytes = n // block * block_bytes
        if begin + n_bytes > self.size:
            raise ValueError(
                f"{self.path} is truncated: {plain_name(name)} ends at byte {begin + n_bytes:,}, "
                f"the file at {self.size:,}"
            )
        return Entry(shape, type_name, begin, n_bytes)

    def _check_overlaps(self) -> None:
        """Raises ValueError if two tensors share bytes."""
        end = 0
        for name, entry in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if entry.begin < end:
                raise ValueError(f"{self.path}: {plain_name(name)} overlaps the tensor before it")
            end = entry.begin + entry.n_bytes

    def _bytes(self, entry: Entry) -> np.ndarray:
        """A tensor's bytes; read, not memory-mapped: a mapped file that shrinks would crash the process."""
        raw = np.empty(entry.n_bytes, np.uint8)
        with open_file(self.path) as file:
            file.seek(entry.begin)
            if file.readinto(raw.data) != entry.n_bytes:
                raise ValueError(f"{self.path} became shorter while it was being read")
        return raw

    def read(self, name: str) -> np.ndarray | FrozenWeight:
        """The tensor: an array of floats, or for a matrix in 16 bits or in blocks a FrozenWeight."""
        entry = self.tensors[name]
        raw = self._bytes(entry)
        if entry.type in BLOCKS:
            return unpacked(entry.type, raw.reshape(entry.shape[0], -1, BLOCKS[entry.type][1]))
        if entry.type == "F32":
            return raw.view(np.float32).reshape(entry.shape)
        bits = raw.view(np.uint16).reshape(entry.shape)
        return HalfWeight(entry.type, bits) if bits.ndim == 2 else widened(bits, entry.type)
