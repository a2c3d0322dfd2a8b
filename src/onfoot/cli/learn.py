"""`onfoot learn`: makes a folder of exercises, checks them, gives hints, and shows what is solved."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from onfoot.cli import learn_grade, learn_train
from onfoot.terminal import shell_word

if TYPE_CHECKING:
    from onfoot.learn.course import Exercise
    from onfoot.learn.verdict import Verdict

Folder = Annotated[
    Path | None, typer.Option("--folder", help="Folder of exercises, if it is not the current one.", show_default=False)
]
Number = Annotated[
    str | None,
    typer.Argument(metavar="N", help="Number or name of the exercise; by default the next.", show_default=False),
]
MAKE = "make"
NEAR = 0.7  # how alike a word and a command must be for a suggestion


class _Learn(TyperGroup):
    """`onfoot learn FOLDER` is `onfoot learn make FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, *ctx.help_option_names)
        if not args or args[0] in known:
            return super().parse_args(ctx, args or [MAKE])
        option, _, value = args[0].partition("=")
        if option == "--folder":
            name = value or next(iter(args[1:]), "FOLDER")
            raise ValueError(f"the folder to make stands without an option: onfoot learn {shell_word(name)}")
        if args[0].isdecimal() and not Path(args[0]).exists():
            raise ValueError(
                f"there is no command {args[0]!r}; did you mean: onfoot learn check {args[0]}? "
                f"(A folder of that name is made by: onfoot learn make {args[0]})"
            )
        near = difflib.get_close_matches(args[0], self.commands, 1, NEAR)
        if near and not Path(args[0]).exists():
            raise ValueError(
                f"there is no command {args[0]!r}; did you mean: onfoot learn {near[0]}? "
                f"(A folder of that name is made by: onfoot learn make {args[0]})"
            )
        return super().parse_args(ctx, [MAKE, *args])


app = typer.Typer(
    cls=_Learn,
    help="Learn backpropagation by writing it: exercises from one product to a whole GPT. "
    "`onfoot learn [FOLDER]` makes a folder of exercises, or updates it.",
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(MAKE)
def make(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder to make or to update; by default onfoot-learn, or the current folder if it has exercises.",
            show_default=False,
        ),
    ] = None,
    with_solutions: Annotated[
        bool,
        typer.Option("--with-solutions", help="For teachers: write the solutions to FOLDER instead of the exercises."),
    ] = False,
    notebooks: Annotated[
        bool, typer.Option("--notebooks", help="Write the exercises as notebooks; with --with-solutions, solved.")
    ] = False,
    nbgrader: Annotated[
        bool, typer.Option("--nbgrader", help="For teachers: notebooks whose check is a cell that nbgrader grades.")
    ] = False,
) -> None:
    """Make a folder of exercises, or update it. Your own files are never overwritten."""
    if notebooks or nbgrader:
        learn_grade.write_notebooks(folder, with_solutions, nbgrader)
        return
    from onfoot.cli import console
    from onfoot.learn.folder import default_folder, make_folder, write_solutions

    if with_solutions and folder is None:
        raise ValueError("--with-solutions needs a folder of its own; add its name to the command")
    folder = default_folder() if folder is None else folder
    if with_solutions:
        names = write_solutions(folder)
        console.show_text(f"wrote {len(names)} solutions to {folder}")
        return
    existed = folder.is_dir() and any(folder.iterdir())
    changes = make_folder(folder)
    if not existed:
        console.show_text(f"wrote the exercises to {folder}. Begin with {folder / 'README.md'}, then:")
        console.show_text(f"  cd {shell_word(folder)}\n  onfoot learn check 1")
        return
    for words, names in (("new", changes.added), ("updated", changes.updated)):
        for name in names:
            console.show_text(f"{words}: {name}")
    for name in changes.kept:
        console.show_text(f"kept: {name} is yours; the course's new text is in {name}.new")
    if not (changes.added or changes.updated or changes.kept):
        console.show_text(f"{'this folder' if folder == Path('.') else folder} is up to date")


@app.command("check")
def check(
    number: Number = None,
    folder: Folder = None,
    everything: Annotated[bool, typer.Option("--all", help="Check every exercise.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever a file is saved, until Ctrl-C.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Show the whole report of the checker as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that a call of your function may take.")] = 30.0,
) -> None:
    """Check an exercise: which gradients are right, and what is wrong with the others.

    Exit status: 0 if everything checked is solved, 1 if not, 2 if the arguments are invalid.
    """
    from onfoot.cli import console
    from onfoot.learn.course import EXERCISES
    from onfoot.learn.folder import find_folder
    from onfoot.learn.session import check_exercise

    if everything and (number is not None or watch):
        raise ValueError("--all checks every exercise once; leave out the number and --watch")
    if as_json and (watch or report):
        raise ValueError("--json prints the verdicts alone; leave out --watch and --report")
    where = find_folder(folder)
    if watch:
        _watch(where, number, timeout, report)
        return
    chosen = EXERCISES if everything else (_chosen(where, number),)
    with _Working() as working:
        verdicts = [check_exercise(where, exercise, timeout, working.say) for exercise in chosen]
    if as_json:
        console.show_json([verdict.to_dict() for verdict in verdicts])
    elif everything:
        _show_map(where)
    else:
        _show(where, verdicts[0], report)
    raise typer.Exit(0 if all(verdict.passed for verdict in verdicts) else 1)


@app.command("hint")
def hint(
    number: Number = None,
    folder: Folder = None,
    level: Annotated[
        int | None, typer.Option("--level", help="1, 2 or 3; by default the next.", show_default=False)
    ] = None,
) -> None:
    """Show the next hint of an exercise. There are three; each says more."""
    from onfoot.cli import console
    from onfoot.learn.course import find_exercise
    from onfoot.learn.folder import find_folder, folder_here
    from onfoot.learn.session import hint_text

    if number is None or folder is not None:
        where = find_folder(folder)
        console.show_text(hint_text(where, _chosen(where, number), level))
    else:  # beside notebooks there is no folder
        console.show_text(hint_text(folder_here(), find_exercise(number), level))


@app.command("map")
def show_map(folder: Folder = None) -> None:
    """Show all exercises, and which are solved."""
    from onfoot.learn.folder import find_folder

    _show_map(find_folder(folder))


@app.command("show")
def show_given(number: Number = None, folder: Folder = None) -> None:
    """Print the file of an exercise as it was given."""
    from onfoot.learn.course import COURSE

    exercise = _named_or_current(number, folder)
    print((COURSE / exercise.file).read_text(encoding="utf-8"), end="")


@app.command("derivation")
def show_derivation(number: Number = None, folder: Folder = None) -> None:
    """Print the whole derivation of an exercise: the answer, to compare with yours."""
    from onfoot.cli import console
    from onfoot.learn.derivation import derivation_text

    console.show_text(derivation_text(_named_or_current(number, folder)))


def _chosen(folder: Path, number: str | None) -> Exercise:
    from onfoot.learn.course import find_exercise
    from onfoot.learn.progress import Progress

    return Progress(folder).current() if number is None else find_exercise(number)


def _named_or_current(number: str | None, folder: Path | None) -> Exercise:
    """The exercise of that number or name, for which no folder is needed; else the next one of the folder."""
    from onfoot.learn.course import find_exercise
    from onfoot.learn.folder import find_folder

    return _chosen(find_folder(folder), None) if number is None else find_exercise(number)


def _watch(folder: Path, number: str | None, timeout: float, report: bool) -> None:
    """Checks one exercise now, then each that is saved (only that one, if its number is given)."""
    from onfoot.cli import console
    from onfoot.learn.session import changed_files, check_exercise

    first = _chosen(folder, number)
    changed = changed_files(folder)

    def checked(exercise: Exercise) -> Verdict:
        with _Working() as working:
            return check_exercise(folder, exercise, timeout, working.say)

    try:
        _show(folder, checked(first), report)
        console.show_text("\nwaiting for a file to be saved; Ctrl-C ends")
        for exercise in changed:
            if number is None or exercise == first:
                console.show_text("")
                _show(folder, checked(exercise), report)
    except KeyboardInterrupt:
        console.show_text("")


def _show(folder: Path, verdict: Verdict, report: bool) -> None:
    from onfoot.cli import console
    from onfoot.learn.answer import answer_text
    from onfoot.learn.progress import TRAIN, Progress
    from onfoot.learn.words import legend, report_text

    progress = Progress(folder)
    console.show_text(_coloured(answer_text(verdict, progress.hints(verdict.exercise))))
    for part in verdict.parts if report else ():
        if part.report is not None:
            shown = report_text(str(part.report), verdict.exercise.derivation)
            console.show_text(f"\n{legend(part.part.function)}\n\n{shown}")
    if verdict.passed:
        following = progress.current()
        after = f"Next: {following.stem}.md, then onfoot learn check {following.number}"
        console.show_text(after if not progress.solved(following) else "Every exercise is solved.")
        if verdict.exercise.pairs or verdict.exercise.name == "gpt2":
            console.show_text(
                f"A small GPT-2 trains with what is yours so far, and with onfoot's for the rest: {TRAIN}\n"
                f"Your gradients beside the right ones, on a page: onfoot explore --engine {shell_word(folder)}"
            )


class _Working:
    """A line that says what is being checked, and for how long already; nothing if the output is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._line = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._line.add_task("checking", total=None)

    def __enter__(self) -> _Working:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()

    def say(self, words: str) -> None:
        self._line.update(self._task, description=words)


def _show_map(folder: Path) -> None:
    from onfoot.cli import console
    from onfoot.learn.progress import Progress, map_text

    console.show_text(_coloured(map_text(Progress(folder))))


def _coloured(text: str) -> Any:
    from rich.text import Text

    from onfoot.terminal import for_terminal

    out = Text(for_terminal(text))
    out.highlight_regex(r"(?m)^\s+✓.*$|✓ right|\ASolved.*", "green")
    out.highlight_regex(r"✗ wrong", "bold red")
    out.highlight_regex(r"(?m)^\s+Mistake: [^.]*", "bold yellow")
    out.highlight_regex(r"(?m)^\s+▸.*$", "bold")
    out.highlight_regex(r"\A.*", "bold cyan")
    return out


app.command("train")(learn_train.train)
learn_grade.register(app)
