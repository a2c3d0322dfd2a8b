"""The source lines that implement an equation, found by the equation ids in their comments."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
OPS = ("linear", "embedding", "layer_norm", "activation", "attention", "attention_head", "cross_entropy", "lora")
FILES = (
    *(f"ops/{name}.py" for name in OPS), "models/gpt2.py", "models/head.py", "models/trace.py", "ops/update.py",
)  # fmt: skip
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
}


@cache
def _files() -> dict[str, list[str]]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8").splitlines()
        for pattern in FILES
        for path in sorted(PACKAGE.glob(pattern))
    }


@cache
def equation_lines() -> dict[str, list[dict[str, Any]]]:
    """Equation id -> the lines that have it in a comment: file, number and text."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file, lines in _files().items():
        for number, line in enumerate(lines, start=1):
            comment = COMMENT.search(line)
            for id in comment[1].split(", ") if comment else ():
                found.setdefault(id, []).append(_line(file, number, line))
    return found


def lines_of(symbol: str, equations: tuple[str, ...]) -> list[dict[str, Any]]:
    """The lines that implement a formula, each once."""
    known = equation_lines()
    lines = [line for id in equations for line in known.get(id, [])]
    if not lines and symbol in PLAIN:
        pattern = re.compile(PLAIN[symbol])
        lines = [
            _line(file, number, text)
            for file, all_lines in _files().items()
            for number, text in enumerate(all_lines, start=1)
            if pattern.search(text)
        ][:1]
    unique = {(line["file"], line["line"]): line for line in lines}
    return list(unique.values())


def _line(file: str, number: int, text: str) -> dict[str, Any]:
    return {"file": f"onfoot/{file}", "line": number, "code": text.strip()}
