"""A user's pair as an engine calls it: with the arguments that it takes, and with checked results."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onfoot.engine import OPS
from onfoot.own_engine.pairs import GRADIENTS, Pair, ours, result_shape
from onfoot.terminal import listed

NEEDED_BY = {"start": " for packed examples (--no-pack trains without)", "keep": " for dropout"}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class PairError(ValueError):
    """A function of a user's pair cannot be called, raises, or returns something else than its gradients."""


class NotWrittenError(PairError):
    """A backward function returns None: it is still to be written."""


class OwnSaved(NamedTuple):
    """What the user's forward function saved, and the arguments that it was called with, by our names."""

    saved: Any
    given: dict[str, Any]


def checked_pair(pair: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Pair:
    """The user's pair with our signature; a PairError says what is wrong with a result."""
    names = list(inspect.signature(OPS[f"{pair}_forward"]).parameters)
    call_forward = fitted(f"{pair}_forward", forward)
    call_backward = fitted(f"{pair}_backward", backward)

    def checked_forward(*args: Any, **kwargs: Any) -> tuple[Any, OwnSaved]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        out = call_forward(given)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise PairError(f"your {pair}_forward must return y and what its backward needs, got {kind_of(out)}")
        saved = OwnSaved(out[1], given)
        like = given.get(GRADIENTS[pair][0])
        return _array(pair, "forward", "y", out[0], result_shape(pair, given), like, saved), saved

    def checked_backward(dy: Any, saved: OwnSaved) -> Any:
        first = next(iter(inspect.signature(OPS[f"{pair}_backward"]).parameters))
        grads = gradient_list(pair, call_backward({first: dy, "saved": saved.saved}), saved.given)
        made = []
        for name, grad in zip(GRADIENTS[pair], grads, strict=True):
            x = saved.given.get(name)
            made.append(None if x is None else _array(pair, "backward", f"d{name}", grad, tuple(x.shape), x, saved, dy))
        return made[0] if len(made) == 1 else tuple(made)

    return Pair(checked_forward, checked_backward)


def fitted(name: str, function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Calls a user's function with our arguments by name; those it does not take must have their default values.

    If its parameters have other names than ours, the arguments are passed by position.
    """
    expected = inspect.signature(OPS[name]).parameters
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise PairError(f"your {name} is not a Python function: {kind_of(function)}") from None
    kinds = {p.kind for p in taken.values()}
    positional = [p for p in taken.values() if p.kind in POSITIONAL]
    named = [p for p in taken.values() if p.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
    required = [p.name for p in expected.values() if p.default is inspect.Parameter.empty]
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    by_name = all(p.name in expected for p in named if p.default is p.empty)
    by_name = by_name and inspect.Parameter.POSITIONAL_ONLY not in kinds
    if by_name and (takes_all or all(n in taken for n in required)):
        accepted = set(expected) if takes_all else set(expected) & set(taken)
    elif inspect.Parameter.VAR_POSITIONAL in kinds:
        accepted, by_name = set(expected), False
    else:
        by_name = False
        accepted = set(list(expected)[: len(positional)])
        needed = [p.name for p in named if p.default is p.empty]
        if len(positional) < len(required) or len(needed) > len(expected):
            ours_takes = ", ".join(expected)
            raise PairError(f"your {name} takes ({', '.join(taken)}); an engine calls it with ({ours_takes})")

    def call(given: Mapping[str, Any]) -> Any:
        for argument in [n for n in given if n not in accepted]:
            if not _is_default(given[argument], expected[argument].default):
                raise PairError(
                    f"your {name} does not take {argument}, which this model needs{NEEDED_BY.get(argument, '')}; add a "
                    f"parameter {argument} to it, here {_short(given[argument])}"
                )
        values = {n: x for n, x in given.items() if n in accepted}
        try:
            return function(**values) if by_name else function(*values.values())
        except PairError:
            raise
        except (Exception, SystemExit) as error:  # an exit in a function would end the command without a word
            shapes = ", ".join(f"{n} {_short(x)}" for n, x in values.items() if n != "saved")
            raise PairError(f"{_raised(name, error)}, called with {shapes}") from error

    return call


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns; a PairError for what it raises, also if it ends the process."""
    try:
        return function(*args)
    except PairError:
        raise
    except (Exception, SystemExit) as error:
        raise PairError(_raised(name, error)) from error


def gradient_list(pair: str, grads: Any, given: Mapping[str, Any]) -> Sequence[Any]:
    """The gradients that a backward function returned, one per name; a PairError if some are missing."""
    names = GRADIENTS[pair]
    if len(names) == 1 and not isinstance(grads, tuple | list):
        grads = None if grads is None else (grads,)
    wanted = listed([f"d{name}" for name in names])
    if grads is None:
        raise NotWrittenError(f"your {pair}_backward returns None; it must return {wanted}")
    if not isinstance(grads, tuple | list) or len(grads) != len(names):
        raise PairError(f"your {pair}_backward must return {wanted}, got {kind_of(grads)}")
    missing = [f"d{name}" for name, g in zip(names, grads, strict=True) if g is None and given.get(name) is not None]
    if missing:
        raise NotWrittenError(f"your {pair}_backward returns None for {listed(missing)}; has it been written yet?")
    return grads


def _array(
    pair: str, half: str, what: str, value: Any, shape: tuple[int, ...], like: Any, saved: OwnSaved, dy: Any = None
) -> Any:
    """A result as an array of the model's dtype, or a PairError about its type, its shape or its numbers."""
    if value is None:
        raise PairError(f"your {pair}_{half} returns None for {what}")
    array = array_of_numbers(f"{what} of your {pair}_{half}", value)
    if array.shape != shape:
        of = f"; {what[1:]} has shape {shape}" if half == "backward" else f" instead of {shape}"
        raise PairError(f"{what} of your {pair}_{half} has shape {array.shape}{of}")
    if not _finite(array) and _ours_is_finite(pair, half, what, saved, dy):
        bad = int((~np.isfinite(array)).sum())
        raise PairError(f"{what} of your {pair}_{half} has {bad} of {array.size} entries that are nan or infinite")
    if pair == "cross_entropy" and half == "forward":
        return value
    return np.asarray(array, dtype=like.dtype)


def array_of_numbers(what: str, value: Any) -> np.ndarray:
    """A result of a user's function as an array, or a PairError."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise PairError(f"{what} must be an array of numbers, got {kind_of(value)}")
    return array


def _finite(x: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())


def _ours_is_finite(pair: str, half: str, what: str, saved: OwnSaved, dy: Any) -> bool:
    """Whether our function gives finite numbers for the same arguments: if not, the user's is not to blame."""
    forward, backward = ours(pair)
    with np.errstate(all="ignore"):
        y, s = forward(**saved.given)
        if half == "forward":
            return bool(np.isfinite(y).all())
        grads = backward(dy, s)
    found = dict(zip(GRADIENTS[pair], grads if isinstance(grads, tuple) else (grads,), strict=True))
    return bool(np.isfinite(found[what[1:]]).all())


def _is_default(value: Any, default: Any) -> bool:
    if value is None or default is None:
        return value is default
    return np.ndim(value) == 0 and bool(value == default)


def _short(x: Any) -> str:
    """An argument in an error: the shape of an array, or the value."""
    return str(tuple(x.shape)) if hasattr(x, "shape") and np.ndim(x) else repr(x)[:40]


def kind_of(x: Any) -> str:
    """What a user's function returned, in a message."""
    if isinstance(x, tuple | list):
        return f"{len(x)} values"
    return "None" if x is None else f"a {type(x).__name__}"


def _raised(name: str, error: BaseException) -> str:
    """What a user's function raised, and where: the innermost line in a file of theirs."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call
    theirs = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else "its arguments do not fit"
    return f"your {name} raises {said} ({where})"
