"""Folders of exercises and the solutions as modules, for the tests of the course."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from onfoot.learn.course import COURSE, EXERCISES, SOLUTIONS, Exercise


@contextmanager
def solution_modules() -> Iterator[dict[str, ModuleType]]:
    """Every solution as a module, by the exercise's name. They import each other by their file names."""
    stems = [exercise.stem for exercise in EXERCISES]
    sys.path.insert(0, str(SOLUTIONS))
    try:
        yield {exercise.name: importlib.import_module(exercise.stem) for exercise in EXERCISES}
    finally:
        sys.path.remove(str(SOLUTIONS))
        for stem in stems:
            sys.modules.pop(stem, None)


def solved_folder(folder: Path, *unsolved: Exercise) -> Path:
    """A folder with all solutions, but for these exercises the files as they are given."""
    folder.mkdir(exist_ok=True)
    for exercise in EXERCISES:
        source = COURSE if exercise in unsolved else SOLUTIONS
        shutil.copyfile(source / exercise.file, folder / exercise.file)
    return folder


def edit(path: Path, old: str, new: str) -> None:
    """Replaces text that must be there once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")
