"""Grading: hostile submissions get their verdict, the batch goes on, and nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import FILES, Handed, in_call, mistaken, solution, submissions, write
from learners import edit, solved_folder

import onfoot.learn.grade as batch
from onfoot.learn import EXERCISES
from onfoot.learn.course import COURSE
from onfoot.learn.grade import Result, grade
from onfoot.learn.grade_find import Submission, find_submissions
from onfoot.learn.grade_limits import MIB, Limits
from onfoot.learn.grade_process import read_verdict

needs_filters = pytest.mark.optional("needs seccomp and Landlock of Linux: a fork bomb is one elsewhere")
PROBE = (
    "from pathlib import Path; from onfoot.learn.grade_sandbox import forbid_calls, forbid_files; import os, sys; "
    "sys.exit(0 if forbid_files(Path(os.getcwd()), {}) and forbid_calls() else 1)"
)
LIMITS = Limits(call_seconds=4, seconds=15, memory=1024 * MIB)
SLICE = (
    *("segfault", "endless", "fork bomb", "memory in steps", "prints gigabytes", "exits hard", "many files"),
    *("kills the judge", "huge array", "writes to the judge's pipe", "exits at import", "uses the judge"),
    *("right, deletes its folder", "deletes its folder and dies", "wrong, declares sizes", "not Python"),
)
NAMES = {one.number: one.name for one in EXERCISES}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies of submissions are made: a process of one can be told by this path."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def filters() -> None:
    """Skips a test where submissions could do what they try to do."""
    if subprocess.run([sys.executable, "-c", PROBE], check=False).returncode:
        pytest.skip("this kernel has no seccomp or no Landlock")


def processes_of(folder: Path) -> list[str]:
    """The processes that run in a folder, or have it in their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in said or str(folder) in os.readlink(process / "cwd"):
                found.append(f"{process.name}: {said[:200]!r}")
    return found


def verdicts_of(handed: list[Handed], folder: Path, jobs: int = 2) -> dict[str, Result]:
    """Grades them; every verdict must be the one that is expected, and nothing may be left."""
    by_student = write(handed, folder)
    found = {}
    for number in FILES:
        mine = [folder / student for student, one in by_student.items() if one.number == number]
        for result in grade(find_submissions(mine), exercises=[number], jobs=jobs, limits=LIMITS) if mine else ():
            found[result.student] = result
    said = {student: " ".join([result.message, *result.mistakes]) for student, result in found.items()}
    assert {student: found[student].status for student in by_student} == {s: h.status for s, h in by_student.items()}
    assert [(student, said[student]) for student, one in by_student.items() if one.says not in said[student]] == []
    assert not processes_of(Path(tempfile.gettempdir())) and not os.listdir(tempfile.gettempdir())
    return found


@needs_filters
def test_hostile_submissions_get_their_verdicts_and_right_ones_between_them_pass(tmp_path: Path, filters: None) -> None:
    first = {one.kind: one for one in submissions() if one.number == 1}
    right = Handed("right", 1, solution(1), "passed")
    chosen = [one for kind in SLICE for one in ([first[kind], right] if kind in SLICE[:12:4] else [first[kind]])]
    assert len(verdicts_of(chosen, tmp_path / "in")) == len(SLICE) + 3


@needs_filters
@pytest.mark.slow
def test_two_hundred_submissions_are_all_judged_as_they_should_be(tmp_path: Path, filters: None) -> None:
    handed = submissions()
    assert len(handed) == 200 and len({one.kind for one in handed}) > 70
    found = verdicts_of(handed, tmp_path / "in", jobs=4)
    assert len(found) == 200 and sum(result.passed for result in found.values()) >= 25
    again = verdicts_of(handed[::-3], tmp_path / "again", jobs=3)  # another order, other neighbours
    assert len(again) == 67


@pytest.mark.optional("needs Linux: other systems do not let a process adopt orphans")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_children_that_outlive_a_submission_are_ended_where_calls_cannot_be_filtered(tmp_path: Path) -> None:
    code = (
        "import os, time\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1000)\n        os._exit(0)"
    )
    write([Handed("leaves a child", 1, in_call(1, code), "passed")], tmp_path / "in")
    limits = Limits(call_seconds=8, seconds=30, filtered=False)
    (result,) = grade(find_submissions([tmp_path / "in"]), limits=limits)
    assert result.status == "passed"  # the gradients are right
    assert not processes_of(Path(tempfile.gettempdir()))


def test_a_verdict_without_the_secret_of_its_judge_is_none() -> None:
    forged = json.dumps({"secret": "guessed", "verdict": {"status": "passed"}})
    assert read_verdict(forged, "secret")["status"] == "not graded"
    assert read_verdict(forged, "guessed") == {"status": "passed"}
    assert read_verdict("", "x")["status"] == read_verdict("[1]", "x")["status"] == "not graded"


def students(folder: Path) -> dict[str, set[str]]:
    return {one.student: set(one.files) for one in find_submissions([folder])}


