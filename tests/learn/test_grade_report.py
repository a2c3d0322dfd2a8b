"""Points, tables, CSV, JSON, HTML and Gradescope's file, from results as the judge gives them."""

from __future__ import annotations

import csv
import doctest
import io
import json
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hostile import mistaken, solution
from typer.testing import CliRunner

import onfoot.learn.grade as grading
from onfoot.cli import app
from onfoot.learn import EXERCISES
from onfoot.learn.course import SOLUTIONS
from onfoot.learn.grade import Result
from onfoot.learn.grade_formats import gradescope, otter_test
from onfoot.learn.grade_html import grade_page
from onfoot.learn.grade_report import Gradebook, Points, read_points

EVIL = "<script>alert(1)</script>\x1b[31m'\"&\udc80"


def result(student: str, number: int, status: str, **more: Any) -> Result:
    return Result(student, {1: "linear", 2: "activation"}[number], number, status, **more)


def part(status: str, mistakes: list[str], **marks: str) -> dict[str, Any]:
    explained = ["because"] * len(mistakes)
    found = {"function": "linear_backward", "status": status, "gradients": marks, "problems": []}
    return {**found, "mistakes": mistakes, "explained": explained}


BOOK = Gradebook(
    [
        result("=ada", 1, "passed", parts=[part("passed", [], dx="right")]),
        result("=ada", 2, "missing", message="not handed in"),
        result("bob", 1, "wrong", parts=[part("wrong", ["dbias is 24 times too small"], dx="right", dbias="wrong")]),
        result("bob", 2, "failed", parts=[part("failed", [], dx="right")], message="it raises (a.py, line 3)"),
        result("cleo", 1, "wrong", parts=[part("wrong", ["dbias is 24 times too small"], dx="wrong", dbias="wrong")]),
        result(EVIL, 2, "import", message=EVIL, printed=EVIL, notes=[EVIL]),
        result(EVIL, 1, "wrong", parts=[part("wrong", [EVIL], dx="wrong")]),
        result("cleo", 2, "unsolved"),
    ],
    Points({"linear": 10, "activation": 4}, partial=True),
)


def test_points_are_all_or_nothing_unless_a_part_counts() -> None:
    strict = Gradebook(BOOK.results, Points({"linear": 10}))
    totals = [book.total(book.students[name].values()) for book in (BOOK, strict) for name in ("=ada", "bob", "cleo")]
    assert totals == [10, 5, 0, 10, 0, 0]  # what fails in some case gets nothing, whichever gradient is right
    assert (BOOK.most, strict.most) == (14, 11)


def test_the_gradebook_has_a_row_per_student_and_no_formula() -> None:
    text = BOOK.to_csv()
    assert text.encode() and "\x1b" not in text  # also what UTF-8 cannot hold
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["student", "1 linear", "2 activation", "points", "of", "mistakes"]
    assert rows[1] == ["'=ada", "10", "0", "10", "14", "2: not handed in"]
    assert rows[2][-1].startswith("1: wrong: dbias is 24 times too small; 2: fails")


def test_the_most_frequent_mistakes_come_first_with_their_students() -> None:
    exercise, mistake, who = BOOK.frequent()[0]
    assert (exercise.number, mistake, who) == (1, "dbias is 24 times too small", ["bob", "cleo"])
    raised = next(one for one in BOOK.frequent() if one[0].number == 2 and one[2] == ["bob"])
    assert raised[1] == "it raises"  # the line is each student's own


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_page_names_every_mistake_and_escapes_what_submissions_say() -> None:
    page, tags = grade_page(BOOK).encode().decode(), Tags()
    tags.feed(page)
    assert "script" not in tags.found and "\x1b" not in page and "&lt;script&gt;" in page
    assert all(address.startswith("#") for address in tags.addresses) and tags.addresses  # nothing is loaded
    assert page.count("dbias is 24 times too small") >= 3 and "what it printed" in page


def test_everything_is_in_the_json() -> None:
    found = json.loads(json.dumps(BOOK.to_dict()))
    assert [one["points"] for one in found["students"][:3]] == [10, 5, 0]
    assert found["mistakes"][0]["students"] == ["bob", "cleo"]
    assert found["exercises"][0] == {
        "number": 1,
        "name": "linear",
        "points": 10,
        "status": {"passed": 1, "wrong": 3},
    }


def test_gradescope_gets_scores_and_the_names_of_mistakes_of_one_submission() -> None:
    bob = Gradebook([one for one in BOOK.results if one.student == "bob"], BOOK.points)
    tests = gradescope(bob)["tests"]
    assert [(one["score"], one["max_score"], one["status"]) for one in tests] == [(5, 10, "failed"), (0, 4, "failed")]
    assert "dbias is 24 times too small. because" in tests[0]["output"]
    with pytest.raises(ValueError, match="one submission at a time"):
        gradescope(BOOK)


def gradescope_results(folder: Path, *options: str) -> Any:
    """What the command writes for Gradescope."""
    command = ["learn", "grade", str(folder), "--gradescope", "results.json", "--fresh", *options]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    return json.loads(Path("results.json").read_text())


