"""Safe reading of untrusted files: regular files only, of limited size, with errors that name the file.

Whatever a file contains, reading it returns a value or raises a one-line ValueError, and never allocates more memory
than the file's size accounts for.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

TEXT_BYTES = 100 << 20  # largest file that is read at once
JSON_VALUES = 1_000_000  # commas and brackets: Python needs up to 100 bytes of memory per value
JSON_DEPTH = 64


@contextmanager
def open_file(path: str | Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading. Pipes, which can block, and devices, which can be endless, are rejected."""
    try:
        with open(path, "rb", opener=_opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path} is not a regular file")
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: str | Path, limit: int = TEXT_BYTES) -> bytes:
    """The contents of a file of at most `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size:,} bytes; the limit is {limit:,}")
        return file.read(limit)


def read_text(path: str | Path, limit: int = TEXT_BYTES) -> str:
    """The text of a UTF-8 file."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start:,}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; errors name the file."""
    value = parse_json(read_bytes(path), f"{path} is")
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    return value


def parse_json(data: bytes | str, what: str) -> Any:
    """The value of a JSON text; duplicate keys, deep nesting and too many values are errors.

    `what` starts the error message "... not valid JSON", for example "config.json is".
    """
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} not valid UTF-8: {error.reason} at byte {error.start:,}") from None
    opened = data.count("[") + data.count("{")
    if len(data) > JSON_VALUES and opened + data.count(",") > JSON_VALUES:
        raise ValueError(f"{what} too large: it has more than {JSON_VALUES:,} JSON values")
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except RecursionError:
        value = None
    except ValueError as error:
        raise ValueError(f"{what} not valid JSON: {one_line(error)}") from None
    if opened > JSON_DEPTH and (value is None or _is_deeper(value, JSON_DEPTH)):
        raise ValueError(f"{what} nested too deeply: it has more than {JSON_DEPTH} levels of JSON")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {shown(duplicate)}")
    return out


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than `levels`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        children = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
        level = [y for y in children if isinstance(y, dict | list)]
    return bool(level)


def shown(value: Any) -> str:
    """The repr of a value from a file, for error messages: one line, shortened, without control characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def plain_name(name: str) -> str:
    """A name from a file, for error messages: unchanged, or as `shown` if it is long or has special characters."""
    return name if re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) else shown(name)


def one_line(error: BaseException | str) -> str:
    """The text of an error, on one line and shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:480]}…"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Prefixes a ValueError's message with the file's name, unless it already has it."""
    try:
        yield
    except ValueError as error:
        text = one_line(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from None
