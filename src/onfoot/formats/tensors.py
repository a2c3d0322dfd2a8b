"""Safetensors files: named arrays behind a JSON header, with nothing in them that could run.

Reading is lazy (a memory map), knows bfloat16, which NumPy does not, and says what is wrong with a damaged file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


class TensorFile(Mapping[str, np.ndarray]):
    """The arrays of one file by name, each read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is not a safetensors file, or is truncated ({size:,} bytes)")
            try:
                header: dict[str, Any] = json.loads(file.read(length))
            except ValueError:
                raise ValueError(f"{self.path} is not a safetensors file: its header is not JSON") from None
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} is not a safetensors file: its header holds no names")
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        for name, entry in header.items():
            if not _is_entry(entry):
                raise ValueError(f"{self.path}: the header's entry for {name!r} is not one of a tensor")
        self._entries = header
        self._start = 8 + length
        end = self._start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < end:
            raise ValueError(f"{self.path} is truncated: {size:,} bytes of {end:,}")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{self.path}: {name} has dtype {entry['dtype']}; known are {', '.join(_DTYPES)}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        if end - begin != dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"{self.path}: {name} has {end - begin} bytes, not those of {entry['dtype']} {shape}")
        if end == begin:  # an empty array cannot be mapped
            return np.zeros(shape, dtype)
        raw = np.memmap(self.path, dtype=dtype, mode="r", offset=self._start + begin, shape=shape)
        if entry["dtype"] == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw

    def dtype(self, name: str) -> str:
        """The dtype in the file, by its safetensors name: F32, BF16 ..."""
        return self._entries[name]["dtype"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

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
    whole = all(isinstance(x, list) and all(type(n) is int and n >= 0 for n in x) for x in (shape, offsets))
    return whole and len(entry["data_offsets"]) == 2
