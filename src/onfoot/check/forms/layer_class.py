"""A class with forward and backward methods, or an instance: weights and gradients are found in its attributes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from onfoot.arrays import is_torch
from onfoot.check.forms.construct import construct
from onfoot.check.forms.form import Expected, Form, FormError
from onfoot.check.forms.function import Call, parameters_of, required
from onfoot.check.forms.names import OUTPUT_NAMES, UPSTREAM, match, means_upstream, normal
from onfoot.check.forms.results import attributes_of, from_object, is_array, named

FORWARD, BACKWARD = ("forward", "__call__", "fwd", "fprop", "call"), ("backward", "bwd", "backprop", "bprop", "grad")
CONTAINERS = ("params", "parameters", "weights", "param", "_params", "p")
CONTEXT = ("ctx", "context")


class Context:
    """A stand-in for autograd's ctx, for classes that are written in its style without PyTorch."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def methods(held: Any) -> tuple[str, str] | None:
    """The names of the forward and the backward method, if there are both."""
    kind = held if isinstance(held, type) else type(held)
    defined = {n for base in kind.__mro__[:-1] for n in vars(base)}
    found = [
        next((n for n in names if n in defined and callable(getattr(kind, n, None))), None)
        for names in (FORWARD, BACKWARD)
    ]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


class LayerClass(Form):
    """`class Mine` with forward(x) and backward(dout)."""

    def __init__(self, held: Any, expected: Expected, names: tuple[str, str]) -> None:
        super().__init__(expected)
        self.held, self.is_class, (self.forward, self.backward) = held, isinstance(held, type), names
        self.name = held.__name__ if self.is_class else type(held).__name__
        self.sentence = f"a class with {names[0]} and {names[1]}, {self.name}"
        if not self.is_class:
            widths = sorted(
                {int(x.shape[0]) for x in attributes_of(held).values() if is_array(x) and len(x.shape) == 1}
            )
            self.own_sizes = {"width": widths} if widths else None

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        how, taken = self.name, list[str]()
        if self.is_class:
            layer, how, taken = construct(self.held, self.expected, inputs, options)
        else:
            layer = copy.deepcopy(self.held)
        context = Context()
        forward = _bound(getattr(layer, self.forward), context)
        call = Call(forward, self.expected.inputs, self.expected.options)
        if not call.complete:
            unknown = ", ".join(call.matching.unknown)
            raise FormError(
                f"{self.name}.{self.forward} needs {unknown}, which is no input of the layer {self.expected.layer}"
            )
        passed = list(call.matching.arguments.values())
        left = [n for n in self.expected.inputs if n not in passed and n not in taken]
        places = set_weights(layer, {n: inputs[n] for n in left})
        listed = any(isinstance(getattr(layer, n, None), list) for n in CONTAINERS)
        self.takes = None if listed else [*passed, *taken, *places.values()]
        y = call(inputs, options)
        returned = self._call_backward(layer, context, inputs, upstream, y)
        found = self._read(layer, returned, passed, places)
        self._say(how, call, places)
        return found

    def _call_backward(self, layer: Any, context: Context, inputs: Mapping[str, Any], upstream: Any, y: Any) -> Any:
        backward = _bound(getattr(layer, self.backward), context)
        names = required(parameters_of(backward) or {})
        if len(names) <= 1:
            return backward(upstream) if UPSTREAM in self.expected.arguments and names else backward()
        found = match(names, (*self.expected.inputs, UPSTREAM))
        several = isinstance(y, (tuple, list))
        saved = list(y[1:]) if several else []
        values = []
        for name in names:
            argument = found.arguments.get(name)
            if argument == UPSTREAM or (argument is None and means_upstream(name)):
                values.append(upstream)
            elif argument is not None:
                values.append(inputs[argument])
            elif normal(name) in OUTPUT_NAMES:
                values.append(y[0] if several else y)
            elif saved:
                values.append(saved.pop(0))
            else:
                raise FormError(f"{self.name}.{self.backward} needs {name}, which is not known")
        return backward(*values)

    def _read(self, layer: Any, returned: Any, passed: list[str], places: Mapping[str, str]) -> Any:
        """The gradients: those returned, in the order of forward's arguments, and those in attributes."""
        expected = self.expected
        returned = named(returned, expected)
        found: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            found = dict(returned)
        elif returned is not None:
            own = [g for n in passed if (g := expected.gradient_of(n)) is not None]
            order = [*own, *(g for g in expected.gradients if g not in own)]
            values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
            if len(values) > len(order):
                return returned
            found = {g: value for g, value in zip(order, values, strict=False) if value is not None}
        missing = [g for g in expected.gradients if g not in found]
        found |= from_object(layer, expected, missing, places)
        if not found:
            raise FormError(
                f"no gradient was found: {self.name}.{self.backward} returns None, and no attribute is called "
                f"{', '.join(missing)} or the like"
            )
        return found

    def _say(self, how: str, call: Call, places: Mapping[str, str]) -> None:
        renamed = [f"{n} = {a}" for n, a in (*call.matching.arguments.items(), *places.items()) if n != a]
        kind = f"a class with {self.forward} and {self.backward}, {how}"
        self.sentence = kind + (f"; by name: {', '.join(renamed)}" if renamed else "")


