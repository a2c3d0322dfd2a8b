"""`onfoot learn grade`, `onfoot learn new`, `onfoot learn otter`: what a teacher needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onfoot.cli.options import check_writable

if TYPE_CHECKING:
    from onfoot.learn.grade import Result
    from onfoot.learn.grade_report import Gradebook

LONGEST = 86_400  # seconds: a day
SHOWN = 30  # lines of mistakes on the terminal


def register(app: typer.Typer) -> None:
    """Adds the commands of this file to `onfoot learn`."""
    app.command("grade")(grade)
    app.command("new")(new)
    app.command("otter")(otter)


def grade(
    submissions: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="One submission, or a folder of them: per student a folder, .zip, .py or .ipynb.",
            show_default=False,
        ),
    ],
    exercises: Annotated[
        str | None,
        typer.Option("--exercises", help="Which exercises, e.g. 1,3,5-7; by default all that were handed in."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="How many are judged at a time.")] = 2,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a call may take.")] = 10.0,
    total: Annotated[float, typer.Option("--total", help="Seconds that all calls of a function may take.")] = 60.0,
    memory: Annotated[int, typer.Option("--memory", help="MiB of memory that a submission may use.")] = 2048,
    kept: Annotated[
        Path, typer.Option("--results", help="File that each result is written to as soon as it is known.")
    ] = Path("grades.jsonl"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Use the results that are in that file already, and go on.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge everything again, and replace that file.")] = False,
    points: Annotated[
        Path | None,
        typer.Option("--points", help='JSON file with points, e.g. {"linear": 10, "2": 5}; by default 1 each.'),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Give the share of the points that the right gradients are.")
    ] = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a gradebook, a row per student.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with every mistake, in one file.")] = None,
    gradescope: Annotated[
        Path | None, typer.Option("--gradescope", help="Write Gradescope's results.json, for one submission.")
    ] = None,
) -> None:
    """Grade submissions: every mistake of every student is named. For teachers.

    Every exercise runs in a process of its own, with limits; docs/teaching.md says what that does not protect against.
    Exit status: 0 if everything could be judged, however it was judged; 2 if the arguments are invalid.
    """
    from onfoot.cli import console
    from onfoot.formats.write import write_json, write_text
    from onfoot.learn.course import EXERCISES
    from onfoot.learn.grade import grade as grade_all
    from onfoot.learn.grade_find import check_paths, find_submissions, one_submission
    from onfoot.learn.grade_formats import gradescope as for_gradescope
    from onfoot.learn.grade_html import grade_page
    from onfoot.learn.grade_limits import MIB, Limits
    from onfoot.learn.grade_report import Gradebook, Points, read_points

    if resume and fresh:
        raise ValueError("--resume goes on, --fresh begins again; choose one")
    for option, seconds in (("--timeout", timeout), ("--total", total)):
        if not 0 < seconds <= LONGEST:
            raise ValueError(f"{option} must be > 0 and at most {LONGEST} seconds, got {seconds:g}")
    limits = Limits(call_seconds=timeout, seconds=total, memory=memory * MIB)
    scheme = read_points(points, partial) if points is not None else Points(partial=partial)
    numbers = _numbers(exercises)
    check_paths(submissions)
    for option, path in (
        ("--csv", csv), ("--json", as_json), ("--html", html), ("--gradescope", gradescope), ("--results", kept),
    ):  # fmt: skip
        check_writable(path, option)
    found = find_submissions(submissions) if gradescope is None else one_submission(submissions)
    if gradescope is not None and numbers is None and not any(found[0].has(exercise) for exercise in EXERCISES):
        numbers = [exercise.number for exercise in EXERCISES]  # none was handed in, which the student is told
    if kept.exists() and not resume:
        if not fresh:
            raise ValueError(f"{kept} exists; --resume goes on with it, --fresh judges everything again")
        kept.unlink()
    with _Bar() as bar:
        try:
            results = grade_all(
                found,
                exercises=numbers,
                jobs=jobs,
                limits=limits,
                kept=kept,
                resume=resume,
                on_start=bar.start,
                on_result=bar.advance,
            )
        except KeyboardInterrupt:
            bar.stop()
            console.show_text(f"interrupted; {bar.done} of {bar.total} results are in {kept}: go on with --resume")
            raise typer.Exit(130) from None
    book = Gradebook(results, scheme)
    _show(book)
    if csv is not None:
        write_text(csv, book.to_csv())
    if as_json is not None:
        write_json(as_json, book.to_dict())
    if html is not None:
        write_text(html, grade_page(book))
    if gradescope is not None:
        write_json(gradescope, for_gradescope(book))
    for path in (csv, as_json, html, gradescope):
        if path is not None:
            console.show_text(f"wrote {path}")


def new(
    name: Annotated[str, typer.Argument(help="Name of the exercise, e.g. conv.", show_default=False)],
    folder: Annotated[Path, typer.Option("--folder", help="Folder that its files are written to.")] = Path("."),
    number: Annotated[
        int | None, typer.Option("--number", help="Its number; by default the next.", show_default=False)
    ] = None,
) -> None:
    """Write a new exercise from a template: the file to complete, its page, hints and solution. For teachers."""
    from onfoot.cli import console
    from onfoot.learn.template import next_steps, write_template

    for path in write_template(name, folder, number):
        console.show_text(f"wrote {path}")
    console.show_text(next_steps(name, number))


def write_notebooks(folder: Path | None, solved: bool, nbgrader: bool) -> None:
    """`onfoot learn --notebooks`."""
    from onfoot.cli import console
    from onfoot.learn import EXERCISES, notebooks

    folder = folder or Path(notebooks.SOLVED_FOLDER if solved else notebooks.FOLDER)
    names = notebooks.write_notebooks(folder, solved, nbgrader)
    kept = len(EXERCISES) - len(names)
    written = {0: "no notebook", 1: "1 notebook"}.get(len(names), f"{len(names)} notebooks")
    console.show_text(f"wrote {written} to {folder}")
    if kept:
        console.show_text(
            f"{kept} exist{'s' if kept == 1 else ''} already and {'is' if kept == 1 else 'are'} not overwritten"
        )


def otter(
    folder: Annotated[Path, typer.Argument(help="Folder that the tests are written to.")] = Path("tests"),
    points: Annotated[Path | None, typer.Option("--points", help="JSON file with points, as for grade.")] = None,
) -> None:
    """Write a test per exercise in the format of Otter-Grader. For teachers."""
    from onfoot.cli import console
    from onfoot.learn.grade_formats import write_otter_tests
    from onfoot.learn.grade_report import read_points

    names = write_otter_tests(folder, read_points(points) if points is not None else None)
    console.show_text(f"wrote {len(names)} tests to {folder}")


def _numbers(text: str | None) -> list[int] | None:
    """1,3,5-7 as numbers."""
    if text is None:
        return None
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers:
                raise ValueError
            found += numbers
    except ValueError:
        raise ValueError(
            f"--exercises must be numbers such as 1,3,5-7, the smaller first, got {json.dumps(text)}"
        ) from None
    return found


def _show(book: Gradebook) -> None:
    """The table, what is wrong, and the mistakes that were most frequent."""
    from onfoot.cli.console import Sheet, show_sheet
    from onfoot.learn.grade_report import explain_signs, sheet_rows, what

    def label(result: Result) -> str:
        return f"{result.number} {result.exercise}"

    lines: list[tuple[str, ...]]
    columns, rows = sheet_rows(book)
    show_sheet(Sheet("Grades", columns, rows, [explain_signs(book.results)]))
    wrong = [result for result in book.results if result.status not in ("passed", "missing", "unsolved")]
    if wrong:
        lines = [(result.student, label(result), what(result)) for result in wrong[:SHOWN]]
        more = [f"{len(wrong) - SHOWN} more; --html writes them all"] if len(wrong) > SHOWN else []
        show_sheet(Sheet("What was found", ["student", "exercise", "verdict"], lines, more))
    frequent = [one for one in book.frequent() if len(one[2]) > 1]
    if frequent:
        lines = [(str(len(who)), f"{one.number} {one.name}", mistake) for one, mistake, who in frequent[:SHOWN]]
        show_sheet(Sheet("The most frequent mistakes", [">students", "exercise", "mistake"], lines))
    noted = [result for result in book.results if result.notes]
    if noted:
        lines = [(result.student, label(result), "; ".join(result.notes)) for result in noted]
        show_sheet(Sheet("Notes", ["student", "exercise", "note"], lines[:SHOWN]))


class _Bar:
    """A bar that shows how many exercises have been judged; silent if the output is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.total = self.done = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, total: int) -> None:
        self.total = total
        self._task = self._bar.add_task("", total=total)

    def advance(self, result: Result) -> None:
        self.done += 1
        self._bar.advance(self._task)

    def stop(self) -> None:
        self._bar.stop()
