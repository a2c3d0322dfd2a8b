"""Safetensors files: named arrays behind a JSON header, with nothing in them that could run.

Reading is lazy, knows bfloat16, which NumPy does not, and says what is wrong with a damaged file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.formats.files import open_file, parse_json, plain_name, shown

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


HEADER_BYTES = 100_000_000  # the format's own limit
DIMENSIONS = 32  # of an array, in every version of NumPy


class Entry(NamedTuple):
    """A tensor in the file: its place is counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile(Mapping[str, np.ndarray]):
    """The arrays of one file by name, each read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is not a safetensors file, or is truncated ({size:,} bytes)")
            if length > HEADER_BYTES:
                raise ValueError(f"{self.path}: its header has {length:,} bytes; at most {HEADER_BYTES:,} are allowed")
            header = parse_json(file.read(length), f"{self.path} is not a safetensors file: its header is")
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} is not a safetensors file: its header holds no names")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not isinstance(self.metadata, dict) or not all(isinstance(x, str) for x in self.metadata.values()):
            raise ValueError(f"{self.path} is not a safetensors file: its metadata does not map names to strings")
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}
        self._start = 8 + length
        self._check_places(size - self._start)

    def _entry(self, name: str, entry: Any) -> Entry:
        """A header's entry, checked."""
        if not _is_entry(entry):
            raise ValueError(f"{self.path}: the header's entry for {plain_name(name)} is not one of a tensor")
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > DIMENSIONS:
            raise ValueError(f"{self.path}: {plain_name(name)} has the shape {shown(shape)}, which no array can have")
        if dtype in _DTYPES and end - begin != np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape):
            raise ValueError(
                f"{self.path}: {plain_name(name)} has {end - begin} bytes, not those of {dtype} {shown(shape)}"
            )
        return Entry(dtype, shape, begin, end)

    def _check_places(self, size: int) -> None:
        """The tensors must lie one behind the other and fill the file: none overlaps, nothing hides between them."""
        place = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != place:
                raise ValueError(
                    f"{self.path}: {plain_name(name)} begins at byte {entry.begin:,} of the data, not {place:,}"
                )
            place = entry.end
        if size < place:
            raise ValueError(f"{self.path} is truncated: {self._start + size:,} bytes of {self._start + place:,}")
        if size > place:
            raise ValueError(f"{self.path} has {size - place:,} bytes behind its last tensor")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"{self.path}: {plain_name(name)} has dtype {shown(entry.dtype)}; known are {', '.join(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[entry.dtype])
        raw = np.empty(entry.shape, dtype)
        with open_file(self.path) as file:  # read, not mapped: a file that shrinks meanwhile must not end the process
            file.seek(self._start + entry.begin)
            if raw.size and file.readinto(raw.reshape(-1).view(np.uint8).data) != raw.nbytes:
                raise ValueError(f"{self.path} has become shorter while it was read")
        if entry.dtype == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw

    def dtype(self, name: str) -> str:
        """The dtype in the file, by its safetensors name: F32, BF16 ..."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def write_tensors(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes named arrays. The metadata entry is what Hugging Face's loaders look for."""
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items() if name != "BF16"}
    ordered = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # so that each stays aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in ordered:
        array = arrays[name]
        header[name] = {
            "dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [place, place + array.nbytes],
        }  # fmt: skip
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(np.ascontiguousarray(arrays[name]).data)


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` once it is whole: a failure leaves the old file as it was."""
    final = Path(path)
    temporary = final.with_name(f"{final.name}.new")
    try:
        yield temporary
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_entry(entry: Any) -> bool:
    """Whether a header's entry has a dtype, a shape and two offsets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    whole = all(isinstance(x, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in x) for x in (shape, offsets))
    return whole and len(entry["data_offsets"]) == 2 and entry["data_offsets"][0] <= entry["data_offsets"][1]
