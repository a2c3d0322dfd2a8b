"""What was found about an exercise: the verdict on each of its functions, and on the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onfoot.check.report import LayerReport
from onfoot.learn.course import Exercise, Part


@dataclass
class PartVerdict:
    """What was found about one function."""

    part: Part
    status: str  # passed | partial | unsolved | wrong | failed | changed
    marks: dict[str, str] = field(default_factory=dict)  # gradient -> right | wrong | None | not judged
    problems: list[str] = field(default_factory=list)  # what the function does wrong beside values: raises, shapes, nan
    mistakes: list[str] = field(default_factory=list)  # the known mistakes, by name
    explained: list[str] = field(default_factory=list)  # a sentence for each
    chain: str = ""  # where the chain of gradients of several layers breaks, if that is certain
    notes: list[str] = field(default_factory=list)  # what is not wrong, but should be known: it changes an argument
    report: LayerReport | None = None

    def marked(self, mark: str) -> list[str]:
        """The gradients with that mark."""
        return [name for name, found in self.marks.items() if found == mark]

    def refuse(self, mistake: str, explained: str) -> None:
        """Adds a mistake."""
        self.mistakes.append(mistake)
        self.explained.append(explained)


@dataclass
class Verdict:
    """What was found about an exercise; the parts are empty if its file could not be loaded."""

    exercise: Exercise
    status: str  # passed | partial | unsolved | wrong | failed | changed | missing | syntax | import | blocked | saved
    message: str = ""  # why there are no parts
    parts: list[PartVerdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every gradient is right."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """The verdict for programs."""
        return {
            "exercise": self.exercise.number,
            "name": self.exercise.name,
            "passed": self.passed,
            "status": self.status,
            "message": self.message,
            "parts": [
                {
                    "function": part.part.function,
                    "status": part.status,
                    "gradients": part.marks,
                    "problems": part.problems,
                    "mistakes": part.mistakes,
                    "explained": part.explained,
                    "chain": part.chain,
                    "notes": part.notes,
                }
                for part in self.parts
            ],
        }


def overall(statuses: Sequence[str]) -> str:
    """The status of an exercise from those of its parts: the worst, but partial if some are solved and some not."""
    for status in ("changed", "failed", "wrong", "partial"):
        if status in statuses:
            return status
    if "unsolved" in statuses:
        return "partial" if "passed" in statuses else "unsolved"
    return "passed"
