"""Files of others, opened with care: regular files only, no larger than they may be, and errors that name them.

A file may come from anyone. Whatever is in it, reading it ends with a value or with a ValueError of one line, and
nothing is allocated that the file's own size does not account for.
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

TEXT_BYTES = 100 << 20  # of a file that is read as a whole
JSON_VALUES = 1_000_000  # commas and brackets: Python needs up to 100 bytes of memory for each
JSON_DEPTH = 64


@contextmanager
def open_file(path: str | Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading. A pipe would wait for ever, a device has no end: neither is opened."""
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
    """All of a file that may have up to `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size:,} bytes; at most {limit:,} can be read")
        return file.read(limit)


def read_text(path: str | Path, limit: int = TEXT_BYTES) -> str:
    """A file's text, which has to be UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start:,}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ValueError that names it."""
    value = parse_json(read_bytes(path), f"{path} is")
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def parse_json(data: bytes | str, what: str) -> Any:
    """The value of a JSON text: no key twice in an object, a bounded depth, a bounded number of values.

    `what` begins the sentence "... not valid JSON", as in "config.json is".
    """
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} not valid UTF-8: {error.reason} at byte {error.start:,}") from None
    opened = data.count("[") + data.count("{")
    if len(data) > JSON_VALUES and opened + data.count(",") > JSON_VALUES:
        raise ValueError(f"{what} not valid JSON here: it has more than {JSON_VALUES:,} values")
    try:
        value = json.loads(data, object_pairs_hook=_object)
    except RecursionError:
        value = None
    except ValueError as error:
        raise ValueError(f"{what} not valid JSON: {one_line(error)}") from None
    if opened > JSON_DEPTH and (value is None or _deeper(value, JSON_DEPTH)):
        raise ValueError(f"{what} not valid JSON here: it is nested to more than {JSON_DEPTH} levels")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands there twice")
    return out


def _deeper(value: Any, levels: int) -> bool:
    """Whether there are lists or objects inside one another to more than so many levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inside = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
        level = [y for y in inside if isinstance(y, dict | list)]
    return bool(level)


def shown(value: Any) -> str:
    """A value of a file as it may stand in an error: on one line, shortened, without control characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def plain_name(name: str) -> str:
    """A name of a file in an error: as it is, or quoted and shortened where it has anything odd."""
    return name if re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) else shown(name)


def one_line(error: BaseException | str) -> str:
    """An error's text on one line, shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:480]}…"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Puts the file's name before the text of a ValueError that does not have it yet."""
    try:
        yield
    except ValueError as error:
        text = one_line(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from None
