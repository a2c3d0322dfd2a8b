"""`onfoot learn`: its commands, its answers to wrong and broken files, and its exit status."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import MISTAKES, mistaken
from learners import edit, solved_folder
from typer.testing import CliRunner

from onfoot.check.chain import Chain
from onfoot.check.equations import equation_of
from onfoot.check.report import LayerReport
from onfoot.cli import app
from onfoot.learn import EXERCISES, assert_solved, get_exercise, judge, make_folder
from onfoot.learn.answer import part_lines
from onfoot.learn.course import SOLUTIONS, foundations
from onfoot.learn.progress import FILE, Progress
from onfoot.learn.report import merge_places
from onfoot.learn.session import SECONDS, changed_files, check_exercise
from onfoot.learn.verdict import PartVerdict, Verdict
from onfoot.learn.words import own_words


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["learn", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of exercises, which is the current one."""
    folder = tmp_path / "course"
    make_folder(folder)
    monkeypatch.chdir(folder)
    return folder


def test_the_folder_is_made_and_says_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run()
    assert first.exit_code == 0, first.output
    assert "wrote the exercises to onfoot-learn" in first.stdout and "onfoot learn check 1" in first.stdout
    assert (tmp_path / "onfoot-learn" / "e01_linear.py").is_file()
    assert run().stdout == "onfoot-learn is up to date\n"
    assert run("make", "other").exit_code == 0 and (tmp_path / "other" / FILE).is_file()
    (tmp_path / "other" / "e03_cross_entropy.py").unlink()
    assert run("other").stdout == "new: e03_cross_entropy.py\n"
    monkeypatch.chdir("other")
    assert run().stdout == "this folder is up to date\n"
    assert not (tmp_path / "other" / "onfoot-learn").exists()


def test_solutions_are_written_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--with-solutions", "answers").stdout == f"wrote {len(EXERCISES)} solutions to answers\n"
    assert (tmp_path / "answers" / "e11_gpt2.py").read_bytes() == (SOLUTIONS / "e11_gpt2.py").read_bytes()
    missing = run("--with-solutions")
    assert missing.exit_code == 2 and "needs a folder of its own" in missing.stderr


def test_one_gradient_after_the_other(here: Path) -> None:
    unsolved = run("check")
    assert unsolved.exit_code == 1
    assert "Nothing to judge yet: linear_backward returns None for dx, dweight and dbias. Start with dx." in (
        unsolved.stdout
    )
    assert "onfoot learn hint 1 (three levels)" in unsolved.stdout
    edit(here / "e01_linear.py", "dx = None", "dx = (rows(dy) @ weight.T).reshape(x.shape)")
    some = run("check")
    assert some.exit_code == 1
    assert "Right so far: dx. Go on with dweight." in some.stdout
    assert "(1 of 3 right)" in run("map").stdout
    edit(here / "e01_linear.py", "dweight = None", "dweight = rows(dy).T @ rows(x)")
    wrong = run("check", "1")
    assert wrong.exit_code == 1
    for words in (
        "dweight is wrong. dx is right.",
        "dweight  ✗ wrong",
        "dbias    · not written yet (None)",
        "Mistake: dweight transposed.",
        "The whole derivation:      onfoot learn derivation 1",
    ):
        assert words in wrong.stdout
    shutil.copyfile(SOLUTIONS / "e01_linear.py", here / "e01_linear.py")
    right = run("check", "1")
    assert right.exit_code == 0
    assert "Solved: linear_backward is right in every case." in right.stdout
    assert "Next: e02_activation.md, then onfoot learn check 2" in right.stdout
    assert "onfoot explore --engine ." in right.stdout
    shown = run("map").stdout
    assert "1 of 19 exercises solved" in shown and "✓ e01_linear" in shown and "▸ e02_activation" in shown


def test_the_whole_report_and_the_verdict_for_programs(here: Path) -> None:
    text = (SOLUTIONS / "e05_layer_norm.py").read_text(encoding="utf-8")
    (here / "e05_layer_norm.py").write_text(text.replace("dnormed = dy * weight", "dnormed = dy"), encoding="utf-8")
    report = run("check", "5", "--report")
    assert "layer_norm · e05_layer_norm.py:layer_norm_backward" in report.stdout and "Example" in report.stdout
    assert "onfoot learn derivation 5" in report.stdout.partition("Example")[0] and "docs/" not in report.stdout
    (verdict,) = json.loads(run("check", "5", "--json").stdout)
    assert verdict["status"] == "wrong" and not verdict["passed"] and verdict["exercise"] == 5
    (part,) = verdict["parts"]
    assert part["gradients"] == {"dx": "wrong", "dweight": "right", "dbias": "right"}
    assert part["mistakes"] == ["weight missing from dx"]


