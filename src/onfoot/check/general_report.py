"""The report of the general check, as text and as a dict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from onfoot.check.call import Problem
from onfoot.check.text import shown, wrapped
from onfoot.terminal import ShownText


@dataclass
class Agreement:
    """One direction v: the derivative by the backward pass, and by finite differences of the forward pass."""

    argument: str
    dtype: str
    backward: float  # ⟨v, Jᵗu⟩
    forward: float  # ⟨u, J v⟩
    allowed: float
    kink: bool
    ok: bool


@dataclass(repr=False)
class GradientReport(ShownText):
    """The results for a forward and backward pass; `str()` gives the readable report."""

    function: str
    arguments: list[str]
    shapes: list[tuple[int, ...]]
    arrays: str
    seed: int
    agreements: list[Agreement] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)  # wrong argument -> description of its wrong entries
    warnings: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """The arguments whose gradient is wrong."""
        bad = {a.argument for a in self.agreements if not a.ok}
        return [name for name in self.arguments if name in bad]

    @property
    def passed(self) -> bool:
        """Whether the functions ran and every gradient is correct."""
        return not self.problems and not self.wrong

    @property
    def verdict(self) -> str:
        """The result in one line: "wrong: argument 0; …" or "passes"."""
        if self.passed:
            return f"passes: {', '.join(self.arguments)}"
        if self.wrong:
            return f"wrong: {', '.join(self.wrong)}; {self.where.get(self.wrong[0], '')}"
        verb = "it raises " if self.problems[0].kind == "raises" else ""
        return f"fails: {verb}{self.problems[0].message}"

    def __bool__(self) -> bool:
        return self.passed

    def facts(self) -> dict[str, str]:
        """The verdict in a line, for a notebook."""
        return {self.function: self.verdict}

    def __str__(self) -> str:
        """The report as text: the compared derivatives, then what is wrong and where."""
        lines = [f"gradients · {self.function}", *_table(self), "", *_verdict(self)]
        for warning in self.warnings:
            lines += wrapped(f"note: {warning}", "")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict, for programs."""
        return {
            "function": self.function,
            "passed": self.passed,
            "wrong": self.wrong,
            "arguments": {name: list(shape) for name, shape in zip(self.arguments, self.shapes, strict=True)},
            "arrays": self.arrays,
            "seed": self.seed,
            "agreements": [asdict(a) for a in self.agreements],
            "problems": [p.to_dict() for p in self.problems],
            "where": self.where,
            "warnings": self.warnings,
        }


def _table(report: GradientReport) -> Iterator[str]:
    arrays = {"numpy": "NumPy arrays", "torch": "PyTorch tensors"}[report.arrays]
    yield f"  {arrays}; random upstream gradient u, random directions v, seed {report.seed}"
    if not report.agreements:
        return
    labels = {name: f"{name} {shape}" for name, shape in zip(report.arguments, report.shapes, strict=True)}
    width = max(map(len, labels.values())) + 2
    yield ""
    yield f"  {'':<{width}}{'⟨v, Jᵗu⟩ yours':>20}{'⟨u, J v⟩ numeric':>20}{'difference':>14}{'allowed':>12}"
    for name, label in labels.items():
        for dtype in dict.fromkeys(a.dtype for a in report.agreements):
            rows = [a for a in report.agreements if a.argument == name and a.dtype == dtype]
            if rows:
                yield f"  {label:<{width}}{_row(max(rows, key=lambda a: (not a.ok, abs(a.backward - a.forward))))}"


def _row(a: Agreement) -> str:
    numbers = f"{a.backward:>20.10g}{a.forward:>20.10g}{shown(abs(a.backward - a.forward)):>14}{shown(a.allowed):>12}"
    dtype = "" if a.dtype == "float64" else f"  {a.dtype}"
    return f"{numbers} {'✓' if a.ok else '✗'}{dtype}{'  at a kink' if a.kink else ''}"


def _verdict(report: GradientReport) -> Iterator[str]:
    if report.passed:
        yield "✓ passes: the backward pass agrees with finite differences of the forward pass"
        return
    yield f"✗ wrong: {', '.join(report.wrong)}" if report.wrong else "✗ fails"
    for name in report.wrong:
        yield from wrapped(f"{name}: {report.where.get(name, '')}", "  ")
    for problem in report.problems:
        verb = "it raises " if problem.kind == "raises" else ""
        yield from wrapped(f"{problem.kind}: {verb}{problem.message}", "  ")
