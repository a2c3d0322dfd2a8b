"""Calls a user's function, which may raise, return anything, modify its arguments or be nondeterministic.

The result is an `Answer`: the gradients as float64 arrays if they could be read, and the problems found.
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
    """A problem other than a wrong value."""

    kind: str  # raises | count | type | shape | nan | mutates | random
    message: str
    size: float = math.inf  # for kind random: the difference between two calls, relative to the rounding budget

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}


@dataclass
class Answer:
    """What a function returned."""

    gradients: list[Array] | None = None  # float64, in the returned shapes; None if any is missing
    problems: list[Problem] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # gradients returned as None: not computed; nan in `gradients`

    def add(self, kind: str, message: str) -> None:
        self.problems.append(Problem(kind, message))


def has_torch() -> bool:
    """Whether PyTorch is installed; does not import it."""
    return importlib.util.find_spec("torch") is not None


def copy_argument(x: Any, arrays: str) -> Any:
    """Returns a copy of an argument as an array or a tensor; numbers are returned unchanged."""
    if not isinstance(x, np.ndarray):
        return x
    if arrays == "torch":
        import torch

        return torch.from_numpy(x.copy())
    return x.copy()


def accepted_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the function accepts as parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in options.items() if name in parameters}


def accepts_arguments(function: Callable[..., Any], n: int) -> bool:
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
    """Calls the function once, with copies of the inputs. `expected` holds the name and shape of every gradient."""
    answer = Answer()
    given = [copy_argument(x, arrays) for x in inputs]
    try:
        with np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr):  # stdout may carry JSON
            returned = function(*given, **options)
    except (Exception, SystemExit) as error:  # sys.exit() in user code must not end the check with status 0
        answer.add("raises", f"{type(error).__name__}: {_first_line(error)}{_location(error)}")
        return answer
    changed = [
        name
        for name, before, after in zip(arguments, inputs, given, strict=False)
        if isinstance(before, np.ndarray) and not _same(before, to_numpy(after))
    ]
    where = _writing_line(function, inputs, options) if changed and arrays == "numpy" else ""
    for name in changed:
        answer.add("mutates", f"it modifies its argument {name} in place{where}")
    _read(returned, expected, answer)
    return answer


def _writing_line(function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The file and line of the first write into an argument, or "": found by a call with read-only arrays."""
    given = [copy_argument(x, "numpy") for x in inputs]
    for x in given:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    try:
        with np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr):
            function(*given, **options)
    except ValueError as error:
        return _location(error) if "read-only" in str(error) else ""
    except (Exception, SystemExit):
        return ""
    return ""


def _same(before: Array, after: Array) -> bool:
    """Bitwise equality, nan included."""
    return after.shape == before.shape and after.dtype == before.dtype and after.tobytes() == before.tobytes()


def _read(returned: Any, expected: Sequence[tuple[str, tuple[int, ...]]], answer: Answer) -> None:
    """Reads the gradients from the returned value, and records what is wrong with it."""
    names = ", ".join(name for name, _ in expected)
    several = isinstance(returned, (tuple, list)) and (len(expected) > 1 or not _is_numbers(returned))
    parts = list(returned) if several else [returned]
    if len(parts) > len(expected):
        parts = [part for part in parts if part is not None]  # None for inputs without a gradient, such as ids
    if len(parts) != len(expected):
        what = _kind(returned) if len(parts) == 1 else f"{len(parts)} values"
        answer.add("count", f"it returns {what}; expected {len(expected)}: {names}")
        return
    gradients = []
    for (name, shape), part in zip(expected, parts, strict=True):
        if part is None and any(one is not None for one in parts):
            answer.missing.append(name)
            gradients.append(np.full(shape, math.nan))
            continue
        array = _as_array(part)
        if array is None:
            answer.add("type", f"{name} is {_kind(part)}; expected a floating-point array")
            continue
        if array.shape != shape:
            answer.add("shape", f"{name} has shape {array.shape}; expected {shape}")
        bad = int((~np.isfinite(array)).sum())
        if bad:
            answer.add("nan", f"{name}: {bad} of {array.size} entries are nan or infinite")
        gradients.append(array)
    if len(gradients) == len(expected):
        answer.gradients = gradients


def _is_numbers(value: Any) -> bool:
    """Whether the value is a nested list of numbers: that is one array, not several gradients."""
    if not isinstance(value, (tuple, list)):
        return isinstance(value, (int, float))
    return len(value) > 0 and all(_is_numbers(v) for v in value)


def _as_array(part: Any) -> Array | None:
    """Returns `part` in float64, or None if it is not a floating-point array."""
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
        return f"an array of {str(value.dtype).removeprefix('torch.')}"
    return f"a value of type {type(value).__name__}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _location(error: BaseException) -> str:
    """Returns the file and line of the user's code that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "site-packages" not in f.filename]
    return f" ({own[-1].filename.rsplit('/', 1)[-1]}, line {own[-1].lineno})" if own else ""
