"""The folder of exercises: made, updated, and never at the cost of what a learner has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from learners import edit

from onfoot.learn import EXERCISES, get_exercise, make_folder, write_solutions
from onfoot.learn import folder as folders
from onfoot.learn.course import COURSE, SOLUTIONS
from onfoot.learn.folder import course_files, find_folder
from onfoot.learn.progress import FILE, Progress, map_text
from onfoot.learn.verdict import Verdict

LINEAR = get_exercise(1)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the course that a test may change, as an update of the package does."""
    copy = tmp_path / "course"
    copy.mkdir()
    for name in course_files():
        (copy / name).write_text((COURSE / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(folders, "COURSE", copy)
    return copy


def test_a_new_folder_has_every_exercise_and_no_solution(tmp_path: Path) -> None:
    changes = make_folder(tmp_path / "new")
    found = {path.name for path in (tmp_path / "new").iterdir()}
    assert found == {*course_files(), FILE}
    assert set(changes.added) == set(course_files())
    for exercise in EXERCISES:
        text = (tmp_path / "new" / exercise.file).read_text(encoding="utf-8")
        assert text == (COURSE / exercise.file).read_text(encoding="utf-8")
        assert text != (SOLUTIONS / exercise.file).read_text(encoding="utf-8")


def test_an_update_changes_what_is_untouched_and_keeps_what_is_the_learners(course: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make_folder(folder)
    edit(folder / "e01_linear.py", "dx = None", "dx = dy @ weight.T")
    mine = (folder / "e01_linear.py").read_text(encoding="utf-8")
    for name in ("e01_linear.py", "e02_activation.py", "e03_cross_entropy.md"):
        (course / name).write_text("# a new text\n", encoding="utf-8")
    (folder / "e04_embedding.py").unlink()
    changes = make_folder(folder)
    assert changes.kept == ["e01_linear.py"]
    assert changes.updated == ["e02_activation.py", "e03_cross_entropy.md"]
    assert changes.added == ["e04_embedding.py"]
    assert (folder / "e01_linear.py").read_text(encoding="utf-8") == mine
    assert (folder / "e01_linear.py.new").read_text(encoding="utf-8") == "# a new text\n"
    assert (folder / "e02_activation.py").read_text(encoding="utf-8") == "# a new text\n"
    again = make_folder(folder)
    assert (again.added, again.updated, again.kept) == ([], [], [])


def test_a_learners_file_is_kept_even_without_the_record_of_what_was_given(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit(tmp_path / "e05_layer_norm.py", "dbias = None", "dbias = 7")
    (tmp_path / FILE).unlink()
    assert make_folder(tmp_path).updated == []
    assert "dbias = 7" in (tmp_path / "e05_layer_norm.py").read_text(encoding="utf-8")


def test_windows_line_endings_are_no_change(course: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make_folder(folder)
    path = folder / "e02_activation.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (course / "e02_activation.py").write_text("# a new text\n", encoding="utf-8")
    assert make_folder(folder).updated == ["e02_activation.py"]


def test_progress_survives_an_update_and_says_what_has_changed_since(course: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make_folder(folder)
    Progress(folder).record(Verdict(LINEAR, "passed"))
    Progress(folder).saw_hint(LINEAR, 2)
    (course / "README.md").write_text("# a new text\n", encoding="utf-8")
    make_folder(folder)
    progress = Progress(folder)
    assert progress.solved(LINEAR) and progress.status(LINEAR) == "passed" and progress.hints(LINEAR) == 2
    assert progress.current().number == 2
    (folder / LINEAR.file).write_text("x = 1\n", encoding="utf-8")
    assert progress.solved(LINEAR) and progress.status(LINEAR) is None
    assert "a product and a bias  (changed since it was solved)" in map_text(progress)


def test_a_mistake_after_the_solution_leaves_it_solved(tmp_path: Path) -> None:
    make_folder(tmp_path)
    Progress(tmp_path).record(Verdict(LINEAR, "passed"))
    Progress(tmp_path).record(Verdict(LINEAR, "wrong"))
    kept = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))["exercises"]["linear"]
    assert kept["status"] == "wrong" and kept["checks"] == 2 and "solved" in kept


@pytest.mark.parametrize("text", ["{", "[]", '{"exercises": 3}', ""])
def test_a_damaged_progress_file_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    make_folder(tmp_path)
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"progress\.json cannot be read; delete it .* your files stay"):
        Progress(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="has other files in it"):
        make_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        make_folder(tmp_path / "thesis.tex")


def test_solutions_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    names = write_solutions(tmp_path / "solutions")
    assert len(names) == len(EXERCISES)
    assert all((tmp_path / "solutions" / name).read_bytes() == (SOLUTIONS / name).read_bytes() for name in names)
    make_folder(tmp_path / "mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        write_solutions(tmp_path / "mine")


def test_the_folder_is_found_here_or_below_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there are no exercises here"):
        find_folder(None)
    with pytest.raises(ValueError, match="elsewhere has no exercises"):
        find_folder(Path("elsewhere"))
    make_folder(Path("onfoot-learn"))
    assert find_folder(None) == Path("onfoot-learn")
    monkeypatch.chdir("onfoot-learn")
    assert find_folder(None) == Path(".")
    assert find_folder(tmp_path / "onfoot-learn") == tmp_path / "onfoot-learn"