def test_submissions_are_found_in_folders_archives_files_and_notebooks(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "ada" / "onfoot-learn").mkdir(parents=True)
    (folder / "ada" / "onfoot-learn" / "e01_linear.py").write_text(solution(1))
    (folder / "ada" / ".git").mkdir()
    (folder / "ada" / ".git" / "e02_activation.py").write_text("")
    with zipfile.ZipFile(folder / "bob.zip", "w") as archive:
        archive.writestr("../../e02_activation.py", solution(2))  # its name is not used as a path
        archive.writestr("__MACOSX/e01_linear.py", "")
        archive.writestr("x" * 300 + ".py", "")  # no file system takes this name
        archive.writestr("big/e03_cross_entropy.py", "#" * 2**21)
    (folder / "cleo_e01_linear.py").write_text(solution(1))
    (folder / "cleo_e03_cross_entropy.py").write_text(solution(3))
    (folder / "dan.py").write_text(solution(2))  # told by its functions
    cells = [{"cell_type": "code", "source": ["%matplotlib inline\n", solution(1)], "metadata": {}, "outputs": []}]
    (folder / "eve.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (folder / "fay.zip").write_bytes(b"not an archive")
    assert students(folder) == {
        "ada": {"e01_linear.py"},
        "bob": {"e02_activation.py"},
        "cleo": {"e01_linear.py", "e03_cross_entropy.py"},
        "dan": {"e02_activation.py"},
        "eve": {"e01_linear.py"},
        "fay": set(),
    }
    notes = {one.student: one.notes for one in find_submissions([folder])}
    assert all("left out" in note for note in notes["bob"]) and len(notes["bob"]) == 2
    assert "cannot be read" in notes["fay"][0]
    assert students(folder / "ada" / "onfoot-learn") == {"onfoot-learn": {"e01_linear.py"}}


def notebook_of(*sources: str) -> str:
    cells = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": []} for source in sources]
    return json.dumps({"cells": cells, "nbformat": 4})


SCRATCH = {
    "an assignment of a shell's output": "x = !ls",
    "an indented magic": "for i in range(2):\n    %timeit linear_backward",
    "an indented import of onfoot": "if True:\n    import onfoot.learn",
    "a question": "x = 7 % 2\nlinear_backward?",
}


@pytest.mark.parametrize("kind", SCRATCH)
def test_a_notebook_with_what_only_notebooks_understand_is_handed_in(kind: str, tmp_path: Path) -> None:
    (tmp_path / "f.ipynb").write_text(notebook_of(solution(1), SCRATCH[kind]))
    (submission,) = find_submissions([tmp_path / "f.ipynb"])
    assert set(submission.files) == {"e01_linear.py"} and submission.notes == []
    compile(submission.files["e01_linear.py"], "f", "exec")


def test_a_notebook_that_is_not_python_or_of_no_one_exercise_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(notebook_of(solution(1), "def f(:"))
    (tmp_path / "b.ipynb").write_text(notebook_of("x = 1"))
    (tmp_path / "c.ipynb").write_text(notebook_of(solution(1), solution(2)))
    a, b, c = find_submissions([tmp_path / name for name in ("a.ipynb", "b.ipynb", "c.ipynb")])
    assert set(a.files) == {"e01_linear.py"} and a.notes == []  # its judge says where the error is
    assert b.notes == [
        "b.ipynb is of no exercise: neither its name nor its functions are those of one; name it as in e01_linear"
    ]
    assert c.notes == ["c.ipynb is of no exercise: it has the functions of exercises 1, 2; hand in one file each"]
    (result,) = grade(find_submissions([tmp_path / "b.ipynb"]), exercises=[1])
    assert result.status == "missing" and result.notes == b.notes


def test_what_is_not_a_submission_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        find_submissions([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="has no submissions"):
        find_submissions([tmp_path / "temporary"])
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="is not a submission"):
        find_submissions([tmp_path / "a.txt"])


def test_what_was_not_handed_in_or_not_begun_needs_no_judge(tmp_path: Path) -> None:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    given = (COURSE / "e01_linear.py").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "in" / "ada" / "e01_linear.py").write_bytes(given)
    found = grade(find_submissions([tmp_path / "in"]), exercises=[1, 2])
    assert [(one.status, one.seconds) for one in found] == [("unsolved", 0), ("missing", 0)]


