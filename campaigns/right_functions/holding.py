"""How a right function is held: what it is called with and returns, and what kind of object it is."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from campaigns.right_functions.author import Author, Function
from onfoot.check.layer import Layer


class Labelled(np.ndarray):
    """A subclass of NumPy's arrays, as packages with units or names have."""


def _strided(x: np.ndarray) -> np.ndarray:
    larger = np.full(tuple(2 * n for n in x.shape), np.nan, x.dtype)
    view = larger[tuple(slice(None, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def _padded(x: np.ndarray) -> np.ndarray:
    larger = np.full(tuple(n + 3 for n in x.shape), np.nan, x.dtype)
    view = larger[tuple(slice(1, n + 1) for n in x.shape)]
    view[...] = x
    return view


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.T).T


def _with_graph(x: np.ndarray) -> Any:
    """A tensor that still belongs to a graph."""
    return torch.from_numpy(x.copy()).requires_grad_() * 1.0


def _expanded(x: np.ndarray) -> Any:
    return torch.from_numpy(np.stack([x, x])).unbind(0)[1]


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "": lambda x: x,
    "Fortran order": np.asfortranarray,
    "transposed memory": _transposed,
    "every second entry": _strided,
    "reversed strides": lambda x: np.flip(np.flip(x).copy()),
    "inside a larger array": _padded,
    "read-only": _read_only,
    "a subclass": lambda x: x.view(Labelled),
    "a masked array, nothing masked": np.ma.asarray,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "long double": lambda x: x.astype(np.longdouble),
    "float64": lambda x: x.astype(np.float64),
    "nested lists": lambda x: x.tolist(),
    "a tensor": lambda x: torch.from_numpy(x.copy()),
    "a tensor with a graph": _with_graph,
    "a strided tensor": lambda x: torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim)[::-1]),
    "part of a tensor": _expanded,
}  # fmt: skip


def _with_none(grads: list[Any], names: tuple[str, ...]) -> Any:
    return (*grads, None)


def _named(grads: list[Any], names: tuple[str, ...]) -> Any:
    return namedtuple("Gradients", names)(*grads)


HOLDERS: dict[str, Callable[[list[Any], tuple[str, ...]], Any]] = {
    "tuple": lambda grads, names: tuple(grads),
    "list": lambda grads, names: list(grads),
    "dict": lambda grads, names: dict(zip(names, grads, strict=True)),
    "dict in another order": lambda grads, names: dict(reversed([*zip(names, grads, strict=True)])),
    "named tuple": _named,
    "None at the end": _with_none,
}


class CallableObject:
    """An object that is called, with a method that does the same. (With `backward`, it would be taken for a layer.)"""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def gradients(self, *arguments: Any) -> Any:
        return self.function(*arguments)


KINDS: dict[str, Callable[[Function], Any]] = {
    "": lambda function: function,
    "an object": CallableObject,
    "a method": lambda function: CallableObject(function).gradients,
    "a partial": functools.partial,
    "a lambda": lambda function: lambda *arguments: function(*arguments),
}


def _signature(arguments: Sequence[str], options: Iterable[str]) -> inspect.Signature:
    positional = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arguments]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
    return inspect.Signature([*positional, *named])


def held(author: Author, function: Function, layer: Layer, options: Mapping[str, Any]) -> Any:
    """The function as users hold it: its arguments and results in the kinds drawn, its options given or built in."""
    names = layer.gradients
    layout, holder = author.one_of("returns", *[""] * 8, *ARRAYS), author.one_of("in a", *["tuple"] * 4, *HOLDERS)
    bare = len(names) == 1 and author.yes("alone", 0.7)
    in_place, frozen = author.yes("overwrites its arguments", 0.05), author.yes("freezes its arguments", 0.1)
    buffers: dict[Any, np.ndarray] | None = {} if author.yes("the same buffers in every call", 0.1) else None
    arguments = layer.arguments
    if layer.upstream_optional and author.yes("without dout", 0.3):
        arguments = arguments[:-1]

    def kept(i: int, x: np.ndarray) -> np.ndarray:
        if buffers is None:
            return x
        own = buffers.setdefault((i, x.shape, x.dtype.str), np.empty_like(x))
        own[...] = x
        return own

    def call(*inputs: Any, **given: Any) -> Any:
        for x in inputs:
            if frozen and isinstance(x, np.ndarray):
                x.flags.writeable = False
        with np.errstate(all="ignore"):
            found = function(*map(author.array, inputs), **{**options, **given})
        arrays = [np.asarray(g.detach() if isinstance(g, torch.Tensor) else g) for g in found]
        if in_place and not frozen:
            for x in inputs:
                if getattr(x, "ndim", 0) and str(x.dtype).removeprefix("torch.") in ("float32", "float64"):
                    x *= 2
        results = [ARRAYS[layout](kept(i, x)) for i, x in enumerate(arrays)]
        return results[0] if bare else HOLDERS[holder](results, names)

    if options and author.yes("takes options", 0.6):
        call.__signature__ = _signature(arguments, options)  # type: ignore[attr-defined]
        return call
    if len(arguments) < len(layer.arguments):
        call.__signature__ = _signature(arguments, ())  # type: ignore[attr-defined]
        return call
    return KINDS[author.one_of("held as", "", "", *KINDS)](call)