OTHER_LAYOUTS = [
    one
    for one in MISTAKES
    if one[3] in ("fits only some of the shapes", "a reshape is missing", "returned in another order")
]


@pytest.mark.parametrize(("number", "right", "wrong", "says"), OTHER_LAYOUTS)
def test_an_answer_that_is_right_only_in_another_layout_is_wrong(
    number: int, right: str, wrong: str, says: str
) -> None:
    names: dict[str, Any] = {}
    exec(mistaken(number, right, wrong), names)
    exercise = get_exercise(number)
    with pytest.raises(AssertionError) as error:
        assert_solved(exercise.name, *(names[function] for function in exercise.functions))
    assert says in " ".join(str(error.value).split()) and "✗ wrong" in str(error.value)


def test_a_product_for_two_axes_only_is_not_solved(here: Path) -> None:
    (here / "e01_linear.py").write_text(mistaken(1, "rows(x).T @ rows(dy)", "x.T @ dy"), encoding="utf-8")
    result = run("check", "1")
    assert result.exit_code == 1 and "dweight is wrong. dx and dbias are right." in result.stdout


def test_a_numerical_difference_is_not_solved() -> None:
    names: dict[str, Any] = {}
    right = "dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * du)"
    exec(mistaken(2, right, "dy * (gelu_tanh_forward(x + 1e-5)[0] - gelu_tanh_forward(x - 1e-5)[0]) / 2e-5"), names)
    with pytest.raises(AssertionError) as error:
        assert_solved("activation", names["relu_backward"], names["gelu_tanh_backward"])
    said = " ".join(str(error.value).split())
    assert said.startswith("dx is wrong.")
    assert "Mistake: dx is only as accurate as float32. The inputs are float64" in said


def test_an_added_constant_is_not_solved_and_a_changed_argument_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(mistaken(1, "dbias = np.sum(rows(dy), axis=0)", "dbias = np.sum(rows(dy), axis=0) + 1e-6"), names)
    with pytest.raises(AssertionError, match=r"dbias is wrong\. dx and dweight are right"):
        assert_solved("linear", names["linear_backward"])
    exec(mistaken(1, "dbias = np.sum(rows(dy), axis=0)", "dbias = np.sum(rows(dy), axis=0); x *= 2"), names)
    assert_solved("linear", names["linear_backward"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Solved") and "Note: linear_backward: it modifies its argument x in place:" in said


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        (1, "rows(x).T @ rows(dy)", "np.einsum('bti,btj->ij', x, dy)"),
        (3, "dlogits.reshape(logits.shape)", "dlogits.reshape(logits.shape[0], -1, logits.shape[2])"),
        (16, "return dgate, dup", "return dgate, dup[:, :, :]"),
    ],
)
def test_an_answer_that_raises_without_an_axis_for_the_batch_is_not_solved(number: int, right: str, wrong: str) -> None:
    names: dict[str, Any] = {}
    exec(mistaken(number, right, wrong), names)
    exercise = get_exercise(number)
    with pytest.raises(AssertionError) as error:
        assert_solved(exercise.name, *(names[function] for function in exercise.functions))
    said = " ".join(str(error.value).split())
    assert "it raises" in said and "_backward fits only some of the shapes. There may be several leading axes" in said


def said_of(number: int, right: str, wrong: str) -> str:
    """What is said of a wrong answer, in one line."""
    names: dict[str, Any] = {}
    exec(mistaken(number, right, wrong), names)
    exercise = get_exercise(number)
    with pytest.raises(AssertionError) as error:
        assert_solved(exercise.name, *(names[function] for function in exercise.functions))
    return " ".join(str(error.value).split())


def test_an_answer_that_raises_in_some_cases_is_said_to_be_right_only_where_it_ran() -> None:
    said = said_of(3, "np.where(counts, target, 0)] -= 1", "target] -= 1")
    assert "cross_entropy_backward fails in some cases: it raises" in said
    assert "dlogits is right in the cases where it ran." in said and "dlogits ✓ right where it ran" in said
    assert "adapters.py" not in said


def test_what_is_none_beside_a_function_that_raises_is_not_written_yet() -> None:
    said = said_of(1, "return dx, dweight, dbias", "return dy * weight, None, None")
    assert "dweight · not written yet (None)" in said and "does not return" not in said


