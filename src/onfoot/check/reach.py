"""Which gradients a place of the pass reaches: a mistake there makes those wrong and leaves the others right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.layer import Array, Case, Mistake, Piece, Pieces
from onfoot.check.places import at_place
from onfoot.check.recording import Recordings

EXACTLY, SOME, OTHERS = "the wrong gradients", "some of the wrong gradients", "correct ones as well"
KINDS = (EXACTLY, SOME, OTHERS)  # the likeliest first
CHANGED = 1e-7  # relative difference
PIECE_IS_NOT_ONE = ("given", "route")

Place = tuple[str, int | None]  # a piece, and one of its calls or None for all


class Reach:
    """Every place of the pass, and whether it reaches the wrong gradients, some of them or correct ones as well."""

    def __init__(self, evidence: Evidence, recordings: Recordings, wrong: Sequence[int]) -> None:
        i = evidence.screen(wrong[0])
        self.evidence, self.i, self.case = evidence, i, evidence.cases[i]
        informative = [g for g in wrong if evidence.ever_informative(g)]
        self.wrong = set(informative or wrong)
        self.places: dict[Place, str] = {}
        for name, calls in recordings.of(self.case).calls.items():
            for call in [None] if len(calls) == 1 else [None, *range(len(calls))]:
                self.places[name, call] = self._kind(self._reached(name, call, len(calls)))

    def kind(self, probe: Mistake) -> str:
        """The kind of a generated mistake; the likeliest if it is not about a piece of the pass."""
        found = [
            self.places.get((name, probe.call), EXACTLY) for name in probe.replaces if name not in PIECE_IS_NOT_ONE
        ]
        return max(found, key=KINDS.index, default=EXACTLY)

    def _kind(self, reached: set[int]) -> str:
        if reached - self.wrong or not reached:
            return OTHERS
        return EXACTLY if reached == self.wrong else SOME

    def _reached(self, name: str, call: int | None, n: int) -> set[int]:
        """The gradients that change if the result of the piece changes."""
        right = self.evidence.run(Candidate(), self.i)
        mistake = Mistake("", self.evidence.layer.name, "", "", "", _disturbed(name, call, n), per_case=True)
        got = self.evidence.run(Candidate((mistake,)), self.i)
        self.evidence.forget(Candidate((mistake,)))
        if right is None or got is None:
            return set()
        return {g for g, (a, b) in enumerate(zip(right, got, strict=True)) if _differ(a, b)}


def _disturbed(name: str, call: int | None, n: int) -> Any:
    """The piece with every entry of its result changed by some per cent."""

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        right = getattr(p, name)

        def changed(*a: Any) -> Any:
            result = right(*a)
            if not isinstance(result, (float, np.floating, np.ndarray)) or np.asarray(result).dtype.kind != "f":
                return result
            shifts = 0.05 * np.sin(1.0 + np.arange(np.size(result)) ** 2).reshape(np.shape(result))
            return result * (1 + shifts) + shifts

        return {name: at_place(right, changed, call, n)}

    return apply


def _differ(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return True
    return not bool(np.linalg.norm(a - b) <= CHANGED * np.linalg.norm(a))
