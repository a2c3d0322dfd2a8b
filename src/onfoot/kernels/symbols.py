"""The symbols of an object file: what it needs, and what it defines for others.

LLVM aborts a process that loads an object with a missing symbol, and links one of two functions of the same name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
SYMBOL_TABLE = 2  # a section's type
LOCAL = 0  # a symbol's binding: not visible to other object files
BY_THE_LOADER = "_GLOBAL_OFFSET_TABLE_"  # defined by the loader itself


def undefined(code: bytes) -> list[str]:
    """The undefined symbols of a 64-bit ELF object; empty for other formats."""
    return sorted({name for name, _, section in _symbols(code) if section == 0} - {BY_THE_LOADER})


def defined(code: bytes) -> list[str]:
    """The symbols that a 64-bit ELF object defines for others; empty for other formats."""
    return sorted(name for name, binding, section in _symbols(code) if section != 0 and binding != LOCAL)


def _symbols(code: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, binding, section) of every symbol with a name."""
    if code[:6] != b"\x7fELF\x02\x01":
        return
    start, size, count = struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HH", code, 58)
    sections = [SECTION.unpack_from(code, start + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for name, info, _, section, _, _ in SYMBOL.iter_unpack(code[offset : offset + length]):
            if name:
                yield code[strings + name : code.index(b"\0", strings + name)].decode(), info >> 4, section
