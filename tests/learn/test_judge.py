"""What the judge asks beside right numbers: any leading axes, gradients in the form that later exercises take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learners import edit, solved_folder

from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.layer import Case, Mistake
from onfoot.check.layers import LAYERS
from onfoot.learn import Verdict, get_exercise, judge
from onfoot.learn.answer import answer_text


def judged(folder: Any, number: int, *changes: tuple[str, str], part: int | None = 0) -> Verdict:
    """The verdict on a solution with these changes: on one part, unless that is None."""
    exercise = get_exercise(number)
    path = solved_folder(folder) / exercise.file
    for right, wrong in changes:
        edit(path, right, wrong)
    return judge(folder, exercise if part is None else replace(exercise, parts=(exercise.parts[part],)))


def mistakes(verdict: Verdict) -> list[str]:
    return list(dict.fromkeys(name for part in verdict.parts for name in part.mistakes))


def test_a_probe_that_raises_explains_nothing_and_ends_nothing() -> None:
    layer = LAYERS["linear"]
    case = layer.cases(np.random.default_rng(0))[0]
    right = list(layer.reference(*case.inputs))

    def raises(p: Any, case: Case) -> Any:
        raise KeyError("H_kv")

    probe = Mistake("raises", "linear", "", "", "", raises, per_case=True)
    evidence = Evidence(layer, {}, [case], [right], [[1.0, 1.0, 1.0]], "float64")
    assert evidence.run(Candidate((probe,)), 0) is None
    assert not evidence.fits(Candidate((probe,)), 0)


def test_keys_summed_as_if_head_h_read_head_h_mod_hkv_are_named(tmp_path: Any) -> None:
    shared = "joined({0}).reshape(len(dy), -1, n_kv, *{0}.shape[-2:]).sum(axis=1)"
    changes = [(f"{name}.sum(axis=2)", shared.format(name)) for name in ("dk", "dv")]
    assert mistakes(judged(tmp_path, 17, *changes)) == ["key head h mod Hkv in place of h // G"]


LISTS = [
    (1, "return dx, dweight, dbias if has_bias else None", "return [dx, dweight, dbias if has_bias else None]"),
    (16, "return dgate, dup", "return [dgate, dup]"),
    (12, "  # (r, out)\n    return dx, ddown, dup", "\n    return [dx, ddown, dup]"),
]


@pytest.mark.parametrize(("number", "right", "wrong"), LISTS)
def test_gradients_in_a_list_are_right(number: int, right: str, wrong: str, tmp_path: Any) -> None:
    assert judged(tmp_path, number, (right, wrong)).passed


def test_a_list_of_none_is_nothing_to_judge_yet(tmp_path: Any) -> None:
    verdict = judged(tmp_path, 16, ("return dgate, dup", "return [None, None]"))
    assert verdict.status == "unsolved"


FORMS = [
    (16, "return dgate, dup", "return {'dgate': dgate, 'dup': dup}", "a dict. Return dgate, dup without names, in"),
    (16, "return dgate, dup", "return dgate, None, dup", "3 values. Return dgate, dup, in this order"),
    (4, "return dweight", "return (dweight,)", "a tuple. Return dweight itself, not a tuple."),
    (4, "return dweight", "return [dweight]", "a list. Return dweight itself, not a list."),
    (
        10,
        "embedding_backward(dfeatures, s_embedding)",
        "embedding_backward(dfeatures, s_embedding),",
        "a tuple. Return dweight",
    ),
]


@pytest.mark.parametrize(("number", "right", "wrong", "says"), FORMS)
def test_gradients_in_a_form_that_later_exercises_do_not_take_are_wrong(
    number: int, right: str, wrong: str, says: str, tmp_path: Any
) -> None:
    verdict = judged(tmp_path, number, (right, wrong))
    said = " ".join(answer_text(verdict).split())
    assert verdict.status == "wrong" and f"_backward returns {says}" in said


NAMED_FORMS = [
    (9, "return d5 + branch, grads", 'return {"dx": d5 + branch, **grads}', "two values: dx, and a dict"),
    (9, "return d5 + branch, grads", "return d5 + branch, *grads.values()", "two values: dx, and a dict"),
    (9, "return d5 + branch, grads", "return d5 + branch, None", "two values: dx, and a dict"),
    (11, "    return grads", "    return tuple(grads.values())", "must return a dict of the gradients by name"),
]


@pytest.mark.parametrize(("number", "right", "wrong", "says"), NAMED_FORMS)
def test_gradients_by_name_are_returned_as_later_exercises_take_them(
    number: int, right: str, wrong: str, says: str, tmp_path: Any
) -> None:
    verdict = judged(tmp_path, number, (right, wrong))
    assert not verdict.passed and says in " ".join(answer_text(verdict).split())


def test_what_a_function_raises_is_said_in_its_own_words(tmp_path: Any) -> None:
    verdict = judged(tmp_path, 5, ("    return dx", "    return d + dx"))
    assert "NameError: name 'd' is not defined" in answer_text(verdict)


# exercise, in the solution, the same for one number of axes, the shape in which that is not right
AXES = [
    (2, "np.where(x <= 0, 0, dy)", "np.einsum('bti,bti->bti', np.where(x <= 0, 0.0, 1.0), dy)", "x of shape (24, 5)"),
    (4, "return dweight", "return dweight + 0 * ids.shape[1]", "ids of shape (24,)"),
    (6, "transposed(rho) @ dy", "rho.transpose(0, 1, 3, 2) @ dy", "q of shape (4, 7)"),
    (7, "transposed(rho) @ dy", "rho.transpose(0, 1, 3, 2) @ dy", "q of shape (4, 7)"),
    (12, "rows(x).T @ ", "rows(x.transpose(0, 1, 2)).T @ ", "x of shape (24, 5)"),
    (15, "dy[..., :half], ", "dy[:, :, :, :half], ", "x of shape (9, 12)"),
    (19, "y_dot += bias_dot", "y_dot += bias_dot + 0 * x.shape[2]", "x of shape (24, 5)"),
]


@pytest.mark.parametrize(("number", "right", "wrong", "shape"), AXES)
def test_an_answer_for_one_number_of_axes_is_not_solved(
    number: int, right: str, wrong: str, shape: str, tmp_path: Any
) -> None:
    verdict = judged(tmp_path, number, (right, wrong))
    said = " ".join(answer_text(verdict).split())
    assert verdict.status == "failed" and f"with {shape} it raises" in said
    assert "fits only some of the shapes. There may be " in said


def test_an_answer_that_takes_three_axes_as_two_is_not_solved(tmp_path: Any) -> None:
    two_or_three = (
        "dweight = np.einsum('bti,btj->ij', x, dy) if x.ndim == 3 else x.T @ dy if x.ndim == 2 else 0 * weight"
    )
    verdict = judged(tmp_path, 1, ("dweight = rows(x).T @ rows(dy)", two_or_three))
    assert verdict.status == "wrong" and verdict.parts[0].marked("wrong") == ["dweight"]


def test_a_loss_divided_by_the_number_of_targets_is_not_solved(tmp_path: Any) -> None:
    verdict = judged(tmp_path, 3, ("(dloss / divisor)", "(dloss / counts.sum())"), part=1)
    assert verdict.status == "wrong"
    assert mistakes(verdict) == ["divided by the number of targets in place of divisor"]


def test_a_gradient_of_relu_at_zero_is_not_solved(tmp_path: Any) -> None:
    verdict = judged(tmp_path, 2, ("np.where(x <= 0, 0, dy)", "np.where(x < 0, 0, dy)"))
    assert verdict.status == "wrong" and mistakes(verdict) == ["a gradient at 0"]


# exercise, part, in the solution, the mistake, its name
NAMED = [
    (12, 0, "dx = dlow @ down.T", "dx = dlow @ down.T / scale", "scale missing from dx"),
    (12, 0, "rows(x).T @ rows(dlow)", "rows(x).T @ rows(dlow) / scale", "scale missing from ddown"),
    (18, 0, " - (lr /", " + (lr /", "the step is added in place of subtracted"),
    (
        5,
        0,
        "normed * along",
        "normed * along * dy.shape[-1] / (dy.shape[-1] - 1)",
        "mean(g * normed) is divided by C − 1 in place of C, in dx",
    ),
    (14, 0, ") * inverse", ") * inverse**2", "the mean of squares in place of r in dx"),
    (
        19,
        0,
        "(rows(x) @ weight_dot).reshape(y_dot.shape)",
        "x_dot @ weight_dot - y_dot",
        "the product of the tangents in place of the product rule",
    ),
    (19, 2, " + bias_dot", "", "the bias does not move"),
    (19, 2, " * rstd", " / rstd", "rstd is inverted (1 divided by it) in normed_dot"),
    (
        7,
        0,
        "draw @ k",
        "np.tril(draw) @ k",
        "np.tril applied to the gradient of the scores",
    ),
    (
        7,
        1,
        "draw @ k",
        "np.tril(draw) @ k",
        "the causal mask applied to the gradient of the scores",
    ),
    (13, 0, "(k, v)", "cache or (k, v)", "the old cache returned"),
]


@pytest.mark.parametrize(("number", "part", "right", "wrong", "name"), NAMED)
def test_a_typical_mistake_has_the_name_by_which_a_teacher_would_call_it(
    number: int, part: int, right: str, wrong: str, name: str, tmp_path: Any
) -> None:
    assert mistakes(judged(tmp_path, number, (right, wrong), part=part)) == [name]


def test_what_cached_attention_returns_in_a_wrong_shape_is_not_said_to_be_raised(tmp_path: Any) -> None:
    verdict = judged(tmp_path, 13, ("return merge_heads(heads), ", "return merge_heads(heads)[:, -1:], "))
    said = " ".join(answer_text(verdict).split())
    assert verdict.status == "wrong" and verdict.parts[0].marks == {"y": "wrong"}
    assert "new tokens, y has shape" in said and "raises" not in said and "where it ran" not in said