def test_an_interrupted_batch_goes_on_where_it_was_and_a_changed_file_is_judged_again(tmp_path: Path) -> None:
    kept, folder = tmp_path / "grades.jsonl", tmp_path / "in"
    wrong = mistaken(1, "np.sum(rows(dy), axis=0)", "np.mean(rows(dy), axis=0)")
    write([Handed("a", 1, solution(1), "passed"), Handed("b", 1, wrong, "wrong")], folder)

    def interrupt(result: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(find_submissions([folder]), jobs=1, kept=kept, on_result=interrupt)
    assert not processes_of(Path(tempfile.gettempdir()))
    assert [json.loads(line)["status"] for line in kept.read_text().splitlines()] == ["passed"]
    with kept.open("a") as file:
        file.write('{"student": "half a li')  # as a machine that lost power leaves it
    kept.write_text(kept.read_text() + "\n")
    found = grade(find_submissions([folder]), jobs=1, kept=kept, resume=True)
    assert [one.status for one in found] == ["passed", "wrong"] and "times too small" in found[1].mistakes[0]
    assert len(kept.read_text().splitlines()) == 3  # the first was not judged again
    (folder / "s001 b" / "e01_linear.py").write_text((COURSE / "e01_linear.py").read_text())
    again = grade(find_submissions([folder]), jobs=1, kept=kept, resume=True)
    assert [one.status for one in again] == ["passed", "unsolved"]


def test_a_mistake_of_an_earlier_exercise_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = replace(EXERCISES[1], needs=(1,))
    own = {"e01_linear.py": b"wrong", "e02_activation.py": b"mine"}
    seen = []

    def judge(files: dict[str, bytes], *_: object) -> dict[str, str]:
        seen.append(files["e01_linear.py"])
        return {"status": "wrong" if files["e01_linear.py"] == b"wrong" else "passed"}

    monkeypatch.setattr(batch, "run_judge", judge)

    def judged(files: dict[str, bytes]) -> Result:
        task = batch.Task(Submission("ada", files), exercise, "")
        return batch.judge_task(task, LIMITS, {}, threading.Event())

    result, right = judged(own), solution(1).encode()
    assert seen == [b"wrong", right] and result.passed
    assert result.notes == ["judged with the solutions of e01_linear"]
    assert judged({**own, "e01_linear.py": b"right"}).notes == []  # its own file, as long as that works
    assert judged({"e02_activation.py": b"import torch"}).notes[0] == "imports torch" and seen[-1] == right


def test_a_mistake_of_an_earlier_exercise_does_not_count_twice_where_the_later_is_wrong_too(tmp_path: Path) -> None:
    """By a real judge: the wrong dq is exercise 7's, the wrong dv exercise 17's own."""
    solved_folder(tmp_path / "ada")
    edit(tmp_path / "ada" / "e07_attention.py", "return dq", "return 2 * dq")
    edit(tmp_path / "ada" / "e17_grouped_query.py", "dv.sum(axis=2)", "dv.mean(axis=2)")
    first, second = grade(find_submissions([tmp_path / "ada"]), exercises=[7, 17], limits=LIMITS)
    assert (first.status, second.status) == ("wrong", "wrong")
    assert list(second.gradients.values()) == ["right", "right", "wrong"]  # dq, dk, dv
    assert second.notes == ["judged with the solutions of e03_cross_entropy, e06_one_head, e07_attention"]


def test_of_two_verdicts_the_one_with_more_right_gradients_counts_else_that_of_the_own_files() -> None:
    def verdict(status: str, *marks: str) -> dict[str, Any]:
        part = {"function": "f", "status": status, "gradients": dict(zip("abc", marks, strict=False))}
        return {"status": status, "parts": [part]}

    def judged(own: dict[str, Any], again: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
        verdicts = iter([own, again])
        monkeypatch.setattr(batch, "run_judge", lambda *_: next(verdicts))
        files = {"e01_linear.py": b"mine", "e02_activation.py": b"mine"}
        task = batch.Task(Submission("ada", files), replace(EXERCISES[1], needs=(1,)), "")
        return bool(batch.judge_task(task, LIMITS, {}, threading.Event()).parts is again["parts"])

    wrong, failed = verdict("wrong", "right", "wrong"), verdict("failed", "right", "not judged")
    with pytest.MonkeyPatch.context() as patch:
        assert judged(wrong, verdict("wrong", "right", "right", "wrong"), patch)
        assert judged(failed, verdict("wrong", "wrong", "wrong"), patch)  # what an earlier file raises is not its own
        assert not judged(wrong, {**wrong, "parts": [*wrong["parts"]]}, patch)
        assert not judged(wrong, failed, patch)


def test_a_judge_that_cannot_start_does_not_stop_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(batch, "run_judge", fail)
    write([Handed(kind, 1, "x = 1", "") for kind in ("a", "b")], tmp_path / "in")
    found = grade(find_submissions([tmp_path / "in"]), kept=tmp_path / "kept")
    assert [(one.status, one.message) for one in found] == [("not graded", "OSError: no space left")] * 2
    monkeypatch.setattr(batch, "run_judge", lambda *_: {"status": "passed"})
    again = grade(find_submissions([tmp_path / "in"]), kept=tmp_path / "kept", resume=True)
    assert [one.status for one in again] == ["passed"] * 2


def test_what_a_right_function_changes_is_a_note_for_the_teacher(tmp_path: Path) -> None:
    changes = mistaken(1, "dbias = np.sum(rows(dy), axis=0)", "dbias = np.sum(rows(dy), axis=0); x *= 2")
    write([Handed("changes x", 1, changes, "passed")], tmp_path / "in")
    (result,) = grade(find_submissions([tmp_path / "in"]), exercises=[1], limits=LIMITS)
    assert result.status == "passed"
    assert [note for note in result.notes if note.startswith("linear_backward: it modifies its argument x")]
