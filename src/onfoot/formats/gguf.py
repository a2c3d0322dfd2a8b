"""GGUF files: metadata and tensors behind one binary header, read here without loading what is not asked for.

Every length is checked against the file before it is used, so that a truncated file is named as such.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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


class Entry(NamedTuple):
    """A tensor in the file. The shape is NumPy's: rows first."""

    shape: tuple[int, ...]
    type: str
    begin: int
    n_bytes: int


class _Cursor:
    """Reads a header from front to back."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.path, self.place = data, path, 0

    def take(self, n: int) -> int:
        """Moves on by n bytes; returns where they begin."""
        begin, self.place = self.place, self.place + n
        if n < 0 or self.place > len(self.data):
            raise ValueError(f"{self.path} is truncated: its header goes beyond its {len(self.data):,} bytes")
        return begin

    def number(self, code: str, n_bytes: int) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(n_bytes))[0]

    def text(self) -> str:
        n = self.number("Q", 8)
        begin = self.take(n)
        return self.data[begin : begin + n].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(*SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"{self.path}: metadata of the unknown type {kind}; the file is damaged")
        inner, n = self.number("I", 4), self.number("Q", 8)
        if inner in SCALARS:
            code, n_bytes = SCALARS[inner]
            return list(struct.unpack_from(f"<{n}{code}", self.data, self.take(n * n_bytes)))
        if n > len(self.data):
            self.take(n)  # more strings than bytes
        return [self.value(inner) for _ in range(n)]


class GgufFile:
    """The metadata of a file by key, and its tensors by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path} does not exist")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{self.path} is not a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, self.path)
        cursor.take(4)
        version = cursor.number("I", 4)
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        n_tensors, n_values = cursor.number("Q", 8), cursor.number("Q", 8)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I", 4))
        listed = []
        for _ in range(n_tensors):
            name = cursor.text()
            shape = tuple(cursor.number("Q", 8) for _ in range(cursor.number("I", 4)))[::-1]
            listed.append((name, shape, cursor.number("I", 4), cursor.number("Q", 8)))
        start = _aligned(cursor.place, int(self.metadata.get("general.alignment", 32)))
        self.tensors = {name: self._entry(name, shape, kind, start + at) for name, shape, kind, at in listed}

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
        type_name = TYPES.get(kind, f"type {kind}")
        if type_name not in KNOWN:
            raise ValueError(
                f"{self.path}: {name} is stored as {type_name}, which is not supported; known are {', '.join(KNOWN)}"
            )
        n = math.prod(shape)
        if type_name in FLOATS:
            n_bytes = n * np.dtype(FLOATS[type_name]).itemsize
        elif shape[-1] % BLOCK:
            raise ValueError(f"{self.path}: {name} has rows of {shape[-1]} numbers, no multiple of {BLOCK}")
        else:
            n_bytes = n // BLOCK * BLOCK_BYTES[type_name]
        if begin + n_bytes > len(self._data):
            raise ValueError(
                f"{self.path} is truncated: {name} ends at byte {begin + n_bytes:,}, the file at {len(self._data):,}"
            )
        return Entry(shape, type_name, begin, n_bytes)

    def read(self, name: str) -> np.ndarray | QuantizedWeight:
        """A tensor: floats as an array, blocks as they are."""
        entry = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, entry.n_bytes, entry.begin)
        if entry.type == "BF16":  # the upper half of a float32
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        if entry.type in FLOATS:
            return raw.view(FLOATS[entry.type]).reshape(entry.shape)
        blocks = raw.reshape(*entry.shape[:-1], -1, BLOCK_BYTES[entry.type])
        scale = blocks[..., :2].copy().view(np.float16)[..., 0]
        if entry.type == "Q4_1":
            least = blocks[..., 2:4].copy().view(np.float16)[..., 0]
            return QuantizedWeight("Q4_1", blocks[..., 4:].copy(), scale, least)
        codes = blocks[..., 2:].copy()
        return QuantizedWeight(entry.type, codes.view(np.int8) if entry.type == "Q8_0" else codes, scale)


def _aligned(place: int, to: int) -> int:
    return place + -place % to
