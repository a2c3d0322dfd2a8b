"""The page of `onfoot learn grade --html`: one file without scripts; every text from a submission is escaped."""

from __future__ import annotations

from html import escape

from onfoot.learn.course import Exercise
from onfoot.learn.grade import Result
from onfoot.learn.grade_report import WORDS, Gradebook, sign, what
from onfoot.terminal import printable

STYLE = """
:root { color-scheme: light dark; --right: 30, 150, 80; --wrong: 200, 60, 50; --part: 200, 140, 20; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #8884; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
.passed { color: rgb(var(--right)); } .partial { color: rgb(var(--part)); }
.wrong, .failed, .import, .syntax, .changed { color: rgb(var(--wrong)); }
.note { opacity: .7; font-size: .9em; } details { margin: .5rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; opacity: .8; }
"""


def grade_page(book: Gradebook, title: str = "Grades") -> str:
    """The whole page: the table, the frequent mistakes, and everything that was found about each student."""
    parts = [
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style>\n<h1>{_text(title)}</h1>\n",
        _table(book),
        _frequent(book),
        "<h2>Every submission</h2>\n",
        *(_student(book, student, list(results.values())) for student, results in book.students.items()),
        "</html>\n",
    ]
    return "".join(parts)


def _text(text: str) -> str:
    return escape(printable(text))


def _table(book: Gradebook) -> str:
    head = "".join(f'<th title="{_text(one.title)}">{one.number} {_text(one.name)}</th>' for one in book.exercises)
    rows = []
    for i, (student, results) in enumerate(book.students.items()):
        cells = "".join(_cell(results[one.name]) for one in book.exercises)
        total = f"{book.total(results.values()):g} of {book.most:g}"
        rows.append(f'<tr><td><a href="#s{i}">{_text(student)}</a></td>{cells}<td class="n">{total}</td></tr>\n')
    solved = "".join(f"<td>{_solved(book, one)}</td>" for one in book.exercises)
    foot = f"<tr><th>solved</th>{solved}<td></td></tr>"
    first = f"<tr><th>student</th>{head}<th>points</th></tr>"
    return f'<div class="scroll"><table>{first}\n{"".join(rows)}{foot}</table></div>\n'


def _cell(result: Result) -> str:
    return f'<td class="{_class(result)}" title="{_text(what(result))}">{sign(result)}</td>'


def _class(result: Result) -> str:
    return result.status.replace(" ", "-") if result.status in WORDS else "failed"


def _solved(book: Gradebook, exercise: Exercise) -> str:
    counts = book.counts(exercise)
    return f"{counts.get('passed', 0)} of {sum(counts.values())}"


def _frequent(book: Gradebook) -> str:
    rows = "".join(
        f'<tr><td class="n">{len(students)}</td><td>{exercise.number} {_text(exercise.name)}</td>'
        f'<td>{_text(mistake)}</td><td class="note">{_text(", ".join(students))}</td></tr>\n'
        for exercise, mistake, students in book.frequent()
    )
    if not rows:
        return ""
    head = "<tr><th>students</th><th>exercise</th><th>mistake</th><th></th></tr>"
    return f'<h2>The most frequent mistakes</h2>\n<div class="scroll"><table>{head}\n{rows}</table></div>\n'


def _student(book: Gradebook, student: str, results: list[Result]) -> str:
    number = list(book.students).index(student)
    total = f"{book.total(results):g} of {book.most:g}"
    return (
        f'<details open id="s{number}"><summary><b>{_text(student)}</b> · {total}</summary>\n'
        f"{''.join(_result(book, result) for result in results)}</details>\n"
    )


def _result(book: Gradebook, result: Result) -> str:
    points = f"{book.points.of(result):g} of {book.points.most(result.exercise):g}"
    word = WORDS.get(result.status, result.status)
    lines = [
        f"<h3>{result.number} {_text(result.exercise)} · "
        f'<span class="{_class(result)}">{sign(result)} {_text(word)}</span> <span class="note">{points}</span></h3>\n'
    ]
    if result.message:
        lines.append(f"<p>{_text(result.message)}</p>\n")
    for part in result.parts if not result.passed else ():
        lines.append(_part(part))
    lines += [f'<p class="note">{_text(note)}</p>\n' for note in result.notes]
    if result.printed.strip():
        lines.append(f"<details><summary>what it printed</summary><pre>{_text(result.printed)}</pre></details>\n")
    return "".join(lines)


def _part(part: dict[str, object]) -> str:
    def texts(key: str) -> list[str]:
        found = part.get(key, [])
        return [str(one) for one in found] if isinstance(found, list) else []

    marks = part.get("gradients", {})
    listed = ", ".join(f"{name} {mark}" for name, mark in marks.items()) if isinstance(marks, dict) else ""
    named = texts("mistakes")
    explained = [*texts("explained"), *[""] * len(named)]
    rows = [f"<li>{_text(problem)}</li>" for problem in texts("problems")]
    rows += [f"<li><b>{_text(name)}</b> {_text(why)}</li>" for name, why in zip(named, explained, strict=False)]
    return f"<p><code>{_text(str(part.get('function', '')))}</code>: {_text(listed)}</p>\n<ul>{''.join(rows)}</ul>\n"
