"""Every solution passes, every file as given fails kindly, and the two differ only in what is to be written."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from learners import solved_folder

from onfoot.check import LAYERS
from onfoot.learn import EXERCISES, Exercise, judge
from onfoot.learn.answer import answer_text, first_sentence
from onfoot.learn.course import COURSE, LEVELS, SOLUTIONS, foundations
from onfoot.ops import __all__ as OPS

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda one: one.stem)
DOCS = Path(__file__).parents[2] / "docs" / "equations"


@EACH
def test_the_solution_passes_its_judge(exercise: Exercise) -> None:
    verdict = judge(SOLUTIONS, exercise)
    assert verdict.passed, answer_text(verdict)
    assert {mark for part in verdict.parts for mark in part.marks.values()} == {"right"}
    assert first_sentence(verdict).startswith("Solved: ")


@EACH
def test_the_file_as_given_fails_with_a_friendly_first_sentence(exercise: Exercise, tmp_path: Path) -> None:
    verdict = judge(solved_folder(tmp_path, exercise), exercise)
    assert verdict.status == "unsolved", answer_text(verdict)
    part = exercise.parts[0]
    first, *_ = part.layer.gradients
    sentence = first_sentence(verdict)
    assert sentence.startswith(f"Nothing to judge yet: {part.function} returns None for {first}")
    assert sentence.endswith(f"Start with {first}.")
    assert len(verdict.parts) == len(exercise.parts)
    assert {mark for one in verdict.parts for mark in one.marks.values()} == {"None"}


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def rest(path: Path) -> list[str]:
    """What is outside of functions: the docstring, imports and constants."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [ast.dump(node) for node in tree.body if not isinstance(node, ast.FunctionDef)]


@EACH
def test_the_solution_differs_from_the_given_file_only_in_the_functions_to_write(exercise: Exercise) -> None:
    given, solved = functions(COURSE / exercise.file), functions(SOLUTIONS / exercise.file)
    to_write = {part.function for part in exercise.parts}
    assert set(given) == set(solved) and to_write <= set(given)
    assert rest(COURSE / exercise.file) == rest(SOLUTIONS / exercise.file)
    for name, node in given.items():
        same = ast.dump(node) == ast.dump(solved[name])
        assert same == (name not in to_write), name
        assert ast.dump(node.args) == ast.dump(solved[name].args)
        described = ast.get_docstring(node) or ""
        assert ("To write." in described) == (name in to_write), name
        assert "To write." not in (ast.get_docstring(solved[name]) or "")


@EACH
def test_a_file_imports_numpy_and_the_exercises_it_needs_and_nothing_else(exercise: Exercise) -> None:
    tree = ast.parse((SOLUTIONS / exercise.file).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    needed = {one.stem for one in EXERCISES if one.number in exercise.needs}
    assert imported - {"math"} == {"numpy", *needed}
    assert all(one.number < exercise.number for one in foundations(exercise))


@EACH
def test_page_hints_and_derivation_are_there(exercise: Exercise) -> None:
    page = (COURSE / f"{exercise.stem}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# Exercise {exercise.number}: ")
    assert f"File: `{exercise.file}`" in page
    assert all(f"`{part.function}`" in page for part in exercise.parts)
    assert "## A small example" in page or "## Checks" in page
    hints = [exercise.hint(level) for level in range(1, LEVELS + 1)]
    assert all(len(hint) > 60 for hint in hints) and len(set(hints)) == LEVELS
    assert all((DOCS / page.partition("#")[0]).is_file() for page in exercise.pages)


def code_lines(node: ast.FunctionDef) -> set[str]:
    """The statements of a solution that say something: not unpacking, not a return of names."""
    values = [one.value for one in ast.walk(node) if isinstance(one, (ast.Assign, ast.Return)) and one.value]
    return {
        ast.unparse(value) for value in values if any(isinstance(x, (ast.BinOp, ast.Call)) for x in ast.walk(value))
    }


@EACH
def test_neither_page_nor_given_file_has_a_line_of_the_solution(exercise: Exercise) -> None:
    page = (COURSE / f"{exercise.stem}.md").read_text(encoding="utf-8")
    given = functions(COURSE / exercise.file)
    solved = functions(SOLUTIONS / exercise.file)
    for part in exercise.parts:
        answers = {line for line in code_lines(solved[part.function]) if len(line) > 12}
        assert answers
        assert not [line for line in answers if line in page]
        assert not answers & code_lines(given[part.function])


def test_numbers_and_names_are_the_courses_order() -> None:
    assert [exercise.number for exercise in EXERCISES] == list(range(1, 20))
    assert len({exercise.name for exercise in EXERCISES}) == 19
    files = {path.name for path in COURSE.iterdir() if path.is_file()}
    suffixes = (".py", ".md", ".hints.md")
    assert files == {"README.md", *(f"{exercise.stem}{end}" for exercise in EXERCISES for end in suffixes)}
    assert {path.name for path in SOLUTIONS.glob("*.py")} == {exercise.file for exercise in EXERCISES}


def test_the_pairs_of_the_exercises_are_those_of_the_engine() -> None:
    pairs = [pair for exercise in EXERCISES for pair in exercise.pairs]
    assert len(pairs) == len(set(pairs))
    assert {f"{pair}_{end}" for pair in pairs for end in ("forward", "backward")} <= set(OPS)
    for exercise in EXERCISES:
        defined = functions(SOLUTIONS / exercise.file)
        assert {f"{pair}_{end}" for pair in exercise.pairs for end in ("forward", "backward")} <= set(defined)
    assert {"linear", "layer_norm", "attention", "gelu_tanh", "embedding", "cross_entropy"} <= set(pairs)


def test_the_judges_are_layers_of_the_checker_wherever_it_has_one() -> None:
    used = {part.layer.name for exercise in EXERCISES for part in exercise.parts}
    own = {"learn_softmax", "learn_loss", "learn_self_attention", "gpt2", "kv_cache", "grouped_query"}
    assert used - set(LAYERS) == own | {"linear_tangent", "softmax_tangent", "layer_norm_tangent"}
