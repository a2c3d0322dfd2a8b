"""Options of two values, which may be written with a comma, as the defaults are shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def without_commas(arguments: Sequence[str], pairs: Collection[str]) -> list[str]:
    """`--betas 0.9,0.95`, as the defaults are shown, as `--betas 0.9 0.95`; `pairs` are the options of two values."""
    out: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in pairs and equals:
            out.append(name)
            argument = value
        parts = [part.strip() for part in argument.split(",") if part.strip()]
        out += parts if out and out[-1] in pairs and len(parts) in (1, 2) else [argument]
    return out
