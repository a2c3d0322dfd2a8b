"""What every symbol and operator in the page's formulas means, in a sentence, with its shape.

The table is static/symbols.txt; its meanings are those of docs/equations and of `onfoot.tables`. A symbol is looked up
first as it is (`w_tok`), then with i in place of its number (`a_5` as `a_i`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from onfoot.explore.mathml import SUPERSCRIPTS, TOKENS, Node, tree

PAPER = "L. Boué, “Deep learning for pedestrians: backpropagation in Transformers”, arXiv:2512.23329"


class Entry(NamedTuple):
    """A symbol as text, what it is called, its shape, and a plain sentence."""

    symbol: str
    name: str
    shape: str
    meaning: str


def _entries() -> list[Entry]:
    text = (Path(__file__).parent / "static" / "symbols.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("%")]
    return [Entry(*(part.strip() for part in line.split("|"))) for line in lines]


ENTRIES = _entries()
PLAIN_SIGNS = set("()[]{},.:=<>+−-|")  # they need no explanation
_BY_SYMBOL = {entry.symbol: entry for entry in ENTRIES}


def symbols_of(formula: str) -> list[str]:
    """The symbols and operators of a formula, in the glossary's spelling; words, numbers and brackets are left out."""
    tokens = [(match.lastgroup or "", match[0]) for match in TOKENS.finditer(formula)]
    out: list[str] = []
    for at, (kind, text) in enumerate(tokens):
        if kind in ("space", "script", "raised", "prime") or text in PLAIN_SIGNS or text.isdecimal():
            continue
        if kind == "number" and text != "−∞":
            continue
        raised = []
        for follows, script in tokens[at + 1 :]:
            if follows == "raised" and script in "ᵗ²³":
                raised.append(script)
            elif follows == "script":
                text += re.sub(r"[{}]", "", script)
            elif follows in ("raised", "prime"):
                text += "′" if follows == "prime" else script
            else:
                break
        if kind != "word" or find(text):
            out += [text, *raised]
    return out


def find(symbol: str) -> Entry | None:
    """The entry of a symbol: its own, or that of its kind (in the page: `glossaryEntry`)."""
    general = re.sub(r"\^\w+", "^h", re.sub(r"_\d+", "_i", symbol))
    for one in (symbol, general, re.sub(r"\^\w+", "", symbol)):
        if one in _BY_SYMBOL:
            return _BY_SYMBOL[one]
    return None


def glossary() -> dict[str, Any]:
    """The table for the page, with every symbol as MathML, and the paper's name."""
    letters = {entry.symbol: any(character.isalpha() for character in entry.symbol) for entry in ENTRIES}
    signs: dict[str, Node] = {
        symbol: ["math", ["mo", symbol]] for symbol, is_letter in letters.items() if not is_letter
    }
    signs |= {symbol: ["math", ["msup", ["mi"], SUPERSCRIPTS[symbol]]] for symbol in "ᵗ²³"}  # they stand above a letter
    shown = [{**entry._asdict(), "tree": signs.get(entry.symbol) or tree(entry.symbol)} for entry in ENTRIES]
    return {"paper": PAPER, "entries": shown}
