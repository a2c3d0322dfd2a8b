"""A tour of the page: a text file with one section per stop, parsed, and filled in with the numbers of a run.

The format is described in docs/tours.md. Numbers in braces, such as {loss}, are filled in per run by `tour_numbers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.explore.mathml import tree
from onfoot.explore.tour_numbers import MissingNumberError, TourNumbers, known_numbers

if TYPE_CHECKING:
    from onfoot.explore.study import Study

STATIC = Path(__file__).parent / "static"
BUILT_IN = STATIC / "tour.txt"
MAX_BYTES = 100_000
SPOTS = {  # what `show:` may name; the page has the selector of each (30-tour.js)
    "loss", "tokens", "map", "row", "forward", "backward", "terms", "parameters", "parameter terms", "play", "heads",
    "take a step", "tabs"
}  # fmt: skip
CELLS = ("worst", "blamed", "largest", "masked")
SETTING = re.compile(r"([a-z]+):\s*(.*)")
PART = re.compile(r"\{([^{}]*)\}|`([^`]*)`")  # a number, or a formula


@dataclass
class Stop:
    """One stop: where it is on the page, its sentences, what to try, and details. `line` is that of its title."""

    title: str
    line: int
    view: str = "map"
    step: str = ""
    cell: str = ""
    show: str = ""
    sentences: list[str] = field(default_factory=list)
    tries: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)


def views() -> list[str]:
    """The names of the page's views."""
    return re.findall(r'data-view="(\w+)"', (STATIC / "page.html").read_text(encoding="utf-8"))


def read(path: Path) -> list[Stop]:
    """The stops of a tour file; raises ValueError with the line that is wrong."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_BYTES:
            raise ValueError(f"{path}: {len(data):,} bytes; a tour may have {MAX_BYTES:,}")
        return parse(data.decode("utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"cannot read the tour {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def parse(text: str, name: str = "tour") -> list[Stop]:
    """The stops of a tour. An error names the file and the line."""
    stops: list[Stop] = []
    for number, line in enumerate(text.splitlines(), 1):
        where, content = f"{name}, line {number}", line.strip()
        if not content or content.startswith("%"):
            continue
        if content.startswith("#"):
            title = content.lstrip("#").strip()
            if not title:
                raise ValueError(f"{where}: a stop needs a title, as in: # The loss")
            stops.append(Stop(title, number))
            continue
        if not stops:
            raise ValueError(f"{where}: a tour begins with the title of its first stop, as in: # The loss")
        _add_line(stops[-1], content, where)
    if not stops:
        raise ValueError(f"{name} has no stop; a stop begins with its title, as in: # The loss")
    for stop in stops:
        if not stop.sentences:
            raise ValueError(f"{name}, line {stop.line}: the stop {stop.title!r} has no sentence")
    return stops


def _add_line(stop: Stop, content: str, where: str) -> None:
    """Adds a setting or a sentence to the stop."""
    setting = SETTING.fullmatch(content)
    if setting is None:
        _check_parts(content, where)
        stop.sentences.append(content)
        return
    key, value = setting[1], setting[2].strip()
    if key in ("try", "more"):
        if not value:
            raise ValueError(f"{where}: {key} has no value")
        _check_parts(value, where)
        (stop.tries if key == "try" else stop.details).append(value)
        return
    _check_setting(key, value, where)
    setattr(stop, key, value)


def _check_setting(key: str, value: str, where: str) -> None:
    allowed = {"view": views(), "show": sorted(SPOTS)}
    if key not in ("view", "step", "cell", "show"):
        raise ValueError(f"{where}: unknown setting {key!r}; a stop has view, step, cell, show, try and more")
    if not value:
        raise ValueError(f"{where}: {key} has no value")
    if key in allowed and value not in allowed[key]:
        raise ValueError(f"{where}: {key} must be one of {', '.join(allowed[key])}; got {value!r}")
    if key == "cell" and value not in CELLS and not re.fullmatch(r"\d+\s*,\s*\d+", value):
        raise ValueError(f"{where}: cell must be {', '.join(CELLS)}, or a row and a column as in 3,7; got {value!r}")


def _check_parts(content: str, where: str) -> None:
    """Raises ValueError for an unknown number, or a brace or backtick without its partner."""
    for match in PART.finditer(content):
        if match[1] is not None and not TourNumbers.knows(match[1]):
            raise ValueError(f"{where}: unknown number {{{match[1]}}}; known are {known_numbers()}")
    rest = PART.sub("", content)
    for character in "{}`":
        if character in rest:
            raise ValueError(f"{where}: {character!r} without its partner")


def filled(study: Study, stops: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The tour (as `vars` of its stops; the built-in one by default) with the numbers of this run.

    What this network does not have is left out, sentence by sentence.
    """
    wanted = read(BUILT_IN) if stops is None else [Stop(**stop) for stop in stops]
    numbers = TourNumbers(study)
    math: dict[str, Any] = {}
    found = [one for stop in wanted if (one := _filled_stop(stop, numbers, math)) is not None]
    return {"stops": found, "left_out": len(wanted) - len(found), "math": math}


def _filled_stop(stop: Stop, numbers: TourNumbers, math: dict[str, Any]) -> dict[str, Any] | None:
    """The stop as JSON; None if this network has no such step, or no sentence of it can be filled in."""
    try:
        step = numbers.step(stop.step)
    except MissingNumberError:
        return None
    sentences = [parts for text in stop.sentences if (parts := _parts(text, numbers, math))]
    if not sentences:
        return None
    return {
        "title": stop.title,
        "view": stop.view,
        "step": step,
        "cell": numbers.cell(step, stop.cell),
        "token": numbers.token_of(stop.cell),
        "after": _after(stop, numbers),
        "show": stop.show,
        "text": sentences,
        "try": [parts for text in stop.tries if (parts := _parts(text, numbers, math))],
        "more": [parts for text in stop.details if (parts := _parts(text, numbers, math))],
    }


def _after(stop: Stop, numbers: TourNumbers) -> float | None:
    """The probability of the worst token's target after the step of training that the stop shows."""
    if stop.view != "step" or stop.cell != "worst":
        return None
    try:
        return float(numbers.number("probability after")[1])
    except MissingNumberError:
        return None


def _parts(text: str, numbers: TourNumbers, math: dict[str, Any]) -> list[Any]:
    """A sentence as strings, {"math": formula} and {"name", "text", "value"}; empty if a number is missing."""
    out: list[Any] = []
    end = 0
    for match in PART.finditer(text):
        out.append(text[end : match.start()])
        end = match.end()
        formula = match[2]
        if match[1] is not None:
            try:
                shown, value = numbers.number(match[1])
            except MissingNumberError:
                return []
            if not match[1].startswith("formula "):
                out.append({"name": match[1], "text": shown, "value": value})
                continue
            formula = shown
        math[formula] = tree(formula)
        out.append({"math": formula})
    return [part for part in [*out, text[end:]] if part]
