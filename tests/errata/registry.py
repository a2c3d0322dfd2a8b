"""What an erratum is: where it stands, what it says, and what can be measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

KINDS = {"W": "wrong", "I": "incomplete", "S": "shape or typo", "A": "ambiguous", "T": "trap when typed in"}


@dataclass(frozen=True)
class Line:
    """One measurement: a float is a relative error, an int is a count, a str says what happens."""

    what: str
    literal: float | int | str
    right: float | int | str


@dataclass(frozen=True)
class Erratum:
    id: str
    kind: str  # letters of KINDS, joined by "/"
    place: str
    title: str
    measure: Callable[[], list[Line]]

    @property
    def anchor(self) -> str:
        return self.id.lower()


ERRATA: dict[str, Erratum] = {}


def erratum(id: str, kind: str, place: str, title: str) -> Callable[[Callable[[], list[Line]]], Erratum]:
    """Registers the function below it as the measurement of an erratum. It runs once, when it is first asked."""

    def register(measure: Callable[[], list[Line]]) -> Erratum:
        ERRATA[id] = Erratum(id, kind, place, title, cache(measure))
        return ERRATA[id]

    return register
