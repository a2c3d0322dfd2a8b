"""Reads and writes safetensors files: a JSON header, then arrays; loading one cannot run code.

Reading is lazy, supports bfloat16, which NumPy lacks, and gives a precise error for a damaged file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.formats.files import open_file, parse_json, plain_name, shown
from onfoot.formats.write import atomic_write
from onfoot.quantized import rounded, widened

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 32  # of an array in any version of NumPy


class Entry(NamedTuple):
    """A tensor in the file; offsets are counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile(Mapping[str, np.ndarray]):
    """The arrays of one file by name, each read on access."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is not a safetensors file, or is truncated ({size:,} bytes)")
            if length > HEADER_BYTES:
                raise ValueError(f"{self.path}: its header has {length:,} bytes; the limit is {HEADER_BYTES:,}")
            header = parse_json(file.read(length), f"{self.path} is not a safetensors file: its header is")
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} is not a safetensors file: its header is not a JSON object")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not isinstance(self.metadata, dict) or not all(isinstance(x, str) for x in self.metadata.values()):
            raise ValueError(f"{self.path} is not a safetensors file: its metadata must map names to strings")
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}
        self._start = 8 + length
        self._check_offsets(size - self._start)

    def _entry(self, name: str, entry: Any) -> Entry:
        """The checked header entry of a tensor."""
        if not _is_entry(entry):
            raise ValueError(f"{self.path}: invalid header entry for {plain_name(name)}")
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"{self.path}: {plain_name(name)} has shape {shown(shape)}; the limit is {MAX_DIMENSIONS} dimensions"
            )
        if dtype in _DTYPES and end - begin != np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape):
            raise ValueError(
                f"{self.path}: {plain_name(name)} has {end - begin} bytes, which does not match {dtype} {shown(shape)}"
            )
        return Entry(dtype, shape, begin, end)

    def _check_offsets(self, size: int) -> None:
        """Raises ValueError unless the tensors fill the file without gaps or overlaps."""
        offset = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != offset:
                raise ValueError(
                    f"{self.path}: {plain_name(name)} starts at byte {entry.begin:,} of the data, expected {offset:,}"
                )
            offset = entry.end
        if size < offset:
            raise ValueError(f"{self.path} is truncated: {self._start + size:,} bytes of {self._start + offset:,}")
        if size > offset:
            raise ValueError(f"{self.path} has {size - offset:,} bytes after its last tensor")

    def __getitem__(self, name: str) -> np.ndarray:
        raw = self.raw(name)
        return widened(raw, "BF16") if self.dtype(name) == "BF16" else raw

    def raw(self, name: str) -> np.ndarray:
        """The array as it is stored; bfloat16, which NumPy lacks, as uint16."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"{self.path}: {plain_name(name)} has dtype {shown(entry.dtype)}; supported: {', '.join(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[entry.dtype])
        raw = np.empty(entry.shape, dtype)
        with open_file(self.path) as file:  # read, not mapped: a mapped file that shrinks would crash the process
            file.seek(self._start + entry.begin)
            if raw.size and file.readinto(raw.reshape(-1).view(np.uint8).data) != raw.nbytes:
                raise ValueError(f"{self.path} became shorter while it was being read")
        return raw

    def dtype(self, name: str) -> str:
        """The dtype in the file, by its safetensors name such as F32 or BF16."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def write_tensors(path: str | Path, arrays: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
    """Writes named arrays, with the metadata entry that Hugging Face's loaders require.

    `dtypes` has the safetensors name of the dtype to write, for each array that has another one in memory.
    """
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items() if name != "BF16"}
    stored = {name: (dtypes or {}).get(name) or names[array.dtype] for name, array in arrays.items()}
    ordered = sorted(arrays, key=lambda name: (-np.dtype(_DTYPES[stored[name]]).itemsize, name))  # keeps each aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in ordered:
        shape, begin = tuple(arrays[name].shape), offset
        offset += np.dtype(_DTYPES[stored[name]]).itemsize * math.prod(shape)
        header[name] = {"dtype": stored[name], "shape": list(shape), "data_offsets": [begin, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(np.ascontiguousarray(_converted(name, to_numpy(arrays[name]), stored[name])).data)


def _converted(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """The array as it is stored in a file."""
    if dtype not in ("BF16", "F16") or array.dtype == np.float16:
        return array.astype(_DTYPES[dtype], copy=False)
    try:
        return rounded(array, dtype)
    except ValueError as error:
        raise ValueError(f"cannot write {name} as float16: {error}") from None


def _is_entry(entry: Any) -> bool:
    """Whether a header entry has a dtype, a shape and two offsets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    valid = all(isinstance(x, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in x) for x in (shape, offsets))
    return valid and len(entry["data_offsets"]) == 2 and entry["data_offsets"][0] <= entry["data_offsets"][1]
