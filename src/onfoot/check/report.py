"""The report of a check of a known layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onfoot.check.call import Answer, Problem
from onfoot.check.chain import Chain
from onfoot.check.diagnose import Diagnosis
from onfoot.check.layer import Case, Layer
from onfoot.check.numeric_example import Example
from onfoot.terminal import ShownText


@dataclass(frozen=True)
class Measured:
    """One gradient of one case: error and tolerance, relative to its norm, or absolute if that is rounding noise."""

    gradient: str
    error: float
    allowed: float
    absolute: bool
    where: str = ""  # description of the wrong entries

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass
class Outcome:
    """The result of one case in one dtype."""

    case: Case  # its inputs as passed, cast to float64
    dtype: str
    answer: Answer
    measured: list[Measured] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    single_precision: list[str] = field(default_factory=list)  # gradients of float64 inputs as accurate as float32

    @property
    def ok(self) -> bool:
        return not self.problems and all(m.ok for m in self.measured)

    @property
    def accepted(self) -> bool:
        """Whether the function returned numbers for every gradient, in its shape."""
        gradients = self.answer.gradients
        return gradients is not None and not self.problems and len(self.measured) == len(gradients)


@dataclass(repr=False)
class LayerReport(ShownText):
    """The results of all cases and the diagnosis; `str()` gives the readable report."""

    layer: Layer
    function: str
    options: dict[str, Any]
    arrays: str
    seed: int
    strict: bool
    outcomes: list[Outcome]
    diagnosis: Diagnosis | None = None
    warnings: list[str] = field(default_factory=list)
    not_given: list[str] = field(default_factory=list)  # the gradients that the function does not return
    example: Example | None = None
    recognised: str = ""  # the form, layout and names of the function, where they are not the contract's
    chain: Chain | None = None  # where the chain of a composite layer breaks, if that is certain

    def counts(self, outcome: Outcome) -> bool:
        """Whether an outcome counts; cases beyond the contract count only if strict, some also if they are accepted."""
        return self.strict or not outcome.case.beyond or (outcome.case.if_accepted and outcome.accepted)

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes that make the check fail.

        If float64 shows that the formula is correct, inaccurate float32 results are a warning, not a failure.
        """
        bad = [o for o in self.outcomes if self.counts(o) and not o.ok]
        exact = any(o.dtype == "float64" for o in self.outcomes)
        return [o for o in bad if o.dtype == "float64" or o.problems or not exact]

    @property
    def wrong(self) -> list[str]:
        """The gradients that are wrong in any failed outcome: in their values or in their shape."""
        bad = {m.gradient for o in self.failed for m in o.measured if not m.ok}
        bad |= {p.gradient for o in self.failed for p in o.problems if p.kind == "shape"}
        return [name for name in self.layer.gradients if name in bad]

    @property
    def passed(self) -> bool:
        """Whether every gradient is correct in every case that counts."""
        return not self.failed

    def __bool__(self) -> bool:
        return self.passed

    @property
    def verdict(self) -> str:
        """The result in one line: "wrong: dx; 1/n missing" or "passes"."""
        from onfoot.check.text import one_line

        return one_line(self)

    def facts(self) -> dict[str, str]:
        """The verdict and the number of cases, for a notebook."""
        return {self.layer.name: f"{self.function} {self.verdict}", "cases": str(len(self.outcomes))}

    def __str__(self) -> str:
        from onfoot.check.text import layer_text

        return layer_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict, for programs."""
        from onfoot.check.text import layer_dict

        return layer_dict(self)
