"""A backward function: its arguments by name where the names say it, else in the order of the layer's contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from onfoot.check.forms.compiled import CompiledForm, uses_jax
from onfoot.check.forms.form import Expected
from onfoot.check.forms.names import UPSTREAM, Matching, match, option_named
from onfoot.check.forms.results import named

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function without *args and **kwargs; None if they cannot be known."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return {name: p for name, p in found.items() if p.kind not in VARIABLE}


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.default is p.empty]


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether the function has *args."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_POSITIONAL for p in found)


class Call:
    """How a function is called: which argument or option each of its parameters gets.

    If a name says nothing, only the upstream gradient is taken by its name, and the rest in the layer's order.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[str, ...], options: Mapping[str, Any]) -> None:
        self.function, self.arguments = function, arguments
        parameters = parameters_of(function) or {}
        names, needed = list(parameters), required(parameters)
        self.matching = match(needed, arguments, options)
        if self.matching.unknown and len(needed) == len(arguments):
            upstream = [n for n, a in self.matching.arguments.items() if a == UPSTREAM]
            rest = [n for n in needed if n not in upstream]
            inputs = [a for a in arguments if a != UPSTREAM or not upstream]
            found = dict(zip(rest, inputs, strict=True)) | dict.fromkeys(upstream, UPSTREAM)
            self.matching = Matching(found)
        left = tuple(a for a in arguments if a not in self.matching.arguments.values())
        more = match([n for n in names if n not in needed], left, options)
        found = {**self.matching.arguments, **more.arguments}
        self.matching.options.update(more.options)
        self.matching.arguments = {n: found[n] for n in names if n in found}
        self.positional = [n for n in names if parameters[n].kind in POSITIONAL]

    @property
    def complete(self) -> bool:
        """Whether every parameter without a default is explained."""
        return not self.matching.unknown

    @property
    def in_order(self) -> bool:
        """Whether calling the function with all arguments in the layer's order would be the same."""
        return tuple(self.matching.arguments.values()) == self.arguments

    def __call__(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        given = {name: values[argument] for name, argument in self.matching.arguments.items() if argument in values}
        given |= {name: options[option] for name, option in self.matching.options.items() if option in options}
        first = []  # by position as far as it goes: a wrapper may have *args where its function has names
        for name in self.positional:
            if name not in given:
                break
            first.append(given.pop(name))
        return self.function(*first, **given)


class BackwardFunction(CompiledForm):
    """`f(x, weight, bias, dout)` and the like."""

    def __init__(self, function: Callable[..., Any], expected: Expected, call: Call | None) -> None:
        super().__init__(expected)
        self.function, self.call = function, call
        names = call.matching.arguments.values() if call else ()
        self.takes_upstream = UPSTREAM not in expected.arguments or not call or UPSTREAM in names
        self.takes = list(names) if call else None
        if call and not call.in_order:
            self.sentence = f"arguments by name: {call.matching.sentence}"
        parameters = parameters_of(function) or {}
        if uses_jax(function):
            self.kinds = ("jax", "numpy")
        self.options = {n: o for n in parameters if (o := option_named(n, expected.options)) is not None}

    def _called(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        values = {**inputs, UPSTREAM: upstream} if UPSTREAM in self.expected.arguments else inputs
        if self.call is not None:
            returned = self.call(values, options)
        else:
            chosen = {name: options[option] for name, option in self.options.items() if option in options}
            returned = self.function(*(values[name] for name in self.expected.arguments), **chosen)
        return named(returned, self.expected)


def backward_function(function: Callable[..., Any], expected: Expected) -> BackwardFunction | None:
    """The form of a backward function; None if it has no upstream gradient, but the layer does."""
    parameters = parameters_of(function)
    if parameters is None or takes_any(function):
        return BackwardFunction(function, expected, None)
    call = Call(function, expected.arguments, expected.options)
    needs_upstream = UPSTREAM in expected.arguments and not expected.upstream_optional
    if call.complete and call.matching.arguments:
        if not needs_upstream or UPSTREAM in call.matching.arguments.values():
            return BackwardFunction(function, expected, call)
        return None
    n = len(expected.arguments)
    positional = [name for name, p in parameters.items() if p.kind in POSITIONAL]
    if len(required(parameters)) <= n <= len(positional):
        return BackwardFunction(function, expected, None)
    return None
