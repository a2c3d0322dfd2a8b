"""A verdict in words: which gradients are right, what is wrong in one sentence, where a hint and the derivation are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from onfoot.learn.verdict import PartVerdict, Verdict
from onfoot.terminal import listed

WIDTH = 100
MARKS = {
    "right": "✓ right",
    "wrong": "✗ wrong",
    "None": "· not written yet (None)",
    "not judged": "? not judged",
}


def answer_text(verdict: Verdict, hints_seen: int = 0) -> str:
    """The answer to `onfoot learn check`."""
    exercise = verdict.exercise
    lines = [f"Exercise {exercise.number} · {exercise.title} · {exercise.file}", ""]
    if not verdict.parts:
        return "\n".join([*lines, *wrapped(verdict.message), ""])
    first = first_sentence(verdict)
    lines += wrapped(first)
    before: list[PartVerdict] = []
    for part in verdict.parts:
        same = next((one for one in before if one.mistakes and one.mistakes == part.mistakes), None)
        lines += ["", *part_lines(part, first, same.part.title if same else "")]
        before.append(part)
    return "\n".join([*lines, "", *what_next(verdict, hints_seen)])


def first_sentence(verdict: Verdict) -> str:
    """What matters most, in one or two sentences."""
    if verdict.passed:
        functions = verdict.exercise.functions
        return f"Solved: {listed(functions)} {'is' if len(functions) == 1 else 'are'} right in every case."
    order = ("changed", "failed", "wrong", "partial", "unsolved")
    part = min((p for p in verdict.parts if p.status in order), key=lambda p: order.index(p.status))
    function, unsolved = part.part.function, {p.part.function for p in verdict.parts if p.status != "passed"}
    solved = [one for one in verdict.exercise.functions if one not in unsolved]
    if part.status == "changed":
        return (
            f"Not judged: {part.problems[0]}. Only {function} is to be written; "
            f"this prints the file as it was given: onfoot learn show {verdict.exercise.number}"
        )
    if part.status == "failed":
        if not part.problems:
            return f"{function} fails."
        right = part.marked("right")
        some = f" {sentence(right, 'right')[:-1]} in the cases where it ran." if right else ""
        return f"{function} {'fails in some cases' if right else 'cannot be judged'}: {part.problems[0]}.{some}"
    if part.status == "wrong":
        wrong, right = part.marked("wrong"), part.marked("right")
        return sentence(wrong, "wrong") + (f" {sentence(right, 'right')}" if right else "")
    empty = part.marked("None")
    if part.status == "partial":
        return f"Right so far: {listed(part.marked('right'))}. Go on with {empty[0]}."
    begin = f"{listed(solved)} solved. Next:" if solved else "Nothing to judge yet:"
    return f"{begin} {function} returns None for {listed(empty)}. Start with {empty[0]}."


def sentence(names: Sequence[str], mark: str) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} {mark}."


def part_lines(part: PartVerdict, said: str = "", same_as: str = "") -> Iterator[str]:
    """A row per gradient, then what is wrong and was not said before; `same_as` has the same mistakes."""
    yield f"  {part.part.title}"
    width = max(map(len, part.marks)) + 2
    for name, mark in part.marks.items():
        ran = " where it ran" if part.status == "failed" and mark == "right" else ""
        yield f"    {name:<{width}}{MARKS[mark]}{ran}"
    if part.status == "changed":
        return
    for problem in part.problems:
        if problem in said:
            continue
        yield from wrapped(capital(problem), "    ")
    if same_as:
        yield f"    The same mistake as in {same_as}."
    for name, explained in zip(part.mistakes, part.explained, strict=True) if not same_as else ():
        yield from wrapped(f"Mistake: {name}. {explained}".strip(), "    ")
    if part.chain:
        yield from wrapped(f"Where the chain breaks: {part.chain}", "    ")
    yield from note_lines(part)
    found = None if part.report is None else part.report.diagnosis
    unexplained = [] if found is None else found.unexplained
    if unexplained and part.status == "wrong":
        yield from wrapped(f"No known mistake explains {listed(unexplained)}: {where(part, unexplained[0])}.", "    ")


def note_lines(part: PartVerdict) -> Iterator[str]:
    """What is not wrong in a function, but should be known."""
    for note in part.notes:
        yield from wrapped(f"Note: {part.part.function}: {note}.", "    ")


def where(part: PartVerdict, name: str) -> str:
    """Which entries of a wrong gradient are wrong, in the first case where it is wrong."""
    assert part.report is not None
    outcomes = [o for o in part.report.outcomes if part.report.counts(o)]
    for o in part.report.failed:
        for m in o.measured:
            if m.gradient == name and not m.ok:
                right = {one.case.name for one in outcomes if one.ok}
                some = " (it is right in other cases)" if right else ""
                return f"in the case “{o.case.name}”{some} {m.where or 'some entries are not finite'}"
    return "it could not be compared"


def what_next(verdict: Verdict, hints_seen: int) -> Iterator[str]:
    exercise = verdict.exercise
    if verdict.passed:
        yield f"The derivation, to compare with yours: {exercise.derivation}"
        return
    if verdict.status == "changed":
        return
    seen = f" ({hints_seen} of 3 seen)" if hints_seen else " (three levels)"
    yield f"The page of the exercise:  {exercise.stem}.md"
    yield f"A hint:                    onfoot learn hint {exercise.number}{seen}"
    yield f"The whole derivation:      {exercise.derivation}"
    if verdict.status == "wrong":
        yield f"All numbers:               onfoot learn check {exercise.number} --report"


def capital(text: str) -> str:
    """The text as a sentence: names such as dx stay as they are."""
    return (text if text.split()[0].rstrip(":").startswith("d") else text[:1].upper() + text[1:]).rstrip(".") + "."


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most WIDTH; a line break in the text stays."""
    lines: list[str] = []
    for line in text.split("\n"):
        own = indent + line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=own, drop_whitespace=True) or [""]
    return lines
