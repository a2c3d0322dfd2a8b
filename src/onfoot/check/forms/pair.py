"""A forward and a backward function: `y, saved = f_forward(x, ...)` and `f_backward(dy, saved)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from onfoot.check.forms.compiled import CompiledForm, uses_jax
from onfoot.check.forms.differentiable import has_vjp
from onfoot.check.forms.form import Expected, Form, FormError
from onfoot.check.forms.function import Call, backward_function, parameters_of, required
from onfoot.check.forms.names import OUTPUT_NAMES, SAVED_NAMES, UPSTREAM, match, means_upstream, normal
from onfoot.check.forms.results import named

WORDS = (("backward", "forward"), ("bwd", "fwd"), ("backprop", "forward"), ("_grad", ""), ("bprop", "fprop"))


class Pair(CompiledForm):
    """The forward pass saves what the backward pass needs."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], expected: Expected) -> None:
        super().__init__(expected)
        self.forward, self.backward = forward, backward
        self.call = Call(forward, expected.inputs, expected.options)
        for name in list(self.call.matching.unknown):
            if normal(name).endswith(("param", "params", "config", "cfg")):  # CS231n's ln_param: a dict of options
                self.call.matching.unknown.remove(name)
                self.call.matching.options[name] = name
        if not self.call.complete:
            raise FormError(
                f"the forward pass takes {', '.join(parameters_of(forward) or ())}; which of them are the layer's "
                f"({', '.join(expected.inputs)})?"
            )
        self.takes = list(self.call.matching.arguments.values())
        if uses_jax(backward) or uses_jax(forward):
            self.kinds = ("jax", "numpy")
        self.names = required(parameters_of(backward) or {})
        listed = ", ".join(self.call.matching.arguments.values())
        by_name = (
            "" if self.call.matching.sentence == listed == ", ".join(expected.inputs) else self.call.matching.sentence
        )
        self.sentence = f"a pair, y, saved = {_name(forward)}(…) and {_name(backward)}({', '.join(self.names)})" + (
            f"; arguments by name: {by_name}" if by_name else ""
        )

    def _called(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        settings = {name: dict(options) for name in self.call.matching.options.values() if name not in options}
        returned = self.call(inputs, {**options, **settings})
        if has_vjp(returned):
            return named(returned[1](upstream), self.expected)
        if not isinstance(returned, (tuple, list)) or len(returned) < 2:
            raise FormError(
                f"{_name(self.forward)} returns no second value for {_name(self.backward)}; expected y, saved"
            )
        return self._named(self.backward(*self._arguments(inputs, upstream, returned)))

    def _arguments(self, inputs: Mapping[str, Any], upstream: Any, returned: Any) -> list[Any]:
        """The arguments of the backward pass: upstream gradient, inputs by name, and what the forward pass saved."""
        y, *saved = returned
        if len(self.names) == 2:
            first = means_upstream(self.names[0]) or not means_upstream(self.names[1])
            one = saved[0] if len(saved) == 1 else tuple(saved)
            return [upstream, one] if first else [one, upstream]
        found = match(self.names, (*self.expected.inputs, UPSTREAM))
        left = list(saved)
        values = []
        for name in self.names:
            argument = found.arguments.get(name)
            if argument == UPSTREAM:
                values.append(upstream)
            elif argument is not None:
                values.append(inputs[argument])
            elif normal(name) in OUTPUT_NAMES:
                values.append(y)
            elif left:
                values.append(left.pop(0))
            else:
                raise FormError(f"{_name(self.backward)} needs {name}, which the forward pass does not return")
        return values

    def _named(self, returned: Any) -> Any:
        """Gradients in the order of the forward's arguments."""
        names = list(self.call.matching.arguments.values())
        returned = named(returned, self.expected)
        if isinstance(returned, (tuple, list)) and len(returned) == len(names) != len(self.expected.gradients):
            pairs = zip((self.expected.gradient_of(n) for n in names), returned, strict=True)
            return {g: value for g, value in pairs if g is not None}
        return returned


def pair(forward: Any, backward: Any, expected: Expected) -> Form:
    """The form of a forward and a backward function; the forward pass is not needed if nothing is saved."""
    names = required(parameters_of(backward) or {})
    if len(names) > 2 or not needs_saved(names):
        alone = backward_function(backward, expected)
        if alone is not None and (alone.call is None or not alone.call.matching.unknown):
            if alone.call is not None:
                alone.sentence = alone.sentence or "the backward function of a pair, which needs nothing saved"
            return alone
    return Pair(forward, backward, expected)


def needs_saved(names: list[str]) -> bool:
    """Whether the parameters are an upstream gradient and what a forward pass saved."""
    if len(names) != 2:
        return any(normal(name) in SAVED_NAMES for name in names)
    upstream = [name for name in names if means_upstream(name)]
    return any(normal(name) in SAVED_NAMES for name in names) and len(upstream) <= 1


def forward_beside(backward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The forward function that belongs to a backward function, by its name, in the same file."""
    name = getattr(backward, "__name__", "")
    module = sys.modules.get(getattr(backward, "__module__", "") or "")
    names: Mapping[str, Any] = getattr(backward, "__globals__", None) or (vars(module) if module else {})
    for word, other in WORDS:
        if word in name:
            found = names.get(name.replace(word, other))
            if callable(found) and found is not backward:
                return found
    return None


def pair_in(module: ModuleType | Mapping[str, Any], layer: str) -> tuple[Any, Any] | None:
    """The forward and backward functions of a module, those of the layer first."""
    names = vars(module) if isinstance(module, ModuleType) else module
    for word, other in WORDS[:3]:
        for backward in (f"{layer}_{word}", word, *(n for n in names if n.endswith(word) and not n.startswith("_"))):
            forward = names.get(backward.replace(word, other))
            if callable(names.get(backward)) and callable(forward):
                return forward, names[backward]
    return None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