def test_gradescope_gets_one_submission_whatever_its_files_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "submission"
    folder.mkdir()
    (folder / "my_e01_linear.py").write_text(solution(1))
    with zipfile.ZipFile(folder / "rest.zip", "w") as archive:
        archive.writestr("e04_embedding_final.py", (SOLUTIONS / "e04_embedding.py").read_text(encoding="utf-8"))
    (folder / "exercise2.py").write_text("def relu_backward(dy, saved):\n    return dy\n")
    first, second, fourth = gradescope_results(folder, "--exercises", "1,2,4")["tests"]
    assert (first["score"], second["score"], fourth["score"]) == (1, 0, 1)
    assert second["output"] == "not handed in: e02_activation.py was not handed in; of no exercise: exercise2.py"


def test_gradescope_gets_no_points_and_the_reason_for_an_empty_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "submission"
    folder.mkdir()
    (folder / "README.md").write_text("done")
    assert [one["score"] for one in gradescope_results(folder, "--exercises", "1-3")["tests"]] == [0, 0, 0]
    (folder / "both.ipynb").write_text(json.dumps({"cells": [], "nbformat": 4}))
    tests = gradescope_results(folder, "--csv", "grades.csv")["tests"]
    assert [one["score"] for one in tests] == [0] * len(EXERCISES)  # of all: none was handed in
    assert tests[0]["output"].startswith("not handed in: e01_linear.py was not handed in; of no exercise: both.py")
    assert "both.ipynb is of no exercise" in tests[0]["output"]
    assert "submission" in Path("grades.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--csv", "none/x.csv"], "--csv: the folder none does not exist; create it first"),
        (["--html", "none/x.html"], "--html: the folder none does not exist"),
        (["--json", "."], "--json: . is a folder; choose the name of a file"),
        (["--results", "none/x.jsonl"], "--results: the folder none does not exist"),
        (["--gradescope", "g.json", "ada"], "Gradescope grades one submission at a time, got 2: ada, ada"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_judged(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ada").mkdir()
    Path("ada/e01_linear.py").write_text(solution(1))
    monkeypatch.setattr(grading, "run_judge", None)
    ended = CliRunner().invoke(app, ["learn", "grade", "ada", *options])
    assert ended.exit_code == 2 and said in ended.stderr and ended.stderr.count("\n") == 1
    assert not Path("grades.jsonl").exists()


def test_points_are_read_by_name_or_number_and_wrong_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text('{"linear": 10, "2": 2.5}')
    assert read_points(path).full == {"linear": 10, "activation": 2.5}
    for text, said in [
        ("[1]", "must be an object"),
        ("{", "is not JSON"),
        ('{"e99": 1}', "there is no exercise"),
        ('{"1": -1}', "must be a number >= 0"),
        ('{"1": true}', "must be a number"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_points(path)


def run_test(text: str, code: str) -> doctest.TestResults:
    """Runs a test file of Otter as its format says: as doctests, in the namespace of a notebook."""
    test: dict[str, Any] = {}
    exec(text, test)
    assert test["OK_FORMAT"] is True
    names: dict[str, Any] = {}
    exec(code, names)
    source = test["test"]["suites"][0]["cases"][0]["code"]
    case = doctest.DocTestParser().get_doctest(source, names, test["test"]["name"], None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(case, out=lambda _: None, clear_globs=False)
    return runner.summarize(verbose=False)


def test_a_test_for_otter_passes_with_the_solution_and_fails_with_a_mistake() -> None:
    text = otter_test(EXERCISES[0], 5)
    right = run_test(text, solution(1))
    wrong = run_test(text, mistaken(1, "np.sum(rows(dy), axis=0)", "np.mean(rows(dy), axis=0)"))
    assert (right.attempted, right.failed, wrong.failed) == (2, 0, 1)


def test_the_command_grades_a_folder_and_writes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for student, text in {"ada": solution(1), "bob": solution(1).replace("@ weight.T", "@ weight.T * 2")}.items():
        (tmp_path / "in" / student).mkdir(parents=True)
        (tmp_path / "in" / student / "e01_linear.py").write_text(text)
    for place in (Path(), tmp_path / "in" / "ada"):  # a module of this name beside a submission is not NumPy
        (place / "numpy.py").write_text("raise SystemExit('not NumPy')")
    Path("points.json").write_text('{"linear": 8}')
    outputs = ["--csv", "a.csv", "--json", "a.json", "--html", "a.html", "--points", "points.json"]
    first = CliRunner().invoke(app, ["learn", "grade", "in", *outputs])
    assert first.exit_code == 0, first.output
    assert "8 of 8" in first.stdout and "dx is 2 times too large" in first.stdout
    assert "dx is 2 times too large" in Path("a.csv").read_text() + Path("a.html").read_text()
    assert [one["points"] for one in json.loads(Path("a.json").read_text())["students"]] == [8, 0]
    second = CliRunner().invoke(app, ["learn", "grade", "in"])
    assert second.exit_code == 2 and "--resume goes on with it" in second.stderr
    resumed = CliRunner().invoke(app, ["learn", "grade", "in/bob", "--resume", "--gradescope", "results.json"])
    assert resumed.exit_code == 0 and json.loads(Path("results.json").read_text())["tests"][0]["score"] == 0
    assert CliRunner().invoke(app, ["learn", "grade", "in", "--fresh", "--exercises", "x"]).exit_code == 2