def _bound(method: Any, context: Context) -> Any:
    """The method without its ctx, if it has one."""
    try:
        first = next(iter(inspect.signature(method).parameters.values()), None)
    except (TypeError, ValueError):
        return method
    if first is None or normal(first.name) not in CONTEXT:
        return method

    def bound(*given: Any, **more: Any) -> Any:
        return method(context, *given, **more)

    rest = list(inspect.signature(method).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
    return bound


def set_weights(layer: Any, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Puts inputs into the attributes or dicts that hold an object's weights; returns attribute -> argument.

    An attribute is recognised by its name, then by its shape. None counts as an attribute that is set later.
    """
    weights = {n: x for n, x in inputs.items() if is_array(x)}
    places: dict[str, str] = {}
    for holder in (attributes_of(layer), *(_dicts(layer))):
        free = {n: v for n, v in holder.items() if isinstance(n, str) and (_holds_array(v) or v is None)}
        left = tuple(n for n in weights if n not in places.values())
        matched = match(list(free), left).arguments
        for n, v in free.items():  # by shape
            rest = [a for a in left if a not in matched.values()]
            same = [a for a in rest if n not in matched and v is not None and _shape(v) == tuple(weights[a].shape)]
            if same:
                matched[n] = same[0]
        for n, argument in matched.items():
            _put(layer, holder, n, weights[argument])
            places[n] = argument
    for listed in (getattr(layer, n, None) for n in CONTAINERS):
        if isinstance(listed, list) and all(_holds_array(v) for v in listed) and len(listed) == len(weights):
            for i, (argument, x) in enumerate(weights.items()):
                if argument not in places.values() and _shape(listed[i]) == tuple(x.shape):
                    listed[i] = _like(listed[i], x)
    return places


def _dicts(layer: Any) -> list[dict[str, Any]]:
    return [found for n in CONTAINERS if isinstance(found := getattr(layer, n, None), dict)]


def _holds_array(value: Any) -> bool:
    return is_array(value) or is_array(getattr(value, "data", None)) or is_array(getattr(value, "value", None))


def _shape(value: Any) -> tuple[int, ...]:
    held: Any = value if is_array(value) else getattr(value, "data", None)
    return tuple((held if is_array(held) else value.value).shape)


def _put(layer: Any, holder: dict[str, Any], name: str, x: Any) -> None:
    before = holder[name]
    if before is not None and not is_array(before):
        setattr(before, "data" if is_array(getattr(before, "data", None)) else "value", x)
    elif holder is getattr(layer, "__dict__", None) or name not in attributes_of(layer):
        holder[name] = _like(before, x)
    else:
        setattr(layer, name, _like(before, x))


def _like(before: Any, x: Any) -> Any:
    """The array in the kind of the one that it replaces."""
    return np.asarray(x) if isinstance(before, np.ndarray) and is_torch(x) else x