def test_a_sum_over_everything_is_named_by_what_it_gives() -> None:
    assert "Mistake: dbias is summed to one number." in said_of(1, "np.sum(rows(dy), axis=0)", "np.sum(dy)")


def test_the_equation_of_relu_is_its_own() -> None:
    layer = get_exercise(2).parts[0].layer
    assert equation_of(layer.name, "dx") == "G.2"


BROKEN: dict[str, tuple[Callable[[str], str], str, str]] = {
    "syntax": (
        lambda text: text.replace("def linear_backward(dy, saved):", "def linear_backward(dy, saved"),
        "e01_linear.py is not valid Python: '(' was never closed (line 19)",
        "def linear_backward(dy, saved",
    ),
    "import": (
        lambda text: f"import nothing_of_this_name\n{text}",
        "cannot import",
        "No module named 'nothing_of_this_name'",
    ),
    "renamed": (
        lambda text: text.replace("def linear_backward", "def my_backward"),
        "e01_linear.py has no function linear_backward",
        "write it again",
    ),
    "forward renamed": (
        lambda text: text.replace("def linear_forward", "def my_forward"),
        "e01_linear.py has no function linear_forward, which was given",
        "onfoot learn show e01_linear",
    ),
    "forward": (
        lambda text: text.replace("y += bias", "y -= bias"),
        "Not judged: the forward pass returns other values than the one that was given.",
        "onfoot learn show 1",
    ),
    "forward shape": (
        lambda text: text.replace("return y, (x", "return y.sum(), (x"),
        "Not judged: the forward pass returns the shape ()",
        "onfoot learn show 1",
    ),
    "raises": (
        lambda text: text.replace("dx = None", "dx = undefined"),
        "linear_backward cannot be judged: it raises NameError: name 'undefined' is not defined",
        "(e01_linear.py, line 22)",
    ),
    "exits": (
        lambda text: text.replace("dx = None", "import os; dx = os._exit(3)"),
        "linear_backward cannot be judged: it ended the process with status 3",
        "dx       ? not judged",
    ),
    "list": (
        lambda text: text.replace("dx = None", "dx = 'soon'"),
        "linear_backward cannot be judged: dx is a value of type str; expected a floating-point array",
        "onfoot learn hint 1",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_answered_kindly(here: Path, kind: str) -> None:
    change, *words = BROKEN[kind]
    path = here / "e01_linear.py"
    before = path.read_text(encoding="utf-8")
    path.write_text(change(before), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != before
    result = run("check", "1")
    assert result.exit_code == 1, result.output
    flat = " ".join(result.stdout.split())
    for expected in words:
        assert " ".join(expected.split()) in flat
    assert "Traceback" not in result.output and "adapters.py" not in result.output
    assert flat.count(" ".join(words[0].split())) == 1  # said once


def test_a_file_with_null_bytes_is_not_python(here: Path) -> None:
    (here / "e01_linear.py").write_bytes(b"x = 1\0")
    verdict = judge(here, get_exercise(1))
    assert verdict.status == "syntax" and "null bytes" in verdict.message and "None" not in verdict.message


def test_an_endless_function_is_ended(here: Path) -> None:
    edit(here / "e01_linear.py", "    dx = None", "    while True: pass\n    dx = None")
    result = run("check", "1", "--timeout", "1")
    assert result.exit_code == 1
    assert "it did not return within 1 seconds" in " ".join(result.stdout.split())


def test_a_deleted_file_is_named_with_the_way_to_get_it_back(here: Path) -> None:
    (here / "e02_activation.py").unlink()
    result = run("check", "2")
    assert result.exit_code == 1
    assert "e02_activation.py is missing; this writes it again, unsolved: onfoot learn ." in result.stdout
    assert run(".").stdout == "new: e02_activation.py\n"


def test_an_exercise_waits_for_those_that_it_is_built_from(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    folder = solved_folder(tmp_path / "mine", get_exercise(4))
    verdict = check_exercise(folder, get_exercise(10))
    assert verdict.status == "blocked"
    assert verdict.message.startswith("e10_tied.py is built from e04_embedding.py, which is not right yet.")
    assert Progress(folder).status(get_exercise(1)) == "passed"
    shutil.copyfile(SOLUTIONS / "e04_embedding.py", folder / "e04_embedding.py")
    assert check_exercise(folder, get_exercise(10)).passed


def test_what_an_exercise_is_built_from_is_found_through_others() -> None:
    assert [one.number for one in foundations(get_exercise(11))] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [one.number for one in foundations(get_exercise(17))] == [3, 6, 7]
    assert foundations(get_exercise(1)) == []


def test_hints_come_one_after_the_other(here: Path) -> None:
    exercise = get_exercise(1)
    for level in (1, 2, 3, 3):
        shown = run("hint").stdout
        assert f"Exercise 1 · hint {level} of 3" in shown
        assert exercise.hint(level).splitlines()[0] in shown
    assert "That was the last hint. The whole derivation: onfoot learn derivation 1" in shown
    assert "onfoot learn hint 1 (3 of 3 seen)" in run("check").stdout
    assert "hint 2 of 3" in run("hint", "4", "--level", "2").stdout
    assert Progress(here).hints(get_exercise(4)) == 2


def test_hints_can_be_read_beside_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "The next hint says more: onfoot learn hint 1 --level 2" in run("hint", "1").stdout
    assert "Exercise 1 · hint 2 of 3" in run("hint", "1", "--level", "2").stdout
    assert not list(tmp_path.iterdir())
    said = said_of(1, "np.sum(rows(dy), axis=0)", "np.sum(dy)")
    assert "A hint, in a terminal: onfoot learn hint 1" in said and "onfoot learn derivation 1" in said


def test_the_given_file_can_be_seen_again(here: Path) -> None:
    given = (here / "e01_linear.py").read_text(encoding="utf-8")
    (here / "e01_linear.py").write_text("gone\n", encoding="utf-8")
    assert run("show").stdout == given
    assert run("show", "2").stdout == (here / "e02_activation.py").read_text(encoding="utf-8")


BAD = {
    "check 20": "there is no exercise 20; they are numbered 1 to 19",
    "check 0": "there is no exercise 0; they are numbered 1 to 19",
    "hint 99": "there is no exercise 99",
    "check abc": "there is no exercise 'abc'; give a number from 1 to 19, or one of linear, activation,",
    "chek": "there is no command 'chek'; did you mean: onfoot learn check?",
    "3": "there is no command '3'; did you mean: onfoot learn check 3?",
    "--folder course": "the folder to make stands without an option: onfoot learn course",
    "--folder=my course": "the folder to make stands without an option: onfoot learn",
    "grade . --exercises 5-3": '--exercises must be numbers such as 1,3,5-7, the smaller first, got "5-3"',
    "grade . --total inf": "--total must be > 0 and at most 86400 seconds, got inf",
    "grade . --timeout -1": "--timeout must be > 0 and at most 86400 seconds, got -1",
    "hints 3": "there is no command 'hints'; did you mean: onfoot learn hint?",
    "grade nowhere": "nowhere: no such file or folder",
    "hint 1 --level 4": "level must be 1 to 3, got 4",
    "check 1 --all": "--all checks every exercise once",
    "check --json --report": "--json prints the verdicts alone",
    "check --folder nowhere": "nowhere has no exercises; make them with: onfoot learn nowhere",
    "map --folder nowhere": "nowhere has no exercises",
    "check 1 --timeout 0": "timeout must be > 0 seconds, got 0",
}


@pytest.mark.parametrize("command", BAD)
def test_wrong_arguments_end_with_status_2_and_one_line(here: Path, command: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and BAD[command] in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (here / "chek").exists()


def test_commands_outside_of_a_folder_say_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("check", "hint", "map", "show"):
        result = run(command)
        assert result.exit_code == 2
        assert "there are no exercises here; make them with: onfoot learn" in result.stderr


def test_an_exercise_has_a_name_beside_its_number(here: Path) -> None:
    assert run("show", "activation").stdout == run("show", "2").stdout == run("show", "e02_activation.py").stdout
    assert "Exercise 3 · hint 1 of 3" in run("hint", "cross_entropy").stdout


def test_the_derivation_is_printed() -> None:
    assert "(FC.3)" in run("derivation", "1").stdout


def test_the_chain_of_gradients_is_shown_in_the_words_of_the_exercise() -> None:
    part = get_exercise(9).parts[0]
    chain = Chain(["ln_2.weight"], ["the gradient below the MLP"], "", "dout is missing", ["dx", "ln_1.weight"], [])
    report = LayerReport(part.layer, "f", {}, "numpy", 0, False, [], chain=chain)
    verdict = PartVerdict(part, "wrong", {"dx": "wrong"}, chain=own_words(str(report.chain), part.function))
    assert "Where the chain breaks: Right down to ln_2.weight." in " ".join("\n".join(part_lines(verdict)).split())
    assert "d10 is missing" in verdict.chain


def test_several_mistakes_at_one_place_are_one() -> None:
    names = ["d10 in place of d5 in a weight's gradient (ln_2)", "a bias is wrong (ln_2)", "another"]
    verdict = PartVerdict(get_exercise(9).parts[0], "wrong", mistakes=names, explained=["", "", "why"])
    merge_places(verdict)
    assert verdict.mistakes == [names[0], "another"]
    assert verdict.explained[0].endswith("look for one wrong variable at ln_2.") and verdict.explained[1] == "why"


def test_help_lists_the_commands() -> None:
    shown = run("--help").stdout
    assert all(command in shown for command in ("make", "check", "hint", "map", "show"))


def test_a_saved_file_is_noticed_and_others_are_not(here: Path) -> None:
    pauses = itertools.count()
    texts = {2: ("e03_cross_entropy.py", "x = 1\n"), 4: ("e01_linear.py", "y = 2\n"), 5: ("notes.txt", "mine")}

    def pause(seconds: float) -> None:
        assert seconds == SECONDS
        now = next(pauses)
        if now > 9:
            raise KeyboardInterrupt
        if now in texts:
            name, text = texts[now]
            (here / name).write_text(text, encoding="utf-8")
        if now == 6:
            (here / "e04_embedding.py").unlink()  # an editor that replaces a file removes it first

    seen = []
    with pytest.raises(KeyboardInterrupt):
        for exercise in changed_files(here, pause):
            seen.append(exercise.number)
    assert seen == [3, 1]


def test_a_file_that_is_saved_before_the_first_look_is_noticed(here: Path) -> None:
    looks = iter(range(3))
    changed = changed_files(here, lambda seconds: print(next(looks)))  # after three looks it ends in an error
    (here / "e03_cross_entropy.py").write_text("x = 1\n", encoding="utf-8")  # during the first check
    assert next(changed).number == 3


def test_a_file_that_is_saved_during_its_check_has_no_verdict(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "e01_linear.py"

    def save_on_the_way(*arguments: Any, **named: Any) -> Verdict:
        path.write_text(mistaken(1, "np.sum(rows(dy)", "np.mean(rows(dy)"), encoding="utf-8")
        return Verdict(get_exercise(1), "passed")  # on the text before

    monkeypatch.setattr("onfoot.learn.session.judge", save_on_the_way)
    said = run("check", "1")
    assert said.exit_code == 1 and "e01_linear.py was saved during the check" in said.stdout
    progress = Progress(here)
    assert progress.status(get_exercise(1)) is None and not progress.solved(get_exercise(1))


def test_the_map_tells_a_changed_file_from_one_that_was_judged_wrong(here: Path) -> None:
    progress, path = Progress(here), here / "e01_linear.py"
    progress.record(Verdict(get_exercise(1), "passed"))
    path.write_text("changed\n", encoding="utf-8")
    assert "(changed since it was solved)" in run("map").stdout
    progress.record(Verdict(get_exercise(1), "wrong"))
    assert "(solved before; not right as it is now)" in run("map").stdout


def test_watching_checks_at_once_and_after_each_save(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(folder: Path) -> Any:
        shutil.copyfile(SOLUTIONS / "e01_linear.py", folder / "e01_linear.py")
        yield get_exercise(1)
        raise KeyboardInterrupt

    monkeypatch.setattr("onfoot.learn.session.changed_files", once)
    result = run("check", "--watch")
    assert result.exit_code == 0
    before, after = result.stdout.split("waiting for a file to be saved; Ctrl-C ends")
    assert "Nothing to judge yet" in before
    assert "Solved: linear_backward is right in every case." in after


def test_a_file_changed_twice_within_a_second_is_judged_as_it_is_now(tmp_path: Path) -> None:
    folder = solved_folder(tmp_path)
    right = (folder / "e03_cross_entropy.py").read_text(encoding="utf-8")
    wrong = right.replace("(drho - (drho", "(drho + (drho")
    assert len(wrong) == len(right)
    verdicts = []
    for text in (right, wrong, right):
        (folder / "e03_cross_entropy.py").write_text(text, encoding="utf-8")
        verdicts.append(judge(folder, get_exercise(6)).passed)
    assert verdicts == [True, False, True]
    assert not (folder / "__pycache__").exists()
