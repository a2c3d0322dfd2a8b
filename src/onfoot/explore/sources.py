"""The source lines that implement an equation, found by the equation ids in their comments."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
SHARED = ("models/head.py", "models/trace.py", "ops/update.py")
FILES = {  # per family, in the order of the search
    "gpt2": (
        "ops/linear.py", "ops/embedding.py", "ops/layer_norm.py", "ops/activation.py", "ops/attention.py",
        "ops/attention_head.py", "ops/cross_entropy.py", "ops/lora.py", "models/gpt2.py", *SHARED,
    ),
    "llama": (
        "ops/linear.py", "ops/embedding.py", "ops/rms_norm.py", "ops/rope.py", "ops/swiglu.py", "ops/attention.py",
        "ops/grouped_query.py", "ops/cross_entropy.py", "ops/lora.py", "models/llama.py", *SHARED,
    ),
}  # fmt: skip
COMMENT = re.compile(r"# eq ((?:\d+(?:\.[a-d])?|[A-Z]+\.\d+)(?:, (?:\d+(?:\.[a-d])?|[A-Z]+\.\d+))*)")
# lines without an equation id: sums, and error signals that pass through a sum unchanged
PLAIN = {
    "a_1": r"a_tok \+ a_pos",
    "a_5": r"# a_5 = a_1 \+ a_4",
    "a_10": r"# a_10 = a_5 \+ a_9",
    "Δ_4": r"# Δ_4 = ",
    "Δ_9": r"# Δ_9 = ",
    "∂ρ": r"\bdrho = dy @",
    "y_pred": r"y_pred, \(N, V\)",
    "a_3": r"a3, s_attention = ",
}


@cache
def _files(family: str) -> dict[str, list[str]]:
    return {file: (PACKAGE / file).read_text(encoding="utf-8").splitlines() for file in FILES[family]}


@cache
def equation_lines(family: str = "gpt2") -> dict[str, list[dict[str, Any]]]:
    """Equation id -> the lines of a family's code that have it in a comment: file, number and text."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file, lines in _files(family).items():
        for number, line in enumerate(lines, start=1):
            comment = COMMENT.search(line)
            for id in comment[1].split(", ") if comment else ():
                found.setdefault(id, []).append(_line(file, number, line))
    return found


@cache
def lines_of(symbol: str, equations: tuple[str, ...], family: str = "gpt2") -> list[dict[str, Any]]:
    """The lines that implement a formula, each once."""
    known = equation_lines(family)
    lines = [line for id in equations for line in known.get(id, [])]
    if not lines and symbol in PLAIN:
        pattern = re.compile(PLAIN[symbol])
        lines = [
            _line(file, number, text)
            for file, all_lines in _files(family).items()
            for number, text in enumerate(all_lines, start=1)
            if pattern.search(text)
        ][:1]
    unique = {(line["file"], line["line"]): line for line in lines}
    return list(unique.values())


def _line(file: str, number: int, text: str) -> dict[str, Any]:
    return {"file": f"onfoot/{file}", "line": number, "code": text.strip()}
