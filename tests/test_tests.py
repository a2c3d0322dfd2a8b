"""The tests themselves: each checks something, none only if something happens to be so, none accepts anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
LOOSEST = 0.25  # relative tolerance of a comparison

# Where a check depends on the test's own parameters, and there are parameters of both kinds.
BOTH_KINDS = {
    "kernels/test_mismatched_arrays.py::test_arrays_that_lie_oddly_give_the_same",  # one of them is refused
    "kernels/test_quantized.py::test_a_weight_in_blocks_gives_the_products_of_its_floats",  # one output and several
    "ops/test_op_gradients.py::test_float32_stays_float32_and_close",  # with and without constants in float64
    "train/test_training.py::meanwhile",  # the step that is waited for, and others
    "train/test_parallel.py::test_each_gradient_is_emitted_once_when_final_in_the_order_of_the_buckets",  # tied
    "train/test_parallel_ranks.py::do_all_cases",  # full and LoRA, whole and sharded
    "train/test_parallel_ranks.py::do_small_things",  # pieces of this rank and of others
    "train/test_parallel_ranks.py::test_one_two_and_four_ranks_end_with_the_same_weights",  # whole and sharded
    "train/test_sft_data.py::test_texts_and_saved_templates_are_those_of_transformers",  # with and without a BOS
    "train/test_training.py::test_a_damaged_checkpoint_is_named_and_the_one_before_is_used",  # weights and manifest
}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def called(node: ast.Call) -> str:
    """The name of what is called, without what it belongs to."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def checks(node: ast.AST, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether anything in it can fail a test: an assertion, pytest's and NumPy's own, or a helper that checks."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            name = called(inner)
            if name in helpers or name in ("raises", "warns", "fail") or name.startswith("assert_"):
                return True
    return False


def checking_helpers() -> frozenset[str]:
    """The names of functions in tests/ that check something, themselves or by one another."""
    everywhere = [function for tree in FILES.values() for function in functions(tree)]
    found: frozenset[str] = frozenset()
    while more := {f.name for f in everywhere if f.name not in found and checks(f, found)}:
        found |= more
    return found


def only_if(body: list[ast.stmt]) -> Iterator[ast.If]:
    """Each `if` with a check and without an alternative: neither an `else` with one, nor an end of the body."""
    for node in body:
        if isinstance(node, ast.If) and not isinstance(node.body[-1], ast.Continue | ast.Return | ast.Raise):
            alternative = any(checks(other) for other in node.orelse)
            if not alternative and any(isinstance(x, ast.Assert) for part in node.body for x in ast.walk(part)):
                yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from only_if(getattr(node, name, []))


def test_every_test_checks_something() -> None:
    helpers = checking_helpers()
    tests = [(file, f) for file, tree in FILES.items() for f in functions(tree) if f.name.startswith("test_")]
    assert len(tests) > 600
    assert [f"{file}::{f.name}" for file, f in tests if not checks(f, helpers)] == []


def test_no_check_hangs_on_a_condition_that_may_never_hold() -> None:
    found = {f"{file}::{f.name}" for file, tree in FILES.items() for f in functions(tree) for _ in only_if(f.body)}
    assert sorted(found) == sorted(BOTH_KINDS)


def test_no_test_is_content_with_any_exception() -> None:
    calls = [
        (file, node)
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) == "raises"
    ]
    assert len(calls) > 150
    any_at_all = {"Exception", "BaseException"}
    assert [f"{file}:{node.lineno}" for file, node in calls if {ast.unparse(a) for a in node.args} & any_at_all] == []


def test_no_comparison_is_so_loose_that_it_says_nothing() -> None:
    tolerances = [
        (file, option.value)
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for option in node.keywords
        if option.arg in ("rel", "rtol") and isinstance(option.value, ast.Constant)
    ]
    assert len(tolerances) > 50
    assert [f"{file}:{value.lineno}" for file, value in tolerances if value.value > LOOSEST] == []


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("def test(): x = 3", False),
        ("def test(): assert x", True),
        ("def test(): check_it(3)", True),
        ("def test():\n with pytest.raises(ValueError): x()", True),
        ("def test(): np.testing.assert_allclose(x, y)", True),
    ],
)
def test_a_test_without_a_check_would_be_seen(source: str, seen: bool) -> None:
    assert checks(ast.parse(source), frozenset({"check_it"})) == seen


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("if x: assert y", 1),
        ("for x in z:\n  with a:\n   if x: assert y", 1),
        ("if x: assert y\n else: assert z", 0),
        ("for x in z:\n  if x:\n   assert y\n   continue\n  assert z", 0),
        ("if x: y = 3\n assert y", 0),
    ],
)
def test_a_check_under_a_condition_would_be_seen(body: str, found: int) -> None:
    assert len(list(only_if(ast.parse(f"def test():\n {body}").body[0].body))) == found
