"""The folder of exercises: made once, updated later, and never at the cost of a learner's work."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from onfoot.formats.write import write_text
from onfoot.learn.course import COURSE, EXERCISES, SOLUTIONS
from onfoot.learn.progress import FILE, Progress, digest
from onfoot.terminal import shell_word

DEFAULT = "onfoot-learn"
PAGES = ("README.md",)


@dataclass
class Changes:
    """What making or updating a folder did, by file name."""

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # files of the learner; the new text is beside them
    same: list[str] = field(default_factory=list)


def course_files() -> list[str]:
    """The names of all files that a learner gets."""
    return [*PAGES, *(name for exercise in EXERCISES for name in exercise.files)]


def make_folder(folder: Path) -> Changes:
    """Writes the exercises, or updates those that the learner has not changed."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FILE).is_file() and not _has_exercises(folder):
        raise ValueError(f"{folder} has other files in it; give the name of a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    progress, changes = Progress(folder), Changes()
    for name in course_files():
        _bring(folder, name, progress, changes)
    progress.save()
    return changes


def _has_exercises(folder: Path) -> bool:
    return any((folder / exercise.file).is_file() for exercise in EXERCISES)


def _bring(folder: Path, name: str, progress: Progress, changes: Changes) -> None:
    """Writes one file, unless the learner has changed it; then the new text is written beside it, once."""
    text, here = (COURSE / name).read_text(encoding="utf-8"), folder / name
    new, beside = digest(COURSE / name), folder / f"{name}.new"
    if not here.exists():
        changes.added.append(name)
    elif digest(here) == new:
        changes.same.append(name)
        progress.given[name] = new
        return
    elif digest(here) == progress.given.get(name):
        changes.updated.append(name)
    else:  # the learner's
        if progress.given.get(name, "") not in ("", new):
            write_text(beside, text)
            changes.kept.append(name)
        else:
            changes.same.append(name)
        progress.given[name] = new
        return
    write_text(here, text)
    progress.given[name] = new


def exercise_files(folder: Path) -> list[Path]:
    """The files of the exercises in a folder. What else is in it is the learner's own, such as experiments."""
    return [path for exercise in EXERCISES if (path := folder / exercise.file).is_file()]


def write_solutions(folder: Path) -> list[str]:
    """Writes all solutions to a folder of their own, which must be new or empty; returns the file names."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; solutions are written to a folder of their own")
    folder.mkdir(parents=True, exist_ok=True)
    for exercise in EXERCISES:
        shutil.copyfile(SOLUTIONS / exercise.file, folder / exercise.file)
    return [exercise.file for exercise in EXERCISES]


def default_folder() -> Path:
    """The current folder if it has exercises, else `onfoot-learn` in it."""
    return Path(".") if (Path(".") / FILE).is_file() else Path(DEFAULT)


def find_folder(given: Path | None) -> Path:
    """The folder of exercises: the given one, the current one, or `onfoot-learn` in it; else a ValueError."""
    if given is not None:
        if not (given / FILE).is_file():
            raise ValueError(f"{given} has no exercises; make them with: onfoot learn {shell_word(given)}")
        return given
    here = folder_here()
    if here is None:
        raise ValueError(
            "there are no exercises here; make them with: onfoot learn, or give their folder with --folder"
        )
    return here


def folder_here() -> Path | None:
    """The folder of exercises: the current one, or `onfoot-learn` in it; None if there is none."""
    return next((folder for folder in (Path("."), Path(DEFAULT)) if (folder / FILE).is_file()), None)
