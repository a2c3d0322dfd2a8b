"""Calling a function that may do anything: raise, return the wrong things, change its arguments, answer differently.

Whatever it does becomes an `Answer`: the gradients as float64 arrays where there are some, and the problems.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onfoot.arrays import is_torch, to_numpy
from onfoot.check.layer import Array

ARRAYS = ("auto", "numpy", "torch")


@dataclass(frozen=True)
class Problem:
    """Something other than a wrong number."""

    kind: str  # raises | count | type | shape | nan | mutates | random
    message: str
    size: float = math.inf  # of what differs between two calls, over what rounding is allowed

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}


@dataclass
class Answer:
    """What a function returned."""

    gradients: list[Array] | None = None  # in float64, in the shapes that came back; None where some are missing
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: str, message: str) -> None:
        self.problems.append(Problem(kind, message))


def has_torch() -> bool:
    """Whether PyTorch is installed; does not import it."""
    return importlib.util.find_spec("torch") is not None


def as_given(x: Any, arrays: str) -> Any:
    """A fresh copy of an argument, as an array or a tensor; numbers stay numbers."""
    if not isinstance(x, np.ndarray):
        return x
    if arrays == "torch":
        import torch

        return torch.from_numpy(x.copy())
    return x.copy()


def accepted_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose names the function has among its parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in options.items() if name in parameters}


def takes(function: Callable[..., Any], n: int) -> bool:
    """Whether the function can be called with n positional arguments."""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def call(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    arguments: Sequence[str],
    expected: Sequence[tuple[str, tuple[int, ...]]],
    options: Mapping[str, Any],
    arrays: str = "numpy",
) -> Answer:
    """One call with fresh copies. `expected` holds the name and the shape of every gradient."""
    answer = Answer()
    given = [as_given(x, arrays) for x in inputs]
    try:
        with np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr):  # stdout may carry JSON
            returned = function(*given, **options)
    except (Exception, SystemExit) as error:  # one that leaves must not end the check, least of all with status 0
        answer.add("raises", f"{type(error).__name__}: {_first_line(error)}{_place(error)}")
        return answer
    for name, before, after in zip(arguments, inputs, given, strict=False):
        if isinstance(before, np.ndarray) and not _same(before, to_numpy(after)):
            answer.add("mutates", f"it changes its argument {name} in place")
    _read(returned, expected, answer)
    return answer


def _same(before: Array, after: Array) -> bool:
    """Bit by bit, nan included."""
    return after.shape == before.shape and after.dtype == before.dtype and after.tobytes() == before.tobytes()


def _read(returned: Any, expected: Sequence[tuple[str, tuple[int, ...]]], answer: Answer) -> None:
    """Fills in the gradients, as far as what came back can be read as such."""
    names = ", ".join(name for name, _ in expected)
    several = isinstance(returned, (tuple, list)) and (len(expected) > 1 or not _is_numbers(returned))
    parts = list(returned) if several else [returned]
    if len(parts) > len(expected):
        parts = [part for part in parts if part is not None]  # None for what has no gradient, such as ids
    if len(parts) != len(expected):
        what = _kind(returned) if len(parts) == 1 else f"{len(parts)} values"
        answer.add("count", f"it returns {what}; {len(expected)} expected: {names}")
        return
    gradients = []
    for (name, shape), part in zip(expected, parts, strict=True):
        array = _as_array(part)
        if array is None:
            answer.add("type", f"{name} is {_kind(part)}; an array of floating-point numbers is expected")
            continue
        if array.shape != shape:
            answer.add("shape", f"{name} has shape {array.shape}; {shape} expected")
        bad = int((~np.isfinite(array)).sum())
        if bad:
            answer.add("nan", f"{name}: {bad} of {array.size} entries are nan or infinite")
        gradients.append(array)
    if len(gradients) == len(expected):
        answer.gradients = gradients


def _is_numbers(value: Any) -> bool:
    """A plain list of numbers (or of lists of them) is one array, not several gradients."""
    if not isinstance(value, (tuple, list)):
        return isinstance(value, (int, float))
    return len(value) > 0 and all(_is_numbers(v) for v in value)


def _as_array(part: Any) -> Array | None:
    """`part` in float64, or None where it holds anything but floating-point numbers."""
    try:
        array = to_numpy(part.double() if is_torch(part) else part)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    if is_torch(part) and not part.is_floating_point():
        return None
    return array.astype(np.float64) if array.dtype.kind == "f" else None


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if hasattr(value, "dtype"):
        return f"one array of {str(value.dtype).removeprefix('torch.')}"
    return f"a value of type {type(value).__name__}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _place(error: BaseException) -> str:
    """The line of the function's own file where it raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "site-packages" not in f.filename]
    return f" ({own[-1].filename.rsplit('/', 1)[-1]}, line {own[-1].lineno})" if own else ""
