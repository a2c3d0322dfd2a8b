"""Whether an answer that is right in the checker's cases can be used: its form, and the leading axes that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.isolated import DiedError, RaisedError
from onfoot.check.layer import Case
from onfoot.learn.adapters import OUR_LINE
from onfoot.learn.course import Part
from onfoot.learn.verdict import PartVerdict
from onfoot.learn.words import own_words

LEADING_AXES = (  # by the number of axes that are the function's own
    "There may be any number of axes, (tokens), (batch, tokens), …: go through all ids, whatever their shape.",
    "There may be several leading axes, (batch, tokens, features): make one row per token of them first.",
    "There may be any number of leading axes, or none: count the axes from the last one, as in swapaxes(-1, -2).",
)
SAME = 1e-9  # relative difference up to which a given forward pass is unchanged


def check_form_and_axes(verdict: PartVerdict, call: Callable[[Sequence[Any]], Any]) -> None:
    """Calls a function that is right in the cases again: it must return arrays, and take any number of leading axes."""
    part, options = verdict.part, verdict.part.layer.with_options(verdict.part.options)
    names = part.layer.gradients
    case = first_case(part.layer, 0, options, ANY)
    for inputs in (list(case.inputs), *with_other_axes(part, case)):
        try:
            found = call([x.copy() if isinstance(x, np.ndarray) else x for x in inputs])
        except Exception as error:  # the learner's function, in whatever way
            verdict.status, verdict.marks = "failed", dict.fromkeys(names, "not judged")
            shape = f"with {part.layer.arguments[0]} of shape {inputs[0].shape}"
            verdict.problems.append(f"{shape}{_failure(error)}")
            verdict.refuse(f"{part.function} fits only some of the shapes", leading_axes(part))
            return
        form = wrong_form(part, found)
        if form:
            verdict.status, verdict.marks = "wrong", dict.fromkeys(names, "wrong")
            verdict.refuse(*form)
            return
        given, right = [found] if len(names) == 1 else found, part.layer.reference(*inputs, **options)
        wrong = [name for name, g, r in zip(names, given, right, strict=True) if not is_same(g, r)]
        if wrong:
            verdict.status = "wrong"
            verdict.marks |= dict.fromkeys(wrong, "wrong")
            verdict.refuse(f"{', '.join(wrong)} fits only some of the shapes", leading_axes(part))
            return


def _failure(error: Exception) -> str:
    """What happened to a call, after the shape it was made with."""
    if isinstance(error, DiedError):  # it ran out of time, or its process ended
        return f", {error}"
    said = str(error) if isinstance(error, RaisedError) else f"{type(error).__name__}: {error}"
    return f" it raises {OUR_LINE.sub('', said)}"


def leading_axes(part: Part) -> str:
    """What an answer that fits only some of the shapes must take."""
    return LEADING_AXES[1 if part.axes is None else part.axes]


def with_other_axes(part: Part, case: Case) -> Iterator[list[Any]]:
    """The inputs of a case with none, one and one more leading axis than it has, where the function must take these."""
    if part.axes is None:
        return
    n = case.inputs[0].ndim - part.axes
    lead = case.inputs[0].shape[:n]

    def changed(change: Callable[[Any], Any]) -> list[Any]:
        return [change(x) if isinstance(x, np.ndarray) and x.shape[:n] == lead else x for x in case.inputs]

    if part.axes > 1:  # a single matrix; a single token or id is not asked for
        yield changed(lambda x: x[(0,) * n])
    yield changed(lambda x: x.reshape(-1, *x.shape[n:]))
    yield changed(lambda x: np.stack([x, x[::-1]]))


def wrong_form(part: Part, found: Any) -> tuple[str, str] | None:
    """The mistake and its explanation, if the gradients are not returned as other exercises and training take them."""
    names = [own_words(name, part.function) for name in part.layer.gradients]
    what = type(found).__name__
    kind = f"{part.function} returns a {what}"
    if len(names) == 1:
        inside = isinstance(found, (tuple, list, dict))
        return (kind, f"Return {names[0]} itself, not a {what}.") if inside else None
    if isinstance(found, dict):
        return kind, f"Return {', '.join(names)} without names, in this order."
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        n = len(found) if isinstance(found, (tuple, list)) else 1
        return f"{part.function} returns {n} values", f"Return {', '.join(names)}, in this order, and nothing else."
    return None


def is_same(found: Any, right: Any) -> bool:
    """Whether it is that array, up to rounding."""
    try:
        given = to_numpy(found)
        return given.shape == right.shape and np.allclose(given, right, rtol=SAME, atol=SAME)
    except (TypeError, ValueError, AttributeError):  # a text, or lists of several lengths
        return False
