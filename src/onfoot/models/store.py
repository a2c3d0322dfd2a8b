"""A model's parameters by name: a dict that checks names, shapes and memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from onfoot.arrays import Array, Shape, is_torch, to_numpy
from onfoot.engine import Engine
from onfoot.quantized import Quantized

NOT_IN_TORCH = 'quantised weights need the engine "numba" or "numpy", not "torch"'


class Params(dict[str, Array]):
    """Every parameter has the shape that the configuration (or its adapter) expects, in its own memory.

    An array of another shape is refused. One that the engine can use directly is stored without a copy; one of another
    dtype or order, or that is read-only, mapped from a file, or shared with another parameter is copied. Writing into
    an array in place, `params[name][...] = x`, is not checked.
    """

    def __init__(self, engine: Engine, dtype: str, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.engine, self.dtype = engine, dtype
        self.shapes = dict(shapes)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._checked(name, value))

    def copy_in(self, name: str, value: Any) -> None:
        """Sets a parameter to a copy."""
        self._check_shape(name, value)
        super().__setitem__(name, self._copied(name, value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several parameters, or none if one of them is invalid."""
        super().update({name: self._checked(name, value) for name, value in dict(*args, **kwargs).items()})

    def __ior__(self, other: Any) -> Params:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Array:
        if name not in self:
            self[name] = default
        return self[name]

    def remove(self, name: str) -> None:
        """Removes a parameter that the configuration no longer has, and its shape."""
        super().__delitem__(name)
        del self.shapes[name]

    def _cannot_remove(self, *args: Any) -> NoReturn:
        raise ValueError("cannot remove parameters from a model; copy them with dict(params)")

    __delitem__ = pop = popitem = clear = _cannot_remove

    def _checked(self, name: str, value: Any) -> Array:
        self._check_shape(name, value)
        return value if self._usable(name, value) else self._copied(name, value)

    def _check_shape(self, name: str, value: Any) -> None:
        if name not in self.shapes:
            raise ValueError(f"unexpected parameter {name!r}: the configuration does not have it")
        shape = tuple(value.shape if hasattr(value, "shape") else np.shape(value))
        if shape != self.shapes[name]:
            raise ValueError(f"{name} has shape {shape}; the configuration expects {self.shapes[name]}")

    def _copied(self, name: str, value: Any) -> Array:
        if isinstance(value, Quantized):
            if self.engine.name == "torch":
                raise ValueError(NOT_IN_TORCH)
            return self.engine.copy_quantized(value)
        if np.ma.isMaskedArray(value) or to_numpy(value).dtype.kind not in "fiub":
            raise ValueError(f"{name} must be an array of real numbers, got {type(value).__name__}")
        return self.engine.copy_in(np.asarray(to_numpy(value)), self.dtype)

    def _usable(self, name: str, value: Any) -> bool:
        """Whether an array can be stored without a copy."""
        if isinstance(value, Quantized):
            return self.engine.name != "torch"
        if is_torch(value) != (self.engine.name == "torch"):
            return False
        if is_torch(value):
            plain = value.is_contiguous() and not value.requires_grad and str(value.dtype) == f"torch.{self.dtype}"
        else:
            plain = type(value) is np.ndarray and value.dtype == self.dtype and value.flags.carray
        others = (x for other, x in self.items() if other != name and not isinstance(x, Quantized))
        return plain and not _mapped(value) and not any(_overlap(value, x) for x in others)


def _overlap(a: Array, b: Array) -> bool:
    return np.may_share_memory(to_numpy(a), to_numpy(b))


def _mapped(x: Any) -> bool:
    """Whether an array is memory-mapped: writing to it could change the file."""
    while isinstance(x, np.ndarray):
        if isinstance(x, np.memmap):
            return True
        x = x.base
    return isinstance(x.obj if isinstance(x, memoryview) else x, mmap.mmap)
