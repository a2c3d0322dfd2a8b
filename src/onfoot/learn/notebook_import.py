"""Lets a notebook import from the notebooks beside it: `from e01_linear import linear_backward`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from onfoot.learn.course import EXERCISES
from onfoot.learn.notebook_code import code_of


class _NotebookLoader(importlib.abc.Loader):
    def __init__(self, path: Path) -> None:
        self.path = path

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(compile(code_of(self.path.read_bytes()), str(self.path), "exec"), vars(module))


class _NotebookFinder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        book = self.folder / f"{name}.ipynb"
        if name not in {exercise.stem for exercise in EXERCISES} or not book.is_file():
            return None
        return importlib.util.spec_from_loader(name, _NotebookLoader(book), origin=str(book))


def import_notebooks(folder: Path | str = ".") -> None:
    """Makes the exercises in a folder's notebooks importable; their code is read again at each call."""
    where = Path(folder).resolve()
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != _NotebookFinder.__name__]
    sys.meta_path.insert(0, _NotebookFinder(where))
    for exercise in EXERCISES:
        module = sys.modules.get(exercise.stem)
        if module is not None and str(getattr(module, "__file__", "")).endswith(".ipynb"):
            del sys.modules[exercise.stem]
