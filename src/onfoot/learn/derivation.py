"""The whole derivation of an exercise: its page of docs/equations, which a wheel carries inside the package."""

from __future__ import annotations

import re
from pathlib import Path

from onfoot.learn.course import Exercise

INSTALLED = Path(__file__).parent / "derivations"  # setup.py copies the pages there when a wheel is built
REPOSITORY = Path(__file__).parents[3] / "docs" / "equations"
WORDS = "In it Δ is your dy, ∂x is your dx, ∂w your dweight, xᵗ (x^t) is the transpose of x, and ∘ is NumPy's *."


def derivation_file(exercise: Exercise) -> Path:
    """The page with the derivation; raises a ValueError if this installation has none."""
    name = exercise.page.partition("#")[0]
    for folder in (INSTALLED, REPOSITORY):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"this installation has no page {name}; it is in onfoot's repository, in docs/equations")


def derivation_text(exercise: Exercise) -> str:
    """The page, or the section of it that the exercise is about, with where it is and how to read it."""
    path = derivation_file(exercise)
    text = path.read_text(encoding="utf-8").strip()
    section = exercise.page.partition("#")[2]
    if section:
        parts = re.split(r"(?m)^(?=## )", text)
        text = next(part for part in parts if _anchor(part) == section).strip()
    return f"The derivation of exercise {exercise.number}, from {path}\n{WORDS}\n\n{text}"


def _anchor(part: str) -> str:
    return part.partition("\n")[0].lstrip("# ").lower().replace(" ", "-")
