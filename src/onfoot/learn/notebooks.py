"""The exercises as notebooks, written as plain JSON (nbformat 4): the page, the code to complete, and a check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onfoot.formats.write import write_text
from onfoot.learn.course import COURSE, EXERCISES, SOLUTIONS, Exercise
from onfoot.learn.notebook_code import CHECK

FOLDER, SOLVED_FOLDER = "onfoot-notebooks", "onfoot-notebooks-solved"  # solutions are never beside the exercises
NOTE = "**In this notebook** the next cell takes the place of the file, and the last cell checks it."
IMPORTS = (
    "# So that this notebook can import from the notebooks before it.\n"
    "import onfoot.learn\n\n"
    "onfoot.learn.import_notebooks()"
)


def notebook(exercise: Exercise, solved: bool = False, nbgrader_points: float | None = None) -> dict[str, Any]:
    """The notebook of an exercise. With points, the cell that checks is one that nbgrader grades."""
    page = (COURSE / f"{exercise.stem}.md").read_text(encoding="utf-8").strip()
    code = ((SOLUTIONS if solved else COURSE) / exercise.file).read_text(encoding="utf-8").strip()
    functions = ", ".join(exercise.functions)
    check = f"import onfoot.learn\n\nonfoot.learn.assert_solved({exercise.name!r}, {functions})"
    graded: dict[str, Any] = {}
    if nbgrader_points is not None:
        graded["nbgrader"] = {
            "grade": True,
            "grade_id": exercise.stem,
            "locked": True,
            "points": nbgrader_points,
            "schema_version": 3,
            "solution": False,
            "task": False,
            "cell_type": "code",
        }
    cells = [_cell("page", "markdown", f"{page}\n\n{NOTE}")]
    if exercise.needs:
        cells.append(_cell("imports", "code", IMPORTS, {"tags": [CHECK]}))
    cells += [_cell("exercise", "code", code), _cell("check", "code", check, {"tags": [CHECK], **graded})]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _cell(name: str, kind: str, source: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": name, "metadata": metadata or {}, "source": source.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def write_notebooks(folder: Path, solved: bool = False, nbgrader: bool = False) -> list[str]:
    """Writes a notebook per exercise to a folder, never over another file; returns the names that were written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    names = [f"{exercise.stem}.ipynb" for exercise in EXERCISES]
    if solved and any((folder / name).exists() for name in names):
        raise ValueError(f"{folder} has notebooks already; solved ones are written to a folder of their own")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for exercise in EXERCISES:
        path = folder / f"{exercise.stem}.ipynb"
        if not path.exists():
            text = json.dumps(notebook(exercise, solved, 1.0 if nbgrader else None), indent=1, ensure_ascii=False)
            write_text(path, text + "\n")
            written.append(path.name)
    return written
