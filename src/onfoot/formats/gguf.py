"""GGUF files: metadata and tensors behind one binary header, read here without loading what is not asked for.

Every length is checked against the file before it is used, so that a truncated file is named as such.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.formats.files import open_file, plain_name, shown
from onfoot.quantized import BLOCK, QuantizedWeight

# The format's numbers for types of metadata: (struct code, bytes).
SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
STRING, ARRAY = 8, 9
# The format's numbers for types of tensors, so that those which cannot be read are refused by name.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of 32 numbers
KNOWN = (*FLOATS, *BLOCK_BYTES)
HEADER_BYTES = 32 << 20  # vocabularies of 250,000 tokens with their merges need half of it
ALIGNMENT = 1 << 16
DIMENSIONS = 4  # of a tensor
DEPTH = 4  # of arrays in arrays


class Entry(NamedTuple):
    """A tensor in the file. The shape is NumPy's: rows first."""

    shape: tuple[int, ...]
    type: str
    begin: int
    n_bytes: int


class _Cursor:
    """Reads a header from front to back; `data` is its beginning, or all of it, and the file has `size` bytes."""

    def __init__(self, data: bytes, path: Path, size: int) -> None:
        self.data, self.path, self.size, self.place = data, path, size, 0

    def take(self, n: int) -> int:
        """Moves on by n bytes; returns where they begin."""
        begin, self.place = self.place, self.place + n
        if self.place > self.size:
            raise ValueError(f"{self.path} is truncated: its header goes beyond its {self.size:,} bytes")
        if self.place > len(self.data):
            raise ValueError(f"{self.path}: its header has more than {HEADER_BYTES:,} bytes")
        return begin

    def count(self, n: int, n_bytes: int) -> int:
        """A number of things of at least so many bytes each, which must be there."""
        if n * n_bytes > self.size - self.place:
            self.take(n * n_bytes)
        return n

    def number(self, code: str, n_bytes: int) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(n_bytes))[0]

    def text(self) -> str:
        n = self.number("Q", 8)
        begin = self.take(n)
        return self.data[begin : begin + n].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(*SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"{self.path}: metadata of the unknown type {kind}; the file is damaged")
        if depth == DEPTH:
            raise ValueError(f"{self.path}: an array in its metadata has more than {DEPTH} levels")
        inner, n = self.number("I", 4), self.number("Q", 8)
        if inner in SCALARS:
            code, n_bytes = SCALARS[inner]
            return np.frombuffer(self.data, f"<{code}", n, self.take(self.count(n, n_bytes) * n_bytes))
        return [self.value(inner, depth + 1) for _ in range(self.count(n, 8))]


class GgufFile:
    """The metadata of a file by key, and its tensors by name. Arrays of numbers in the metadata are NumPy's."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.exists(self.path):
            raise ValueError(f"{self.path} does not exist")
        with open_file(self.path) as file:
            self.size = os.fstat(file.fileno()).st_size
            data = file.read(HEADER_BYTES)
        if data[:4] != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file")
        cursor = _Cursor(data, self.path, self.size)
        cursor.take(4)
        version = cursor.number("I", 4)
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        n_tensors, n_values = cursor.number("Q", 8), cursor.number("Q", 8)
        self.metadata: dict[str, Any] = {}
        for _ in range(cursor.count(n_values, 13)):
            key = cursor.text()
            if key in self.metadata:
                raise ValueError(f"{self.path} has {shown(key)} twice in its metadata")
            self.metadata[key] = cursor.value(cursor.number("I", 4))
        listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(cursor.count(n_tensors, 24)):
            name = cursor.text()
            if name in listed:
                raise ValueError(f"{self.path} has the tensor {plain_name(name)} twice")
            shape = tuple(cursor.number("Q", 8) for _ in range(self._dimensions(name, cursor.number("I", 4))))[::-1]
            listed[name] = shape, cursor.number("I", 4), cursor.number("Q", 8)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: an alignment of {shown(alignment)}; a power of two up to {ALIGNMENT} is needed"
            )
        start = cursor.place + -cursor.place % alignment
        self.tensors: dict[str, Entry] = {}
        for name, (shape, kind, at) in listed.items():
            if at % alignment:
                raise ValueError(
                    f"{self.path}: {plain_name(name)} begins at {at:,}, which is no multiple of {alignment}"
                )
            self.tensors[name] = self._entry(name, shape, kind, start + at)
        self._check_apart()

    def _dimensions(self, name: str, n: int) -> int:
        if not 1 <= n <= DIMENSIONS:
            raise ValueError(f"{self.path}: {plain_name(name)} has {n} dimensions; 1 to {DIMENSIONS} can be read")
        return n

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
        type_name = TYPES.get(kind, f"type {kind}")
        if type_name not in KNOWN:
            known = ", ".join(KNOWN)
            raise ValueError(
                f"{self.path}: {plain_name(name)} is stored as {type_name}, which is not supported; known are {known}"
            )
        n = math.prod(shape)
        if n == 0:
            raise ValueError(f"{self.path}: {plain_name(name)} has the shape {shape}, without a number in it")
        if type_name in FLOATS:
            n_bytes = n * np.dtype(FLOATS[type_name]).itemsize
        elif shape[-1] % BLOCK:
            raise ValueError(f"{self.path}: {plain_name(name)} has rows of {shape[-1]} numbers, no multiple of {BLOCK}")
        else:
            n_bytes = n // BLOCK * BLOCK_BYTES[type_name]
        if begin + n_bytes > self.size:
            raise ValueError(
                f"{self.path} is truncated: {plain_name(name)} ends at byte {begin + n_bytes:,}, "
                f"the file at {self.size:,}"
            )
        return Entry(shape, type_name, begin, n_bytes)

    def _check_apart(self) -> None:
        """No two tensors may share bytes."""
        end = 0
        for name, entry in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if entry.begin < end:
                raise ValueError(f"{self.path}: {plain_name(name)} overlaps with the tensor before it")
            end = entry.begin + entry.n_bytes

    def _bytes(self, entry: Entry) -> np.ndarray:
        """A tensor's bytes: read, not mapped, for a file that shrinks meanwhile must not end the process."""
        raw = np.empty(entry.n_bytes, np.uint8)
        with open_file(self.path) as file:
            file.seek(entry.begin)
            if file.readinto(raw.data) != entry.n_bytes:
                raise ValueError(f"{self.path} has become shorter while it was read")
        return raw

    def read(self, name: str) -> np.ndarray | QuantizedWeight:
        """A tensor: floats as an array, blocks as they are."""
        entry = self.tensors[name]
        raw = self._bytes(entry)
        if entry.type == "BF16":  # the upper half of a float32
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        if entry.type in FLOATS:
            return raw.view(FLOATS[entry.type]).reshape(entry.shape)
        blocks = raw.reshape(*entry.shape[:-1], -1, BLOCK_BYTES[entry.type])
        scale = blocks[..., :2].copy().view(np.float16)[..., 0]
        if entry.type == "Q4_1":
            minimum = blocks[..., 2:4].copy().view(np.float16)[..., 0]
            return QuantizedWeight("Q4_1", blocks[..., 4:].copy(), scale, minimum)
        codes = blocks[..., 2:].copy()
        return QuantizedWeight(entry.type, codes.view(np.int8) if entry.type == "Q8_0" else codes, scale)
