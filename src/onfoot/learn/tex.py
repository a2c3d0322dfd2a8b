"""Formulas of the documentation, `\\Delta w^t`, as text for a terminal: `Δ wᵗ`.

Only what the pages of docs/equations use is known. Braces become parentheses where they are needed; a letter that is
raised or lowered and has no Unicode sign keeps its ^ or _.
"""

from __future__ import annotations

import re
import unicodedata

SIGNS = {
    "Delta": "Δ", "Phi": "Φ", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
    "phi": "φ", "varphi": "φ", "omega": "ω", "ell": "ℓ", "partial": "∂", "nabla": "∇", "infty": "∞", "ldots": "…",
    "cdots": "⋯", "vdots": "⋮", "ddots": "⋱", "Vert": "‖", "lVert": "‖", "rVert": "‖", "lfloor": "⌊", "rfloor": "⌋",
    "langle": "⟨", "rangle": "⟩", "uparrow": "↑", "sum": "Σ",
}  # fmt: skip
BINARY = {
    "circ": "∘", "cdot": "·", "times": "×", "ominus": "⊖", "oplus": "⊕", "le": "≤", "leq": "≤", "lt": "<", "ge": "≥",
    "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "cong": "≅", "sim": "~", "propto": "∝", "to": "→", "pm": "±",
    "leftarrow": "←", "in": "∈", "notin": "∉", "mid": "|",
}  # fmt: skip
WORDS = ("log", "ln", "exp", "tanh", "sin", "cos", "max", "min")
SPACES = {"quad": "  ", "qquad": "    ", "thinspace": " "}
FONTS = ("mathrm", "mathbf", "mathbb", "tilde")
NOTHING = ("Big", "left", "right")
ACCENTS = {"bar": "\u0304", "hat": "\u0302", "dot": "\u0307"}
RAISED = dict(zip("0123456789tb+-'", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵗᵇ⁺⁻'", strict=True))
TOKEN = re.compile(r"\\(?P<name>[A-Za-z]+)\s*|\\(?P<sign>.)|(?P<space>\s+)|(?P<one>.)", re.DOTALL)
ENDS = re.compile(
    r"[\w)\]‖]|" + "|".join([*RAISED.values(), *ACCENTS.values()])
)  # what a minus after it subtracts from
LOWERED = re.compile(r"[_^]([^\W_]+|\((?:[^()]|\([^()]*\))*\))[ᵗᵇ⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻']*$")
AFTER_WORD = re.compile(r"(?<![A-Za-z_^])[A-Za-z]{2,}[ᵗᵇ⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻']*$")


def plain_formula(tex: str) -> str:
    """The formula as text in one line; raises a ValueError if it has a command that is not known."""
    tex = re.sub(r"\\begin\{(\w+)\}(.*?)\\end\{\1\}", _rows, tex, flags=re.DOTALL)
    return unicodedata.normalize("NFC", _Reader(tex).all().strip())


def _rows(match: re.Match[str]) -> str:
    """A matrix or the cases of a definition in one line."""
    rows = [" ".join(row.split()) for row in match[2].split(r"\cr")]
    joined = "; ".join(r"\quad ".join(cell.strip() for cell in row.split("&")) for row in rows)
    return f"[{joined}]"


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, tex: str) -> None:
        self.tokens = [(match.lastgroup or "", match[match.lastgroup or 0]) for match in TOKEN.finditer(tex)]
        self.pos = 0
        self.tight = 0  # how many scripts and fractions are open: no spaces in them

    def all(self, end: str = "") -> str:
        out = ""
        while self.pos < len(self.tokens):
            if end and self.tokens[self.pos] == ("one", end):
                self.pos += 1
                return out
            kind, text = self.tokens[self.pos]
            piece = self.atom()
            if kind == "one" and text in "+-" and not self.tight and ENDS.fullmatch(out.rstrip()[-1:]):
                piece = f" {piece} "
            word = (kind == "name" and text in (*WORDS, *FONTS)) and piece[:1].isalnum()
            starts = (piece[:1].isalnum() and piece[:1] not in RAISED.values()) or piece[:1] in ("∂", "∇", "√")
            if (
                (word and ENDS.fullmatch(out[-1:]) and out[-1:] != "∂")
                or (starts and LOWERED.search(out))
                or (starts and self.words and AFTER_WORD.search(out))
            ):
                out += " "
            self.words = word or (self.words and (piece.isspace() or text == "^"))
            out += piece.lstrip(" ") if out[-1:] == " " and len(piece) < len("    ") else piece
        return out

    words = False  # whether what was read last is a word, such as log

    def atom(self) -> str:
        kind, text = self.tokens[self.pos]
        self.pos += 1
        if kind == "space":
            return " "
        if kind == "sign":
            return text if text in "{}%" else " "
        if kind == "name":
            return self.command(text)
        if text == "{":
            return self.all("}")
        if text in "^_":
            return self.script(text)
        if text == "=":
            return self.operator("=")
        return "−" if text == "-" else text

    def operator(self, sign: str) -> str:
        return sign if self.tight else f" {sign} "

    def group(self, tight: bool = False) -> str:
        """The argument of a command: what is between braces, or the next atom."""
        while self.tokens[self.pos][0] == "space":
            self.pos += 1
        self.tight += tight
        found = self.atom().strip()
        self.tight -= tight
        return found

    def command(self, name: str) -> str:
        if name in SIGNS:
            return SIGNS[name]
        if name in BINARY:
            return self.operator(BINARY[name])
        if name in WORDS:
            return name
        if name in SPACES:
            return SPACES[name]
        if name in NOTHING:
            return ""
        if name in FONTS:
            return self.group()
        if name == "widetilde":
            inner = self.group()
            return f"~{inner}" if _is_single(inner) or _is_bracketed(inner) else f"~({inner})"
        if name in ACCENTS:
            inner = self.group()
            return f"{inner}{ACCENTS[name]}" if len(_letters(inner)) == 1 else f"({inner}){ACCENTS[name]}"
        if name == "sqrt":
            return f"√{_grouped(self.group())}"
        if name in ("frac", "tfrac"):
            return self.fraction()
        raise ValueError(f"\\{name} is not a command that docs/equations uses; add it to {__name__}")

    def fraction(self) -> str:
        """a/b, in parentheses where something is multiplied with it."""
        found = f"{_grouped(self.group(tight=True))}/{_grouped(self.group(tight=True))}"
        last = self.pos == len(self.tokens)
        kind, text = ("space", "") if last else self.tokens[self.pos]
        alone = kind == "space" or (kind == "one" and text in "+-=)],}") or (kind == "name" and text in SPACES | BINARY)
        return found if alone else f"({found}) "

    def script(self, sign: str) -> str:
        text = self.group(tight=True)
        if sign == "^" and all(letter in RAISED for letter in text.replace("−", "-")):
            return "".join(RAISED[letter] for letter in text.replace("−", "-"))
        return sign + (text if re.fullmatch(r"[^\W_]+|.", text) or _is_bracketed(text) else f"({text})")


def _letters(text: str) -> str:
    return "".join(letter for letter in text if letter not in ACCENTS.values())


def _is_single(text: str) -> bool:
    """Whether it is one letter, with its accents and what is below or above it."""
    return re.fullmatch(r"\w([_^]\w+)?", _letters(text)) is not None


def _is_bracketed(text: str) -> bool:
    return text[:1] == "(" and text[-1:] == ")" and text.count("(") == 1


def _grouped(text: str) -> str:
    """The text, in parentheses unless it is one letter or number."""
    return text if re.fullmatch(r"~?[^\W\d](_\w+)?|[\d.]+", _letters(text)) or _is_bracketed(text) else f"({text})"
