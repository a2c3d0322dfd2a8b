"""What a function that raises may need: other sizes, or another layer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onfoot.check.report import LayerReport

ABOUT_SIZES = re.compile(r"\b(must|only|multiple|divisible|expect\w*|support\w*|require\w*)\b", re.IGNORECASE)
WORDS = {"head_dim": ("head_dim", "head dim", "d_k", "d_head"), "batch": ("batch",), "heads": ("n_head", "heads")}
WORDS |= {"tokens": ("tokens", "seq_len", "sequence length", "block_size"), "vocabulary": ("vocab",)}
WORDS |= {"width": ("width", "features", "n_embd", "hidden", "d_model", "channels")}
LETTERS = {"T": "tokens", "B": "batch", "C": "width", "D": "width", "H": "heads", "V": "vocabulary"}


def hints(report: LayerReport) -> Iterator[str]:
    """Notes on errors that tell of certain sizes, or of arguments that are those of another layer."""
    messages = dict.fromkeys(p.message for o in report.failed for p in o.problems if p.kind == "raises")
    for message in messages:
        size = _size(report, message)
        if size:
            yield f"if it takes certain sizes only: {size}, or a declaration `sizes` (docs/check.md, Sizes)"
            break
        if message.startswith("AssertionError:  ("):  # a bare assert
            listed = ", ".join(f"--{name.replace('_', '-')}" for name in report.layer.sizes)
            yield f"if it asserts certain sizes: {listed} choose them, or a declaration `sizes` (docs/check.md, Sizes)"
            break
    if any(m.startswith("TypeError") and "positional argument" in m for m in messages):
        other = _other_layer(report)
        if other:
            yield f"its name is that of the layer {other}: give --layer {other} if it is meant"


def _size(report: LayerReport, message: str) -> str:
    """The option that gives the size which an error asks for, or ""."""
    if not ABOUT_SIZES.search(message):
        return ""
    text = message.partition(" (")[0].lower()  # without the place
    for size in report.layer.sizes:
        for word in WORDS.get(size, (size,)):
            number = re.search(rf"{re.escape(word)}\b.*?(\d+)", text)
            if number:
                return f"--{size.replace('_', '-')} {number[1]}"
    letter = re.search(r"\b([TBCDHV])\b.*?(\d+)", message.partition(" (")[0])
    size = LETTERS[letter[1]] if letter else ""
    return f"--{size} {letter[2]}" if letter and size in report.layer.sizes else ""


def _other_layer(report: LayerReport) -> str:
    """The layer whose name the function has, if it is another one."""
    from onfoot.check.layers import LAYERS

    name = report.function.rpartition(":")[2].lower().replace("_", "")
    found = [layer for layer in LAYERS if layer.replace("_", "") in name and layer != report.layer.name]
    return max(found, key=len, default="")
