"""Messages between the checker and the process that runs a user's function: JSON and plain arrays, never pickle."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from onfoot.arrays import is_torch
from onfoot.check.guard import is_too_large

LONGEST = 2**32  # bytes; a longer message is not one of ours
Arrays = list[np.ndarray]


class Opaque:
    """Stands for a returned value that is neither an array nor a number nor a collection of them."""


def send(stream: IO[bytes], header: dict[str, Any], arrays: Arrays) -> None:
    """Writes one message: lengths, header, arrays."""
    text, blob = json.dumps(header).encode(), io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(blob, array, allow_pickle=False)
    stream.write(struct.pack(">QQ", len(text), blob.tell()) + text + blob.getvalue())
    stream.flush()


def receive(stream: IO[bytes], longest: int = LONGEST) -> tuple[dict[str, Any], Arrays]:
    """Reads one message; raises EOFError at the end of the stream, or if what arrives is not a message."""
    n_text, n_blob = struct.unpack(">QQ", _exactly(stream, 16))
    if n_text > longest or n_blob > longest:
        raise EOFError("not a message")
    text, blob = _exactly(stream, n_text), io.BytesIO(_exactly(stream, n_blob))
    arrays = []
    try:
        header = json.loads(text)
        while blob.tell() < n_blob:
            arrays.append(np.lib.format.read_array(blob, allow_pickle=False))
    except ValueError as error:
        raise EOFError("not a message") from error
    return header, arrays


def _exactly(stream: IO[bytes], n: int) -> bytes:
    found = bytearray()
    while len(found) < n:
        part = stream.read(n - len(found))
        if not part:
            raise EOFError("the stream ended")
        found += part
    return bytes(found)


def encode(value: Any, arrays: Arrays, most: int = sys.maxsize) -> dict[str, Any]:
    """Describes a value for JSON; its arrays are appended to `arrays`, unless they have more than `most` entries."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
        return {"value": value}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [encode(part, arrays, most) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[str(key), encode(part, arrays, most)] for key, part in value.items()]}
    array = None if is_too_large(value, most) else as_array(value)
    if array is None:
        dtype = getattr(value, "dtype", None) is not None and str(value.dtype)
        shape = list(value.shape) if is_too_large(value, most) else None
        return {"other": dtype, "type": type(value).__name__, "shape": shape}
    arrays.append(array)
    return {"array": len(arrays) - 1}


def without_mask(value: Any) -> Any:
    """A masked array with nan in place of its masked entries; anything else as it is."""
    return value.astype(np.float64).filled(np.nan) if np.ma.is_masked(value) and value.dtype.kind == "f" else value


def as_array(value: Any) -> np.ndarray | None:
    """Returns a NumPy array of numbers, or None if the value is not an array."""
    try:
        if is_torch(value):
            value = value.detach().cpu()
            value = value.numpy() if str(value.dtype) != "torch.bfloat16" else value.float().numpy()
        elif not hasattr(value, "__array__"):
            return None
        array = np.asarray(without_mask(value))
        if array.dtype.kind == "V":  # bfloat16, as JAX has it
            array = array.astype(np.float32)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return array if array.dtype.kind in "fiubc" else None


def decode(tree: dict[str, Any], arrays: Arrays, convert: Callable[[np.ndarray], Any] = lambda x: x) -> Any:
    """Returns the value that `encode` described, its arrays passed through `convert`."""
    ((kind, content), *rest) = tree.items()
    if kind == "array":
        return convert(arrays[content])
    if kind in ("tuple", "list"):
        parts = [decode(part, arrays, convert) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {key: decode(part, arrays, convert) for key, part in content}
    if kind == "other":
        opaque = type(rest[0][1], (Opaque,), {})()
        if content:
            opaque.dtype = content
        if tree.get("shape"):
            opaque.shape = tuple(tree["shape"])
        return opaque
    return content
