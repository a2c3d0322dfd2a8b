"""Formulas as text, `Δ_5 = Δ_10 + LNᵇ_5(Δ_6)`, to MathML as nested lists that the page turns into elements.

An element is `[name, child, ...]`, where a child is a string or an element; attributes are a dict after the name.
The notation is that of the tables: `_` and `^` start a sub- and a superscript, `~` broadcasts, `ᵗ` transposes.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import Any

Node = list[Any]

TOKENS = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<tilde>~)"
    r"|(?P<root>√)"
    r"|(?P<number>\d+(?:\.\d+)?|−∞)"
    r"|(?P<word>[A-Za-z]{2,}(?:'s)?)"
    r"|(?P<letter>[A-Za-zΑ-Ωα-ωāℓ∂])"
    r"|(?P<script>[_^]\{[^}]*\}|[_^][A-Za-zΑ-Ωα-ω]+|[_^]\d+)"
    r"|(?P<raised>[ᵗᵇ³²])"
    r"|(?P<prime>['′])"
    r"|(?P<other>.)"
)
SUPERSCRIPTS = {"ᵗ": ["mi", "t"], "ᵇ": ["mi", "b"], "³": ["mn", "3"], "²": ["mn", "2"]}
FUNCTIONS = {"softmax", "log", "exp", "mean", "var", "tanh", "max", "ohe", "LN", "Φ", "RMS", "SiLU", "cos", "sin"}
STRETCHY = set("()[]")


@cache
def tree(text: str) -> Node:
    """A formula's MathML."""
    return ["math", *_Parser(text).nodes()]


def markup(node: Node | str) -> str:
    """A node as a string of markup."""
    if isinstance(node, str):
        return escape(node)
    name, *rest = node
    attributes = ""
    if rest and isinstance(rest[0], dict):
        attributes = "".join(f' {key}="{escape(value)}"' for key, value in rest.pop(0).items())
    return f"<{name}{attributes}>{''.join(markup(child) for child in rest)}</{name}>"


class _Parser:
    """Parses a formula from left to right; a sub- or superscript belongs to the atom before it."""

    def __init__(self, text: str) -> None:
        self.tokens = [(match.lastgroup or "", match[0]) for match in TOKENS.finditer(text)]
        self.pos = 0

    def nodes(self) -> list[Node]:
        out: list[Node] = []
        while self.pos < len(self.tokens):
            out += self._next()
        return out

    def _next(self) -> list[Node]:
        kind = self.tokens[self.pos][0]
        if kind == "space":
            self.pos += 1
            return self._space()
        if kind == "tilde" and self._next_kind() in ("letter", "word"):
            self.pos += 1
            return [["mover", {"accent": "true"}, self._with_scripts(self._atom()), ["mo", "~"]]]
        if kind == "root":
            self.pos += 1
            return [["msqrt", *self._root_of()]]
        return [self._with_scripts(self._atom())]

    def _space(self) -> list[Node]:
        """A product becomes a thin space, a space between words a wider one."""
        before = self.tokens[self.pos - 2][0] if self.pos >= 2 else ""
        after = self.tokens[self.pos][0] if self.pos < len(self.tokens) else ""
        if "word" in (before, after) and not self._is_operator(self.pos - 2) and not self._is_operator(self.pos):
            return [["mspace", {"width": "0.3em"}]]
        if self.pos >= 2 and self.tokens[self.pos - 2][1] == "," and self.tokens[self.pos - 1][1] == " ":
            return [["mspace", {"width": "0.3em"}]]
        if self.tokens[self.pos - 1][1] == "  ":
            return [["mspace", {"width": "1.2em"}]]
        factors = ("letter", "script", "raised", "number", "root", "prime")
        return [["mspace", {"width": "0.17em"}]] if before in factors and after in (*factors, "tilde") else []

    def _is_operator(self, pos: int) -> bool:
        """Whether the token there is an operator, which has its own spacing."""
        inside = 0 <= pos < len(self.tokens)
        return inside and self.tokens[pos][0] == "other" and self.tokens[pos][1] not in "()[],"

    def _next_kind(self) -> str:
        return self.tokens[self.pos + 1][0] if self.pos + 1 < len(self.tokens) else ""

    def _root_of(self) -> list[Node]:
        """The content of a root: one atom, or everything inside the parentheses that follow it."""
        if self.tokens[self.pos][1] != "(":
            return [self._with_scripts(self._atom())]
        self.pos += 1
        out: list[Node] = []
        while self.tokens[self.pos][1] != ")":
            out += self._next()
        self.pos += 1
        return out

    def _atom(self) -> Node:
        kind, text = self.tokens[self.pos]
        self.pos += 1
        if kind == "number":
            return ["mn", text]
        if kind == "word":
            return ["mi", text] if text in FUNCTIONS or len(text) <= 1 else ["mtext", text]
        if text == "Σ":
            return ["mo", {"largeop": "false", "movablelimits": "false"}, "∑"]
        if kind == "letter":
            return ["mover", {"accent": "true"}, ["mi", "a"], ["mo", "¯"]] if text == "ā" else _letter(text)
        if text in STRETCHY:
            return ["mo", {"stretchy": "false"}, text]
        if text == ",":
            return ["mo", {"separator": "true"}, ","]
        return ["mo", text]

    def _with_scripts(self, base: Node) -> Node:
        sub: Node | None = None
        sup: list[Node] = []
        while self.pos < len(self.tokens) and self.tokens[self.pos][0] in ("script", "raised", "prime"):
            kind, text = self.tokens[self.pos]
            self.pos += 1
            if kind == "raised":
                sup.append(SUPERSCRIPTS[text])
            elif kind == "prime":
                sup.append(["mo", "′"])
            elif text.startswith("_"):
                sub = _script(text[1:])
            else:
                sup.append(_script(text[1:]))
        raised: Node | None = sup[0] if len(sup) == 1 else ["mrow", *sup] if sup else None
        if sub is not None and raised is not None:
            return ["msubsup", base, sub, raised]
        if sub is not None:
            return ["msub", base, sub]
        return base if raised is None else ["msup", base, raised]


def _script(text: str) -> Node:
    inner = text.strip("{}")
    if inner.isdecimal():
        return ["mn", inner]
    return _letter(inner) if len(inner) == 1 else ["mtext", inner]


def _letter(text: str) -> Node:
    """Latin letters are italic by default. Others are upright: few fonts have an italic mathematical Δ."""
    return ["mi", text] if text.isascii() else ["mi", {"mathvariant": "normal"}, text]
