"""The undefined symbols of an object file: LLVM aborts a process that loads one with a missing symbol."""

from __future__ import annotations

import struct

SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
SYMBOL_TABLE = 2  # a section's type
BY_THE_LOADER = "_GLOBAL_OFFSET_TABLE_"  # defined by the loader itself


def undefined(code: bytes) -> list[str]:
    """The undefined symbols of a 64-bit ELF object; empty for other formats."""
    if code[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count = struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HH", code, 58)
    sections = [SECTION.unpack_from(code, start + i * size) for i in range(count)]
    names = []
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for name, _, _, section, _, _ in SYMBOL.iter_unpack(code[offset : offset + length]):
            if name and section == 0:
                names.append(code[strings + name : code.index(b"\0", strings + name)].decode())
    return sorted({*names} - {BY_THE_LOADER})
