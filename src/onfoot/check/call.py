"""Calls a user's function, which may raise, return anything, modify its arguments or be nondeterministic.

The result is an `Answer`: the gradients as float64 arrays if they could be read, and the problems found.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.arrays import is_torch, to_numpy
from onfoot.check.forms.form import Form, FormError
from onfoot.check.guard import is_too_large, most_entries, numpy_restored
from onfoot.check.isolated import DiedError, RaisedError, RemoteForm, place
from onfoot.check.layer import Array
from onfoot.check.wire import without_mask
from onfoot.check.writes import writing_line

ARRAYS = ("auto", "numpy", "torch", "jax")
NOTHING = "nothing to judge yet"
DEATHS = ("crash", "timeout", "exit")


@dataclass(frozen=True)
class Problem:
    """A problem other than a wrong value."""

    kind: str  # raises | form | count | type | shape | nan | mutates | random | crash | timeout | exit
    message: str
    size: float = math.inf  # for kind random: the difference between two calls, relative to the rounding budget
    gradient: str = ""  # for kinds random and shape: the one that differs
    added: bool = False  # for kind random: whether the second call adds its gradient to the first one's

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}


@dataclass
class Answer:
    """What a function returned."""

    gradients: list[Array] | None = None  # float64, in the returned shapes; None if any is missing
    problems: list[Problem] = field(default_factory=list)
    given: list[str] = field(default_factory=list)  # the names of the gradients that were returned
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the values returned, if they have no names
    parts: list[Array] = field(default_factory=list)  # the arrays returned, if they are too few and in unknown shapes

    @property
    def died(self) -> bool:
        """Whether the process of the function ended or hung."""
        return any(p.kind in DEATHS for p in self.problems)

    def add(self, kind: str, message: str, gradient: str = "") -> None:
        self.problems.append(Problem(kind, message, gradient=gradient))


def is_installed(package: str) -> bool:
    """Whether a package is installed; does not import it."""
    return importlib.util.find_spec(package) is not None


def copy_argument(x: Any, arrays: str) -> Any:
    """Returns a copy of an argument as an array or a tensor; numbers are returned unchanged."""
    if not isinstance(x, np.ndarray):
        return x
    if arrays == "torch":
        import torch

        return torch.from_numpy(x.copy())
    return x.copy()


def call(
    function: Callable[..., Any] | Form | RemoteForm,
    inputs: Sequence[Any],
    arguments: Sequence[str],
    expected: Sequence[tuple[str, tuple[int, ...]]],
    options: Mapping[str, Any],
    arrays: str = "numpy",
    dtype: str = "",
    order: Sequence[int] | None = None,
) -> Answer:
    """Calls the function once, with copies of the inputs. `expected` holds the name and shape of every gradient.

    `order` says which gradient each returned value is, if they are not in the expected order.
    """
    answer = Answer()
    given = [copy_argument(x, "numpy" if isinstance(function, (Form, RemoteForm)) else arrays) for x in inputs]
    replaced: list[str] = []
    try:
        # what it prints must not go to the standard output, which may carry JSON
        with np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr), numpy_restored(replaced):
            returned = _returned(function, given, options, arrays, dtype)
    except DiedError as death:
        answer.add(death.kind, str(death))
        return answer
    except FormError as error:
        answer.add("form", str(error))
        return answer
    except RaisedError as error:
        answer.add("raises", str(error))
        return answer
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in user code must not end the check with status 0
        answer.add("raises", raised(error) + location(error))
        return answer
    changed = [
        name
        for name, before, after in zip(arguments, inputs, given, strict=False)
        if isinstance(before, np.ndarray) and not _same(before, to_numpy(after))
    ]
    where = _writing_line(function, inputs, options, arrays, dtype) if changed else ""
    for name in changed:
        answer.add("mutates", f"it modifies its argument {name} in place{where}")
    for name in function.function.replaced if isinstance(function, RemoteForm) else replaced:
        answer.add("mutates", f"it replaces {name}")
    try:
        _read(_ordered(returned, order), expected, answer)
    except Exception as error:  # a list inside itself, an object that raises when it is asked for its dtype
        answer.add("type", f"what it returns cannot be read: {raised(error)}")
    return answer


def _returned(
    function: Callable[..., Any] | Form | RemoteForm,
    given: Sequence[Any],
    options: Mapping[str, Any],
    arrays: str,
    dtype: str,
    frozen: bool = False,
) -> Any:
    if isinstance(function, RemoteForm):
        return function.run(given, options, arrays, dtype, frozen)
    if isinstance(function, Form):
        return function.run(given, options, arrays, dtype)
    return function(*given, **options)


def _ordered(returned: Any, order: Sequence[int] | None) -> Any:
    """The returned values in the expected order."""
    if order is None or not isinstance(returned, (tuple, list)) or len(returned) != len(order):
        return returned
    return tuple(returned[order.index(i)] for i in range(len(order)))


def _writing_line(
    function: Callable[..., Any] | Form | RemoteForm,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    arrays: str,
    dtype: str,
) -> str:
    """The file and line of the first write into an argument, or "".

    It is found by a call with read-only arrays; tensors are compared at every line, since they cannot be read-only.
    """
    given = [copy_argument(x, "numpy" if isinstance(function, (Form, RemoteForm)) else arrays) for x in inputs]
    isolated = isinstance(function, RemoteForm)  # this is done in its own process
    if arrays != "numpy" and not isolated:
        memory = [to_numpy(x) for x in given if hasattr(x, "shape")]
        return writing_line(lambda: _returned(function, given, options, arrays, dtype), memory)
    for x in () if isolated else given:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    try:
        with np.errstate(all="ignore"), contextlib.redirect_stdout(sys.stderr):
            _returned(function, given, options, arrays, dtype, frozen=True)
    except RaisedError as error:
        found = re.search(r" \([^()]+, line \d+\)$", str(error)) if "read-only" in str(error) else None
        return found[0] if found else ""
    except ValueError as error:
        return location(error) if "read-only" in str(error) else ""
    except (Exception, SystemExit):
        return ""
    return ""


def _same(before: Array, after: Array) -> bool:
    """Bitwise equality, nan included."""
    return after.shape == before.shape and after.dtype == before.dtype and after.tobytes() == before.tobytes()


def _read(returned: Any, expected: Sequence[tuple[str, tuple[int, ...]]], answer: Answer) -> None:
    """Reads the gradients from the returned value, and records what is wrong with it."""
    if isinstance(returned, (tuple, list)) and len(returned) == len(expected):
        answer.shapes = [tuple(getattr(part, "shape", ())) for part in returned]
    found = _given(returned, expected, answer)
    answer.given = [expected[i][0] for i in found]
    if len(found) < len(expected):
        if found or not answer.problems:
            missing = ", ".join(name for i, (name, _) in enumerate(expected) if i not in found)
            answer.add("count", f"it does not return {missing}")
        return
    gradients, most = [], most_entries([shape for _, shape in expected])
    for i, (name, shape) in enumerate(expected):
        part = found[i]
        if is_too_large(part, most):
            answer.add("shape", f"{name} has shape {tuple(part.shape)}; expected {shape}", name)
            continue
        array = _as_array(part)
        if array is None:
            answer.add("type", f"{name} is {_kind(part)}; expected a floating-point array")
            continue
        if array.shape != shape:
            answer.add("shape", f"{name} has shape {array.shape}; expected {shape}", name)
        bad = int((~np.isfinite(array)).sum())
        if bad:
            answer.add("nan", f"{name}: {bad} of {array.size} entries are nan or infinite")
        gradients.append(array)
    if len(gradients) == len(expected):
        answer.gradients = gradients


def _given(returned: Any, expected: Sequence[tuple[str, tuple[int, ...]]], answer: Answer) -> dict[int, Any]:
    """Returns the gradients that were returned, by index: all of them, some of them, or none if that is unclear."""
    names = [name for name, _ in expected]
    if isinstance(returned, dict):
        unknown = [str(name) for name, part in returned.items() if name not in names and part is not None]
        if unknown:
            answer.add("count", f"it returns {', '.join(unknown)}; expected {', '.join(names)}")
            return {}
        return {i: returned[name] for i, name in enumerate(names) if returned.get(name) is not None}
    several = isinstance(returned, (tuple, list)) and (
        len(expected) > 1 or not _is_numbers(returned) or _holds_one(returned, expected[0][1])
    )
    parts = list(returned) if several else [returned]
    if len(parts) > len(expected):
        parts = [part for part in parts if part is not None]  # None for inputs without a gradient, such as ids
    if len(parts) == len(expected):
        found = {i: part for i, part in enumerate(parts) if part is not None}
        if not found:
            answer.add("count", f"{NOTHING}: it returns None; begin with {names[0]}")
        return found
    matched = _by_shape([part for part in parts if part is not None], expected)
    if not matched:
        what = _kind(returned) if len(parts) == 1 else f"{len(parts)} values"
        answer.add("count", f"it returns {what}; expected {len(expected)}: {', '.join(names)}")
        if len(parts) < len(expected):
            answer.parts = _arrays(parts, expected)
    return matched


def _arrays(parts: Sequence[Any], expected: Sequence[tuple[str, tuple[int, ...]]]) -> list[Array]:
    """The parts as arrays; none if one of them is not an array, or is too large."""
    most = most_entries([shape for _, shape in expected])
    found = [None if is_too_large(part, most) else _as_array(part) for part in parts if part is not None]
    return [array for array in found if array is not None] if all(array is not None for array in found) else []


def _by_shape(parts: Sequence[Any], expected: Sequence[tuple[str, tuple[int, ...]]]) -> dict[int, Any]:
    """Returns the first gradients, in order, that have the shapes of these parts; nothing if not all have one."""
    found, i, most = {}, 0, most_entries([shape for _, shape in expected])
    for part in parts:
        array = None if is_too_large(part, most) else _as_array(part)
        while i < len(expected) and (array is None or expected[i][1] != array.shape):
            i += 1
        if i == len(expected):
            return {}
        found[i] = part
        i += 1
    return found


def _is_numbers(value: Any) -> bool:
    """Whether the value is a nested list of numbers: that is one array, not several gradients."""
    if not isinstance(value, (tuple, list)):
        return isinstance(value, (int, float))
    return len(value) > 0 and all(_is_numbers(v) for v in value)


def _holds_one(value: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether a list or tuple has a nested list of that shape as its only part."""
    array = _as_array(value[0]) if len(value) == 1 else None
    return array is not None and array.shape == shape


def _as_array(part: Any) -> Array | None:
    """Returns `part` in float64, or None if it is not a floating-point array."""
    try:
        array = to_numpy(part.double() if is_torch(part) else without_mask(part))
        if array.dtype.kind == "V" and array.dtype.names is None:  # bfloat16, as JAX has it
            array = array.astype(np.float32)
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


def raised(error: BaseException) -> str:
    """The type and the first line of an error."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0]}"


def location(error: BaseException, caller: str = __file__) -> str:
    """Returns the file and line of the user's code that raised, which `caller` called."""
    own = (caller, str(Path(__file__).parent / "forms"))
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    return place([frame for frame in frames[::-1] if not frame[0].startswith(own)])
