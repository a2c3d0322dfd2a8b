"""JAX: whether code uses it, and calls compiled as a whole; one by one, its operations are compiled for every shape."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from onfoot.check.forms.form import Form

QUICKLY = {"xla_backend_optimization_level": 0}  # each shape is computed twice; most of the time is compilation
DEPTH = 4  # of functions that call one another


def uses_jax(held: Any, depth: int = DEPTH) -> bool:
    """Whether a function or class names JAX in its code, or calls what does in the same file."""
    if type(held).__module__.split(".")[0] in ("jax", "jaxlib"):
        return True
    if isinstance(held, type):
        return any(uses_jax(one, depth) for one in vars(held).values() if isinstance(one, FunctionType | staticmethod))
    function = getattr(held, "__func__", held)
    if isinstance(function, functools.partial):
        function = function.func
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
    if not isinstance(code, CodeType) or not isinstance(names, dict) or not depth:
        return False
    found = [names[name] for name in _names(code) if name in names and names[name] is not held]
    if any(isinstance(one, ModuleType) and one.__name__.split(".")[0] == "jax" for one in found):
        return True
    return any(uses_jax(one, depth - 1) for one in found if callable(one))


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, those of its inner functions included."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*(_names(one) for one in inner))


class Compiled:
    """A function of (inputs, upstream gradient), compiled by JAX if it can be traced, and else called as it is."""

    def __init__(self, function: Callable[[Mapping[str, Any], Any], Any]) -> None:
        import jax

        self.function = function
        try:
            self.jitted = jax.jit(function, compiler_options=QUICKLY)
        except TypeError:  # an older JAX
            self.jitted = jax.jit(function)
        self.traces = True

    def __call__(self, inputs: Mapping[str, Any], upstream: Any) -> Any:
        if self.traces:
            with contextlib.suppress(Exception):
                return self.jitted(dict(inputs), upstream)
        found = self.function(inputs, upstream)
        self.traces = False  # it fails only where it is traced
        return found


class CompiledForm(Form):
    """A form that is called in one way with all kinds of arrays; with those of JAX, the call is compiled."""

    compiled: Compiled | None = None

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        if arrays == "jax":
            if self.compiled is None:
                self.compiled = Compiled(lambda inputs, upstream: self._called(dict(inputs), upstream, options))
            return self.compiled(inputs, upstream)
        return self._called(inputs, upstream, options)

    def _called(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        """Returns the gradients: in the layer's order, or a dict by name."""
        raise NotImplementedError
