"""Formulas from their text, `Δ_5 = Δ_10 + LNᵇ_5(Δ_6)`, to MathML as nested lists that a page turns into elements.

An element is `[name, child, ...]`, where a child is a string or an element; attributes are a dict in second place.
The notation is that of the tables: `_` and `^` set a sub- and a superscript, `~` broadcasts, `ᵗ` transposes.
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
RAISED = {"ᵗ": ["mi", "t"], "ᵇ": ["mi", "b"], "³": ["mn", "3"], "²": ["mn", "2"]}
FUNCTIONS = {"softmax", "log", "exp", "mean", "var", "tanh", "max", "ohe", "LN", "Φ"}
STRETCHY = set("()[]")


@cache
def tree(text: str) -> Node:
    """A formula's MathML."""
    return ["math", *_Parser(text).nodes()]


def markup(node: Node | str) -> str:
    """The same as a string."""
    if isinstance(node, str):
        return escape(node)
    name, *rest = node
    attributes = ""
    if rest and isinstance(rest[0], dict):
        attributes = "".join(f' {key}="{escape(value)}"' for key, value in rest.pop(0).items())
    return f"<{name}{attributes}>{''.join(markup(child) for child in rest)}</{name}>"


class _Parser:
    """Reads a formula from left to right; a script belongs to what stands just before it."""

    def __init__(self, text: str) -> None:
        self.tokens = [(match.lastgroup or "", match[0]) for match in TOKENS.finditer(text)]
        self.place = 0

    def nodes(self) -> list[Node]:
        out: list[Node] = []
        while self.place < len(self.tokens):
            out += self._next()
        return out

    def _next(self) -> list[Node]:
        kind = self.tokens[self.place][0]
        if kind == "space":
            self.place += 1
            return self._gap()
        if kind == "tilde" and self._follows() in ("letter", "word"):
            self.place += 1
            return [["mover", {"accent": "true"}, self._with_scripts(self._atom()), ["mo", "~"]]]
        if kind == "root":
            self.place += 1
            return [["msqrt", *self._root_of()]]
        return [self._with_scripts(self._atom())]

    def _gap(self) -> list[Node]:
        """A product is a thin gap; between words the gap is a space."""
        before = self.tokens[self.place - 2][0] if self.place >= 2 else ""
        after = self.tokens[self.place][0] if self.place < len(self.tokens) else ""
        if "word" in (before, after) and not self._is_operator(self.place - 2) and not self._is_operator(self.place):
            return [["mspace", {"width": "0.3em"}]]
        if self.place >= 2 and self.tokens[self.place - 2][1] == "," and self.tokens[self.place - 1][1] == " ":
            return [["mspace", {"width": "0.3em"}]]
        if self.tokens[self.place - 1][1] == "  ":
            return [["mspace", {"width": "1.2em"}]]
        factors = ("letter", "script", "raised", "number", "root", "prime")
        return [["mspace", {"width": "0.17em"}]] if before in factors and after in (*factors, "tilde") else []

    def _is_operator(self, place: int) -> bool:
        """Whether a sign stands there that brings its own space with it."""
        inside = 0 <= place < len(self.tokens)
        return inside and self.tokens[place][0] == "other" and self.tokens[place][1] not in "()[],"

    def _follows(self) -> str:
        return self.tokens[self.place + 1][0] if self.place + 1 < len(self.tokens) else ""

    def _root_of(self) -> list[Node]:
        """What stands under a root: one atom, or everything between the brackets behind it."""
        if self.tokens[self.place][1] != "(":
            return [self._with_scripts(self._atom())]
        self.place += 1
        out: list[Node] = []
        while self.tokens[self.place][1] != ")":
            out += self._next()
        self.place += 1
        return out

    def _atom(self) -> Node:
        kind, text = self.tokens[self.place]
        self.place += 1
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
        while self.place < len(self.tokens) and self.tokens[self.place][0] in ("script", "raised", "prime"):
            kind, text = self.tokens[self.place]
            self.place += 1
            if kind == "raised":
                sup.append(RAISED[text])
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
    """A Latin letter slants by itself. Others stand upright: many fonts have Δ, few have a slanted mathematical one."""
    return ["mi", text] if text.isascii() else ["mi", {"mathvariant": "normal"}, text]
