"""Notebooks of the exercises: valid, executed with their solutions, refused while unsolved, graded like files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.learn import EXERCISES, assert_solved
from onfoot.learn.course import COURSE, SOLUTIONS
from onfoot.learn.notebook_code import code_of
from onfoot.learn.notebooks import notebook, write_notebooks

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def executed(path: Path, **options: Any) -> Any:
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
    return book


def test_every_notebook_is_valid_and_holds_the_file_of_its_exercise() -> None:
    for exercise in EXERCISES:
        for solved, folder in ((False, COURSE), (True, SOLUTIONS)):
            book = notebook(exercise, solved, 3.0)
            nbformat.validate(nbformat.from_dict(book))
            assert code_of(json.dumps(book)).strip() == (folder / exercise.file).read_text(encoding="utf-8").strip()


@pytest.fixture
def solved(tmp_path: Path, kernel: None) -> list[Path]:
    result = CliRunner().invoke(app, ["learn", str(tmp_path), "--notebooks", "--with-solutions"])
    assert result.exit_code == 0, result.output
    return sorted(tmp_path.glob("*.ipynb"))


def printed(cell: Any) -> str:
    return "".join(one.get("text", "") for one in cell.outputs)


def test_the_cells_of_all_solved_notebooks_run_and_each_check_says_so(solved: list[Path]) -> None:
    assert len(solved) == len(EXERCISES)
    every = solved[0].with_name("every.ipynb")
    books = [json.loads(path.read_text(encoding="utf-8")) for path in solved]
    cells = [{**cell, "id": f"{cell['id']}-{i}"} for i, book in enumerate(books) for cell in book["cells"]]
    every.write_text(json.dumps({**books[0], "cells": cells}), encoding="utf-8")  # in one kernel: it starts once
    said = [printed(cell) for cell in executed(every).cells if cell.id.startswith("check")]
    assert [one.startswith("Solved: ") for one in said] == [True] * len(EXERCISES)


def test_a_solved_notebook_runs_by_itself(solved: list[Path]) -> None:
    last = max(EXERCISES, key=lambda one: (len(one.needs), one.number))  # imports most from the others
    book = executed(solved[0].with_name(f"{last.stem}.ipynb"))
    assert printed(book.cells[-1]).startswith("Solved: ")


@pytest.mark.slow
def test_every_solved_notebook_runs_by_itself(solved: list[Path]) -> None:
    said = [printed(executed(path).cells[-1]) for path in solved]
    assert [one.startswith("Solved: ") for one in said] == [True] * len(EXERCISES)


def test_an_unsolved_notebook_stops_at_its_check_with_a_friendly_sentence(tmp_path: Path, kernel: None) -> None:
    write_notebooks(tmp_path)
    book = executed(tmp_path / "e01_linear.ipynb", allow_errors=True)
    (error,) = book.cells[-1].outputs
    assert error.ename == "AssertionError"
    assert error.evalue.startswith("Nothing to judge yet: linear_backward returns None for dx, dweight and dbias.")


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a notebook imports is forgotten after the test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for exercise in EXERCISES:
        sys.modules.pop(exercise.stem, None)


def check_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the last cell of a notebook says, run in this process."""
    monkeypatch.chdir(path.parent)
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            try:
                exec("".join(cell["source"]), names)
            except AssertionError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("others_solved", [False, True], ids=["unsolved", "solved"])
def test_every_unsolved_notebook_says_that_nothing_is_to_be_judged_yet(
    others_solved: bool, tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebooks(tmp_path / "given")
    write_notebooks(tmp_path / "beside", solved=others_solved)
    for exercise in EXERCISES:
        path = tmp_path / "beside" / f"{exercise.stem}.ipynb"
        there = path.read_bytes()
        shutil.copyfile(tmp_path / "given" / path.name, path)
        said = check_of(path, monkeypatch)
        assert said.startswith(f"Nothing to judge yet: {exercise.functions[0]} returns None for "), exercise.name
        path.write_bytes(there)


def test_an_unwritten_foundation_is_named_in_place_of_what_it_makes_wrong(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebooks(tmp_path / "given")
    write_notebooks(tmp_path, solved=True)
    shutil.copyfile(tmp_path / "given" / "e05_layer_norm.ipynb", tmp_path / "e05_layer_norm.ipynb")
    assert check_of(tmp_path / "e09_block.ipynb", monkeypatch) == (
        "block_backward cannot be judged yet: layer_norm_backward of e05_layer_norm, on which it builds, is not "
        "written yet. Solve exercise 5 first, then run this notebook again from its start."
    )


def test_notebooks_are_never_overwritten_and_nbgrader_grades_their_check(tmp_path: Path) -> None:
    assert len(write_notebooks(tmp_path, nbgrader=True)) == len(EXERCISES)
    assert write_notebooks(tmp_path) == []
    cells = json.loads((tmp_path / "e02_activation.ipynb").read_text(encoding="utf-8"))["cells"]
    graded = [cell["metadata"]["nbgrader"] for cell in cells if "nbgrader" in cell["metadata"]]
    assert [(one["grade"], one["locked"], one["solution"], one["points"]) for one in graded] == [
        (True, True, False, 1.0)
    ]


def test_solved_notebooks_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["learn", "--notebooks"]).stdout.startswith(f"wrote {len(EXERCISES)} notebooks")
    solved = CliRunner().invoke(app, ["learn", "--notebooks", "--with-solutions"])
    assert solved.exit_code == 0 and "onfoot-notebooks-solved" in solved.stdout
    (tmp_path / "onfoot-notebooks" / "e01_linear.ipynb").unlink()
    again = CliRunner().invoke(app, ["learn", "--notebooks"]).stdout
    assert (
        again.startswith("wrote 1 notebook") and f"{len(EXERCISES) - 1} exist already and are not overwritten" in again
    )
    beside = CliRunner().invoke(app, ["learn", "onfoot-notebooks", "--notebooks", "--with-solutions"])
    assert beside.exit_code == 2 and "a folder of their own" in beside.stderr


def functions(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_functions_of_this_process_are_judged_and_the_mistake_is_named() -> None:
    text = (SOLUTIONS / "e01_linear.py").read_text(encoding="utf-8")
    assert_solved("linear", functions(text)["linear_backward"])
    wrong = functions(text.replace("np.sum(rows(dy)", "np.mean(rows(dy)"))
    with pytest.raises(AssertionError, match=r"dbias is \d+ times too small"):
        assert_solved("1", wrong["linear_backward"])
    with pytest.raises(ValueError, match="linear_backward was not passed"):
        assert_solved("linear")
    with pytest.raises(ValueError, match="there is no exercise 'convolution'"):
        assert_solved("convolution", print)


def test_a_wrong_forward_pass_is_no_way_to_be_right() -> None:
    text = (SOLUTIONS / "e01_linear.py").read_text(encoding="utf-8")
    half = functions(text.replace("dbias = np.sum(rows(dy), axis=0)", "dbias = None"))
    with pytest.raises(AssertionError, match="Right so far: dx and dweight"):
        assert_solved("linear", half["linear_backward"])
    names = functions(text)
    names["linear_forward"] = lambda x, weight, bias=None: (2 * x, (2 * x, weight, True))
    with pytest.raises(AssertionError, match="dweight"):
        assert_solved("linear", names["linear_backward"])
