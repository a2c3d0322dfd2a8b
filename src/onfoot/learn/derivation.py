"""The whole derivation of an exercise: its pages of docs/equations, which a wheel carries inside the package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from onfoot.learn.answer import wrapped
from onfoot.learn.course import Exercise
from onfoot.learn.plain_page import plain_page
from onfoot.terminal import listed

INSTALLED = Path(__file__).parent / "derivations"  # setup.py copies the pages there when a wheel is built
REPOSITORY = Path(__file__).parents[3] / "docs" / "equations"
WORDS = (
    "In it Δ is your dy, ∂x is your dx, ∂w your dweight, xᵗ is the transpose of x, ∘ is NumPy's *, A · B is the sum of "
    "A ∘ B, A ⊖ B that of each row, ~b is b repeated for every row (or column), and ẋ is your x_dot."
)
DIFFERENTIAL = re.compile(r"(?<![\w^/])d(?:[xywbqkvsaDU]|ρ|ā)(?:_\w+)?(?![\w'])")
SHOWN = 3  # differentials that are named


def derivation_file(name: str) -> Path:
    """The page of that name; raises a ValueError if this installation has none."""
    for folder in (INSTALLED, REPOSITORY):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"this installation has no page {name}; it is in onfoot's repository, in docs/equations")


def derivation_text(exercise: Exercise) -> str:
    """The pages, or the parts of them that the exercise is about, as plain text with how to read it."""
    parts = [_part(*page.partition("#")[::2]) for page in exercise.pages]
    begin = f"The derivation of exercise {exercise.number}: {exercise.title}"
    words = "\n".join(wrapped(WORDS + small_changes(parts)))
    return "\n\n".join([begin, words, *(plain_page(part) for part in parts)])


def small_changes(parts: Iterable[str]) -> str:
    """What a d means in a derivation that has differentials: there dy is not the gradient of that name."""
    formulas = "\n".join(plain_page(re.sub(r"`[^`\n]+`", "", part)) for part in parts)  # in code, dy is a gradient
    found = list(dict.fromkeys(DIFFERENTIAL.findall(formulas)))[:SHOWN]
    if not found:
        return ""
    are = "is a small change, not a gradient" if len(found) == 1 else "are small changes, not gradients"
    return f" There {listed(found)} {are}: the exercises write δ for this d."


def _part(name: str, anchor: str) -> str:
    """A page; or its section with this anchor; or its equation with this anchor, label and formula."""
    text = derivation_file(name).read_text(encoding="utf-8").strip()
    if not anchor:
        return text
    pattern = r"(?m)^(?=<a id)|(?<=\$\$\n)\n" if anchor.startswith("eq-") else r"(?m)^(?=## )"
    return next(part for part in re.split(pattern, text) if _anchor(part) == anchor).strip()


def _anchor(part: str) -> str:
    found = re.match(r'<a id="([^"]+)"', part)
    return found[1] if found else part.partition("\n")[0].lstrip("# ").lower().replace(" ", "-")
